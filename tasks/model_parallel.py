"""Turns expert, context or pipeline parallelism on for a stage: `parallel: {processes: 4, expert: 4, context: 2}`.

    layout = apply_parallelism(model, config.parallel)       # before the optimizer is built
    sampler.batch(first, rows, layout.data_rank, layout.data_world)        # ranks that share sequences get the same rows
    Trainer(..., layout=layout)
    model = layout.whole_model(model)                        # all ranks; then the writer saves it

Ranks are numbered node by node. A context group is `context` neighbouring ranks, an expert group `expert` neighbouring ranks;
the two may overlap in any way. A pipeline is `pipeline` neighbouring ranks. What the trainer asks of a layout is below; a
plain one changes nothing.

Check it:  python -m pytest tests/tasks/test_model_parallel.py
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from model.all_to_all import Route, make_route
from model.context_groups import ContextPool
from model.context_parallel import Context, set_context
from model.expert_parallel import (
    LocalExperts,
    is_expert,
    local_experts,
    placed,
    shard_experts,
    whole_experts,
)
from model.pipeline import Grid
from model.pipeline_parts import Parts
from model.state_parts import Piece, as_source, load_into, share_out
from model.transformer import GlmMoeDsa
from tasks.parallel import Parallel, ParallelSettings, current
from tasks.sequence_balance import Cost, plan_groups, share

IGNORE = -100
NOWHERE = 1 << 30


@dataclass
class Layout:
    """Which part of data, sequences and experts this rank has. replicas: the ranks with the same experts (None: all)."""

    data_rank: int = 0
    data_world: int = 1
    context: Context | None = None
    experts: Route | None = None
    replicas: dist.ProcessGroup | None = None
    replicas_control: dist.ProcessGroup | None = None
    pool: ContextPool | None = None  # context groups that change from step to step, of at most `largest` ranks
    largest: int = 1
    parts: Parts | None = None  # the stages of a pipeline that this rank keeps

    @property
    def copies(self) -> int:
        """Ranks that are given the same rows (in the step at hand)."""
        if self.pool is not None:
            return self.pool.sharing
        if self.parts is not None:
            return self.parts.grid.pipeline
        return self.context.ranks if self.context else 1

    def deal(self, model: nn.Module, lengths: Sequence[int], cost: Cost, balance: str) -> Sequence[int]:
        """Which of a step's sequences this rank works on, alone or with its context group. All ranks call it, once a step.

        With groups that change, data_rank and data_world are from here on the group's; a rank without one has no data.
        """
        if self.pool is None:
            return share(lengths, cost, self.data_world, balance)[self.data_rank]
        sizes = [2**k for k in range(self.largest.bit_length()) if 2**k <= self.largest]
        groups = plan_groups(lengths, dist.get_world_size(), cost, sizes=sizes)
        mine = self.pool.enter(model, groups)
        places = [i for i, group in enumerate(groups) if dist.get_rank() in group.ranks]
        self.data_rank, self.data_world = places[0] if places else NOWHERE, len(groups)
        return mine

    def weighed(self, batches: Sequence[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
        """Micro-batches whose weight in the step is split among the ranks of a changing group: over all ranks it counts once."""
        if self.pool is None:
            return list(batches)
        counts = [float((batch["targets_bs"] != IGNORE).sum()) / self.copies for batch in batches]
        return [batch | {"weights": torch.tensor([count])} for batch, count in zip(batches, counts, strict=True)]

    @property
    def together(self) -> bool:
        """Whether every forward pass needs all ranks: they must run as many, in evaluations too."""
        return self.experts is not None

    def owns_part(self, name: str) -> bool:
        """Whether ranks hold different parts of this tensor."""
        return self.parts is not None or (self.experts is not None and is_expert(name))

    @property
    def holders(self) -> tuple[int, int]:
        """(this rank's place, number) of the ranks with the same experts."""
        return (0, 1) if self.replicas is None else (dist.get_rank(self.replicas), self.replicas.size())

    def owned_weights(self, model: nn.Module) -> list[Piece]:
        """What this rank writes of the weights: its share of what all ranks hold, and of its experts among their holders."""
        if self.parts is not None:
            return self.parts.pieces(model.state_dict())
        state, ranks = model.state_dict(), current()
        pieces = share_out({n: t for n, t in state.items() if not self.owns_part(n)}, ranks.rank, ranks.world)
        if self.experts is not None:
            apart = {n: t for n, t in state.items() if self.owns_part(n)}
            pieces += [placed(piece, self.experts) for piece in share_out(apart, *self.holders)]
        return pieces

    def load_weights(self, model: nn.Module, source: Mapping[str, Tensor]) -> None:
        """Fill the model from a whole one's tensors; of a source, this rank reads what it holds. ValueError when they differ."""
        if self.parts is not None:
            self.parts.load(source)
            return
        source = as_source(source)
        load_into(model.state_dict(), source if self.experts is None else LocalExperts(source, self.experts))

    def whole(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Model or optimizer tensors as one process has them. All ranks call it."""
        return tensors if self.experts is None else whole_experts(tensors, self.experts)

    def even(self, batches: Sequence[dict[str, Tensor]], ranks: Parallel) -> list[dict[str, Tensor]]:
        """As many micro-batches as the rank with most has, filled up with copies that have no target. ValueError without any."""
        batches = list(batches)
        if not self.together:
            return batches
        counts = ranks.exchange(len(batches))
        if min(counts) == 0:
            raise ValueError(
                f"parallel.expert: every rank needs rows in every step, the ranks have {counts} micro-batches"
            )
        empty = batches[-1] | {"targets_bs": torch.full_like(batches[-1]["targets_bs"], IGNORE)}
        return batches + [empty] * (max(counts) - len(batches))

    @contextlib.contextmanager
    def evaluating(self, model: nn.Module) -> Iterator[None]:
        """Sequences are whole on every rank while open, and a pipeline's model on the writer: evaluations look at all hidden
        states, and the writer runs them alone. All ranks enter it."""
        if self.parts is not None:
            with self.parts.lent():
                yield
            return
        context = getattr(model, "context", None)
        if context is None:
            yield
            return
        set_context(model, None)
        try:
            yield
        finally:
            set_context(model, context)

    def whole_sequences(self, model: nn.Module) -> None:
        """From here on every rank has whole sequences: what comes after training measures without the other ranks."""
        if self.context is not None or self.pool is not None:
            set_context(model, None)

    def whole_model(self, model: GlmMoeDsa) -> GlmMoeDsa:
        """A model of one process with these weights, for saving. All ranks call it."""
        self.whole_sequences(model)
        if self.parts is not None:
            self.parts.join()
        if self.experts is None:
            return model
        with torch.device("meta"):  # the tensors of the state take the parameters' places
            whole = GlmMoeDsa(model.cfg)
        whole.load_state_dict(dict(self.whole(model.state_dict())), assign=True)
        return whole


@contextlib.contextmanager
def measuring(model: nn.Module) -> Iterator[bool]:
    """While open, whether this rank can measure the model: all ranks (together), or the writer alone, to which a pipeline lends
    the whole. All ranks enter it."""
    if model.parts is None:
        yield True
        return
    with model.parts.lent():
        yield model.parts.rank == 0


def _divides(key: str, part: int, world: int) -> None:
    if world % part:
        raise ValueError(
            f"parallel.{key} is {part}, which does not divide the {world} ranks of this run (parallel.processes, or an outer "
            "launcher's WORLD_SIZE)"
        )


def _route(part: int, rank: int, settings: ParallelSettings) -> Route:
    """This rank's group of `part` neighbours; two stages only where the group spans several whole nodes."""
    first = rank // part * part
    per_node = settings.per_node or part
    if settings.exchange_stages == 2 and part > per_node and part % per_node:
        raise ValueError(f"parallel.per_node is {per_node}, which does not divide a group of {part} ranks into nodes")
    nodes = part > per_node and part % per_node == 0
    stages = settings.exchange_stages if nodes else 1
    return make_route(list(range(first, first + part)), per_node if nodes else None, stages)


def _pipeline(model: GlmMoeDsa, settings: ParallelSettings, ranks: Parallel, section: Mapping[str, Any]) -> Layout:
    from tasks.pipeline_engine import place_stages  # it imports the trainer, which imports this module

    _divides("pipeline", settings.pipeline, ranks.world)
    specs = place_stages(model.cfg, settings, section)
    ranks.check_same(model)  # while all ranks have all of it
    grid = Grid.create(settings.pipeline)
    model.parts = Parts(model, specs, grid, ranks.control)
    return Layout(grid.replica, grid.data, parts=model.parts)


def apply_parallelism(
    model: GlmMoeDsa,
    settings: ParallelSettings,
    ranks: Parallel | None = None,
    section: Mapping[str, Any] | None = None,
) -> Layout:
    """Spread the model's experts, sequences or layers as the `parallel` settings say. All ranks call it.

    section: what a pipeline's stages are balanced for, as tasks.pipeline_engine.place_stages takes it. ValueError when sizes
    do not divide, or the model or engine cannot be spread.
    """
    ranks = ranks or current()
    if settings.pipeline > 1:
        return _pipeline(model, settings, ranks, section or {"name": "", "seq_len": 1024, "mtp": {"depth": 1}})
    _divides("expert", settings.expert, ranks.world)
    variable = settings.context > 1 and settings.context_groups == "variable"
    shared = 1 if variable else settings.context
    _divides("context", shared, ranks.world)
    layout = Layout(ranks.rank // shared, ranks.world // shared)
    if variable:
        layout.pool, layout.largest = ContextPool(settings.context_form), settings.context
    if settings.expert > 1:
        if settings.engine != "native":
            raise ValueError(f"parallel.expert needs parallel.engine: native, it is {settings.engine!r}")
        layout.experts = _route(settings.expert, ranks.rank, settings)
        local_experts(model.cfg.n_routed_experts, layout.experts)
        shard_experts(model, layout.experts)
        same = list(range(ranks.rank % settings.expert, ranks.world, settings.expert))
        if len(same) > 1:
            layout.replicas = dist.new_group(same, use_local_synchronization=True)
            layout.replicas_control = dist.new_group(same, backend="gloo", use_local_synchronization=True)
    if shared > 1:
        layout.context = Context(_route(settings.context, ranks.rank, settings), settings.context_form)
        set_context(model, layout.context)
    return layout
