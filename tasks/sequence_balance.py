"""Even work for every rank although sequences differ in length: reordering within a step, and context groups of several sizes.

GLM-5 §2.4 (notes E): workload-aware sequence reordering, dynamic redistribution of attention, variable-size context-parallel
groups. The unit is the work of training on a sequence, by the formulas of tasks/costs.py: linear parts, attention that grows
with the square (dense) or saturates at index_topk keys (DSA), and the indexer, which keeps growing with the square.

    share(lengths, cost, ranks, "cost")     which sequences of one step each rank takes: the step's set stays the same, so the
                                            gradient is the same up to the order of its sum
    plan_groups(lengths, ranks, cost)       partition of the ranks into context groups for one step, and every group's sequences

Both depend on their arguments alone: every rank computes the same plan and nothing is sent.

Measure it:  python -m tests.bench.sequence_balance        Check it:  python -m pytest tests/tasks/test_sequence_balance.py
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from model.config import ModelConfig
from tasks.costs import forward_flops

PASSES = 3.0  # forward and backward, in units of the forward pass
BALANCE = ("none", "tokens", "cost")
STEP = 1.01  # plan_groups seeks the least maximum in steps of one per cent ...
EQUAL = 1.03  # ... and among plans within three per cent of the best takes the one with the least traffic

Cost = Callable[[int, int], float]  # (tokens of a sequence, ranks that share it) -> work of each of them


def sequence_cost(cfg: ModelConfig, *, sparse: bool, mtp_depth: int = 0) -> Cost:
    """Operations of one training step that each of `ranks` ranks does for a sequence (model/context_parallel.py, form gather).

    Everything is split evenly but the up-projection of keys and values, which dense attention repeats on every rank.
    """
    layers = cfg.num_hidden_layers + (mtp_depth if cfg.num_nextn_predict_layers else 0)
    expand = 2.0 * cfg.kv_lora_rank * cfg.num_attention_heads * (cfg.qk_nope_head_dim + cfg.v_head_dim) * layers

    @lru_cache(maxsize=1 << 16)
    def cost(length: int, ranks: int = 1) -> float:
        work = forward_flops(cfg, length, sparse=sparse, mtp_depth=mtp_depth).total
        if ranks > 1 and not (sparse and length > cfg.index_topk):
            work += expand * (ranks - 1)
        return PASSES * work * length / ranks

    return cost


def gather_bytes(cfg: ModelConfig, length: int, ranks: int, element: int = 2) -> int:
    """Bytes that the ranks of a context group receive for one sequence: every layer's latent keys, and their gradients back."""
    width = cfg.kv_lora_rank + cfg.qk_rope_head_dim + cfg.index_head_dim
    return 2 * (ranks - 1) * length * width * element * cfg.num_hidden_layers


def _longest_first(costs: Sequence[float], ranks: int) -> list[list[int]]:
    """Each sequence, longest first, to the rank with the least work so far (ties: the lower rank)."""
    heap, parts = [(0.0, rank) for rank in range(ranks)], [[] for _ in range(ranks)]
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        load, rank = heap[0]
        parts[rank].append(i)
        heapq.heapreplace(heap, (load + costs[i], rank))
    return parts


def _differencing(costs: Sequence[float], ranks: int) -> list[list[int]]:
    """Karmarkar and Karp's largest differencing method for `ranks` parts: join the two most uneven partitions, largest part of
    one with the smallest of the other, until one is left."""
    heap = []
    for order, i in enumerate(sorted(range(len(costs)), key=lambda i: (-costs[i], i))):
        parts = [(costs[i], (i,)), *([(0.0, ())] * (ranks - 1))]
        heap.append((-costs[i], order, parts))
    heapq.heapify(heap)
    count = len(heap)
    while len(heap) > 1:
        _, _, a = heapq.heappop(heap)
        _, _, b = heapq.heappop(heap)
        joined = [(x + y, p + q) for (x, p), (y, q) in zip(a, reversed(b), strict=True)]
        joined.sort(key=lambda part: (-part[0], part[1]))
        heapq.heappush(heap, (joined[-1][0] - joined[0][0], count, joined))
        count += 1
    return [list(members) for _, members in heap[0][2]] if heap else [[] for _ in range(ranks)]


def balanced(costs: Sequence[float], ranks: int) -> list[list[int]]:
    """Indices of `costs` in `ranks` parts whose largest sum is small: the better of two heuristics; indices ascending."""
    found = min(
        (_differencing(costs, ranks), _longest_first(costs, ranks)),
        key=lambda parts: max(sum(costs[i] for i in part) for part in parts),
    )
    return [sorted(part) for part in found]


def share(lengths: Sequence[int], cost: Cost | None, ranks: int, how: str) -> list[list[int]]:
    """Which of a step's sequences each rank takes. how: "none" deals them out in turn, "tokens" evens out their lengths,
    "cost" their work. Every sequence goes to exactly one rank; a rank's own are in the step's order."""
    if how not in BALANCE:
        raise ValueError(f"loop.balance must be one of {', '.join(BALANCE)}, got {how!r}")
    if how == "none" or ranks == 1:
        return [list(range(rank, len(lengths), ranks)) for rank in range(ranks)]
    return balanced([float(n) if how == "tokens" else cost(n, 1) for n in lengths], ranks)


