"""Pipeline schedules as data: what each rank does, in which order. Pure Python, no torch.

A model is cut into `ranks * virtual` stages; stage s lives on rank s mod ranks, so that a rank holds `virtual` of them.
A schedule is one list of operations per rank; sends and receives follow from them:

    F m s   forward of micro-batch m on stage s            B m s   its backward (input gradients only, when `split`)
    W m s   its weight gradients (only when `split`)       R m s   reduce the stage's full gradient buffer to its shard
    O m s   move its activations to the host               L m s   bring them back

    schedule = build("zero_bubble", ranks=4, micros=8, virtual=2)
    check(schedule)                                    # raises ValueError: dependencies, deadlock, memory
    print(schedule.lines())

gpipe, 1f1b (PipeDream-flush), interleaved (Megatron-LM, arXiv 2104.04473 section 2.2), zero_bubble: either of the last two
with weight gradients put off into the gaps (as ZB-H1 of arXiv 2401.10241 does: no more activations than the fullest rank
of the schedule it starts from). `with_reductions` and `with_offload` add GLM-5's two memory techniques (section 2.4).

Check it:  python -m pytest tests/model/test_pipeline_schedule.py
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

KINDS = "FBWROL"
NAMES = ("gpipe", "1f1b", "interleaved", "zero_bubble")


class Op(NamedTuple):
    kind: str
    micro: int
    stage: int

    def __str__(self) -> str:
        return f"{self.kind}{self.micro}.{self.stage}"


@dataclass(frozen=True)
class Schedule:
    """`ops[r]` is what rank r does. `split`: B leaves the weight gradients to W."""

    name: str
    ranks: int
    virtual: int
    micros: int
    ops: tuple[tuple[Op, ...], ...]
    split: bool = False

    @property
    def stages(self) -> int:
        return self.ranks * self.virtual

    def rank_of(self, stage: int) -> int:
        return stage % self.ranks

    def stages_of(self, rank: int) -> range:
        return range(rank, self.stages, self.ranks)

    def lines(self) -> str:
        return "\n".join(f"rank {r}: " + " ".join(map(str, ops)) for r, ops in enumerate(self.ops))


def needs(op: Op, stages: int) -> list[Op]:
    """The F, B and W operations that must have ended before this one starts (R, O and L: their own rank's order says it)."""
    if op.kind == "F":
        return [Op("F", op.micro, op.stage - 1)] if op.stage else []
    if op.kind == "B":
        before = [Op("F", op.micro, op.stage)]
        return before + ([Op("B", op.micro, op.stage + 1)] if op.stage + 1 < stages else [])
    return [Op("B", op.micro, op.stage)] if op.kind == "W" else []


# ---- builders ----------------------------------------------------------------------------------------------------


def gpipe(ranks: int, micros: int, virtual: int = 1) -> Schedule:
    """All forwards, then all backwards."""
    lists = []
    for rank in range(ranks):
        chunks = range(rank, ranks * virtual, ranks)
        ops = [Op("F", m, s) for s in chunks for m in range(micros)]
        lists.append(tuple(ops + [Op("B", m, s) for s in reversed(chunks) for m in range(micros)]))
    return Schedule("gpipe", ranks, virtual, micros, tuple(lists))


def one_f_one_b(ranks: int, micros: int) -> Schedule:
    """Rank r runs ranks - 1 - r forwards ahead, then one forward and one backward in turn."""
    lists = []
    for rank in range(ranks):
        ahead = min(micros, ranks - 1 - rank)
        ops = [Op("F", m, rank) for m in range(ahead)]
        for m in range(ahead, micros):
            ops += [Op("F", m, rank), Op("B", m - ahead, rank)]
        lists.append(tuple(ops + [Op("B", m, rank) for m in range(micros - ahead, micros)]))
    return Schedule("1f1b", ranks, 1, micros, tuple(lists))


def interleaved(ranks: int, micros: int, virtual: int) -> Schedule:
    """1F1B over virtual stages in groups of `ranks` micro-batches, which must divide `micros` (ValueError)."""
    if micros % ranks:
        raise ValueError(f"interleaving takes its micro-batches in groups of ranks = {ranks}; {micros} is no multiple")
    total, group = micros * virtual, ranks * virtual
    lists = []
    for rank in range(ranks):

        def nth(kind: str, k: int, rank: int = rank) -> Op:
            round_, inside = divmod(k, group)
            chunk = inside // ranks if kind == "F" else virtual - 1 - inside // ranks
            return Op(kind, round_ * ranks + inside % ranks, chunk * ranks + rank)

        ahead = min(total, 2 * (ranks - rank - 1) + (virtual - 1) * ranks)
        ops = [nth("F", k) for k in range(ahead)]
        for k in range(ahead, total):
            ops += [nth("F", k), nth("B", k - ahead)]
        lists.append(tuple(ops + [nth("B", k) for k in range(total - ahead, total)]))
    return Schedule("interleaved", ranks, virtual, micros, tuple(lists))


def defer_weights(
    base: Schedule,
    durations: Mapping[str, float] | Callable[[Op], float] | None = None,
    limit: int | None = None,
    pending: int | None = None,
    name: str = "zero_bubble",
) -> Schedule:
    """Split each B of `base` and put its W where the rank would wait, or where a bound forces it, or at the end.

    `durations` of F, B and W (1 each), or of every operation, say where it would wait. `limit` bounds a rank's micro-batches
    from F to W; None takes the peak of base's fullest rank, so that splitting costs no memory there. `pending` bounds those
    from B to W (None: no bound of its own); with recomputation, which keeps nearly nothing from F to B, it is the one that
    matters.
    """
    if base.split:
        raise ValueError(f"schedule {base.name} is split already")
    if callable(durations):
        cost = durations
    else:
        kinds = {"F": 1.0, "B": 1.0, "W": 1.0} | dict(durations or {})
        cost = lambda op: kinds[op.kind]  # noqa: E731
    limit = max(in_flight(base)) if limit is None else limit
    if limit < 1 or (pending is not None and pending < 1):
        raise ValueError(f"limit ({limit}) and pending ({pending}) must be at least 1")
    ends: dict[Op, float] = {}
    clock, place = [0.0] * base.ranks, [0] * base.ranks
    waiting: list[deque[Op]] = [deque() for _ in range(base.ranks)]
    live, lists = [0] * base.ranks, [[] for _ in range(base.ranks)]

    def weight(rank: int) -> None:
        lists[rank].append(waiting[rank].popleft())
        clock[rank] += cost(lists[rank][-1])
        live[rank] -= 1

    while True:
        best = None
        for rank in range(base.ranks):
            if place[rank] == len(base.ops[rank]):
                continue
            op = base.ops[rank][place[rank]]
            before = needs(op, base.stages)
            if all(b in ends for b in before):
                start = max([clock[rank], *(ends[b] for b in before)])
                if best is None or start < best[0]:
                    best = (start, rank, op)
        if best is None:
            break
        start, rank, op = best
        # A W that would only half fit delays this operation, and with it the ranks that wait for it.
        while waiting[rank] and clock[rank] + cost(waiting[rank][0]) <= start + 1e-9:
            weight(rank)
        while op.kind == "F" and live[rank] >= limit and waiting[rank]:
            weight(rank)
        while op.kind == "B" and pending is not None and len(waiting[rank]) >= pending:
            weight(rank)
        clock[rank] = max(start, clock[rank]) + cost(op)
        ends[op] = clock[rank]
        lists[rank].append(op)
        place[rank] += 1
        if op.kind == "F":
            live[rank] += 1
        else:
            waiting[rank].append(Op("W", op.micro, op.stage))
    for rank in range(base.ranks):
        while waiting[rank]:
            weight(rank)
    return replace(base, name=name, ops=tuple(map(tuple, lists)), split=True)


def build(
    name: str,
    *,
    ranks: int,
    micros: int,
    virtual: int = 1,
    durations: Mapping[str, float] | Callable[[Op], float] | None = None,
    pending: int | None = None,
) -> Schedule:
    """A schedule by its name in `NAMES`; durations and pending are for zero_bubble. ValueError names what does not fit."""
    if name not in NAMES:
        raise ValueError(f"schedule {name!r}; expected one of {', '.join(NAMES)}")
    if min(ranks, micros, virtual) < 1:
        raise ValueError(f"ranks ({ranks}), micros ({micros}) and virtual ({virtual}) must be at least 1")
    if name == "gpipe":
        return gpipe(ranks, micros, virtual)
    if name == "1f1b" and virtual > 1:
        raise ValueError(f"schedule 1f1b has one stage per rank; virtual = {virtual} needs interleaved")
    base = interleaved(ranks, micros, virtual) if virtual > 1 else one_f_one_b(ranks, micros)
    return defer_weights(base, durations, pending=pending) if name == "zero_bubble" else base


# ---- passes over a schedule --------------------------------------------------------------------------------------


def with_reductions(schedule: Schedule) -> Schedule:
    """R after every run of gradients of one stage: the next stage's full buffer fills while this one is reduced.

    A rank then holds at most two full gradient buffers, however many stages it has; the rest of each gradient is a shard.
    """
    writes = "W" if schedule.split else "B"
    lists = []
    for ops in schedule.ops:
        places = [i for i, op in enumerate(ops) if op.kind == writes]
        last = {i for i, j in zip(places, [*places[1:], None]) if j is None or ops[j].stage != ops[i].stage}
        new: list[Op] = []
        for i, op in enumerate(ops):
            new.append(op)
            if i in last:
                new.append(Op("R", op.micro, op.stage))
        lists.append(tuple(new))
    return replace(schedule, ops=tuple(lists))


def with_offload(schedule: Schedule, ahead: int = 1) -> Schedule:
    """O after every F whose B is not near, and L `ahead` compute operations before that B (so that the copy is hidden)."""
    if ahead < 0:
        raise ValueError(f"ahead must not be negative, got {ahead}")
    lists = []
    for ops in schedule.ops:
        compute = [i for i, op in enumerate(ops) if op.kind in "FBW"]
        place = {ops[i]: k for k, i in enumerate(compute)}
        after: dict[int, list[Op]] = {}
        before: dict[int, list[Op]] = {}
        for k, i in enumerate(compute):
            op = ops[i]
            if op.kind != "F":
                continue
            back = place[Op("B", op.micro, op.stage)]
            if back - ahead > k + 1:
                after.setdefault(i, []).append(Op("O", op.micro, op.stage))
                before.setdefault(compute[back - ahead], []).append(Op("L", op.micro, op.stage))
        new: list[Op] = []
        for i, op in enumerate(ops):
            new += [*before.get(i, []), op, *after.get(i, [])]
        lists.append(tuple(new))
    return replace(schedule, ops=tuple(lists))


# ---- checks ------------------------------------------------------------------------------------------------------


def in_flight(schedule: Schedule) -> list[int]:
    """Per rank, the most micro-batch activations on the device at once (from F to B, or to W when split)."""
    peaks = []
    for ops in schedule.ops:
        live = peak = 0
        for op in ops:
            live += {"F": 1, "L": 1, "O": -1, "W" if schedule.split else "B": -1}.get(op.kind, 0)
            peak = max(peak, live)
        peaks.append(peak)
    return peaks


def full_buffers(schedule: Schedule) -> list[int]:
    """Per rank, the most full gradient buffers at once: the stage being accumulated, and those not reduced yet.

    A reduction runs beside the next stage's first gradients and is waited for at the next R.
    """
    writes = "W" if schedule.split else "B"
    peaks = []
    for ops in schedule.ops:
        filling: set[int] = set()
        reducing: set[int] = set()
        peak = 0
        for op in ops:
            if op.kind == writes:
                filling.add(op.stage)
            elif op.kind == "R":
                reducing = {op.stage}
                filling.discard(op.stage)
            peak = max(peak, len(filling) + len(reducing))
        peaks.append(peak)
    return peaks


def check(schedule: Schedule, limit: int | None = None, buffers: int | None = None) -> None:
    """ValueError when a rank's list is incomplete, out of order, blocks for ever, or holds more than `limit` activations.

    `buffers` bounds the full gradient buffers of a rank. Sends are taken to be asynchronous; a receive blocks.
    """
    if len(schedule.ops) != schedule.ranks:
        raise ValueError(f"{schedule.name}: {len(schedule.ops)} lists for {schedule.ranks} ranks")
    for rank, ops in enumerate(schedule.ops):
        _check_rank(schedule, rank, ops)
    done: set[Op] = set()
    place = [0] * schedule.ranks
    moved = True
    while moved:
        moved = False
        for rank, ops in enumerate(schedule.ops):
            while place[rank] < len(ops) and all(b in done for b in needs(ops[place[rank]], schedule.stages)):
                done.add(ops[place[rank]])
                place[rank] += 1
                moved = True
    blocked = [f"rank {r} at {ops[place[r]]}" for r, ops in enumerate(schedule.ops) if place[r] < len(ops)]
    if blocked:
        raise ValueError(f"{schedule.name}: deadlock, {'; '.join(blocked)}")
    peaks = in_flight(schedule)
    if limit is not None and max(peaks) > limit:
        raise ValueError(
            f"{schedule.name}: rank {peaks.index(max(peaks))} holds {max(peaks)} activations, limit {limit}"
        )
    full = full_buffers(schedule)
    if buffers is not None and max(full) > buffers:
        raise ValueError(
            f"{schedule.name}: rank {full.index(max(full))} holds {max(full)} full buffers, limit {buffers}"
        )


def _check_rank(schedule: Schedule, rank: int, ops: tuple[Op, ...]) -> None:
    """Completeness and order within one rank."""
    label = f"{schedule.name}: rank {rank}"
    counts = Counter(op for op in ops if op.kind != "R")
    compute = "FBW" if schedule.split else "FB"
    expected = {Op(k, m, s) for k in compute for s in schedule.stages_of(rank) for m in range(schedule.micros)}
    found = {op for op in counts if op.kind in "FBW"}
    if found != expected:
        wrong = sorted(map(str, found ^ expected))
        raise ValueError(f"{label} lacks or should not have {', '.join(wrong[:4])}")
    twice = [str(op) for op, n in counts.items() if n > 1]
    if twice:
        raise ValueError(f"{label} has {twice[0]} more than once")
    state: dict[tuple[int, int], str] = {}
    allowed = {"F": {""}, "O": {"F"}, "L": {"O"}, "B": {"F", "L"}, "W": {"B"}}
    for op in ops:
        if op.kind not in KINDS:
            raise ValueError(f"{label}: unknown operation {op}")
        if op.kind == "R":
            continue
        key = (op.micro, op.stage)
        if state.get(key, "") not in allowed[op.kind]:
            raise ValueError(f"{label}: {op} follows {state.get(key) or 'nothing'} of its micro-batch")
        state[key] = op.kind
    if any(op.kind == "R" for op in ops):
        writes = "W" if schedule.split else "B"
        dirty: set[int] = set()
        for op in ops:
            if op.kind == writes:
                dirty.add(op.stage)
            elif op.kind == "R":
                if op.stage not in dirty:
                    raise ValueError(f"{label}: {op} has nothing to reduce")
                dirty.discard(op.stage)
        if dirty:
            raise ValueError(f"{label}: gradients of stage {min(dirty)} are never reduced")
