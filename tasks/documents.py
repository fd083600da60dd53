"""Documents and exclusions on disk: the one table format that every data stage reads and writes (DESIGN.md section 4).

A directory of documents is `<out>/documents/part-00000.parquet`, ... (zstd) with the columns of `COLUMNS` and one float64
column per score. What a filter removes goes to `<out>/exclusions/part-00000.parquet` with the reason and the score.
Equal rows in equal order give byte-identical files.

Look at any of them:  python -m tasks.documents data/web --head 3
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import xxhash

from tasks import storage

COLUMNS = ("id", "text", "source", "url", "domain", "lang", "meta")
DOMAINS = ("web", "code", "math", "encyclopedia", "prose", "chat", "swe", "long")
EXCLUSION_SCHEMA = pa.schema(
    [("id", pa.string()), ("source", pa.string()), ("reason", pa.string()), ("score", pa.float64())]
    + [("text_head", pa.string())]
)
TEXT_HEAD_CHARS = 200


def document_id(source: str, text: str) -> str:
    """16 hex digits, a pure function of (source, text): xxh3-64 over both with a separator that neither can hold."""
    return xxhash.xxh3_64_hexdigest(f"{source}\x00{text}".encode("utf-8", "surrogatepass"))


def document(
    text: str,
    source: str,
    domain: str,
    *,
    url: str = "",
    lang: str = "",
    meta: Mapping | str | None = None,
    **scores: float,
) -> dict[str, Any]:
    """One document row; `meta` may be a mapping (stored as canonical JSON); further keywords are float score columns."""
    meta = meta if isinstance(meta, str) else json.dumps(meta or {}, sort_keys=True, ensure_ascii=False)
    row = {"id": document_id(source, text), "text": text, "source": source, "url": url, "domain": domain}
    return row | {"lang": lang, "meta": meta} | scores


def write_table(path: Path, table: pa.Table) -> None:
    """Write `table` so that equal tables give equal bytes: fixed codec, level, row groups, and no pandas metadata."""
    path.parent.mkdir(parents=True, exist_ok=True)
    table = table.replace_schema_metadata(None)
    pq.write_table(table, path, compression="zstd", compression_level=3, row_group_size=4096, version="2.6")


def _schema(scores: Iterable[str]) -> pa.Schema:
    return pa.schema([(c, pa.string()) for c in COLUMNS] + [(c, pa.float64()) for c in sorted(scores)])


def _normalise(row: Mapping[str, Any]) -> dict[str, Any]:
    for key in ("text", "source", "domain"):
        if not isinstance(row.get(key), str):
            raise ValueError(
                f"document {row.get('id', '?')!r}: column {key!r} must be a string, got {row.get(key)!r:.80}"
            )
    if row["domain"] not in DOMAINS:
        raise ValueError(f"document of {row['source']!r}: domain {row['domain']!r} is not one of {', '.join(DOMAINS)}")
    try:
        row["text"].encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"document of {row['source']!r}: text is not valid Unicode ({error.reason})") from None
    meta = row.get("meta") or "{}"
    out = {
        "id": row.get("id") or document_id(row["source"], row["text"]),
        "text": row["text"],
        "source": row["source"],
        "url": row.get("url") or "",
        "domain": row["domain"],
        "lang": row.get("lang") or "",
        "meta": meta if isinstance(meta, str) else json.dumps(meta, sort_keys=True, ensure_ascii=False),
    }
    for key, value in row.items():
        if key not in out:
            if value is not None and not isinstance(value, (int, float)):
                raise ValueError(f"document {out['id']}: column {key!r} is not a score (float), got {value!r:.80}")
            out[key] = value
    return out


def write_documents(
    directory: str | Path, rows: Iterable[Mapping[str, Any]], *, rows_per_shard: int = 8192, scores: Sequence[str] = ()
) -> dict[str, Any]:
    """Write `rows` in order to `<directory>/documents/part-*.parquet`; at least one (possibly empty) shard.

    A row holds the string columns of `COLUMNS` (text, source and domain are required; id is computed when absent; meta may
    be a mapping) and any number of float scores. Scores that only some rows have become null elsewhere; `scores` names
    columns that must exist even when no row has them. Every shard gets the same columns.
    Where the stage's outputs go to an object store, each shard does once it is written (tasks/storage.py).
    Returns {"documents", "bytes" (UTF-8), "domains": {domain: count}}. ValueError names the document that is malformed.
    """
    folder, prefix = Path(directory) / "documents", storage.prefix_of(directory)
    if rows_per_shard < 1:
        raise ValueError(f"rows_per_shard must be positive, got {rows_per_shard}")
    names: set[str] = set(scores)
    shards: list[tuple[Path, frozenset[str]]] = []
    documents, size, domains = 0, 0, Counter()
    iterator = iter(rows)
    while True:
        shard = [_normalise(row) for row in itertools.islice(iterator, rows_per_shard)]
        if not shard and shards:
            break
        for row in shard:
            names.update(row.keys() - set(COLUMNS))
            domains[row["domain"]] += 1
            size += len(row["text"].encode("utf-8"))
        documents += len(shard)
        path = folder / f"part-{len(shards):05d}.parquet"
        write_table(path, pa.Table.from_pylist(shard, schema=_schema(names)))
        shards.append((path, frozenset(names)))
        if prefix:
            storage.put(path, prefix)
        if len(shard) < rows_per_shard:
            break
    for path, present in shards:  # a score first seen in a later shard: give the earlier ones its null column
        if present != names:
            rows_again = pq.read_table(storage.local(path)).to_pylist()
            write_table(path, pa.Table.from_pylist(rows_again, schema=_schema(names)))
            if prefix:
                storage.put(path, prefix)
    return {"documents": documents, "bytes": size, "domains": dict(sorted(domains.items()))}


def write_kept(directory: str | Path, shard: Path, keep: Sequence[bool], scores: Sequence[str]) -> dict[str, Any]:
    """Write the rows of `shard` where `keep` is true as the one shard of `directory`, byte for byte as `write_documents`
    would with these `scores`, without a detour through Python objects. Returns the same as it."""
    try:
        table = pq.read_table(shard)
    except (pa.ArrowInvalid, OSError) as error:
        raise ValueError(f"{shard}: not a readable parquet file ({error})") from None
    table = table.filter(pa.array(keep, type=pa.bool_()))
    schema, count = _schema(scores), table.num_rows
    columns = [table[f.name].cast(f.type) if f.name in table.column_names else pa.nulls(count, f.type) for f in schema]
    table = pa.table(columns, schema=schema)
    write_table(Path(directory) / "documents" / "part-00000.parquet", table)
    domains = Counter(table["domain"].to_pylist())
    size = pc.sum(pc.binary_length(table["text"])).as_py() or 0
    return {"documents": count, "bytes": size, "domains": dict(sorted(domains.items()))}


def document_shards(directory: str | Path) -> list[Path]:
    """Sorted shard paths of `<directory>/documents`; ValueError when there are none."""
    shards = sorted((Path(directory) / "documents").glob("part-*.parquet"))
    if not shards:
        raise ValueError(f"{directory}: no documents/part-*.parquet here; run the stage that writes it first")
    return shards


def read_documents(directory: str | Path, columns: Sequence[str] | None = None) -> Iterator[dict[str, Any]]:
    """Yield the rows of every shard in order, as dicts; `columns` limits what is read (absent score columns give None)."""
    for path in document_shards(directory):
        yield from read_shard(path, columns)


def read_shard(path: Path, columns: Sequence[str] | None = None) -> Iterator[dict[str, Any]]:
    """Yield one shard's rows; ValueError with the file's name when it is no parquet file or lacks a base column."""
    try:
        file = pq.ParquetFile(storage.local(path))
    except (pa.ArrowInvalid, OSError) as error:
        raise ValueError(f"{path}: not a readable parquet file ({error})") from None
    with file:
        missing = set(COLUMNS if columns is None else columns) - set(file.schema_arrow.names)
        if missing & set(COLUMNS):
            raise ValueError(
                f"{path}: column(s) {', '.join(sorted(missing & set(COLUMNS)))} missing; expected {COLUMNS}"
            )
        wanted = None if columns is None else [c for c in columns if c not in missing]
        for batch in file.iter_batches(batch_size=1024, columns=wanted):
            for row in batch.to_pylist():
                yield row if not missing else row | dict.fromkeys(missing)


def read_footer(path: Path) -> tuple[int, list[str]]:
    """(rows, columns) of one shard from its footer; ValueError names a file that is no parquet file."""
    try:
        with pq.ParquetFile(storage.local(path)) as file:
            return file.metadata.num_rows, file.schema_arrow.names
    except (pa.ArrowInvalid, OSError) as error:
        raise ValueError(f"{path}: not a readable parquet file ({error})") from None


def count_documents(directory: str | Path) -> int:
    """Number of documents, from the parquet footers alone."""
    pointers = ((path, storage.read_pointer(path)) for path in document_shards(directory))
    return sum(pointer.rows if pointer else read_footer(path)[0] for path, pointer in pointers)


class Exclusions:
    """The table of what a stage removed and why; a context manager.

    >>> with Exclusions(out_dir) as excluded:
    ...     excluded.add(row, "gopher_mean_word_length", 11.2)
    `excluded.counts` (reason -> documents) is the stage's funnel.
    """

    def __init__(self, directory: str | Path, rows_per_shard: int = 65536):
        self.folder = Path(directory) / "exclusions"
        self.counts: Counter[str] = Counter()
        self._rows_per_shard = rows_per_shard
        self._rows: list[dict[str, Any]] = []
        self._shards = 0

    def add(self, row: Mapping[str, Any], reason: str, score: float | None = None) -> None:
        """Record that the document `row` (needs text and source) was removed; `score` is what the rule compared."""
        text = row["text"]
        head = text[:TEXT_HEAD_CHARS].encode("utf-8", "replace").decode("utf-8")
        identity = row.get("id") or document_id(row["source"], text)
        entry = {"id": identity, "source": row["source"], "reason": reason}
        self._rows.append(entry | {"score": None if score is None else float(score), "text_head": head})
        self.counts[reason] += 1
        if len(self._rows) >= self._rows_per_shard:
            self._flush()

    def _flush(self) -> None:
        path = self.folder / f"part-{self._shards:05d}.parquet"
        write_table(path, pa.Table.from_pylist(self._rows, schema=EXCLUSION_SCHEMA))
        self._shards += 1
        self._rows = []

    def close(self) -> None:
        """Write what is buffered; the table exists (empty) even when nothing was removed."""
        if self._rows or not self._shards:
            self._flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()


def read_exclusions(directory: str | Path) -> Iterator[dict[str, Any]]:
    """Yield the exclusion rows of a stage's output directory in order (none when it has no such table)."""
    for path in sorted((Path(directory) / "exclusions").glob("part-*.parquet")):
        yield from pq.read_table(path).to_pylist()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Print counts and the first documents of a stage's output directory.")
    parser.add_argument("directory")
    parser.add_argument("--head", type=int, default=3)
    parser.add_argument("--domain", choices=DOMAINS)
    args = parser.parse_args(argv)
    domains, excluded = Counter(), Counter(row["reason"] for row in read_exclusions(args.directory))
    shown = 0
    for row in read_documents(args.directory):
        domains[row["domain"]] += 1
        if shown < args.head and args.domain in (None, row["domain"]):
            shown += 1
            print(json.dumps(row | {"text": row["text"][:400]}, ensure_ascii=False, indent=1))
    print("documents:", dict(sorted(domains.items())), "excluded:", dict(excluded.most_common()))


if __name__ == "__main__":
    main()
