"""The simulator against hand-computed pipelines, real gloo ranks' bytes, and real ranks' waiting times."""

import functools
import time

import pytest
import torch
import torch.distributed as dist

from model.pipeline import Grid, Pipeline, Transport, execute
from model.pipeline_place import place
from model.pipeline_schedule import Op, build, with_offload, with_reductions
from model.pipeline_stage import Work
from tasks.pipeline_sim import StageCost, measure, simulate
from tests.model.ranks import run_ranks
from tests.model.test_pipeline import batches, config, head


def test_span_and_idle_of_small_pipelines_by_hand():
    costs = [StageCost(1.0, 1.0, 1.0)] * 4
    found = simulate(build("1f1b", ranks=4, micros=8), costs)
    assert found.span == 3 * 8 + 3 * 3 and found.busy == [24.0] * 4 and found.bubble == pytest.approx(3 / 8)
    assert simulate(build("zero_bubble", ranks=4, micros=8), costs).bubble == pytest.approx(1 / 8)
    halves = [StageCost(0.5, 0.5, 0.5)] * 8
    found = simulate(build("interleaved", ranks=4, micros=8, virtual=2), halves)
    assert found.bubble == pytest.approx(3 / 16)


def test_the_slowest_stage_and_the_messages_count():
    schedule = build("1f1b", ranks=2, micros=4)
    found = simulate(schedule, [StageCost(1.0, 1.0, 1.0), StageCost(2.0, 2.0, 2.0)])
    assert found.span == 1 + 4 * 6 + 2 and found.busy == [12.0, 24.0]
    late = simulate(schedule, [StageCost(1.0, 1.0, 1.0, message=0.25)] * 2)
    assert (
        late.span == 16
    )  # by hand: rank 1 starts 1/4 late, waits 1/4 twice for what rank 0 sends after B0 and B1, ends 1/4 early


def test_memory_by_hand():
    costs = [StageCost(activations=10, deferred=4, deferred_new=1, gradient=100, entry=2)] * 4
    plain = simulate(build("1f1b", ranks=4, micros=8), costs)
    assert [p["activations"] for p in plain.most] == [40, 30, 20, 10] and plain.most[0]["gradients"] == 100
    assert plain.peaks[0] == {"gradients": 100, "activations": 40} or sum(plain.peaks[0].values()) == 140
    again = simulate(build("1f1b", ranks=4, micros=8), costs, recompute=True)
    assert [p["activations"] for p in again.most] == [4 * 2 + 10, 3 * 2 + 10, 2 * 2 + 10, 12]
    eight = [StageCost(activations=10, gradient=100)] * 8
    interleaved = build("interleaved", ranks=4, micros=8, virtual=2)
    whole = simulate(interleaved, eight, data=4)
    shards = simulate(with_reductions(interleaved), eight, data=4)
    assert whole.most[0]["gradients"] == 200 and shards.most[0]["gradients"] == 2 * 100 + 2 * 25
    deep = [StageCost(gradient=100)] * 16
    four = build("interleaved", ranks=4, micros=8, virtual=4)
    assert simulate(four, deep).most[0]["gradients"] == 400
    assert simulate(with_reductions(four), deep, data=4).most[0]["gradients"] == 200 + 4 * 25
    moved = simulate(with_offload(interleaved), eight)
    assert moved.most[0]["activations"] == 20 and moved.host[0] == 110 - 10


def test_copies_that_are_too_slow_delay_the_backward_pass():
    schedule = with_offload(build("1f1b", ranks=4, micros=8))
    fast = simulate(schedule, [StageCost(copy=0.5)] * 4)
    slow = simulate(schedule, [StageCost(copy=4.0)] * 4)
    assert fast.span == simulate(build("1f1b", ranks=4, micros=8), [StageCost()] * 4).span < slow.span


# ---- against real ranks


CASES = {
    "1f1b": ("1f1b", 1, {}),
    "interleaved": ("interleaved", 2, {}),
    "offload": ("interleaved", 2, {"offload": True}),
    "recompute": ("interleaved", 2, {"recompute": True}),
    "shards": ("interleaved", 3, {"shards": True}),
    "deferral": ("zero_bubble", 2, {}),
    "everything": ("zero_bubble", 2, {"shards": True, "offload": True, "recompute": True}),
}
QUICK = ["interleaved", "everything"]


def prepared(cfg, name, virtual, options, micros):
    schedule = build(name, ranks=2, micros=micros, virtual=virtual)
    schedule = with_reductions(schedule) if options.get("shards") else schedule
    schedule = with_offload(schedule) if options.get("offload") else schedule
    work = Work(functools.partial(head, 0.3), "sparse", 2, 0.03, 4, recompute=options.get("recompute", False))
    return schedule, place(cfg.num_hidden_layers, schedule.stages, mtp=True), work


def held_bytes(rank, world, cfg, micros, labels):
    found = {}
    for label, (name, virtual, options) in ((k, CASES[k]) for k in labels):
        schedule, specs, work = prepared(cfg, name, virtual, options, micros)
        grid = Grid.create(2)
        pipe = Pipeline(cfg, schedule, specs, grid)
        pipe.local.init_weights(0)
        data, shares = batches(micros * grid.data)
        pipe.run(work, data[grid.replica :: grid.data], shares[grid.replica :: grid.data])
        found[label] = (pipe.ledger.peak_total, dict(pipe.ledger.most), pipe.ledger.host_peak)
    return found


