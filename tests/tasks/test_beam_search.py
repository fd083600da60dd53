"""Beam search over layers, against hand-computed steps and against all patterns."""

import itertools
import zlib

import pytest

from tasks.beam_search import beam_search, interleaved


def test_by_hand():
    """Four layers, two steps of one, beam 2. Layer values 3, 2, 1, 0, but layers 0 and 1 together cost 10.

    Step 1 keeps SFFF (3) and FSFF (2). Step 2 scores SSFF -5, SFSF 4, SFFS 3, FSSF 3, FSFS 2: SFSF wins.
    """
    asked = []

    def score(pattern):
        asked.append(pattern)
        value = sum(v for v, letter in zip((3, 2, 1, 0), pattern, strict=True) if letter == "S")
        return value - (10 if pattern.startswith("SS") else 0)

    found = beam_search(4, 2, score, beam=2, step=1)
    assert (found.pattern, found.score, found.scored) == ("SFSF", 4.0, 9)
    assert found.steps == [[("SFFF", 3.0), ("FSFF", 2.0)], [("SFSF", 4.0), ("FSSF", 3.0)]]
    assert len(asked) == len(set(asked)), "a pattern that two candidates lead to is scored once"
    assert sorted(asked[4:]) == ["FSFS", "FSSF", "SFFS", "SFSF", "SSFF"]


def test_pairs_at_a_time_and_an_odd_rest():
    """Five layers, three converted, two per step: the second step converts one. Pairs of neighbours are worth nothing."""

    def score(pattern):
        return sum(i for i, c in enumerate(pattern) if c == "S") - 100 * ("SS" in pattern)

    found = beam_search(5, 3, score, beam=8, step=2)
    assert found.pattern == "SFSFS" and [len(p) for p, _ in found.steps[0]] == [5] * 8
    assert found.steps[0][0] == ("FFSFS", 6.0) and found.steps[1][0] == ("SFSFS", 6.0)


def test_a_wide_beam_is_exhaustive():
    score = lambda p: zlib.crc32(p.encode()) % 1000  # noqa: E731 - any function of the pattern
    best = max(
        ("".join("S" if i in c else "F" for i in range(6)) for c in itertools.combinations(range(6), 4)),
        key=lambda p: (score(p), [-ord(c) for c in p]),
    )
    assert beam_search(6, 4, score, beam=100, step=2).pattern == best


def test_the_budget_bounds_a_step_and_is_reproducible():
    calls = []

    def score(pattern):
        calls.append(pattern)
        return pattern.index("S")

    first = beam_search(10, 4, score, beam=3, step=2, budget=12, seed=5)
    assert len(calls) <= 24 and first.scored == len(calls)
    assert beam_search(10, 4, score, beam=3, step=2, budget=12, seed=5) == first
    drawn = calls[:12]
    calls.clear()
    beam_search(10, 4, score, beam=3, step=2, budget=12, seed=6)
    assert calls[:12] != drawn


def test_ties_and_refusals():
    assert beam_search(4, 2, lambda p: 0.0).pattern == "FFSS"
    assert interleaved(5) == "FSFSF" and interleaved(4) == "FSFS"
    for bad in ({"target": 0}, {"target": 5}, {"beam": 0}, {"step": 0}, {"budget": 0}):
        with pytest.raises(ValueError, match="beam search wants"):
            beam_search(**({"layers": 4, "target": 2, "score": len} | bad))
