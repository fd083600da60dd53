"""Instructions whose fulfilment rules can check: how many items, which word, what between them, which case, how it ends.

python -m tasks.problems rules 5
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from tasks.problems import Problem

BANKS = {
    "colors": "red blue green black white brown gray gold pink silver".split(),
    "animals": "dog cat horse cow bird fish lion bear wolf fox".split(),
    "foods": "bread rice milk egg meat soup cake apple corn bean".split(),
    "tools": "hammer saw nail drill file axe rope knife lamp pen".split(),
}
COUNTS = {2: "two", 3: "three", 4: "four", 5: "five"}
SEPARATORS = {",": (", ", ""), ";": ("; ", " Use semicolons."), "/": (" / ", " Use slashes.")}
ENDS = {"": "", ".": " End with a period.", "!": " End with an exclamation mark."}


@dataclass(frozen=True)
class Instruction:
    """The constraints of one request."""

    category: str
    count: int
    keyword: str = ""
    upper: bool = False
    end: str = ""
    separator: str = ","

    @property
    def key(self) -> str:
        case = "upper" if self.upper else "lower"
        return f"{self.category} {self.count} {self.keyword} {case} {self.end or 'none'} {self.separator}"

    @property
    def text(self) -> str:
        text = f"Name {COUNTS[self.count]} {self.category}."
        if self.keyword:
            text += f" Include {self.keyword}."
        if self.upper:
            text += " Use capital letters."
        return text + SEPARATORS[self.separator][1] + ENDS[self.end]

    def rules(self) -> dict[str, Callable[[str], bool]]:
        """Every rule as a predicate on the answer's text."""

        def items(text: str) -> list[str]:
            return text.removesuffix(self.end).split(SEPARATORS[self.separator][0])

        bank = {word.upper() if self.upper else word for word in BANKS[self.category]}
        keyword = self.keyword.upper() if self.upper else self.keyword
        return {
            "end": lambda text: text.endswith(self.end) if self.end else text[-1:].isalpha(),
            "count": lambda text: len(items(text)) == self.count,
            "distinct": lambda text: len(set(items(text))) == len(items(text)),
            "category": lambda text: all(item in bank for item in items(text)),
            "keyword": lambda text: not keyword or keyword in items(text),
        }

    def check(self, text: str) -> float:
        """1 when every rule holds, else 0."""
        return float(all(rule(text) for rule in self.rules().values()))

    def share(self, text: str) -> float:
        """The share of the rules that hold."""
        rules = self.rules()
        return sum(rule(text) for rule in rules.values()) / len(rules)


@dataclass(frozen=True)
class Rules:
    """Name some things of a kind, under constraints; all of them must hold."""

    name: ClassVar[str] = "rules"
    keyword_share: float = 0.1
    upper_share: float = 0.0
    max_count: int = 5

    def draw(self, rng: random.Random) -> Problem:
        category = rng.choice(sorted(BANKS))
        count = rng.randint(2, self.max_count)
        keyword = rng.choice(BANKS[category]) if rng.random() < self.keyword_share else ""
        upper, end, separator = (
            rng.random() < self.upper_share,
            rng.choice(sorted(ENDS)),
            rng.choice(sorted(SEPARATORS)),
        )
        instruction = Instruction(category, count, keyword, upper, end, separator)
        items = rng.sample([word for word in BANKS[category] if word != keyword], count - bool(keyword))
        if keyword:
            items.insert(0, keyword)  # anywhere would do; worked answers show one habit
        answer = SEPARATORS[separator][0].join(items)
        answer = (answer.upper() if instruction.upper else answer) + instruction.end
        return Problem(
            self.name,
            instruction.key,
            ({"role": "user", "content": instruction.text},),
            ({"role": "assistant", "content": answer},),
            answer,
            instruction.check,
            thinking=False,
            max_new_tokens=40,
            partial=instruction.share,
        )


FAMILIES = (Rules,)
