"""Records on disk: what the ingest stage hands to web, code and math, one shape for every input format.

A directory of records is `<out>/records/part-00000.parquet`, ... (zstd): a record is one page, file or text as it was
found, its bytes not yet decoded. Row groups hold a bounded number of bytes, so readers and writers hold no more than one
of them, and the same records in the same order give byte-identical files.

Look at one:  python -m tasks.records data/ingest --head 3
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import xxhash

from tasks import storage

KINDS = ("html", "pdf", "code", "text")
ROW_GROUP_BYTES = 8 << 20
ROW_GROUP_ROWS = 4096
_TEXTS = ("path", "url", "source", "charset", "lang", "licence")
SCHEMA = pa.schema(
    [("id", pa.string()), ("kind", pa.string()), ("content", pa.binary())]
    + [(name, pa.string()) for name in (*_TEXTS, "meta")]
)


@dataclass(frozen=True, slots=True)
class Record:
    """One page, file or text as found. What the source does not say is "" (never guessed here)."""

    id: str  # stable hash, see `record_id`
    kind: str  # one of KINDS
    content: bytes  # raw bytes, of text kinds too
    path: str = ""  # path inside the source: file, archive member, path in a repository
    url: str = ""
    source: str = ""  # name of the source in params.yaml
    charset: str = ""  # as declared
    lang: str = ""  # as declared
    licence: str = ""  # as declared
    meta: dict[str, Any] = field(default_factory=dict)  # JSON values: file, record, repo, commit, further columns


def record_id(source: str, path: str, number: int, content: bytes) -> str:
    """32 hex digits: xxh3-128 over source, path, the record's number within its file, and content."""
    digest = xxhash.xxh3_128(f"{source}\x00{path}\x00{number}\x00".encode("utf-8", "surrogatepass"))
    digest.update(content)
    return digest.hexdigest()


def _row(record: Record) -> dict[str, Any]:
    if record.kind not in KINDS:
        raise ValueError(f"record {record.id} of {record.source!r}: kind {record.kind!r} is not one of {KINDS}")
    row = {"id": record.id, "kind": record.kind, "content": record.content}
    row |= {name: getattr(record, name) for name in _TEXTS}
    return row | {"meta": json.dumps(record.meta, sort_keys=True, ensure_ascii=True)}


class RecordWriter:
    """Appends records to `<folder>/part-00000.parquet`, ...; a new shard after `shard_bytes` of content.

    `add` returns True when it closed a shard: everything added so far is then on disk.
    """

    def __init__(self, folder: str | Path, shard_bytes: int = 128 << 20, first: int = 0):
        if shard_bytes < 1:
            raise ValueError(f"shard_bytes must be positive, got {shard_bytes}")
        self.folder, self.shard_bytes, self.shards = Path(folder), shard_bytes, first
        self._writer: pq.ParquetWriter | None = None
        self._rows: list[dict[str, Any]] = []
        self._group_bytes = self._bytes = 0
        self.folder.mkdir(parents=True, exist_ok=True)

    def add(self, record: Record) -> bool:
        self._rows.append(_row(record))
        self._group_bytes += len(record.content)
        self._bytes += len(record.content)
        if self._bytes >= self.shard_bytes:
            self.close_shard()
            return True
        if self._group_bytes >= ROW_GROUP_BYTES or len(self._rows) >= ROW_GROUP_ROWS:
            self._flush()
        return False

    def _flush(self) -> None:
        if self._writer is None:
            path = self.folder / f"part-{self.shards:05d}.parquet"
            self._writer = pq.ParquetWriter(
                path, SCHEMA, compression="zstd", compression_level=3, version="2.6", use_dictionary=["kind", "source"]
            )
        self._writer.write_table(pa.Table.from_pylist(self._rows, schema=SCHEMA), row_group_size=ROW_GROUP_ROWS)
        self._rows, self._group_bytes = [], 0

    def close_shard(self) -> bool:
        """End the current shard; False when it is empty."""
        if self._rows:
            self._flush()
        if self._writer is None:
            return False
        self._writer.close()
        self._writer, self._bytes = None, 0
        self.shards += 1
        return True

    def close(self) -> None:
        """End the last shard; a folder without any record gets one empty shard, so that it reads as a table."""
        if not self.close_shard() and not self.shards:
            self._flush()
            self.close_shard()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        elif self._writer is not None:
            self._writer.close()


def write_records(directory: str | Path, records: Iterable[Record], *, shard_bytes: int = 128 << 20) -> dict[str, Any]:
    """Write `records` in order to `<directory>/records/`; at least one (possibly empty) shard of bounded bytes.

    Returns {"records", "bytes", "kinds": {kind: count}}. ValueError names a record of an unknown kind.
    """
    size, kinds = 0, Counter()
    with RecordWriter(Path(directory) / "records", shard_bytes) as writer:
        for record in records:
            writer.add(record)
            size += len(record.content)
            kinds[record.kind] += 1
    return {"records": kinds.total(), "bytes": size, "kinds": dict(sorted(kinds.items()))}


def record_shards(directory: str | Path) -> list[Path]:
    """Sorted shard paths of `<directory>/records`; ValueError when there are none."""
    shards = sorted((Path(directory) / "records").glob("part-*.parquet"))
    if not shards:
        raise ValueError(f"{directory}: no records/part-*.parquet here; run the stage that writes it first")
    return shards


def read_record_shard(path: str | Path, kinds: Collection[str] = KINDS) -> Iterator[Record]:
    """Yield one shard's records of these kinds, in order, holding one row group at a time.

    ValueError with the file's name when it is not a shard of records.
    """
    unknown = set(kinds) - set(KINDS)
    if unknown:
        raise ValueError(f"no such kind of record: {', '.join(sorted(unknown))}; there are {', '.join(KINDS)}")
    try:
        file = pq.ParquetFile(storage.local(path))
    except (pa.ArrowInvalid, OSError) as error:
        raise ValueError(f"{path}: not a readable parquet file ({error})") from None
    with file:
        if not file.schema_arrow.equals(SCHEMA):
            raise ValueError(f"{path}: not a shard of records; columns {file.schema_arrow.names}, not {SCHEMA.names}")
        wanted = pa.array(sorted(set(kinds)), pa.string())
        for group in range(file.num_row_groups):
            mask = pc.is_in(file.read_row_group(group, ["kind"])["kind"], wanted)
            if pc.any(mask).as_py():
                for batch in file.read_row_group(group).filter(mask).to_batches(max_chunksize=64):
                    for row in batch.to_pylist():
                        yield Record(**row | {"meta": json.loads(row["meta"])})


def read_records(directory: str | Path, kinds: Collection[str] = KINDS) -> Iterator[Record]:
    """Yield the records of `kinds` of every shard of `<directory>/records`, in order, in bounded memory."""
    for path in record_shards(directory):
        yield from read_record_shard(path, kinds)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Print counts and the first records of a directory of records.")
    parser.add_argument("directory")
    parser.add_argument("--head", type=int, default=3)
    parser.add_argument("--kind", choices=KINDS)
    args = parser.parse_args(argv)
    kinds: Counter[str] = Counter()
    for record in read_records(args.directory, (args.kind,) if args.kind else KINDS):
        if kinds.total() < args.head:
            text = record.content[:400].decode("utf-8", "replace")
            shown = {name: getattr(record, name) for name in ("id", "kind", *_TEXTS, "meta")}
            print(json.dumps(shown | {"content": text}, ensure_ascii=False, indent=1))
        kinds[record.kind] += 1
    print("records:", dict(sorted(kinds.items())))


if __name__ == "__main__":
    main()
