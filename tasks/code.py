"""Source files to documents of domain code (paper section 2.2: rule filters, language identification).

    python -m tasks code

Reads the files that data/acquire/index.parquet marks with one of `domains`; tells each one's language from its name and its
content (tasks/code_lang.py), applies rule filters, and records the licence of every file: its own SPDX line where there is
one, that of its package otherwise. What a rule removes is in data/code/exclusions with reason and score; files that do not
decode are in rejects. Fill-in-the-middle happens on tokens, in `pack`, so that deduplication and decontamination see the
files as they are.
"""

from __future__ import annotations

import codecs
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import PurePosixPath

import xxhash
from pydantic import Field

from tasks import code_lang, documents
from tasks.stage import Stage, StageConfig
from tasks.texts import read_index

_SPDX = re.compile(r"SPDX-License-Identifier:\s*([\w.+ ()-]+?)\s*(?:\*/|-->|$)", re.MULTILINE)
_GENERATED = re.compile(
    r"(?i)(auto-?\s?generated|generated (by|from|with|using|automatically)|@generated|do not edit|do not modify this file"
    r"|machine generated|this file (is|was) (created|produced) by)"
)
_CODING = re.compile(rb"coding[=:]\s*([-\w.]+)")
_BLOB = re.compile(r"[0-9a-fA-F]{128,}|[A-Za-z0-9+/]{200,}|(?:0x[0-9a-fA-F]{1,8},\s*){40,}")


class Config(StageConfig):
    domains: tuple[str, ...] = Field(("code",), description="domains of the index whose files are source code")
    min_bytes: int = Field(128, ge=0)
    max_bytes: int = Field(262_144, ge=1, description="larger files are mostly data or generated")
    max_line: int = Field(1000, ge=1, description="characters in the longest line")
    max_mean_line: float = Field(100.0, gt=0, description="characters per non-empty line")
    min_alphanumeric: float = Field(0.25, ge=0, le=1, description="share of letters and digits among the characters")
    max_blob_share: float = Field(0.3, ge=0, le=1, description="share of characters in hexadecimal or base64 runs")
    vendored: tuple[str, ...] = Field(
        ("node_modules", "_vendor", "vendor", "bower_components", "site-packages", "testdata"),
        description="folder names whose content belongs to another project",
    )
    languages_excluded: tuple[str, ...] = Field(("html", "postscript"), description="languages left to other stages")
    max_mb: float = Field(
        0.0, ge=0, description="budget in MB of source text, filled by a hash of the ids; 0: no limit"
    )
    max_language_share: float = Field(1.0, gt=0, le=1, description="largest share of the budget for one language")


def decode(data: bytes) -> str:
    """Text of a source file: byte order marks and Python's coding line are honoured, else UTF-8.

    Line ends become \\n. ValueError tells why a file is no text.
    """
    encoding = "utf-8"
    for mark, name in (
        (codecs.BOM_UTF8, "utf-8-sig"),
        (codecs.BOM_UTF16_LE, "utf-16"),
        (codecs.BOM_UTF16_BE, "utf-16"),
    ):
        if data.startswith(mark):
            encoding = name
            break
    else:
        if b"\0" in data:
            raise ValueError("holds NUL bytes: not a text file")
        declared = _CODING.search(b"\n".join(data.split(b"\n", 2)[:2]))
        if declared:
            encoding = declared.group(1).decode("ascii")
    try:
        text = data.decode(encoding)
    except (UnicodeDecodeError, LookupError) as error:
        raise ValueError(f"does not decode as {encoding}: {error}") from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def licence(text: str, package_licence: str) -> tuple[str, str]:
    """(licence, "file" or "package") of a source file."""
    found = _SPDX.search(text[:4000])
    return (found.group(1).strip(), "file") if found else (package_licence, "package")


