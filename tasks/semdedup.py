"""SemDedup: pages made from one template, which share their wording but not enough of it for MinHash (notes D.2).

    python -m tests.bench.judges semdedup

After Abbas et al., "SemDeDup" (2023): spherical k-means over sentence embeddings, then pairs within a cluster by cosine
similarity. Documents are visited from the best to the worst (quality, then length, then id); one that is as similar as
`threshold` to a document already kept is removed for it, so nothing is removed for the sake of a removed one. Similar
embeddings alone also mean the same subject, so a removal needs a true check besides: `same_template` compares the wording.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import xxhash
from pydantic import BaseModel, ConfigDict, Field

_WORD = re.compile(r"\w+")
SAMPLE = 20_000  # rows that k-means' centres are fitted on, and four times the most centres that there are
_TRIES = 4  # kept documents, the most similar first, that one document is checked against


class SemdedupConfig(BaseModel):
    """Limits of the removal of template pages."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    threshold: float = Field(0.85, gt=0, le=1, description="cosine similarity from which two pages are compared")
    shared: float = Field(0.6, ge=0, le=1, description="share of the shorter page's word trigrams that both must have")
    cluster_size: int = Field(500, ge=2, description="documents per cluster that k-means aims at")
    max_cluster: int = Field(5000, ge=2, description="larger clusters are split again")


@dataclass
class Semantic:
    """kept: sorted indices. removed: index -> (index of the kept document, cosine). sizes: documents per k-means cluster.

    checked: pairs above the threshold that were compared; refused: those that the check told apart.
    """

    kept: list[int]
    removed: dict[int, tuple[int, float]]
    sizes: list[int] = field(default_factory=list)
    checked: int = 0
    refused: int = 0


def kmeans(x_nd: np.ndarray, k: int, seed: int, steps: int = 12, batch: int = 8192) -> np.ndarray:
    """Spherical k-means over rows of length 1: cluster of each row, int [n] in 0..k-1 (some may be empty).

    Centres are fitted on at most `SAMPLE` rows drawn by `seed`; memory is batch * k floats beside them.
    """
    n = len(x_nd)
    if k <= 1 or n <= 1:
        return np.zeros(n, int)
    rng = np.random.default_rng(seed)
    train = x_nd if n <= SAMPLE else x_nd[np.sort(rng.choice(n, SAMPLE, replace=False))]
    return assign(x_nd, centres(train, k, rng, steps, batch), batch)


def centres(train_nd: np.ndarray, k: int, rng: np.random.Generator, steps: int = 12, batch: int = 8192) -> np.ndarray:
    """float32 [k, d], fewer when there are fewer rows: k-means' centres, which start at rows drawn by `rng`."""
    centre = train_nd[np.sort(rng.choice(len(train_nd), min(k, len(train_nd)), replace=False))].copy()
    before = None
    for _ in range(steps):
        found = assign(train_nd, centre, batch)
        if before is not None and np.array_equal(found, before):
            break
        before = found
        order = np.argsort(found, kind="stable")
        present, starts = np.unique(found[order], return_index=True)
        total = np.add.reduceat(train_nd[order].astype(np.float64), starts, axis=0)
        norm = np.linalg.norm(total, axis=1, keepdims=True)
        centre[present] = np.where(norm > 1e-12, total / np.maximum(norm, 1e-12), centre[present])
    return centre


