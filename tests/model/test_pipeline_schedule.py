"""Schedules as data: complete, free of deadlock, bounded; the validator refuses broken ones; placement against brute force."""

import itertools

import pytest

from model.config import ModelConfig
from model.pipeline_place import allowed_cuts, place, stage_names
from model.pipeline_schedule import (
    Op,
    Schedule,
    build,
    check,
    defer_weights,
    full_buffers,
    in_flight,
    needs,
    one_f_one_b,
    with_offload,
    with_reductions,
)

SIZES = [(1, 1, 1), (1, 4, 2), (2, 2, 1), (2, 4, 2), (3, 6, 2), (4, 8, 1), (4, 8, 2), (4, 12, 3), (8, 16, 2)]


def every(sizes=SIZES):
    for ranks, micros, virtual in sizes:
        for name in ("gpipe", "1f1b", "interleaved", "zero_bubble"):
            if name != "1f1b" or virtual == 1:
                yield build(name, ranks=ranks, micros=micros, virtual=virtual)


def span(schedule, costs):
    """End of the last operation when each starts as early as its rank's order and its needs allow (an independent clock)."""
    ends, clock, place_ = {}, [0.0] * schedule.ranks, [0] * schedule.ranks
    while any(p < len(ops) for p, ops in zip(place_, schedule.ops)):
        for rank, ops in enumerate(schedule.ops):
            if place_[rank] < len(ops) and all(b in ends for b in needs(ops[place_[rank]], schedule.stages)):
                op = ops[place_[rank]]
                start = max([clock[rank], *(ends[b] for b in needs(op, schedule.stages))])
                clock[rank] = ends[op] = start + costs.get(op.kind, 0.0)
                place_[rank] += 1
    return max(clock)


def test_every_schedule_and_pass_is_valid():
    for schedule in every():
        check(schedule)
        check(with_reductions(schedule), buffers=2)
        check(with_offload(with_reductions(schedule)))


def test_activations_in_flight_by_hand():
    assert in_flight(build("gpipe", ranks=4, micros=8)) == [8] * 4
    assert in_flight(build("1f1b", ranks=4, micros=8)) == [4, 3, 2, 1]
    # Megatron: 2 (p - r - 1) + (v - 1) p + 1
    assert in_flight(build("interleaved", ranks=4, micros=8, virtual=2)) == [11, 9, 7, 5]
    for virtual in (1, 2):
        base = build("interleaved", ranks=4, micros=8, virtual=virtual)
        deferred = build("zero_bubble", ranks=4, micros=8, virtual=virtual)
        assert max(in_flight(deferred)) == max(in_flight(base))
    offloaded = with_offload(build("interleaved", ranks=4, micros=8, virtual=2))
    assert in_flight(offloaded) == [2, 2, 2, 2]


@pytest.mark.parametrize("ranks, micros", [(2, 4), (4, 8), (4, 16), (8, 16)])
def test_idle_time_against_the_closed_forms(ranks, micros):
    costs = {"F": 1.0, "B": 2.0}
    work = 3.0 * micros
    assert span(build("gpipe", ranks=ranks, micros=micros), costs) == work + 3 * (ranks - 1)
    assert span(build("1f1b", ranks=ranks, micros=micros), costs) == work + 3 * (ranks - 1)
    halves = {"F": 0.5, "B": 1.0}
    assert span(build("interleaved", ranks=ranks, micros=micros, virtual=2), halves) == work + 3 * (ranks - 1) / 2
    # ZB-H1: (p - 1) (F + B - W) instead of (p - 1) (F + B + W)
    thirds = {"F": 1.0, "B": 1.0, "W": 1.0}
    assert span(build("zero_bubble", ranks=ranks, micros=micros), thirds) == work + ranks - 1


def test_deferral_and_interleaving_together_idle_less_than_each():
    costs = {"F": 1.0, "B": 1.0, "W": 1.0}
    whole = {"F": 1.0, "B": 2.0}
    both = span(build("zero_bubble", ranks=4, micros=8, virtual=2), costs)
    assert both < span(build("interleaved", ranks=4, micros=8, virtual=2), whole)
    assert both < 2 * span(build("zero_bubble", ranks=4, micros=8), costs)


def test_a_tighter_limit_costs_time_not_correctness():
    base = one_f_one_b(4, 8)
    tight = defer_weights(base, limit=4)
    check(tight, limit=4)
    loose = defer_weights(base, limit=8)
    check(loose, limit=8)
    few = defer_weights(base, pending=1)
    check(few, limit=4)
    for ops in few.ops:  # never two B without their W
        waiting = 0
        for op in ops:
            waiting += {"B": 1, "W": -1}.get(op.kind, 0)
            assert waiting <= 1
    with pytest.raises(ValueError, match=r"pending \(0\) must be at least 1"):
        defer_weights(base, pending=0)
    costs = {"F": 1.0, "B": 1.0, "W": 1.0}
    assert span(few, costs) >= span(tight, costs)
    assert span(loose, costs) <= span(tight, costs) < span(base, {"F": 1.0, "B": 2.0})


def test_reductions_follow_each_run_of_one_stage():
    schedule = with_reductions(build("interleaved", ranks=2, micros=8, virtual=3))
    assert full_buffers(schedule) == [2, 2]
    for ops in schedule.ops:
        assert sum(op.kind == "R" for op in ops) == 3 * 8 // 2
        open_ = None
        for op in ops:
            if op.kind == "B":
                assert open_ in (None, op.stage)
                open_ = op.stage
            elif op.kind == "R":
                assert op.stage == open_
                open_ = None
        assert open_ is None


