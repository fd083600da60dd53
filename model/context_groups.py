"""Context groups that change from step to step: several sequences at once, each over as many ranks as it needs (notes E).

    pool = ContextPool()                         # one per run, on every rank
    work = pool.enter(model, groups)             # groups of this step (tasks/sequence_balance.py), the same on every rank
    for i in work:                               # this rank's sequences; None of them: the rank only takes part in sums
        (objective(model, batch_of(i)) * share_of(i) / pool.sharing).backward()

Process groups are made when a set of ranks first appears, in the plan's order, by all ranks of the world (torch numbers groups
by how many a rank knows, so that ranks which skipped one would wait for each other), and kept. A rank's loss is its part times
its group's size (model/context_parallel.py), so divided by the size it adds up over the ranks to each sequence's loss once: the
gradients summed over all ranks are those of one process.

Run its tests: `python -m pytest tests/model/test_context_groups.py`
"""

from collections.abc import Sequence
from typing import Protocol

import torch.distributed as dist
from torch import nn

from model.all_to_all import Route
from model.context_parallel import Context, set_context


class Group(Protocol):
    """What a plan says of one group: its ranks, and the numbers of the sequences it works on."""

    @property
    def ranks(self) -> tuple[int, ...]: ...

    @property
    def sequences(self) -> tuple[int, ...]: ...


class ContextPool:
    """The groups of all plans so far, and the contexts of those that this rank was part of."""

    def __init__(self, form: str = "gather"):
        self.form = form
        self.contexts: dict[tuple[int, ...], Context | None] = {}
        self.sharing = 1  # ranks that share this rank's sequences of the step at hand

    def enter(self, model: nn.Module, groups: Sequence[Group]) -> Sequence[int]:
        """Put `model` into this rank's group of a plan; returns the group's sequences. ValueError for groups that overlap."""
        rank, mine, seen = dist.get_rank(), None, set()
        for group in groups:
            if seen & set(group.ranks):
                raise ValueError(f"context groups overlap in ranks {sorted(seen & set(group.ranks))}")
            seen |= set(group.ranks)
            mine = group if rank in group.ranks else mine
        for group in groups:
            if len(group.ranks) > 1 and group.ranks not in self.contexts:
                self.contexts[group.ranks] = self._context(group.ranks, rank)
        self.sharing = len(mine.ranks) if mine else 1
        set_context(model, self.contexts[mine.ranks] if self.sharing > 1 else None)
        return mine.sequences if mine else ()

    def _context(self, ranks: tuple[int, ...], rank: int) -> Context | None:
        group = dist.new_group(list(ranks)) if len(ranks) < dist.get_world_size() else None
        if rank not in ranks:
            return None
        return Context(Route(group, ranks.index(rank), len(ranks), len(ranks)), self.form)
