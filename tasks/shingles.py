"""Words and word n-grams ("shingles") of a text as 64-bit hashes, compiled with numba over its code points.

A word is a run of letters, digits, marks and `_`, folded to lower case with decimal digits of every script as ASCII digits
and single compatibility characters (full-width forms) as what they stand for; invisible format characters (soft hyphen,
joiners) are passed over. In scripts written without spaces (Han, kana, Thai, Lao, Khmer, Myanmar, Tibetan) every character is
a word, and so it is in a run longer than `MAX_WORD`: n-grams of such text are character n-grams. A text with fewer than n
words has one shingle of all its words; a text without words has none.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from functools import lru_cache

import numba
import numpy as np
import xxhash

MAX_WORD = 64  # letters; longer runs (base64, genomes, text without spaces) are read character by character
_TABLE = 0x20000  # beyond it lie Han characters, then nothing that is written in words
_LAST_HAN = 0x323AF
# Scripts written without spaces between words (Unicode blocks).
_ALONE = (
    (0x0E00, 0x0EFF), (0x0F00, 0x0FFF), (0x1000, 0x109F), (0x1780, 0x17FF), (0x3040, 0x30FF), (0x31F0, 0x31FF),
    (0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xAA60, 0xAA7F), (0xF900, 0xFAFF), (0x1AFF0, 0x1B16F),
)  # fmt: skip
SEPARATOR, LETTER, ALONE, INVISIBLE, SPACE = range(5)


@lru_cache(maxsize=1)
def tables() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(kind uint8, folded uint32, lower uint32), each [0x20000]: class, form inside words and lower case of a code point."""
    kind = np.zeros(_TABLE, dtype=np.uint8)
    lower = np.arange(_TABLE, dtype=np.uint32)
    folded = lower.copy()
    for point in range(_TABLE):
        char = chr(point)
        category = unicodedata.category(char)
        if category[0] in "LNM" or char == "_":
            kind[point] = LETTER
        elif char.isspace():
            kind[point] = SPACE
        elif category == "Cf":
            kind[point] = INVISIBLE
        if category in ("Cn", "Co", "Cs"):
            continue
        lower[point] = ord(char.lower()[0])
        plain = unicodedata.normalize("NFKC", char).lower()
        if category == "Nd":
            folded[point] = ord("0") + unicodedata.decimal(char)
        elif len(plain) == 1:
            folded[point] = ord(plain)
        else:
            folded[point] = lower[point]
    for first, last in _ALONE:
        block = kind[first : last + 1]
        block[block == LETTER] = ALONE
    for digit in np.flatnonzero((folded >= 48) & (folded <= 57)):
        kind[digit] = LETTER  # a number is one word in Thai too
    return kind, folded, lower


def code_points(texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """(uint32 code points of all texts in NFC, int64 [len(texts) + 1] where each begins)."""
    normal = [text if text.isascii() else unicodedata.normalize("NFC", text) for text in texts]
    starts = np.zeros(len(normal) + 1, dtype=np.int64)
    np.cumsum([len(text) for text in normal], out=starts[1:])
    return np.frombuffer("".join(normal).encode("utf-32-le", "surrogatepass"), dtype=np.uint32), starts


_M1, _M2, _SEED = np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53), np.uint64(0x9E3779B97F4A7C15)
_S32, _S33, _S29 = np.uint64(32), np.uint64(33), np.uint64(29)


@numba.njit(cache=True, nogil=True)
def mix64(h):
    """MurmurHash3's 64-bit finalizer: every bit of the input moves every bit of the output."""
    h ^= h >> _S33
    h *= _M1
    h ^= h >> _S33
    h *= _M2
    return h ^ (h >> _S33)


@numba.njit(cache=True, nogil=True)
def _kind(point, kind):
    if point < _TABLE:
        return kind[point]
    return ALONE if point <= _LAST_HAN else SEPARATOR


@numba.njit(cache=True, nogil=True)
def _step(h, point):
    h = (h ^ np.uint64(point)) * _M1
    return h ^ (h >> _S29)