@dataclass(frozen=True)
class Group:
    """Ranks [first, first + size) work on `sequences` together, one after the other; `load` is the work of each."""

    first: int
    size: int
    sequences: tuple[int, ...]
    load: float

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(range(self.first, self.first + self.size))


def _fit(order, lengths, ranks: int, cost: Cost, sizes, room: int | None, limit: float) -> list[Group] | None:
    """Groups in which no rank works more than `limit`, or None."""
    open_: list[list] = []  # [size, load, members]
    left = ranks
    for i in order:
        n = lengths[i]
        allowed = [
            s for s in sizes if (room is None or n <= s * room) and (s == 1 or n >= 2 * s) and cost(n, s) <= limit
        ]
        if not allowed:
            return None
        fitting = [g for g in open_ if g[0] in allowed and g[1] + cost(n, g[0]) <= limit]
        if fitting:
            group = min(fitting, key=lambda g: (g[0], -g[1]))  # the smallest that does, the fullest of those
        elif allowed[0] <= left:
            group = [allowed[0], 0.0, []]
            left -= allowed[0]
            open_.append(group)
        else:
            return None
        group[1] += cost(n, group[0])
        group[2].append(i)
    open_.sort(key=lambda g: -g[0])  # stable: large groups first, on aligned ranks where sizes are powers of two
    groups, first = [], 0
    for size, load, members in open_:
        groups.append(Group(first, size, tuple(sorted(members)), load))
        first += size
    return groups


def plan_groups(
    lengths: Sequence[int], ranks: int, cost: Cost, *, max_tokens: int | None = None, sizes: Sequence[int] | None = None
) -> list[Group]:
    """Context groups for one step's sequences that keep the largest work of any rank small.

    A long sequence gets as many ranks as it takes to finish with the others, short ones share a rank. Among plans within
    three per cent of the best it takes the one with the least traffic. max_tokens: tokens of one
    sequence that fit on one rank. sizes: allowed group sizes (default: powers of two up to `ranks`). Groups come in the order of
    their ranks; ranks beyond the last group have nothing to do. ValueError when a sequence
    fits nowhere.
    """
    sizes = sorted(sizes or [2**k for k in range(ranks.bit_length()) if 2**k <= ranks])
    if not lengths:
        return []
    longest = max(lengths)
    if max_tokens is not None and longest > max_tokens * sizes[-1]:
        raise ValueError(
            f"a sequence of {longest} tokens does not fit {sizes[-1]} ranks of {max_tokens} tokens each: allow larger context "
            "groups or cut it"
        )
    plans = [
        _of_one_size(lengths, ranks, cost, size)
        for size in sizes
        if (max_tokens is None or longest <= size * max_tokens) and (size == 1 or min(lengths) >= 2 * size)
    ]
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    limit, least = sum(cost(n, 1) for n in lengths) / ranks, min(map(_longest, plans), default=float("inf"))
    while limit <= least * EQUAL:  # fitting is not monotonous in the limit: no bisection
        found = _fit(order, lengths, ranks, cost, sizes, max_tokens, limit)
        if found is not None:
            plans.append(found)
            least = min(least, _longest(found))
        limit *= STEP
        if not plans and limit > 2 * sum(cost(n, size) for n in lengths for size in sizes):
            raise ValueError(
                f"no context groups on {ranks} ranks take both a sequence of {longest} tokens and one of {min(lengths)}, which "
                "must have two tokens per rank of its group: pad or drop the short one"
            )
    # Evened out further by arithmetic alone, all work would go to one group of all ranks.
    return min((p for p in plans if _longest(p) <= EQUAL * least), key=lambda p: sum(_copies(g, lengths) for g in p))


def _longest(plan: Sequence[Group]) -> float:
    return max(group.load for group in plan)


def _copies(group: Group, lengths: Sequence[int]) -> int:
    """Tokens whose latents the group's ranks receive from each other."""
    return (group.size - 1) * sum(lengths[i] for i in group.sequences)


def _of_one_size(lengths: Sequence[int], ranks: int, cost: Cost, size: int) -> list[Group]:
    parts = balanced([cost(n, size) for n in lengths], ranks // size)
    filled = [part for part in parts if part]
    return [Group(g * size, size, tuple(p), sum(cost(lengths[i], size) for i in p)) for g, p in enumerate(filled)]


def fixed_groups(lengths: Sequence[int], ranks: int, cost: Cost, size: int) -> list[Group]:
    """The plain way, to compare with: groups of one size, sequences dealt out in turn."""
    if ranks % size:
        raise ValueError(f"{ranks} ranks cannot be split into context groups of {size}")
    count = ranks // size
    members = [list(range(g, len(lengths), count)) for g in range(count)]
    loads = [sum(cost(lengths[i], size) for i in part) for part in members]
    return [Group(g * size, size, tuple(part), load) for g, (part, load) in enumerate(zip(members, loads))]


def rank_loads(groups: Sequence[Group], ranks: int) -> list[float]:
    """Work of every rank; 0 for one without a group."""
    loads = [0.0] * ranks
    for group in groups:
        for rank in group.ranks:
            loads[rank] = group.load
    return loads


def imbalance(steps: Sequence[Sequence[float]]) -> dict[str, float]:
    """Of the ranks' work in several steps, each as long as its busiest rank: max_over_mean (1 is perfect) and the idle share."""
    longest = sum(max(loads) for loads in steps)
    mean = sum(sum(loads) / len(loads) for loads in steps)
    return {"max_over_mean": longest / mean, "idle": 1 - mean / longest}
