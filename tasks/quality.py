"""A quality classifier: static sentence embeddings (potion-base-8M) and a few surface features into a logistic regression.

GLM-5 adds a DCLM-style classifier on sentence embeddings (notes D.2). Static embeddings are a table look-up and a mean,
so this runs at thousands of documents per second without torch; the regression is trained inside the stage.

Score texts with a stage's model:  python -m tasks.quality data/web/quality data/acquire/models/potion-base-8M < page.txt
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tasks.filters import Stats, policy_lines, sentence_lines, short_lines, stop_words

FEATURES = (
    "mean_word_length long_words unique_words upper digits punctuation sentence_lines short_lines stop_words policy_lines"
    " line_length first_person urls"
).split()
_FIRST_PERSON = frozenset("i my me you your we our us".split())


class StaticEmbedder:
    """A model2vec directory (model.safetensors, tokenizer.json, config.json), read with numpy only.

    An embedding is the mean of the token vectors of the text's first `tokens` tokens, scaled to length 1 where the
    model's config says so. ValueError when the directory is not such a model.
    """

    def __init__(self, directory: str | Path, tokens: int = 512):
        from safetensors.numpy import load_file
        from tokenizers import Tokenizer

        directory = Path(directory)
        try:
            tensors = load_file(directory / "model.safetensors")
            self._tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
            config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        except Exception as error:  # tokenizers and safetensors raise bare Exceptions
            raise ValueError(f"{directory}: not a model2vec model ({error})") from None
        if "embeddings" not in tensors:
            raise ValueError(f"{directory}: model.safetensors holds no tensor 'embeddings'")
        self._table_vd = tensors["embeddings"].astype(np.float32)
        self._normalize = bool(config.get("normalize", True))
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._unknown = self._tokenizer.token_to_id("[UNK]")
        self.tokens, self.dimension = tokens, self._table_vd.shape[1]

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        """Texts -> float32 [n, dimension]; the zero vector for a text without a known token."""
        out = np.zeros((len(texts), self.dimension), np.float32)
        heads = [t[: self.tokens * 6] for t in texts]  # about 5 characters a token: no need to tokenize more
        encoded = self._tokenizer.encode_batch_fast(heads, add_special_tokens=False)
        for row, encoding in enumerate(encoded):
            ids = [i for i in encoding.ids if i != self._unknown][: self.tokens]
            if ids:
                out[row] = self._table_vd[ids].mean(axis=0)
        if self._normalize:
            out /= np.maximum(np.linalg.norm(out, axis=1, keepdims=True), 1e-12)
        return out


def surface_features(text: str, lang: str = "en", chars: int = 6000) -> list[float]:
    """The float features named in FEATURES of the text's first `chars` characters; none of them is its length."""
    stats = Stats(text[:chars], lang)
    words = stats.words or [""]
    n, size = len(words), max(1, len(stats.text))
    lower = [w.lower() for w in words]
    return [
        sum(map(len, words)) / n,
        sum(len(w) > 7 for w in words) / n,
        len(set(lower[:200])) / min(n, 200),
        sum(map(str.isupper, stats.text)) / size,
        sum(map(str.isdigit, stats.text)) / size,
        sum(c in ",.;:!?" for c in stats.text) / size,
        sentence_lines(stats),
        short_lines(stats),
        stop_words(stats) or 0.0,
        policy_lines(stats),
        math.log1p(size / max(1, len(stats.lines))),
        sum(w in _FIRST_PERSON for w in lower) / n,
        sum("http" in w or "www." in w for w in lower) / n,
    ]


