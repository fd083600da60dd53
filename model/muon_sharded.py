"""Muon Split over several ranks, owner-computes: what GLM-5 §2.4.1 calls zero-redundant (design notes C.5, reading (a)).

Every matrix that Muon orthogonalises (a head's block, an expert's gate or up, a whole projection) has one owner rank, and
every AdamW parameter is cut into ranges with one owner each. A gradient is reduced to its owner and freed elsewhere, as
ZeRO-2 would; momentum, second moments and Newton-Schulz exist once, at the owner; the new values go to all ranks once.
Communication goes in buckets: a bucket of gradients is sent as soon as the backward pass has filled it, and one bucket at
a time is in flight, so that the transient memory is one bucket.

    bytes sent by all ranks together:   gradients (N - 1) P, parameters (N - 1) P     (P: bytes of the trained parameters)

State has the logical form of model/muon.py: each rank writes the parts that it owns, and any number of ranks reads them.

Check it:  python -m pytest tests/model/test_muon_sharded.py
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from model.muon import MuonSplit, split_blocks
from model.muon_plan import SLOTS, SMALLEST_CUT, Traffic, Unit, plan_units
from model.state_parts import Piece, Region, as_source, gather_pieces

BUCKET_BYTES = 64 << 20


class ShardedMuonSplit:
    """`MuonSplit` spread over the ranks of a process group; same numbers up to the order of sums.

    optimizer: the rank's own `build_optimizer(...)`; its state, if it has any, is taken over. Its parameters must be equal
    on all ranks. One step is: `arm()` before the last backward pass, `reduce_gradients()`, `clip(limit)`, `step()`.
    group: None takes all ranks. control: a group for the few numbers that ranks agree on; it must not be `group`, as
    buckets and agreements may come in another order on another rank (None makes one on gloo).
    """

    def __init__(
        self,
        optimizer: MuonSplit,
        group: dist.ProcessGroup | None = None,
        control: dist.ProcessGroup | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        smallest_cut: int = SMALLEST_CUT,
    ) -> None:
        self.full, self.cfg, self.model_config = optimizer, optimizer.cfg, optimizer.model_config
        self.group = group
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        self.global_ranks = ranks
        self.control = control or dist.new_group(ranks, backend="gloo")
        self.bucket_bytes, self.traffic = bucket_bytes, Traffic()
        self.param_groups = optimizer.param_groups
        listed = [(n, p, g) for g in optimizer.param_groups for n, p in zip(g["names"], g["params"], strict=True)]
        self.names = [name for name, _, _ in listed]
        self.params = [param for _, param, _ in listed]
        self.kinds = [group["kind"] for _, _, group in listed]
        assert all(param.is_contiguous() for param in self.params), "units are views of contiguous parameters"
        triples = list(zip(self.names, self.params, self.kinds, strict=True))
        self.units = plan_units(triples, self.model_config, self.cfg.muon, self.world, smallest_cut)
        self.units_of: list[list[int]] = [[] for _ in self.params]
        for place, unit in enumerate(self.units):
            self.units_of[unit.param].append(place)
        self.mine: dict[int, Tensor] = {
            place: self._piece(unit, self.params[unit.param].detach())
            for place, unit in enumerate(self.units)
            if unit.owner == self.rank
        }
        self.inner = self._inner(listed)
        self._live = tuple(True for _ in self.params)  # which parameters had a gradient, on any rank, at the last step
        self._seen = [False] * len(self.params)  # which have state
        self._plans: dict[tuple[int, ...], list[list[int]]] = {}
        self._flying: list[tuple[Tensor, Any, list[int]]] = []
        self._start_over()
        for index, param in enumerate(self.params):
            param.register_post_accumulate_grad_hook(lambda _, index=index: self._fired(index))
        if optimizer.state:
            self.load_state_tensors(optimizer.state_tensors())
            optimizer.state.clear()

    def _inner(self, listed: list[tuple[str, Tensor, dict[str, Any]]]) -> MuonSplit:
        """The owner's optimizer: the same groups, holding views of what this rank owns."""
        groups: dict[int, dict[str, Any]] = {}
        for group in self.param_groups:
            groups[id(group)] = {k: v for k, v in group.items() if k not in ("params", "names")} | {
                "params": [],
                "names": [],
            }
        for place, piece in self.mine.items():
            name, _, group = listed[self.units[place].param]
            groups[id(group)]["params"].append(piece)
            groups[id(group)]["names"].append(f"{name}#{place}")
        return MuonSplit(list(groups.values()), self.model_config, self.cfg)

    def _piece(self, unit: Unit, tensor: Tensor) -> Tensor:
        """A unit's part of a tensor that has its parameter's shape, as a view."""
        if unit.view < 0:
            return tensor.reshape(-1)[unit.first : unit.last]
        name = self.names[unit.param]
        return split_blocks(name, tensor, self.model_config, self.cfg.muon)[unit.view][unit.first : unit.last]

    # what a trainer sees of any optimizer
    def set_lr_scale(self, scale: float) -> None:
        """Sets every group's learning rate to scale times its peak."""
        for optimizer in (self.full, self.inner):
            optimizer.set_lr_scale(scale)

    def learning_rate(self, group: str) -> float:
        """The learning rate in force in a group; 0 when the group is empty."""
        return self.full.learning_rate(group)

    def reset_state(self) -> None:
        """Forgets momentum and second moments."""
        self.inner.reset_state()
        self._seen = [False] * len(self.params)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets all gradients, reduced or not."""
        for param in self.params:
            param.grad = None
        for piece in self.mine.values():
            piece.grad = None
        self._start_over()

    # gradients to their owners
    def _start_over(self) -> None:
        self._armed, self._ready, self._next = False, set(), 0
        self._packed: dict[int, int] = {}  # parameter -> units of it that were sent
        self._had: set[int] = set()  # parameters sent with a gradient of this rank
        self._received: dict[int, Tensor] = {}
        self._plan: list[list[int]] = []

    def arm(self) -> None:
        """The next backward pass is the step's last: buckets go out as soon as it has filled them."""
        self._start_over()
        self._armed = True
        self._plan = self._buckets(self._units_where(self._live))

    def _units_where(self, live: Iterable[bool]) -> tuple[int, ...]:
        return tuple(place for index, yes in enumerate(live) if yes for place in self.units_of[index])

    def _buckets(self, places: tuple[int, ...]) -> list[list[int]]:
        """Units in the order in which a backward pass finishes them (last parameters first), cut into buckets."""
        if places not in self._plans:
            buckets: list[list[int]] = []
            size = 0
            for place in sorted(places, key=lambda i: (-self.units[i].param, i)):
                unit = self.units[place]
                bytes_ = unit.numel * self.params[unit.param].element_size()
                if not buckets or size + bytes_ > self.bucket_bytes:
                    buckets.append([])
                    size = 0
                buckets[-1].append(place)
                size += bytes_
                self.traffic.largest_bucket = max(self.traffic.largest_bucket, size)
            self._plans[places] = buckets
        return self._plans[places]

    def _fired(self, index: int) -> None:
        if not self._armed:
            return
        self._ready.add(index)
        # In the plan's order only: every rank must start the same collectives in the same order.
        while self._next < len(self._plan) and all(
            self.units[place].param in self._ready for place in self._plan[self._next]
        ):
            self._send(self._plan[self._next])
            self._next += 1

    def _segments(self, bucket: list[int]) -> dict[tuple[int, torch.dtype], list[int]]:
        segments: dict[tuple[int, torch.dtype], list[int]] = {}
        for place in bucket:
            unit = self.units[place]
            segments.setdefault((unit.owner, self.params[unit.param].dtype), []).append(place)
        return segments

    def _buffers(self, bucket: list[int]) -> list[tuple[int, Tensor, list[int]]]:
        """(owner, flat buffer, units) for every owner of a bucket."""
        found = []
        for (owner, dtype), places in self._segments(bucket).items():
            size = sum(self.units[place].numel for place in places)
            device = self.params[self.units[places[0]].param].device
            found.append((owner, torch.empty(size, dtype=dtype, device=device), places))
        total = sum(buffer.numel() * buffer.element_size() for _, buffer, _ in found)
        self.traffic.peak_buffer = max(self.traffic.peak_buffer, total)
        return found

    def _parts(self, buffer: Tensor, places: list[int]) -> Iterable[tuple[int, Tensor]]:
        at = 0
        for place in places:
            unit = self.units[place]
            yield place, buffer[at : at + unit.numel].view(unit.shape)
            at += unit.numel

    @torch.no_grad()
    def _send(self, bucket: list[int]) -> None:
        self._land()
        for owner, buffer, places in self._buffers(bucket):
            for place, part in self._parts(buffer, places):
                unit = self.units[place]
                grad = self.params[unit.param].grad
                if grad is None:
                    part.zero_()
                    continue
                part.copy_(self._piece(unit, grad.contiguous()))
                self._had.add(unit.param)
                self._packed[unit.param] = self._packed.get(unit.param, 0) + 1
                if self._packed[unit.param] == len(self.units_of[unit.param]):
                    self.params[unit.param].grad = None
            if owner != self.rank:
                self.traffic.add("gradients", buffer.numel() * buffer.element_size())
            work = dist.reduce(buffer, dst=self.global_ranks[owner], group=self.group, async_op=True)
            self._flying.append((buffer, work, places if owner == self.rank else []))

    def _land(self) -> None:
        """Waits for the bucket in flight; what others own is freed with it."""
        for buffer, work, places in self._flying:
            work.wait()
            self._received.update(self._parts(buffer, places))
        self._flying.clear()

    @torch.no_grad()
    def reduce_gradients(self, summed: Mapping[int, Tensor] | None = None, of: Collection[str] = ()) -> None:
        """Sums the gradients of all ranks at their owners and frees them elsewhere. Every rank must call it.

        summed: gradients of this rank's units (by `units_of_owner`) that someone else has summed over the ranks already; of:
        the names of the parameters that had one on this rank.
        """
        if not self._armed:
            self.arm()
        self._armed = False
        summed = summed or {}
        flags = [int(i in self._had or p.grad is not None) for i, p in enumerate(self.params)]
        elsewhere = [int(name in of) for name in self.names]
        agreed = torch.tensor([*flags, *elsewhere, self._next], dtype=torch.int32)
        dist.all_reduce(agreed, dist.ReduceOp.MAX, group=self.control)
        *live, started = agreed.tolist()
        live, elsewhere = live[: len(flags)], live[len(flags) :]
        # A rank that was slower sends what another one has begun to, then all send what is left.
        for bucket in self._plan[self._next : started]:
            self._send(bucket)
        sent = {place for bucket in self._plan[:started] for place in bucket}
        live = tuple(bool(flag) for flag in live)
        for bucket in self._buckets(tuple(p for p in self._units_where(live) if p not in sent)):
            self._send(bucket)
        self._land()
        self._live = tuple(bool(a or b) for a, b in zip(live, elsewhere, strict=True))
        for place, piece in self.mine.items():
            piece.grad = None
            if self._live[self.units[place].param]:
                piece.grad = summed[place] if place in summed else self._received[place]
        self._received = {}

    def units_of_owner(self, names: Collection[str]) -> list[list[int]]:
        """Units of some parameters, in a fixed order, for every rank of the group."""
        found: list[list[int]] = [[] for _ in range(self.world)]
        for place, unit in enumerate(self.units):
            if self.names[unit.param] in names:
                found[unit.owner].append(place)
        return found

    def name_of(self, place: int) -> str:
        """Of a unit's parameter."""
        return self.names[self.units[place].param]

    def unit_part(self, place: int, tensor: Tensor) -> Tensor:
        """A unit's part of its parameter's gradient, as a view."""
        return self._piece(self.units[place], tensor)

    @torch.no_grad()
    def clip(self, limit: float, key: Callable[[str], str] = lambda group: "grad_norm") -> dict[str, float]:
        """Scale the reduced gradients to a global norm of at most `limit`; returns the norms before, by `key(group)`.

        Groups with one key are clipped together, as torch.nn.utils.clip_grad_norm_ would. Every rank must call it.
        """
        mine: dict[str, list[Tensor]] = {}
        for group in self.inner.param_groups:
            mine.setdefault(key(group["group"]), []).extend(p.grad for p in group["params"] if p.grad is not None)
        keys = sorted(mine)
        present = dict.fromkeys(keys, 0.0)
        alive = {name for name, yes in zip(self.names, self._live, strict=True) if yes}
        for group in self.param_groups:
            if any(name in alive for name in group["names"]):
                present[key(group["group"])] = 1.0
        squares = [
            float(torch.stack(torch._foreach_norm(mine[k])).double().square().sum()) if mine[k] else 0.0 for k in keys
        ]
        total = torch.tensor(squares, dtype=torch.float64)
        dist.all_reduce(total, group=self.control)
        norms = {}
        for k, square in zip(keys, total.tolist(), strict=True):
            if present[k]:
                norms[k] = square**0.5
                if mine[k]:
                    torch._foreach_mul_(mine[k], min(1.0, limit / (norms[k] + 1e-6)))
        return norms

    @torch.no_grad()
    def step(self) -> None:
        """Update what this rank owns and hand it to the others. Every rank must call it, after `reduce_gradients`."""
        self.inner.step()
        for piece in self.mine.values():
            piece.grad = None
        for bucket in self._buckets(self._units_where(self._live)):
            works = []
            for owner, buffer, places in self._buffers(bucket):
                if owner == self.rank:
                    for place, part in self._parts(buffer, places):
                        part.copy_(self.mine[place])
                    self.traffic.add("parameters", (self.world - 1) * buffer.numel() * buffer.element_size())
                source = self.global_ranks[owner]
                works.append(
                    (dist.broadcast(buffer, src=source, group=self.group, async_op=True), owner, buffer, places)
                )
            for work, owner, buffer, places in works:
                work.wait()
                if owner != self.rank:
                    for place, part in self._parts(buffer, places):
                        self._piece(self.units[place], self.params[self.units[place].param]).copy_(part)
        self._seen = [seen or live for seen, live in zip(self._seen, self._live, strict=True)]

    # state
    def _region(self, place: int) -> Region:
        """Which elements of its parameter a unit is."""
        unit = self.units[place]
        return Region.of(self._piece(unit, self.params[unit.param].detach()), self.params[unit.param].detach())

    def owned_state(self) -> list[Piece]:
        """What this rank writes of the optimizer state: its units' slots, step counters with a parameter's first unit."""
        pieces = []
        for place, mine in self.mine.items():
            index = self.units[place].param
            if not self._seen[index]:
                continue
            for slot in SLOTS[self.kinds[index]]:
                value, name = self.inner.state[mine][slot], f"{self.names[index]}.{slot}"
                if slot != "step":
                    pieces.append(Piece.part(name, self.params[index].shape, value, self._region(place)))
                elif place == self.units_of[index][0]:
                    pieces.append(Piece.whole(name, value))
        return sorted(pieces, key=lambda piece: piece.name)

    def state_tensors(self) -> dict[str, Tensor]:
        """Optimizer state under logical names, whole, in host memory of rank 0; {} elsewhere. Every rank must call it."""
        return gather_pieces(self.owned_state(), self.control)

    @torch.no_grad()
    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Restores the state that any number of ranks wrote; of a source (model/state_parts.py) only what this rank owns is
        read. Raises ValueError naming unknown parameters or wrong shapes.
        """
        source = as_source(tensors)
        by_name = {name: index for index, name in enumerate(self.names)}
        self.reset_state()
        for key in sorted(source):
            name, slot = key.rsplit(".", 1)
            if name not in by_name:
                raise ValueError(f"optimizer state names {name!r}, which this optimizer does not own")
            self.full.check_slot(name, slot)
            index, shape = by_name[name], source.shape(key)
            if slot != "step" and shape != tuple(self.params[index].shape):
                raise ValueError(
                    f"optimizer state {key} has shape {list(shape)}, expected {list(self.params[index].shape)}"
                )
            self._seen[index] = True
            for place in self.units_of[index]:
                if place in self.mine:
                    if slot == "step":
                        value = source.read(key)
                    else:
                        value = source.read(key, self._region(place)).view(self.units[place].shape)
                        value = value.to(self.mine[place].device)
                    self.inner.state.setdefault(self.mine[place], {})[slot] = value
