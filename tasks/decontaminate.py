"""Remove documents that hold evaluation items: the gate that every training stage's data passes.

    python -m tasks decontaminate          documents of data/dedup
    python -m tasks decontaminate-swe      documents of data/swe_data

Every text that the line evaluates on, or that a user names, is a list of items. A document is removed when it shares a run
of 13 words with an item, holds the whole of an item that has fewer words (exact), or holds a passage of one with a few words
changed (fuzzy; tasks/overlap.py says how). Punctuation, case, and the script of digits do not count. Items below `min_words`
words are too common to search for and are counted as `too_short`. The items are the held-out problems of tasks/problems.py,
the needle questions of tasks/needle.py, and the files of `items` (text, JSON or JSON lines, directories of them; list such a
path also under the stage's deps in dvc.yaml); `data/acquire` there stands for what conf/corpus.yaml marks as evaluation
material. `optional_items` are read where they exist and are no dependency: benchmarks that a machine happens to hold.

metrics/decontaminate.json counts items searched and found and names those found; data/decontaminate/hits.parquet names
document and item of every hit. Runs shard by shard on an engine (tasks/mapshuffle.py).
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import Field

from tasks import documents, mapshuffle
from tasks.files import content_hash
from tasks.overlap import ItemIndex
from tasks.stage import Stage
from tasks.texts import read_index

SOURCES = ("data/dedup", "data/swe_data")  # one of them is a dependency
ACQUIRED = "data/acquire"
ABOUT = ("license", "licence", "copying", "readme")  # files of a benchmark's folder that are no items
BENCHMARK_SUFFIXES = ("json", "jsonl", "txt")
HITS_SCHEMA = pa.schema(
    [(name, pa.string()) for name in ("id", "source", "domain", "item", "kind", "matched")] + [("score", pa.float64())]
)


class Config(mapshuffle.EngineConfig):
    ngram: int = Field(13, ge=2, le=64, description="words in a run that counts as overlap; shorter items match whole")
    min_words: int = Field(5, ge=1, description="items made by the line with fewer words are not searched for")
    min_words_items: int = Field(
        8, ge=1, description="the same for `items`, whose files hold short labels besides questions"
    )
    fuzzy_threshold: float | None = Field(
        0.8, gt=0, le=1, description="part of a passage's words, in order, that counts as overlap; null: exact only"
    )
    fuzzy_min_words: int = Field(12, ge=4, description="items with fewer words are found exactly only")
    heldout_problems: bool = Field(True, description="search for the held-out problems of tasks/problems.py")
    needles: bool = Field(True, description="search for the questions of tasks/needle.py")
    items: tuple[str, ...] = Field((), description="further evaluation items: files or directories, declared as deps")
    optional_items: tuple[str, ...] = Field(
        (), description="directories of JSON, JSON lines and text read where they exist, below or beside the checkout"
    )


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


def read_items(path: Path, label: str, suffixes: tuple[str, ...] = ()) -> Iterator[tuple[str, str]]:
    """(name, text) of each item below `path`; names are `label`, the file below it, and the record's number.

    JSON lines: one item per string of each line. JSON: per string of each top-level entry. Anything else: the whole file.
    A file named `.gz` is decompressed first. Licences and readme files of a directory are no items; with `suffixes` other
    files are passed over too.
    ValueError names the file and line that does not parse or decode.
    """
    files = [path]
    if not path.is_file():
        files = sorted(p for p in path.rglob("*") if p.is_file() and not p.name.lower().startswith(ABOUT))
        files = [p for p in files if not suffixes or p.name.removesuffix(".gz").rpartition(".")[2] in suffixes]
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


def needle_items() -> Iterator[tuple[str, str]]:
    """(name, text) of the questions that the needle evaluation asks."""
    from tasks import needle

    for name in needle.NAMES:
        yield f"needle:{name}", needle.QUESTION.format(name=name)


def build_index(config: Config, extra: Iterable[tuple[str, str]]) -> ItemIndex:
    """Index of every evaluation item named by the configuration, plus `extra`."""
    index = ItemIndex(config.ngram, config.min_words, config.fuzzy_threshold, config.fuzzy_min_words)
    for name, text in (
        *(heldout_items() if config.heldout_problems else ()),
        *(needle_items() if config.needles else ()),
    ):
        index.add(name, text)
    for name, text in extra:
        index.add(name, text, config.min_words_items)
    return index


@lru_cache(maxsize=1)
def _load(folder: str) -> ItemIndex:
    return ItemIndex.load(Path(folder))


def search_shard(argument: dict[str, Any]) -> dict[str, Any]:
    """Worker: search one shard of documents, write what stays, what goes and the hits below `out`; counts."""
    index, out = _load(argument["index"]), Path(argument["out"])
    hits: list[dict] = []
    domains: Counter[str] = Counter()
    keep: list[bool] = []
    with documents.Exclusions(out, rows_per_shard=1 << 30) as excluded:
        for row in documents.read_shard(Path(argument["path"]), ("id", "text", "source", "domain")):
            found = index.search(row["text"])
            keep.append(not found)
            if found:
                about = {key: row[key] for key in ("id", "source", "domain")}
                hits.extend(about | vars(hit) for hit in found)
                domains[row["domain"]] += 1
                exact = any(hit.kind == "exact" for hit in found)
                excluded.add(row, "evaluation_overlap" if exact else "evaluation_paraphrase", float(len(found)))
    written = documents.write_kept(out, Path(argument["path"]), keep, argument["scores"])
    documents.write_table(out / "hits.parquet", pa.Table.from_pylist(hits, schema=HITS_SCHEMA))
    return written | {"overlap": dict(domains), "removed": dict(excluded.counts)}


def read_all_items(stage: Stage, config: Config) -> tuple[list[tuple[str, str]], dict[str, str]]:
    """(items of `items` and `optional_items`, content hash of each optional path that is there)."""
    items: list[tuple[str, str]] = []
    for path in config.items:
        found = stage.dep(path)
        items += acquired_items(found) if path == ACQUIRED else read_items(found, path)
    hashes = {}
    for path in config.optional_items:
        folder = stage.root / path
        if folder.is_dir():
            hashes[path] = content_hash(folder)
            items += read_items(folder, Path(path).name, BENCHMARK_SUFFIXES)
    return items, hashes


def run(stage: Stage) -> None:
    config: Config = stage.config
    extra, optional = read_all_items(stage, config)
    index = build_index(config, extra)
    index.save(stage.scratch / "index")
    index.search("compiled here once, not by each worker")
    out = stage.out(stage.spec.outs[0])
    shards = documents.document_shards(stage.dep(next(d for d in stage.spec.deps if d in SOURCES)))
    scores = sorted({name for path in shards for name in documents.read_footer(path)[1]} - set(documents.COLUMNS))
    made = {f"{number:05d}": stage.scratch / "out" / f"{number:05d}" for number in range(len(shards))}
    tasks = {
        name: {"path": str(path), "index": str(stage.scratch / "index"), "out": str(made[name]), "scores": scores}
        for name, path in zip(made, shards)
    }
    total: dict[str, Counter] = {key: Counter() for key in ("counts", "domains", "overlap", "removed")}
    with mapshuffle.open_engine(config) as engine:
        results = engine.map(search_shard, tasks, stage.scratch / "done")
        for result in stage.progress(results, len(tasks), "shards"):
            total["counts"].update(documents=result["documents"], bytes=result["bytes"])
            for key in ("domains", "overlap", "removed"):
                total[key].update(result[key])
    for number, folder in enumerate(made.values()):
        for kind in ("documents", "exclusions"):
            mapshuffle.link_file(folder / kind / "part-00000.parquet", out / kind / f"part-{number:05d}.parquet")
    hits = pa.concat_tables([pq.read_table(folder / "hits.parquet") for folder in made.values()])
    documents.write_table(out / "hits.parquet", hits)
    removed = total["removed"]
    stage.seen(total["counts"]["documents"] + sum(removed.values()))
    stage.rows(documents=total["counts"]["documents"], excluded=sum(removed.values()), hits=len(hits))
    item_hits: dict[str, list[str]] = {}
    for item, identity in zip(hits["item"].to_pylist(), hits["id"].to_pylist()):
        item_hits.setdefault(item, []).append(identity)
    searched = Counter(label(name) for name in index.names)
    found = Counter(label(name) for name in item_hits)
    stage.metric(
        documents_out=total["counts"]["documents"],
        bytes_out=total["counts"]["bytes"],
        domains=dict(sorted(total["domains"].items())),
        removed=dict(sorted(removed.items())),
        overlap_by_domain=dict(sorted(total["overlap"].items())),
        items={
            "searched": len(index.names),
            "too_short": index.too_short,
            "repeated": index.repeated,
            "found": len(item_hits),
        },
        sets={name: {"searched": n, "found": found[name]} for name, n in sorted(searched.items())},
        items_found={item: {"documents": len(ids), "first": ids[0]} for item, ids in sorted(item_hits.items())[:100]},
        optional_items=optional,
    )
    stage.print(f"{len(index.names)} items searched, {len(item_hits)} found; {dict(removed)} removed")


def label(item: str) -> str:
    """The set that an item is of: `problems` of problems:3, `gold/gsm8k` of gold/gsm8k/test.jsonl:7."""
    return "/".join(item.partition(":")[0].split("/")[:2])
