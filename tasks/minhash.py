"""MinHash-LSH near-duplicate search over word n-grams, compiled with numba, with datasketch's own permutations.

Signatures equal `datasketch.MinHash(scheme="affine32")` over the low halves of the same 64-bit shingles bit for bit (a test
holds it). Bands of rows give candidate groups; a pair of a group counts as duplicates only when the true Jaccard similarity
of its shingle sets reaches the threshold; components come from union-find. `near_duplicates` does it for texts in memory,
tasks/dedup.py shard by shard with the same functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numba
import numpy as np
import xxhash

from tasks.shingles import (
    SPACE,
    code_points,
    coefficients,
    mix64,
    scan_ngrams,
    scan_words,
    shingle_sets,
    tables,
)

EMPTY = np.uint32(0xFFFFFFFF)  # datasketch's value of a signature without any shingle
_S32 = np.uint64(32)
_LOW = np.uint64(0xFFFFFFFF)


@lru_cache(maxsize=8)
def permutations(num_perm: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """datasketch's affine permutations: odd multipliers and offsets, uint32 [num_perm] each."""
    from datasketch import MinHash

    a, b = MinHash(num_perm=num_perm, seed=seed, scheme="affine32").permutations
    return np.asarray(a, dtype=np.uint32), np.asarray(b, dtype=np.uint32)


@numba.njit(cache=True, nogil=True)
def _sign(values, count, a, b, mixed, signature):
    """MinHash signature of values[:count]; `mixed` is uint32 scratch. MurmurHash3's 32-bit finalizer, then a * x + b."""
    for i in range(count):
        h = np.uint32(values[i] & _LOW)
        h ^= h >> np.uint32(16)
        h = np.uint32(h * np.uint32(0x85EBCA6B))
        h ^= h >> np.uint32(13)
        h = np.uint32(h * np.uint32(0xC2B2AE35))
        mixed[i] = h ^ (h >> np.uint32(16))
    for k in range(len(a)):
        least, factor, offset = EMPTY, a[k], b[k]
        for i in range(count):
            least = min(least, np.uint32(factor * mixed[i] + offset))
        signature[k] = least


@numba.njit(cache=True, nogil=True)
def _collapse(points, first, last, kind, lower, out):
    """Lower-cased points[first:last] with every run of white space as one space and none at the ends; their number."""
    at, pending = 0, False
    for i in range(first, last):
        point = points[i]
        if point < len(kind) and kind[point] == SPACE:
            pending = at > 0
        else:
            if pending:
                out[at] = np.uint32(32)
                at += 1
                pending = False
            out[at] = lower[point] if point < len(lower) else point
            at += 1
    return at


@numba.njit(cache=True, nogil=True)
def _sketch(
    points, starts, n, kind, folded, lower, factors, a, b, rows, salts, signatures, bands, words, plain, plain_ends
):
    longest = 1
    for d in range(len(starts) - 1):
        longest = max(longest, starts[d + 1] - starts[d])
    hashes, grams = np.empty(longest, np.uint64), np.empty(longest, np.uint64)
    begins, ends = np.empty(longest, np.int64), np.empty(longest, np.int64)
    mixed = np.empty(longest, np.uint32)
    at = 0
    for d in range(len(starts) - 1):
        count = scan_words(points, starts[d], starts[d + 1], kind, folded, hashes, begins, ends)
        words[d] = count
        size = scan_ngrams(hashes, count, n, factors, grams)
        _sign(grams, size, a, b, mixed, signatures[d])
        for band in range(bands.shape[1]):
            key = salts[d] + np.uint64(band)
            for k in range(band * rows, (band + 1) * rows):
                key = mix64(key ^ np.uint64(signatures[d, k])) + np.uint64(k)
            bands[d, band] = key
        at += _collapse(points, starts[d], starts[d + 1], kind, lower, plain[at:])
        plain_ends[d] = at


@dataclass
class Sketch:
    """What is known of n texts: signature uint32 [n, bands * rows], bands uint64 [n, bands] (hash of a band's number, its
    rows and the text's salt), words int64 [n] and exact uint64 [n, 2], the hash of the text in NFC, lower case, white space
    collapsed and of its salt: equal for trivial copies."""

    signature: np.ndarray
    bands: np.ndarray
    words: np.ndarray
    exact: np.ndarray


