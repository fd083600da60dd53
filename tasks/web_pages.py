"""The two passes of stage web over its units, in worker processes: read and filter, then score.

A unit is one WARC file, the text files of one corpus item, or one shard of records. `read_unit` writes `<name>.pages.parquet`
(every document found, with the rule it breaks), `<name>.examples.jsonl` (passages for the quality classifiers) and
`<name>.rejects.jsonl`; `score_unit` writes `<name>.scores.parquet`, row for row beside the pages. Rows go through memory in
batches, so a unit may be larger than it. Both return JSON; a finished unit is not done again after a kill (tasks/mapshuffle.py).
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tasks.documents import COLUMNS, document, document_id
from tasks.extract import NotText, boilerplate, clean_text, decode_html, extract_page
from tasks.files import atomic_write
from tasks.filters import Bounds, Stats, measure_rules
from tasks.langid import LanguageIdentifier
from tasks.quality import QualityClassifier, StaticEmbedder
from tasks.quality_examples import Example, choose, mail_text, page_examples
from tasks.records import read_record_shard
from tasks.texts import BadFile, file_documents
from tasks.token_estimate import estimate_tokens
from tasks.warc import BadRecord, read_warc
from tasks.web_audit import Tally
from tasks.web_judges import COLUMNS as JUDGES
from tasks.web_judges import load_judges
from tasks.web_lines import bad_words, drop_lines

BATCH = 512
PAGE_SCHEMA = pa.schema(
    [(c, pa.string()) for c in COLUMNS]
    + [("lang_score", pa.float64()), ("removed", pa.string()), ("removed_value", pa.float64())]
    + [("tokens", pa.int64()), ("dropped_lines", pa.string())]
)


@dataclass(frozen=True)
class Rules:
    """What a page must satisfy; in this order."""

    min_chars: int
    min_lang_score: float
    languages: tuple[str, ...]
    filters: dict[str, Bounds]
    lines: dict[str, bool | int] = field(default_factory=dict)
    bad_words: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ReadTask:
    """One unit. `rows` are rows of the corpus index: of the pages of a WARC file by URL, or of the files of an item."""

    name: str
    kind: str  # warc | texts | records
    path: str  # of the WARC file or shard; the acquired corpus for texts
    rows: tuple[dict[str, Any], ...]
    model: str
    folder: str
    rules: Rules
    sources: dict[str, tuple[str, str]]  # corpus item -> (source of examples, its kind)
    examples: int


@dataclass
class Found:
    """A document as its reader gives it. `filtered`: whether the rules apply to it."""

    row: dict[str, Any]
    filtered: bool
    item: str = ""
    furniture: str | None = None


@dataclass
class Bad:
    """A record that is none; or, with reason "", a passage source that is no document."""

    record_id: str
    reason: str
    detail: str


# ---- readers: unit -> Found | Bad | Example ----------------------------------------------------------------------


def item_name(package: str) -> str:
    """`<registry>/<name>/<version>` -> the package's name."""
    return package.partition("/")[2].rpartition("/")[0]


def _document(text: str, source: str, domain: str, url: str, meta: dict, identifier: LanguageIdentifier) -> dict:
    lang, score, shares = identifier.identify_page(text)
    meta = meta | {"languages": shares} if shares else meta  # of a mixed page
    return document(text, source, domain, url=url, lang=lang, meta=meta, lang_score=score)


def _read_warc(task: ReadTask, identifier: LanguageIdentifier) -> Iterator[Found | Bad]:
    about = {row["target"]: row for row in task.rows if row["kind"] == "html"}
    shard = next((row for row in task.rows if row["kind"] == "warc"), {})
    for record in read_warc(task.path):
        if isinstance(record, BadRecord):
            yield Bad(record.record_id, record.reason, record.detail)
            continue
        try:
            page = extract_page(record.body, record.charset)
        except NotText as error:
            yield Bad(record.url, "not_text", str(error))
            continue
        row = about.get(record.url) or shard
        item = row.get("item") or item_name(record.package)
        named = {
            "title": page.title,
            "charset": page.charset,
            "declared_lang": page.declared_lang,
            "label": record.label,
        }
        meta = {k: v for k, v in named.items() if v}
        meta |= {"licence": row.get("licence", ""), "licence_file": row.get("licence_file", "")}
        found = _document(page.text, record.package or item or "warc", "web", record.url, meta, identifier)
        kind = task.sources.get(item, ("", ""))[1]
        rest = boilerplate(record.body, page.text, record.charset) if kind in ("edited", "furniture") else None
        yield Found(found, True, item, rest)


