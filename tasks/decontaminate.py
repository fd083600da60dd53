"""Remove documents that hold evaluation items (word 13-gram overlap, as GPT-3 and later reports do).

    python -m tasks decontaminate

Every text that the line evaluates on, or that a user names, is a list of items. A document is removed when it shares a run
of 13 words with an item, or holds the whole of an item that has fewer words. Punctuation and case do not count. Items below
`min_words` words are too common to search for and are counted as `too_short`. The evaluation items are the held-out
problems of tasks/problems.py and the files of `items` (text, JSON or JSON lines, directories of them; list such a path also
under the stage's deps in dvc.yaml); `data/acquire` there stands for what conf/corpus.yaml marks as evaluation material.

metrics/decontaminate.json counts items searched and found; data/decontaminate/hits.parquet names document and item.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
from pydantic import Field

from tasks import documents, minhash
from tasks.stage import Stage, StageConfig
from tasks.texts import read_index

ACQUIRED = "data/acquire"
_SIEVE = 1 << 20  # slots of the table that rules out most runs by the low bits of their hash
HITS_SCHEMA = pa.schema([("id", pa.string()), ("source", pa.string()), ("item", pa.string()), ("matched", pa.string())])


class Config(StageConfig):
    ngram: int = Field(13, ge=2, description="words in a run that counts as overlap; shorter items must match whole")
    min_words: int = Field(5, ge=1, description="held-out problems with fewer words are not searched for")
    min_words_items: int = Field(
        8, ge=1, description="the same for `items`, whose files hold short labels besides questions"
    )
    heldout_problems: bool = Field(True, description="search for the held-out problems of tasks/problems.py")
    items: tuple[str, ...] = Field((), description="further evaluation items: files or directories, declared as deps")


class ItemIndex:
    """Evaluation items by the hashes of their word runs."""

    def __init__(self, ngram: int, min_words: int):
        self.ngram, self.min_words = ngram, min_words
        self.names: list[str] = []
        self.too_short = 0
        self.hasher = minhash.WordHasher()
        self._hashes: dict[int, list[np.ndarray]] = {}
        self._owners: dict[int, list[np.ndarray]] = {}
        self._tables: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]] | None = None

    def add(self, name: str, text: str, min_words: int | None = None) -> None:
        """Add one item; counted as too short when it has fewer than `min_words` words (default: the index's)."""
        tokens = self.hasher.array(minhash.words(text))
        if len(tokens) < (self.min_words if min_words is None else min_words):
            self.too_short += 1
            return
        size = min(self.ngram, len(tokens))
        grams = np.unique(next(minhash.run_sums(tokens, (size,)))[1])
        self._hashes.setdefault(size, []).append(grams)
        self._owners.setdefault(size, []).append(np.full(len(grams), len(self.names), dtype=np.int64))
        self.names.append(name)
        self._tables = None

    def _build(self) -> dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]]:
        if self._tables is None:
            self._tables = {}
            for size in sorted(self._hashes):
                hashes, owners = np.concatenate(self._hashes[size]), np.concatenate(self._owners[size])
                order = np.lexsort((owners, hashes))
                present = np.zeros(_SIEVE, dtype=bool)
                present[(hashes & np.uint64(_SIEVE - 1)).view(np.int64)] = True
                self._tables[size] = hashes[order], owners[order], present
        return self._tables

    def search(self, text: str) -> list[tuple[str, str]]:
        """Items found in `text`: (item name, the words of the first matching run), by item in order of addition."""
        tokens = minhash.words(text)
        hashes = self.hasher.array(tokens)
        found: dict[int, str] = {}
        tables = self._build()
        for size, grams in minhash.run_sums(hashes, tables) if tables else ():
            table, owners, present = tables[size]
            likely = np.flatnonzero(present[(grams & np.uint64(_SIEVE - 1)).view(np.int64)])
            at = np.searchsorted(table, grams[likely])
            at[at == len(table)] = 0
            for position, index in zip(likely.tolist(), at.tolist()):
                while index < len(table) and table[index] == grams[position]:
                    found.setdefault(int(owners[index]), " ".join(tokens[position : position + size]))
                    index += 1
        return [(self.names[i], found[i]) for i in sorted(found)]


def acquired_items(acquired: Path) -> Iterator[tuple[str, str]]:
    """Items of the corpus that its list marks `use: evaluation` (conf/corpus.yaml), from data/acquire."""
    for row in sorted(read_index(acquired), key=lambda r: r["path"]):
        if row.get("use") == "evaluation" and row["path"].startswith("files/"):
            yield from read_items(acquired / row["path"], row["path"].removeprefix("files/"))


