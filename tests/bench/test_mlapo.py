"""The fused pre-processing of a decoding step is not slower than its steps in turn: `make bench`."""

import pytest

from tests.bench.mlapo import measure


@pytest.mark.bench
@pytest.mark.parametrize("batch", [1, 32, 128])
def test_fused_preprocessing_is_faster(batch):
    assert measure(batch)["ratio"] > 1.05
