"""Beam search over which layers to convert (GLM-5 §2.1.2, notes A.6; after PostNAS): which half keeps full attention.

    found = beam_search(layers=40, target=20, score=lambda pattern: ruler_at_16k(pattern), beam=8, step=2)
    found.pattern        # 'SFSSFF...': S converted, F full

    python -m pytest tests/tasks/test_beam_search.py

The beam starts with no layer converted. A step expands every candidate by every set of `step` layers that are still full,
scores what it has not seen, and keeps the best `beam`, until `target` layers are converted. An expansion costs
beam * C(full layers, step) scores; `budget` bounds the new scores of one step by a subsample drawn from the seed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from tasks.files import derive_seed


@dataclass(frozen=True)
class Found:
    """The best pattern, its score, how many patterns were scored, and the kept candidates of each step, best first."""

    pattern: str
    score: float
    scored: int
    steps: list[list[tuple[str, float]]] = field(default_factory=list)


def beam_search(
    layers: int,
    target: int,
    score: Callable[[str], float],
    beam: int = 8,
    step: int = 2,
    budget: int | None = None,
    seed: int = 0,
) -> Found:
    """Largest `score(pattern)` found with exactly `target` of `layers` converted; the last step may convert fewer than `step`.

    Equal scores go to the lexicographically smaller pattern, so the result does not depend on order. ValueError for sizes that
    make no search.
    """
    if not 0 < target <= layers or beam < 1 or step < 1 or (budget is not None and budget < 1):
        raise ValueError(
            f"beam search wants 0 < target <= layers, beam, step and budget >= 1; got layers {layers}, target {target}, "
            f"beam {beam}, step {step}, budget {budget}"
        )
    scores: dict[str, float] = {}
    kept: list[frozenset[int]] = [frozenset()]
    steps: list[list[tuple[str, float]]] = []
    converted = 0
    while converted < target:
        size = min(step, target - converted)
        candidates = sorted(
            {
                before | set(more)
                for before in kept
                for more in itertools.combinations([i for i in range(layers) if i not in before], size)
            },
            key=sorted,
        )
        if budget is not None and len(candidates) > budget:
            rng = np.random.default_rng(derive_seed(seed, "beam", converted))
            candidates = [candidates[i] for i in sorted(rng.permutation(len(candidates))[:budget])]
        ranked = []
        for candidate in candidates:
            pattern = "".join("S" if i in candidate else "F" for i in range(layers))
            if pattern not in scores:
                scores[pattern] = float(score(pattern))
            ranked.append((-scores[pattern], pattern, candidate))
        ranked.sort(key=lambda row: row[:2])
        kept = [candidate for _, _, candidate in ranked[:beam]]
        steps.append([(pattern, -negative) for negative, pattern, _ in ranked[:beam]])
        converted += size
    pattern, best = steps[-1][0]
    return Found(pattern, best, len(scores), steps)


def interleaved(layers: int) -> str:
    """The fixed alternation full, converted, full, ...: half of the layers, rounded down, are converted."""
    return "".join("S" if i % 2 else "F" for i in range(layers))
