"""HTTP responses as archives hold them: header, transfer and content encodings undone within bounds.

Crawlers keep what servers sent: header lines that end in LF, answers 100 before the real one, several encodings one on the
other, `gzip` among the transfer encodings, bodies that were unpacked while the header was not changed.

    python -m pytest tests/tasks/test_warc_records.py
"""

from __future__ import annotations

import io
import re
import zlib
from dataclasses import dataclass

from tasks.warc_records import header_fields, length_of

ENCODINGS = ("gzip", "x-gzip", "deflate", "br", "zstd")
CODING_ERRORS = (zlib.error, EOFError, OSError, RuntimeError, ValueError)
_HEAD_END = re.compile(rb"\r?\n\r?\n")
_STATUS = re.compile(rb"HTTP/[\d.]+ +(\d{3})\b")
_CHARSET = re.compile(r"""charset\s*=\s*["']?\s*([^"';,\s]+)""", re.IGNORECASE)
_CHUNK = re.compile(rb"[ \t]*([0-9A-Fa-f]{1,8})[ \t]*(?:;[^\n]{0,1000})?\r?\n")
_SKIPPED_ANSWERS = 5
_PIECE = 1 << 14  # zlib copies what is behind a member's end, and there may be a million members


class Cut(ValueError):
    """A body ends before the end that its header announces."""


class TooLarge(ValueError):
    """A body is larger than the bound when its encodings are undone."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An HTTP response with its body decoded. `kind`: media type in lower case, or ""; `charset` as declared, or ""."""

    status: int
    kind: str
    charset: str
    body: bytes


def media_type(value: str) -> tuple[str, str]:
    """(type, charset) of a Content-Type as servers write it: `text/html, text/html; Charset = "UTF-8"`; lower case."""
    kind = re.split(r"[;,\s]", value.strip().lower(), maxsplit=1)[0].strip("\"'")
    charset = _CHARSET.search(value[:1000])  # of its blanks the pattern takes quadratic time
    return kind, charset[1].lower() if charset else ""


def parse_answer(block: bytes, max_bytes: int) -> Answer:
    """The response in a record's block; a block that is no HTTP is a body of unknown type.

    Raises Cut, TooLarge, or one of CODING_ERRORS with the name of the encoding that cannot be undone.
    """
    head, body = b"", block
    for _ in range(_SKIPPED_ANSWERS):
        if not body.startswith(b"HTTP/"):
            break
        end = _HEAD_END.search(body)
        head, body = (body[: end.start()], body[end.end() :]) if end else (body, b"")
        status = _STATUS.match(head)
        if status is None or not status[1].startswith(b"1"):
            break
    if not head:
        return Answer(200, "", "", block)
    status = _STATUS.match(head)
    fields = header_fields(head.partition(b"\n")[2])
    transfer = [t.strip() for t in fields.get("transfer-encoding", "").lower().split(",")]
    content = [t.strip() for t in fields.get("content-encoding", "").lower().split(",")]
    length, had = length_of(fields), len(body)
    short = had < length
    if "chunked" in transfer:
        body, short = dechunk(body), False
    codings = [c for c in (*content, *transfer) if c in ENCODINGS]
    try:
        for coding in reversed(codings):
            body = decode(body, coding, max_bytes)
            if len(body) > max_bytes:
                raise TooLarge(f"decompresses beyond {max_bytes} bytes")
    except (Cut, TooLarge):
        raise
    except CODING_ERRORS as error:
        if short:
            raise Cut(f"{had} of {length} bytes") from None
        raise type(error)(f"{', '.join(codings)}: {error}") from None
    if short and not codings:  # what decodes to its end mark is whole, whatever its header says
        raise Cut(f"{had} of {length} bytes")
    if len(body) > max_bytes:
        raise TooLarge(f"{len(body)} bytes, limit {max_bytes}")
    return Answer(int(status[1]) if status else 200, *media_type(fields.get("content-type", "")), body)


def decode(body: bytes, coding: str, max_bytes: int) -> bytes:
    """At most one byte over `max_bytes` of a body without one content encoding; an error when it ends too early."""
    if coding in ("br", "zstd"):
        from fastwarc.stream_io import BrotliReader, ZstdReader

        reader = (BrotliReader if coding == "br" else ZstdReader)(io.BytesIO(body))
        out = bytearray()
        while len(out) <= max_bytes and (data := reader.read(min(1 << 20, max_bytes + 1 - len(out)))):
            out += data
        return bytes(out)
    wbits = zlib.MAX_WBITS | 32 if "gzip" in coding or body[:1] == b"\x78" else -zlib.MAX_WBITS
    out, at = bytearray(), 0
    while not at or body.startswith(b"\x1f\x8b\x08", at):  # a gzip file may have several members
        engine = zlib.decompressobj(wbits)
        while not engine.eof:
            piece = body[at : at + _PIECE]
            if not piece:
                raise EOFError(f"ends after {len(out)} bytes, before its end mark")
            out += engine.decompress(piece, max_bytes + 1 - len(out))
            at += len(piece) - len(engine.unused_data) - len(engine.unconsumed_tail)
            if len(out) > max_bytes:
                return bytes(out)
    return bytes(out)


def dechunk(body: bytes) -> bytes:
    """The payload of an HTTP chunked body; the body itself when it does not begin as one (some crawlers undo it).

    Cut when it begins as one and does not end as one.
    """
    out: list[bytes] = []
    at = 0
    while True:
        line = _CHUNK.match(body, at)
        if line is None:
            if not out:
                return body
            raise Cut(f"chunked, and there is no chunk at byte {at} of {len(body)}")
        size, start = int(line[1], 16), line.end()
        if size == 0:
            return b"".join(out) if out or not body[start:].strip() else body
        end = start + size
        follows = body[end : end + 2]
        if not out and follows and not follows.startswith((b"\r\n", b"\n")):
            return body  # a text that happens to begin with a hexadecimal number
        if len(body) < end:
            raise Cut(f"chunked, {len(body) - start} of a chunk's {size} bytes")
        out.append(body[start:end])
        at = end + (2 if follows.startswith(b"\r\n") else 1)