def changed(schedule, rank, ops):
    lists = list(schedule.ops)
    lists[rank] = tuple(ops)
    return Schedule(schedule.name, schedule.ranks, schedule.virtual, schedule.micros, tuple(lists), schedule.split)


def test_the_validator_refuses_broken_schedules():
    good = one_f_one_b(2, 3)
    ops = good.ops[0]
    with pytest.raises(ValueError, match=r"rank 0 lacks or should not have B2\.0"):
        check(changed(good, 0, ops[:-1]))
    with pytest.raises(ValueError, match="more than once"):
        check(changed(good, 0, [*ops, ops[-1]]))
    with pytest.raises(ValueError, match=r"B0\.0 follows nothing"):
        check(changed(good, 0, sorted(ops)))
    # each rank's own order is fine, but rank 1 wants micro-batch 1 first and rank 0 sends it only after B0
    late = [Op("F", 0, 0), Op("B", 0, 0), Op("F", 1, 0), Op("B", 1, 0), Op("F", 2, 0), Op("B", 2, 0)]
    swapped = [Op("F", 1, 1), Op("B", 1, 1), Op("F", 0, 1), Op("B", 0, 1), Op("F", 2, 1), Op("B", 2, 1)]
    with pytest.raises(ValueError, match=r"deadlock, rank 0 at B0\.0; rank 1 at F1\.1"):
        check(changed(changed(good, 0, late), 1, swapped))
    with pytest.raises(ValueError, match="rank 0 holds 3 activations, limit 2"):
        check(build("gpipe", ranks=2, micros=3), limit=2)
    with pytest.raises(ValueError, match="full buffers, limit 2"):
        check(build("interleaved", ranks=2, micros=4, virtual=3), buffers=2)
    reduced = with_reductions(good)
    with pytest.raises(ValueError, match="never reduced"):
        check(changed(reduced, 0, [*reduced.ops[0][:-2], Op("R", 1, 0), reduced.ops[0][-2]]))
    moved = with_offload(build("gpipe", ranks=2, micros=3))
    with pytest.raises(ValueError, match="follows O"):
        check(changed(moved, 0, [op for op in moved.ops[0] if op.kind != "L"]))


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(name="dualpipe", ranks=2, micros=2), "expected one of gpipe"),
        (dict(name="1f1b", ranks=2, micros=2, virtual=2), "virtual = 2 needs interleaved"),
        (dict(name="interleaved", ranks=4, micros=6, virtual=2), "groups of ranks = 4; 6"),
        (dict(name="gpipe", ranks=0, micros=6), "at least 1"),
    ],
)
def test_requests_that_fit_no_schedule(arguments, message):
    with pytest.raises(ValueError, match=message):
        build(**arguments)


def test_placement_against_brute_force():
    costs = [1.0, 1.0, 2.0, 1.5, 1.0, 0.5, 2.5]
    for stages, flexible in itertools.product((2, 3, 4), (True, False)):
        found = place(
            7, stages, mtp=True, flexible=flexible, layer_costs=costs, embed_cost=0.5, mtp_cost=2.0, head_cost=3.0
        )
        carriers = stages - 1 if flexible else stages

        def dearest(bounds, carriers=carriers, stages=stages):
            cost = [sum(costs[a:b]) for a, b in itertools.pairwise(bounds)] + [0.0] * (stages - carriers)
            cost[0] += 0.5
            cost[carriers - 1] += 2.0
            cost[-1] += 3.0
            return max(cost)

        best = min(
            dearest((0, *inside, 7))
            for inside in itertools.combinations_with_replacement(range(1, 8), carriers - 1)
            if all(a < b for a, b in itertools.pairwise((0, *inside)))
        )
        bounds = [0] + [s.layers[-1] + 1 for s in found[:carriers] if s.layers]
        assert dearest(bounds + [7] * (carriers + 1 - len(bounds))) == best
        assert [i for s in found for i in s.layers] == list(range(7))
        assert found[carriers - 1].mtp and found[carriers - 1].norm and found[-1].head and found[0].embed


def test_placement_needs_enough_layers_and_keeps_shared_selections_together():
    with pytest.raises(ValueError, match=r"3 layers \(model.num_hidden_layers\) cannot be cut into 5"):
        place(3, 5, mtp=True)
    cfg = ModelConfig(num_hidden_layers=6, indexer_types=("full", "shared", "shared", "full", "shared", "shared"))
    cut = place(6, 2, mtp=False, layer_costs=[1, 1, 1, 1, 1, 5], cuts=allowed_cuts(cfg))
    assert [s.layers for s in cut] == [(0, 1, 2), (3, 4, 5)]
    with pytest.raises(ValueError, match="a stage may begin at 3"):
        place(6, 4, mtp=False, cuts=allowed_cuts(cfg))


def test_every_parameter_belongs_to_a_stage():
    import torch

    from model.transformer import GlmMoeDsa

    cfg = ModelConfig(num_hidden_layers=6)
    with torch.device("meta"):
        names = [n for n, _ in GlmMoeDsa(cfg).named_parameters()]
    specs = place(6, 4, mtp=True)
    users = {n: [s.index for s in specs if stage_names(cfg, s, n)] for n in names}
    assert {n: u for n, u in users.items() if len(u) != 1} == {"model.embed_tokens.weight": [0, 2]}
    assert users["model.layers.6.shared_head.norm.weight"] == [3] and users["model.layers.6.eh_proj.weight"] == [2]
