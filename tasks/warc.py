"""WARC files: a deterministic writer for pages taken from packages, and a streaming reader that survives bad records.

Equal pages give equal bytes: record ids are UUIDs of the content, dates are given, each record is its own gzip member
with no time stamp in it.

Count the pages of a file:  python -m tasks.warc data/acquire/warc/part-00000.warc.gz
"""

from __future__ import annotations

import argparse
import base64
import gzip
import hashlib
import io
import re
import uuid
import zlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO
from urllib.parse import quote

_NAMESPACE = uuid.UUID("6ba7b811-9dad-11d1-80b4-00c04fd430c8")  # RFC 4122, URLs
GZIP_MAGIC = b"\x1f\x8b"


def target_uri(url: str) -> str:
    """`url` with everything that may not stand in a header percent-encoded."""
    return quote(url, safe="%/:=&?~#+!$,;'@()*[]")


class WarcWriter:
    """Writes `<folder>/part-00000.warc.gz`, ...; a new file after `shard_bytes` of payload."""

    def __init__(self, folder: Path, date: str, shard_bytes: int = 32 << 20, level: int = 6):
        self.folder, self.shard_bytes, self.level = Path(folder), shard_bytes, level
        self.date = f"{date}T00:00:00Z"
        self.shards: list[Path] = []
        self._stream = None
        self._written = 0
        self.folder.mkdir(parents=True, exist_ok=True)

    def _record(self, headers: dict[str, str], block: bytes) -> None:
        lines = ["WARC/1.1", *(f"{k}: {v}" for k, v in headers.items()), f"Content-Length: {len(block)}", "", ""]
        data = "\r\n".join(lines).encode("utf-8") + block + b"\r\n\r\n"
        compressor = zlib.compressobj(self.level, zlib.DEFLATED, zlib.MAX_WBITS | 16)
        self._stream.write(compressor.compress(data) + compressor.flush())

    def _open(self) -> None:
        path = self.folder / f"part-{len(self.shards):05d}.warc.gz"
        self.shards.append(path)
        self._stream = path.open("wb")
        self._written = 0
        name = f"<urn:uuid:{uuid.uuid5(_NAMESPACE, path.name)}>"
        headers = {"WARC-Type": "warcinfo", "WARC-Record-ID": name, "WARC-Date": self.date, "WARC-Filename": path.name}
        self._record(
            headers | {"Content-Type": "application/warc-fields"}, b"software: arcline\r\nformat: WARC/1.1\r\n"
        )

    def write_page(self, url: str, html: bytes, package: str, label: str = "") -> Path:
        """Add one response record; returns the shard it went to. `package` is `<registry>/<name>/<version>`."""
        if self._stream is None or self._written >= self.shard_bytes:
            self.close()
            self._open()
        url = target_uri(url)
        head = f"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: {len(html)}\r\n\r\n".encode()
        name = uuid.uuid5(_NAMESPACE, f"{url} {hashlib.sha256(html).hexdigest()}")
        digest = base64.b32encode(hashlib.sha1(html, usedforsecurity=False).digest()).decode()
        headers = {
            "WARC-Type": "response",
            "WARC-Record-ID": f"<urn:uuid:{name}>",
            "WARC-Date": self.date,
            "WARC-Target-URI": url,
            "WARC-Payload-Digest": f"sha1:{digest}",
            "WARC-Source-Package": package,
        }
        if label:
            headers["WARC-Source-Label"] = label
        self._record(headers | {"Content-Type": "application/http; msgtype=response"}, head + html)
        self._written += len(html)
        return self.shards[-1]

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None


@dataclass(frozen=True)
class Page:
    """A record's payload: raw body bytes, the charset its HTTP header names (or ""), and our source headers."""

    url: str
    body: bytes
    charset: str
    package: str
    label: str
    content_type: str
    status: int = 200  # of HTTP
    date: str = ""
    lang: str = ""  # as a WET file's record names it
    offset: int = field(default=0, compare=False)  # of the record in the decompressed stream


@dataclass(frozen=True)
class BadRecord:
    """A record, or the rest of a file, that could not be read."""

    record_id: str
    reason: str
    detail: str
    offset: int = field(default=0, compare=False)


def read_warc(path: str | Path, max_bytes: int = 32 << 20) -> Iterator[Page | BadRecord]:
    """Stream the response records of a plain or gzip WARC file (1.0 or 1.1) in order.

    Bad records (no target address, larger than `max_bytes`, undecodable) and a truncated or corrupt tail come out as
    `BadRecord` instead of raising; an empty file gives one `BadRecord`.
    """
    path = Path(path)
    if path.stat().st_size == 0:
        yield BadRecord(path.name, "empty_file", "zero bytes")
        return
    last = path.name
    with path.open("rb") as stream:
        truncated = _torn_gzip(path)
        try:
            for found in read_stream(stream, path.name, max_bytes):
                last = getattr(found, "record_id", "") or last
                yield found
        except Exception as error:  # the parser raises several kinds on corrupt input; none may stop the corpus
            yield BadRecord(
                last, "corrupt_record", f"{path.name}: after record {last}: {type(error).__name__}: {error}"
            )
            return
        if truncated:
            yield BadRecord(last, "truncated_file", f"{path.name}: {truncated}")