def fault(path: str, text: str, size: int, language: str, config: Config) -> tuple[str, float] | None:
    """The first rule that a file breaks, as (reason, the number compared), or None."""
    if size > config.max_bytes:
        return "too_large", size
    if size < config.min_bytes:
        return "too_small", size
    if language in code_lang.DATA_KINDS:
        return f"{language}_file", size
    if not language:
        return "unknown_language", size
    if language in config.languages_excluded:
        return "language_excluded", size
    folders = set(PurePosixPath(path).parts[:-1])
    if folders & set(config.vendored):
        return "vendored", size
    if re.search(r"[.-]min\.(js|css)$", path):
        return "minified", size
    lines = [line for line in text.split("\n") if line.strip()]
    if not lines:
        return "too_small", 0
    longest, mean = max(map(len, lines)), sum(map(len, lines)) / len(lines)
    if longest > config.max_line:
        return ("minified" if mean > 3 * config.max_mean_line else "long_line"), longest
    blob = sum(len(m.group()) for m in _BLOB.finditer(text)) / len(text)
    if blob > config.max_blob_share:
        return "blob", blob
    if mean > config.max_mean_line:
        return "mean_line", mean
    if any(_GENERATED.search(line) for line in lines[:10]):
        return "generated", 1.0
    solid = [c for c in text if not c.isspace()]
    alphanumeric = sum(c.isalnum() for c in solid) / len(solid)
    if alphanumeric < config.min_alphanumeric:
        return "alphanumeric", alphanumeric
    return None


def is_training_file(row: dict) -> bool:
    """Whether an index row is a loose file (pages are in the WARC) that is not evaluation material."""
    return row["path"].startswith("files/") and row.get("use") != "evaluation"


def _candidates(stage: Stage, excluded: documents.Exclusions, tally: Counter) -> Iterator[dict]:
    config: Config = stage.config
    acquired = stage.dep("data/acquire")
    rows = [r for r in read_index(acquired) if r["domain"] in config.domains and is_training_file(r)]
    for row in stage.progress(rows, label="files"):
        file = acquired / row["path"]
        stage.seen()
        try:
            data = file.read_bytes()
            large = len(data) > config.max_bytes  # not worth decoding: the size alone excludes it
            text = data[:1000].decode("utf-8", "replace") if large else decode(data)
        except (ValueError, OSError) as error:
            stage.reject(row["path"], "unreadable", str(error))
            continue
        inner = row.get("member") or row["path"].removeprefix("files/").partition("/")[2]
        language, how = code_lang.detect(inner, text)
        source = f"{row['item']}/{row['version']}/{inner}"
        problem = fault(inner, text, len(data), language, config)
        if problem:
            excluded.add({"source": source, "text": text}, *problem)
            continue
        label = code_lang.label_from_path(inner)
        if label and how != "folder label":
            same = label.replace("-", " ") == language or language.replace(" ", "-") == label
            tally["labelled"] += 1
            tally["label_equal"] += same
        name, origin = licence(text, row["licence"])
        meta = {"path": inner, "language_by": how, "licence": name, "licence_from": origin, "item": row["item"]}
        yield documents.document(text, source, "code", url=row.get("url") or "", lang=language, meta=meta)


def _within_budget(rows: list[dict], config: Config, excluded: documents.Exclusions) -> list[dict]:
    if not config.max_mb:
        return rows
    total, per_language = config.max_mb * 1e6, config.max_mb * 1e6 * config.max_language_share
    used, kept = Counter(), set()
    order = sorted(range(len(rows)), key=lambda i: (xxhash.xxh3_64_intdigest(rows[i]["id"].encode(), seed=1), i))
    for i in order:
        size = len(rows[i]["text"].encode())
        if used["all"] + size <= total and used["lang", rows[i]["lang"]] + size <= per_language:
            used["all"] += size
            used["lang", rows[i]["lang"]] += size
            kept.add(i)
        else:
            excluded.add(rows[i], "over_budget", size)
    return [row for i, row in enumerate(rows) if i in kept]


def run(stage: Stage) -> None:
    config: Config = stage.config
    out = stage.out("data/code")
    tally: Counter[str] = Counter()
    languages: Counter[str] = Counter()
    licences: Counter[str] = Counter()
    with documents.Exclusions(out) as excluded:
        rows = _within_budget(list(_candidates(stage, excluded, tally)), config, excluded)
        for row in rows:
            languages[row["lang"]] += 1
            licences[json.loads(row["meta"])["licence"]] += 1
        written = documents.write_documents(out, rows)
    stage.rows(documents=written["documents"], excluded=sum(excluded.counts.values()))
    stage.metric(
        documents=written["documents"],
        bytes=written["bytes"],
        removed=dict(sorted(excluded.counts.items())),
        languages={"count": len(languages), "largest": dict(languages.most_common(30))},
        licences=dict(licences.most_common(30)),
        folder_labels={"compared": tally["labelled"], "equal_name": tally["label_equal"]},
    )
    stage.print(f"{written['documents']} files in {len(languages)} languages, removed {dict(excluded.counts)}")
