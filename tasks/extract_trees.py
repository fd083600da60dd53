"""Boosted trees over blocks, and what the second ones see of the first ones' opinion; compiled by numba."""

from __future__ import annotations

import numpy as np
from numba import njit

SECOND = (
    [f"p{offset:+d}" for offset in range(-4, 5)]
    + "window1 window2 window5 window10 parent container0 container1 container2 top page_max page_mean before after "
    "rank long_above long_below same_class".split()
)
_WINDOWS = np.array([1, 2, 5, 10])
_EARLY, _SURE = 40, 3.5


@njit(cache=True, nogil=True)
def second(x, near, elements, blocks, p, width):
    """X with the columns SECOND behind it: what the first trees say of a block's neighbours and containers."""
    n, base, n_el = len(p), x.shape[1], len(elements)
    out = np.empty((n, width), np.float32)
    out[:, :base] = x
    mass, good = np.zeros(n_el, np.float64), np.zeros(n_el, np.float64)
    same, same_good = np.zeros(n_el, np.float64), np.zeros(n_el, np.float64)
    all_words, all_good, top = np.float64(1e-6), np.float64(0), np.float64(0)
    w = np.empty(n, np.float64)
    for b in range(n):
        w[b] = np.exp(x[b, 0]) - 1
        e = blocks[b, 2]
        mass[e] += w[b]
        good[e] += w[b] * p[b]
        all_words += w[b]
        all_good += w[b] * p[b]
        top = max(top, p[b])
        parent = max(elements[e, 1], 0)
        same[parent] += 1
        same_good[parent] += p[b]
    for e in range(n_el - 1, 0, -1):
        mass[elements[e, 1]] += mass[e]
        good[elements[e, 1]] += good[e]
    before, above = np.float64(0), np.float64(0)
    for b in range(n):
        f = base
        for offset in range(-4, 5):
            other = b + offset
            out[b, f] = p[other] if 0 <= other < n else 0
            f += 1
        for k in range(4):
            span, weight, value = _WINDOWS[k], np.float64(1e-6), np.float64(0)
            for other in range(max(0, b - span), min(n, b + span + 1)):
                if other != b:
                    weight += w[other]
                    value += w[other] * p[other]
            out[b, f] = value / weight
            f += 1
        for k in range(5):
            e = near[b, k]
            rest = mass[e] - w[b]
            out[b, f] = (good[e] - w[b] * p[b]) / rest if rest > 0.5 else -1
            f += 1
        parent = max(elements[blocks[b, 2], 1], 0)
        below = np.float64(0)
        for other in range(b + 1, min(n, b + 30)):
            below = max(below, p[other] if w[other] >= 10 else np.float64(0))
        share = all_good + 1e-6
        for value in (
            top, all_good / all_words, before / share, (all_good - before - w[b] * p[b]) / share, p[b] / max(top, 1e-6),
            above, below, (same_good[parent] - p[b]) / max(same[parent] - 1, 1.0),
        ):  # fmt: skip
            out[b, f] = value
            f += 1
        before += w[b] * p[b]
        if w[b] >= 10:
            above = max(np.float64(0.9) * above, p[b])
    return out


@njit(cache=True, nogil=True)
def trees(x, roots, feature, threshold, left, value, bias):
    """Probability float32[B] by boosted trees: `left` < 0 is a leaf; the right child follows the left one.

    Most blocks of a page are plain: one whose log-odds are below -3.5 after 40 trees is out, the other trees not asked.
    """
    out = np.empty(len(x), np.float32)
    for b in range(len(x)):
        total = bias
        for k in range(len(roots)):
            if k == _EARLY and total < -_SURE:
                break
            node = roots[k]
            while left[node] >= 0:
                node = left[node] + (x[b, feature[node]] > threshold[node])
            total += value[node]
        out[b] = 1 / (1 + np.exp(-total))
    return out
