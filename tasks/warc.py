"""WARC files: a deterministic writer for pages taken from packages, and a streaming reader that survives bad records.

Equal pages give equal bytes: record ids are UUIDs of the content, dates are given, each record is its own gzip member
with no time stamp in it.

Count the pages of a file:  python -m tasks.warc data/acquire/warc/part-00000.warc.gz
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import gzip
import hashlib
import uuid
import zlib
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote

from tasks.warc_http import CODING_ERRORS, Answer, Cut, TooLarge, media_type, parse_answer
from tasks.warc_records import RawRecord, read_raw

_NAMESPACE = uuid.UUID("6ba7b811-9dad-11d1-80b4-00c04fd430c8")  # RFC 4122, URLs
OTHER_TYPES = ("warcinfo", "response", "resource", "request", "metadata", "revisit", "conversion", "continuation")


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


@dataclass(frozen=True)
class BadRecord:
    """A record, or the rest of a file, that could not be read."""

    record_id: str
    reason: str
    detail: str


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
    with path.open("rb") as raw, _plain(raw) as stream:
        try:
            for found in read_stream(stream, path.name, max_bytes):
                last = getattr(found, "record_id", "") or last
                yield found
        except Exception as error:  # decompression raises several kinds on corrupt input; none may stop the corpus
            reason = "truncated_file" if isinstance(error, EOFError) else "corrupt_record"
            yield BadRecord(last, reason, f"{path.name}: after record {last}: {type(error).__name__}: {error}")


class _Gzip(gzip.GzipFile):
    """Gives what it has before it raises where the file is damaged: GzipFile.read() would lose a call's records."""

    def read(self, size: int = -1) -> bytes:
        return self.read1(size)


def _plain(raw: BinaryIO) -> Any:
    """The decompressed side of an open file of our own; those of the user go through tasks/readers.py, with bounds."""
    magic = raw.read(4)
    raw.seek(0)
    if magic.startswith(b"\x1f\x8b"):
        return _Gzip(fileobj=raw)
    if magic == b"\x28\xb5\x2f\xfd":
        from fastwarc.stream_io import ZstdReader

        return contextlib.closing(ZstdReader(raw))
    return contextlib.nullcontext(raw)


def read_stream(
    stream: BinaryIO,
    name: str,
    max_bytes: int,
    types: Collection[str] = ("response",),
    others: Counter[str] | None = None,
) -> Iterator[Page | BadRecord]:
    """Records of these types (response, resource, conversion) of an open WARC or WET stream, in order.

    Bad records come out as `BadRecord`; what the stream raises where it is corrupt is the caller's to handle. `others` counts
    the records of the standard's other types.
    """
    for record in read_raw(stream, max_bytes):
        kind = record.fields.get("warc-type", "").lower()
        if kind in OTHER_TYPES and kind not in types:
            if others is not None:
                others[kind] += 1
            continue
        yield _page(record, kind, kind in types, name, max_bytes)


def _page(record: RawRecord, kind: str, wanted: bool, file: str, max_bytes: int) -> Page | BadRecord:
    fields = record.fields
    url = fields.get("warc-target-uri", "")
    url = url[1:-1] if url.startswith("<") and url.endswith(">") else url  # as some versions of wget write it
    identity = fields.get("warc-record-id", "") or url or file
    if fields and not wanted:  # a damaged header
        return BadRecord(identity, "unknown_type", f"{file}: WARC-Type {fields.get('warc-type', '')!r:.100}")
    if record.wrong:
        reason, detail = record.wrong
        return BadRecord(identity, reason, f"{file}: {detail}" + (f" of {url[:200]}" if url else ""))
    if not url:
        return BadRecord(identity, "no_target_uri", file)
    said = fields.get("content-type", "")
    plain = kind != "response" or not (said.lower().startswith("application/http") or record.block.startswith(b"HTTP/"))
    if plain:
        body = record.block
        answer = Answer(200, *(("", "") if said.lower().startswith("application/http") else media_type(said)), body)
    else:
        try:
            answer = parse_answer(record.block, max_bytes)
        except Cut as error:
            return BadRecord(identity, "truncated_record", f"{file}: {error} of {url[:200]}")
        except TooLarge as error:
            return BadRecord(identity, "too_large", f"{file}: {error}")
        except CODING_ERRORS as error:
            return BadRecord(identity, "bad_content_encoding", f"{file}: {error}")
    return Page(
        url,
        answer.body,
        answer.charset,
        fields.get("warc-source-package", ""),
        fields.get("warc-source-label", ""),
        answer.kind,
        answer.status,
        fields.get("warc-date", ""),
        fields.get("warc-identified-content-language", ""),
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="List the pages of WARC files.")
    parser.add_argument("files", nargs="+")
    for file in parser.parse_args(argv).files:
        for page in read_warc(file):
            print(f"{len(page.body):>9} {page.url}" if isinstance(page, Page) else f"BAD {page.reason} {page.detail}")


if __name__ == "__main__":
    main()