def read_stream(
    stream: BinaryIO, name: str, max_bytes: int, types: Collection[str] = ("response",)
) -> Iterator[Page | BadRecord]:
    """Records of these types (response, resource, conversion) of an open WARC or WET stream, in order.

    Bad records come out as `BadRecord`; what the stream or the parser raises on a corrupt file is the caller's to handle.
    """
    from fastwarc.warc import ArchiveIterator, WarcRecordType

    wanted = [getattr(WarcRecordType, kind) for kind in (*types, "unknown", "no_type")]
    for record in ArchiveIterator(stream, record_types=WarcRecordType.any_type, parse_http=False):
        if record.record_type not in wanted:  # those without a known type are damaged headers
            continue
        yield replace(_page(record, name, max_bytes), offset=record.stream_pos)


def _page(record, file: str, max_bytes: int) -> Page | BadRecord:
    """One record, its block read whole and measured against its declared length before any of it is used."""
    from fastwarc.warc import WarcRecordType

    url = record.headers.get("WARC-Target-URI", "")
    identity = record.record_id or url or file
    if record.record_type in (WarcRecordType.unknown, WarcRecordType.no_type):
        return BadRecord(identity, "unknown_type", f"{file}: WARC-Type {record.headers.get('WARC-Type', '')!r:.100}")
    if not url:
        return BadRecord(identity, "no_target_uri", file)
    declared = int(record.headers.get("Content-Length", "0") or 0)
    if declared > max_bytes:
        return BadRecord(identity, "too_large", f"{file}: {declared} bytes, limit {max_bytes}")
    block = record.reader.read(declared)
    if len(block) < declared:
        return BadRecord(identity, "truncated_record", f"{file}: {len(block)} of {declared} bytes of {url[:200]}")
    plain = record.record_type != WarcRecordType.response
    head, _, body = (b"", b"", block) if plain else block.partition(b"\r\n\r\n")
    lines = head.decode("latin-1").split("\r\n")
    fields = (line.partition(":") for line in lines[1:])
    http = {name.strip().lower(): value.strip() for name, _, value in fields}
    length, encoding = http.get("content-length", ""), http.get("content-encoding", "").lower()
    if "chunked" in http.get("transfer-encoding", "").lower():
        body = _dechunk(body)
    elif length.isdigit() and len(body) < int(length):
        return BadRecord(identity, "truncated_record", f"{file}: {len(body)} of {length} bytes of {url[:200]}")
    if encoding in _ENCODINGS:
        try:
            body = _decode(body, encoding, max_bytes)
        except (zlib.error, EOFError, OSError, RuntimeError) as error:
            return BadRecord(identity, "bad_content_encoding", f"{file}: {encoding}: {error}")
    if len(body) > max_bytes:
        return BadRecord(identity, "too_large", f"{file}: decompresses beyond {max_bytes} bytes")
    kind = http.get("content-type", "") if not plain else record.headers.get("Content-Type", "") or ""
    charset = kind.lower().partition("charset=")[2].partition(";")[0].strip(" \"'")
    status = re.match(r"HTTP/\S+ +(\d{3})\b", lines[0])
    return Page(
        url,
        body,
        charset,
        record.headers.get("WARC-Source-Package", "") or "",
        record.headers.get("WARC-Source-Label", "") or "",
        kind.partition(";")[0].strip().lower(),
        int(status[1]) if status else 200,
        record.headers.get("WARC-Date", "") or "",
        record.headers.get("WARC-Identified-Content-Language", "") or "",
    )


_ENCODINGS = ("gzip", "x-gzip", "deflate", "br", "zstd")


def _decode(body: bytes, encoding: str, max_bytes: int) -> bytes:
    """At most one byte over `max_bytes` of a body without its content encoding; an error when it ends too early."""
    if encoding in ("br", "zstd"):
        from fastwarc.stream_io import BrotliReader, ZstdReader

        reader = (BrotliReader if encoding == "br" else ZstdReader)(io.BytesIO(body))
        out = bytearray()
        while len(out) <= max_bytes and (data := reader.read(min(1 << 20, max_bytes + 1 - len(out)))):
            out += data
        return bytes(out)
    wbits = zlib.MAX_WBITS | 32 if "gzip" in encoding or body[:1] == b"\x78" else -zlib.MAX_WBITS
    engine = zlib.decompressobj(wbits)
    out = engine.decompress(body, max_bytes + 1)
    if len(out) <= max_bytes and not engine.eof:
        raise EOFError(f"ends after {len(out)} bytes, before its end mark")
    return out


def _dechunk(body: bytes) -> bytes:
    """The payload of an HTTP chunked body; the body itself when it is not really chunked (some crawlers undo it)."""
    out, at = [], 0
    while True:
        size_line, separator, _ = body[at : at + 1024].partition(b"\r\n")
        try:
            size = int(size_line.partition(b";")[0], 16)
        except ValueError:
            return body
        if not separator:
            return body
        at += len(size_line) + 2
        if size == 0:
            return b"".join(out)
        out.append(body[at : at + size])
        at += size + 2


def _torn_gzip(path: Path) -> str:
    """Why the last gzip member of a `.gz` file is incomplete, or "" - a reader that just stops would hide it."""
    with path.open("rb") as stream:
        if stream.read(2) != GZIP_MAGIC:
            return ""
    try:
        with gzip.open(path) as stream:
            while stream.read(1 << 20):
                pass
    except (EOFError, OSError, zlib.error) as error:
        return str(error)
    return ""


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="List the pages of WARC files.")
    parser.add_argument("files", nargs="+")
    for file in parser.parse_args(argv).files:
        for page in read_warc(file):
            print(f"{len(page.body):>9} {page.url}" if isinstance(page, Page) else f"BAD {page.reason} {page.detail}")


if __name__ == "__main__":
    main()
