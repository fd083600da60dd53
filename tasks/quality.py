"""Quality classifiers: surface features, static sentence embeddings (potion-base-8M) and fastText, and their combination.

GLM-5 sets a DCLM-style classifier on sentence embeddings beside the fastText one (notes D.2). Static embeddings are a table
look-up and a mean, so all three run at thousands of documents per second without torch; they are trained inside the stage,
from what tasks/quality_examples.py makes. Side by side, with MiniLM: python -m tests.bench.quality

Score texts with a stage's model:  python -m tasks.quality data/web/quality data/acquire/models/potion-base-8M < page.txt
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tasks.quality_examples import Example
from tasks.quality_fasttext import FastTextClassifier
from tasks.quality_features import DIRECTIONS, FEATURES, surface_features

MODELS = ("surface", "embedding", "fasttext")


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
    """Standardised features (cut at 4 deviations; nan counts as the mean), L2 penalty, fitted by Newton's method."""

    mean_f: np.ndarray
    scale_f: np.ndarray
    weight_f: np.ndarray
    bias: float

    @classmethod
    def fit(
        cls,
        x_nf: np.ndarray,
        y_n: np.ndarray,
        l2: float,
        steps: int = 50,
        weight_n: np.ndarray | None = None,
        sign_f: np.ndarray | None = None,
    ) -> LogisticRegression:
        """x [n, f] floats, y [n] in {0, 1}; `l2` is the penalty per example of weight 1 / n.

        Both classes weigh the same unless `weight_n` says otherwise. Where `sign_f` [f] is 1 or -1, the weight of that
        feature is not negative or not positive (projected Newton). ValueError when a class is absent.
        """
        x_nf, y_n = np.asarray(x_nf, np.float64), np.asarray(y_n, np.float64)
        if not 0 < y_n.sum() < len(y_n):
            raise ValueError("the quality classifier needs examples of both classes")
        if weight_n is None:
            weight_n = np.where(y_n > 0, 0.5 / y_n.mean(), 0.5 / (1 - y_n.mean()))
            mean, scale = np.nanmean(x_nf, axis=0), np.nanstd(x_nf, axis=0) + 1e-8
        else:
            weight_n = np.asarray(weight_n, np.float64)
            known = np.isfinite(x_nf) * (weight_n / weight_n.sum())[:, None]
            filled, share = np.nan_to_num(x_nf), known.sum(axis=0) + 1e-12
            mean = (known * filled).sum(axis=0) / share
            scale = np.sqrt((known * (filled - mean) ** 2).sum(axis=0) / share) + 1e-8
        weight_n = weight_n / weight_n.sum()
        design = np.hstack([_standardised(x_nf, mean, scale), np.ones((len(x_nf), 1))])
        sign = np.append(np.zeros(x_nf.shape[1]) if sign_f is None else np.asarray(sign_f, np.float64), 0.0)
        penalty = np.full(design.shape[1], l2)
        penalty[-1] = 0.0
        beta = np.zeros(design.shape[1])

        def loss(b: np.ndarray) -> float:
            z = design @ b
            return float(weight_n @ (np.logaddexp(0, z) - y_n * z) + penalty @ b**2 / 2)

        value = loss(beta)
        for _ in range(steps):
            p = 1 / (1 + np.exp(-np.clip(design @ beta, -30, 30)))
            gradient = design.T @ (weight_n * (p - y_n)) + penalty * beta
            hessian = (design * (weight_n * p * (1 - p))[:, None]).T @ design + np.diag(penalty + 1e-9)
            free = ~((sign != 0) & (beta == 0) & (sign * gradient >= 0))  # the others stay at the border
            step = np.zeros_like(beta)
            step[free] = np.linalg.solve(hessian[np.ix_(free, free)], gradient[free])
            for size in 0.5 ** np.arange(20):
                trial = beta - size * step
                trial[sign * trial < 0] = 0.0
                if (found := loss(trial)) <= value:
                    break
            moved, beta, value = np.abs(trial - beta).max(), trial, found
            if moved < 1e-8:
                break
        return cls(mean, scale, beta[:-1], float(beta[-1]))

    def logit(self, x_nf: np.ndarray) -> np.ndarray:
        """Log odds of the positive class, float64 [n]."""
        return _standardised(np.asarray(x_nf, np.float64), self.mean_f, self.scale_f) @ self.weight_f + self.bias

    def score(self, x_nf: np.ndarray) -> np.ndarray:
        """Probability of the positive class, float64 [n], rounded to 5 decimals so that files compare equal."""
        return probability(self.logit(x_nf))


def _standardised(x_nf: np.ndarray, mean_f: np.ndarray, scale_f: np.ndarray) -> np.ndarray:
    return np.nan_to_num(np.clip((x_nf - mean_f) / scale_f, -4, 4))


def probability(logit_n: np.ndarray) -> np.ndarray:
    """Logistic function, rounded to 5 decimals."""
    return np.round(1 / (1 + np.exp(-np.clip(logit_n, -30, 30))), 5)


