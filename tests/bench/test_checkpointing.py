"""Ranks write what they own: no gather, and no more work than the gather took.

python -m pytest -m bench tests/bench/test_checkpointing.py
"""

import pytest

from tests.bench.checkpointing import compare_ranks


@pytest.mark.bench
def test_owned_against_gathered():
    found = compare_ranks(2, hidden=256)
    total = sum(row["owns"] for row in found)
    assert max(row["owns"] for row in found) < 0.55 * total
    assert all(row["owned"]["received"] < 4096 for row in found)
    assert found[0]["gathered"]["received"] > 0.4 * total, "what rank 0 was sent before"
    cpu = {way: sum(row[way]["cpu"] for row in found) for way in ("gathered", "owned")}
    print(f"CPU of all ranks, owned to gathered: {cpu['owned'] / cpu['gathered']:.2f}")
    assert cpu["owned"] <= cpu["gathered"]