def sketch(texts: Sequence[str], ngram: int, bands: int, rows: int, salts: Sequence[int] | None = None) -> Sketch:
    """Sketch of texts over n-grams of `ngram` words; texts with different `salts` never meet in a band or an exact key.

    Texts without words have the empty signature; leave them out of the search for candidates (`words` is 0).
    """
    points, starts = code_points(texts)
    kind, folded, lower = tables()
    if not 1 <= ngram <= len(coefficients()):
        raise ValueError(f"n-grams of 1 to {len(coefficients())} words, got {ngram}")
    a, b = permutations(bands * rows, seed=1)
    salt = np.asarray(salts if salts is not None else np.zeros(len(texts)), dtype=np.uint64)
    out = Sketch(
        np.empty((len(texts), bands * rows), dtype=np.uint32),
        np.empty((len(texts), bands), dtype=np.uint64),
        np.empty(len(texts), dtype=np.int64),
        np.empty((len(texts), 2), dtype=np.uint64),
    )
    plain, ends = np.empty(len(points), dtype=np.uint32), np.zeros(len(texts) + 1, dtype=np.int64)
    _sketch(
        points, starts, ngram, kind, folded, lower, coefficients(), a, b, rows, salt << _S32,
        out.signature, out.bands, out.words, plain, ends[1:],
    )  # fmt: skip
    data, bounds, seeds = memoryview(plain).cast("B"), (ends * 4).tolist(), salt.tolist()
    keys = (xxhash.xxh3_128_digest(data[bounds[i] : bounds[i + 1]], seeds[i]) for i in range(len(texts)))
    out.exact[:] = np.frombuffer(b"".join(keys), dtype=np.uint64).reshape(-1, 2)
    return out


@numba.njit(cache=True, nogil=True)
def _intersection(values, i, i_end, j, j_end):
    common = 0
    while i < i_end and j < j_end:
        x, y = values[i], values[j]
        common += x == y
        i += x <= y
        j += y <= x
    return common


@numba.njit(cache=True, nogil=True)
def jaccards(values, starts, left, right, out):
    """out[p] = |A and B| / |A or B| of sets left[p] and right[p] of `shingle_sets`; 0 for two empty ones."""
    for p in range(len(left)):
        i, j = left[p], right[p]
        common = _intersection(values, starts[i], starts[i + 1], starts[j], starts[j + 1])
        total = starts[i + 1] - starts[i] + starts[j + 1] - starts[j] - common
        out[p] = common / total if total else 0.0


def jaccard(a: np.ndarray, b: np.ndarray) -> float:
    """|a and b| / |a or b| of two sorted uint64 arrays of distinct values; 0 for two empty ones."""
    out = np.empty(1)
    starts = np.array([0, len(a), len(a) + len(b)], dtype=np.int64)
    jaccards(np.concatenate((a, b)), starts, np.array([0]), np.array([1]), out)
    return float(out[0])


@dataclass
class Groups:
    """Candidate groups: `members[starts[g] : starts[g + 1]]` (ascending, at least two) share the band key `keys[g]`.

    `split` counts the groups that were larger than the limit."""

    members: np.ndarray
    starts: np.ndarray
    keys: np.ndarray
    split: int


def candidate_groups(keys: np.ndarray, members: np.ndarray, limit: int = 2048) -> Groups:
    """Members (int64 [r]) that have a key (uint64 [r]) in common.

    A group above `limit` is cut into parts that each begin with the group's first member, so that comparisons stay linear
    in the size of a huge group; copies of one page then still meet in their first member.
    """
    order = np.argsort(keys)
    keys = keys[order]
    new = np.ones(len(keys) + 1, dtype=bool)
    np.not_equal(keys[1:], keys[:-1], out=new[1:-1])
    edges = np.flatnonzero(new) if len(keys) else np.zeros(1, dtype=np.int64)
    sizes = np.diff(edges)
    firsts, sizes = edges[:-1][sizes > 1], sizes[sizes > 1]
    number = np.repeat(np.arange(len(sizes)), sizes)
    starts = np.concatenate(([0], np.cumsum(sizes))).astype(np.int64)
    found = members[order[np.repeat(firsts - starts[:-1], sizes) + np.arange(starts[-1])]]
    found = found[np.lexsort((found, number))]
    if not len(sizes) or sizes.max() <= limit:
        return Groups(found, starts, keys[firsts], 0)
    parts, part_keys = [], []
    for g, key in enumerate(keys[firsts].tolist()):
        group = found[starts[g] : starts[g + 1]]
        pieces = [group] if len(group) <= limit else [
            np.concatenate((group[:1], group[i : i + limit - 1])) for i in range(1, len(group), limit - 1)
        ]  # fmt: skip
        parts += pieces
        part_keys += [key] * len(pieces)
    starts = np.concatenate(([0], np.cumsum([len(part) for part in parts]))).astype(np.int64)
    return Groups(np.concatenate(parts), starts, np.array(part_keys, dtype=np.uint64), int((sizes > limit).sum()))


