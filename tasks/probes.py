"""Probes of a language model at growing lengths: single needle, multi-key needle, in-context labels, choice of text.

    python -m pytest tests/tasks/test_probes.py

A fact is three tokens, [mark, key, value]; symbols are ordinary tokens of the vocabulary that mean nothing together, and every
key has a few values of its own. Recall asks for the value after a later [mark, key]; only the context says which of the key's
values it is. Label examples are [mark, input, label]; each context has a label of its own that most examples carry, so the more
of them are read, the surer the answer: many-shot learning of a prior. (Mapping inputs to labels
takes induction over two tokens: after 300,000 tokens of it a model of 1.6 M parameters answered no held-out pair.)

A hash of a case's facts and of the text around them puts it on one side: `RecallRows`, the training text of the same kind,
holds none of the tests' cases, and its text is the training split's. Every case has a control in which the facts say something
else: `gain` is the log-probability that the right value owes to them, in nats, a signal long before `exact`.

    needle      one fact in text, asked for at the end
    multi_key   several facts with other keys in the same text
    icl         label examples throughout
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
MAJORITY = 2 / 3  # of the examples carry the context's own label


@dataclass(frozen=True)
class Symbols:
    """Token ids that cases are made of: a mark for facts and one for labels, keys, each key's own values, inputs, labels."""

    recall: int
    label: int
    keys: tuple[int, ...]
    values: tuple[tuple[int, ...], ...]
    labels: tuple[int, ...]

    @classmethod
    def choose(cls, tokens: TokenSet, keys: int = 8, values: int = 4, labels: int = 4) -> Symbols:
        """Tokens with text, in the order of a hash. ValueError when the vocabulary is too small."""
        ids = [i for i, size in enumerate(tokens.token_bytes.tolist()) if size > 0 and i != tokens.eot_id]
        ids.sort(key=lambda i: unit_hash(f"probe-symbol:{i}"))
        need = 2 + keys + keys * values + labels
        if len(ids) < need or values < 2 or labels < 2:
            raise ValueError(f"{need} symbols, 2 values and 2 labels at least; {len(ids)} tokens have text")
        at = 2 + keys + labels
        own = tuple(tuple(ids[at + k * values : at + (k + 1) * values]) for k in range(keys))
        return cls(ids[0], ids[1], tuple(ids[2 : 2 + keys]), own, tuple(ids[2 + keys : at]))


def is_test(facts: Sequence[tuple[int, int]], text: Sequence[int]) -> bool:
    """The side of a case: by a hash of its facts and of the first tokens of its text."""
    return unit_hash(f"probe:{sorted(facts)}:{list(text[:8])}") < TEST_SHARE


def draw_facts(symbols: Symbols, count: int, rng: np.random.Generator) -> list[tuple[int, int]]:
    """`count` facts (key, value) with different keys."""
    keys = rng.choice(len(symbols.keys), size=count, replace=False)
    return [(symbols.keys[k], int(rng.choice(symbols.values[k]))) for k in keys]


def draw_examples(symbols: Symbols, count: int, rng: np.random.Generator) -> tuple[list[int], list[int]]:
    """(inputs, labels) of `count` examples. The first drawn label is the context's own: two of three examples carry it."""
    order = rng.permutation(len(symbols.labels))
    places = np.where(rng.random(count) < MAJORITY, 0, rng.integers(1, len(order), size=count))
    inputs = [symbols.keys[i] for i in rng.integers(len(symbols.keys), size=count)]
    return inputs, [symbols.labels[order[p]] for p in places]


