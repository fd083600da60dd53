"""Learning-rate and batch-size schedules as functions of tokens seen (GLM-5 App. A; design notes C.4).

Both count tokens, not steps: a batch that grows must not bend the learning-rate curve. A schedule may span several
stages: `offset_tokens` says how many tokens of the whole curve earlier stages have used.

Check it:  python -m pytest tests/tasks/test_schedules.py
"""

from __future__ import annotations

import math
from dataclasses import dataclass

KINDS = ("cosine", "linear", "constant")


@dataclass(frozen=True)
class LearningRate:
    """Factor on the peak learning rates: a linear warm-up from 0 to `start`, then `kind` from `start` to `end`.

    total_tokens: length of the whole curve. warmup_tokens and offset_tokens are counted on it too.
    """

    kind: str
    total_tokens: int
    warmup_tokens: int = 0
    start: float = 1.0
    end: float = 0.1
    offset_tokens: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"schedule kind {self.kind!r} is not one of {', '.join(KINDS)}")
        if not 0 <= self.warmup_tokens <= self.total_tokens or self.total_tokens <= 0:
            raise ValueError(f"warm-up of {self.warmup_tokens} tokens does not fit a schedule of {self.total_tokens}")

    def factor(self, tokens: int) -> float:
        """The factor after `tokens` tokens of this stage; the end value beyond the end."""
        position = tokens + self.offset_tokens
        if position < self.warmup_tokens:
            return self.start * position / self.warmup_tokens
        if self.kind == "constant":
            return self.start
        span = self.total_tokens - self.warmup_tokens
        done = min(1.0, (position - self.warmup_tokens) / span) if span else 1.0
        if self.kind == "linear":
            return self.start + (self.end - self.start) * done
        return self.end + (self.start - self.end) * 0.5 * (1 + math.cos(math.pi * done))


class BatchSize:
    """Rows per step, growing linearly from `start_rows` to `rows` over the first `ramp_tokens` tokens, until `tokens`.

    Rows are kept a multiple of `multiple`. `offset_tokens` counts tokens of earlier stages on the ramp.
    `steps`, `rows_at(step)`, `first_row(step)` and `tokens_before(step)` are pure functions of these arguments.
    """

    def __init__(
        self,
        seq_len: int,
        rows: int,
        tokens: int,
        start_rows: int | None = None,
        ramp_tokens: int = 0,
        multiple: int = 1,
        offset_tokens: int = 0,
    ) -> None:
        start_rows = rows if start_rows is None else start_rows
        if min(seq_len, rows, start_rows, multiple) < 1 or rows % multiple or start_rows % multiple:
            raise ValueError(f"batch of {start_rows} to {rows} rows must be positive multiples of {multiple}")
        if tokens < seq_len * start_rows:
            raise ValueError(f"{tokens} tokens are less than one step of {start_rows} x {seq_len}")
        self.seq_len = seq_len
        ramp: list[int] = []
        seen = 0
        while ramp_tokens and seen + offset_tokens < ramp_tokens and seen < tokens:
            share = (seen + offset_tokens) / ramp_tokens
            ramp.append(min(rows, start_rows + int((rows - start_rows) * share) // multiple * multiple))
            seen += ramp[-1] * seq_len
        self._ramp, self._rows = ramp, rows
        self._ramp_first = [0]
        for size in ramp:
            self._ramp_first.append(self._ramp_first[-1] + size)
        # The last step may go past `tokens` by less than a batch: every step is a full one.
        self.steps = len(ramp) + max(0, math.ceil((tokens - seen) / (rows * seq_len)))

    def rows_at(self, step: int) -> int:
        return self._ramp[step] if step < len(self._ramp) else self._rows

    def first_row(self, step: int) -> int:
        """Rows that all steps before `step` used together."""
        if step < len(self._ramp_first):
            return self._ramp_first[step]
        return self._ramp_first[-1] + (step - len(self._ramp)) * self._rows

    def tokens_before(self, step: int) -> int:
        """Tokens that all steps before `step` used together."""
        return self.first_row(step) * self.seq_len
