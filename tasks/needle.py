"""Needle in a haystack: one fact hidden in real held-out text, asked for at the end, at every depth and context length.

    python -m tasks.needle data/pack/pretrain data/tokenizer      prints one case as text

Generated here, without downloads. The answer is teacher-forced: a case counts as found when every answer token is the
model's first choice given the right ones before it, which is when greedy decoding writes it. Each case has a control, the
same text without the needle: what the model gives the answer there is guessing.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tasks.files import derive_seed
from tasks.tokens import TokenSet

NAMES = (
    "Amber", "Basil", "Cedar", "Delta", "Ember", "Falcon", "Garnet", "Harbor", "Indigo", "Jasper", "Kestrel", "Lotus",
    "Maple", "Nectar", "Onyx", "Pepper", "Quartz", "Raven", "Saffron", "Tundra", "Umber", "Violet", "Walnut", "Yarrow",
)  # fmt: skip
STATEMENT = "\nThe secret number of {name} is {value}.\n"
QUESTION = "\nThe secret number of {name} is"
ANSWER = " {value}."


@dataclass(frozen=True)
class Case:
    """One question: ids = haystack with needle + question + answer; the answer starts at `answer_start`."""

    length: int
    depth: float
    ids: tuple[int, ...]
    answer_start: int
    control_ids: tuple[int, ...]

    @property
    def answer(self) -> tuple[int, ...]:
        return self.ids[self.answer_start :]


def build_cases(
    tokens: TokenSet,
    tokenizer: Any,
    lengths: Sequence[int],
    depths: Sequence[float],
    per_cell: int,
    seed: int,
    distractors: int = 0,
    digits: int = 4,
) -> list[Case]:
    """Cases of exactly `length` tokens, question and answer included, `per_cell` for each length and depth.

    depth 0 puts the needle at the start of the text, 1 right before the question. `distractors` other names with other
    numbers are hidden at random places. The text is the held-out split, domains in turn. Raises ValueError when a length
    is too short for needle and question, or the held-out split is empty.
    """
    domains = [d for d in tokens.domains if tokens.tokens(d, "val") > 1]
    if not domains:
        raise ValueError("the held-out split is empty: no haystack for the needle")
    cases = []
    for length in lengths:
        for depth in depths:
            for index in range(per_cell):
                rng = np.random.default_rng(derive_seed(seed, "needle", length, depth, index))
                cases.append(_case(tokens, tokenizer, domains, length, depth, index, distractors, digits, rng))
    return cases


def _case(tokens, tokenizer, domains, length, depth, index, distractors, digits, rng) -> Case:
    names = rng.choice(len(NAMES), size=1 + distractors, replace=False)
    values = ["".join(map(str, rng.integers(0, 10, digits))) for _ in names]
    facts = [_encode(tokenizer, STATEMENT.format(name=NAMES[n], value=v)) for n, v in zip(names, values, strict=True)]
    question = _encode(tokenizer, QUESTION.format(name=NAMES[names[0]]))
    answer = _encode(tokenizer, ANSWER.format(value=values[0]))
    room = length - sum(map(len, facts)) - len(question) - len(answer)
    if room < 1:
        raise ValueError(
            f"needle length {length} leaves no text: needle, question and answer need {length - room} tokens"
        )
    shard = tokens.shard(domains[index % len(domains)], "val")
    text = shard.window(int(rng.integers(len(shard.tokens))), room + len(facts[0]))  # the control is as long
    places = [round(depth * room), *(int(p) for p in rng.integers(room + 1, size=distractors))]
    with_needle = _assemble(text[:room].tolist(), places, facts)
    without = _assemble(text.tolist(), places[1:], facts[1:])
    tail = [*question, *answer]
    return Case(length, depth, (*with_needle, *tail), length - len(answer), (*without, *tail))


def _assemble(text: list[int], places: list[int], facts: list[list[int]]) -> list[int]:
    """The text with each fact inserted before its place (a position of the bare text)."""
    out, done = [], 0
    for place, fact in sorted(zip(places, facts, strict=True), key=lambda pair: pair[0]):
        out += [*text[done:place], *fact]
        done = place
    return out + text[done:]


def _encode(tokenizer: Any, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


def score_cases(model: Any, cases: Sequence[Case], batch_tokens: int = 8192) -> dict[str, dict[str, float]]:
    """Per length: `found` (share of cases whose every answer token is the first choice), `logprob` per answer token in
    nats, `control_logprob` (same question, no needle), and `found_at` by depth.

    model: a GlmMoeDsa (or one with hooked layers). Keys of the result are lengths as text.
    """
    import torch

    rows: dict[int, list[tuple[float, bool, float, float]]] = {}
    for length in sorted({case.length for case in cases}):
        group = [case for case in cases if case.length == length]
        size = max(1, batch_tokens // length)
        for start in range(0, len(group), size):
            part = group[start : start + size]
            for case, (found, logprob), (_, control) in zip(
                part,
                _answers(model, [c.ids for c in part], part, torch),
                _answers(model, [c.control_ids for c in part], part, torch),
                strict=True,
            ):
                rows.setdefault(length, []).append((case.depth, found, logprob, control))
    return {
        str(length): {
            "found": _mean(r[1] for r in group),
            "logprob": _mean(r[2] for r in group),
            "control_logprob": _mean(r[3] for r in group),
            "found_at": {f"{d:g}": _mean(r[1] for r in group if r[0] == d) for d in sorted({r[0] for r in group})},
        }
        for length, group in rows.items()
    }


def _answers(model, sequences, cases, torch) -> list[tuple[bool, float]]:
    """(every answer token first choice, mean log-prob of the answer's tokens) for sequences of equal length."""
    ids_bs = torch.tensor(sequences)
    with torch.inference_mode():
        hidden_bsh = model(ids_bs).hidden_bsh
        out = []
        for row, case in enumerate(cases):
            logp_av = model.logits(hidden_bsh[row, case.answer_start - 1 : -1]).log_softmax(-1)
            answer_a = ids_bs[row, case.answer_start :]
            picked_a = logp_av.gather(1, answer_a[:, None])
            out.append((bool((logp_av.argmax(-1) == answer_a).all()), float(picked_a.mean())))
    return out


def _mean(values) -> float:
    listed = [float(v) for v in values]
    return sum(listed) / len(listed)


if __name__ == "__main__":
    from tokenizers import Tokenizer

    shown_tokenizer = Tokenizer.from_file(str(Path(sys.argv[2]) / "tokenizer.json"))
    shown = build_cases(TokenSet(Path(sys.argv[1])), shown_tokenizer, [256], [0.5], 1, seed=0)[0]
    print(shown_tokenizer.decode(list(shown.ids[: shown.answer_start]), skip_special_tokens=False))
    print("answer:", shown_tokenizer.decode(list(shown.answer)))
