"""MinHash-LSH near-duplicate search over word n-grams, in numpy, with datasketch's own permutations.

Signatures equal `datasketch.MinHash(scheme="affine32")` over the same 32-bit hashes bit for bit (a test holds it), but whole
blocks of documents are hashed at once instead of one set at a time. Bands of rows give candidate buckets; a pair of a
bucket counts as duplicates only when the true Jaccard similarity of its n-gram sets reaches the threshold.

Used by `python -m tasks dedup` and, for the n-grams alone, by `python -m tasks decontaminate`.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import xxhash

# A word is a run of letters and digits; scripts written without spaces count one character as one word.
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]|[^\W\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]+")
_MIX1, _MIX2 = np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53)
_S33 = np.uint64(33)


def words(text: str) -> list[str]:
    """Lower-cased words of `text` without punctuation."""
    return _WORD.findall(text.lower())


def exact_key(text: str) -> str:
    """Hash (32 hex digits) of the text after Unicode NFC, lower case and white space collapsed: equal for trivial copies."""
    normal = " ".join(unicodedata.normalize("NFC", text).lower().split())
    return xxhash.xxh3_128_hexdigest(normal.encode("utf-8", "surrogatepass"))


class WordHasher(dict):
    """word -> 64-bit xxhash, remembered; corpora repeat their words."""

    def __missing__(self, word: str) -> int:
        value = xxhash.xxh64_intdigest(word.encode("utf-8", "surrogatepass"))
        self[word] = value
        return value

    def array(self, tokens: Sequence[str]) -> np.ndarray:
        """uint64 [len(tokens)] hashes."""
        return np.array([self[t] for t in tokens], dtype=np.uint64)


@lru_cache(maxsize=64)
def _coefficients(n: int) -> tuple[np.uint64, ...]:
    return tuple(np.uint64(xxhash.xxh64_intdigest(f"ngram position {k}".encode()) | 1) for k in range(n))


def run_sums(word_hashes: np.ndarray, sizes: Iterable[int]) -> Iterator[tuple[int, np.ndarray]]:
    """(n, uint64 [w - n + 1]) for each n of `sizes` in ascending order: a hash of every run of n words.

    word_hashes: uint64 [w]. The hash is a sum mod 2^64 of the words' hashes times odd numbers that depend on the position in
    the run, so that longer runs build on shorter ones; a run hashes alike wherever it stands. Empty when w < n.
    """
    sizes = sorted(set(sizes))
    total = np.zeros(len(word_hashes), dtype=np.uint64)
    term = np.empty_like(total)
    for k, factor in enumerate(_coefficients(sizes[-1])):
        count = len(word_hashes) - k
        if count <= 0:
            break
        total = total[:count]
        total += np.multiply(word_hashes[k:], factor, out=term[:count])
        if k + 1 in sizes:
            yield k + 1, total.copy()


def ngram_hashes(word_hashes: np.ndarray, n: int) -> np.ndarray:
    """`run_sums` for one n, with a finalizer that mixes all bits; uint64 [w - n + 1], empty when w < n."""
    total = next((sums for _, sums in run_sums(word_hashes, (n,))), np.empty(0, dtype=np.uint64))
    total ^= total >> _S33
    total *= _MIX1
    total ^= total >> _S33
    total *= _MIX2
    total ^= total >> _S33
    return total


def shingles(text: str, n: int, hasher: WordHasher) -> np.ndarray:
    """Sorted distinct n-gram hashes (uint64) of a text; a text shorter than n words is one shingle of all its words."""
    tokens = hasher.array(words(text))
    if not len(tokens):
        return np.empty(0, dtype=np.uint64)
    return np.unique(ngram_hashes(tokens, min(n, len(tokens))))


def jaccard(a: np.ndarray, b: np.ndarray) -> float:
    """|a and b| / |a or b| of two sorted arrays of distinct values; 0 for two empty ones."""
    if not len(a) or not len(b):
        return 0.0
    if len(a) > len(b):
        a, b = b, a
    at = np.searchsorted(b, a)
    at[at == len(b)] = 0
    common = int(np.count_nonzero(b[at] == a))
    return common / (len(a) + len(b) - common)


def permutations(num_perm: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """datasketch's affine permutations: odd multipliers and offsets, uint32 [num_perm] each."""
    from datasketch import MinHash

    a, b = MinHash(num_perm=num_perm, seed=seed, scheme="affine32").permutations
    return np.asarray(a, dtype=np.uint32), np.asarray(b, dtype=np.uint32)