def _read_texts(task: ReadTask, identifier: LanguageIdentifier) -> Iterator[Found | Bad | Example]:
    for row in task.rows:
        if row["use"] == "negative":
            name, kind = task.sources[row["item"]]
            text = mail_text((Path(task.path) / row["path"]).read_bytes())
            if identifier.identify(text)[0] == "en":
                yield from page_examples(name, kind, row["sha256"], text)
            continue
        for found in file_documents(Path(task.path), row):
            if isinstance(found, BadFile):
                yield Bad(found.record_id, found.reason, found.detail)
                continue
            meta = {"title": found["title"], "licence": row["licence"], "licence_file": row["licence_file"]}
            source = f"{row['item']}/{row['version']}"
            yield Found(
                _document(found["text"], source, row["domain"], found["url"], meta, identifier), False, row["item"]
            )


def _read_records(task: ReadTask, identifier: LanguageIdentifier) -> Iterator[Found | Bad]:
    for record in read_record_shard(task.path, ("html", "text")):
        try:
            if record.kind == "html":
                page = extract_page(record.content, record.charset)
                text, charset, title, declared = page.text, page.charset, page.title, page.declared_lang or record.lang
            else:
                text, charset = decode_html(record.content, record.charset)
                text, title, declared = clean_text(text), "", record.lang
        except NotText as error:
            yield Bad(record.id, "not_text", f"{record.source}: {record.url or record.path}: {error}")
            continue
        named = {
            "title": title,
            "charset": charset,
            "declared_lang": declared,
            "path": record.path,
            "record": record.id,
        }
        meta = record.meta | {k: v for k, v in named.items() if v} | {"licence": record.licence}
        domain = meta.get("domain", "web") if record.kind == "text" else "web"  # as the source in params.yaml says
        found = _document(text, record.source or "records", domain, record.url or record.path, meta, identifier)
        yield Found(found, domain == "web")


_READERS = {"warc": _read_warc, "texts": _read_texts, "records": _read_records}


# ---- pass 1 ------------------------------------------------------------------------------------------------------


def violation(rules: Rules, row: dict[str, Any], tally: Tally) -> tuple[str, float] | None:
    """(reason, value) of the first of length, language and the filters that a page breaks, or None."""
    text, lang, score = row["text"], row["lang"], row["lang_score"]
    if len(text) < rules.min_chars:
        return "min_chars", len(text)
    if not lang or score < rules.min_lang_score:
        return "language_unclear", score
    if rules.languages and lang not in rules.languages:
        return "language_not_wanted", score
    if rules.bad_words and (found := bad_words(text, lang, rules.bad_words)):
        return "bad_words", found
    broken, values = measure_rules(Stats(text, lang), rules.filters)
    tally.measured(row, values, rules.filters, broken[0] if broken else "")
    return broken


def cut_lines(row: dict[str, Any], rules: dict[str, bool | int]) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """(the page without the lines that `rules` drop, {rule: those lines}); its id is that of the text that is left."""
    text, dropped = drop_lines(row["text"], row["lang"], rules)
    return (row | {"text": text, "id": document_id(row["source"], text)} if dropped else row), dropped