@numba.njit(cache=True, nogil=True)
def _find(parent, i):
    while parent[i] != i:
        parent[i] = parent[parent[i]]
        i = parent[i]
    return i


@numba.njit(cache=True, nogil=True)
def _verify(members, group_starts, keys, bands, values, starts, threshold, left, right, similarity):
    parent = np.arange(len(bands))
    compared = found = 0
    for g in range(len(keys)):
        for y in range(group_starts[g] + 1, group_starts[g + 1]):
            j = members[y]
            root = _find(parent, j)
            for x in range(group_starts[g], y):
                i = members[x]
                other = _find(parent, i)
                if other == root:
                    continue
                band = 0
                while bands[i, band] != bands[j, band]:
                    band += 1
                if bands[i, band] != keys[g]:
                    continue  # the pair belongs to the first band it shares
                compared += 1
                a, b = starts[i + 1] - starts[i], starts[j + 1] - starts[j]
                if min(a, b) < threshold * max(a, b):
                    continue
                common = _intersection(values, starts[i], starts[i + 1], starts[j], starts[j + 1])
                if common >= threshold * (a + b - common):
                    left[found], right[found], similarity[found] = i, j, common / (a + b - common)
                    found += 1
                    parent[max(root, other)] = min(root, other)
                    root = min(root, other)
    return compared, found


def verified_pairs(
    groups: Groups, bands: np.ndarray, values: np.ndarray, starts: np.ndarray, threshold: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """(left, right, similarity, pairs compared): candidate pairs whose true Jaccard similarity is >= threshold.

    Members of `groups` index the rows of `bands` and the sets (`values`, `starts`). Pairs already connected are not compared
    again, which keeps a group of m copies at m - 1 comparisons; the components are those of all pairs compared.
    """
    left, right = np.empty(len(bands), dtype=np.int64), np.empty(len(bands), dtype=np.int64)
    similarity = np.empty(len(bands))
    compared, found = _verify(
        groups.members, groups.starts, groups.keys, bands, values, starts, threshold, left, right, similarity
    )
    return left[:found], right[:found], similarity[:found], compared


@numba.njit(cache=True, nogil=True)
def join(left, right, parent):
    """Union-find: connect left[p] with right[p] in `parent` (int64 [n], where -1 is a member of no pair yet)."""
    for p in range(len(left)):
        i, j = left[p], right[p]
        if parent[i] < 0:
            parent[i] = i
        if parent[j] < 0:
            parent[j] = j
        i, j = _find(parent, i), _find(parent, j)
        parent[max(i, j)] = min(i, j)


@numba.njit(cache=True, nogil=True)
def flatten(parent):
    """After all `join`s: the smallest member of each one's connected component, whatever the order of the pairs; -1 stays."""
    for i in range(len(parent)):
        if parent[i] >= 0:
            parent[i] = _find(parent, i)


def components(left: np.ndarray, right: np.ndarray, n: int) -> np.ndarray:
    """int64 [n]: the smallest member of each one's connected component."""
    parent = np.arange(n)
    join(np.asarray(left, dtype=np.int64), np.asarray(right, dtype=np.int64), parent)
    flatten(parent)
    return parent


@dataclass
class Clusters:
    """root int64 [n] (smallest member of each text's cluster), candidate pairs compared, pairs verified."""

    root: np.ndarray
    compared: int
    verified: int


def near_duplicates(texts: Sequence[str], ngram: int, bands: int, rows: int, threshold: float) -> Clusters:
    """Clusters of near-duplicate texts, all in memory."""
    parts = [sketch(texts[i : i + 512], ngram, bands, rows) for i in range(0, len(texts), 512)]
    keys = np.concatenate([part.bands for part in parts]) if parts else np.empty((0, bands), dtype=np.uint64)
    filled = np.flatnonzero(np.concatenate([part.words for part in parts]) if parts else [])
    groups = candidate_groups(keys[filled].ravel(), np.repeat(filled, bands))
    candidates, groups.members = np.unique(groups.members, return_inverse=True)
    values, starts = shingle_sets([texts[i] for i in candidates.tolist()], ngram)
    left, right, _, compared = verified_pairs(groups, keys[candidates], values, starts, threshold)
    return Clusters(components(candidates[left], candidates[right], len(texts)), compared, len(left))