def roc_auc(scores: np.ndarray, labels: np.ndarray) -> float:
    """Area under the ROC curve by ranks, ties counted half; nan when one class is absent."""
    labels = np.asarray(labels, bool)
    positive, negative = int(labels.sum()), int((~labels).sum())
    if not positive or not negative:
        return float("nan")
    _, inverse, counts = np.unique(np.asarray(scores, np.float64), return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    return float((ranks[labels].sum() - positive * (positive + 1) / 2) / (positive * negative))


@dataclass
class LogisticRegression:
    """Standardised features, L2 penalty, both classes weighted equally, fitted by Newton's method in float64."""

    mean_f: np.ndarray
    scale_f: np.ndarray
    weight_f: np.ndarray
    bias: float

    @classmethod
    def fit(cls, x_nf: np.ndarray, y_n: np.ndarray, l2: float, steps: int = 25) -> LogisticRegression:
        """x [n, f] floats, y [n] in {0, 1}; `l2` is the penalty per example. ValueError when a class is absent."""
        x_nf, y_n = np.asarray(x_nf, np.float64), np.asarray(y_n, np.float64)
        if not 0 < y_n.sum() < len(y_n):
            raise ValueError("the quality classifier needs examples of both classes")
        mean, scale = x_nf.mean(axis=0), x_nf.std(axis=0) + 1e-8
        design = np.hstack([(x_nf - mean) / scale, np.ones((len(x_nf), 1))])
        weight_n = np.where(y_n > 0, 0.5 / y_n.mean(), 0.5 / (1 - y_n.mean())) / len(y_n)
        penalty = np.full(design.shape[1], l2)
        penalty[-1] = 0.0
        beta = np.zeros(design.shape[1])
        for _ in range(steps):
            p = 1 / (1 + np.exp(-np.clip(design @ beta, -30, 30)))
            gradient = design.T @ (weight_n * (p - y_n)) + penalty * beta
            hessian = (design * (weight_n * p * (1 - p))[:, None]).T @ design + np.diag(penalty + 1e-9)
            step = np.linalg.solve(hessian, gradient)
            beta -= step
            if np.abs(step).max() < 1e-8:
                break
        return cls(mean, scale, beta[:-1], float(beta[-1]))

    def score(self, x_nf: np.ndarray) -> np.ndarray:
        """Probability of the positive class, float64 [n], rounded to 5 decimals so that files compare equal."""
        logit = ((x_nf - self.mean_f) / self.scale_f) @ self.weight_f + self.bias
        return np.round(1 / (1 + np.exp(-np.clip(logit, -30, 30))), 5)


class QualityClassifier:
    """Embedder (may be None: surface features alone) + regression."""

    def __init__(self, embedder: StaticEmbedder | None, regression: LogisticRegression | None = None):
        self.embedder, self.regression = embedder, regression

    def features(self, texts: Sequence[str], langs: Sequence[str]) -> np.ndarray:
        """float64 [n, len(FEATURES) (+ dimension)]."""
        surface = np.array([surface_features(t, g) for t, g in zip(texts, langs, strict=True)], np.float64)
        surface = surface.reshape(len(texts), len(FEATURES))
        return surface if self.embedder is None else np.hstack([surface, self.embedder.embed(texts)])

    def fit(self, positives: Sequence[str], negatives: Sequence[str], l2: float) -> None:
        """English texts of both classes."""
        texts = [*positives, *negatives]
        labels = np.array([1.0] * len(positives) + [0.0] * len(negatives))
        self.regression = LogisticRegression.fit(self.features(texts, ["en"] * len(texts)), labels, l2)

    def score(self, texts: Sequence[str], langs: Sequence[str], batch: int = 512) -> np.ndarray:
        """Quality in 0..1 of each text, float64 [n]."""
        parts = [
            self.regression.score(self.features(texts[i : i + batch], langs[i : i + batch]))
            for i in range(0, len(texts), batch)
        ]
        return np.concatenate(parts) if parts else np.zeros(0)

    def save(self, directory: str | Path) -> None:
        """weights as safetensors, what they belong to as JSON."""
        from safetensors.numpy import save_file

        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        r = self.regression
        tensors = {"mean": r.mean_f, "scale": r.scale_f, "weight": r.weight_f, "bias": np.array([r.bias])}
        save_file(tensors, directory / "classifier.safetensors")
        about = {"features": FEATURES, "embedding": self.embedder.dimension if self.embedder else 0}
        (directory / "classifier.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, directory: str | Path, embedder: StaticEmbedder | None) -> QualityClassifier:
        """ValueError when the directory was saved with other features or another embedding size."""
        from safetensors.numpy import load_file

        about = json.loads((Path(directory) / "classifier.json").read_text(encoding="utf-8"))
        if about != {"features": FEATURES, "embedding": embedder.dimension if embedder else 0}:
            raise ValueError(f"{directory}: this classifier was trained with other features than this version computes")
        t = load_file(Path(directory) / "classifier.safetensors")
        return cls(embedder, LogisticRegression(t["mean"], t["scale"], t["weight"], float(t["bias"][0])))


def buckets(scores: np.ndarray, count: int) -> np.ndarray:
    """Quantile bucket of each score, int [n] in 0 (lowest) .. count-1; equal scores share the lower bucket."""
    if not len(scores):
        return np.zeros(0, int)
    order = np.sort(scores)
    return np.minimum(np.searchsorted(order, scores, side="left") * count // len(scores), count - 1).astype(int)


def main() -> None:
    classifier = QualityClassifier.load(sys.argv[1], StaticEmbedder(sys.argv[2]) if len(sys.argv) > 2 else None)
    print(classifier.score([sys.stdin.read()], ["en"])[0])


if __name__ == "__main__":
    main()
