"""Gradients of a pipeline rank: whole, or ZeRO-2 shards with two rolling full buffers (GLM-5 section 2.4).

Backward passes of an interleaved schedule come in runs, each of one virtual stage. A run accumulates into one full buffer;
at its end the buffer is reduced over the data-parallel group, every rank adding its 1/dp to its shard, while the next run
fills the other buffer. However many virtual stages a rank has, at most two full gradients exist on it. Shards are even ranges,
or what each rank's part of a sharded optimizer owns (model/muon_sharded.py): then no gradient is put together again.

Check it:  python -m pytest tests/model/test_pipeline.py
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from model.muon_sharded import ShardedMuonSplit
from model.pipeline_memory import Ledger

# torch 2.13 renames both; the old names warn, the new ones do not exist before.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class WholeGradients:
    """Every stage keeps its full gradient in `.grad`; `finish` sums them over the data-parallel group."""

    def __init__(self, stages: Mapping[int, Mapping[str, nn.Parameter]], group, ledger: Ledger) -> None:
        self.stages = {s: {n: p for n, p in params.items() if p.requires_grad} for s, params in stages.items()}
        self.group, self.ledger = group, ledger
        self._open: set[int] = set()

    def open(self, stage: int) -> None:
        """Before an operation that adds to a stage's gradients."""
        if stage not in self._open:
            self._open.add(stage)
            self.ledger.add_bytes("gradients", sum(p.nbytes for p in self.stages[stage].values()))

    def reduce(self, stage: int) -> None:
        raise ValueError("this schedule reduces gradients to shards (R), but the gradients are kept whole")

    def finish(self) -> None:
        if self.group is not None and dist.get_world_size(self.group) > 1:
            for params in self.stages.values():
                for p in params.values():
                    if p.grad is not None:
                        dist.all_reduce(p.grad, group=self.group)

    def clear(self) -> None:
        """After the optimizer's step."""
        for stage in self._open:
            self.ledger.add_bytes("gradients", -sum(p.nbytes for p in self.stages[stage].values()))
        self._open.clear()


