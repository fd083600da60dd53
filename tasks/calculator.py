"""A calculator for tool calls: exact integer and fraction arithmetic, parsed, never evaluated.

python -m tasks.calculator "12*(3+4)"
"""

from __future__ import annotations

import re
import sys
from fractions import Fraction

MAX_CHARS = 120
MAX_DIGITS = 40
_TOKEN = re.compile(r"\s*(?:(\d+(?:\.\d+)?)|(//|[-+*/%()]))")


class _Parser:
    """Recursive descent over: sum := product (+|- product)*; product := unary (*|/|//|% unary)*; unary := - unary | atom."""

    def __init__(self, expression: str) -> None:
        self.tokens: list[str] = []
        at = 0
        expression = expression.rstrip()
        while at < len(expression):
            match = _TOKEN.match(expression, at)
            if not match:
                raise ValueError(f"unexpected character {expression[at:].strip()[0]!r} at {at}")
            self.tokens.append(match.group(1) or match.group(2))
            at = match.end()
        self.tokens.append("")
        self.at = 0

    def take(self, *wanted: str) -> str | None:
        if self.tokens[self.at] and self.tokens[self.at] in wanted:
            self.at += 1
            return self.tokens[self.at - 1]
        return None

    def sum(self) -> Fraction:
        value = self.product()
        while op := self.take("+", "-"):
            right = self.product()
            value = _checked(value + right if op == "+" else value - right)
        return value

    def product(self) -> Fraction:
        value = self.unary()
        while op := self.take("*", "/", "//", "%"):
            right = self.unary()
            if op == "*":
                value = _checked(value * right)
            elif right == 0:
                raise ValueError("division by zero")
            else:
                value = _checked(
                    value / right if op == "/" else Fraction(value // right) if op == "//" else value % right
                )
        return value

    def unary(self) -> Fraction:
        if self.take("-"):
            return -self.unary()
        if self.take("+"):
            return self.unary()
        if self.take("("):
            value = self.sum()
            if not self.take(")"):
                raise ValueError("missing )")
            return value
        token = self.tokens[self.at]
        if not token or not token[0].isdigit():
            raise ValueError(f"expected a number, found {token or 'the end'!r}")
        self.at += 1
        return _checked(Fraction(token))


def _checked(value: Fraction) -> Fraction:
    if max(abs(value.numerator), value.denominator) >= 10**MAX_DIGITS:
        raise ValueError(f"a number has more than {MAX_DIGITS} digits")
    return value


def calculate(expression: str) -> str:
    """The exact value of an arithmetic expression as text: an integer, or a reduced fraction `a/b`.

    Knows + - * / // % and brackets. Raises ValueError with a short reason on anything else, on division by zero and on
    expressions or numbers too long to be meant.
    """
    if len(expression) > MAX_CHARS:
        raise ValueError(f"expression is longer than {MAX_CHARS} characters")
    parser = _Parser(expression)
    value = parser.sum()
    if parser.tokens[parser.at]:
        raise ValueError(f"unexpected {parser.tokens[parser.at]!r}")
    return str(value)


if __name__ == "__main__":
    print(calculate(" ".join(sys.argv[1:])))
