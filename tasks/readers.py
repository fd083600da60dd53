"""What every reader of a source shares: bounded decompression, lines, and the checks that a record must pass.

A reader is a function (file, source, limits) -> iterator of `Record` and `Rejected`, in the file's own order; it holds one
record and one block of the file at a time. A record that cannot be had, or that is not what its source declares, is a
`Rejected`; only `Interrupted` (the other side cannot be reached) and a wrong declaration in params.yaml raise.
"""

from __future__ import annotations

import codecs
import io
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

from tasks.records import Record, record_id
from tasks.remote import InputFile, open_file

GZIP, ZSTD, ZSTD_DICTIONARY = b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"\x5d\x2a\x4d\x18"
_BLOCK = 1 << 16
_SLACK = 64 << 20  # an expansion ratio says nothing of the first bytes
_FORMATS = {
    b"%PDF-": "PDF", b"\x89PNG": "PNG", b"GIF8": "GIF", b"\xff\xd8\xff": "JPEG", b"PK\x03\x04": "zip", GZIP: "gzip",
    ZSTD: "zstd", b"BZh": "bzip2", b"\xfd7zXZ\x00": "xz", b"\x7fELF": "ELF", b"PAR1": "parquet", b"ARROW1": "arrow",
    b"SQLite format 3": "SQLite", b"\xca\xfe\xba\xbe": "a class file", b"\x00asm": "wasm", b"OggS": "ogg", b"wOF": "a font",
}  # fmt: skip
_WIDE = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)
_CONTROL = bytes(set(range(32)) - set(b"\t\n\r\f\v\x08\x1b"))
DATA_ERRORS = (OSError, EOFError, zlib.error, ValueError, RuntimeError, struct.error, MemoryError)


@dataclass(frozen=True, slots=True)
class Limits:
    """`record_bytes`: largest content of a record; `expansion`: decompressed bytes per compressed one of a file."""

    record_bytes: int = 32 << 20
    expansion: float = 200.0


@dataclass(frozen=True, slots=True)
class Rejected:
    """A record, or the rest of a file, that was set aside. `expected`: no fault, such as a picture in a source tree."""

    file: str
    record: str
    reason: str
    detail: str
    expected: bool = False


class Expansion(ValueError):
    """A file decompresses to more than the bound."""


class _Counted:
    """The compressed side of a stream, counted."""

    def __init__(self, stream: BinaryIO, head: bytes):
        self._stream, self._head, self.count = stream, head, 0

    def read(self, size: int = -1) -> bytes:
        if self._head:
            data, self._head = self._head, b""
        else:
            data = self._stream.read(_BLOCK if size < 0 else min(size, _BLOCK))
        self.count += len(data)
        return data

    def tell(self) -> int:
        return self.count


class PlainStream:
    """A file's decompressed bytes; short reads, an error where the file is damaged, `Expansion` beyond the bound.

    `resync` goes on behind a damaged or bomb-like gzip member, at the next one: WARC files have a member per record.
    """

    def __init__(self, stream: BinaryIO, expansion: float):
        self._stream, self._expansion, self._out = stream, expansion, 0
        head = b""
        while len(head) < 8 and (data := stream.read(8 - len(head))):
            head += data
        self.magic = head
        self._zstd = self._engine = None
        if head.startswith(GZIP):
            self._in = _Counted(stream, head)
            self._new_member(b"", 0)
        elif head.startswith((ZSTD, ZSTD_DICTIONARY)):
            from fastwarc.stream_io import ZstdReader

            dictionary = None
            if head.startswith(ZSTD_DICTIONARY):  # a frame that holds the dictionary of the others, as in .warc.zst
                dictionary, head = self._dictionary(head), b""
            self._in = _Counted(stream, head)
            self._zstd = ZstdReader(self._in, **({"dictionary": dictionary} if dictionary else {}))
        else:
            self._in = _Counted(stream, head)

    def _dictionary(self, head: bytes) -> bytes:
        size = int.from_bytes(head[4:8], "little")
        if size > 16 << 20:
            raise Expansion(f"a zstd dictionary of {size} bytes")
        data = self._stream.read(size)
        if data.startswith(ZSTD):
            from fastwarc.stream_io import ZstdReader

            data = ZstdReader(io.BytesIO(data)).read(16 << 20)
        return data

    @property
    def compressed(self) -> bool:
        return self._zstd is not None or self._engine is not None

    def _new_member(self, chunk: bytes, start: int) -> None:
        """Begin a gzip member at `start` of the input `chunk`; `_tail` is what of it has not been decompressed."""
        self._engine = zlib.decompressobj(zlib.MAX_WBITS | 16)
        self._chunk, self._start, self._tail, self._fresh = chunk, start, chunk[start:], True

    def read(self, size: int = -1) -> bytes:
        size = _BLOCK if size < 0 else max(1, min(size, 1 << 20))
        if self._engine is not None:
            data = self._read_gzip(size)
        else:
            data = (self._in if self._zstd is None else self._zstd).read(size)
        self._out += len(data)
        if self.compressed and self._out > _SLACK + self._expansion * self._in.count:
            raise Expansion(f"{self._in.count} bytes expand to more than {self._out}; refused as a decompression bomb")
        return data

    def _read_gzip(self, size: int) -> bytes:
        while True:
            if not self._tail:
                self._tail = self._in.read()
                if not self._tail:
                    if self._fresh:
                        return b""
                    raise EOFError("the gzip stream ends before its end mark")
                self._chunk, self._start = self._tail, -1 if not self._fresh else 0
            if self._fresh and not self._tail.strip(b"\x00"):  # padding between members
                self._tail = b""
                continue
            if self._fresh and len(self._tail) < 3:
                more = self._in.read()
                self._chunk, self._start, self._tail = self._tail + more, 0, self._tail + more
            self._fresh = False
            data = self._engine.decompress(self._tail, size)
            self._tail = self._engine.unconsumed_tail
            if self._engine.eof:
                rest = self._engine.unused_data
                self._new_member(self._chunk, len(self._chunk) - len(rest))
            if data:
                return data

    def resync(self) -> bool:
        """Whether there is another gzip member behind the damaged one, or bomb; reading then goes on there."""
        if self._engine is None:
            return False
        chunk, start = self._chunk, self._start + 1
        self._out = self._in.count = 0
        while True:
            found = chunk.find(b"\x1f\x8b\x08", start)
            if found >= 0:
                self._new_member(chunk, found)
                return True
            more = self._in.read()
            if not more:
                return False
            chunk, start = chunk[-2:] + more, 0

    def tell(self) -> int:
        """Bytes given so far."""
        return self._out

    def close(self) -> None:
        self._stream.close()

    def __enter__(self) -> PlainStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_plain(file: InputFile, limits: Limits) -> PlainStream:
    """The decompressed bytes of a file; gzip and zstd are told by their first bytes, not by the name."""
    return PlainStream(open_file(file.address), limits.expansion)


