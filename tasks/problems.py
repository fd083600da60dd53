"""Verifiable problems: what SFT shows, RL samples and evaluation asks, split into train and held-out for ever.

A family turns (split, index) into a Problem, a pure function of both. Whether a problem is held out depends on its key
alone (its content, not its wording), through a mixing hash: a linear hash would hold out a pattern, such as "sums that
end in 0", that the model then never sees.

    python -m tasks.problems addition 3          # prints three held-out problems of a family
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from tasks import chat

SPLITS = ("train", "heldout")
HELDOUT_OF_TEN = 1
_MASK = (1 << 64) - 1


def splitmix64(x: int) -> int:
    """The splitmix64 finaliser: a bijection on 64-bit integers in which every input bit moves every output bit."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def mix(*parts: object) -> int:
    """A 64-bit hash of the parts' text, the same on every machine and in every process."""
    state = 0
    for part in parts:
        data = str(part).encode()
        state = splitmix64(state ^ len(data))
        for at in range(0, len(data), 8):
            state = splitmix64(state ^ int.from_bytes(data[at : at + 8], "little"))
    return state


def split_of(family: str, key: str) -> str:
    """The split that holds a problem's key: about one key in ten is held out."""
    return "heldout" if mix("split", family, key) % 10 < HELDOUT_OF_TEN else "train"


@dataclass(frozen=True)
class Problem:
    """One task. `messages` is the prompt, `solution` the turns that solve it, `check` scores the final answer's text;
    `partial`, where there is one, says how much of it is right, for rewards denser than `check`."""

    family: str
    key: str
    messages: tuple[Mapping[str, Any], ...]
    solution: tuple[Mapping[str, Any], ...]
    answer: str
    check: Callable[[str], float] = field(repr=False)
    thinking: bool = True
    max_new_tokens: int = 48
    max_turns: int = 1
    partial: Callable[[str], float] | None = field(default=None, repr=False)

    @property
    def prompt(self) -> str:
        """The rendered prompt that opens the assistant's turn."""
        return chat.render(self.messages, add_generation_prompt=True, enable_thinking=self.thinking)

    def prompt_ids(self, tokenizer: Any) -> list[int]:
        """Token ids of the prompt."""
        options = {"add_generation_prompt": True, "enable_thinking": self.thinking}
        return chat.render_tokens(tokenizer, self.messages, **options)[0]

    def verify(self, text: str) -> float:
        """Score in [0, 1] of the text sampled in the last assistant turn (stop token taken off).

        A turn that thinks must close its thinking exactly once; role and tool tokens in an answer make it worth 0.
        """
        answer = self._answer(text)
        return 0.0 if answer is None else float(self.check(answer))

    def credit(self, text: str) -> float:
        """`partial` of the sampled text, in [0, 1]; `verify` where a family has no partial credit."""
        answer = self._answer(text)
        return 0.0 if answer is None else float((self.partial or self.check)(answer))

    def _answer(self, text: str) -> str | None:
        if self.thinking:
            thought, closed, text = text.partition("</think>")
            if not closed or "<" in thought:
                return None
        return None if "<" in text or "[gMASK]" in text else text.strip()


class Family(Protocol):
    """A source of problems: `name`, and `draw`, which makes one problem from a random generator."""

    name: str

    def draw(self, rng: random.Random) -> Problem: ...


def sample(family: Family, split: str, index: int) -> Problem:
    """Problem `index` of a family's split; draws with successive generators until the key falls in the split."""
    if split not in SPLITS:
        raise ValueError(f"split must be one of {SPLITS}, got {split!r}")
    for attempt in range(10_000):
        problem = family.draw(random.Random(mix("draw", family.name, split, index, attempt)))
        if split_of(family.name, problem.key) == split:
            return problem
    raise ValueError(f"family {family.name} has no problem in split {split}")


def exact(answer: str) -> Callable[[str], float]:
    """A check that wants this text and no other."""
    return lambda text: float(text == answer)


def registry() -> dict[str, Callable[..., Family]]:
    """Every family's class by name."""
    from tasks import problems_arithmetic, problems_rules, problems_tools

    classes = problems_arithmetic.FAMILIES + problems_tools.FAMILIES + problems_rules.FAMILIES
    return {cls.name: cls for cls in classes}


def build(name: str, **options: Any) -> Family:
    """The family of this name; options are its dataclass fields (ranges, lengths)."""
    classes = registry()
    if name not in classes:
        raise ValueError(f"unknown problem family {name!r}; known: {', '.join(sorted(classes))}")
    try:
        return classes[name](**options)
    except TypeError as error:
        raise ValueError(f"family {name}: {error}") from None


def build_all(specs: Mapping[str, Mapping[str, Any] | None] | Sequence[str]) -> dict[str, Family]:
    """Families from a {name: options} mapping, or from names with default options, in the order given."""
    items = specs.items() if isinstance(specs, Mapping) else ((name, None) for name in specs)
    return {name: build(name, **(options or {})) for name, options in items}


def samples(family: Family, split: str, start: int, count: int) -> list[Problem]:
    """Problems start .. start+count-1 of a split."""
    return [sample(family, split, index) for index in range(start, start + count)]


def heldout_texts(specs: Mapping[str, Mapping | None] | Sequence[str] | None = None, n: int = 200) -> Iterator[str]:
    """Texts of held-out problems with their answers, for the decontamination of training documents."""
    for family in build_all(list(registry()) if specs is None else specs).values():
        for problem in samples(family, "heldout", 0, n):
            yield "\n".join(chat.visible_text(m["content"]) for m in problem.messages) + "\n" + problem.answer


if __name__ == "__main__":
    for shown in samples(build(sys.argv[1]), "heldout", 0, int(sys.argv[2]) if len(sys.argv) > 2 else 3):
        print(chat.render([*shown.messages, *shown.solution], close=True), "   ->", shown.answer)