def assign(x_nd: np.ndarray, centre_kd: np.ndarray, batch: int = 8192) -> np.ndarray:
    """int64 [n]: the centre nearest to each row; at most 2^24 products in memory at a time."""
    batch = max(1, min(batch, (1 << 24) // max(1, len(centre_kd))))
    parts = [np.argmax(x_nd[i : i + batch] @ centre_kd.T, axis=1) for i in range(0, len(x_nd), batch)]
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)


def clusters(x_nd: np.ndarray, size: int, largest: int, seed: int, depth: int = 0) -> list[np.ndarray]:
    """Row indices per cluster, each ascending; `depth` splits have gone before.

    Clusters above `largest` are split again, three times at most; one that is still above it holds rows that cannot be told
    apart, and is cut in the order of its rows.
    """
    out: list[np.ndarray] = []
    todo = [(np.arange(len(x_nd)), depth)]
    while todo:
        rows, depth = todo.pop()
        k = min(-(-len(rows) // size), SAMPLE // 4)
        if k <= 1 or (depth and len(rows) <= largest):
            out.append(rows)
        elif depth > 3:
            out += [rows[i : i + largest] for i in range(0, len(rows), largest)]
        else:
            found = kmeans(x_nd[rows], k, seed + depth)
            todo += [(rows[found == c], depth + 1) for c in np.unique(found)[::-1]]
    return out


def semdedup(
    embeddings: np.ndarray,
    keys: Sequence[tuple[float, int, str]],
    threshold: float,
    seed: int,
    *,
    same: Callable[[int, int], bool] | None = None,
    cluster_size: int = 500,
    max_cluster: int = 5000,
) -> Semantic:
    """Remove documents whose embedding is as similar as `threshold` to one that is kept, within k-means clusters.

    embeddings: float32 [n, d], scaled to length 1 here; a zero row is never removed. keys: (quality, length, id) of each
    document; the highest quality stays, then the longest, then the smallest id. same(i, kept): the true check, None for
    none. Two runs with equal input and seed give equal results. ValueError for shapes that do not fit.
    """
    x = np.asarray(embeddings, np.float32)
    if x.ndim != 2 or len(x) != len(keys):
        raise ValueError(f"semdedup: embeddings of shape {x.shape} for {len(keys)} keys; expected [n, d] and n keys")
    if not np.isfinite(x).all():
        raise ValueError(f"semdedup: embedding of document {int(np.argmin(np.isfinite(x).all(axis=1)))} is not finite")
    norm = np.linalg.norm(x, axis=1)
    known = np.flatnonzero(norm > 1e-9)
    result = Semantic([], {})
    x = x[known] / norm[known, None]
    rank = {int(i): (-keys[i][0], -keys[i][1], keys[i][2]) for i in known}
    for rows in clusters(x, cluster_size, max_cluster, seed) if len(known) else []:
        rows = np.array(sorted(rows, key=lambda r: rank[int(known[r])]), int)
        found, checked, refused = compare(
            x[rows], threshold, None if same is None else lambda i, j, rows=rows: same(known[rows[i]], known[rows[j]])
        )
        result.sizes.append(len(rows))
        result.checked, result.refused = result.checked + checked, result.refused + refused
        for i, (j, cosine) in found.items():
            result.removed[int(known[rows[i]])] = (int(known[rows[j]]), cosine)
    result.kept = [i for i in range(len(keys)) if i not in result.removed]
    return result


def compare(
    x_nd: np.ndarray, threshold: float, same: Callable[[int, int], bool] | None
) -> tuple[dict[int, tuple[int, float]], int, int]:
    """({row: (kept row, cosine)} of the rows that go, pairs checked, pairs refused); the rows from the best to the worst."""
    removed: dict[int, tuple[int, float]] = {}
    kept_nd, kept = np.zeros_like(x_nd), []
    checked = refused = 0
    for row in range(len(x_nd)):
        cosine = np.round(kept_nd[: len(kept)] @ x_nd[row], 5)
        for near in _nearest(cosine, threshold):
            checked += 1
            if same is None or same(row, kept[near]):
                removed[row] = (kept[near], float(cosine[near]))
                break
            refused += 1
        else:
            kept_nd[len(kept)] = x_nd[row]
            kept.append(row)
    return removed, checked, refused


def _nearest(cosine: np.ndarray, threshold: float) -> np.ndarray:
    above = np.flatnonzero(cosine >= threshold)
    return above[np.argsort(-cosine[above], kind="stable")][:_TRIES]


def wording(text: str) -> np.ndarray:
    """Sorted distinct hashes (uint64) of the text's word trigrams, lower case, every number alike."""
    words = ["0" if w.isdigit() else w for w in _WORD.findall(text.lower())]
    grams = (" ".join(words[i : i + 3]) for i in range(max(min(1, len(words)), len(words) - 2)))
    return np.array(sorted({xxhash.xxh3_64_intdigest(g.encode("utf-8", "replace")) for g in grams}), np.uint64)


def overlap(a: np.ndarray, b: np.ndarray) -> float:
    """Share of the smaller set that is in both; 0 when one is empty."""
    smaller = min(len(a), len(b))
    return len(np.intersect1d(a, b, assume_unique=True)) / smaller if smaller else 0.0


def same_template(texts: Sequence[str], shared: float) -> Callable[[int, int], bool]:
    """A check for `semdedup`: two pages share their wording, and neither is more than three times the other.

    Pages of one subject by different hands share few trigrams; pages of one template share all but the filled-in words.
    """
    memory: dict[int, np.ndarray] = {}

    def grams(i: int) -> np.ndarray:
        if i not in memory:
            if len(memory) > 4096:
                memory.clear()
            memory[i] = wording(texts[i])
        return memory[i]

    def same(i: int, j: int) -> bool:
        a, b = grams(i), grams(j)
        return max(len(a), len(b)) <= 3 * min(len(a), len(b)) and overlap(a, b) >= shared

    return same


def size_report(sizes: Sequence[int]) -> dict[str, int]:
    """Clusters, the largest, the median, and documents in the largest."""
    return {"clusters": len(sizes), "largest": max(sizes, default=0), "median": int(np.median(sizes)) if sizes else 0}


def group_sizes(removed: dict[int, tuple[int, float]]) -> dict[str, int]:
    """Template groups by how many pages were removed for their kept page: size (with it) -> groups."""
    sizes = Counter(Counter(keeper for keeper, _ in removed.values()).values())
    return {str(size + 1): sizes[size] for size in sorted(sizes)}
