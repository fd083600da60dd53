"""Probes of a language model at growing lengths: single needle, multi-key needle, in-context label mapping, choice of text.

    python -m pytest tests/tasks/test_probes.py

A fact is three tokens, [mark, key, value]; symbols are ordinary tokens of the vocabulary that mean nothing together. Recall
asks for the value after a later [mark, key]. Facts lie in held-out text. A hash of (key, value) puts every pair on one side:
pairs of the tests never occur in `RecallRows`, the training text of the same kind, so the value can come from the context
only. Every case has a control in which the fact says another value: `gain` is the log-probability that the right value owes
to the fact, in nats, and gives a signal long before `exact` does.

    needle      one fact in text, asked for at the end
    multi_key   several facts with other keys in the same text
    icl         nothing but examples [mark, input, label] with few labels, more inputs at greater length (many-shot)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tasks.files import derive_seed
from tasks.samplers import IGNORE
from tasks.tokens import TokenSet, unit_hash

TASKS = ("needle", "multi_key", "icl")
TEST_SHARE = 0.25


@dataclass(frozen=True)
class Symbols:
    """Token ids that facts are made of: a mark for recall and one for labels, keys, values, and the labels among the values."""

    recall: int
    label: int
    keys: tuple[int, ...]
    values: tuple[int, ...]
    labels: tuple[int, ...]

    @classmethod
    def choose(cls, tokens: TokenSet, keys: int = 32, values: int = 16, labels: int = 4) -> Symbols:
        """Tokens with text, in the order of a hash. ValueError when the vocabulary is too small."""
        ids = [i for i, size in enumerate(tokens.token_bytes.tolist()) if size > 0 and i != tokens.eot_id]
        ids.sort(key=lambda i: unit_hash(f"probe-symbol:{i}"))
        if len(ids) < 2 + keys + values or labels > values:
            raise ValueError(
                f"{2 + keys + values} symbols and {labels} of {values} values as labels wanted; {len(ids)} tokens have text"
            )
        chosen = ids[2 + keys : 2 + keys + values]
        return cls(ids[0], ids[1], tuple(ids[2 : 2 + keys]), tuple(chosen), tuple(chosen[:labels]))

    def allowed(self, key: int, test: bool, labels: bool = False) -> list[int]:
        """Values that `key` may have on one side of the split; at least one is left on each side."""
        values = self.labels if labels else self.values
        ranked = sorted(values, key=lambda v: unit_hash(f"probe-pair:{key}:{v}"))
        cut = max(1, round(TEST_SHARE * len(values)))
        return ranked[:cut] if test else ranked[cut:]


class RecallRows:
    """Training rows with facts to recall: `row(number)` is a pure function of (seed, number).

    Text of the training split between facts, `gap` tokens on average; repeated facts are targets, and so is the text when
    `text_targets` is set. Rows take turns between recall and labels.
    """

    def __init__(
        self,
        tokens: TokenSet,
        symbols: Symbols,
        seq_len: int,
        seed: int,
        keys: tuple[int, int] = (4, 12),
        gap: float = 2.0,
        text_targets: bool = False,
    ) -> None:
        self.tokens, self.symbols, self.seq_len, self.seed = tokens, symbols, seq_len, seed
        self.keys, self.gap, self.text_targets = keys, gap, text_targets
        self.domains = [d for d in tokens.domains if tokens.tokens(d, "train") > 1]

    def row(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """(input ids, targets) int64 [seq_len]."""
        rng = np.random.default_rng(derive_seed(self.seed, "recall", number))
        labels = number % 2 == 1
        count = int(rng.integers(self.keys[0], self.keys[1] + 1))
        chosen = rng.choice(len(self.symbols.keys), size=min(count, len(self.symbols.keys)), replace=False)
        keys = [self.symbols.keys[i] for i in chosen]
        facts = {k: int(rng.choice(self.symbols.allowed(k, test=False, labels=labels))) for k in keys}
        mark = self.symbols.label if labels else self.symbols.recall
        # a gap of its own for every row: rows of short and of long distances
        gap = 0.0 if labels else self.gap * float(rng.exponential())
        shard = self.tokens.shard(self.domains[number % len(self.domains)], "train")
        text = shard.window(int(rng.integers(len(shard.tokens))), self.seq_len + 1)
        ids: list[int] = []
        targets: list[int] = []  # aligned with ids: the token itself where it must be predicted
        used, seen = 0, set()
        while len(ids) < self.seq_len + 1:
            key = keys[int(rng.integers(len(keys)))]
            ids += [mark, key, facts[key]]
            targets += [IGNORE, IGNORE, facts[key] if key in seen else IGNORE]
            seen.add(key)
            size = int(rng.poisson(gap)) if gap else 0
            filler = text[used : used + size].tolist()
            used += len(filler)
            ids += filler
            targets += filler if self.text_targets else [IGNORE] * len(filler)
        return np.array(ids[: self.seq_len], np.int64), np.array(targets[1 : self.seq_len + 1], np.int64)


@dataclass(frozen=True)
class Probe:
    """One question: ids end with [mark, key]; `control_ids` are equal but for the facts, which say another value."""

    task: str
    length: int
    ids: tuple[int, ...]
    control_ids: tuple[int, ...]
    answer: int
    choices: tuple[int, ...]


def build_probes(
    tokens: TokenSet, symbols: Symbols, lengths: Sequence[int], per_cell: int, seed: int, facts: int = 6
) -> list[Probe]:
    """`per_cell` probes of every task at exactly each length; the text is the held-out split. ValueError when too short."""
    domains = [d for d in tokens.domains if tokens.tokens(d, "val") > 1]
    if not domains:
        raise ValueError("the held-out split is empty: no text to hide facts in")
    probes = []
    for task in TASKS:
        for length in lengths:
            if length < 3 * (facts + 1) + 2:
                raise ValueError(f"probe length {length} is too short for {facts} facts and a question")
            for index in range(per_cell):
                rng = np.random.default_rng(derive_seed(seed, "probe", task, length, index))
                make = _icl if task == "icl" else _needle
                probes.append(make(tokens, symbols, domains[index % len(domains)], task, length, index, facts, rng))
    return probes


def _facts(symbols: Symbols, count: int, rng: np.random.Generator, labels: bool) -> list[tuple[int, int]]:
    keys = rng.choice(len(symbols.keys), size=count, replace=False)
    chosen = [symbols.keys[i] for i in keys]
    return [(k, int(rng.choice(symbols.allowed(k, test=True, labels=labels)))) for k in chosen]


def _other(symbols: Symbols, value: int, rng: np.random.Generator, labels: bool) -> int:
    rest = [v for v in (symbols.labels if labels else symbols.values) if v != value]
    return int(rng.choice(rest))


def _needle(tokens, symbols, domain, task, length, index, facts, rng) -> Probe:
    """Facts at even depths of the text (needle: cycling over depths with the index), one of them asked for."""
    count = facts if task == "multi_key" else 1
    pairs = _facts(symbols, count, rng, labels=False)
    room = length - 3 * count - 2
    shard = tokens.shard(domain, "val")
    text = shard.window(int(rng.integers(len(shard.tokens))), room).tolist()
    # one needle walks over ten depths from case to case; several are spread at random
    places = [room * (2 * (index % 10) + 1) // 20] if count == 1 else rng.integers(room + 1, size=count).tolist()
    asked = int(rng.integers(count))
    key, value = pairs[asked]
    wrong = _other(symbols, value, rng, labels=False)

    def assemble(said: int) -> tuple[int, ...]:
        out, done = [], 0
        for at, n in sorted(zip(places, range(count), strict=True)):
            out += [*text[done:at], symbols.recall, pairs[n][0], said if n == asked else pairs[n][1]]
            done = at
        return (*out, *text[done:], symbols.recall, key)

    return Probe(task, length, assemble(value), assemble(wrong), value, symbols.values)


def _icl(tokens, symbols, domain, task, length, index, facts, rng) -> Probe:
    """Examples fill the context; every input is shown about three times, so a longer context has more of them."""
    shots = (length - 2) // 3
    count = max(2, min(len(symbols.keys), shots // 3))
    pairs = _facts(symbols, count, rng, labels=True)
    order = np.concatenate([rng.permutation(count) for _ in range(shots // count + 1)])[:shots]
    asked = int(order[int(rng.integers(max(1, shots // 2)))])  # shown in the first half at least
    key, value = pairs[asked]
    wrong = _other(symbols, value, rng, labels=True)
    pad = tokens.shard(domain, "val").window(0, length - 2 - 3 * shots).tolist()

    def assemble(said: int) -> tuple[int, ...]:
        body = [t for n in order for t in (symbols.label, pairs[n][0], said if n == asked else pairs[n][1])]
        return (*pad, *body, symbols.label, key)

    return Probe(task, length, assemble(value), assemble(wrong), value, symbols.labels)


def score_probes(
    model: Any, probes: Sequence[Probe], attention: str = "dense", batch_tokens: int = 8192
) -> dict[str, dict[str, dict[str, float]]]:
    """{task: {length: {exact, choice, gain}}}: share whose first choice over the vocabulary, and over the task's values, is
    right, and the nats per answer that the fact brings over its control."""
    import torch

    device = next(model.parameters()).device
    rows: dict[tuple[str, int], list[tuple[float, float, float]]] = {}
    for length in sorted({p.length for p in probes}):
        group = [p for p in probes if p.length == length]
        size = max(1, batch_tokens // (2 * length))
        for start in range(0, len(group), size):
            part = group[start : start + size]
            ids_bs = torch.tensor([p.ids for p in part] + [p.control_ids for p in part], device=device)
            with torch.inference_mode():
                logp_bv = model.logits(model(ids_bs, attention=attention).hidden_bsh[:, -1]).float().log_softmax(-1)
            for n, probe in enumerate(part):
                right, control = logp_bv[n], logp_bv[n + len(part)]
                best = max(probe.choices, key=lambda v: float(right[v]))  # noqa: B023 - used at once
                rows.setdefault((probe.task, length), []).append(
                    (
                        float(int(right.argmax()) == probe.answer),
                        float(best == probe.answer),
                        float(right[probe.answer] - control[probe.answer]),
                    )
                )
    out: dict[str, dict[str, dict[str, float]]] = {}
    for (task, length), values in sorted(rows.items()):
        means = np.array(values).mean(0)
        out.setdefault(task, {})[str(length)] = dict(zip(("exact", "choice", "gain"), map(float, means), strict=True))
    return out


def mean_score(
    scores: dict[str, dict[str, dict[str, float]]], measure: str = "exact", length: int | None = None
) -> float:
    """One number: the mean of a measure over tasks, and over lengths unless one is named."""
    found = [
        cell[measure] for by_length in scores.values() for n, cell in by_length.items() if length in (None, int(n))
    ]
    if not found:
        raise ValueError(f"no probe of length {length}")
    return sum(found) / len(found)


def continuation_choice(
    model: Any, tokens: TokenSet, questions: int, seed: int, context: int = 64, length: int = 16, choices: int = 4
) -> dict[str, float]:
    """Multiple choice by likelihood: which of `choices` passages of the same domain continues a held-out text.

    {'accuracy', 'chance', 'questions'}; the passage with the largest log-likelihood per token counts as chosen. Wrong ones
    come from other places of the domain's held-out text. ValueError when no domain has enough of it.
    """
    import torch

    need = 4 * choices * (context + length)
    domains = [d for d in tokens.domains if tokens.tokens(d, "val") >= need]
    if not domains:
        raise ValueError(f"no domain has {need} held-out tokens for multiple choice")
    device, right = next(model.parameters()).device, 0
    for start in range(0, questions, 8):
        rows = []
        for index in range(start, min(start + 8, questions)):
            rng = np.random.default_rng(derive_seed(seed, "choice", index))
            shard = tokens.shard(domains[index % len(domains)], "val")
            total = len(shard.tokens)
            at = int(rng.integers(total - context - length))
            head = shard.window(at, context)
            ends = [at + context, *(int(rng.integers(total - length)) for _ in range(choices - 1))]
            rows += [np.concatenate([head, shard.window(end, length)]) for end in ends]
        ids_bs = torch.as_tensor(np.stack(rows), device=device)
        with torch.inference_mode():
            hidden_blh = model(ids_bs, attention="dense").hidden_bsh[:, context - 1 : -1]
            logp_blv = model.logits(hidden_blh).float().log_softmax(-1)
        logp_b = logp_blv.gather(2, ids_bs[:, context:, None]).mean((1, 2))
        right += int((logp_b.view(-1, choices).argmax(1) == 0).sum())
    return {"accuracy": right / questions, "chance": 1 / choices, "questions": float(questions)}