def _texts(value: object) -> Iterator[str]:
    """Every string inside a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key in sorted(value):
            yield from _texts(value[key])
    elif isinstance(value, list):
        for part in value:
            yield from _texts(part)


def read_items(path: Path, label: str) -> Iterator[tuple[str, str]]:
    """(name, text) of each item below `path`; names are `label`, the file below it, and the record's number.

    JSON lines: one item per string of each line. JSON: per string of each top-level entry. Anything else: the whole file.
    A file named `.gz` is decompressed first.
    ValueError names the file and line that does not parse or decode.
    """
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    if not files:
        raise ValueError(f"decontaminate.items: {label} has no files")
    for file in files:
        name = label if file == path else f"{label}/{file.relative_to(path).as_posix()}"
        content, suffix = _read(file, name), file.name.removesuffix(".gz").rpartition(".")[2]
        if suffix == "json" and not _is_json(content):
            suffix = "jsonl"  # JSON lines often go by the shorter suffix
        if suffix == "jsonl":
            for number, line in enumerate(content.splitlines(), 1):
                if line.strip():
                    yield from ((f"{name}:{number}", text) for text in _texts(_parse(line, f"{name}:{number}")))
        elif suffix == "json":
            value = _parse(content, name)
            entries = (
                value.items() if isinstance(value, dict) else enumerate(value if isinstance(value, list) else [value])
            )
            for key, entry in entries:
                yield from ((f"{name}:{key}", text) for text in _texts(entry))
        else:
            yield name, content


def _read(file: Path, name: str) -> str:
    try:
        data = file.read_bytes()
        return (gzip.decompress(data) if file.suffix == ".gz" else data).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name}: not UTF-8 text ({error.reason} at byte {error.start})") from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{name}: not readable as gzip ({error})") from None


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except json.JSONDecodeError:
        return False
    return True


def _parse(text: str, name: str) -> object:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{name}: not JSON: {error}") from None


def heldout_items() -> Iterator[tuple[str, str]]:
    """(name, text) of the held-out problems that the line's evaluations draw from."""
    from tasks import problems

    for number, entry in enumerate(problems.heldout_texts()):
        yield (f"problems:{number}", entry) if isinstance(entry, str) else (f"problems:{entry[0]}", entry[1])


def build_index(config: Config, extra: Iterable[tuple[str, str]]) -> ItemIndex:
    """Index of every evaluation item named by the configuration, plus `extra`."""
    index = ItemIndex(config.ngram, config.min_words)
    if config.heldout_problems:
        for name, text in heldout_items():
            index.add(name, text)
    for name, text in extra:
        index.add(name, text, config.min_words_items)
    return index


def run(stage: Stage) -> None:
    config: Config = stage.config
    extra = [
        item
        for path in config.items
        for item in (acquired_items(stage.dep(path)) if path == ACQUIRED else read_items(stage.dep(path), path))
    ]
    index = build_index(config, extra)
    out = stage.out("data/decontaminate")
    hits: list[dict] = []
    item_hits: Counter[str] = Counter()
    domains: Counter[str] = Counter()

    def kept() -> Iterator[dict]:
        source = stage.dep("data/dedup")
        rows = documents.read_documents(source)
        for row in stage.progress(rows, documents.count_documents(source), "documents"):
            stage.seen()
            found = index.search(row["text"])
            if found:
                hits.extend({"id": row["id"], "source": row["source"], "item": n, "matched": m} for n, m in found)
                item_hits.update(name for name, _ in found)
                domains[row["domain"]] += 1
                excluded.add(row, "evaluation_overlap", float(len(found)))
            else:
                yield row

    with documents.Exclusions(out) as excluded:
        written = documents.write_documents(out, kept())
    documents.write_table(out / "hits.parquet", pa.Table.from_pylist(hits, schema=HITS_SCHEMA))
    stage.rows(documents=written["documents"], excluded=sum(excluded.counts.values()), hits=len(hits))
    stage.metric(
        documents_out=written["documents"],
        bytes_out=written["bytes"],
        domains=written["domains"],
        removed=dict(sorted(excluded.counts.items())),
        overlap_by_domain=dict(sorted(domains.items())),
        items={"searched": len(index.names), "too_short": index.too_short, "found": len(item_hits)},
        items_found=dict(sorted(item_hits.items())[:100]),
    )
    stage.print(f"{len(index.names)} items searched, {len(item_hits)} found; {dict(excluded.counts)} removed")
