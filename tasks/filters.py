"""Heuristic document filters in the manner of Gopher, C4 and FineWeb: each is one measurement with bounds from params.

A measurement is a function of `Stats` (the document's lines and words, split once) that returns a float, or None where it
does not apply to the language. A document is removed by the first rule whose measurement leaves its [low, high].
The paper gives no thresholds (notes D.2), so all of them are configuration; profile tiny, whose corpus is rich in reference
pages, has wider ones than the papers, profile glm5 the papers' own. C4 drops single
lines; here the share of such lines decides about the page, since main content extraction has already dropped what is not
text. Dropping lines as C4 does, and its bad words, are options of their own (tasks/web_lines.py).

    python -m tasks.filters < page.txt     prints every measurement of a text
"""

from __future__ import annotations

import re
import sys
import unicodedata
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np

Bounds = tuple[float | None, float | None] | None
UNSPACED = frozenset("zh ja th lo km my bo wuu yue".split())  # scripts without blanks between words
UNMARKED = frozenset("th lo".split())  # languages that end a sentence with a blank, not with a mark
# Characters to a word in alphabets written without blanks, where n-grams are over this many times more of them.
_LETTERS_PER_WORD = {"th": 4, "lo": 4, "km": 4, "my": 4, "bo": 2}
# Languages of long words (suffixes upon suffixes), whose good text exceeds Gopher's mean length, made for English.
_LONG_WORDS = frozenset("ml ta kn te kl iu".split())
# Ends of sentences beyond ASCII (Unicode's Sentence_Terminal): Armenian, Arabic, Syriac, Indic, Tibetan, Burmese, Ethiopic,
# Khmer, Mongolian, Chinese and Japanese.
SENTENCE_MARKS = (
    "\u0589\u061d\u061e\u061f\u06d4\u0700\u0701\u0702\u0964\u0965\u0f0d\u0f0e\u104a\u104b\u1362\u1367\u1368\u17d4\u17d5"
    "\u1803\u1809\u1c7e\u1c7f\u203c\u203d\u2047\u2048\u2049\u3002\uff01\uff0e\uff1f\uff61"
)
_WORD = re.compile(r"\S+")
_HAN = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u0f00-\u0fff]")
BULLET = re.compile(r"\s*(?:[-*\u2022\u2023\u25b6\u25cf\u25e6\u2013\u2014>]|\d{1,3}[.)])\s")
_SIGNS = "".join(c for c in map(chr, range(0x0E00, 0x1800)) if unicodedata.category(c)[0] == "M") + "\u0f0b\u0f0c"
_UNSPACED_WORD = re.compile(rf"{_HAN.pattern}[{_SIGNS}]*|[^\s{_HAN.pattern[1:-1]}]+")  # a letter with its vowel signs
_SENTENCE_END = (*".!?;:\"'\u201d\u2019\u00bb\u300d\u300f\uff09\uff1a\uff1b)", *SENTENCE_MARKS)
_POLICY = re.compile(  # of lower-case text
    r"terms of (?:use|service)|privacy policy|cookie policy|uses? cookies|all rights reserved|powered by|"
    r"(?:sign|log) ?(?:in|up)\b|forgot(?:ten)? (?:your )?password|javascript|subscribe|newsletter|copyright \W?\d{4}"
)
_SENTENCE = re.compile(rf"(?<![.!?])[.!?]++[\"\u201d\u2019)]*+(?=\s|$)|[{SENTENCE_MARKS}]+")
_GOPHER_WORDS = frozenset("the be to of and that have with".split())
_LOREM = re.compile(r"lorem ipsum|dolor sit amet", re.IGNORECASE)
STOP_WORDS = {
    "en": "the be to of and that have with is in for it on as",
    "fr": "le la les de des et en un une du dans que est pour",
    "es": "el la los de y en un una que por con las es del",
    "de": "der die das und in den von zu mit ist ein eine auf",
    "it": "il la di e che in un una per con del della sono",
    "pt": "o a de e que em um uma para com do da os no",
}
_STOP_SETS = {lang: frozenset(words.split()) for lang, words in STOP_WORDS.items()}


