"""Training steps over pipeline ranks: `parallel: {processes: 4, pipeline: 2, virtual: 2}` in a stage's parameters.

    layout = apply_parallelism(model, settings)                      # every rank keeps its stages (model/pipeline_parts.py)
    optimizer = build_optimizer(model, ...)
    engine = make_engine(model, optimizer, ranks, settings, layout)  # a PipelineEngine; every call on all ranks
    logs, counts = engine.run_step(objective, batches, step)         # forward and backward of the step's micro-batches
    engine.clip_groups(1.0); engine.set_lr_scale(0.5); engine.step(); engine.zero_grad()

Each rank optimises the parameters that it keeps. Those that two places keep (the embedding, for the MTP block) have the same
gradient and state on both. Replicas of the pipeline (more processes than `pipeline`) share the step's micro-batches, and the
ranks with the same stages share their optimizer as in model/muon_sharded.py: gradients go to their owners, with
`gradient_shards` as soon as a stage's are ready. The numbers are those of one process up to the order of sums.

Check it:  python -m pytest tests/tasks/test_pipeline_engine.py
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from model.config import ModelConfig
from model.muon import MuonSplit
from model.muon_sharded import BUCKET_BYTES, ShardedMuonSplit
from model.pipeline import Pipeline, gather_json
from model.pipeline_gradients import ShardedGradients
from model.pipeline_parts import Parts
from model.pipeline_place import StageSpec
from model.pipeline_schedule import Schedule, build, with_offload, with_reductions
from model.pipeline_stage import Batch, Work
from model.state_parts import Chosen, Piece, as_source, gather_pieces
from tasks.parallel import ParallelSettings, Part
from tasks.parallel_engine import norm_name, part_of
from tasks.pipeline_balance import stage_placement
from tasks.settings import LoopSettings
from tasks.trainer import IGNORE, batch_count, computing_in


def place_stages(cfg: ModelConfig, settings: ParallelSettings, section: Mapping[str, Any]) -> list[StageSpec]:
    """Layers per pipeline stage, balanced by their operations as `python -m tasks plan` counts them.

    section: `name`, `seq_len` and `mtp: {depth}` of the training stage. ValueError when there are more stages than layers.
    """
    techniques = frozenset({"flexible_mtp"} if settings.flexible_mtp else ())
    try:
        return stage_placement(cfg, section, settings.pipeline * settings.virtual, techniques)
    except ValueError as error:
        raise ValueError(
            f"parallel.pipeline is {settings.pipeline} and parallel.virtual {settings.virtual}: {error}"
        ) from None


def rounded(settings: ParallelSettings, micros: int) -> int:
    """The next number of micro-batches that the schedule takes."""
    group = settings.pipeline if settings.virtual > 1 and settings.schedule == "interleaved" else 1
    return -(-micros // group) * group


def schedule_of(settings: ParallelSettings, micros: int, shards: bool) -> Schedule:
    """The schedule of a step with that many micro-batches. shards: with reductions of gradients to their owners."""
    name = "zero_bubble" if settings.deferred_weight_gradient else settings.schedule
    schedule = build(name, ranks=settings.pipeline, micros=micros, virtual=settings.virtual)
    schedule = with_reductions(schedule) if shards else schedule
    return with_offload(schedule) if settings.activation_offload else schedule


class PipelineEngine:
    """A rank's stages, their optimizer, and the steps of both; has the face of `tasks.parallel_engine.NativeEngine`.

    optimizer: of the whole model after `parts` has freed what other ranks keep. ValueError names what does not fit together.
    """

    def __init__(
        self,
        optimizer: MuonSplit,
        parts: Parts,
        settings: ParallelSettings,
        loop: LoopSettings | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        loop = loop or LoopSettings()
        if optimizer.cfg.train == "indexer":
            raise ValueError(
                f"parallel.pipeline is {settings.pipeline}: the indexer's warm-up sends no gradients between stages; "
                "parallel.pipeline: 1 in this stage"
            )
        if loop.recompute == "selective":
            raise ValueError(
                f"loop.recompute is selective and parallel.pipeline is {settings.pipeline}: a pipeline's stages are "
                "recomputed whole (loop.recompute: block) or not at all (none)"
            )
        if loop.offload:
            raise ValueError(
                f"loop.offload and parallel.pipeline ({settings.pipeline}): activations that wait between stages go to "
                "the host by parallel.activation_offload; set loop.offload: false"
            )
        grid = parts.grid
        self.settings, self.parts, self.grid = settings, parts, grid
        self.optimizer: MuonSplit | ShardedMuonSplit = part_of(optimizer, parts.takes)
        self.sharded: ShardedMuonSplit | None = None
        if grid.data > 1:
            self.sharded = ShardedMuonSplit(self.optimizer, grid.data_group, grid.data_control, bucket_bytes)
            self.optimizer = self.sharded
        self.precision, self.recompute = getattr(torch, loop.precision), loop.recompute == "block"
        self.cfg, self.model_config = optimizer.cfg, optimizer.model_config
        self.param_groups = self.optimizer.param_groups
        local = parts.local()
        self.pipe = Pipeline(
            parts.model.cfg, self._schedule(rounded(settings, 1)), parts.specs, grid, parts.device, local, self.sharded
        )

    def _schedule(self, micros: int) -> Schedule:
        shards = self.settings.gradient_shards and self.sharded is not None  # one replica has nobody to share with
        return schedule_of(self.settings, micros, shards)

    # ---- a step

    def run_step(self, objective: Any, batches: Sequence[Batch], step: int) -> tuple[dict[str, float], list[Tensor]]:
        """(logs with `loss`, tokens per expert of each MoE layer): means and sums over the micro-batches of all ranks.

        Every rank of a replica is given the same micro-batches; replica r of n has rows r, r + n, ... of the step's. Every
        term of the loss is its mean over the step, as in tasks/trainer.py. objective: one with `stage_work` and `head_loss`.
        """
        if not hasattr(objective, "stage_work"):
            raise ValueError(
                f"parallel.pipeline is {self.settings.pipeline}: {_name(objective)} is not cut into stages; "
                "parallel.pipeline: 1 in this stage"
            )
        shares, weights, micros, shape = self._shares(objective, batches, step)
        # Replicas reduce gradients together, so that all run as many; what fills up has no target and weighs nothing.
        missing = rounded(self.settings, micros) - len(batches)
        batches = [*batches, *[self._empty(batches, shape)] * missing]
        shares, weights = [*shares, *[0.0] * missing], [*weights, *[{}] * missing]
        if len(batches) != self.pipe.schedule.micros:
            self.pipe.set_schedule(self._schedule(len(batches)))
        work = Work(
            head=functools.partial(_head, objective, step),
            rows_of=(self.grid.replica, self.grid.data),
            recompute=self.recompute,
            **objective.stage_work(step),
        )
        with computing_in(self.pipe.local, self.precision):
            result = self.pipe.run(work, batches, shares, self.precision, weights)
        return {"loss": result.loss, **result.logs}, result.router_counts

    def _shares(self, objective: Any, batches: Sequence[Batch], step: int) -> tuple[list, list, int, list[int]]:
        """(each micro-batch's share of the step, weights of its other terms, most micro-batches of a replica, their shape)."""
        counts = [batch_count(b) for b in batches]
        terms = [objective.terms(b, step) if hasattr(objective, "terms") else {} for b in batches]
        own: Counter[str] = Counter({"": sum(counts)})
        for one in terms:
            own.update(one)
        shape = list(batches[-1]["input_ids_bs"].shape) if batches else []
        everywhere = gather_json([own, len(batches), shape], self.parts.device)
        names = {name for found, _, _ in everywhere for name in found}
        sums = {k: sum(found.get(k, 0.0) for found, _, _ in everywhere) / self.grid.pipeline for k in names}
        if sums[""] <= 0:
            raise ValueError(f"step {step}: the batch has no target to learn from")
        shares = [count / sums[""] for count in counts]
        weights = [
            {k: n / sums[k] / share for k, n in one.items() if n and share}
            for one, share in zip(terms, shares, strict=True)
        ]
        return shares, weights, *max((micros, shape) for _, micros, shape in everywhere)

    def _empty(self, batches: Sequence[Batch], shape: Sequence[int]) -> Batch:
        """A micro-batch without targets, like this replica's last one; a replica without rows takes another's shape."""
        if batches:
            return dict(batches[-1]) | {"targets_bs": torch.full_like(batches[-1]["targets_bs"], IGNORE)}
        ids_bs = torch.zeros((1, shape[1]), dtype=torch.int64, device=self.parts.device)
        return {"input_ids_bs": ids_bs, "targets_bs": torch.full_like(ids_bs, IGNORE)}

    def _reduce(self) -> None:
        """Gradients of all replicas to their owners; those of parameters that several stages use are summed everywhere."""
        summed: dict[int, Tensor] = {}
        names = {n for n in self.pipe.shared if self.pipe.local.get_parameter(n).grad is not None}
        for unit in self.sharded.units_of_owner(names)[self.sharded.rank]:
            gradient = self.pipe.local.get_parameter(self.sharded.name_of(unit)).grad
            summed[unit] = self.sharded.unit_part(unit, gradient)
        for name in names:
            self.pipe.local.get_parameter(name).grad = None
        if isinstance(self.pipe.gradients, ShardedGradients):
            summed |= self.pipe.gradients.owned()
            names |= self.pipe.gradients.touched
        self.sharded.reduce_gradients(summed, names)

    @torch.no_grad()
    def clip_groups(self, limit: float) -> dict[str, float]:
        """Gradients reduced and clipped to a global norm of at most `limit` (inf: not at all); norms before, by name."""
        if self.sharded is not None:
            self._reduce()
        stepping = self.optimizer if self.sharded is None else self.sharded.inner
        parts: dict[str, list[tuple[str, Tensor]]] = {}
        for group in stepping.param_groups:
            for name, p in zip(group["names"], group["params"], strict=True):
                if p.grad is not None:
                    parts.setdefault(norm_name(group["group"]), []).append((name.split("#")[0], p.grad))
        # Of a parameter that two places keep, the first place's gradient counts.
        own = {
            key: sum(float(g.double().square().sum()) for n, g in pairs if self.parts.speaks(n))
            for key, pairs in parts.items()
        }
        everywhere = gather_json(own, self.parts.device)
        norms = {
            key: sum(found.get(key, 0.0) for found in everywhere) ** 0.5
            for key in sorted({key for found in everywhere for key in found})
        }
        for key, pairs in parts.items():
            scale = min(1.0, limit / (norms[key] + 1e-6))
            if scale < 1:
                torch._foreach_mul_([g for _, g in pairs], scale)
        return norms

    def set_lr_scale(self, scale: float) -> None:
        """Sets every group's learning rate to scale times its peak."""
        self.optimizer.set_lr_scale(scale)

    def learning_rate(self, group: str) -> float:
        """The learning rate in force in a group; 0 when the group is empty."""
        return self.optimizer.learning_rate(group)

    def step(self) -> None:
        """Update what this rank owns and hand it to the ranks with the same stages."""
        self.optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets all gradients."""
        self.pipe.clear()
        self.optimizer.zero_grad(set_to_none)

    def reset_state(self) -> None:
        """Forgets momentum and second moments."""
        self.optimizer.reset_state()

    @torch.no_grad()
    def update_router_bias(self, router_counts: list[Tensor], rate: float) -> None:
        """As GlmMoeDsa's, for the MoE layers that are here; counts as run_step returns them."""
        layers, cfg = self.pipe.local.model.layers, self.parts.model.cfg
        moe = range(cfg.first_k_dense_replace, cfg.num_hidden_layers + cfg.num_nextn_predict_layers)
        for layer, counts_e in zip(moe, router_counts):
            block = layers[str(layer)] if str(layer) in layers else None
            if hasattr(block, "mlp"):
                block.mlp.gate.update_bias(counts_e, rate)

    # ---- state

    def owned_state(self) -> list[Piece]:
        """What this rank writes of the optimizer state: what it owns of the parameters that its place speaks for."""
        return [piece for piece in self.optimizer.owned_state() if self.parts.speaks(piece.name)]

    def state_tensors(self) -> dict[str, Tensor]:
        """The whole optimizer's state, '<parameter>.<slot>', on rank 0; {} elsewhere. Every rank must call it."""
        return gather_pieces(self.owned_state(), self.parts.control)

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Restores the state of any engine on any number of ranks; of a source only what this rank needs is read."""
        self.optimizer.load_state_tensors(Chosen(as_source(tensors), self.parts.takes))


def _name(objective: Any) -> str:
    return getattr(objective, "__qualname__", type(objective).__name__)


def _head(objective, step, model, hidden_bsh, mtp_hidden, batch, weights):
    return objective.head_loss(model, hidden_bsh, mtp_hidden, batch["targets_bs"], step, Part(weights))
