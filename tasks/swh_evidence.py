"""Whether a path belongs to a content: by extension and by the path's own words; and the offsets that fit runs of rows best.

Used by tasks/swh_align.py; nothing here reads files.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import PurePosixPath

import numpy as np

from tasks import code_lang

AGREES, CONFLICTS, NAMED, UNNAMED = 1.0, -2.0, 1.0, -0.25  # evidence of one row for one path
FOLLOW_BONUS = 0.25  # metadata follows its hash unless the evidence says otherwise
SWITCH_PENALTY = 6.0  # of a change of offset between neighbouring rows
_PARTS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
UNUSUAL = 0.1  # share of an extension's rows
_HEAD = 20_000  # bytes looked at for names
_LANGUAGE_HEAD = 8_000  # bytes looked at for the language
_COMMON = frozenset(
    "index main init __init__ test tests utils util mod lib setup readme license types base common".split()
)
# Languages that a content alone does not tell apart well enough to accuse a path.
_FAMILIES = (
    {"c", "c++", "objective-c", "objective-c++", "cuda", "swig", "arduino", "opencl", "hlsl", "glsl", "lex", "yacc"},
    {"javascript", "typescript", "vue", "livescript", "coffeescript", "actionscript", "qml", "json", "svelte", "jsx", "tsx"},
    {"python", "cython", "starlark", "sage", "meson", "pycon", "boo"},
    {"java", "kotlin", "scala", "groovy", "c#", "apex", "ceylon"},
    {"shell", "makefile", "fish", "awk", "batchfile", "dockerfile", "tcl", "perl", "perl6", "raku"},
    {"html", "xml", "php", "vue", "css", "scss", "less", "sass", "xslt", "svelte", "twig", "hack"},
    {"haskell", "purescript", "elm", "idris", "agda", "lean", "literate haskell"},
    {"common lisp", "emacs lisp", "scheme", "racket", "clojure", "newlisp", "fennel"},
    {"ocaml", "standard ml", "f#", "reason", "rescript"}, {"matlab", "octave", "objective-c", "objective-c++", "mathematica"},
)  # fmt: skip
_FAMILY = {}
for _family in _FAMILIES:
    for _name in _family:
        _FAMILY.setdefault(_name, set()).update(_family)


def same_language(one: str, other: str) -> bool:
    """Whether two names of languages mean one language, or two that content alone does not tell apart."""
    one, other = (x.lower().replace("-", " ") if x.lower() not in _FAMILY else x.lower() for x in (one, other))
    return one == other or other in _FAMILY.get(one, ())


class Evidence:
    """Evidence of n rows: contents (None where absent) and paths."""

    def __init__(self, contents: Sequence[bytes | None], paths: Sequence[str]):
        self._contents, self.paths = contents, paths
        self._languages: list[str | None] = [None] * len(contents)
        self._lowered: dict[int, bytes] = {}
        self._of_path: dict[str, tuple[str, tuple[bytes, ...]]] = {}
        self._usual: dict[str, Counter[str]] | None = None

    def language(self, i: int) -> str:
        """Language of content i by its text alone, "" when it does not say."""
        if self._languages[i] is None:
            text = (self._contents[i] or b"")[:_LANGUAGE_HEAD].decode("utf-8", "replace")
            found = code_lang.detect("", text)[0] if text else ""
            self._languages[i] = "" if found in code_lang.DATA_KINDS else found
        return self._languages[i]

    def _path(self, path: str) -> tuple[str, tuple[bytes, ...]]:
        """(language of the extension, words of the file name in lower case that say something)."""
        if path not in self._of_path:
            stem = PurePosixPath(path).name.partition(".")[0]
            parts = [w.lower() for w in _PARTS.findall(stem)]
            whole = re.sub(r"[^a-z0-9_]", "", stem.lower()).strip("_")
            words = {w for w in (*parts, whole) if len(w) > 3 and w not in _COMMON}
            self._of_path[path] = (code_lang.detect(path, "")[0], tuple(sorted(w.encode() for w in words)))
        return self._of_path[path]

    def named(self, i: int, path: str) -> float | None:
        """Share of the words of the path's file name that content i holds; None when the name says nothing."""
        words = self._path(path)[1]
        if not words or self._contents[i] is None:
            return None
        if i not in self._lowered:
            if len(self._lowered) > 256:
                self._lowered.clear()
            self._lowered[i] = self._contents[i][:_HEAD].lower()
        return sum(w in self._lowered[i] for w in words) / len(words)

    def conflicts(self, i: int, path: str) -> bool:
        """Whether the extension names another language than the content is in."""
        mine, theirs = self.language(i), self._path(path)[0]
        return bool(mine and theirs and theirs not in code_lang.DATA_KINDS and not same_language(mine, theirs))

    def score(self, i: int, path: str) -> float:
        """Evidence that `path` belongs to content i: above 0 for, below against, 0 for none."""
        if self._contents[i] is None or not path:
            return 0.0
        mine, theirs = self.language(i), self._path(path)[0]
        value = 0.0
        if mine and theirs and theirs not in code_lang.DATA_KINDS:
            value += AGREES if same_language(mine, theirs) else CONFLICTS
        named = self.named(i, path)
        return value + (0.0 if named is None else UNNAMED + (NAMED - UNNAMED) * named)

    def fits(self, i: int, path: str) -> bool:
        """False when extension and content conflict, the content does not hold the file name's words, and such a pair is unusual.

        A pair of extension and language that UNUSUAL of the rows of that extension show is no fault: the extension has two
        owners, or the content is misread.
        """
        if not self.conflicts(i, path) or (self.named(i, path) or 0) >= 0.5:
            return True
        if self._usual is None:
            self._usual = defaultdict(Counter)
            for row, own in enumerate(self.paths):
                self._usual[self._path(own)[0]][self.language(row)] += 1
        seen = self._usual[self._path(path)[0]]
        return seen[self.language(i)] >= UNUSUAL * seen.total()


