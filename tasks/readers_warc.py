"""WARC and WET files: web pages, PDFs and plain texts of a crawl (plain, gzip, zstd with or without a dictionary)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from tasks.readers import DATA_ERRORS, Expansion, Limits, PlainStream, Rejected, make_record, open_plain
from tasks.records import Record
from tasks.remote import InputFile
from tasks.warc import BadRecord, Page, read_stream

_RECORD = b"\nWARC/1."
_MAX_REOPENED = 20
TYPES = ("response", "resource", "conversion")
KIND_OF = {
    "text/html": "html",
    "application/xhtml+xml": "html",
    "application/pdf": "pdf",
    "application/x-pdf": "pdf",
    "text/plain": "text",
}


def page_kind(page: Page) -> str:
    """The kind of record that a page's content type says, its first bytes where it says nothing, or ""."""
    if page.content_type in ("", "application/octet-stream", "unknown/unknown"):
        head = page.body[:1024].lstrip().lower()
        return "pdf" if head.startswith(b"%pdf-") else "html" if head.startswith((b"<!doctype html", b"<html")) else ""
    return KIND_OF.get(page.content_type, "")


class _Rest:
    """A stream from the next place on that begins like a WARC record."""

    def __init__(self, stream: PlainStream, skip: int):
        """Go on `skip` bytes and then to the next record; `start` is where it begins, -1 when there is none."""
        self._stream, self._head, self._given, self.start, at = stream, b"", 0, -1, 0
        while data := stream.read(1 << 18):
            at += len(data)
            if at <= skip:
                continue
            self._head = (self._head + data)[-min(len(self._head) + len(data), at - skip) :]
            found = self._head.find(_RECORD)
            if found >= 0:
                self._head = self._head[found + 1 :]
                self.start = at - len(self._head)
                return
            self._head = self._head[-len(_RECORD) :]

    def read(self, size: int = -1) -> bytes:
        data, self._head = self._head or self._stream.read(size), b""
        self._given += len(data)
        return data

    def tell(self) -> int:
        return self._given


def read_warc_file(file: InputFile, source: Any, limits: Limits) -> Iterator[Record | Rejected]:
    """Response, resource and conversion records in order.

    A damaged record costs itself alone: reading goes on at the next gzip member, or, where the file has none, at the next
    place that begins like a record; after `_MAX_REOPENED` such places the rest of a file is given up.
    """
    number, name, base, reopened, torn, large = 0, file.name, 0, 0, False, False
    stream = open_plain(file, limits)
    view: Any = stream
    try:
        while view is not None:
            last = 0
            try:
                for found in read_stream(view, name, limits.record_bytes, TYPES):
                    number, last = number + 1, found.offset
                    torn, large = False, isinstance(found, BadRecord) and found.reason == "too_large"
                    yield _record(file, source, limits, number, found)
                view = None
            except Expansion as error:
                view = stream if stream.resync() else None
                if not torn and not large:  # a bomb of one record was rejected by its declared length already
                    yield Rejected(name, f"after record {number}", "expands_too_far", str(error))
                torn = True
            except BaseException as error:
                # PanicException: what the parser, a Rust library, makes of some errors; no subclass of Exception
                if not isinstance(error, DATA_ERRORS) and type(error).__name__ != "PanicException":
                    raise
                cut = isinstance(error, EOFError) or "incomplete" in str(error)
                view = stream if stream.resync() else None
                if not torn:  # one reject per damaged place, however many members look like one in it
                    reason = "truncated_file" if cut and view is None else "corrupt_record"
                    detail = f"after record {number}: {type(error).__name__}: {error}"
                    yield Rejected(name, f"after record {number}", reason, detail)
                torn = True
                if view is None and not cut and reopened < _MAX_REOPENED:
                    stream.close()
                    stream, reopened = open_plain(file, limits), reopened + 1
                    with contextlib.suppress(*DATA_ERRORS):  # damage that decompression does not get past
                        rest = _Rest(stream, base + last + 1)
                        if rest.start >= 0:
                            view, base = rest, rest.start
                elif view is None and not cut and reopened:
                    yield Rejected(
                        name, f"after record {number}", "corrupt_file", "damaged too often; the rest is not read"
                    )
    finally:
        stream.close()
    if not number and not torn:
        detail = "no response, resource or conversion record: not a WARC or WET file"
        yield Rejected(name, "", "mis_declared", detail)


def _record(file: InputFile, source: Any, limits: Limits, number: int, found: Page | BadRecord) -> Record | Rejected:
    if isinstance(found, BadRecord):
        return Rejected(file.name, f"{number} {found.record_id}", found.reason, found.detail)
    place = f"{number} {found.url[:300]}"
    if not 200 <= found.status < 300:
        return Rejected(file.name, place, "http_status", str(found.status), expected=True)
    kind = page_kind(found)
    if not kind:
        return Rejected(file.name, place, "content_type", found.content_type or "none", expected=True)
    charset = found.charset or ("utf-8" if source.type == "wet" else "")
    fields = {"url": found.url, "charset": charset, "lang": found.lang}
    meta = {"date": found.date} if found.date else {}
    meta |= {"package": found.package} if found.package else {}
    return make_record(source, file, number, kind, found.body, limits, fields=fields, meta=meta)
