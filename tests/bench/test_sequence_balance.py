"""Imbalance before and after on the lengths of this line's data: `make bench`."""

import pytest

from tests.bench.sequence_balance import config, real_lengths, reordering


@pytest.mark.bench
@pytest.mark.parametrize("name", ["conversations", "repositories", "long documents"])
def test_balancing_by_work_leaves_no_rank_idle(name):
    lengths = real_lengths().get(name, [])
    if len(lengths) < 64:
        pytest.skip("no data/ of a finished run")
    row = reordering(lengths, 8, 64, True, config())
    assert row["cost"]["idle"] <= 0.02 and row["none"]["idle"] >= 0.1, row
