"""WARC and WET files: web pages, PDFs and plain texts of a crawl (plain, gzip, zstd with or without a dictionary)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tasks.readers import DATA_ERRORS, Expansion, Limits, Rejected, make_record, open_plain
from tasks.records import Record
from tasks.remote import InputFile
from tasks.warc import BadRecord, Page, read_stream

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


def read_warc_file(file: InputFile, source: Any, limits: Limits) -> Iterator[Record | Rejected]:
    """Response, resource and conversion records in order. A damaged gzip member costs its record alone."""
    number, name, again, torn, large = 0, file.name, True, False, False
    with open_plain(file, limits) as stream:
        while again:
            again = False
            try:
                for found in read_stream(stream, name, limits.record_bytes, TYPES):
                    number += 1
                    torn, large = False, isinstance(found, BadRecord) and found.reason == "too_large"
                    yield _record(file, source, limits, number, found)
            except Expansion as error:
                again = stream.resync()
                if not torn and not large:  # a bomb of one record was rejected by its declared length already
                    yield Rejected(name, f"after record {number}", "expands_too_far", str(error))
                torn = True
            except BaseException as error:
                # PanicException: what the parser, a Rust library, makes of some errors; no subclass of Exception
                if not isinstance(error, DATA_ERRORS) and type(error).__name__ != "PanicException":
                    raise
                cut = isinstance(error, EOFError) or "incomplete" in str(error)
                detail = f"after record {number}: {type(error).__name__}: {error}"
                again = stream.resync()
                if not torn:  # one reject per damaged place, however many members look like one in it
                    reason = "truncated_file" if cut and not again else "corrupt_record"
                    yield Rejected(name, f"after record {number}", reason, detail)
                torn = True
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
