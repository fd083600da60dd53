"""What the quality classifiers learn from: passages of the corpus's own sources, good and bad, found without a person.

A source is a name, the corpus items it takes, and a kind (`web.quality.sources` in params):

| kind        | good passages                                            | bad passages                                       |
|-------------|----------------------------------------------------------|----------------------------------------------------|
| edited      | encyclopedia, books, press, main text of article pages   | the same pages' furniture: menus, footers, teasers |
| explanatory | documentation, where more than half of the characters    |                                                    |
|             | stand in long lines that end like a sentence             |                                                    |
| furniture   |                                                          | main text, furniture and whole text of log-in,     |
|             |                                                          | search, registration and home pages                |
| listing     |                                                          | pages a machine made: indexes, member lists        |
| mail        |                                                          | bodies of spam mails, hard line breaks undone      |

Why so. (1) The pages of a site give both classes, so a model cannot tell them by topic. (2) A passage starts at a line of the
text and has a length between 200 and 5,000 characters, evenly in its logarithm, in both classes: length teaches nothing. (3)
Mails are joined into paragraphs, or the width of a terminal would pass for a mark of spam. (4) Every source of a class weighs
the same, so that the largest does not decide. (5) Made-up teaser pages (true sentences cut after 60-160 characters, "Read
more") were tried and left out: leaving out one source at a time (`leave_one_out`), they lowered the AUC on the held-out
sources from .967 to .962 (surface) and from .932 to .906 (embedding), since their words are those of the good class.
English only: the embedding is.
"""

from __future__ import annotations

import email
import email.policy
import hashlib
import heapq
import math
import random
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from tasks.extract import NotText, clean_text, decode_html

MIN_CHARS, MAX_CHARS = 150, 5000
GOOD_KINDS = ("edited", "explanatory")
_LIST_LINE = re.compile(r"[-*\u2022>\d]")
_HTML_MAIL = re.compile(r"<html|<body|<br|<table", re.IGNORECASE)


class ExampleSource(BaseModel):
    """A source of training passages for the quality classifiers."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    items: tuple[str, ...] = Field(description="corpus items it takes")
    kind: Literal["edited", "explanatory", "furniture", "listing", "mail"] = Field(
        description="what its pages are; see tasks/quality_examples.py"
    )


class Example(NamedTuple):
    """One training passage. `source` is the source's name, with a part after a slash for what of a page it is."""

    source: str
    good: bool
    id: str
    text: str


def passage(text: str, key: str) -> str:
    """A part of `text` of random length from the beginning of a line, chosen by `key`; all of it when it is short."""
    rng = random.Random(f"passage {key}")
    size = int(math.exp(rng.uniform(math.log(200), math.log(MAX_CHARS))))
    if len(text) <= size:
        return text
    start = 0
    if rng.random() < 0.5:
        line_end = text.find("\n", rng.randrange(len(text) - size))
        start = line_end + 1 if 0 <= line_end < len(text) - size else 0
    cut = text[start : start + size]
    end = max(cut.rfind("\n"), cut.rfind(". ") + 1)
    return cut[:end] if end > size // 2 else cut


def mostly_prose(text: str) -> bool:
    """Whether more than half of the characters stand in lines of 80 or more that end like a sentence."""
    lines = [line.strip() for line in text.split("\n")]
    prose = sum(len(x) for x in lines if len(x) >= 80 and x.endswith((".", "!", "?", '"', "\u201d", ".)", ":")))
    return prose > 0.5 * max(1, sum(map(len, lines)))


def unwrap(text: str) -> str:
    """Lines that were broken at a fixed width, joined; list items and short lines stay lines."""
    paragraphs = []
    for block in re.split(r"\n\s*\n", text):
        lines = block.split("\n")
        joined = [lines[0]]
        for before, line in zip(lines, lines[1:], strict=False):
            if len(before.strip()) >= 50 and line[:1].strip() and not _LIST_LINE.match(line):
                joined[-1] += " " + line.strip()
            else:
                joined.append(line)
        paragraphs.append("\n".join(joined))
    return "\n\n".join(paragraphs).strip()