def best_offsets(evidence: Evidence, source: Sequence[int], reach: int) -> tuple[list[int], list[bool]]:
    """For each row, the row whose path fits best, and whether that is the one that its hash chose.

    Viterbi over the states "follow the hash" (`source`, the row itself where that is -1) and the offsets -reach..reach;
    a change of state costs SWITCH_PENALTY, so only runs of rows move together.
    """
    n, width = len(source), 2 * reach + 2
    if not n:
        return [], []
    score = np.full((n, width), -1e9)
    for i in range(n):
        j = source[i] if source[i] >= 0 else i
        score[i, 0] = evidence.score(i, evidence.paths[j]) + FOLLOW_BONUS
        for k in range(-reach, reach + 1):
            if 0 <= i + k < n:
                score[i, k + reach + 1] = evidence.score(i, evidence.paths[i + k])
            else:
                score[i, k + reach + 1] = UNNAMED
    back = np.zeros((n, width), np.int32)
    total = score[0].copy()
    for i in range(1, n):
        best = int(np.argmax(total))
        switch = total[best] - SWITCH_PENALTY
        back[i] = np.where(total >= switch, np.arange(width), best)
        total = np.maximum(total, switch) + score[i]
    state, states = int(np.argmax(total)), []
    for i in range(n - 1, -1, -1):
        states.append(state)
        state = int(back[i, state])
    states.reverse()
    place = []
    for i, s in enumerate(states):
        row = (source[i] if source[i] >= 0 else i) if s == 0 else i + s - reach - 1
        place.append(row if 0 <= row < n else i)
    return place, [s == 0 for s in states]


def settle_claims(
    evidence: Evidence, present: Sequence[bool], source: Sequence[int], place: list[int], reach: int
) -> set[int]:
    """Rows whose path another content claims with better evidence: given a free path that names them, else returned as lost.

    Where a column has been shifted, the contents at the end of the run have no path left.
    """
    claims: dict[int, list[int]] = defaultdict(list)
    for i, p in enumerate(place):
        if present[i] and evidence.paths[p]:
            claims[p].append(i)
    lost: set[int] = set()
    free = {p for p in range(len(place)) if p not in claims and evidence.paths[p]}
    for p, rows in sorted(claims.items()):
        if len(rows) > 1:
            rows.sort(key=lambda i: (-evidence.score(i, evidence.paths[p]), source[i] != p, abs(i - p), i))
            for i in rows[1:]:
                near = [
                    q for q in sorted(free) if abs(q - i) <= 4 * reach and evidence.named(i, evidence.paths[q]) == 1
                ]
                near = [q for q in near if not evidence.conflicts(i, evidence.paths[q])]
                if len(near) == 1:
                    place[i] = near[0]
                    free.discard(near[0])
                else:
                    lost.add(i)
    return lost