@pytest.mark.parametrize("world, slow", [(2, False), *(pytest.param(n, True, marks=pytest.mark.slow) for n in (2, 4))])
def test_peak_bytes_equal_the_executors(world, slow):
    cfg, micros = config(), 8
    labels = QUICK if world == 2 and not slow else list(CASES)
    real = run_ranks(world, held_bytes, cfg, micros, labels)
    for label, (name, virtual, options) in ((k, CASES[k]) for k in labels):
        schedule, specs, work = prepared(cfg, name, virtual, options, micros)
        costs = measure(cfg, specs, work, batches(1)[0][0], schedule.split)
        found = simulate(schedule, costs, data=world // 2, recompute=work.recompute)
        for rank in range(world):
            peak, most, host = real[rank][label]
            where = f"{label}, rank {rank}"
            assert sum(found.peaks[rank % 2].values()) == pytest.approx(peak, rel=1e-4), where
            assert found.host[rank % 2] == pytest.approx(host, rel=1e-4), where
            for kind, size in most.items():
                if size:
                    assert found.most[rank % 2].get(kind, 0) == pytest.approx(size, rel=1e-4), (where, kind)


class Sleeping:
    """A stage whose operations last a known time and whose tensors are tiny."""

    def __init__(self, seconds):
        self.seconds = seconds

    def _work(self, kind):
        time.sleep(self.seconds[kind])
        return torch.zeros(1)

    def forward(self, micro, x, batch, share, weights):
        return self._work("F")

    def backward(self, micro, gradient):
        return self._work("B")

    def weight(self, micro):
        self._work("W")


def _append(events, *event):
    events.append(event)


def waiting(rank, world, schedules, seconds):
    """Per schedule: every operation's (op, ready, ended) and the start of the run."""
    found = {}
    grid = Grid.create(world)
    for label, schedule in schedules.items():
        times = seconds[label]
        stages = {s: Sleeping(times[s]) for s in schedule.stages_of(rank)}
        transport = Transport(schedule, grid, torch.device("cpu"), lambda op: ((1,), torch.float32))
        events = []
        dist.barrier()
        start = time.perf_counter()
        note = functools.partial(_append, events)
        nothing = [None] * schedule.micros
        execute(schedule, rank, stages, transport, None, nothing, nothing, nothing, note)
        found[label] = start, [(tuple(op), ready, ended) for op, _, ready, ended in events]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_idle_share_equals_the_measured_one(world):
    unit, micros = 0.05, 8  # long against what a busy machine takes to pass a message on
    schedules = {
        "1f1b": build("1f1b", ranks=world, micros=micros),
        "interleaved": build("interleaved", ranks=world, micros=micros, virtual=2),
        "zero_bubble": build("zero_bubble", ranks=world, micros=micros),
        "both": build("zero_bubble", ranks=world, micros=micros, virtual=2),
        "uneven": build("1f1b", ranks=world, micros=micros),
    }
    seconds, shares = {}, {}
    for label, schedule in schedules.items():
        whole = 1 if schedule.split else 2  # B does W's work as well when it is not split
        size = unit / schedule.virtual
        stages = [dict(F=size, B=whole * size, W=size) for _ in range(schedule.stages)]
        if label == "uneven":
            stages[-1] = {k: 1.5 * v for k, v in stages[-1].items()}
        seconds[label] = stages
    real = run_ranks(world, waiting, schedules, seconds)
    for label, schedule in schedules.items():
        start = min(r[label][0] for r in real)
        events = [event for r in real for event in r[label][1]]
        span = max(ended for _, _, ended in events) - start
        measured = [1 - sum(e - r for _, r, e in found[label][1]) / span for found in real]
        costs = []
        for s in range(schedule.stages):  # what the operations really lasted: a sleep never ends early, but late
            mean = {}
            for kind in "FBW":
                lasted = [e - r for (k, _, stage), r, e in events if (k, stage) == (kind, s)]
                mean[kind] = sum(lasted) / len(lasted) if lasted else 0.0
            costs.append(StageCost(mean["F"], mean["B"], mean["W"]))
        found = simulate(schedule, costs)
        shares[label] = found.idle, measured
        assert found.idle == pytest.approx(measured, abs=0.06), (label, found.idle, measured)
    print({k: ([round(x, 3) for x in a], [round(x, 3) for x in b]) for k, (a, b) in shares.items()})
    mean = {k: sum(b) / len(b) for k, (_, b) in shares.items()}
    assert mean["zero_bubble"] < mean["1f1b"] and mean["interleaved"] < mean["1f1b"] and mean["both"] < mean["1f1b"]


def test_blocked_schedules_and_wrong_sizes_are_named():
    with pytest.raises(ValueError, match="3 stage costs for 2 stages"):
        simulate(build("1f1b", ranks=2, micros=2), [StageCost()] * 3)
    good = build("1f1b", ranks=2, micros=2)
    broken = type(good)("x", 2, 1, 2, (good.ops[0][::-1], good.ops[1]))
    with pytest.raises(ValueError, match="deadlock, rank 0 at B1.0"):
        simulate(broken, [StageCost()] * 2)
    assert Op("B", 1, 0) == good.ops[0][-1]
