"""Settings and small steps of the long-context part of the ablations; the probes themselves are in tasks/probes.py.

Used by tasks/ablate_efficient.py.   python -m pytest tests/tasks/test_ablate.py
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from pydantic import Field

from tasks.probes import Probe, RecallRows, Symbols, build_probes, score_probes
from tasks.settings import Section
from tasks.tokens import TokenSet


class RecallSettings(Section):
    """Training rows with facts to recall among the rows of text."""

    share: float = Field(0.5, ge=0, le=1, description="share of the rows of each step")
    keys: int = Field(6, ge=1, description="different facts per row at most")
    gap: float = Field(2.0, ge=0, description="mean tokens of text between facts")


class ProbeSettings(Section):
    """What is asked, at which lengths."""

    lengths: list[int] = Field(min_length=1)
    per_cell: int = Field(10, ge=1, description="probes per task and length")
    facts: int = Field(4, ge=1, description="facts of the multi-key needle")
    keys: int = Field(8, ge=1, description="symbols that may be keys")
    values: int = Field(4, ge=2, description="values of each key")
    labels: int = Field(4, ge=2)


def prepare(tokens: TokenSet, settings: ProbeSettings, seed: int) -> tuple[Symbols, list[Probe]]:
    """The symbols and the probes, equal for every variant and seed."""
    symbols = Symbols.choose(tokens, settings.keys, settings.values, settings.labels)
    return symbols, build_probes(tokens, symbols, settings.lengths, settings.per_cell, seed, settings.facts)


def score(model: Any, cases: Sequence[Probe], attention: str = "dense") -> dict[str, Any]:
    """See tasks.probes.score_probes; the model is put into evaluation mode."""
    return score_probes(model.eval(), cases, attention)


def by_task(scores: dict[str, dict[str, dict[str, float]]], measure: str) -> dict[str, float]:
    """Mean of a measure over lengths, per task."""
    return {task: sum(c[measure] for c in cells.values()) / len(cells) for task, cells in scores.items()}


def recall_rows(
    tokens: TokenSet, symbols: Symbols, config: Any, seed: int
) -> Callable[[int, int], dict[str, torch.Tensor]]:
    """For tasks.ablate_run.train_variant: which rows of a step are recall rows, spread evenly, and what they hold."""
    settings: RecallSettings = config.recall
    source = RecallRows(tokens, symbols, config.seq_len, seed, settings.keys, settings.gap)

    def row(step: int, at: int) -> dict[str, torch.Tensor]:
        if int((at + 1) * settings.share) == int(at * settings.share):
            return {}
        ids, targets = source.row(step * config.rows + at)
        return {"input_ids_bs": torch.from_numpy(ids), "targets_bs": torch.from_numpy(targets)}

    return row