@dataclass(frozen=True)
class Stats:
    """A text split once for all rules."""

    text: str
    lang: str = ""

    @cached_property
    def words(self) -> list[str]:
        """Blank-separated words; letters with their signs in scripts that write no blanks."""
        if self.lang in UNSPACED:
            return _UNSPACED_WORD.findall(self.text)
        return _WORD.findall(self.text)

    @cached_property
    def word_ids(self) -> np.ndarray:
        """Number of each word, int64 [n]: equal words have equal numbers."""
        numbers: dict[str, int] = {}
        return np.fromiter((numbers.setdefault(w, len(numbers)) for w in self.words), np.int64, len(self.words))

    @cached_property
    def word_ends(self) -> np.ndarray:
        """Characters in the first 0, 1, ... words, int64 [n + 1]."""
        ends = np.zeros(len(self.words) + 1, np.int64)
        np.cumsum(np.fromiter(map(len, self.words), np.int64, len(self.words)), out=ends[1:])
        return ends

    @cached_property
    def lines(self) -> list[str]:
        return [line for line in self.text.split("\n") if line.strip()]

    @cached_property
    def lower_lines(self) -> list[str]:
        return [line for line in self.text.lower().split("\n") if line.strip()]

    @cached_property
    def paragraphs(self) -> list[str]:
        return [p.strip() for p in self.text.split("\n\n") if p.strip()]


MEASURES: dict[str, Callable[[Stats], float | None]] = {}


def measure(function: Callable[[Stats], float | None]) -> Callable[[Stats], float | None]:
    """Register a measurement under its function's name."""
    MEASURES[function.__name__] = function
    return function


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _line_share(stats: Stats, test: Callable[[str], object]) -> float:
    return _share(sum(1 for line in stats.lines if test(line)), len(stats.lines))


@measure
def words(s: Stats) -> float:
    """Number of words (Gopher: 50 to 100,000)."""
    return float(len(s.words))


@measure
def mean_word_length(s: Stats) -> float | None:
    """Mean characters per word (Gopher: 3 to 10); not for unspaced scripts, nor for languages of long words."""
    return None if s.lang in UNSPACED or s.lang in _LONG_WORDS else _share(sum(map(len, s.words)), len(s.words))


@measure
def symbol_ratio(s: Stats) -> float:
    """Hash signs and ellipses per word (the larger of both in Gopher, their sum here: at most 0.1)."""
    return hash_ratio(s) + ellipsis_ratio(s)


@measure
def hash_ratio(s: Stats) -> float:
    """Hash signs per word (Gopher: at most 0.1)."""
    return _share(s.text.count("#"), len(s.words))


@measure
def ellipsis_ratio(s: Stats) -> float:
    """Ellipses per word (Gopher: at most 0.1)."""
    return _share(s.text.count("...") + s.text.count("\u2026"), len(s.words))


@measure
def bullet_lines(s: Stats) -> float:
    """Share of lines that start with a bullet (Gopher: at most 0.9)."""
    return _line_share(s, BULLET.match)


@measure
def ellipsis_lines(s: Stats) -> float:
    """Share of lines that end with an ellipsis (Gopher: at most 0.3)."""
    return _line_share(s, lambda line: line.rstrip().endswith(("...", "\u2026")))


@measure
def alphabetic_words(s: Stats) -> float:
    """Share of words with a letter (Gopher: at least 0.8; less where pages hold tables or code)."""
    return _share(sum(1 for w in s.words if w.isalpha() or any(map(str.isalpha, w))), len(s.words))


@measure
def stop_words(s: Stats) -> float | None:
    """Share of words that are stop words of the language; only where we have a list (Gopher asks for two of eight)."""
    stop = _STOP_SETS.get(s.lang)
    return None if stop is None else _share(sum(1 for w in s.words if w.lower() in stop), len(s.words))


