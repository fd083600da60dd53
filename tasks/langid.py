"""Language identification: two identifiers with different errors, combined where they disagree.

cld2 (Apache-2.0, 100k sentences/s) covers 160 languages and errs towards small relatives and English; lid.176 (fastText,
CC-BY-SA-3.0, 30k/s) is sure of large languages and misses small ones. Both answer; when they agree, that is the answer.
Otherwise every candidate scores log(c + miss) + log(f + miss): what an identifier says of it, plus the share of its text
that this identifier misses (conf/langid.json, measured by tasks/langid_fit.py), a lower prior for languages rare on the
web, and, for close relatives, alphabets and function words (tasks/langid_rules.py).

echo "ceci est une phrase" | python -m tasks.langid data/acquire/models/lid.176.ftz
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import pycld2

from tasks import langid_rules as rules

UNKNOWN = ("", 0.0)
TABLES = Path(__file__).resolve().parents[1] / "conf" / "langid.json"
_LABEL = "__label__"
_STRONG_SCORE = 400.0
_FULL_SCORE = 900.0  # cld2's score per kilobyte of typical prose; below it its share counts in proportion
_BASE = 0.1  # floor of either vote: neither identifier alone may exclude a language
_MISS_WEIGHT = 0.2
_RARE = math.log(0.2)
_WORD_WEIGHT = 1.0
_FOREIGN_LETTER = math.log(0.2)
_SURE = 0.3  # answers below this confidence are "unknown"
_SHORT_LETTERS, _SHORT_WIDE = 20, 6  # below, more confidence is asked for
_SHORT_SURE = 0.6
# White space, and characters that cld2 refuses: controls, surrogates, non-characters (the last two of every plane).
_PLANE_ENDS = "".join(chr(plane + last) for plane in range(0, 0x110000, 0x10000) for last in (0xFFFE, 0xFFFF))
_SPACES = re.compile(f"[\\s\0-\x08\x0b\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufdd0-\ufdef{_PLANE_ENDS}]+")
# Not \W, which would take in the vowel signs of Indic scripts.
_NO_LETTER = re.compile(
    "[\\s\\d!-/:-@\\[-`{-~\u00a1-\u00a9\u00ab-\u00b4\u00b6-\u00b9\u00bb-\u00bf\u2000-\u2bff\u3000-\u3004\u3007-\u3030"
    "\uff00-\uff20\ufe00-\ufe0f\U0001f000-\U0001faff]+"
)
_ADDRESS = re.compile(r"(?:https?://|www\.)\S+")
_PARAGRAPH = re.compile(r"\n\s*\n|\n(?=.{200})")
_MIXED_CHARS = 400  # a page shorter than this is one text
_MIXED_SURE = 0.9
_LAST_CHARS = 1000
_MIXED_SHARE = 0.1  # of letters in other languages, below which a page is in one


class Paragraph(NamedTuple):
    start: int  # characters
    end: int
    language: str
    score: float


class DocumentLanguage(NamedTuple):
    language: str  # of the largest share of letters, "" when nothing was identified
    share: float  # of that language among identified letters, 0..1
    mixed: float  # 1 - share: letters in other languages
    shares: dict[str, float]
    paragraphs: list[Paragraph]


def clean(text: str) -> str:
    """One line: runs of white space and of characters that cld2 refuses become a space each."""
    return _SPACES.sub(" ", text).strip()


def cld2_votes(line: str) -> tuple[list[tuple[str, float, float]], bool]:
    """([(language, share of bytes 0..1, score per kilobyte)], reliable) of cld2 for a line that went through clean()."""
    try:
        reliable, _, details = pycld2.detect(line, isPlainText=True, bestEffort=True)
    except pycld2.error:  # its UTF-8 check is stricter than Unicode in corners that clean() may not know
        return [], False
    return [(rules.normalize(code), share / 100, score) for _, code, share, score in details if code != "un"], reliable


def is_strong(votes: list[tuple[str, float, float]], reliable: bool) -> bool:
    """Whether cld2 is as sure as it gets: one language, with the score of typical prose."""
    return reliable and votes[0][1] >= 0.95 and votes[0][2] >= _STRONG_SCORE


class LanguageIdentifier:
    """`model` is lid.176.ftz or another fastText language model. ValueError when the file is no fastText model.

    identify() and identify_paragraphs() read at most `chars` characters of each text or paragraph.
    """

    def __init__(self, model: str | Path, chars: int = 3000):
        import fasttext

        self.chars = chars
        try:
            self._model = fasttext.load_model(str(model))
        except (ValueError, OSError) as error:
            raise ValueError(f"{model}: not a fastText language model ({error})") from None
        self._predict = self._model.f.predict
        self._known = frozenset(rules.normalize(label.removeprefix(_LABEL)) for label in self._model.labels)
        self.languages = self._known | {rules.normalize(code) for _, code in pycld2.LANGUAGES}
        self._tables = (
            json.loads(TABLES.read_text(encoding="utf-8")) if TABLES.is_file() else {"cld2": {}, "lid176": {}}
        )
        self._trusted = frozenset(self._tables.get("trusted", ()))

    def lid_votes(self, line: str) -> list[tuple[str, float]]:
        """[(language, probability)], best first, of the fastText model for one line of text."""
        found = self._predict(line + "\n", 5, 0.01, "ignore")
        return [(rules.normalize(label.removeprefix(_LABEL)), min(1.0, p)) for p, label in found]

    def identify(self, text: str) -> tuple[str, float]:
        """(ISO 639 code, confidence in 0..1) of the text's first `chars` characters, ("", 0.0) when it can't be told.

        It can't be told without letters, in code, numbers and text read with the wrong charset, and when the confidence
        is below 0.3 (0.6 for less than 20 letters).
        """
        line = clean(text[: self.chars])
        if "://" in line or "www." in line:
            line = clean(_ADDRESS.sub(" ", line))
        visible = len(line) - line.count(" ")
        if len(_NO_LETTER.sub("", line)) < max(2.0, 0.5 * visible) or _is_noise(line, visible):
            return UNKNOWN
        votes, reliable = cld2_votes(line)
        first, share, _ = votes[0] if votes else ("", 0.0, 0.0)
        short = visible < 60 and _is_short(line)
        if not short and first in self._trusted and is_strong(votes, reliable):
            return first, round(share, 4)
        lid = self.lid_votes(line)
        if not lid and not first:
            return UNKNOWN
        if lid and first == lid[0][0] and share * lid[0][1] >= 0.5:
            return first, round(math.sqrt(share * lid[0][1]), 4)
        language, score = self._weigh(line, votes, lid)
        if short and visible < 3 and line.isascii():  # "Hi", "OK": words of twenty languages each
            return UNKNOWN
        return (language, round(score, 4)) if score >= (_SHORT_SURE if short else _SURE) else UNKNOWN

    def _weigh(
        self, line: str, votes: list[tuple[str, float, float]], lid: list[tuple[str, float]]
    ) -> tuple[str, float]:
        """Best candidate of both identifiers and its share of the candidates' combined scores."""
        cld2: dict[str, float] = defaultdict(float)
        for language, share, strength in votes:
            if (
                language != "en" or "en" not in self._known
            ):  # cld2's English is its residue; fastText knows English well
                cld2[rules.group(language)] += share * min(1.0, strength / _FULL_SCORE)
        fast: dict[str, float] = defaultdict(float)
        for language, p in lid:
            fast[rules.group(language)] += p
        named = {language: share for language, share, _ in votes}
        for language, p in lid:
            named[language] = named.get(language, 0.0) + p
        lowered = line.lower()
        if rules.CYRILLIC.search(lowered) and named.keys() & {"sr", "mk", "bg", "ru"}:
            for language in ("sr", "mk", "bg", "ru"):
                named.setdefault(language, 0.0)
            cld2["mk"] = max(cld2["mk"], 0.5 * cld2["sr"])  # cld2 gives short Macedonian and Bulgarian to Serbian
            cld2["bg"] = max(cld2["bg"], 0.5 * cld2["sr"])
        letters = frozenset(rules.LETTER_BEYOND_ASCII.findall(lowered))
        words = rules.WORD.findall(lowered)
        scores = {}
        for language, support in named.items():
            kin = rules.group(language)
            score = math.log(cld2[kin] + _BASE + _MISS_WEIGHT * self._tables["cld2"].get(language, 0.3))
            unknown = 1.0 if language not in self._known else self._tables["lid176"].get(language, 0.3)
            score += math.log(fast[kin] + _BASE / 5 + _MISS_WEIGHT * unknown)
            score += 0.2 * min(2.0, support)  # within a group: the member that was named
            if language not in rules.COMMON:
                score += _RARE
            if letters and language in rules.FOREIGN:
                score += _FOREIGN_LETTER * min(2, len(letters & rules.FOREIGN[language]))
            scores[language] = score
        _function_words(words, scores)
        best = max(scores, key=lambda language: (scores[language], language))
        total = sum(
            math.exp(score - scores[best]) for lang, score in scores.items() if rules.group(lang) == rules.group(best)
        )
        return best, total / sum(math.exp(score - scores[best]) for score in scores.values())

    def identify_batch(self, texts: Iterable[str]) -> list[tuple[str, float]]:
        """identify() of each text. The libraries answer one text at a time, so a batch saves nothing but a loop."""
        return [self.identify(text) for text in texts]

    def identify_page(self, text: str) -> tuple[str, float, dict[str, float]]:
        """(language, confidence, {}) of a page in one language; of a mixed one (largest, its share of letters, all shares).

        Paragraphs are looked at where the beginning is not clear, or the end is in another language.
        """
        language, score = self.identify(text)
        last = self.identify(text[-_LAST_CHARS:])[0] if len(text) > self.chars else language
        if len(text) < _MIXED_CHARS or (score >= _MIXED_SURE and last == language):
            return language, score, {}
        found = self.identify_paragraphs(text)
        if found.mixed < _MIXED_SHARE:
            return language, score, {}
        return found.language, round(found.share, 4), {k: round(v, 4) for k, v in found.shares.items()}

    def identify_paragraphs(self, text: str) -> DocumentLanguage:
        """Language of every paragraph and of the document: the one with most letters, paragraphs that can't be told left out.

        Blank lines separate paragraphs, and so does a line break before a long line or between lines in different scripts.
        """
        paragraphs: list[Paragraph] = []
        letters: dict[str, int] = defaultdict(int)
        start = 0
        breaks = [*((m.start(), m.end()) for m in _PARAGRAPH.finditer(text)), *_script_breaks(text)]
        for end, after in [*sorted(set(breaks)), (len(text), len(text))]:
            if end < start:
                continue
            block = text[start:end]
            if block.strip():
                language, score = self.identify(block)
                paragraphs.append(Paragraph(start, end, language, score))
                if language:
                    letters[language] += sum(c.isalpha() for c in block)
            start = after
        total = sum(letters.values())
        shares = {language: n / total for language, n in sorted(letters.items(), key=lambda item: (-item[1], item[0]))}
        language = next(iter(shares), "")
        share = shares.get(language, 0.0)
        return DocumentLanguage(language, share, 1 - share if language else 0.0, shares, paragraphs)