class ShardedGradients:
    """Shards [ceil(numel / dp)] per stage and at most two full buffers, each as large as the largest stage; the parameters'
    type (fp32 in training)."""

    def __init__(
        self,
        stages: Mapping[int, Mapping[str, nn.Parameter]],
        group,
        ledger: Ledger,
        owners: ShardedMuonSplit | None = None,
    ) -> None:
        self.stages = {s: {n: p for n, p in params.items() if p.requires_grad} for s, params in stages.items()}
        self.group, self.ledger, self.owners = group, ledger, owners
        self.ranks = 1 if group is None else dist.get_world_size(group)
        self.sizes = {s: -(-sum(p.numel() for p in ps.values()) // self.ranks) for s, ps in self.stages.items()}
        self.shards: dict[int, Tensor] = {}
        self.reductions = 0
        self.touched: set[str] = set()  # what backward never reached has no gradient, not a zero one
        for params in self.stages.values():
            for name, p in params.items():
                p.register_post_accumulate_grad_hook(lambda _, name=name: self.touched.add(name))
        self.units = {s: owners.units_of_owner(params) if owners else [] for s, params in self.stages.items()}
        self._outgoing: Tensor | None = None  # with owners, the second buffer: gradients in the order of their owners
        self._free: list[Tensor] = []
        self._made = 0
        self._filling: dict[int, Tensor] = {}
        self._reducing: tuple[int, Tensor | None, Tensor, object] | None = None

    def _empty(self, size: int) -> Tensor:
        like = next(p for ps in self.stages.values() for p in ps.values())
        return torch.empty(size, dtype=like.dtype, device=like.device)

    def open(self, stage: int) -> None:
        """Before an operation that adds to a stage's gradients: gives it a zeroed full buffer unless it has one."""
        if stage in self._filling or not self.stages[stage]:
            return
        if not self._free:
            if self._made == (1 if self.owners else 2):
                self._finish_one()
            else:
                self._made += 1
                self._free.append(self._full())
        assert self._free, "a third full gradient buffer: the schedule mixes the gradients of three stages"
        flat = self._filling[stage] = self._free.pop()
        flat.zero_()
        offset = 0
        for p in self.stages[stage].values():
            p.grad = flat[offset : offset + p.numel()].view(p.shape)
            offset += p.numel()

    def reduce(self, stage: int) -> None:
        """Start the reduction of a stage's full buffer; the one before must end first."""
        self._finish_one()
        if stage not in self._filling:
            return
        for p in self.stages[stage].values():
            p.grad = None
        flat = self._filling.pop(stage)
        if self.owners is not None:
            self._to_owners(stage, flat)
            return
        part = torch.empty(self.sizes[stage], dtype=flat.dtype, device=flat.device)
        work = None
        if self.ranks > 1:
            used = flat[: self.sizes[stage] * self.ranks]
            work = _reduce_scatter(part, used, group=self.group, async_op=True)
        else:
            part.copy_(flat[: self.sizes[stage]])
        self.reductions += 1
        self._reducing = (stage, flat, part, work)

    def _full(self) -> Tensor:
        buffer = self._empty(max(self.sizes.values()) * self.ranks)
        self.ledger.add_bytes("gradients", buffer.nbytes)
        return buffer

    def _to_owners(self, stage: int, flat: Tensor) -> None:
        """Start sending every rank what it owns; `flat` is free at once."""
        if self._outgoing is None:
            self._outgoing = self._full()
        parameters, offset = {}, 0
        for name, p in self.stages[stage].items():
            parameters[name] = flat[offset : offset + p.numel()].view(p.shape)
            offset += p.numel()
        works, at, own = [], 0, None
        for rank, units in enumerate(self.units[stage]):
            first = at
            for unit in units:
                value = self.owners.unit_part(unit, parameters[self.owners.name_of(unit)])
                self._outgoing[at : at + value.numel()].view(value.shape).copy_(value)
                at += value.numel()
            segment = self._outgoing[first:at]
            if rank == self.owners.rank:
                own = segment
            if units:
                target = self.owners.global_ranks[rank]
                works.append(dist.reduce(segment, dst=target, group=self.group, async_op=True))
        self._free.append(flat)
        self.reductions += 1
        self._reducing = (stage, None, own, works)

    def _finish_one(self) -> None:
        if self._reducing is None:
            return
        stage, flat, part, work = self._reducing
        for one in work if isinstance(work, list) else [work]:
            if one is not None:
                one.wait()
        if stage in self.shards:
            self.shards[stage] += part
        else:
            self.shards[stage] = part if self.owners is None else part.clone()
            self.ledger.add_bytes("gradients", part.nbytes)
        if flat is not None:
            self._free.append(flat)
        self._reducing = None

    def owned(self) -> dict[int, Tensor]:
        """With owners: the summed gradients of this rank's units."""
        found = {}
        for stage, shard in self.shards.items():
            at = 0
            for unit in self.units[stage][self.owners.rank]:
                shape = self.owners.units[unit].shape
                size = torch.Size(shape).numel()
                found[unit] = shard[at : at + size].view(shape)
                at += size
        return found

    def finish(self) -> None:
        """Wait for the last reduction. Afterwards `shards` is this rank's part of every stage's summed gradient."""
        self._finish_one()
        assert not self._filling, "gradients that were never reduced"

    def gather(self, stage: int) -> dict[str, Tensor]:
        """A stage's whole gradients by name, from all ranks' shards, where backward made one. A collective call."""
        assert self.owners is None, "owners step with what `owned` gives them"
        size = self.sizes[stage]
        flat = self._empty(size * self.ranks)
        if self.ranks > 1:
            _all_gather(flat, self.shards[stage], group=self.group)
        else:
            flat.copy_(self.shards[stage])
        found, offset = {}, 0
        for name, p in self.stages[stage].items():
            if name in self.touched:
                found[name] = flat[offset : offset + p.numel()].view(p.shape)
            offset += p.numel()
        return found

    def clear(self) -> None:
        self.ledger.add_bytes("gradients", -sum(t.nbytes for t in self.shards.values()))
        self.shards.clear()
        self.touched.clear()