def read_unit(task: ReadTask) -> dict[str, Any]:
    """Documents, examples and rejects of one unit to its files; returns the counts and the tally."""
    folder = Path(task.folder)
    identifier = _identifier(task.model)
    tally, seen, bad, pages = Tally(), 0, [], 0
    examples: list[Example] = []
    with _writer(folder / f"{task.name}.pages.parquet", PAGE_SCHEMA) as write:
        for found in _READERS[task.kind](task, identifier):
            if isinstance(found, Example):
                examples.append(found)
                continue
            seen += 1
            if isinstance(found, Bad):
                bad.append({"id": found.record_id, "reason": found.reason, "detail": found.detail[:2000]})
                continue
            row, dropped = found.row, {}
            if found.filtered and task.rules.lines:
                row, dropped = cut_lines(row, task.rules.lines)
            broken = violation(task.rules, row, tally) if found.filtered else None
            verdict = {"removed": broken[0] if broken else None, "removed_value": broken[1] if broken else None}
            verdict |= {"tokens": estimate_tokens(row["text"])}
            verdict |= {"dropped_lines": json.dumps(dropped, ensure_ascii=True) if dropped else None}
            write(row | verdict)
            pages += 1
            if found.item in task.sources and row["lang"] in ("en", ""):
                name, kind = task.sources[found.item]
                examples += page_examples(name, kind, row["id"], row["text"], found.furniture or "")
            if len(examples) > 8 * task.examples:
                examples = choose(examples, task.examples)
    lines = (json.dumps(e._asdict(), ensure_ascii=True) + "\n" for e in choose(examples, task.examples))
    atomic_write(folder / f"{task.name}.examples.jsonl", "".join(lines))
    atomic_write(folder / f"{task.name}.rejects.jsonl", "".join(json.dumps(x, ensure_ascii=True) + "\n" for x in bad))
    return {"seen": seen, "pages": pages, "tally": tally.as_json()}


@lru_cache(maxsize=1)
def _identifier(model: str) -> LanguageIdentifier:
    return LanguageIdentifier(model)


@contextmanager
def _writer(path: Path, schema: pa.Schema) -> Iterator:
    """A function that takes rows; the file appears, whole, at the end."""
    path.parent.mkdir(parents=True, exist_ok=True)
    staging = path.with_name(f".{path.name}.{os.getpid()}.partial")
    rows: list[dict[str, Any]] = []
    with pq.ParquetWriter(staging, schema, compression="zstd", compression_level=1) as writer:

        def flush() -> None:
            writer.write_table(pa.Table.from_pylist(rows, schema=schema))
            rows.clear()

        def write(row: dict[str, Any]) -> None:
            rows.append(row)
            if len(rows) >= BATCH:
                flush()

        yield write
        flush()
    os.replace(staging, path)


# ---- pass 2 ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ScoreTask:
    """Score one unit's documents: `classifier`, `judges`: folders or ""; `embedder`: of the static embeddings, or ""."""

    name: str
    folder: str
    classifier: str
    embedder: str
    judges: str = ""


def score_columns(classifier: QualityClassifier) -> list[str]:
    """The columns that a classifier's scores have in the documents."""
    return ["quality", *(f"quality_{name}" for name in classifier.weights)]


def score_unit(task: ScoreTask) -> dict[str, Any]:
    """Scores of every document of a unit that the rules kept (null for the others), in the order of the pages.

    Quality of all; the judges' columns (tasks/web_judges.py) of web pages.
    """
    classifier = load_classifier(task.classifier, task.embedder) if task.classifier else None
    judges = load_judges(task.judges, task.embedder) if task.judges else None
    quality = score_columns(classifier) if classifier else []
    columns = [*quality, *(JUDGES if judges else ())]
    counts: Counter[str] = Counter()
    folder = Path(task.folder)
    with _writer(folder / f"{task.name}.scores.parquet", pa.schema([(c, pa.float64()) for c in columns])) as write:
        for batch in iter_batches(folder / f"{task.name}.pages.parquet", ["text", "lang", "domain", "removed"]):
            kept = [i for i, row in enumerate(batch) if row["removed"] is None]
            table = {c: np.full(len(batch), np.nan) for c in columns}
            if classifier:
                scores = classifier.score([batch[i]["text"] for i in kept], [batch[i]["lang"] for i in kept])
                for column in quality:
                    table[column][kept] = scores[column]
            if judges and (web := [i for i in kept if batch[i]["domain"] == "web"]):
                for column, values in judges.score([batch[i]["text"] for i in web]).items():
                    table[column][web] = values
            for i in range(len(batch)):
                write({c: None if np.isnan(table[c][i]) else float(table[c][i]) for c in columns})
            counts["scored"] += len(kept)
    return dict(counts)


@lru_cache(maxsize=1)
def load_classifier(directory: str, embedder: str) -> QualityClassifier:
    return QualityClassifier.load(directory, StaticEmbedder(embedder) if embedder else None)


def iter_batches(path: Path, columns: list[str] | None = None) -> Iterator[list[dict[str, Any]]]:
    """The rows of a unit's file, BATCH at a time."""
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=BATCH, columns=columns):
            yield batch.to_pylist()
