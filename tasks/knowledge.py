"""World knowledge: a classifier that rescues long-tail knowledge from pages of medium and low quality (GLM-5, notes D.2).

    python -m tasks.knowledge data/web/knowledge data/acquire/models/potion-base-8M < page.txt

Positives are encyclopedia entries. Pages are unlabelled, not negative: some hold knowledge. So the training is PU learning
with spies (Liu et al., ICML 2002): a first regression tells entries from pages, with a share of the entries hidden among
the pages as spies; pages that score below nearly all spies are reliable negatives; the second regression tells entries from
those alone. Where a language model has labelled pages (tasks/labeller.py), its labels stand: 3 and above is knowledge, 0
and 1 is not, 2 is left out. Both classes are passages of the same length bounds, as static sentence embeddings.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from tasks.passages import load_regression, save_regression, score_passages, split_passages, spread
from tasks.quality import LogisticRegression, StaticEmbedder

MIN_CHARS = 120  # shorter passages say too little


class KnowledgeConfig(BaseModel):
    """The classifier and what its score decides."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    threshold: float = Field(0.9, ge=0, le=1, description="a page of a dropped bucket is kept at this score or above")
    examples: int = Field(4000, ge=10, description="at most this many passages of entries, and of pages")
    chars: int = Field(600, ge=MIN_CHARS, description="length of a passage")
    passages: int = Field(16, ge=1, description="passages of a document that are scored, evenly spread")
    l2: float = Field(0.01, ge=0, description="penalty of the regression, per example")
    spies: float = Field(0.15, gt=0, lt=1, description="share of the entries that spies among the pages")
    spy_quantile: float = Field(
        0.05, gt=0, lt=1, description="pages scored below this quantile of the spies are reliable negatives"
    )


def top_half(scores: np.ndarray, lengths: np.ndarray) -> float:
    """Length-weighted mean of the better half of the passages: furniture around the knowledge does not count against it."""
    order = np.argsort(-scores, kind="stable")
    order = order[: (len(order) + 1) // 2]
    return float(np.average(scores[order], weights=lengths[order]))


class KnowledgeClassifier:
    """Static embeddings and a regression over passages."""

    def __init__(self, embedder: StaticEmbedder, config: KnowledgeConfig, regression: LogisticRegression | None = None):
        self.embedder, self.config, self.regression = embedder, config, regression

    def examples(self, texts: Sequence[str], limit: int) -> tuple[list[str], list[int]]:
        """(passages, index of each one's text): up to two of each text, spread evenly over the texts to at most `limit`."""
        pairs = [
            (passage[: 2 * self.config.chars], index)
            for index, text in enumerate(texts)
            for passage in spread(split_passages(text, self.config.chars), 2)
            if len(passage) >= MIN_CHARS
        ]
        pairs = spread(pairs, limit)
        return [p for p, _ in pairs], [i for _, i in pairs]

    def fit(
        self, entries: Sequence[str], pages: Sequence[str], labels: Mapping[int, int] | None = None
    ) -> dict[str, int]:
        """Train; `labels` maps the index of a page to a language model's score 0..5. Returns the counts for the metrics.

        ValueError when there are fewer than 10 passages of a class.
        """
        config, labels = self.config, labels or {}
        positives, _ = self.examples(entries, config.examples)
        unlabelled, owners = self.examples(pages, config.examples)
        if min(len(positives), len(unlabelled)) < 10:
            raise ValueError(
                f"knowledge: {len(positives)} passages of encyclopedia entries and {len(unlabelled)} of pages; 10 of each needed"
            )
        p, u = self.embedder.embed(positives), self.embedder.embed(unlabelled)
        period = round(1 / config.spies)
        spies = np.arange(len(p)) % period == 0
        x = np.vstack([p[~spies], p[spies], u])
        first = LogisticRegression.fit(x, np.arange(len(x)) < (~spies).sum(), config.l2)
        limit = float(np.quantile(first.score(p[spies]), config.spy_quantile))
        below = first.score(u)
        reliable = below < limit
        if reliable.sum() < 10:  # the pages look like entries throughout: the least similar quarter has to do
            reliable = below <= np.quantile(below, 0.25)
        told = np.array([labels.get(i, -1) for i in owners])
        negative = np.where(told >= 0, told <= 1, reliable)
        taught = told >= 3
        x = np.vstack([p, u[taught], u[negative]])
        self.regression = LogisticRegression.fit(x, np.arange(len(x)) < len(p) + taught.sum(), config.l2)
        return {
            "entries": len(positives),
            "pages": len(unlabelled),
            "reliable_negatives": int(reliable.sum()),
            "labelled": int((told >= 0).sum()),
            "labelled_knowledge": int(taught.sum()),
        }

    def score(self, texts: Sequence[str]) -> np.ndarray:
        """Knowledge in 0..1 of each text, float64 [n]."""
        config = self.config

        def passages(batch: list[str]) -> np.ndarray:
            vectors = self.embedder.embed(batch)
            return np.where(
                vectors.any(axis=1), self.regression.score(vectors), 0.0
            )  # no known token: nothing is known

        return score_passages(texts, config.chars, config.passages, passages, top_half)

    def _about(self) -> dict:
        return {"embedding": self.embedder.dimension, "chars": self.config.chars, "passages": self.config.passages}

    def save(self, directory: str | Path) -> None:
        save_regression(directory, "knowledge", self.regression, self._about())

    @classmethod
    def load(cls, directory: str | Path, embedder: StaticEmbedder, config: KnowledgeConfig) -> KnowledgeClassifier:
        """ValueError when it was saved for another embedding or other passages."""
        found = cls(embedder, config)
        found.regression = load_regression(directory, "knowledge", found._about())
        return found


def main() -> None:
    classifier = KnowledgeClassifier.load(sys.argv[1], StaticEmbedder(sys.argv[2]), KnowledgeConfig())
    print(classifier.score([sys.stdin.read()])[0])


if __name__ == "__main__":
    main()
