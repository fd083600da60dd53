"""Two ranks spend little more CPU time than one process on the tiny profile's pre-training step: `make bench`."""

import pytest

from tests.bench.data_parallel import measure


@pytest.mark.bench
def test_the_second_process_costs_little():
    (row,) = measure(["pretrain"], steps=12, rounds=2)
    assert row["cpu_ratio"] <= 1.25, row
