"""Time and memory of a pipeline schedule, operation by operation, from what one micro-batch costs on each stage.

    costs = measure(cfg, specs, work, batch)               # bytes of a real micro-batch, in one process
    found = simulate(schedule, costs, data=2)              # span, idle share and peak bytes of every rank

Operations run in their rank's order; F and B wait for their message. Copies to and from the host and reductions run beside
the computation, one at a time each; B waits for its L, and R for the reduction before it. Memory is counted in program order
as model/pipeline.py's ledger counts it: what is held between operations, plus what both a backward pass and its deferred
weight gradients hold for a moment. Message buffers and what an operation frees before it ends are not in it.

`python -m tasks plan` uses it. Check it:  python -m pytest tests/tasks/test_pipeline_sim.py
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from model.pipeline_schedule import Op, Schedule, needs


@dataclass(frozen=True)
class StageCost:
    """One micro-batch on one virtual stage: seconds, and bytes held between operations.

    backward is the input gradient's time (with recomputation where there is some), weight the weight gradient's. activations
    live from F to B; entry, with recomputation, from F to B, and activations then only inside B. deferred live from B to W, of
    which deferred_new are not among the activations. gradient: the stage's full gradient; shard: what stays of it after R (None:
    gradient / data). message: from this stage to a
    neighbour on another rank; copy: its activations to the host or back; reduction: its full gradient to its shard.
    """

    forward: float = 1.0
    backward: float = 1.0
    weight: float = 1.0
    activations: float = 0.0
    entry: float = 0.0
    deferred: float = 0.0
    deferred_new: float = 0.0
    gradient: float = 0.0
    shard: float | None = None
    message: float = 0.0
    copy: float = 0.0
    reduction: float = 0.0


@dataclass(frozen=True)
class Simulated:
    """Seconds: span, and busy per rank. Bytes per rank: by kind at the peak of their sum, each kind's most, and on the host."""

    span: float
    busy: list[float]
    peaks: list[dict[str, float]]
    most: list[dict[str, float]]
    host: list[float]
    timeline: list[tuple[Op, int, float, float]]

    @property
    def idle(self) -> list[float]:
        return [1 - b / self.span for b in self.busy]

    @property
    def bubble(self) -> float:
        """Idle time relative to busy time, of all ranks together."""
        return len(self.busy) * self.span / sum(self.busy) - 1


def simulate(
    schedule: Schedule, costs: Sequence[StageCost], *, data: int = 1, recompute: bool = False, timeline: bool = False
) -> Simulated:
    """Run `schedule` where stage s costs costs[s]. data: ranks over which R reduces. ValueError on a deadlock."""
    if len(costs) != schedule.stages:
        raise ValueError(f"{len(costs)} stage costs for {schedule.stages} stages")
    ranks = schedule.ranks
    clock, busy, place = [0.0] * ranks, [0.0] * ranks, [0] * ranks
    copies, reductions = [0.0] * ranks, [0.0] * ranks
    ends: dict[Op, float] = {}
    loaded: dict[tuple[int, int], float] = {}
    events: list[tuple[Op, int, float, float]] = []
    moved = True
    while moved:
        moved = False
        for rank in range(ranks):
            ops = schedule.ops[rank]
            while place[rank] < len(ops):
                op = ops[place[rank]]
                cost = costs[op.stage]
                if op.kind in "FBW":
                    before = needs(op, schedule.stages)
                    if not all(b in ends for b in before):
                        break
                    start = clock[rank]
                    for b in before:
                        away = schedule.rank_of(b.stage) != rank
                        start = max(start, ends[b] + (costs[b.stage].message if away else 0.0))
                    if op.kind == "B":
                        start = max(start, loaded.get((op.micro, op.stage), 0.0))
                    length = {"F": cost.forward, "B": cost.backward, "W": cost.weight}[op.kind]
                    if op.kind == "B" and not schedule.split:
                        length += cost.weight
                    clock[rank] = ends[op] = start + length
                    busy[rank] += length
                    if timeline:
                        events.append((op, rank, start, clock[rank]))
                elif op.kind == "R":
                    clock[rank] = max(clock[rank], reductions[rank])
                    reductions[rank] = clock[rank] + cost.reduction
                else:
                    copies[rank] = max(copies[rank], clock[rank]) + cost.copy
                    if op.kind == "L":
                        loaded[op.micro, op.stage] = copies[rank]
                place[rank] += 1
                moved = True
    blocked = [f"rank {r} at {ops[place[r]]}" for r, ops in enumerate(schedule.ops) if place[r] < len(ops)]
    if blocked:
        raise ValueError(f"{schedule.name}: deadlock, {'; '.join(blocked)}")
    if not any(op.kind == "R" for ops in schedule.ops for op in ops):  # whole gradients are reduced when all is done
        reductions = [clock[r] + sum(costs[s].reduction for s in schedule.stages_of(r)) for r in range(ranks)]
    memories = [_memory(schedule, r, costs, data, recompute) for r in range(ranks)]
    return Simulated(
        max(max(clock), max(reductions)),
        busy,
        [m[0] for m in memories],
        [m[1] for m in memories],
        [m[2] for m in memories],
        events,
    )


