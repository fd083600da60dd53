"""Windows and recurrences cost the same per token at any length, and less than full attention at 4096 tokens: `make bench`."""

import pytest

from tests.bench.attention_kinds import measure


@pytest.mark.bench
def test_windows_and_recurrences_are_linear():
    short, long = measure([1024, 4096], kinds=("mla", "swa", "gdn", "simple_gdn"))
    for kind in ("swa", "gdn", "simple_gdn"):
        assert long[kind] <= 1.3 * short[kind], (kind, short, long)
    assert (
        long["swa"] <= 0.5 * long["mla"]
        and long["simple_gdn"] <= 0.5 * long["mla"]
        and long["gdn"] <= 0.75 * long["mla"]
    )
