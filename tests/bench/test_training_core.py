"""Ratios of the training core on one thread: `make bench`."""

import pytest

from tests.bench import checkpointing, recompute


@pytest.mark.bench
def test_recomputation_halves_memory_for_a_third_more_time():
    found = recompute.measure()
    plain, block = found["none"], found["block"]
    assert block["peak_mib"] <= 0.5 * plain["peak_mib"], found
    assert block["cpu_s"] <= 1.45 * plain["cpu_s"], found
    assert found["selective"]["cpu_s"] < block["cpu_s"], found


@pytest.mark.bench
def test_hashes_and_the_background_cost_little():
    found = checkpointing.measure(checkpointing.tiny_files())
    assert found["checked"]["cpu_ms"] <= 2 * found["bare"]["cpu_ms"], found
    assert found["background"]["blocked_ms"] <= 0.5 * found["checked"]["blocked_ms"], found
