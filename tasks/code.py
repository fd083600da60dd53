"""Source files to documents of domain code (paper section 2.2).

    python -m tasks code

Reads the files that data/acquire/index.parquet marks with one of `domains` and the records of kind code in data/ingest, and
takes both the same way: records of an archive export are first aligned with their metadata (tasks/swh_align.py, report in
data/code/alignment.json); then the language by name and content (tasks/code_lang.py), the rules for files that no person
wrote here (tasks/code_kinds.py), the licence (tasks/licences.py), the quality tier (tasks/code_quality.py), the budget, and
the redaction of secrets (tasks/secrets.py). A share of each repository becomes repository-level documents in the order of
its imports (tasks/repo_order.py). What a rule removes is in data/code/exclusions with reason and score; files that do not
decode are in rejects; languages.csv and licences.csv count what is left. Fill-in-the-middle happens in `pack`, so that
deduplication and decontamination see the files as they are.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import xxhash
from pydantic import Field

from tasks import code_kinds, code_lang, code_quality, code_tables, documents, licences, repo_documents, secrets
from tasks.code_text import decode, is_training_file
from tasks.records import Record, read_records
from tasks.stage import Stage
from tasks.swh_align import Aligner, is_export, repository
from tasks.texts import read_index


class Config(code_kinds.KindRules):
    domains: tuple[str, ...] = Field(("code",), description="domains of the index whose files are source code")
    licences_allowed: tuple[str, ...] = Field((), description="SPDX identifiers, `GPL-*` for a family; empty: all")
    licences_denied: tuple[str, ...] = Field((), description="SPDX identifiers that exclude a file")
    unknown_licence: bool = Field(True, description="keep files whose licence is not known")
    drop_tiers: tuple[str, ...] = Field(("low",), description="quality tiers left out: low, medium, high")
    redact: bool = Field(True, description="replace secrets and personal data by placeholders")
    align_reach: int = Field(16, ge=0, description="rows by which a column of an export may have been shifted")
    repo_share: float = Field(0.03, ge=0, le=1, description="share of file groups put together as repository documents")
    repo_chars: int = Field(60_000, ge=1000, description="characters of a repository document")
    max_mb: float = Field(
        0.0, ge=0, description="budget in MB of source text, filled by a hash of the ids; 0: no limit"
    )
    max_language_share: float = Field(1.0, gt=0, le=1, description="largest share of the budget for one language")


@dataclass
class SourceFile:
    """One file before it is a document."""

    repo: str
    path: str
    data: bytes
    source: str
    url: str = ""
    licence: str = ""  # as declared
    lang: str = ""
    charset: str = ""
    origin: str = ""  # for rejects
    meta: dict[str, Any] = field(default_factory=dict)


def _corpus(stage: Stage) -> Iterator[SourceFile]:
    acquired = stage.dep("data/acquire")
    for row in read_index(acquired):
        if row["domain"] in stage.config.domains and is_training_file(row):
            inner = row.get("member") or row["path"].removeprefix("files/").partition("/")[2]
            source = f"{row['item']}/{row['version']}/{inner}"
            try:
                data = (acquired / row["path"]).read_bytes()
            except OSError as error:
                stage.reject(row["path"], "unreadable", str(error))
                continue
            yield SourceFile(row["item"], inner, data, source, row.get("url") or "", row["licence"], origin=row["path"])


def _ingested(stage: Stage, excluded: documents.Exclusions, reports: dict[str, dict]) -> Iterator[SourceFile]:
    """The user's records; those of an export aligned, one source after another."""
    aligners: dict[str, Aligner] = {}

    def reject(record: Record, reason: str, detail: str) -> None:
        head = record.content[:200].decode("utf-8", "replace")
        place = f"{record.source}/{record.path or record.id}"
        excluded.add({"source": place, "text": f"{detail}\n{head}"}, f"align_{reason}")

    records = read_records(stage.dep("data/ingest"), kinds=("code",))
    for (source, export), group in groupby(records, key=lambda r: (r.source, is_export(r))):
        if export:
            aligner = aligners.setdefault(source, Aligner(reject, reach=stage.config.align_reach))
            group = aligner.run(group)
        for record in group:
            repo = repository(record) or source
            place = f"{source}/{record.path or record.id}" if repo == source else f"{source}/{repo}/{record.path}"
            yield SourceFile(
                repo, record.path or record.id, record.content, place, record.url, record.licence, record.lang.lower(),
                record.charset, f"{source}:{record.path or record.id}", {"record": record.id},
            )  # fmt: skip
    reports |= {source: aligner.report.as_dict() for source, aligner in aligners.items()}


def _licence_folders(stage: Stage) -> dict[str, dict[str, str]]:
    """repo -> {folder: expression} of the licence files in both inputs; only these files are read."""
    texts: dict[str, dict[str, str]] = defaultdict(dict)
    acquired = stage.dep("data/acquire")
    for row in read_index(acquired):
        name = row.get("member") or row["path"].removeprefix("files/").partition("/")[2]
        if row["domain"] in stage.config.domains and is_training_file(row) and licences.is_licence_file(name):
            texts[row["item"]][name] = (acquired / row["path"]).read_bytes()[:200_000].decode("utf-8", "replace")
    for record in read_records(stage.dep("data/ingest"), kinds=("code", "text")):
        if licences.is_licence_file(record.path):
            repo = repository(record) or record.source
            texts[repo][record.path] = record.content[:200_000].decode("utf-8", "replace")
    return {repo: licences.by_folder(found) for repo, found in sorted(texts.items())}


