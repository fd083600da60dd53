"""The fastText quality classifier, in the manner of DCLM: word and word-pair embeddings, averaged, into a softmax.

Text is lower case, punctuation is a word of its own, and so is the end of a line, which lets word pairs see how lines begin
and end. One thread and a fixed seed: equal examples give equal bytes.
"""

from __future__ import annotations

import hashlib
import re
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tasks.quality_examples import Example

CHARS = 3000  # of a text's beginning that are read
PER_CLASS = 3000  # training lines of each class, dealt evenly to its sources
_TOKEN = re.compile(r"[^\W\d_]+|\d+|[^\w\s]|\n")
_LINE_END = "<eol>"
_GOOD, _BAD = "__label__good", "__label__bad"


def words(text: str) -> str:
    """One line of words for fastText."""
    return " ".join(_LINE_END if w == "\n" else w for w in _TOKEN.findall(text[:CHARS].lower()))


class FastTextClassifier:
    """Wraps a fastText model with the labels good and bad."""

    def __init__(self, model: Any):
        self._model = model

    @classmethod
    def fit(cls, examples: Sequence[Example]) -> FastTextClassifier:
        """Every source of a class gives the same number of lines. ValueError when a class is absent."""
        import fasttext

        by_source: dict[tuple[bool, str], list[str]] = defaultdict(list)
        for example in examples:
            by_source[example.good, example.source].append(words(example.text))
        if {good for good, _ in by_source} != {True, False}:
            raise ValueError("the quality classifier needs examples of both classes")
        lines = []
        for (good, _), texts in sorted(by_source.items()):
            share = PER_CLASS // sum(side == good for side, _ in by_source)
            lines += [f"{_GOOD if good else _BAD} {texts[i % len(texts)]}" for i in range(share)]
        order = sorted(range(len(lines)), key=lambda i: hashlib.sha256(f"{i} {lines[i]}".encode()).digest())
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "train.txt"
            path.write_text("\n".join(lines[i] for i in order) + "\n", encoding="utf-8")
            model = fasttext.train_supervised(
                str(path), dim=16, epoch=3, lr=0.2, wordNgrams=2, bucket=50_000, minCount=2, thread=1, seed=0, verbose=0
            )
        return cls(model)

    def logit(self, texts: Sequence[str]) -> np.ndarray:
        """Log odds of "good", float64 [n], within +-10."""
        out = np.zeros(len(texts))
        for i, text in enumerate(texts):
            labels, scores = self._model.predict(words(text), k=1)
            if labels:
                p = min(max(float(scores[0]), 0.5), 1 - 4.5e-5)
                out[i] = np.log(p / (1 - p)) * (1 if labels[0] == _GOOD else -1)
        return out

    def save(self, path: Path) -> None:
        self._model.save_model(str(path))

    @classmethod
    def load(cls, path: Path) -> FastTextClassifier:
        """ValueError when the file is no such model."""
        import fasttext

        try:
            model = fasttext.load_model(str(path))
        except (ValueError, OSError) as error:
            raise ValueError(f"{path}: not a fastText model ({error})") from None
        if set(model.get_labels()) != {_GOOD, _BAD}:
            raise ValueError(f"{path}: labels {model.get_labels()}, expected {_GOOD} and {_BAD}")
        return cls(model)
