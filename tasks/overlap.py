"""Search for evaluation items in documents: shared word n-grams, whole short items, and passages with a few words changed.

Words are those of tasks/shingles.py after Unicode NFKC, so that case, punctuation, full-width forms and the digits of other
scripts do not count; English number words up to ninety are read as digits, character references of HTML as what they stand
for, and `_` as a blank. Three ways to be found:

exact    a run of `ngram` words in common, or the whole of an item that has fewer words (GPT-3 and later reports);
fuzzy    a passage of an item (the item, or 48 words of a long one at every 24) of which a part >= `threshold` stands in the
         document in the same order: longest common subsequence of words, sought where the two share four words in a row.
"""

from __future__ import annotations

import html
import json
import re
import unicodedata
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numba
import numpy as np

from tasks.mapshuffle import save_array
from tasks.shingles import coefficients, mix64, word_hashes, word_spans

SEED = 4  # words in a row that make a fuzzy comparison worth while; a part of 0.8 leaves that many almost always
LONGEST = 64  # words of a passage: one machine word in the bit-parallel comparison
PASSAGE, STRIDE = 48, 24
MAX_OWNERS = 64  # a run of four words that more passages hold says too little to start from
PART = 1 << 17  # words of a document searched for passages at a time, which bounds the memory of what begins everywhere
MATCHED_CHARS = 200
_ENTITY = re.compile(r"&(?:#\d{2,6}|#[xX][0-9a-fA-F]{2,5}|[A-Za-z]{2,8});")
_NUMBERS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
).split()
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()


@dataclass(frozen=True)
class Hit:
    """An item found in a document: `score` is 1 for exact, else the part of the passage; `matched` the document's text."""

    item: str
    kind: str
    score: float
    matched: str


@lru_cache(maxsize=1)
def _number_words() -> tuple[np.ndarray, np.ndarray]:
    """Hashes of the number words, ascending, and of the digits they stand for."""
    values = {w: str(i) for i, w in enumerate(_NUMBERS)} | {w: str(10 * i) for i, w in enumerate(_TENS, 2)}
    pairs = sorted((int(word_hashes(w)[0]), int(word_hashes(v)[0])) for w, v in values.items())
    return tuple(np.array(column, dtype=np.uint64) for column in zip(*pairs))


@numba.njit(cache=True, nogil=True)
def _digits(hashes, words, digits):
    for i in range(len(hashes)):
        at = np.searchsorted(words, hashes[i])
        if at < len(words) and words[at] == hashes[i]:
            hashes[i] = digits[at]


def _words(text: str) -> tuple[str, np.ndarray, np.ndarray, np.ndarray]:
    """(text as searched, hash, begin and end of its words)."""
    text = html.unescape(text) if "&" in text and _ENTITY.search(text) else text
    text = (text if text.isascii() else unicodedata.normalize("NFKC", text)).replace("_", " ")
    hashes, begins, ends = word_spans(text)
    _digits(hashes, *_number_words())
    return text, hashes, begins, ends


@numba.njit(cache=True, nogil=True)
def _key(total, size):
    return mix64(total ^ (np.uint64(size) * np.uint64(0x9E3779B97F4A7C15)))


@numba.njit(cache=True, nogil=True)
def _grams(words, bounds, runs, sizes, factors, keys, owners, places):
    """Key, text and place of the first runs[t] runs of sizes[t] words of each text words[bounds[t] : bounds[t + 1]]."""
    at = 0
    for t in range(len(sizes)):
        for i in range(runs[t]):
            total = np.uint64(0)
            for k in range(sizes[t]):
                total += words[bounds[t] + i + k] * factors[k]
            keys[at], owners[at], places[at] = _key(total, sizes[t]), t, i
            at += 1


