"""What drives backward and step beyond one process: our own sharded optimizer, bare or under DeepSpeed.

Each has the face of `model.muon.MuonSplit` and three things more: `backward(loss, last)`, `clip(limit)`, and state that
each rank writes and reads by its own part (model/state_parts.py).

    native      model/muon_sharded.py: gradients to their owners during the last backward pass of a step
    pipeline    layers spread over ranks (tasks/pipeline_engine.py), which also drives the forward: `run_step`
    deepspeed   the same optimizer under deepspeed.initialize; or, for `optimizer.muon: off` and zero_stage 1 or 2,
                DeepSpeed's own ZeRO with AdamW (tasks/deepspeed_engine.py)

Check it:  python -m pytest tests/tasks/test_parallel.py tests/tasks/test_deepspeed.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from model.muon import MuonSplit
from model.muon_sharded import ShardedMuonSplit
from tasks.parallel import Parallel, ParallelSettings


def norm_name(group: str) -> str:
    """Under which name a parameter group's gradients are measured and clipped: the indexer's loss must not scale the rest."""
    return "index_grad_norm" if group == "indexer" else "grad_norm"


def part_of(optimizer: MuonSplit, keep: Callable[[str], bool]) -> MuonSplit:
    """An optimizer of those parameters whose names `keep` wants, with their state."""
    groups = []
    for group in optimizer.param_groups:
        kept = [(p, n) for p, n in zip(group["params"], group["names"], strict=True) if keep(n)]
        if kept:
            groups.append(group | {"params": [p for p, _ in kept], "names": [n for _, n in kept]})
    part = MuonSplit(groups, optimizer.model_config, optimizer.cfg)
    part.state.update({p: optimizer.state[p] for p in part.names if p in optimizer.state})
    return part


class NativeEngine(ShardedMuonSplit):
    """The sharded optimizer, driven by the plain backward."""

    def backward(self, loss: Tensor, last: bool) -> None:
        """Adds the gradients of a micro-batch; `last`: the step's last one on this rank, buckets leave as they fill."""
        if last:
            self.arm()
        loss.backward()

    def clip_groups(self, limit: float) -> dict[str, float]:
        """Gradients reduced to their owners and clipped; norms before, by name. limit: inf turns clipping off."""
        self.reduce_gradients()
        return self.clip(limit, norm_name)


def make_engine(
    model: nn.Module,
    optimizer: MuonSplit,
    parallel: Parallel,
    settings: ParallelSettings | None,
    layout: Any = None,
    loop: Any = None,
) -> Any:
    """The engine that `settings` ask for; None when the plain optimizer in one process will do.

    ValueError when settings do not fit together.
    """
    settings = settings or ParallelSettings()
    bucket_bytes = max(1, int(settings.bucket_mb * (1 << 20)))
    if settings.zero_stage and (settings.engine != "deepspeed" or optimizer.cfg.muon != "off"):
        raise ValueError(
            f"parallel.zero_stage is {settings.zero_stage}: DeepSpeed's ZeRO hands an optimizer one flat vector, so it "
            "needs parallel.engine: deepspeed and optimizer.muon: off; Muon is sharded by our own optimizer (zero_stage: 0)"
        )
    if settings.pipeline > 1:
        if layout is None or layout.parts is None:
            raise ValueError(
                f"parallel.pipeline is {settings.pipeline}: this stage's model is not cut into pipeline stages; "
                "parallel.pipeline: 1 in this stage"
            )
        from tasks.pipeline_engine import PipelineEngine

        return PipelineEngine(optimizer, layout.parts, settings, loop, bucket_bytes)
    if settings.engine == "deepspeed":
        if not dist.is_initialized():
            raise ValueError(
                "parallel.engine is deepspeed, which needs ranks that a launcher started, and parallel.processes is "
                f"{settings.processes}: set parallel.processes, or parallel.engine: native"
            )
        from tasks.deepspeed_engine import DeepSpeedEngine

        return DeepSpeedEngine(model, optimizer, parallel, settings.zero_stage, bucket_bytes)
    if parallel.world == 1:
        return None
    if layout is not None and layout.experts is not None:
        from tasks.expert_engine import ExpertEngine

        return ExpertEngine(optimizer, layout, parallel, bucket_bytes)
    return NativeEngine(optimizer, control=parallel.control, bucket_bytes=bucket_bytes)