def mail_text(body: bytes) -> str:
    """The readable body of a mail: its first text part, HTML as text, line breaks undone; "" when there is none."""
    from resiliparse.extract.html2text import extract_plain_text

    for part in email.message_from_bytes(body, policy=email.policy.compat32).walk():
        kind, content = part.get_content_type(), part.get_payload(decode=True)
        if kind not in ("text/plain", "text/html") or not content or not content.strip():
            continue
        try:
            text, _ = decode_html(content, str(part.get_content_charset() or ""))
        except NotText:
            continue
        if kind == "text/html" or _HTML_MAIL.search(text[:3000]):
            text = extract_plain_text(text, preserve_formatting=True, main_content=False)
        return unwrap(clean_text(text))
    return ""


def page_examples(name: str, kind: str, identity: str, main: str, furniture: str = "") -> Iterator[Example]:
    """Candidate examples of one page or text: `main` is its main text, `furniture` the rest of the page."""
    good = kind in GOOD_KINDS
    parts = {"furniture": furniture} if kind in ("edited", "furniture") else {}
    if kind == "furniture":
        parts["page"] = f"{furniture}\n{main}"  # menus come first
    for part, text in ({"": main} | parts).items():
        for turn in range(4):
            found = passage(text, f"{identity} {part} {turn}")
            if len(found) < MIN_CHARS or (kind == "explanatory" and not mostly_prose(found)):
                continue
            yield Example(f"{name}/{part}" if part else name, good and not part, f"{identity}-{turn}", found)
            if len(found) == len(text):
                break


def choose(candidates: Iterable[Example], per_source: int) -> list[Example]:
    """At most `per_source` examples of each source, first passages of as many texts as there are before second ones.

    Memory is bounded by what is kept. Equal candidates in any order give the same list, ordered by source and id.
    """
    heaps: dict[str, list] = defaultdict(list)
    for example in candidates:
        identity, _, turn = example.id.rpartition("-")
        rank = hashlib.sha256(f"{example.source} {identity}".encode()).hexdigest()
        key = (-int(turn), -int(rank[:15], 16))  # a heap's first is the one to go
        heap = heaps[example.source]
        if len(heap) < per_source:
            heapq.heappush(heap, (key, example))
        elif key > heap[0][0]:
            heapq.heapreplace(heap, (key, example))
    return sorted(example for heap in heaps.values() for _, example in heap)


def leave_one_out(
    examples: Sequence[Example], scorer: Callable[[list[Example]], Callable[[list[Example]], np.ndarray]]
) -> dict[tuple[str, str], float]:
    """ROC-AUC of every good source against every bad one by a model that saw neither, nor other parts of their pages.

    `scorer(training examples)` returns a function from examples to scores. This, never the gold labels, is what settings were
    chosen by.
    """
    from tasks.quality import roc_auc

    by_source: dict[tuple[str, bool], list[Example]] = defaultdict(list)
    for example in examples:
        by_source[example.source, example.good].append(example)
    group = {key: key[0].partition("/")[0] for key in by_source}
    found = {}
    for p in sorted({group[k] for k in by_source if k[1]}):
        for n in sorted({group[k] for k in by_source if not k[1]}):
            rest = [e for k, rows in by_source.items() if group[k] not in (p, n) for e in rows]
            if len({e.good for e in rest}) < 2:
                continue
            score = scorer(rest)
            goods = {k: score(rows) for k, rows in by_source.items() if k[1] and group[k] == p}
            bads = {k: score(rows) for k, rows in by_source.items() if not k[1] and group[k] == n}
            for good, a in goods.items():
                for bad, b in bads.items():
                    labels = np.arange(len(a) + len(b)) < len(a)
                    found[good[0], bad[0]] = roc_auc(np.concatenate([a, b]), labels)
    return found
