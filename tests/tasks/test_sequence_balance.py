"""Balancing: nothing lost, near the optimum of brute force, better on real and skewed lengths; groups that respect memory.

python -m pytest tests/tasks/test_sequence_balance.py
"""

import itertools

import numpy as np
import pytest

from model.config import ModelConfig
from tasks.costs import forward_flops
from tasks.sequence_balance import (
    balanced,
    fixed_groups,
    imbalance,
    plan_groups,
    rank_loads,
    sequence_cost,
    share,
)
from tests.bench.sequence_balance import config, grouping, real_lengths, reordering, skewed
from tests.model.sizes import micro


def optimum(costs, ranks):
    """Least possible maximum, by trying every assignment."""
    return min(
        max(sum(c for c, r in zip(costs, owner) if r == rank) for rank in range(ranks))
        for owner in itertools.product(range(ranks), repeat=len(costs))
    )


def test_balanced_is_near_the_optimum_and_loses_nothing():
    for seed in range(25):
        rng = np.random.default_rng(seed)
        ranks = 2 + seed % 2
        costs = [float(c) for c in rng.lognormal(2, 1, 8)]
        parts = balanced(costs, ranks)
        assert sorted(i for part in parts for i in part) == list(range(8))
        assert max(sum(costs[i] for i in part) for part in parts) <= 1.12 * optimum(costs, ranks)
    assert balanced([], 3) == [[], [], []]
    assert sorted(map(len, balanced([1.0], 3))) == [0, 0, 1]


def test_the_classic_case_where_longest_first_is_not_best():
    parts = balanced([8.0, 7.0, 6.0, 5.0, 4.0], 2)
    assert max(sum([8.0, 7.0, 6.0, 5.0, 4.0][i] for i in part) for part in parts) <= 16  # longest first alone: 17


def test_shares_are_the_step_and_none_deals_in_turn():
    cost = sequence_cost(micro(), sparse=False)
    lengths = [5, 90, 7, 30, 31, 8]
    assert share(lengths, cost, 2, "none") == [[0, 2, 4], [1, 3, 5]]
    for how in ("tokens", "cost"):
        parts = share(lengths, cost, 3, how)
        assert sorted(i for part in parts for i in part) == list(range(6))
        assert all(part == sorted(part) for part in parts)
        assert parts == share(lengths, cost, 3, how)
    with pytest.raises(ValueError, match="loop.balance must be one of none, tokens, cost, got 'evenly'"):
        share(lengths, cost, 2, "evenly")


def test_cost_is_three_forward_passes_and_dense_attention_repeats_its_expansion():
    cfg = micro()
    dense, sparse = sequence_cost(cfg, sparse=False), sequence_cost(cfg, sparse=True)
    assert dense(64, 1) == pytest.approx(3 * 64 * forward_flops(cfg, 64, sparse=False).total)
    # kv_b_proj of the whole sequence on each of two ranks: one half of it more than a half
    expansion = 2 * 20 * 3 * (12 + 16) * cfg.num_hidden_layers * 64 * 3
    assert dense(64, 2) == pytest.approx((dense(64, 1) + expansion) / 2)
    assert sparse(64, 2) == pytest.approx(sparse(64, 1) / 2)  # absorbed: on the query's side
    assert dense(128, 1) > 2 * dense(64, 1)


def test_real_lengths_of_the_line_get_more_even():
    lengths = real_lengths()
    if not lengths:
        pytest.skip("no data/ of a finished run")
    cfg = config()
    for name in ("conversations", "repositories", "long documents"):
        if len(lengths.get(name, [])) < 64:
            continue
        for sparse in (False, True):
            found = reordering(lengths[name], 8, 64, sparse, cfg)
            assert found["cost"]["idle"] < 0.03 < 0.1 < found["none"]["idle"], (name, found)
    found = grouping(lengths["documents"], 16, 64, True, cfg)
    assert (
        found["variable"]["idle"] < 0.05 and found["variable"]["relative_time"] < 0.8 * found["fixed"]["relative_time"]
    )


def test_a_fixed_skewed_distribution_gets_more_even():
    cfg = config()
    found = reordering(skewed(), 8, 64, True, cfg)
    assert found["cost"]["max_over_mean"] < 0.75 * found["none"]["max_over_mean"]
    found = grouping(skewed(), 16, 64, True, cfg)
    assert found["variable"]["idle"] < 0.05 < 0.15 < found["fixed"]["idle"]
    assert found["variable"]["relative_time"] < 0.85
    assert found["variable"]["gigabytes"] < 0.5 * found["fixed"]["gigabytes"]


def test_groups_cover_the_sequences_respect_memory_and_are_never_worse_than_one_size():
    cfg: ModelConfig = micro()
    cost = sequence_cost(cfg, sparse=False)
    for seed in range(20):
        rng = np.random.default_rng(seed)
        lengths = np.clip(rng.lognormal(5, 1.3, 24), 8, 4000).astype(int).tolist()
        groups = plan_groups(lengths, 8, cost, max_tokens=1000)
        assert sorted(i for g in groups for i in g.sequences) == list(range(24))
        ranks = [rank for g in groups for rank in g.ranks]
        assert ranks == sorted(set(ranks)) and max(ranks) < 8
        for g in groups:
            assert all(lengths[i] <= 1000 * g.size for i in g.sequences)
            assert g.load == pytest.approx(sum(cost(lengths[i], g.size) for i in g.sequences))
        worst = max(rank_loads(groups, 8))
        for size in (1, 2, 4, 8):
            if 2 * size <= min(lengths) and max(lengths) <= 1000 * size:
                assert worst <= max(rank_loads(fixed_groups(lengths, 8, cost, size), 8)) * 1.04
        assert groups == plan_groups(lengths, 8, cost, max_tokens=1000)


def test_one_long_sequence_among_short_ones_gets_most_ranks():
    groups = plan_groups([10, 30, 14], 4, lambda n, ranks: n * n / ranks, sizes=(1, 2, 3, 4))
    assert [(g.ranks, g.sequences, g.load) for g in groups] == [((0, 1, 2), (1,), 300.0), ((3,), (0, 2), 296.0)]


def test_a_sequence_that_fits_nowhere_is_refused_and_no_sequence_is_no_group():
    cost = sequence_cost(micro(), sparse=False)
    with pytest.raises(ValueError, match="a sequence of 900 tokens does not fit 4 ranks of 200 tokens each"):
        plan_groups([900, 5], 4, cost, max_tokens=200)
    with pytest.raises(ValueError, match="take both a sequence of 900 tokens and one of 5"):
        plan_groups([900, 5], 4, cost, max_tokens=250)
    with pytest.raises(ValueError, match="6 ranks cannot be split into context groups of 4"):
        fixed_groups([5], 6, cost, 4)
    assert plan_groups([], 4, cost) == []
    assert imbalance([[2.0, 1.0], [1.0, 2.0]]) == {"max_over_mean": 4 / 3, "idle": 0.25}
