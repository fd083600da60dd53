"""The promised training speed relative to transformers, in one run on one thread: `make bench`."""

import pytest

from tests.bench.train_speed import REQUIRED, REQUIRED_BEST, measure


@pytest.mark.bench
@pytest.mark.parametrize("length", sorted(REQUIRED))
def test_training_is_faster_than_transformers(length):
    pytest.importorskip("transformers")
    (row,) = measure([length])
    assert row["ratio"] >= REQUIRED[length], row
    assert row["ratio_best"] >= REQUIRED_BEST[length], row