@numba.njit(cache=True, nogil=True)
def scan_words(points, first, last, kind, folded, hashes, begins, ends):
    """Words of points[first:last]: hash, begin and end of each written to the arrays (room for last - first); their count.

    An invisible character at a word's end counts to its span.
    """
    count = 0
    i = first
    while i < last:
        point = points[i]
        k = _kind(point, kind)
        if k == LETTER:
            begin, letters, h = i, 0, _SEED
            while k == LETTER or k == INVISIBLE:
                if k == LETTER:
                    letters += 1
                    h = _step(h, folded[points[i]])
                i += 1
                if i == last:
                    break
                k = _kind(points[i], kind)
            if letters <= MAX_WORD:
                hashes[count], begins[count], ends[count] = mix64(h), begin, i
                count += 1
            else:
                for j in range(begin, i):
                    if _kind(points[j], kind) == LETTER:
                        hashes[count], begins[count], ends[count] = mix64(_step(_SEED, folded[points[j]])), j, j + 1
                        count += 1
        else:
            if k == ALONE:
                plain = folded[point] if point < _TABLE else point
                hashes[count], begins[count], ends[count] = mix64(_step(_SEED, plain)), i, i + 1
                count += 1
            i += 1
    return count


@lru_cache(maxsize=1)
def coefficients() -> np.ndarray:
    """Odd uint64 [64], one per position in an n-gram."""
    return np.array([xxhash.xxh64_intdigest(f"ngram position {k}".encode()) | 1 for k in range(64)], dtype=np.uint64)


@numba.njit(cache=True, nogil=True)
def scan_ngrams(hashes, count, n, factors, out):
    """Hashes of all runs of n words among hashes[:count] into `out`; their number (1 when count < n, 0 when count is 0).

    A run hashes alike wherever it stands: the sum of its words' hashes times odd factors of their positions, mixed.
    """
    n = min(n, count)
    if n == 0:
        return 0
    for i in range(count - n + 1):
        total = np.uint64(0)
        for k in range(n):
            total += hashes[i + k] * factors[k]
        out[i] = mix64(total)
    return count - n + 1


@numba.njit(cache=True, nogil=True)
def _sets(points, starts, n, kind, folded, factors, out, ends):
    """Sorted distinct shingles of each text, one after the other in `out`; `ends` gets where each ends."""
    longest = 1
    for d in range(len(starts) - 1):
        longest = max(longest, starts[d + 1] - starts[d])
    hashes = np.empty(longest, np.uint64)
    begins, stops = np.empty(longest, np.int64), np.empty(longest, np.int64)
    at = 0
    for d in range(len(starts) - 1):
        count = scan_words(points, starts[d], starts[d + 1], kind, folded, hashes, begins, stops)
        size = scan_ngrams(hashes, count, n, factors, out[at:])
        part = np.sort(out[at : at + size])
        for i in range(size):
            if i == 0 or part[i] != part[i - 1]:
                out[at] = part[i]
                at += 1
        ends[d] = at


def shingle_sets(texts: Sequence[str], n: int) -> tuple[np.ndarray, np.ndarray]:
    """(uint64 values, int64 [len(texts) + 1] starts): the sorted distinct n-gram hashes of each text, concatenated."""
    if not 1 <= n <= len(coefficients()):
        raise ValueError(f"n-grams of 1 to {len(coefficients())} words, got {n}")
    points, starts = code_points(texts)
    kind, folded, _ = tables()
    out = np.empty(len(points) + 1, dtype=np.uint64)
    bounds = np.zeros(len(texts) + 1, dtype=np.int64)
    _sets(points, starts, n, kind, folded, coefficients(), out, bounds[1:])
    return out[: bounds[-1]].copy(), bounds


def word_spans(text: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(uint64 hashes, int64 begins, int64 ends) of the words of a text that is in NFC (`code_points` makes it so)."""
    points, _ = code_points([text])
    kind, folded, _ = tables()
    hashes = np.empty(len(points), dtype=np.uint64)
    begins, ends = np.empty(len(points), dtype=np.int64), np.empty(len(points), dtype=np.int64)
    count = scan_words(points, 0, len(points), kind, folded, hashes, begins, ends)
    return hashes[:count], begins[:count], ends[:count]


def word_hashes(text: str) -> np.ndarray:
    """uint64 hash of every word of a text, in order."""
    return word_spans(text)[0]


def words(text: str) -> list[str]:
    """The words of a text in lower case, as `scan_words` finds them."""
    text = text if text.isascii() else unicodedata.normalize("NFC", text)
    _, begins, ends = word_spans(text)
    return [text[a:b].lower() for a, b in zip(begins.tolist(), ends.tolist())]
