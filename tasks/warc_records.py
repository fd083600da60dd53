"""Records of an open WARC stream, one at a time: header fields, place, and a block that ends where the header says.

Read as they are found on the web, not only as the standard writes them: field names in any case, lines that end in LF,
continued lines, versions 0.17 to 1.1. A damaged header, or a Content-Length that does not lead to the next record, costs its
record alone: reading goes on at the next place that begins like one.

    python -m pytest tests/tasks/test_warc_records.py
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

MAX_HEADER = 1 << 20
_READ = 1 << 18
_HEADER_END = re.compile(rb"\r?\n\r?\n")
_NEXT = re.compile(rb"\n\r?\n(?=WARC/[01]\.\d+[ \t]*\r?\n[A-Za-z-]+:)")
_NEXT_BYTES = 256  # a match of _NEXT lies within
_HEADER_SEEN = 4096
_VERSION = re.compile(rb"WARC/\d+\.\d+[ \t]*\r?\n")


class BadHeader(ValueError):
    """Where a record should begin, there is something else."""


@dataclass(slots=True)
class RawRecord:
    """`fields`: names in lower case. `length`: as declared, -1 without one. `wrong`: (reason, detail) without a whole block."""

    fields: dict[str, str]
    length: int
    block: bytes = b""
    wrong: tuple[str, str] | None = None


class _Buffer:
    """What was read of a stream and not yet used. An error of the stream waits until what came before it is used up."""

    def __init__(self, stream: BinaryIO):
        self._stream, self.data, self.error = stream, bytearray(), None
        self._ended = False

    def more(self) -> bool:
        """Read on; False at the end, and where an error waits."""
        if self.error is not None or self._ended:
            return False
        try:
            data = self._stream.read(_READ)
        except BaseException as error:  # decompression raises many kinds; raised again when its place is reached
            self.error = error
            return False
        self._ended = not data
        self.data += data
        return bool(data)

    def fail(self) -> None:
        """Raise the error that waits, if one does."""
        if self.error is not None:
            raise self.error

    def drop(self, size: int) -> None:
        del self.data[:size]

    def skip_blank(self) -> bool:
        """Drop line ends; whether there is anything behind them."""
        while True:
            rest = self.data.lstrip(b"\r\n")
            self.drop(len(self.data) - len(rest))
            if rest:
                return True
            if not self.more():
                return False


def header_fields(head: bytes) -> dict[str, str]:
    """Fields of header lines (without the first line): lower-case name -> value; of equal names the last, lines joined."""
    fields: dict[str, list[str]] = {}  # lines are joined once, at the end: there may be millions
    name = ""
    for line in head.splitlines():
        text = line.decode("utf-8") if line.isascii() else _decoded(line)
        if text[:1] in (" ", "\t"):
            if name:
                fields[name].append(text.strip())
            continue
        key, colon, value = text.partition(":")
        name = key.strip().lower() if colon else ""
        if name:
            fields[name] = [value.strip()]
    return {name: " ".join(filter(None, parts)) for name, parts in fields.items()}


def length_of(fields: dict[str, str]) -> int:
    """The Content-Length among header fields, -1 where it is no number that a size can have."""
    said = fields.get("content-length", "")
    return int(said) if len(said) < 19 and said.isascii() and said.isdigit() else -1


def _decoded(line: bytes) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError:
        return line.decode("latin-1")


def read_raw(stream: BinaryIO, max_bytes: int) -> Iterator[RawRecord]:
    """Every record in order. A block over `max_bytes` is passed over, not held: its record comes with `wrong` too_large.

    Raises what the stream raises, behind the last whole record before it, and EOFError when it ends within a header.
    """
    buffer, first = _Buffer(stream), True
    while buffer.skip_blank():
        try:
            record = _header(buffer)
        except BadHeader as error:
            found = _find_next(buffer)
            if found is None:
                buffer.fail()
            yield RawRecord({}, -1, wrong=("mis_declared" if first and found is None else "corrupt_record", str(error)))
            buffer.drop(len(buffer.data) if found is None else found)
            continue
        finally:
            first = False
        if record.length > max_bytes:
            record.wrong = ("too_large", f"{record.length} bytes, limit {max_bytes}")
            yield record  # before its block is read, which may never end
            _pass_over(buffer, record.length)
        else:
            _block(buffer, record)
            yield record
    buffer.fail()


def _header(buffer: _Buffer) -> RawRecord:
    start = 0
    while (end := _HEADER_END.search(buffer.data, start)) is None:
        if len(buffer.data) > 16 and not buffer.data.startswith(b"WARC/"):
            break
        if len(buffer.data) > MAX_HEADER:
            raise BadHeader(f"a record's header of more than {MAX_HEADER} bytes")
        start = max(0, len(buffer.data) - 3)
        if not buffer.more():
            buffer.fail()
            if buffer.data.startswith(b"WARC/"[: len(buffer.data)]):
                raise EOFError("the file ends within a record's header")
            break
    version = _VERSION.match(buffer.data)
    if version is None or end is None:
        raise BadHeader(f"expected a WARC record, found {bytes(buffer.data[:40])!r}")
    fields = header_fields(bytes(buffer.data[version.end() : end.start()]))
    record = RawRecord(fields, length_of(fields))
    buffer.drop(end.end())
    return record


def _block(buffer: _Buffer, record: RawRecord) -> None:
    """Take the block, and look whether a record or the end follows. Where not, go on at the next record's place."""
    length = max(0, record.length)
    while len(buffer.data) < length and buffer.more():
        pass
    whole = len(buffer.data) >= length and record.length >= 0
    if whole:
        rest = buffer.data[length : length + _NEXT_BYTES].lstrip(b"\r\n")
        # of blank lines there may be gigabytes: no more than the place where a record must begin is held
        while len(rest) < 5 and len(buffer.data) < length + _NEXT_BYTES and buffer.more():
            rest = buffer.data[length : length + _NEXT_BYTES].lstrip(b"\r\n")
        if not rest or rest.startswith(b"WARC/"[: len(rest)]) or _damaged_header(buffer, length):
            record.block = bytes(buffer.data[:length])
            buffer.drop(length)
            return
    had, found = len(buffer.data), _find_next(buffer)
    if found is None and not whole and record.length >= 0:
        buffer.fail()
        record.wrong = ("truncated_record", f"{had} of {length} bytes")
    else:
        said = record.fields.get("content-length", "nothing")
        record.wrong = ("wrong_length", f"Content-Length says {said:.40}, and no record follows there, nor the end")
    buffer.drop(len(buffer.data) if found is None else found)


