"""The promised decoding speed relative to transformers, in one run on one thread: `make bench`."""

import pytest

from tests.bench.decode_speed import REQUIRED, measure


@pytest.mark.bench
@pytest.mark.parametrize("topk", [64, 32])
def test_decoding_is_faster_than_transformers(topk):
    """Batch 128, prompt 32 + 32 new, prefill included; topk 64 never selects, topk 32 selects for every new token."""
    pytest.importorskip("transformers")
    row = measure(topk)
    assert row["ratio"] >= REQUIRED, row