@measure
def different_stop_words(s: Stats) -> float | None:
    """How many of eight English stop words occur (Gopher: at least 2)."""
    return float(len(_GOPHER_WORDS.intersection(map(str.lower, s.words)))) if s.lang == "en" else None


@measure
def sentences(s: Stats) -> float | None:
    """Number of sentence ends (C4: at least 3 in a page of kept lines); not for languages that mark none."""
    return None if s.lang in UNMARKED else float(len(_SENTENCE.findall(s.text)))


@measure
def few_word_lines(s: Stats) -> float | None:
    """Share of lines of fewer than three words (dropped by C4's code; its paper says five); not for unspaced scripts."""
    return None if s.lang in UNSPACED else _line_share(s, lambda line: len(line.split()) < 3)


@measure
def curly_brackets(s: Stats) -> float:
    """Curly brackets per word (C4 drops a page that has one; a page about code has some)."""
    return _share(s.text.count("{") + s.text.count("}"), len(s.words))


@measure
def javascript_lines(s: Stats) -> float:
    """Share of lines that name JavaScript (C4 drops such lines)."""
    return _share(sum("javascript" in line for line in s.lower_lines), len(s.lines))


@measure
def newline_ratio(s: Stats) -> float:
    """Line ends per word (FineWeb: at most 0.3)."""
    return _share(s.text.count("\n"), len(s.words))


@measure
def sentence_lines(s: Stats) -> float | None:
    """Share of lines that end like a sentence (C4's rule per line; FineWeb: at least 0.12); not where no mark ends one."""
    return None if s.lang in UNMARKED else _line_share(s, lambda line: line.rstrip().endswith(_SENTENCE_END))


@measure
def short_lines(s: Stats) -> float:
    """Share of lines under 30 characters (FineWeb: at most 0.67); 12 in unspaced scripts."""
    limit = 12 if s.lang in UNSPACED else 30
    return _line_share(s, lambda line: len(line.strip()) < limit)


@measure
def policy_lines(s: Stats) -> float:
    """Share of lines that speak of terms, cookies, log-in, newsletters, JavaScript (C4 drops such lines)."""
    return _share(sum(map(bool, map(_POLICY.search, s.lower_lines))), len(s.lines))


@measure
def lorem_ipsum(s: Stats) -> float:
    """Occurrences of placeholder Latin (C4: none)."""
    return float(len(_LOREM.findall(s.text)))


@measure
def duplicate_line_share(s: Stats) -> float:
    """Share of lines that occurred before (Gopher: at most 0.3)."""
    return 1 - _share(len(set(map(str.strip, s.lines))), len(s.lines)) if s.lines else 0.0


@measure
def duplicate_paragraph_share(s: Stats) -> float:
    """Share of paragraphs that occurred before (Gopher: at most 0.3)."""
    return 1 - _share(len(set(s.paragraphs)), len(s.paragraphs)) if s.paragraphs else 0.0


def _duplicate_chars(parts: list[str]) -> float:
    seen: set[str] = set()
    repeated = 0
    for part in parts:
        repeated += len(part) if part in seen else 0
        seen.add(part)
    return _share(repeated, sum(map(len, parts)))


@measure
def duplicate_line_chars(s: Stats) -> float:
    """Share of characters in lines that occurred before (Gopher: at most 0.2; FineWeb: 0.01)."""
    return _duplicate_chars([line.strip() for line in s.lines])


@measure
def duplicate_paragraph_chars(s: Stats) -> float:
    """Share of characters in paragraphs that occurred before (Gopher: at most 0.2)."""
    return _duplicate_chars(s.paragraphs)


