"""Content classifier of programming languages: a vocabulary of tokens and token pairs, their vectors, one linear layer.

A file becomes its tokens and pairs of neighbouring tokens (words outside the vocabulary by their shape, line starts marked).
The vectors of the known ones, weighted by 1 + log count and normalised, are summed and multiplied into one score per
language, as in fastText (Joulin et al. 2017); a softmax makes them probabilities. The model (conf/code_lang.safetensors,
int8 vectors) is made by tasks/code_lang_fit.py.

python -m tasks.code_lang_model FILE...
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

MODEL = Path(__file__).resolve().parents[1] / "conf" / "code_lang.safetensors"
MAX_CHARS = 4000
UNKNOWN = ("", 0.0)
_TOKEN = re.compile(r"\n[ \t]*|[#@$%&.:\\<?!-]?[^\W\d]\w*[?!:]?|\d[\w.]*|[^\w\s]{1,3}", re.ASCII)
_WORD = re.compile(r"[#@$%&.:\\<?!-]?([^\W\d]\w*)[?!:]?$", re.ASCII)


def shape(token: str) -> str:
    """Class of a token: `0` numbers, `aA`, `Aa`, `a_a`, `A_A`, `A`, `a` words by their case, with the sigil before them."""
    if token[0].isdigit():
        return "0"
    found = _WORD.match(token)
    if not found:
        return token
    word = found[1]
    if word.isupper():
        kind = "A_A" if "_" in word else "A"
    elif word.islower():
        kind = "a_a" if "_" in word else "a"
    else:
        kind = "Aa" if word[0].isupper() else "aA"
    return token[: found.start(1)] + kind + token[found.end(1) :]


@lru_cache(maxsize=100_000)
def _shape(token: str) -> str:
    return shape(token)


def tokens(text: str) -> list[str]:
    """Tokens of the first MAX_CHARS characters; a line break is `\\n`, indentation at its end is dropped beyond presence."""
    found = _TOKEN.findall("\n" + text[:MAX_CHARS])
    return [("\n " if len(t) > 1 else "\n") if t[0] == "\n" else t[:24] for t in found]


def features(text: str, known: frozenset[str] | dict[str, int] | None = None) -> Counter[str]:
    """Counts of tokens and `left right` pairs; a word that `known` lacks stands as its shape, also in pairs."""
    if known is None:
        units = tokens(text)
    else:
        units = [t if t in known else _shape(t) for t in tokens(text)]
    counts = Counter(units)
    counts.update(map("\x1f".join, zip(units, units[1:])))
    return counts


class CodeLanguageModel:
    """Reads `path`, written by tasks/code_lang_fit.py. ValueError when the file is none of its kind."""

    def __init__(self, path: str | Path = MODEL):
        try:
            with safe_open(path, "numpy") as file:
                self.about: dict[str, Any] = json.loads(
                    (file.metadata() or {})["model"]
                )  # sources, licences, counts, seed
                self.languages: list[str] = self.about["languages"]
                words = bytes(file.get_tensor("vocabulary")).decode("utf-8").split("\x1e")
                vectors, scales = file.get_tensor("vectors"), file.get_tensor("scales")
                self._out = file.get_tensor("out").astype(np.float32)
                self._bias = file.get_tensor("bias").astype(np.float32)
        except (OSError, KeyError, ValueError) as error:
            raise ValueError(f"{path}: not a code language model ({error})") from None
        except Exception as error:  # safetensors raises its own class for a damaged header
            raise ValueError(f"{path}: not a code language model ({error})") from None
        self._index = {word: i for i, word in enumerate(words)}
        self._vectors = vectors.astype(np.float32) * scales.astype(np.float32)
        self._known = frozenset(word for word in words if "\x1f" not in word)

    def probabilities(self, text: str) -> np.ndarray:
        """Probability of every one of `languages`, float32 (L,); all zero for text with fewer than two known features."""
        index = self._index
        found = [(index[f], n) for f, n in features(text, self._known).items() if f in index]
        if len(found) < 2:
            return np.zeros(len(self.languages), np.float32)
        rows, counts = np.array(found, np.int64).T
        weights = 1 + np.log(counts.astype(np.float32))
        mean = weights @ self._vectors[rows] / np.sqrt((weights**2).sum())
        scores = mean @ self._out + self._bias
        scores = np.exp(scores - scores.max())
        return scores / scores.sum()

    def identify(self, text: str) -> tuple[str, float]:
        """(language, probability) by content alone; data and mark-up formats are languages here (`json`, `markdown`, `text`).

        ("", 0.0) for binary data and for text without known features.
        """
        if (
            not text.strip()
            or "\0" in text[:MAX_CHARS]
            or text[:MAX_CHARS].count("\ufffd") > 0.05 * len(text[:MAX_CHARS])
        ):
            return UNKNOWN
        p = self.probabilities(text)
        best = int(p.argmax())
        return (self.languages[best], round(float(p[best]), 4)) if p[best] > 0 else UNKNOWN


@lru_cache(maxsize=1)
def shipped() -> CodeLanguageModel:
    """The model in conf/, loaded once a process."""
    return CodeLanguageModel()


def main() -> None:
    for name in sys.argv[1:]:
        print(*shipped().identify(Path(name).read_bytes()[:65536].decode("utf-8", "replace")), name, sep="\t")


if __name__ == "__main__":
    main()
