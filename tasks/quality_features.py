"""Surface features of a text: what its lines, words and characters look like, never how long it is.

Each has a direction that the filter families agree on (Gopher, C4, FineWeb): 1 where more of it speaks for edited text, -1
against, 0 where it may go either way. The regression may not turn a direction round (`LogisticRegression.fit`, sign_f), so
that an accident of the training sources cannot teach it that, say, links or capitals are good.

    python -m tasks.quality_features < page.txt      prints every feature of a text
"""

from __future__ import annotations

import math
import sys
from functools import cache

import numpy as np

from tasks.filters import BULLET, STOP_WORDS, UNSPACED, Stats, policy_lines

CHARS = 6000  # of a text's beginning that are looked at
DIRECTIONS = {
    "mean_word_length": 0,
    "long_words": 0,
    "unique_words": 0,
    "upper": -1,
    "digits": -1,
    "punctuation": 0,
    "commas": 1,
    "exclamations": -1,
    "sentence_lines": 1,
    "short_lines": -1,
    "prose_share": 1,
    "stop_words": 1,
    "function_words": 1,
    "policy_lines": -1,
    "line_length": 1,
    "longest_line": 1,
    "first_person": -1,
    "second_person": -1,
    "urls": -1,
    "symbols": -1,
    "title_words": -1,
    "bullet_lines": -1,
    "ellipses": -1,
    "duplicate_lines": -1,
    "money": -1,
    "brackets": -1,
}
FEATURES = tuple(DIRECTIONS)
_FUNCTION_WORDS = frozenset(
    (
        "the be to of and that have with is in for it on as a an at by from was were are this which or not but had has been "
        "their its his her they we he she there would when who will more if out so what up about into than them can only other "
        "new some could time these two may then do first any my now such like our over me even most made after also did many "
        "before must through back years where much your way well down should because each just those people how too little"
    ).split()
)
_STOP_WORDS = {lang: frozenset(words.split()) for lang, words in STOP_WORDS.items()}
_FIRST_PERSON = frozenset("i my me we our us".split())
_SECOND_PERSON = frozenset("you your yours".split())
_SENTENCE_END = tuple('.!?"\u201d\u3002\uff01\uff1f') + (".)",)
_EDGES = ".,;:!?\"'()"
_CLASSES = {",": 1, "!": 2, "\uff0c": 1, "\u3001": 1, "\uff01": 2} | dict.fromkeys(".;:?\u3002\uff1f\uff1b\uff1a", 3)
_CLASSES |= dict.fromkeys("#|<>*_~=+^\u00a9\u00ae\u2122\u00bb\u00ab\u2022", 4) | dict.fromkeys("$\u00a3\u20ac%", 5)
_CLASSES |= dict.fromkeys("()[]{}", 6)  # 7: a capital, 8: a digit


@cache
def _class_table() -> np.ndarray:
    """uint8 [65536]: the class of each code point of the basic plane, 0 for none."""
    table = np.zeros(0x10000, np.uint8)
    for code in range(0x10000):
        char = chr(code)
        table[code] = 7 if char.isupper() else 8 if char.isdigit() else _CLASSES.get(char, 0)
    return table


def _class_shares(text: str) -> np.ndarray:
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    return np.bincount(_class_table()[np.minimum(codes, 0xFFFF)], minlength=9) / max(1, len(text))


def surface_features(text: str, lang: str = "en", chars: int = CHARS) -> list[float]:
    """The features named in FEATURES of the text's first `chars` characters; nan where one does not apply to `lang`."""
    stats = Stats(text[:chars], lang)
    words = stats.words or [""]
    n, size = len(words), max(1, len(stats.text))
    lower = [w.strip(_EDGES) for w in stats.text.lower().split()] if lang not in UNSPACED else words
    lines = [line.strip() for line in stats.lines] or [""]
    lengths = [len(line) for line in lines]
    count, total = len(lines), max(1, sum(lengths))
    ends = [line.endswith(_SENTENCE_END) for line in lines]
    long, short = (30, 12) if lang in UNSPACED else (80, 30)
    prose = sum(a for a, line, end in zip(lengths, lines, ends) if a >= long and (end or line.endswith(":")))
    share = _class_shares(stats.text)
    stop = _STOP_WORDS.get(lang)
    english = lang in ("en", "")
    return [
        sum(map(len, words)) / n if lang not in UNSPACED else math.nan,
        sum(len(w) > 7 for w in words) / n if lang not in UNSPACED else math.nan,
        len(set(lower[:200])) / min(n, 200),
        share[7],
        share[8],
        share[1] + share[2] + share[3],
        share[1] * size / n,
        share[2] * size / n,
        sum(ends) / count,
        sum(a < short for a in lengths) / count,
        prose / total,
        sum(w in stop for w in lower) / n if stop else math.nan,
        sum(w in _FUNCTION_WORDS for w in lower) / n if english else math.nan,
        policy_lines(stats) if english else math.nan,
        math.log1p(total / count) if lang not in UNSPACED else math.nan,
        math.log1p(max(lengths)) if lang not in UNSPACED else math.nan,
        sum(w in _FIRST_PERSON for w in lower) / n if english else math.nan,
        sum(w in _SECOND_PERSON for w in lower) / n if english else math.nan,
        sum("http" in w or "www." in w for w in lower) / n,
        share[4],
        sum(w[:1].isupper() for w in words) / n,
        sum(BULLET.match(line + " ") is not None for line in lines) / count,
        (stats.text.count("...") + stats.text.count("\u2026")) / count,
        1 - len(set(lines)) / count,
        share[5],
        share[6],
    ]


def main() -> None:
    for name, value in zip(FEATURES, surface_features(sys.stdin.read(), *sys.argv[1:2]), strict=True):
        print(f"{name:20} {value:.5f}")


if __name__ == "__main__":
    main()
