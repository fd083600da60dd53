"""Training steps of a language model over pipeline ranks: `parallel: {pipeline: 2, virtual: 2, schedule: zero_bubble}`.

    engine = PipelineEngine(cfg, OptimConfig(...), PipelineSettings(pipeline=2, virtual=2))      # on every rank
    engine.load_model(state)                                         # a whole model's tensors; every rank takes its part
    logs, counts = engine.run_step(objective, batches, step)         # forward and backward of the step's micro-batches
    engine.clip_groups(1.0); engine.set_lr_scale(0.5); engine.step(); engine.zero_grad()
    engine.whole_model(), engine.state_tensors()                     # by logical names, on every rank; collective calls

Each rank optimises the parameters that it holds. Those that two ranks hold (the embedding of the MTP block) have the same
gradient and state on both. Replicas of the pipeline (more processes than `pipeline`) share the step's micro-batches; their
optimizers do the same work. The numbers are those of one process up to the order of sums.

Check it:  python -m pytest tests/tasks/test_pipeline_engine.py
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from pydantic import Field, model_validator
from torch import Tensor

from model.config import ModelConfig
from model.muon import OptimConfig, build_optimizer
from model.pipeline import Grid, Pipeline, gather_json
from model.pipeline_place import allowed_cuts, place
from model.pipeline_schedule import Schedule, build, with_offload, with_reductions
from model.pipeline_stage import Batch, Work
from tasks.objectives import LanguageModeling
from tasks.parallel import Part
from tasks.parallel_engine import norm_name
from tasks.settings import Section
from tasks.trainer import IGNORE, batch_count, computing_in


class PipelineSettings(Section):
    """How a model is spread over pipeline ranks; GLM-5's techniques (section 2.4) are on by default."""

    pipeline: int = Field(1, ge=1, description="ranks among which the layers are divided")
    virtual: int = Field(1, ge=1, description="stages per rank; above 1 the schedule is interleaved")
    schedule: str = Field("interleaved", pattern="^(gpipe|1f1b|interleaved|zero_bubble)$")
    flexible_mtp: bool = Field(True, description="MTP's block one stage before the output layers")
    shards: bool = Field(False, description="ZeRO-2 gradient shards, two rolling full buffers per rank")
    offload: bool = Field(False, description="activations of waiting micro-batches on the host")
    recompute: bool = Field(False, description="a stage's activations made again in backward")

    @model_validator(mode="after")
    def _fits(self) -> PipelineSettings:
        if self.schedule == "1f1b" and self.virtual > 1:
            raise ValueError(
                f"parallel.virtual is {self.virtual}: schedule 1f1b has one stage per rank, take interleaved"
            )
        return self

    def build(self, micros: int) -> Schedule:
        """The schedule of a step with that many micro-batches."""
        schedule = build(self.schedule, ranks=self.pipeline, micros=micros, virtual=self.virtual)
        schedule = with_reductions(schedule) if self.shards else schedule
        return with_offload(schedule) if self.offload else schedule

    def rounded(self, micros: int) -> int:
        """The next number of micro-batches that the schedule takes."""
        group = self.pipeline if self.virtual > 1 and self.schedule in ("interleaved", "zero_bubble") else 1
        return -(-micros // group) * group


class PipelineEngine:
    """A rank's model part, its optimizer, and the steps of both; see the module's docstring.

    precision: of the arithmetic; weights stay fp32. ValueError names what does not fit together.
    """

    def __init__(
        self,
        cfg: ModelConfig,
        optim: OptimConfig,
        settings: PipelineSettings,
        device: torch.device | str = "cpu",
        precision: torch.dtype = torch.float32,
    ) -> None:
        if optim.train == "indexer":
            raise ValueError(
                "parallel.pipeline: the indexer's warm-up sends no gradients between stages; run it without a pipeline"
            )
        self.settings, self.grid, self.precision = settings, Grid.create(settings.pipeline), precision
        mtp = cfg.num_nextn_predict_layers > 0
        specs = place(
            cfg.num_hidden_layers,
            settings.pipeline * settings.virtual,
            mtp=mtp,
            flexible=settings.flexible_mtp,
            cuts=allowed_cuts(cfg),
        )
        self.pipe = Pipeline(cfg, settings.build(settings.rounded(1)), specs, self.grid, device)
        self.model = self.pipe.local
        self.optimizer = build_optimizer(self.model, optim)
        self.cfg, self.param_groups = optim, self.optimizer.param_groups
        everywhere = gather_json(sorted(self.model.state_dict()), self.pipe.device)
        # The first rank that holds a tensor speaks for it: in sums over ranks, and when whole states are put together.
        self.speaker = {name: rank for rank in reversed(range(len(everywhere))) for name in everywhere[rank]}
        self.rank = self.grid.replica * self.grid.pipeline + self.grid.place

    # ---- a step

    def run_step(
        self, objective: LanguageModeling, batches: Sequence[Batch], step: int
    ) -> tuple[dict[str, float], list[Tensor]]:
        """(logs with `loss`, tokens per expert of each MoE layer): means and sums over the micro-batches of all ranks.

        Every rank of a replica is given the same micro-batches; replica r of n has rows r, r + n, ... of the step's. Every
        term of the loss is its mean over the step, as in tasks/trainer.py.
        """
        if not isinstance(objective, LanguageModeling):
            raise ValueError(
                f"parallel.pipeline trains language models; {type(objective).__name__} is not cut into stages"
            )
        counts, terms = [batch_count(b) for b in batches], [objective.terms(b, step) for b in batches]
        own = Counter({"": sum(counts), "micro-batches": len(batches)})
        for one in terms:
            own.update(one)
        everywhere = gather_json(own, self.pipe.device)
        sums = {k: sum(found.get(k, 0.0) for found in everywhere) / self.grid.pipeline for k in own}
        if sums[""] <= 0:
            raise ValueError(f"step {step}: the batch has no target to learn from")
        numbers = [found["micro-batches"] for found in everywhere]
        if min(numbers) == 0:
            raise ValueError(
                f"step {step}: a replica of the pipeline has no micro-batch; take fewer processes or more rows"
            )
        shares = [count / sums[""] for count in counts]
        weights = [
            {k: n / sums[k] / share for k, n in one.items() if n and share}
            for one, share in zip(terms, shares, strict=True)
        ]
        # Replicas reduce gradients together, so that all run as many; what fills up has no target and weighs nothing.
        missing = self.settings.rounded(max(numbers)) - len(batches)
        empty = dict(batches[-1]) | {"targets_bs": torch.full_like(batches[-1]["targets_bs"], IGNORE)}
        batches = [*batches, *[empty] * missing]
        shares, weights = [*shares, *[0.0] * missing], [*weights, *[{}] * missing]
        if len(batches) != self.pipe.schedule.micros:
            self.pipe.set_schedule(self.settings.build(len(batches)))
        work = Work(
            head=functools.partial(_head, objective, step),
            attention=objective.attention,
            mtp_depth=objective.depth_at(step),
            balance_coef=objective.balance_coef,
            index_rows=objective.index_rows,
            index_coef=objective.index_coef,
            rows_seed=objective.row_seed + step,
            rows_of=(self.grid.replica, self.grid.data),
            recompute=self.settings.recompute,
        )
        self.model.train()
        with computing_in(self.model, self.precision):
            result = self.pipe.run(work, batches, shares, self.precision, weights)
        if self.settings.shards:
            for name, gradient in self.pipe.whole_gradients().items():
                self.model.get_parameter(name).grad = gradient
        return {"loss": result.loss, **result.logs}, result.router_counts

    @torch.no_grad()
    def clip_groups(self, limit: float) -> dict[str, float]:
        """Scale gradients to a global norm of at most `limit` (inf: not at all); norms before, the indexer's apart."""
        parts: dict[str, list[tuple[str, Tensor]]] = {}
        for group in self.param_groups:
            for name, p in zip(group["names"], group["params"], strict=True):
                if p.grad is not None:
                    parts.setdefault(norm_name(group["group"]), []).append((name, p.grad))
        own = {
            key: sum(float(g.double().square().sum()) for n, g in pairs if self.speaker[n] == self.rank)
            for key, pairs in parts.items()
        }
        everywhere = gather_json(own, self.pipe.device)
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
        self.optimizer.set_lr_scale(scale)

    def learning_rate(self, group: str) -> float:
        return self.optimizer.learning_rate(group)

    def step(self) -> None:
        self.optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.pipe.clear()

    @torch.no_grad()
    def update_router_bias(self, router_counts: list[Tensor], rate: float) -> None:
        """As GlmMoeDsa's, for the MoE layers that are here; counts as run_step returns them."""
        cfg = self.model.cfg
        moe = range(cfg.first_k_dense_replace, cfg.num_hidden_layers + cfg.num_nextn_predict_layers)
        for layer, counts_e in zip(moe, router_counts):
            block = self.model.model.layers[str(layer)] if str(layer) in self.model.model.layers else None
            if hasattr(block, "mlp"):
                block.mlp.gate.update_bias(counts_e, rate)

    # ---- whole states

    def load_model(self, state: Mapping[str, Tensor]) -> None:
        self.model.load(state)

    def whole_model(self) -> dict[str, Tensor]:
        """The whole model's tensors under their names, on every rank."""
        own = {n: t for n, t in self.model.state_dict().items() if self.speaker[n] == self.rank}
        return self._gathered(own)

    def state_tensors(self) -> dict[str, Tensor]:
        """The whole optimizer's state, '<parameter>.<slot>', on every rank."""
        own = {
            k: t for k, t in self.optimizer.state_tensors().items() if self.speaker[k.rsplit(".", 1)[0]] == self.rank
        }
        return self._gathered(own)

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Restores a whole optimizer's state; this rank takes its part."""
        own = {name for group in self.param_groups for name in group["names"]}
        self.optimizer.load_state_tensors({k: t for k, t in tensors.items() if k.rsplit(".", 1)[0] in own})

    def _gathered(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors of all ranks, each sent once by the rank that gives it."""
        listed = gather_json({n: [list(t.shape), str(t.dtype)[6:]] for n, t in own.items()}, self.pipe.device)
        found = {}
        for rank, names in enumerate(listed):
            for name in sorted(names):
                shape, dtype = names[name]
                mine = rank == self.rank
                tensor = own[name].detach().to(self.pipe.device).contiguous().clone() if mine else None
                if tensor is None:
                    tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=self.pipe.device)
                if len(listed) > 1:
                    dist.broadcast(tensor, src=rank)
                found[name] = tensor
        return dict(sorted(found.items()))


def _head(objective, step, model, hidden_bsh, mtp_hidden, batch, weights):
    return objective.head_loss(model, hidden_bsh, mtp_hidden, batch["targets_bs"], step, Part(weights))
