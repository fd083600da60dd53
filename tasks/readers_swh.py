"""A Software Heritage-style export: a table of file contents, and one of what is known about them, joined by a key.

The metadata table may be larger than memory: it goes into a SQLite file first, whose index is looked up for each content.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from tasks.readers import DATA_ERRORS, Limits, Rejected, make_record, open_plain, read_lines
from tasks.readers_table import FIELDS, Large, batch_rows, parquet_batches
from tasks.records import Record
from tasks.remote import InputFile, open_file

_OTHERS = 8  # further places of one content that its record lists


def _rows(file: InputFile, columns: list[str], limits: Limits) -> Iterator[tuple[int, dict | Rejected]]:
    """(number, row) of a parquet or JSON-lines table, told by its first bytes."""
    number = 0
    try:
        with open_file(file.address) as stream:
            if stream.read(4) == b"PAR1":
                stream.seek(0)
                with pq.ParquetFile(stream, pre_buffer=False, buffer_size=1 << 20) as table:
                    for batch in parquet_batches(table, columns or table.schema_arrow.names, limits):
                        for row in batch_rows(batch, limits.record_bytes):
                            number += 1
                            yield number, row
                return
        with open_plain(file, limits) as plain:
            for line, _ in read_lines(plain, limits.record_bytes):
                number += 1
                if line is None:
                    yield number, Rejected(file.name, str(number), "too_large", "a line over the limit")
                    continue
                try:
                    row = orjson.loads(line)
                    if not isinstance(row, dict):
                        raise ValueError(f"expected an object, found {type(row).__name__}")
                    yield number, row
                except ValueError as error:
                    if line.strip():
                        yield number, Rejected(file.name, str(number), "bad_json_line", str(error)[:500])
    except (pa.ArrowException, *DATA_ERRORS) as error:
        yield number, Rejected(file.name, f"after row {number}", "corrupt_file", f"{type(error).__name__}: {error}")


def _key(row: dict, column: str, source: Any, file: InputFile, where: str) -> str:
    if column not in row:
        raise ValueError(
            f"source {source.name!r}: {where}: {file.name} has no column {column!r}; it has {', '.join(map(str, row))}"
        )
    value = row[column]
    return value.hex() if isinstance(value, bytes) else "" if value is None else str(value)


def build_index(files: Iterable[InputFile], source: Any, limits: Limits, path: Path) -> list[Rejected]:
    """Write the metadata table's rows by key to the SQLite file `path`, whole or not at all; the rows that are bad."""
    bad, staging = [], path.with_name(f"{path.name}.{os.getpid()}.partial")
    staging.unlink(missing_ok=True)
    with contextlib.closing(sqlite3.connect(staging)) as base:
        base.execute("PRAGMA journal_mode = OFF")
        base.execute("PRAGMA cache_size = -65536")
        base.execute("CREATE TABLE rows (key TEXT, row TEXT)")
        for file in files:
            for number, row in _rows(file, [], limits):
                if isinstance(row, Rejected):
                    bad.append(row)
                    continue
                key = _key(row, source.metadata.key, source, file, "metadata.key")
                if not key:
                    bad.append(Rejected(file.name, str(number), "no_key", f"column {source.metadata.key} is empty"))
                    continue
                base.execute("INSERT INTO rows VALUES (?, ?)", (key, json.dumps(row, default=str, sort_keys=True)))
        base.execute("CREATE INDEX by_key ON rows (key)")
        base.commit()
    os.replace(staging, path)
    return bad


def read_swh(file: InputFile, source: Any, limits: Limits) -> Iterator[Record | Rejected]:
    """Contents in order, each with its first metadata row; `meta["swh"]` holds that row whole, or None without one.

    What does not belong together is kept as found (a wrong hash, language or path): the stage code aligns it.
    """
    index = source.scratch / f"{source.index}.sqlite"
    about, columns = source.metadata.columns, [source.columns.key, source.columns.text]
    with contextlib.closing(sqlite3.connect(f"file:{index}?mode=ro", uri=True)) as base:
        for number, row in _rows(file, columns, limits):
            if isinstance(row, Rejected):
                yield row
                continue
            key = _key(row, source.columns.key, source, file, "columns.key")
            value = row.get(source.columns.text)
            if isinstance(value, Large):
                detail = f"{int(value)} bytes, limit {limits.record_bytes}"
                yield Rejected(file.name, str(number), "too_large", detail)
                continue
            if not isinstance(value, (str, bytes)):
                detail = f"column {source.columns.text}: expected text or bytes, found {type(value).__name__}"
                yield Rejected(file.name, str(number), "wrong_type", detail)
                continue
            content = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
            found = base.execute("SELECT row FROM rows WHERE key = ? ORDER BY rowid LIMIT ?", (key, _OTHERS + 1))
            known = [json.loads(text) for (text,) in found]
            first = known[0] if known else {}
            fields = {f: first.get(about.get(f) or "") for f in (*FIELDS, "path")}
            fields = {k: " AND ".join(map(str, v)) if isinstance(v, list) else str(v or "") for k, v in fields.items()}
            path = fields.pop("path")
            # Of an export the charset is what a detector said: a claim to check later, not a reason to lose the file.
            meta = {"key": key, "swh": first or None, "declared_charset": fields.pop("charset")}
            if len(known) > 1:
                meta["others"] = known[1:]
            yield make_record(
                source, file, number, source.kind, content, limits, path=path, fields=fields, meta=meta, expected=True
            )
