"""Held-out problems searched for in conversations and in training problems, as whole questions.

Sums of one family share most of their words ("What is 306+953?"), so the n-grams and passages of tasks/overlap.py would
flag them all. Here an item is a whole question, its signs included: it is found where its tokens stand in a row, whatever
the case, the blanks and the script of the digits, and however the text goes on. `306+953` is not found in `1306+953` nor in
`306-953`. Stage sft_data passes every conversation and every worked problem through this gate, and problems as RL draws them.

python -m pytest tests/tasks/test_problem_gate.py
"""

from __future__ import annotations

import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tasks import chat
from tasks.problems import Family, Problem, build, registry, samples

_TOKEN = re.compile(r"\d+|[^\W\d_]+|[^\w\s]|_")
_ANCHOR = 3  # tokens by which a question is looked up
MIN_TOKENS = 4  # shorter questions are found only as a whole message
_END = frozenset(".?!")


def question_tokens(text: str) -> tuple[str, ...]:
    """Words, numbers and signs of a text after Unicode NFKC, in lower case; marks that end a sentence are left out."""
    found = _TOKEN.findall(unicodedata.normalize("NFKC", text).casefold())
    plain = (str(int(t)) if t.isdigit() and t.isdecimal() else t for t in found)
    return tuple(t for t in plain if t not in _END)


def question(problem: Problem) -> str:
    """What a problem asks: the text of its user turns."""
    return "\n".join(chat.visible_text(m["content"]) for m in problem.messages if m["role"] == "user")


class ProblemGate:
    """An index of whole questions; `names` in the order in which they were added, without repeats."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._known: dict[tuple[str, ...], str] = {}
        self._starts: dict[tuple[str, ...], list[tuple[str, ...]]] = defaultdict(list)

    def add(self, name: str, text: str) -> None:
        """Search for `text` from now on; a question that is known already keeps its first name."""
        tokens = question_tokens(text)
        if tokens and tokens not in self._known:
            self._known[tokens] = name
            self.names.append(name)
            if len(tokens) >= MIN_TOKENS:
                self._starts[tokens[:_ANCHOR]].append(tokens)

    def find(self, text: str) -> list[str]:
        """Names of the questions that the text holds, sorted."""
        tokens = question_tokens(text)
        found = {self._known[tokens]} if tokens in self._known else set()
        for at in range(len(tokens) - MIN_TOKENS + 1):
            for asked in self._starts.get(tokens[at : at + _ANCHOR], ()):
                if tokens[at : at + len(asked)] == asked:
                    found.add(self._known[asked])
        return sorted(found)

    def find_in(self, messages: Iterable[Mapping[str, Any]]) -> list[str]:
        """Names of the questions that a message of a conversation holds, sorted."""
        texts = (chat.visible_text(m["content"]) for m in messages if m.get("content"))
        return sorted({name for text in texts for name in self.find(text)})

    def find_problem(self, problem: Problem) -> list[str]:
        """The name of the question that a problem asks, in a list. A problem that goes on is another one: `Name four foods.
        End with a period.` has an answer of its own."""
        tokens = question_tokens(question(problem))
        return [self._known[tokens]] if tokens in self._known else []


def evaluated(families: Iterable[Family], count: int) -> Iterator[tuple[str, str]]:
    """(`problems/<family>:<index>`, question) of the first `count` held-out problems of each family."""
    for family in families:
        for index, problem in enumerate(samples(family, "heldout", 0, count)):
            yield f"problems/{family.name}:{index}", question(problem)


def known_families(options: Mapping[str, Mapping[str, Any]]) -> list[Family]:
    """Every family with its default options, and those of `options` with theirs."""
    return [build(name) for name in registry()] + [build(name, **given) for name, given in options.items() if given]