def gram_keys(
    words: np.ndarray, bounds: np.ndarray, sizes: np.ndarray, runs: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(keys uint64, texts, places) of the runs of sizes[t] words in each text; `runs` limits it to that many of each."""
    runs = np.maximum(np.diff(bounds) - sizes + 1, 0) if runs is None else runs
    total = int(runs.sum())
    keys, owners, places = np.empty(total, np.uint64), np.empty(total, np.int64), np.empty(total, np.int64)
    _grams(words, bounds, runs, sizes, coefficients(), keys, owners, places)
    return keys, owners, places


def _joined(texts: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """(all words, int64 bounds of each text's)."""
    bounds = np.cumsum([0] + [len(words) for words in texts]).astype(np.int64)
    return np.concatenate([np.empty(0, dtype=np.uint64), *texts]), bounds


def make_sieve(keys: np.ndarray) -> np.ndarray:
    """uint64 array of 2^k bits, at most a sixteenth of them set: the low bits of every key."""
    bits = max(16, int(16 * len(keys)).bit_length())
    sieve = np.zeros(1 << (bits - 6), dtype=np.uint64)
    slot = keys & np.uint64((1 << bits) - 1)
    np.bitwise_or.at(sieve, (slot >> np.uint64(6)).astype(np.int64), np.uint64(1) << (slot & np.uint64(63)))
    return sieve


@dataclass
class GramTable:
    """Owners of keys: owners[starts[i] : starts[i + 1]] have keys[i]; `sieve`, 2^k bits, rules out most other keys."""

    keys: np.ndarray
    starts: np.ndarray
    owners: np.ndarray
    sieve: np.ndarray

    @classmethod
    def build(cls, keys: np.ndarray, owners: np.ndarray, max_owners: int | None = None) -> GramTable:
        """From parallel arrays, owners int64; keys with more than `max_owners` are left out."""
        order = np.lexsort((owners, keys))
        keys, owners = keys[order], owners[order]
        distinct, firsts, counts = np.unique(keys, return_index=True, return_counts=True)
        if max_owners is not None and len(counts) and counts.max() > max_owners:
            few = counts <= max_owners
            owners = owners[np.repeat(few, counts)]
            distinct, counts = distinct[few], counts[few]
        starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
        return cls(distinct, starts, owners, make_sieve(distinct))


@numba.njit(cache=True, nogil=True)
def _maybe(key, sieve):
    slot = key & np.uint64(len(sieve) * 64 - 1)
    return (sieve[np.int64(slot >> np.uint64(6))] >> (slot & np.uint64(63))) & np.uint64(1) != 0


@numba.njit(cache=True, nogil=True)
def _lookup(key, keys, sieve):
    if not _maybe(key, sieve):
        return -1
    at = np.searchsorted(keys, key)
    return at if at < len(keys) and keys[at] == key else -1


@numba.njit(cache=True, nogil=True)
def _exact(hashes, wanted, factors, keys, sieve, prefix, prefixes):
    """(position, size, index of the key) of every run of words that is a key; wanted[s]: runs of s words are keys.

    The first `prefix` words of all keys are in the sieve `prefixes`: few runs need a look beyond them.
    """
    out = []
    longest = len(wanted) - 1
    for i in range(len(hashes) - prefix + 1):
        total = np.uint64(0)
        for k in range(prefix):
            total += hashes[i + k] * factors[k]
        if not _maybe(_key(total, prefix), prefixes):
            continue
        size = prefix
        while True:
            if wanted[size]:
                at = _lookup(_key(total, size), keys, sieve)
                if at >= 0:
                    out.append((i, size, at))
            if size == longest or i + size == len(hashes):
                break
            total += hashes[i + size] * factors[size]
            size += 1
    return out


@numba.njit(cache=True, nogil=True)
def _common(passage, words):
    """Length of the longest common subsequence of a passage (<= 64 words) and words, 64 cells at a time (Hyyro 2004)."""
    v = ~np.uint64(0)
    for word in words:
        match = np.uint64(0)
        for k in range(len(passage)):
            match |= np.uint64(passage[k] == word) << np.uint64(k)
        u = v & match
        v = (v + u) | (v - u)
    common = 0
    for k in range(len(passage)):
        common += not (v >> np.uint64(k)) & np.uint64(1)
    return common


@numba.njit(cache=True, nogil=True)
def _fuzzy(hashes, factors, size, keys, starts, owners, sieve, words, bounds, threshold):
    """(passage, first word, end, common words) of passages found; owners hold passage << 8 | offset in it."""
    events = []
    for i in range(len(hashes) - size + 1):
        total = np.uint64(0)
        for k in range(size):
            total += hashes[i + k] * factors[k]
        at = _lookup(_key(total, size), keys, sieve)
        if at >= 0:
            for owner in owners[starts[at] : starts[at + 1]]:
                events.append((owner >> 8, i - (owner & 255)))  # where the passage would begin
    out = []
    events.sort()
    first = 0
    while first < len(events):
        passage, begin = events[first]
        length = bounds[passage + 1] - bounds[passage]
        slack = length // 5 + 1
        last = first
        while last + 1 < len(events) and events[last + 1][0] == passage and events[last + 1][1] <= begin + slack:
            last += 1
        low = max(0, begin - slack)
        high = min(len(hashes), events[last][1] + length + slack)
        common = _common(words[bounds[passage] : bounds[passage + 1]], hashes[low:high])
        if common >= threshold * length:
            out.append((passage, max(0, begin), min(len(hashes), begin + length), common))
            while last + 1 < len(events) and events[last + 1][0] == passage:
                last += 1
        first = last + 1
    return out


class ItemIndex:
    """Evaluation items, to be searched for in texts.

    ngram: words of a run that counts; min_words: items with fewer are not searched for, counted in `too_short`; threshold:
    part of a passage for a fuzzy hit, None for none; fuzzy_min_words: items with fewer words are found exactly only.
    """

    def __init__(self, ngram: int, min_words: int, threshold: float | None = 0.8, fuzzy_min_words: int = 12):
        self.ngram, self.min_words = ngram, min_words
        self.threshold, self.fuzzy_min_words = threshold, fuzzy_min_words
        self.names: list[str] = []
        self.too_short = self.repeated = 0
        self._seen: set[str] = set()
        self._items: list[np.ndarray] = []
        self._passages: list[np.ndarray] = []
        self._item_of: list[int] = []
        self._tables: tuple | None = None

    def add(self, name: str, text: str, min_words: int | None = None) -> None:
        """Add one item; counted as too short when it has fewer than `min_words` words (default: the index's).

        A text that was added before is counted in `repeated` and goes by the name that it has.
        """
        least = max(1, self.min_words if min_words is None else min_words)
        hashes = _words(text)[1] if len(text) >= least * (1 + text.isascii()) - 1 else ()
        if len(hashes) < least:
            self.too_short += 1
            return
        if text in self._seen:
            self.repeated += 1
            return
        self._seen.add(text)
        self._items.append(hashes)
        if self.threshold is not None and len(hashes) >= self.fuzzy_min_words:
            cuts = (
                [0]
                if len(hashes) <= LONGEST
                else sorted({*range(0, len(hashes) - PASSAGE, STRIDE), len(hashes) - PASSAGE})
            )
            for cut in cuts:
                self._passages.append(hashes[cut:] if len(cuts) == 1 else hashes[cut : cut + PASSAGE])
                self._item_of.append(len(self.names))
        self.names.append(name)
        self._tables = None

    def _build(self) -> tuple:
        """(table of runs, which sizes, words of a prefix, sieve of prefixes, table of seeds, passages' words, bounds)."""
        if self._tables is None:
            words, bounds = _joined(self._items)
            sizes = np.minimum(np.diff(bounds), self.ngram)
            prefix = int(sizes.min(initial=SEED))
            runs = np.diff(bounds) - sizes + 1
            keys, owners, _ = gram_keys(words, bounds, sizes)
            prefixes, _, _ = gram_keys(words, bounds, np.full_like(sizes, prefix), runs)
            wanted = np.zeros(self.ngram + 1, dtype=bool)
            wanted[sizes] = True
            words, bounds = _joined(self._passages)
            seeds, passages, places = gram_keys(words, bounds, np.full(len(bounds) - 1, SEED))
            self._tables = (
                GramTable.build(keys, owners),
                wanted,
                prefix,
                make_sieve(prefixes),
                GramTable.build(seeds, (passages << 8) + places, MAX_OWNERS),
                words,
                bounds,
            )
        return self._tables

    def search(self, text: str) -> list[Hit]:
        """Items found in a text, in the order in which they were added; the first exact match, or else the best fuzzy one."""
        text, hashes, begins, ends = _words(text)
        exact, wanted, prefix, prefixes, seeds, words, bounds = self._build()
        found: dict[int, Hit] = {}

        def hit(item: int, kind: str, score: float, first: int, end: int) -> None:
            if item not in found or (found[item].kind == kind == "fuzzy" and found[item].score < score):
                matched = text[begins[first] : ends[end - 1]][:MATCHED_CHARS]
                found[item] = Hit(self.names[item], kind, score, matched)

        if self.names and len(hashes) >= prefix:
            runs = _exact(hashes, wanted, coefficients(), exact.keys, exact.sieve, prefix, prefixes)
            for position, size, at in runs:
                for item in exact.owners[exact.starts[at] : exact.starts[at + 1]].tolist():
                    hit(item, "exact", 1.0, position, position + size)
        for begin in range(0, len(hashes) - SEED + 1, PART) if self.threshold is not None else ():
            part = hashes[begin : begin + PART + 2 * LONGEST]
            for passage, first, end, common in _fuzzy(
                part, coefficients(), SEED, seeds.keys, seeds.starts, seeds.owners, seeds.sieve, words, bounds,
                self.threshold,
            ):  # fmt: skip
                score = common / int(bounds[passage + 1] - bounds[passage])
                hit(self._item_of[passage], "fuzzy", score, begin + first, begin + max(end, first + 1))
        return [found[item] for item in sorted(found)]

    def save(self, folder: Path) -> None:
        """Write the index for workers: JSON and .npy files."""
        exact, wanted, prefix, prefixes, seeds, words, bounds = self._build()
        for name, table in (("exact", exact), ("seeds", seeds)):
            for field in ("keys", "starts", "owners", "sieve"):
                save_array(folder / f"{name}.{field}.npy", getattr(table, field))
        for name, array in (("wanted", wanted), ("prefixes", prefixes), ("words", words), ("bounds", bounds)):
            save_array(folder / f"{name}.npy", array)
        about = {"ngram": self.ngram, "min_words": self.min_words, "threshold": self.threshold}
        about |= {
            "fuzzy_min_words": self.fuzzy_min_words,
            "names": self.names,
            "item_of": self._item_of,
            "prefix": prefix,
        }
        (folder / "items.json").write_text(json.dumps(about), encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> ItemIndex:
        """An index that `save` wrote; it can be searched, not added to."""
        about = json.loads((folder / "items.json").read_text(encoding="utf-8"))
        names, item_of, prefix = (about.pop(key) for key in ("names", "item_of", "prefix"))
        index = cls(**about)
        index.names, index._item_of = names, item_of

        def array(name: str) -> np.ndarray:
            return np.asarray(np.load(folder / f"{name}.npy", mmap_mode="c"))  # shared by the workers of a machine

        exact, seeds = (
            GramTable(*(array(f"{table}.{field}") for field in ("keys", "starts", "owners", "sieve")))
            for table in ("exact", "seeds")
        )
        tables = exact, array("wanted"), prefix, array("prefixes"), seeds, array("words"), array("bounds")
        index._tables = tables
        return index
