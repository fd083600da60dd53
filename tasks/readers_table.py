"""Tables: JSON lines, parquet, Arrow files; the columns that `columns:` of the source names become a record's fields."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tasks.readers import DATA_ERRORS, Expansion, Limits, Rejected, file_format, make_record, open_plain
from tasks.readers_json import dotted, parse_row, read_values
from tasks.records import Record
from tasks.remote import InputFile, local_path, open_file, scheme

FIELDS = ("url", "lang", "licence", "charset")
_BATCH_BYTES = 4 << 20
LEVELS = 100  # of a kept value: Python's json, which writes tables, ends at about a thousand calls
TABLE_ERRORS = (*DATA_ERRORS, pa.ArrowException)


def _plain(value: Any) -> Any:
    """A value of a kept column as JSON holds it."""
    return value if isinstance(value, (str, int, float, bool, list, dict)) or value is None else str(value)


def _nested(value: Any, levels: int) -> bool:
    """Whether a value is nested beyond so many levels."""
    if not isinstance(value, (dict, list)):
        return False
    return levels < 0 or any(_nested(v, levels - 1) for v in (value.values() if isinstance(value, dict) else value))


def row_record(
    row: Mapping[str, Any], source: Any, file: InputFile, number: int, limits: Limits, extra: dict | None = None
) -> Record | Rejected:
    """The record of one row; a missing or wrongly typed column is rejected by name."""
    columns = source.columns
    if columns.text not in row:
        found = f"expected a column {columns.text!r}, found {sorted(map(str, row))[:20]}"
        return Rejected(file.name, str(number), "missing_column", found)
    value = row[columns.text]
    if isinstance(value, str):
        try:
            content = value.encode("utf-8")
        except UnicodeEncodeError as error:
            return Rejected(file.name, str(number), "wrong_charset", f"column {columns.text}: {error}")
    elif isinstance(value, bytes):
        content = value
    elif isinstance(value, Large):
        return Rejected(file.name, str(number), "too_large", f"{int(value)} bytes, limit {limits.record_bytes}")
    else:
        detail = f"column {columns.text}: expected a string, found {type(value).__name__} {value!r:.80}"
        return Rejected(file.name, str(number), "wrong_type", detail)
    fields = {}
    for field in (*FIELDS, "path"):
        column = getattr(columns, field)
        value = row.get(column) if column else None
        if isinstance(value, (list, tuple)):  # several licences, as exports give them
            value = " AND ".join(map(str, value)) if field == "licence" else None
        fields[field] = "" if value is None else str(value)
    kept = {name: _plain(row.get(name)) for name in columns.keep} | (extra or {})
    if _nested(kept, LEVELS):
        return Rejected(file.name, str(number), "wrong_type", f"columns.keep: a value nested beyond {LEVELS} levels")
    meta = {}
    if kept:  # halves of surrogate pairs, which JSON can name, are no Unicode: no table takes them
        written = json.dumps({"columns": kept}, default=str, ensure_ascii=False).encode("utf-8", "replace")
        meta = json.loads(written, parse_constant=lambda _: None)
    path = fields.pop("path").replace("\x00", "")[:1000]
    if isinstance(row[columns.text], str):
        fields["charset"] = "utf-8"
    return make_record(source, file, number, source.kind, content, limits, path=path, fields=fields, meta=meta)


def read_jsonl(file: InputFile, source: Any, limits: Limits) -> Iterator[Record | Rejected]:
    """One object per line, or an array of objects (plain, gzip or zstd). A dotted name in `columns` reaches into objects."""
    good = number = missing = 0
    damaged = False
    keys: list[str] = []
    try:
        with open_plain(file, limits) as stream:
            if not stream.compressed and (found := file_format(stream.magic)):
                yield Rejected(file.name, "", "mis_declared", f"expected JSON, plain, gzip or zstd; found {found}")
                return
            for line, ended in read_values(stream, limits.record_bytes):
                number += 1
                if number == 1 and line:
                    line = line.removeprefix(b"\xef\xbb\xbf")
                    if line.startswith((b"\xff\xfe", b"\xfe\xff")):
                        yield Rejected(file.name, "", "wrong_charset", "UTF-16, expected UTF-8; the file is not read")
                        return
                if line is not None and not line.strip():
                    continue
                found = _json_row(line, ended, file, source, number, limits)
                good += isinstance(found, Record)
                if isinstance(found, Rejected) and found.reason == "missing_column":
                    missing, keys = missing + 1, keys or [found.detail]
                yield found
    except Expansion as error:
        damaged = True
        yield Rejected(file.name, f"after line {number}", "expands_too_far", str(error))
    except DATA_ERRORS as error:
        damaged = True
        reason = "truncated_file" if isinstance(error, EOFError) or "incomplete" in str(error) else "corrupt_file"
        yield Rejected(file.name, f"after line {number}", reason, f"{type(error).__name__}: {error}")
    if not number and not damaged:
        yield Rejected(file.name, "", "empty_file", "no line in it")
    if missing and not good and missing >= 0.5 * number:
        raise ValueError(f"source {source.name!r}: columns.text: {file.name}: {keys[0]}")


def _json_row(
    line: bytes | None, ended: bool, file: InputFile, source: Any, number: int, limits: Limits
) -> Record | Rejected:
    if line is None:
        return Rejected(file.name, str(number), "too_large", f"a line of more than {limits.record_bytes} bytes")
    try:
        row = parse_row(line)
    except ValueError as error:
        try:
            line.decode("utf-8")
        except UnicodeDecodeError as charset:
            return Rejected(file.name, str(number), "wrong_charset", f"expected UTF-8: {str(charset)[:200]}")
        detail = f"{error}" + ("" if ended else "; the last line, without an end: the file may be truncated")
        return Rejected(file.name, str(number), "bad_json_line", detail)
    if not isinstance(row, dict):
        return Rejected(file.name, str(number), "bad_json_line", f"expected an object, found {type(row).__name__}")
    dotted(row, _names(source))
    return row_record(row, source, file, number, limits)


def _names(source: Any) -> tuple[str, ...]:
    """The columns that a source names."""
    wanted = (source.columns.text, source.columns.path, *map(source.columns.get, FIELDS), *source.columns.keep)
    return tuple(dict.fromkeys(n for n in wanted if n))


def _check_columns(source: Any, file: InputFile, present: list[str]) -> list[str]:
    """The columns to read; ValueError names the key of the source whose column the table does not have.

    A dotted name reaches into a column of structs.
    """
    wanted = {"text": source.columns.text, "path": source.columns.path}
    wanted |= {field: source.columns.get(field) for field in FIELDS}
    wanted |= {f"keep[{i}]": name for i, name in enumerate(source.columns.keep)}
    for key, column in wanted.items():
        if column and column not in present and column.partition(".")[0] not in present:
            raise ValueError(
                f"source {source.name!r}: columns.{key}: {file.name} has no column {column!r}; it has {', '.join(present)}"
            )
    return list(dict.fromkeys(c if c in present else c.partition(".")[0] for c in wanted.values() if c))


class Large(int):
    """The size of a value too large to be one."""


def batch_rows(batch: pa.RecordBatch, limit: int) -> Iterator[dict[str, Any]]:
    """Rows one at a time. Text that is not UTF-8 comes as bytes; of a value over `limit` bytes only its size, as `Large`."""
    for i in range(batch.num_rows):
        row = {}
        for name, column in zip(batch.schema.names, batch.columns):
            value = column[i]
            value = value.value if isinstance(value, pa.DictionaryScalar) else value
            data = value.as_buffer() if hasattr(value, "as_buffer") else None
            if data is not None and data.size > limit:
                row[name] = Large(data.size)
                continue
            try:
                row[name] = value.as_py()
            except UnicodeDecodeError:
                row[name] = data.to_pybytes() if data is not None else None
        yield row


def _is_text(kind: pa.DataType) -> bool:
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def _table_rows(
    batches: Iterator[pa.RecordBatch], file: InputFile, source: Any, limits: Limits
) -> Iterator[Record | Rejected]:
    number = 0
    try:
        for batch in batches:
            for row in batch_rows(batch, limits.record_bytes):
                number += 1
                dotted(row, _names(source))
                value, index = row.get(source.columns.text), batch.schema.get_field_index(source.columns.text)
                if isinstance(value, bytes) and index >= 0 and _is_text(batch.schema.field(index).type):
                    yield Rejected(file.name, str(number), "wrong_charset", f"column {source.columns.text}: not UTF-8")
                else:
                    yield row_record(row, source, file, number, limits)
    except TABLE_ERRORS as error:
        if isinstance(error, MemoryError):
            detail = f"a batch does not fit in memory: {error}"
        else:
            detail = f"{type(error).__name__}: {str(error)[:500]}"
        yield Rejected(file.name, f"after row {number}", "corrupt_file", detail)


def parquet_batches(file: pq.ParquetFile, columns: list[str], limits: Limits) -> Iterator[pa.RecordBatch]:
    """Batches of bounded bytes, row group by row group. Expansion for a row group that expands beyond the bound.

    Pages are decoded as they are needed, so that a row group may be larger than memory; a page may not (the format allows
    2 GiB, writers make 1 MB).
    """
    names = file.schema_arrow.names
    for index in range(file.num_row_groups):
        group = file.metadata.row_group(index)
        chunks = [group.column(i) for i in range(group.num_columns)]
        chunks = [c for c in chunks if c.path_in_schema.split(".")[0] in columns]
        plain = sum(c.total_uncompressed_size for c in chunks)
        packed = sum(c.total_compressed_size for c in chunks)
        if plain > (64 << 20) + limits.expansion * packed or min(plain, packed) < 0:
            raise Expansion(f"row group {index}: {packed} bytes expand to {plain}")
        rows = max(1, min(1024, _BATCH_BYTES * max(1, group.num_rows) // max(1, plain)))
        yield from file.iter_batches(rows, row_groups=[index], columns=[n for n in names if n in columns])


def read_parquet(file: InputFile, source: Any, limits: Limits) -> Iterator[Record | Rejected]:
    """Rows of a parquet file. Text columns stay dictionary-encoded, so that a small file cannot fill memory."""
    try:
        with open_file(file.address) as stream:
            with pq.ParquetFile(stream, pre_buffer=False, buffer_size=1 << 20) as probe:
                names = probe.schema_arrow.names
                columns = _check_columns(source, file, names)
                index = probe.schema_arrow.get_field_index(source.columns.text)
                text = probe.schema_arrow.field(index).type if index >= 0 else pa.null()
                chunks = (probe.metadata.row_group(i) for i in range(probe.num_row_groups))
                largest = max(
                    (g.column(c).total_compressed_size for g in chunks for c in range(g.num_columns)), default=0
                )
            # A buffered stream allocates what a damaged page header says, so it is for large column chunks only.
            buffer = 1 << 20 if largest > 64 << 20 else 0
            stream.seek(0)
            packed = [source.columns.text] if _is_text(text) or pa.types.is_binary(text) else None
            with pq.ParquetFile(stream, pre_buffer=False, buffer_size=buffer, read_dictionary=packed) as table:
                yield from _table_rows(parquet_batches(table, columns, limits), file, source, limits)
    except (pa.ArrowException, OSError) as error:
        yield Rejected(file.name, "", "corrupt_file", f"expected parquet: {str(error)[:500]}")


def read_arrow(file: InputFile, source: Any, limits: Limits) -> Iterator[Record | Rejected]:
    """Rows of an Arrow IPC stream or file (a `save_to_disk` shard)."""
    try:
        local = not scheme(file.address)
        with (
            pa.memory_map(str(local_path(file.address)))
            if local
            else pa.PythonFile(open_file(file.address), "r") as raw
        ):
            is_file = raw.read(6) == b"ARROW1"
            raw.seek(0)
            reader = pa.ipc.open_file(raw) if is_file else pa.ipc.open_stream(raw)
            columns = _check_columns(source, file, reader.schema.names)

            def batches() -> Iterator[pa.RecordBatch]:
                found = (reader.get_batch(i) for i in range(reader.num_record_batches)) if is_file else iter(reader)
                for batch in found:
                    batch.validate(full=True)  # offsets of a damaged file must not be followed
                    yield batch.select(columns)

            yield from _table_rows(batches(), file, source, limits)
            if not is_file and raw.read(1):
                yield Rejected(file.name, "", "corrupt_file", "there is more behind the stream's end mark")
    except (pa.ArrowException, OSError) as error:
        yield Rejected(file.name, "", "corrupt_file", f"expected an Arrow file: {str(error)[:500]}")
