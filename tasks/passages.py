"""Long documents in passages: where to cut them, how to score them, and a regression on disk.

Used by the world-knowledge classifier and the educational scorer, which judge passages and aggregate over a document.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tasks.quality import LogisticRegression

_BREAK = re.compile(r"[.!?。!?]\s|\s")


def split_passages(text: str, chars: int) -> list[str]:
    """Cut at paragraphs into passages of about `chars` characters (at most 1.5 times that); [""] for an empty text.

    A paragraph that is longer is cut behind a sentence where one ends in the last third, else at white space.
    """
    pieces: list[str] = []
    for paragraph in text.split("\n\n"):
        while len(paragraph) > chars * 1.5:
            ends = [m.end() for m in _BREAK.finditer(paragraph, chars * 2 // 3, chars)]
            sentences = [e for e in ends if paragraph[e - 2] in ".!?。!?"]
            cut = (sentences or ends or [chars])[-1]
            pieces.append(paragraph[:cut])
            paragraph = paragraph[cut:]
        if paragraph.strip():
            pieces.append(paragraph)
    passages: list[str] = []
    for piece in pieces:
        if passages and len(passages[-1]) + len(piece) + 2 <= chars:
            passages[-1] += "\n\n" + piece
        else:
            passages.append(piece)
    if len(passages) > 1 and len(passages[-1]) < chars // 4 and len(passages[-2]) < chars * 1.25:
        tail = passages.pop()
        passages[-1] += "\n\n" + tail
    return passages or [""]


def spread(items: Sequence[Any], limit: int) -> list[Any]:
    """At most `limit` of the items, evenly over the sequence, the first and the last among them."""
    if len(items) <= limit:
        return list(items)
    return [items[i] for i in np.linspace(0, len(items) - 1, limit).round().astype(int)]


def score_passages(
    texts: Sequence[str],
    chars: int,
    limit: int,
    score: Callable[[list[str]], np.ndarray],
    aggregate: Callable[[np.ndarray, np.ndarray], float],
    batch: int = 512,
) -> np.ndarray:
    """Score of each text, float64 [n]: `aggregate(scores, lengths)` over at most `limit` of its passages.

    Passages of many texts are scored together, `batch` at a time, which bounds memory.
    """
    out = np.zeros(len(texts))
    pending: list[str] = []
    owners: list[tuple[int, int]] = []

    def flush() -> None:
        scores, at = score(pending), 0
        for index, count in owners:
            lengths = np.array([max(1, len(p)) for p in pending[at : at + count]], float)
            out[index] = aggregate(scores[at : at + count], lengths)
            at += count
        pending.clear()
        owners.clear()

    for index, text in enumerate(texts):
        passages = spread(split_passages(text, chars), limit)
        pending += passages
        owners.append((index, len(passages)))
        if len(pending) >= batch:
            flush()
    if pending:
        flush()
    return np.round(out, 5)


def save_regression(directory: str | Path, name: str, regression: LogisticRegression, about: dict[str, Any]) -> None:
    """`<name>.safetensors` with the weights and `<name>.json` with what they belong to."""
    from safetensors.numpy import save_file

    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    r = regression
    tensors = {"mean": r.mean_f, "scale": r.scale_f, "weight": r.weight_f, "bias": np.array([r.bias])}
    save_file(tensors, directory / f"{name}.safetensors")
    (directory / f"{name}.json").write_text(json.dumps(about, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def load_regression(directory: str | Path, name: str, about: dict[str, Any]) -> LogisticRegression:
    """ValueError when what is stored was saved with another `about`."""
    from safetensors.numpy import load_file

    directory = Path(directory)
    found = json.loads((directory / f"{name}.json").read_text(encoding="utf-8"))
    if found != about:
        raise ValueError(f"{directory}/{name}.json: saved with {found}, this version expects {about}")
    t = load_file(directory / f"{name}.safetensors")
    return LogisticRegression(t["mean"], t["scale"], t["weight"], float(t["bias"][0]))
