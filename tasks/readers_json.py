"""Files of JSON: lines, or, where a file begins as one, an array or values written over several lines; each object a row.

Values outside the standard that writers make (NaN, Infinity, half of a surrogate pair) are read as Python's json reads them.

    python -m pytest tests/tasks/test_readers_json.py
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import orjson

from tasks.readers import PlainStream, read_lines

_MARK = re.compile(rb'["{}\[\]]')
_STRING_END = re.compile(rb'(?:[^"\\]|\\.)*+"', re.DOTALL)
_BOM = b"\xef\xbb\xbf"
_BETWEEN = b" \t\r\n,\x1e"
_BEYOND = re.compile(rb"NaN|Infinity|\\u[dD][89a-fA-F]")
_HEAD = 1 << 16  # bytes looked at where the file begins with so many blanks
_SEEN = 1 << 10  # bytes looked at, at least: a stream may give few at a time


def parse_row(line: bytes) -> Any:
    """The value of a line. ValueError where it is none, nested beyond 1024 levels, or not UTF-8."""
    try:
        return orjson.loads(line)
    except ValueError as error:
        if not _BEYOND.search(line):
            raise
        try:
            return json.loads(line)
        except (ValueError, RecursionError):
            raise error from None


def dotted(row: dict[str, Any], names: tuple[str, ...]) -> None:
    """Add to a row the columns that dotted names reach inside objects."""
    for name in names:
        if name not in row and "." in name:
            value: Any = row
            for part in name.split("."):
                value = value.get(part) if isinstance(value, dict) else None
            if value is not None:
                row[name] = value


class _Head:
    """A stream whose first bytes were looked at."""

    def __init__(self, stream: PlainStream):
        self._stream, self.head = stream, b""
        while len(self.head) < _HEAD and (data := stream.read(_HEAD)):
            self.head += data
            if len(self.head) >= _SEEN and self.head.strip(_BETWEEN + _BOM):
                break

    def read(self, size: int = -1) -> bytes:
        data, self.head = self.head or self._stream.read(size), b""
        return data


def read_values(stream: PlainStream, limit: int) -> Iterator[tuple[bytes | None, bool]]:
    """(bytes of a value, whether its end was there) as read_lines(); None for one of more than `limit` bytes.

    A file whose first line is `{`, or begins with `[` and then an object, is read by values; any other by lines.
    """
    source = _Head(stream)
    head = source.head.removeprefix(_BOM).lstrip()
    if head.startswith(b"[") and head[1:].lstrip()[:1] in (b"{", b""):
        return _split(source, limit, 1)
    if re.match(rb"\{[ \t]*\r?\n", head) or head.startswith(b"\x1e"):
        return _split(source, limit, 0)
    return read_lines(source, limit)


def _split(stream: Any, limit: int, level: int) -> Iterator[tuple[bytes | None, bool]]:
    """Objects and arrays `level` brackets deep, and objects above. What stands between them and is no blank or comma comes as a
    value of its own, for the reader to refuse. What is behind the limit is not held, and each byte is looked at once."""
    buffer, at, depth, base, start, dropped, inside, seen = bytearray(), 0, 0, 0, -1, False, False, False
    between = bytearray()
    while data := stream.read(1 << 18):
        buffer += data if seen else data.removeprefix(_BOM)
        seen = True
        while True:
            if inside:
                string = _STRING_END.match(buffer, at)
                if string is None:
                    tail = buffer[at:]
                    at = len(buffer) - (len(tail) - len(tail.rstrip(b"\\"))) % 2  # an escape may be cut in two
                    break
                at, inside = string.end(), False
            mark = _MARK.search(buffer, at)
            if start < 0 and len(between) < _SEEN:
                between += buffer[at : mark.start() if mark else len(buffer)].strip(_BETWEEN)[:_SEEN]
            if mark is None:
                at = len(buffer)
                break
            at = mark.end()
            if mark[0] == b'"':
                inside = True
                between += b'"..."' if start < 0 and len(between) < _SEEN else b""
            elif mark[0] in b"{[":
                if start < 0 and (depth == level or mark[0] == b"{"):
                    if between:
                        yield bytes(between), True
                        between.clear()
                    start, base = mark.start(), depth
                depth += 1
            else:
                depth = max(0, depth - 1)
                if depth == base and start >= 0:
                    yield (None if dropped or at - start > limit else bytes(buffer[start:at])), True
                    start, dropped = -1, False
        if start >= 0 and len(buffer) - start > limit:
            dropped = True
        keep = start if start >= 0 and not dropped else at
        del buffer[:keep]
        at, start = at - keep, (0 if start >= 0 else -1)
    if between:
        yield bytes(between), True
    if start >= 0:
        yield (None if dropped else bytes(buffer)), False
    elif depth:  # an array cut between two objects
        yield b"[", False
