"""Problems that need the calculator: one call, or two where the second needs the first one's result.

The tool's schema is not put in the prompt here: it is longer than the whole episode, and there is one tool.

    python -m tasks.problems calculator 4
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, ClassVar

from tasks.calculator import calculate
from tasks.problems import Problem, exact

TOOL_NAME = "calc"
TOOLS = (
    {
        "type": "function",
        "function": {
            "name": TOOL_NAME,
            "description": "Evaluates an arithmetic expression exactly.",
            "parameters": {
                "type": "object",
                "properties": {"expr": {"type": "string"}},
                "required": ["expr"],
            },
        },
    },
)

_ONE = {
    "+": ("Add {a} and {b}.", "What is {a} plus {b}?", "Use calc: {a}+{b}", "Find the sum of {a} and {b}."),
    "-": ("Subtract {b} from {a}.", "What is {a} minus {b}?", "Use calc: {a}-{b}"),
    "*": ("Multiply {a} by {b}.", "What is {a} times {b}?", "Use calc: {a}*{b}", "Find the product of {a} and {b}."),
}
_THEN = {"+": "Then add {c}.", "-": "Then subtract {c}.", "*": "Then multiply by {c}."}


def _call(expression: str) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": TOOL_NAME, "arguments": {"expr": expression}}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


@dataclass(frozen=True)
class Calculator:
    """One operation of numbers up to `high`; with `two_call_share`, a second operation on the result."""

    name: ClassVar[str] = "calculator"
    low: int = 10
    high: int = 99
    two_call_share: float = 0.3

    def draw(self, rng: random.Random) -> Problem:
        a, b, c = (rng.randint(self.low, self.high) for _ in range(3))
        first, second = rng.choice("+-*"), rng.choice("+-*")
        two = rng.random() < self.two_call_share
        question = rng.choice(_ONE[first]).format(a=a, b=b)
        expressions = [f"{a}{first}{b}"]
        results = [calculate(expressions[0])]
        if two:
            question += " " + _THEN[second].format(c=c)
            expressions.append(f"{results[0]}{second}{c}")
            results.append(calculate(expressions[1]))
        solution: list[dict[str, Any]] = []
        for expression, result in zip(expressions, results):
            solution += [_call(expression), {"role": "tool", "content": result}]
        solution.append({"role": "assistant", "content": results[-1]})
        return Problem(
            self.name,
            f"{a}{first}{b}" + (f"{second}{c}" if two else ""),
            ({"role": "user", "content": question},),
            tuple(solution),
            results[-1],
            exact(results[-1]),
            thinking=False,
            max_new_tokens=28,
            max_turns=3,
        )


FAMILIES = (Calculator,)