class RecallRows:
    """Training rows with facts to recall: `row(number)` is a pure function of (seed, number).

    Text of the training split between facts, `gap` tokens on average; only repeated facts and labels are targets. Every third
    row holds label examples.
    """

    def __init__(
        self,
        tokens: TokenSet,
        symbols: Symbols,
        seq_len: int,
        seed: int,
        keys: int = 6,
        gap: float = 2.0,
    ) -> None:
        self.tokens, self.symbols, self.seq_len, self.seed = tokens, symbols, seq_len, seed
        self.keys, self.gap = keys, gap
        self.domains = [d for d in tokens.domains if tokens.tokens(d, "train") > 1]

    def row(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """(input ids, targets) int64 [seq_len]."""
        rng = np.random.default_rng(derive_seed(self.seed, "recall", number))
        shard = self.tokens.shard(self.domains[number % len(self.domains)], "train")
        labels, gap = number % 3 == 2, self.gap * float(rng.exponential())  # rows of short and of long distances
        while True:
            text = shard.window(int(rng.integers(len(shard.tokens))), self.seq_len + 1).tolist()
            facts = dict(
                draw_facts(self.symbols, int(rng.integers(1, min(self.keys, len(self.symbols.keys)) + 1)), rng)
            )
            if not is_test(list(facts.items()), text):
                break
        ids: list[int] = []
        targets: list[int] = []  # aligned with ids: the token itself where it must be predicted
        if labels:
            for key, value in zip(*draw_examples(self.symbols, self.seq_len // 3 + 1, rng), strict=True):
                targets += [IGNORE, IGNORE, value if len(ids) >= 24 else IGNORE]
                ids += [self.symbols.label, key, value]
        keys, used, seen = list(facts), 0, set()
        while len(ids) < self.seq_len + 1:
            key = keys[int(rng.integers(len(keys)))]
            ids += [self.symbols.recall, key, facts[key]]
            targets += [IGNORE, IGNORE, facts[key] if key in seen else IGNORE]
            seen.add(key)
            filler = text[used : used + int(rng.poisson(gap))]
            used += len(filler)
            ids += filler
            targets += [IGNORE] * len(filler)
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


def _needle(tokens, symbols, domain, task, length, index, facts, rng) -> Probe:
    """Facts in the text (one needle walks over ten depths with the index; several lie anywhere), one of them asked for."""
    count = facts if task == "multi_key" else 1
    room = length - 3 * count - 2
    shard = tokens.shard(domain, "val")
    while True:
        pairs = draw_facts(symbols, count, rng)
        text = shard.window(int(rng.integers(len(shard.tokens))), room).tolist()
        if is_test(pairs, text):
            break
    places = [room * (2 * (index % 10) + 1) // 20] if count == 1 else rng.integers(room + 1, size=count).tolist()
    asked = int(rng.integers(count))
    key, value = pairs[asked]
    choices = symbols.values[symbols.keys.index(key)]
    wrong = int(rng.choice([v for v in choices if v != value]))

    def assemble(said: int) -> tuple[int, ...]:
        out, done = [], 0
        for at, n in sorted(zip(places, range(count), strict=True)):
            out += [*text[done:at], symbols.recall, pairs[n][0], said if n == asked else pairs[n][1]]
            done = at
        return (*out, *text[done:], symbols.recall, key)

    return Probe(task, length, assemble(value), assemble(wrong), value, choices)


def _icl(tokens, symbols, domain, task, length, index, facts, rng) -> Probe:
    """Label examples fill the context; the control carries another label wherever this one has its own."""
    shots = (length - 2) // 3
    pad = tokens.shard(domain, "val").window(0, length - 2 - 3 * shots).tolist()
    while True:
        inputs, labels = draw_examples(symbols, shots, rng)
        counts = sorted(((labels.count(v), v) for v in symbols.labels), reverse=True)
        if counts[0][0] > counts[1][0] and is_test(list(zip(inputs, labels, strict=True)), pad):
            break
    value, asked = counts[0][1], symbols.keys[int(rng.integers(len(symbols.keys)))]
    wrong = int(rng.choice([v for v in symbols.labels if v != value]))
    swapped = {value: wrong, wrong: value}

    def assemble(said: Sequence[int]) -> tuple[int, ...]:
        body = [t for key, v in zip(inputs, said, strict=True) for t in (symbols.label, key, v)]
        return (*pad, *body, symbols.label, asked)

    control = [swapped.get(v, v) for v in labels]
    return Probe(task, length, assemble(labels), assemble(control), value, symbols.labels)


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