def ngram_hashes(word_ids_n: np.ndarray, n: int) -> np.ndarray:
    """A 64-bit hash of each n-gram of word numbers, uint64 [len - n + 1] (two different ones agree once in 2^64)."""
    count = max(0, len(word_ids_n) - n + 1)
    mixed = (word_ids_n.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(29)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(32)
    out = np.zeros(count, np.uint64)
    for k in range(n):
        out = out * np.uint64(0xD1B54A32D192ED03) + mixed[k : k + count]
    return out


def top_ngram_share(s: Stats, n: int) -> float:
    """Share of characters in the most frequent n-gram (0 when it occurs once); ties go to the one that covers more."""
    n *= _LETTERS_PER_WORD.get(s.lang, 1)
    hashes = ngram_hashes(s.word_ids, n)
    if len(hashes) < 2:
        return 0.0
    ordered = np.sort(hashes)
    starts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
    counts = np.diff(np.append(starts, len(ordered)))
    top = int(counts.max())
    if top < 2:
        return 0.0
    places = np.flatnonzero(np.isin(hashes, ordered[starts[counts == top]]))
    longest = int((s.word_ends[places + n] - s.word_ends[places]).max())
    return min(1.0, _share(top * longest, float(s.word_ends[-1])))


def duplicate_ngram_share(s: Stats, n: int) -> float:
    """Share of characters inside n-grams that occurred before, overlaps counted once (Gopher)."""
    n *= _LETTERS_PER_WORD.get(s.lang, 1)
    hashes = ngram_hashes(s.word_ids, n)
    order = np.argsort(hashes, kind="stable")
    again = order[1:][hashes[order[1:]] == hashes[order[:-1]]]  # not the first of its kind
    if not len(again):
        return 0.0
    edges = np.zeros(len(s.word_ids) + 1, np.int64)
    edges[again] += 1
    edges[again + n] -= 1
    inside = np.cumsum(edges[:-1]) > 0
    return _share(float(np.diff(s.word_ends)[inside].sum()), float(s.word_ends[-1]))


def _register_ngrams() -> None:
    """top_2gram .. top_4gram (Gopher: at most 0.20, 0.18, 0.16), duplicate_5grams .. duplicate_10grams (0.15 .. 0.10)."""
    for n in (2, 3, 4):
        function = partial(top_ngram_share, n=n)
        function.__doc__ = f"Characters in the most frequent {n}-gram (Gopher: at most {0.24 - 0.02 * n:.2f})."
        MEASURES[f"top_{n}gram"] = function
    for n in range(5, 11):
        function = partial(duplicate_ngram_share, n=n)
        function.__doc__ = f"Characters in repeated {n}-grams (Gopher: at most {0.2 - 0.01 * n:.2f})."
        MEASURES[f"duplicate_{n}grams"] = function


_register_ngrams()


def check_rules(rules: Mapping[str, Bounds]) -> None:
    """ValueError for a rule that is not a measurement, or whose bounds are empty."""
    for name, bounds in rules.items():
        if name not in MEASURES:
            raise ValueError(f"web.filters: no filter {name!r}; there are {', '.join(MEASURES)}")
        low, high = bounds or (None, None)
        if low is not None and high is not None and low > high:
            raise ValueError(f"web.filters.{name}: low {low} is above high {high}")


def measure_rules(
    stats: Stats, rules: Mapping[str, Bounds]
) -> tuple[tuple[str, float] | None, dict[str, float | None]]:
    """((rule, value) of the first rule in order that the document breaks or None, every value measured until then)."""
    values: dict[str, float | None] = {}
    for name, bounds in rules.items():
        if bounds is None:  # switched off
            continue
        low, high = bounds
        value = values[name] = MEASURES[name](stats)
        if value is not None and ((low is not None and value < low) or (high is not None and value > high)):
            return (name, round(value, 6)), values
    return None, values


def first_violation(text: str, lang: str, rules: Mapping[str, Bounds]) -> tuple[str, float] | None:
    """(rule, measured value) of the first rule in order that the document breaks, or None."""
    return measure_rules(Stats(text, lang), rules)[0]


def main() -> None:
    stats = Stats(sys.stdin.read(), sys.argv[1] if len(sys.argv) > 1 else "en")
    for name, function in MEASURES.items():
        print(f"{name:26} {function(stats)}")


if __name__ == "__main__":
    main()
