"""C4's rules that drop single lines, and its list of bad words (Raffel et al. 2020, section 2.2; off in every profile).

    web.lines: {end_mark: true, words: 3, longest_word: 1000, javascript: true, policy: true}
    web.bad_words: {en: badwords/en.txt, "*": badwords/all.json}

Line rules cut a page before the filters see it; what they drop is in the exclusions table under `line_<rule>`, one row for
each page and rule, its score the number of lines. C4's rules for whole pages are filters: lorem_ipsum and curly_brackets at
[null, 0], sentences at [5, null].

A list is a UTF-8 file with a word or phrase on each line (`#` starts a comment line), or a JSON array of strings, for pages
of one language or of all (`*`). A page with a listed word is dropped, as in C4: whole words, any case; in scripts without
blanks, any occurrence. No list is shipped; the one that C4 used is CC-BY-4.0 and in the npm package naughty-words.

python -m pytest tests/tasks/test_web_lines.py
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path

from tasks.filters import SENTENCE_MARKS, UNMARKED, UNSPACED

# C4's four, and their like in other scripts.
END_MARKS = (*'.?!"\u201d\u2019\u00bb\u300d', *SENTENCE_MARKS)
_ELLIPSES = ("...", "\u2026")
_POLICY = ("terms of use", "privacy policy", "cookie policy", "uses cookies", "use of cookies", "use cookies")
Threshold = bool | int


def end_mark(line: str, lang: str, limit: Threshold) -> bool:
    """The line ends without a terminal mark, or with an ellipsis; not in languages that mark no end."""
    stripped = line.rstrip()
    return lang not in UNMARKED and not stripped.endswith(END_MARKS) or stripped.endswith(_ELLIPSES)


def words(line: str, lang: str, limit: Threshold) -> bool:
    """The line has fewer than `limit` words (C4's code 3, its paper 5); not in scripts without blanks."""
    return lang not in UNSPACED and len(line.split()) < limit


def longest_word(line: str, lang: str, limit: Threshold) -> bool:
    """A word of the line is longer than `limit` characters (C4: 1000); not in scripts without blanks."""
    return lang not in UNSPACED and any(len(word) > limit for word in line.split())


def javascript(line: str, lang: str, limit: Threshold) -> bool:
    """The line names JavaScript."""
    return "javascript" in line.lower()


def policy(line: str, lang: str, limit: Threshold) -> bool:
    """The line speaks of terms, privacy or cookies, in C4's words."""
    lower = line.lower()
    return any(phrase in lower for phrase in _POLICY)


RULES: dict[str, Callable[[str, str, Threshold], bool]] = {
    f.__name__: f for f in (longest_word, end_mark, words, javascript, policy)
}
_COUNTED = ("words", "longest_word")


def check_line_rules(rules: Mapping[str, Threshold]) -> None:
    """ValueError for a rule that there is not, or whose threshold is of the wrong kind."""
    for name, limit in rules.items():
        if name not in RULES:
            raise ValueError(f"web.lines: no rule {name!r}; there are {', '.join(RULES)}")
        if (name in _COUNTED) is isinstance(limit, bool) or (name in _COUNTED and limit < 1):
            kind = "a number above 0" if name in _COUNTED else "true or false"
            raise ValueError(f"web.lines.{name}: expected {kind}, found {limit!r}")


def drop_lines(text: str, lang: str, rules: Mapping[str, Threshold]) -> tuple[str, dict[str, list[str]]]:
    """(the text without the lines that a rule drops, {rule: its lines}); blank lines stay, ends and runs of them are cut.

    Of several rules that a line breaks, the first in the order of `RULES` names it.
    """
    active = [(name, test, rules[name]) for name, test in RULES.items() if rules.get(name)]
    kept, dropped = [], {}
    for line in text.split("\n"):
        broken = next((n for n, test, limit in active if test(line, lang, limit)), None) if line.strip() else None
        if broken is None:
            kept.append(line)
        else:
            dropped.setdefault(broken, []).append(line)
    if not dropped:
        return text, {}
    return re.sub(r"\n{3,}", "\n\n", "\n".join(kept)).strip("\n"), dropped


# ---- bad words -------------------------------------------------------------------------------------------------------


def read_list(path: Path) -> tuple[str, ...]:
    """Words of a list in lower case, sorted. ValueError with the file's name when it is absent, empty or malformed."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"web.bad_words: {path}: cannot be read ({error})") from None
    if text.lstrip().startswith("["):
        try:
            found = json.loads(text)
        except ValueError as error:
            raise ValueError(f"web.bad_words: {path}: not valid JSON ({error})") from None
        if not all(isinstance(word, str) for word in found):
            raise ValueError(f"web.bad_words: {path}: expected an array of strings")
    else:
        found = [line for line in text.splitlines() if not line.startswith("#")]
    listed = tuple(sorted({" ".join(word.lower().split()) for word in found} - {""}))
    if not listed:
        raise ValueError(f"web.bad_words: {path}: lists no word")
    return listed


@lru_cache(maxsize=64)
def _pattern(paths: tuple[str, ...], spaced: bool) -> re.Pattern[str]:
    listed = sorted({word for path in paths for word in read_list(Path(path))}, key=lambda w: (-len(w), w))
    either = "|".join(r"\s+".join(map(re.escape, word.split())) for word in listed)
    return re.compile(rf"(?<!\w)(?:{either})(?!\w)" if spaced else either)


def bad_words(text: str, lang: str, lists: Mapping[str, str]) -> int:
    """How often listed words occur in a page of language `lang`; `lists`: language or `*` -> file."""
    paths = tuple(lists[key] for key in (lang, "*") if key in lists)
    if not paths:
        return 0
    return sum(1 for _ in _pattern(paths, lang not in UNSPACED).finditer(text.lower()))