def _script(line: str) -> int:
    """A number for the script of most letters of a line's beginning; 0 without letters."""
    counts: dict[int, int] = defaultdict(int)
    for c in filter(str.isalpha, line[:80]):
        code = ord(c)
        counts[1 if code < 0x250 else 2 if 0x3040 <= code < 0xA000 else 3 if code >= 0xA000 else code >> 7] += 1
    return max(counts, key=lambda script: (counts[script], script)) if counts else 0


def _script_breaks(text: str) -> list[tuple[int, int]]:
    """(start, end) of the line breaks between lines in different scripts."""
    if text.isascii():
        return []
    found, at, before = [], 0, 0
    for line in text.split("\n"):
        script = _script(line)
        if script and before and script != before:
            found.append((at - 1, at))
        before = script or before
        at += len(line) + 1
    return found


def _function_words(words: list[str], scores: dict[str, float]) -> None:
    """Add to each candidate that has a list its function words among `words`, in proportion to the square root of length."""
    listed = [language for language in scores if language in rules.WORDS]
    if len(listed) < 2:
        return
    for language in listed:
        known = rules.WORDS[language]
        scores[language] += _WORD_WEIGHT * sum(word in known for word in words) / max(1.0, math.sqrt(len(words)))


def _is_noise(line: str, visible: int) -> bool:
    """Whether marks of code or of a wrong charset make up too much of the `visible` characters."""
    return len(rules.CODE_MARKS.findall(line)) > 0.2 * visible or 8 * len(rules.MOJIBAKE.findall(line)) > visible


def _is_short(line: str) -> bool:
    """Whether a line says too little for one identifier alone: letters are counted, and wide ones say more."""
    letters = _NO_LETTER.sub("", line)
    if sum(c >= "\u0e00" for c in letters) > 0.5 * len(letters):  # Thai, kana, hanzi, hangul
        return len(letters) < _SHORT_WIDE
    return len(letters) < _SHORT_LETTERS


def main() -> None:
    identifier = LanguageIdentifier(sys.argv[1])
    for line in sys.stdin:
        print(*identifier.identify(line), line.rstrip(), sep="\t")


if __name__ == "__main__":
    main()
