"""Who owns what when Muon Split runs on several ranks: units, their costs, a balanced and deterministic assignment.

Used by model/muon_sharded.py.

Check it:  python -m pytest tests/model/test_muon_sharded.py
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kernels.newton_schulz import STEPS
from model.muon import split_blocks

SMALLEST_CUT = 1024  # elements per rank below which an AdamW parameter is not cut
SLOTS = {"muon": ("momentum_buffer",), "adamw": ("step", "exp_avg", "exp_avg_sq")}


@dataclass(frozen=True)
class Unit:
    """What one rank owns of one parameter: blocks first..last of one of its Muon views, or a range of its elements.

    view: index among `split_blocks` of the parameter; -1 for a flat range. cost: operations of its Newton-Schulz, or
    elements.
    """

    param: int
    view: int
    first: int
    last: int
    shape: tuple[int, ...]
    cost: int
    owner: int = -1

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()


def newton_schulz_cost(blocks: int, rows: int, cols: int) -> int:
    """Floating-point operations of the iteration on `blocks` matrices [rows, cols]."""
    short, long = sorted((rows, cols))
    return blocks * STEPS * (4 * short * short * long + 2 * short**3)


def _cuts(total: int, parts: int) -> list[tuple[int, int]]:
    parts = max(1, min(parts, total))
    edges = [total * i // parts for i in range(parts + 1)]
    return list(zip(edges[:-1], edges[1:], strict=True))


def plan_units(
    params: list[tuple[str, Tensor, str]], model_config: Any, muon: str, world: int, smallest_cut: int = SMALLEST_CUT
) -> list[Unit]:
    """Units of (name, parameter, 'muon' or 'adamw'), in the parameters' order, each with its owner among `world` ranks.

    A stack of matrices is cut into at most `world` runs of whole matrices. The costliest unit goes first, to the rank that
    has least to do so far (Muon and AdamW are balanced apart); equal arguments give equal plans on every rank.
    """
    units: list[Unit] = []
    for index, (name, param, kind) in enumerate(params):
        if kind == "muon":
            for number, view in enumerate(split_blocks(name, param.detach(), model_config, muon)):
                count, rows, cols = view.shape
                for first, last in _cuts(count, world):
                    cost = newton_schulz_cost(last - first, rows, cols)
                    units.append(Unit(index, number, first, last, (last - first, rows, cols), cost))
        else:
            size = param.numel()
            for first, last in _cuts(size, world if size >= world * smallest_cut else 1):
                units.append(Unit(index, -1, first, last, (last - first,), last - first))
    loads = {kind: [(0, rank) for rank in range(world)] for kind in SLOTS}  # heaps
    owners: dict[int, int] = {}
    for place in sorted(range(len(units)), key=lambda i: (-units[i].cost, i)):
        load = loads[params[units[place].param][2]]
        least, owners[place] = load[0]
        heapq.heapreplace(load, (least + units[place].cost, owners[place]))
    return [Unit(**{**unit.__dict__, "owner": owners[i]}) for i, unit in enumerate(units)]


@dataclass
class Traffic:
    """Bytes by kind that this rank handed to collectives as source, once per receiver; and the largest transient buffer."""

    sent: dict[str, int] = field(default_factory=dict)
    peak_buffer: int = 0
    largest_bucket: int = 0

    def add(self, kind: str, size: int) -> None:
        self.sent[kind] = self.sent.get(kind, 0) + size
