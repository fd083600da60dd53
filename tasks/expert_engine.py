"""The optimizer of a run with spread experts: experts step on the ranks that hold them, all else as without expert parallelism.

Dense parameters go through model/muon_sharded.py over all ranks. An expert's gradient holds the tokens of its whole expert
group when the backward ends; it is summed over the ranks with the same experts only. Norms are those of all parameters
together. State is written and read in logical form: experts joined, as one process writes them.

Check it:  python -m pytest tests/tasks/test_model_parallel.py
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from model.expert_parallel import LocalExperts, is_expert, placed
from model.muon import MuonSplit
from model.muon_sharded import ShardedMuonSplit
from model.state_parts import Chosen, Piece, as_source, gather_pieces
from tasks.parallel import Parallel
from tasks.parallel_engine import norm_name, part_of


class ExpertEngine:
    """Has the face of `tasks.parallel_engine.NativeEngine`. Gradients travel after the backward, which itself exchanges tokens:
    collectives of several groups then start in the same order on every rank."""

    def __init__(self, optimizer: MuonSplit, layout: Any, ranks: Parallel, bucket_bytes: int) -> None:
        self.cfg, self.model_config = optimizer.cfg, optimizer.model_config
        self.route, self.ranks = layout.experts, ranks
        self.param_groups = optimizer.param_groups
        self.dense = ShardedMuonSplit(
            part_of(optimizer, lambda name: not is_expert(name)), control=ranks.control, bucket_bytes=bucket_bytes
        )
        if not any(is_expert(name) for group in optimizer.param_groups for name in group["names"]):
            raise ValueError("parallel.expert: this stage trains no expert (DSA warm-up?); it needs parallel.expert: 1")
        self.experts: MuonSplit | ShardedMuonSplit = part_of(optimizer, is_expert)
        if layout.replicas is not None:
            self.experts = ShardedMuonSplit(self.experts, layout.replicas, layout.replicas_control, bucket_bytes)

    def backward(self, loss: Tensor, last: bool) -> None:
        """Adds the gradients of a micro-batch."""
        loss.backward()

    def set_lr_scale(self, scale: float) -> None:
        """Sets every group's learning rate to scale times its peak."""
        self.dense.set_lr_scale(scale)
        self.experts.set_lr_scale(scale)

    def learning_rate(self, group: str) -> float:
        """The learning rate in force in a group; 0 when the group is empty."""
        return self.dense.learning_rate(group) or self.experts.learning_rate(group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets all gradients."""
        self.dense.zero_grad(set_to_none)
        self.experts.zero_grad(set_to_none)

    def _expert_gradients(self) -> list[Tensor]:
        """Those that this rank steps with: its experts', or the share it owns among the ranks with the same experts."""
        inner = self.experts.inner if isinstance(self.experts, ShardedMuonSplit) else self.experts
        return [p.grad for group in inner.param_groups for p in group["params"] if p.grad is not None]

    @torch.no_grad()
    def clip_groups(self, limit: float) -> dict[str, float]:
        """Gradients reduced and clipped; norms before, by name. limit: inf turns clipping off."""
        self.dense.reduce_gradients()
        if isinstance(self.experts, ShardedMuonSplit):
            self.experts.reduce_gradients()
        norms = self.dense.clip(float("inf"), norm_name)
        mine = self._expert_gradients()
        square = float(torch.stack(torch._foreach_norm(mine)).double().square().sum()) if mine else 0.0
        if (square := self.ranks.sum_(square)) > 0:
            norms["grad_norm"] = (norms.get("grad_norm", 0.0) ** 2 + square) ** 0.5
        for group in self.dense.inner.param_groups:
            self._scale(
                [p.grad for p in group["params"] if p.grad is not None], norms.get(norm_name(group["group"])), limit
            )
        self._scale(mine, norms.get("grad_norm"), limit)
        return norms

    @staticmethod
    def _scale(gradients: list[Tensor], norm: float | None, limit: float) -> None:
        if gradients and norm is not None:
            torch._foreach_mul_(gradients, min(1.0, limit / (norm + 1e-6)))

    def step(self) -> None:
        """Update what this rank owns and hand it on. Every rank calls it, after clip_groups."""
        self.dense.step()
        self.experts.step()

    def owned_state(self) -> list[Piece]:
        """What this rank writes of the optimizer state: its share of the dense part, its experts' or its share of them."""
        experts = (placed(piece, self.route) for piece in self.experts.owned_state())
        return [*self.dense.owned_state(), *(piece for piece in experts if piece is not None)]

    def state_tensors(self) -> dict[str, Tensor]:
        """Optimizer state under logical names, whole, on rank 0; {} elsewhere. Every rank must call it."""
        return gather_pieces(self.owned_state(), self.ranks.control)

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Restores the state of any engine on any number of ranks; of a source only what this rank needs is read."""
        source = as_source(tensors)
        self.dense.load_state_tensors(Chosen(source, lambda name: not is_expert(name)))
        self.experts.load_state_tensors(Chosen(LocalExperts(source, self.route), is_expert))

    def reset_state(self) -> None:
        """Forgets momentum and second moments."""
        self.dense.reset_state()
        self.experts.reset_state()