class QualityClassifier:
    """Up to three models of one question - is this edited, explanatory text or page furniture, spam, lists? - and their sum.

    surface: regression on `surface_features` with fixed directions. embedding: regression on static sentence embeddings
    (GLM-5, notes D.2). fasttext: bag of words and word pairs (DCLM). `quality` is the logistic function of the sum of their
    log odds, weighted by `weights`; a model that is not in `weights` is neither trained nor run.
    """

    def __init__(self, weights: Mapping[str, float], embedder: StaticEmbedder | None = None):
        unknown = set(weights) - set(MODELS)
        if unknown or not weights:
            raise ValueError(f"quality models are {', '.join(MODELS)}, found {', '.join(sorted(weights)) or 'none'}")
        if "embedding" in weights and embedder is None:
            raise ValueError("the quality model 'embedding' needs an embedder")
        self.weights = {name: float(weights[name]) for name in MODELS if name in weights}
        self.embedder = embedder
        self.regressions: dict[str, LogisticRegression] = {}
        self.fasttext: FastTextClassifier | None = None

    def _x(self, name: str, texts: Sequence[str], langs: Sequence[str]) -> np.ndarray:
        if name == "embedding":
            return self.embedder.embed(texts)
        rows = [surface_features(t, g) for t, g in zip(texts, langs, strict=True)]
        return np.array(rows, np.float64).reshape(len(texts), len(FEATURES))

    def fit(self, examples: Sequence[Example], l2: Mapping[str, float]) -> None:
        """Train every model; each source of a class weighs the same. `l2`: penalty of the two regressions."""
        texts, good = [e.text for e in examples], np.array([e.good for e in examples], bool)
        sources = Counter((e.source, e.good) for e in examples)
        weight = np.array([1 / sources[e.source, e.good] for e in examples])
        for side in (True, False):
            weight[good == side] /= max(weight[good == side].sum(), 1e-12)
        for name in self.weights:
            if name == "fasttext":
                self.fasttext = FastTextClassifier.fit(examples)
            else:
                sign = np.array([DIRECTIONS[f] for f in FEATURES]) if name == "surface" else None
                x = self._x(name, texts, ["en"] * len(texts))
                self.regressions[name] = LogisticRegression.fit(x, good, l2[name], weight_n=weight, sign_f=sign)

    def score(self, texts: Sequence[str], langs: Sequence[str], batch: int = 512) -> dict[str, np.ndarray]:
        """{"quality": ..., "quality_<model>": ...}: each in 0..1, float64 [n]."""
        logits: dict[str, list[np.ndarray]] = {name: [np.zeros(0)] for name in self.weights}
        for i in range(0, len(texts), batch):
            part, their = texts[i : i + batch], langs[i : i + batch]
            for name in self.weights:
                found = (
                    self.fasttext.logit(part)
                    if name == "fasttext"
                    else self.regressions[name].logit(self._x(name, part, their))
                )
                logits[name].append(found)
        joined = {name: np.concatenate(parts) for name, parts in logits.items()}
        total = sum(self.weights[name] * joined[name] for name in self.weights)
        return {"quality": probability(total)} | {f"quality_{n}": probability(v) for n, v in joined.items()}

    def save(self, directory: str | Path) -> None:
        """Weights as safetensors, fastText's own file, and what they belong to as JSON."""
        from safetensors.numpy import save_file

        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        for name, r in self.regressions.items():
            tensors = {"mean": r.mean_f, "scale": r.scale_f, "weight": r.weight_f, "bias": np.array([r.bias])}
            save_file(tensors, directory / f"{name}.safetensors")
        if self.fasttext:
            self.fasttext.save(directory / "fasttext.bin")
        (directory / "classifier.json").write_text(json.dumps(self._about(), indent=1) + "\n", encoding="utf-8")

    def _about(self) -> dict:
        dimension = self.embedder.dimension if "embedding" in self.weights else 0
        return {"features": list(FEATURES), "embedding": dimension, "weights": self.weights}

    @classmethod
    def load(cls, directory: str | Path, embedder: StaticEmbedder | None = None) -> QualityClassifier:
        """ValueError when the directory was saved with other features or another embedding size."""
        from safetensors.numpy import load_file

        directory = Path(directory)
        about = json.loads((directory / "classifier.json").read_text(encoding="utf-8"))
        found = cls(about["weights"], embedder) if "weights" in about else None
        if found is None or about != found._about():
            raise ValueError(f"{directory}: this classifier was trained with other features than this version computes")
        for name in found.weights:
            if name == "fasttext":
                found.fasttext = FastTextClassifier.load(directory / "fasttext.bin")
            else:
                t = load_file(directory / f"{name}.safetensors")
                found.regressions[name] = LogisticRegression(t["mean"], t["scale"], t["weight"], float(t["bias"][0]))
        return found


BINS = 100_001  # a score is rounded to 5 decimals: as many different ones


def score_bins(scores: np.ndarray | float) -> np.ndarray:
    """Number of each rounded score, int: 0 for 0.0, BINS - 1 for 1.0."""
    return np.rint(np.asarray(scores, np.float64) * (BINS - 1)).astype(np.int64)


class Quantiles:
    """Quantile buckets of any number of rounded scores in constant memory: how many scores have each value, counted."""

    def __init__(self) -> None:
        self.counts_b = np.zeros(BINS, np.int64)

    def add(self, scores: np.ndarray) -> None:
        """Count scores in 0..1 that are rounded to 5 decimals."""
        np.add.at(self.counts_b, score_bins(scores), 1)

    def table(self, count: int) -> np.ndarray:
        """Bucket of each score number, int [BINS] in 0 (lowest) .. count - 1; equal scores share the lower bucket."""
        below = np.cumsum(self.counts_b) - self.counts_b
        return np.minimum(below * count // max(1, int(self.counts_b.sum())), count - 1)

    def lower_end(self, bucket: int, count: int) -> float | None:
        """The lowest counted score of this bucket or a higher one; None when there is none."""
        found = np.flatnonzero((self.counts_b > 0) & (self.table(count) >= bucket))
        return round(float(found[0]) / (BINS - 1), 5) if len(found) else None


def main() -> None:
    classifier = QualityClassifier.load(sys.argv[1], StaticEmbedder(sys.argv[2]) if len(sys.argv) > 2 else None)
    for name, scores in classifier.score([sys.stdin.read()], ["en"]).items():
        print(f"{name:20} {scores[0]}")


if __name__ == "__main__":
    main()