def licence(text: str, path: str, declared: str, folders: dict[str, str]) -> tuple[str, str]:
    """(SPDX expression or the declared label, where it is from: file, folder, package, or "" for none)."""
    own = licences.header(text)
    if own:
        return own, "file"
    stated, above = licences.normalise(declared), licences.inherited(path, folders)
    # A licence file may bundle others' terms: what the package states of itself stands unless the file knows nothing of it.
    if above and licences.ids(stated).isdisjoint(licences.ids(above)):
        return above, "folder"
    return (stated or declared, "package") if declared else ("", "")


def _candidates(stage: Stage, excluded: documents.Exclusions, reports: dict[str, dict]) -> Iterator[dict]:
    config: Config = stage.config
    folders = _licence_folders(stage)

    def everything() -> Iterator[SourceFile]:
        yield from _corpus(stage)
        yield from _ingested(stage, excluded, reports)

    for file in stage.progress(everything(), label="files"):
        stage.seen()
        try:
            large = len(file.data) > config.max_bytes  # not worth decoding: the size alone excludes it
            text = file.data[:1000].decode("utf-8", "replace") if large else decode(file.data, file.charset)
        except ValueError as error:
            stage.reject(file.origin, "unreadable", str(error))
            continue
        language, how = code_lang.detect(file.path, text)
        if not language and file.lang:
            language, how = file.lang, "declared"
        problem = code_kinds.fault(file.path, text, len(file.data), language, config)
        if problem:
            excluded.add({"source": file.source, "text": text}, *problem)
            continue
        name, origin = licence(text, file.path, file.licence, folders.get(file.repo, {}))
        if not licences.permitted(name, config.licences_allowed, config.licences_denied, config.unknown_licence):
            excluded.add({"source": file.source, "text": text}, "licence" if name else "licence_unknown")
            continue
        quality, tier, model = code_quality.assess([text], [language])[0]
        if tier in config.drop_tiers:
            excluded.add({"source": file.source, "text": text}, f"{tier}_quality", quality)
            continue
        meta = {"path": file.path, "language_by": how, "licence": name, "licence_from": origin, "item": file.repo}
        meta |= {"tier": tier, "quality_model": model, **file.meta}
        yield documents.document(
            text, file.source, "code", url=file.url, lang=language, meta=meta, quality=quality,
            quality_tier=float(code_quality.TIERS.index(tier)),
        )  # fmt: skip


def _within_budget(rows: list[dict], config: Config, excluded: documents.Exclusions) -> list[dict]:
    """The rows that fit `max_mb`: the user's own first, then the corpus's in the order of a hash."""
    total, per_language = config.max_mb * 1e6, config.max_mb * 1e6 * config.max_language_share
    used, kept = Counter(), set()
    own = ["record" in json.loads(row["meta"]) for row in rows]
    order = sorted(
        range(len(rows)), key=lambda i: (not own[i], xxhash.xxh3_64_intdigest(rows[i]["id"].encode(), seed=1), i)
    )
    for i in order:
        size = len(rows[i]["text"].encode())
        if used["all"] + size <= total and used["lang", rows[i]["lang"]] + size <= per_language:
            used["all"] += size
            used["lang", rows[i]["lang"]] += size
            kept.add(i)
        else:
            excluded.add(rows[i], "over_budget", size)
    return [row for i, row in enumerate(rows) if i in kept]


def _redacted(row: dict, counts: Counter[str]) -> dict:
    """`row` with placeholders in place of secrets; its id follows its text."""
    text, found = secrets.redact(row["text"])
    if not found:
        return row
    counts += found
    meta = json.loads(row["meta"]) | {"redacted": dict(sorted(found.items()))}
    scores = {k: row[k] for k in ("quality", "quality_tier")}
    return documents.document(text, row["source"], "code", url=row["url"], lang=row["lang"], meta=meta, **scores)


def run(stage: Stage) -> None:
    config: Config = stage.config
    out = stage.out("data/code")
    reports: dict[str, dict] = {}
    redacted: Counter[str] = Counter()
    tables = code_tables.Tables()
    with documents.Exclusions(out) as excluded:
        rows = _candidates(stage, excluded, reports)
        if config.repo_share:
            rows = repo_documents.combine_runs(rows, config.repo_share, config.repo_chars)
        if config.max_mb:  # only a budget needs every candidate at once
            rows = _within_budget(list(rows), config, excluded)

        def finished() -> Iterator[dict]:
            for row in rows:
                row = _redacted(row, redacted) if config.redact else row
                tables.add(row)
                yield row

        written = documents.write_documents(out, finished())
    counted = tables.write(out)
    (out / "alignment.json").write_text(json.dumps(reports, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    stage.rows(documents=written["documents"], excluded=sum(excluded.counts.values()))
    stage.metric(
        documents=written["documents"],
        bytes=written["bytes"],
        removed=dict(sorted(excluded.counts.items())),
        redacted=dict(sorted(redacted.items())),
        alignment={source: {k: r[k] for k in ("found", "repaired", "rejected")} for source, r in reports.items()},
        **counted,
    )
    stage.print(
        f"{written['documents']} files in {counted['languages']['count']} languages, removed {dict(excluded.counts)}"
    )