def _damaged_header(buffer: _Buffer, start: int) -> bool:
    """Whether what follows a block is a header whose first line is damaged: its fields are there."""
    while len(buffer.data) < start + _HEADER_SEEN and buffer.more():
        pass
    rest = buffer.data[start : start + _HEADER_SEEN].lstrip(b"\r\n")
    end = _HEADER_END.search(rest)
    return re.search(rb"\nWARC-[A-Za-z-]+:", rest[: end.start() if end else None], re.IGNORECASE) is not None


def _find_next(buffer: _Buffer) -> int | None:
    """Where in the buffer the next record begins; read on for it, letting go what is behind. None: there is none."""
    start = 0
    while True:
        found = _NEXT.search(buffer.data, start)
        if found:
            return found.end()
        start = max(0, len(buffer.data) - _NEXT_BYTES)
        if start > 1 << 22:
            buffer.drop(start)
            start = 0
        if not buffer.more():
            return None


def _pass_over(buffer: _Buffer, left: int) -> None:
    """Drop a large block, up to what begins like a record: then it was the length that was wrong."""
    while left > 0 and (buffer.data or buffer.more()):
        found = _NEXT.search(buffer.data, 0, left + _NEXT_BYTES)
        if found and found.end() < left:
            buffer.drop(found.end())
            return
        size = min(left, max(1, len(buffer.data) - _NEXT_BYTES))
        if len(buffer.data) <= _NEXT_BYTES and buffer.more():
            continue
        buffer.drop(size)
        left -= size
