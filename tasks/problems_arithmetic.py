"""Arithmetic with worked columns: addition, reasoning-gym's chain_sum, and sums of quantities at the end of a long prompt.

python -m tasks.problems quantities 2
"""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass
from typing import Any, ClassVar

from tasks.problems import Problem, exact


def add_columns(a: int, b: int) -> str:
    """Column addition from the units up, as digit+digit+carry=sum; one item per column: 84+27 -> `4+7+0=11;8+2+1=11;`."""
    out, carry = [], 0
    while a or b or not out:
        total = a % 10 + b % 10 + carry
        out.append(f"{a % 10}+{b % 10}+{carry}={total};")
        a, b, carry = a // 10, b // 10, total // 10
    return "".join(out)


def subtract_columns(a: int, b: int) -> str:
    """Column subtraction of b <= a: digit-digit-borrow=difference, the borrowed ten shown: 42-17 -> `12-7-0=5;4-1-1=2;`."""
    if b > a:
        raise ValueError(f"subtract_columns needs b <= a, got {a}-{b}")
    out, borrow = [], 0
    while a or b or not out:
        x, y = a % 10, b % 10
        x += 10 * (x < y + borrow)
        out.append(f"{x}-{y}-{borrow}={x - y - borrow};")
        a, b, borrow = a // 10, b // 10, int(x >= 10)
    return "".join(out)


def _turns(question: str, thought: str, answer: str) -> dict[str, Any]:
    solution = {"role": "assistant", "reasoning_content": thought, "content": answer}
    return {"messages": ({"role": "user", "content": question},), "solution": (solution,), "answer": answer}


@dataclass(frozen=True)
class Addition:
    """What is a+b? with a and b of `min_digits` to `max_digits` digits each, every length equally often."""

    name: ClassVar[str] = "addition"
    min_digits: int = 2
    max_digits: int = 3

    def draw(self, rng: random.Random) -> Problem:
        lengths = [rng.randint(self.min_digits, self.max_digits) for _ in range(2)]
        a, b = (rng.randrange(10 ** (length - 1), 10**length) for length in lengths)
        turns = _turns(f"What is {a}+{b}?", add_columns(a, b), str(a + b))
        # the mirrored sum is the same problem
        return Problem(self.name, f"{min(a, b)}+{max(a, b)}", check=exact(str(a + b)), max_new_tokens=40, **turns)


@functools.lru_cache
def _chain_sum(min_digits: int, max_digits: int) -> Any:
    # reasoning_gym takes two seconds to import, and most callers never need it
    from reasoning_gym.factory import create_dataset

    digits = {"min_digits": min_digits, "max_digits": max_digits}
    return create_dataset("chain_sum", min_terms=2, max_terms=2, size=1 << 30, seed=0, **digits)


@dataclass(frozen=True)
class ChainSum:
    """reasoning-gym's chain_sum with two terms (a+b or a-b, possibly negative), judged by its own score_answer."""

    name: ClassVar[str] = "chain_sum"
    min_digits: int = 1
    max_digits: int = 2

    def draw(self, rng: random.Random) -> Problem:
        dataset = _chain_sum(self.min_digits, self.max_digits)
        entry = dataset[rng.randrange(1 << 30)]
        expression = entry["metadata"]["expression"]
        a, op, b = expression.split()
        a, b = int(a), int(b)
        if op == "+":
            thought = add_columns(a, b)
        elif a >= b:
            thought = subtract_columns(a, b)
        else:
            thought = f"-;{subtract_columns(b, a)}"
        turns = _turns(entry["question"], thought, entry["answer"])

        def check(text: str) -> float:
            # score_answer gives partial credit for near misses; a problem is solved or it is not
            return float(dataset.score_answer(text, entry) >= 1.0)

        return Problem(self.name, expression.replace(" ", ""), check=check, max_new_tokens=36, **turns)


NAMES = (
    "red blue green black white brown gray gold pink silver north south east west hill lake river road tree house door "
    "table box cup book page line word name file code data list key map set sun day night time"
).split()


@dataclass(frozen=True)
class Quantities:
    """Words that say nothing, then two quantities, and how many that makes.

    The prompt is longer than index_topk tokens of the tiny model, so from the first sampled token on the indexer has to
    choose what to keep: sparse selection is in force.
    """

    name: ClassVar[str] = "quantities"
    filler: int = 30
    low: int = 10
    high: int = 99

    def draw(self, rng: random.Random) -> Problem:
        a, b = rng.randint(self.low, self.high), rng.randint(self.low, self.high)
        first, second = rng.sample(NAMES, 2)
        filler = " ".join(rng.choice(NAMES) for _ in range(self.filler))
        question = f"{filler}. {a} {first} and {b} {second}. How many?"
        turns = _turns(question, add_columns(a, b), str(a + b))
        key = f"{min(a, b)}+{max(a, b)}"
        return Problem(self.name, key, check=exact(str(a + b)), max_new_tokens=30, **turns)


FAMILIES = (Addition, ChainSum, Quantities)
