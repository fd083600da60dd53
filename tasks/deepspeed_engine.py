"""The training loop under DeepSpeed: its engine drives backward and step, the optimizer stays ours.

zero_stage 0: `deepspeed.initialize` with model/muon_sharded.py as the client optimizer. DeepSpeed's own gradient all-reduce
    and clipping are off: ours reduces to owners, clips the raw gradients and shards state and gradients. The caller owns
    the accumulation boundary (`managed_gradient_accumulation: false`), as the number of micro-batches may change.
zero_stage 1, 2: DeepSpeed's ZeRO with torch's AdamW, as a control. It clips all groups together, treats a missing gradient
    as zero, and knows the gradient norm only after the step, so that a spike cannot be refused before it.

Weights and states stay fp32; `loop.precision` chooses the arithmetic as everywhere.

Check it:  python -m pytest tests/tasks/test_deepspeed.py
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from model.muon import MuonSplit
from model.muon_sharded import ShardedMuonSplit
from model.state_parts import Piece, Region, as_source, gather_pieces
from tasks.parallel import PATIENCE, Parallel


def _deepspeed() -> Any:
    """DeepSpeed, imported so that nothing is compiled: on CPUs it would build a shared-memory library for minutes."""
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("DS_IGNORE_CUDA_DETECTION", "1")
    try:
        import deepspeed
        import deepspeed.ops
    except ImportError as error:
        raise ValueError(
            f"parallel.engine is deepspeed, which is not installed ({error}): pip install deepspeed"
        ) from None
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # gloo does what that library would; without this entry the backend does not look for it
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


class _Client(torch.optim.Optimizer):
    """Our optimizer as DeepSpeed wants to see one: parameter groups and a step."""

    def __init__(self, ours: Any) -> None:
        super().__init__([{"params": list(g["params"]), "lr": g["lr"]} for g in ours.param_groups], {"lr": 0.0})
        self.ours = ours

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.ours.step()


class DeepSpeedEngine:
    """See the module's docstring; the face is that of tasks/parallel_engine.py.

    One process is a world of its own. ValueError when DeepSpeed is not installed, or when zero_stage is set and the indexer
    trains (its gradients must be clipped apart, which ZeRO cannot).
    """

    def __init__(
        self, model: nn.Module, optimizer: MuonSplit, parallel: Parallel, zero_stage: int, bucket_bytes: int
    ) -> None:
        deepspeed = _deepspeed()
        self._own_group = not dist.is_initialized()
        if self._own_group:
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=PATIENCE)
        deepspeed.init_distributed(dist_backend=dist.get_backend(), verbose=False)
        self.cfg, self.names, self.parallel, self.zero_stage = optimizer.cfg, optimizer.names, parallel, zero_stage
        self.param_groups = optimizer.param_groups
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "managed_gradient_accumulation": False,
            "steps_per_print": 1 << 30,
            "gradient_clipping": 0.0,  # ours clips the raw gradients
            "zero_optimization": {"stage": zero_stage},
        }
        if zero_stage:
            if any(group["group"] == "indexer" for group in optimizer.param_groups):
                raise ValueError(
                    f"parallel.zero_stage is {zero_stage}, but the indexer trains here: its gradients are clipped apart "
                    "from the others, which DeepSpeed's ZeRO cannot; use zero_stage: 0"
                )
            config["zero_optimization"] |= {
                "overlap_comm": False,
                "reduce_bucket_size": bucket_bytes // 8 * 2,
                "allgather_bucket_size": bucket_bytes // 8 * 2,
            }
            config["gradient_clipping"] = 1.0  # replaced at every step
            loaded = optimizer.state_tensors()
            self.ours: Any = None
            client = torch.optim.AdamW(
                [{k: v for k, v in g.items() if k not in ("names", "kind")} for g in optimizer.param_groups],
                betas=(self.cfg.beta1, self.cfg.beta2),
                eps=self.cfg.eps,
            )
        else:
            loaded = {}
            self.ours = optimizer
            if parallel.world > 1:
                self.ours = ShardedMuonSplit(optimizer, control=parallel.control, bucket_bytes=bucket_bytes)
            client = _Client(self.ours)
        self.engine, self.zero, _, _ = deepspeed.initialize(model=model, optimizer=client, config=config)
        if not zero_stage:
            self.engine.enable_backward_allreduce = False  # ours reduces, to owners
        if loaded:
            self.load_state_tensors(loaded)

    @property
    def model(self) -> nn.Module:
        """What objectives call: DeepSpeed's engine around the model."""
        return self.engine

    # the step
    def backward(self, loss: Tensor, last: bool) -> None:
        """Adds the gradients of a micro-batch; `last`: the step's last one on this rank."""
        if self.zero_stage:
            loss = loss * self.parallel.world  # ZeRO averages over ranks; the loss is already a share of the whole
        elif last and self.parallel.world > 1:
            self.ours.arm()
        self.engine.backward(loss)

    def clip_groups(self, limit: float) -> dict[str, float]:
        """As the native engine's; with ZeRO the limit is only noted, and {} says that no norm is known yet."""
        from tasks.parallel_engine import norm_name

        if self.zero_stage:
            self.zero.clip_grad = 0.0 if limit == float("inf") else limit
            return {}
        if self.parallel.world > 1:
            self.ours.reduce_gradients()
            return self.ours.clip(limit, norm_name)
        parts: dict[str, list[Tensor]] = {}
        for group in self.ours.param_groups:
            parts.setdefault(norm_name(group["group"]), []).extend(p for p in group["params"] if p.grad is not None)
        return {key: float(nn.utils.clip_grad_norm_(parts[key], limit)) for key in sorted(parts) if parts[key]}

    def step(self) -> None:
        """The engine's step, which takes the optimizer's."""
        self.engine.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets all gradients."""
        (self.zero if self.zero_stage else self.ours).zero_grad(set_to_none=set_to_none)

    # learning rates
    def set_lr_scale(self, scale: float) -> None:
        """Sets every group's learning rate to scale times its peak."""
        if self.ours is not None:
            self.ours.set_lr_scale(scale)
        for group in self.zero.param_groups if self.zero_stage else ():
            group["lr"] = group["base_lr"] * scale

    def learning_rate(self, group: str) -> float:
        """The learning rate in force in a group; 0 when the group is empty."""
        groups = self.zero.param_groups if self.zero_stage else self.ours.param_groups
        return next((g["lr"] for g in groups if g["group"] == group), 0.0)

    # state
    def owned_state(self) -> list[Piece]:
        """What this rank writes of the optimizer state: with ZeRO, its range of every parameter that its partitions touch."""
        if self.ours is not None:
            return self.ours.owned_state()
        if not self.zero.optimizer.state:
            return []
        self._link()
        steps = next(iter(self.zero.optimizer.state.values()))["step"]
        pieces = []
        for name, param, fragment, region in self._fragments():
            for slot in ("exp_avg", "exp_avg_sq"):
                values = fragment.get_optim_state_fragment(slot).detach()
                pieces.append(Piece.part(f"{name}.{slot}", param.shape, values, region))
            if region.start == 0:
                pieces.append(Piece.whole(f"{name}.step", steps.detach().to(torch.float32)))
        return sorted(pieces, key=lambda piece: piece.name)

    def _fragments(self) -> Iterator[tuple[str, nn.Parameter, Any, Region]]:
        """(name, parameter, DeepSpeed's record of this rank's part, its place in the parameter)."""
        for param, name in self.names.items():
            fragment = param._hp_mapping
            if fragment is not None:
                address = fragment.lp_fragment_address
                yield name, param, fragment, Region.range(address.start, address.start + address.numel)

    def state_tensors(self) -> dict[str, Tensor]:
        """Optimizer state under logical names, whole, on the writer; every rank must call it."""
        return gather_pieces(self.owned_state(), self.parallel.control)

    def _link(self) -> None:
        """DeepSpeed links states to parameters once, after the first group's first step: the other groups have none then."""
        self.zero._hp_optimizer_states_linked = False
        self.zero._lazy_init_hp_params_optimizer_state()

    @torch.no_grad()
    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Restores the state of any engine on any number of ranks; of a source only what this rank needs is read.

        ValueError as model.muon.MuonSplit's.
        """
        if self.ours is not None:
            self.ours.load_state_tensors(tensors)
            return
        source = as_source(tensors)
        shapes = {name: tuple(param.shape) for param, name in self.names.items()}
        counter = None
        for key in source:
            name, slot = key.rsplit(".", 1)
            if name not in shapes:
                raise ValueError(f"optimizer state names {name!r}, which this optimizer does not own")
            if slot == "step":
                counter = key
            elif source.shape(key) != shapes[name]:
                raise ValueError(
                    f"optimizer state {key} has shape {list(source.shape(key))}, expected {list(shapes[name])}"
                )
        steps = float(source.read(counter)) if counter else 0.0  # ZeRO steps all parameters together
        inner = self.zero.optimizer
        inner.state.clear()
        for group in inner.param_groups:
            for flat in group["params"]:
                inner.state[flat] = {
                    "step": torch.full((), steps, dtype=torch.float32),
                    "exp_avg": torch.zeros_like(flat),
                    "exp_avg_sq": torch.zeros_like(flat),
                }
        self._link()
        for name, param, fragment, region in self._fragments():
            # the weights may have been loaded since
            fragment.hp_fragment.copy_(region.view(param.detach().contiguous()).reshape(-1))
            for slot in ("exp_avg", "exp_avg_sq"):
                if f"{name}.{slot}" in source:
                    fragment.get_optim_state_fragment(slot).copy_(source.read(f"{name}.{slot}", region))
        if not len(source):
            inner.state.clear()