def _memory(
    schedule: Schedule, rank: int, costs: Sequence[StageCost], data: int, recompute: bool
) -> tuple[dict[str, float], dict[str, float], float]:
    """(bytes by kind at the peak of the sum, most of each kind, most on the host) of one rank."""
    now: Counter[str] = Counter()
    most: Counter[str] = Counter()
    peak: dict[str, float] = {}
    total = host = host_peak = 0.0
    sharded = any(op.kind == "R" for op in schedule.ops[rank])
    writes = "W" if schedule.split else "B"
    largest = max(costs[s].gradient for s in schedule.stages_of(rank))
    opened: set[int] = set()
    filling: set[int] = set()
    reducing: int | None = None
    buffers = 0

    def add(kind: str, size: float) -> None:
        nonlocal total, peak
        now[kind] += size
        total += size
        most[kind] = max(most[kind], now[kind])
        if total > sum(peak.values()):
            peak = dict(now)

    def finish() -> None:
        nonlocal reducing
        if reducing is not None and reducing not in opened:
            opened.add(reducing)
            shard = costs[reducing].shard
            add("gradients", costs[reducing].gradient / data if shard is None else shard)
        reducing = None

    for op in schedule.ops[rank]:
        cost = costs[op.stage]
        held = cost.entry if recompute else cost.activations
        if op.kind == writes and op.stage not in (filling if sharded else opened):
            if not sharded:
                opened.add(op.stage)
                add("gradients", cost.gradient)
            else:
                if len(filling) + (reducing is not None) == 2:
                    finish()
                filling.add(op.stage)
                if len(filling) + (reducing is not None) > buffers:
                    buffers += 1
                    add("gradients", largest)
        if op.kind == "F":
            add("activations", held)
        elif op.kind == "B":
            inside = cost.activations if recompute else 0.0
            add("activations", inside)
            if schedule.split:
                add("deferred", cost.deferred_new)
                add("activations", -held - inside)
                add("deferred", cost.deferred - cost.deferred_new)
            else:
                add("activations", -held - inside)
        elif op.kind == "W":
            add("deferred", -cost.deferred)
        elif op.kind == "R":
            finish()
            filling.discard(op.stage)
            reducing = op.stage
        else:
            away = held if op.kind == "O" else -held
            add("activations", -away)
            host += away
            host_peak = max(host_peak, host)
    finish()
    return peak, dict(most), host_peak


def measure(
    cfg: Any, specs: Sequence[Any], work: Any, batch: Mapping[str, Any], split: bool, base: StageCost | None = None
) -> list[StageCost]:
    """Bytes that one real micro-batch holds on each stage, by running it in this process (random weights)."""
    from model.pipeline import Grid, Pipeline
    from model.pipeline_schedule import build

    name = "zero_bubble" if split else "gpipe"
    schedule = build(name, ranks=1, micros=1, virtual=len(specs))
    pipe = Pipeline(cfg, schedule, specs, Grid(1, 1, 0, 0))
    pipe.local.init_weights(0)
    held: dict[Op, Counter[str]] = {}
    inside: dict[Op, tuple[float, float]] = {}

    class Watched:
        """A stage that notes the ledger around its operations."""

        def __init__(self, stage: Any) -> None:
            self.stage = stage

        def __getattr__(self, name: str) -> Any:
            return getattr(self.stage, name)

        def _note(self, kind: str, micro: int, call: Any) -> Any:
            ledger, op = pipe.ledger, Op(kind, micro, self.stage.spec.index)
            before = Counter(ledger.now)
            ledger.peak, ledger.most = dict(before), Counter(before)
            result = call()
            held[op] = Counter({k: ledger.now[k] - before[k] for k in {*ledger.now, *before}})
            activations = ledger.most["activations"] - before["activations"]
            inside[op] = activations, ledger.peak_total - sum(before.values()) - activations
            return result

        def forward(self, micro: int, *rest: Any) -> Any:
            return self._note("F", micro, lambda: self.stage.forward(micro, *rest))

        def backward(self, micro: int, *rest: Any) -> Any:
            return self._note("B", micro, lambda: self.stage.backward(micro, *rest))

    inner = dict(pipe.stages)
    pipe.stages = {s: Watched(stage) for s, stage in inner.items()}
    pipe.run(work, [batch], [1.0])
    costs = []
    for s in range(len(specs)):
        forward, backward = held[Op("F", 0, s)], held[Op("B", 0, s)]
        again, new = inside[Op("B", 0, s)]
        costs.append(
            replace(
                base or StageCost(),
                activations=again if work.recompute else forward["activations"],
                entry=forward["activations"] if work.recompute else 0,
                deferred=backward["deferred"] if split else 0,
                deferred_new=new if split else 0,
                gradient=sum(4 * p.numel() for n, p in inner[s].parameters.items() if n not in pipe.shared),
            )
        )
    return costs
