"""The judges of stage web: world knowledge, educational value and machine-made text, trained and run between its two passes.

    python -m tests.bench.judges           what each is worth

`train` learns from what the first pass found and puts the models where the workers of the second pass find them; `Judges`
scores pages there. Only pages of domain web are judged: encyclopedia and prose enter the line as they are.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict, Field

from tasks.educational import EducationalConfig, EducationalScorer, label_metrics, train_scorer
from tasks.files import atomic_dir
from tasks.knowledge import KnowledgeClassifier, KnowledgeConfig
from tasks.labeller import RUBRICS, Labeller, LabellerConfig
from tasks.machine_text import MachineTextConfig, MachineTextDetector, TemplateCounter
from tasks.quality import StaticEmbedder

COLUMNS = ("knowledge", "educational", "machine_text", "template")
MACHINE_STEPS = ("machine_text", "template")  # the columns that remove a page, in this order


class JudgesConfig(BaseModel):
    """What judges pages beside their quality. A judge that is null does not sit."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    labeller: LabellerConfig = Field(LabellerConfig(), description="a language model to distil labels from")
    knowledge: KnowledgeConfig | None = KnowledgeConfig()
    educational: EducationalConfig | None = EducationalConfig()
    machine_text: MachineTextConfig | None = MachineTextConfig()


class Sample:
    """The `size` texts with the smallest ids: the same whatever the order they come in, in bounded memory."""

    def __init__(self, size: int):
        self.size = size
        self._rows: dict[str, str] = {}

    def add(self, identity: str, text: str) -> None:
        self._rows[identity] = text
        if len(self._rows) > 4 * self.size:
            self._rows = dict(sorted(self._rows.items())[: self.size])

    def texts(self) -> list[str]:
        return [text for _, text in sorted(self._rows.items())[: self.size]]


def _kept(paths: Sequence[str | Path]) -> Iterator[dict[str, Any]]:
    """Rows of the first pass that no rule removed."""
    for path in paths:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=512, columns=["id", "text", "domain", "lang", "removed"]):
                yield from (row for row in batch.to_pylist() if row["removed"] is None)


def train(
    config: JudgesConfig, pages: Sequence[Path], acquired: Path, embedder: Path | None, folder: Path, cache: Path
) -> dict[str, Any]:
    """Train the judges on the first pass's files `pages` into `folder`; the numbers for the metrics.

    What cannot be trained (no embedding model, too few entries or pages) is left out and named.
    """
    static = StaticEmbedder(embedder) if embedder else None
    size = max(100, config.knowledge.examples if config.knowledge else 0)
    samples = {domain: Sample(size) for domain in ("encyclopedia", "prose", "web")}
    counter = TemplateCounter()
    for row in _kept(pages):
        if row["domain"] in samples:
            samples[row["domain"]].add(row["id"], row["text"])
        if row["domain"] == "web" and config.machine_text:
            counter.add([row["text"]])
    web = samples["web"].texts()
    metrics: dict[str, Any] = {}
    with atomic_dir(folder) as out:
        if config.machine_text:
            counter.save(out / "templates.npy")
        if config.knowledge:
            metrics["knowledge"] = _train_knowledge(config, static, samples, out, cache)
        if config.educational:
            scorer, metrics["educational"] = train_scorer(
                acquired, static, config.educational, config.labeller, cache, web
            )
            if scorer:
                scorer.save(out)
        (out / "judges.json").write_text(json.dumps(config.model_dump(mode="json"), indent=1) + "\n", encoding="utf-8")
    return metrics


def _train_knowledge(
    config: JudgesConfig, static: StaticEmbedder | None, samples: dict[str, Sample], out: Path, cache: Path
) -> dict[str, Any]:
    if static is None:
        return {"labels": "none: no embedding model in data/acquire/models"}
    classifier = KnowledgeClassifier(static, config.knowledge)
    web, about, labels = samples["web"].texts(), {"labels": "encyclopedia positives alone"}, {}
    if config.labeller.base_url:
        result = Labeller(config.labeller, cache).label(web[: config.labeller.documents], RUBRICS["knowledge"])
        labels = {i: score for i, score in enumerate(result.scores) if score is not None}
        about = {"labels": "encyclopedia positives and a language model"} | label_metrics(result)
    try:
        about |= classifier.fit(samples["encyclopedia"].texts(), web + samples["prose"].texts(), labels)
    except ValueError as error:
        return {"labels": f"none: {error}"}
    classifier.save(out)
    return about


class Judges:
    """What `train` wrote to `folder`, ready to score."""

    def __init__(self, folder: str | Path, embedder: str = ""):
        folder = Path(folder)
        config = JudgesConfig.model_validate_json((folder / "judges.json").read_text(encoding="utf-8"))
        static = StaticEmbedder(embedder) if embedder else None
        self.config, self.knowledge, self.educational, self.detector = config, None, None, None
        if config.knowledge and (folder / "knowledge.json").is_file():
            self.knowledge = KnowledgeClassifier.load(folder, static, config.knowledge)
        if config.educational and (folder / "educational.json").is_file():
            self.educational = EducationalScorer.load(folder, static, config.educational)
        if config.machine_text:
            self.detector, self.counter = MachineTextDetector(), TemplateCounter.load(folder / "templates.npy")

    def score(self, texts: Sequence[str]) -> dict[str, np.ndarray]:
        """The columns named in COLUMNS, float64 [n] each; nan where no judge sits or a text is too short for it."""
        scores = {column: np.full(len(texts), np.nan) for column in COLUMNS}
        if self.knowledge:
            scores["knowledge"] = self.knowledge.score(texts)
        if self.educational:
            scores["educational"] = self.educational.score(texts)
        if self.detector:
            rules = self.config.machine_text
            long = np.array([len(text) >= rules.min_chars for text in texts], bool)
            scores["machine_text"][long] = self.detector.score([t for t, keep in zip(texts, long) if keep])
            scores["template"] = np.array([self.counter.share(t, rules.template_documents) for t in texts])
        return scores


@lru_cache(maxsize=1)
def load_judges(folder: str, embedder: str) -> Judges:
    return Judges(folder, embedder)


@lru_cache(maxsize=1)
def _own_threshold() -> float:
    return MachineTextDetector().threshold


def machine_made(config: JudgesConfig, row: dict[str, Any]) -> tuple[str, float] | None:
    """(step, value) of the first limit on machine-made text that a scored row reaches, or None."""
    rules = config.machine_text
    if rules is None:
        return None
    limits = (_own_threshold() if rules.threshold is None else rules.threshold, rules.template_share)
    for step, limit in zip(MACHINE_STEPS, limits):
        value = row.get(step)
        if value is not None and value >= limit:
            return step, value
    return None


def rescued(config: JudgesConfig, row: dict[str, Any]) -> bool:
    """Whether the knowledge in a page of a dropped bucket keeps it."""
    value = row.get("knowledge")
    return config.knowledge is not None and value is not None and value >= config.knowledge.threshold