def read_lines(stream: PlainStream, limit: int) -> Iterator[tuple[bytes | None, bool]]:
    """(line without its end, whether it had one); None for a line of more than `limit` bytes, which is skipped."""
    buffer, skipping, searched = bytearray(), False, 0
    while data := stream.read(1 << 18):
        buffer += data
        start = 0
        while (end := buffer.find(b"\n", max(start, searched))) >= 0:
            yield (None if skipping or end - start > limit else bytes(buffer[start:end])), True
            start, skipping = end + 1, False
        del buffer[:start]
        if len(buffer) > limit:
            buffer.clear()
            skipping = True
        searched = len(buffer)
    if buffer or skipping:
        yield (None if skipping else bytes(buffer)), False


def read_bounded(stream: Any, limit: int) -> bytes:
    """All of a stream, or `limit` + 1 bytes of a larger one."""
    out = bytearray()
    while len(out) <= limit and (data := stream.read(min(1 << 18, limit + 1 - len(out)))):
        out += data
    return bytes(out)


def file_format(content: bytes) -> str:
    """The binary format that the first bytes show, or ""."""
    return next((name for magic, name in _FORMATS.items() if content.startswith(magic)), "")


def clean(value: str) -> str:
    """A header or column as valid, bounded Unicode in one line."""
    return " ".join(value.encode("utf-8", "replace").decode("utf-8").replace("\x00", "").split())[:4096]


def problem(kind: str, content: bytes, charset: str, limit: int) -> tuple[str, str] | None:
    """(reason, expected and found) of the first check that a record's content fails, or None."""
    if not content.strip():
        return "empty", f"{len(content)} bytes, nothing but blanks"
    if len(content) > limit:
        return "too_large", f"{len(content)} bytes, limit {limit} (ingest.max_record_mb)"
    found = file_format(content)
    if kind == "pdf":
        if b"%PDF-" in content[:1024]:
            return None
        return "mis_declared", f"declared as PDF, found {found or repr(content[:16])}"
    if found:
        return "mis_declared", f"declared as {kind}, found {found}"
    wide = content.startswith(_WIDE) or charset.lower().replace("_", "-").startswith(("utf-16", "utf-32"))
    if not wide:
        zeros = content.count(b"\x00")
        if zeros > (len(content) // 1000 if kind == "html" else 0):  # browsers read over a stray one
            return "nul_bytes", f"{zeros} NUL of {len(content)} bytes"
        head = content[:_BLOCK]
        controls = len(head) - len(head.translate(None, _CONTROL))
        if controls > 0.1 * len(head):
            return "binary", f"{controls} control characters in the first {len(head)} bytes"
    if charset and kind in ("text", "code"):
        try:
            content.decode(charset)
        except LookupError:
            return "wrong_charset", f"declared charset {charset!r} is none"
        except UnicodeError as error:
            return "wrong_charset", f"declared {charset}, but {str(error)[:200]}"
    return None


def make_record(
    source: Any,
    file: InputFile,
    number: int,
    kind: str,
    content: bytes,
    limits: Limits,
    *,
    path: str = "",
    fields: dict[str, str] | None = None,
    meta: dict[str, Any] | None = None,
    expected: bool = False,
) -> Record | Rejected:
    """The record, or why it is none. `fields`: url, charset, lang, licence as declared; `expected`: see `Rejected`."""
    fields = {key: clean(value) for key, value in (fields or {}).items()}
    wrong = problem(kind, content, fields.get("charset", ""), limits.record_bytes)
    path = path or file.name
    if wrong:
        place = path if path != file.name else f"{number}"
        return Rejected(
            file.name, place, *wrong, expected and wrong[0] in ("mis_declared", "nul_bytes", "binary", "empty")
        )
    fields["licence"] = fields.get("licence") or source.licence
    meta = {"file": file.name, "record": number} | ({"domain": source.domain} if source.domain else {}) | (meta or {})
    identity = record_id(source.name, f"{file.name}\x00{path}", number, content)
    return Record(identity, kind, content, path, source=source.name, meta=meta, **fields)