def _fmix32(values: np.ndarray) -> np.ndarray:
    """MurmurHash3's 32-bit finalizer, the pre-mix of datasketch's affine32 scheme."""
    h = values ^ (values >> np.uint32(16))
    h *= np.uint32(0x85EBCA6B)
    h ^= h >> np.uint32(13)
    h *= np.uint32(0xC2B2AE35)
    h ^= h >> np.uint32(16)
    return h


def signatures(sets: Sequence[np.ndarray], num_perm: int, seed: int, block: int = 1 << 15) -> np.ndarray:
    """MinHash signatures, uint32 [len(sets), num_perm]; an empty set gets all ones (datasketch's empty value).

    Sets are concatenated into blocks of about `block` hashes that stay in cache while all permutations pass over them.
    """
    out = np.full((len(sets), num_perm), 0xFFFFFFFF, dtype=np.uint32)
    a, b = permutations(num_perm, seed)
    start = 0
    while start < len(sets):
        end, size = start, 0
        while end < len(sets) and (size == 0 or size + len(sets[end]) <= block):
            size += len(sets[end])
            end += 1
        filled = [i for i in range(start, end) if len(sets[i])]
        if filled:
            joined = np.concatenate([sets[i] for i in filled]).astype(np.uint32)  # low 32 bits of each n-gram's hash
            mixed = _fmix32(joined)
            starts = np.cumsum([0] + [len(sets[i]) for i in filled[:-1]])
            work = np.empty_like(mixed)
            for k in range(num_perm):
                np.multiply(mixed, a[k], out=work)
                np.add(work, b[k], out=work)
                out[filled, k] = np.minimum.reduceat(work, starts)
        start = end
    return out


def buckets(signature: np.ndarray, bands: int, rows: int) -> Iterator[np.ndarray]:
    """Groups (sorted index arrays, at least two members) whose `rows` signature values of some band are all equal.

    The same candidates as datasketch's MinHashLSH(params=(bands, rows)). ValueError when bands * rows > num_perm.
    """
    if bands * rows > signature.shape[1]:
        raise ValueError(f"{bands} bands of {rows} rows need {bands * rows} permutations, got {signature.shape[1]}")
    for band in range(bands):
        part = np.ascontiguousarray(signature[:, band * rows : (band + 1) * rows])
        keys = part.view(np.dtype((np.void, part.shape[1] * 4))).ravel()
        order = np.argsort(keys, kind="stable")
        same = keys[order[1:]] == keys[order[:-1]]
        edges = np.flatnonzero(np.diff(np.concatenate(([False], same, [False])).astype(np.int8)))
        for first, last in zip(edges[::2], edges[1::2]):
            yield order[first : last + 1]


class UnionFind:
    """Disjoint sets of 0..n-1; a set's root is its smallest member, so the result does not depend on the order of unions."""

    def __init__(self, n: int):
        self.parent = list(range(n))

    def find(self, i: int) -> int:
        parent = self.parent
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    def union(self, i: int, j: int) -> None:
        i, j = self.find(i), self.find(j)
        if i != j:
            self.parent[max(i, j)] = min(i, j)


@dataclass
class Clusters:
    """Result of `near_duplicates`: root [n] (smallest member of each one's component) and how many pairs were examined."""

    root: list[int]
    candidates: int
    verified: int


def near_duplicates(
    sets: Sequence[np.ndarray], signature: np.ndarray, bands: int, rows: int, threshold: float
) -> Clusters:
    """Connected components of the pairs that share a band and whose true Jaccard similarity is >= threshold.

    Pairs already connected are not compared again, which keeps a bucket of m copies at m - 1 comparisons; the components
    are the same as with all pairs compared.
    """
    union = UnionFind(len(sets))
    candidates = verified = 0
    compared: set[tuple[int, int]] = set()
    for group in buckets(signature, bands, rows):
        members = [i for i in group.tolist() if len(sets[i])]
        for position, j in enumerate(members):
            for i in members[:position]:
                if union.find(i) == union.find(j) or (i, j) in compared:
                    continue
                compared.add((i, j))
                candidates += 1
                if jaccard(sets[i], sets[j]) >= threshold:
                    verified += 1
                    union.union(i, j)
    return Clusters([union.find(i) for i in range(len(sets))], candidates, verified)
