"""WARC and WET files: web pages, PDFs and plain texts of a crawl (plain, gzip, zstd with or without a dictionary)."""

from __future__ import annotations

import re
from collections import Counter
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
    "application/vnd.wap.xhtml+xml": "html",
    "application/pdf": "pdf",
    "application/x-pdf": "pdf",
    "text/plain": "text",
}
_SAYS_NOTHING = (
    "", "application/octet-stream", "binary/octet-stream", "unknown/unknown", "application/unknown", "text/xml",
    "application/xml", "html", "*/*",
)  # fmt: skip


_SNIFFED = re.compile(  # what browsers take for HTML
    rb"<(?:!doctype\s+html|html|head|body|script|iframe|h1|div|font|table|a|style|title|b|br|p|meta|link)(?=[\s>/])|<!--",
    re.IGNORECASE,
)
_MARKS = {b"\xff\xfe": "utf-16-le", b"\xfe\xff": "utf-16-be"}


def page_kind(page: Page) -> str:
    """The kind of record that a page's content type says, its first bytes where it says nothing, or ""."""
    if page.content_type in KIND_OF:
        return KIND_OF[page.content_type]
    if page.content_type not in _SAYS_NOTHING:
        return ""
    head = page.body[:2048]
    for mark, charset in _MARKS.items():
        if head.startswith(mark):
            head = head[2:].decode(charset, "ignore").encode()
    head = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if head.startswith(b"%PDF-"):
        return "pdf"
    if head.startswith(b"<?xml"):
        return "html" if re.search(rb"<html[\s>]", head, re.IGNORECASE) else ""
    return "html" if _SNIFFED.match(head) and "xml" not in page.content_type else ""


def read_warc_file(file: InputFile, source: Any, limits: Limits) -> Iterator[Record | Rejected]:
    """Response, resource and conversion records in order.

    A damaged record costs itself alone: reading goes on at the next place that begins like a record, and behind damage of
    the compression at the next gzip member.
    """
    number, name, torn, large, others = 0, file.name, False, False, Counter()
    with open_plain(file, limits) as stream:
        more = True
        while more:
            more = False
            try:
                for found in read_stream(stream, name, limits.record_bytes, TYPES, others):
                    bad = isinstance(found, BadRecord)
                    if (
                        bad and torn and found.reason == "corrupt_record"
                    ):  # the rest of a record whose member was damaged
                        continue
                    number, torn = number + 1, False
                    large = bad and found.reason == "too_large"
                    yield _record(file, source, limits, number, found)
            except Expansion as error:
                more = stream.resync()
                if not torn and not large:  # a bomb of one record was rejected by its declared length already
                    yield Rejected(name, f"after record {number}", "expands_too_far", str(error))
                torn = True
            except BaseException as error:
                # PanicException: what the zstd reader, a Rust library, makes of some errors; no subclass of Exception
                if not isinstance(error, DATA_ERRORS) and type(error).__name__ != "PanicException":
                    raise
                cut = isinstance(error, EOFError) or "incomplete" in str(error)
                more = stream.resync()
                if not torn:  # one reject per damaged place, however many members look like one in it
                    reason = "truncated_file" if cut and not more else "corrupt_record"
                    detail = f"after record {number}: {type(error).__name__}: {error}"
                    yield Rejected(name, f"after record {number}", reason, detail)
                torn = True
    if not number and not torn:
        if others:
            detail = ", ".join(f"{n} {kind}" for kind, n in sorted(others.items()))
            yield Rejected(name, "", "no_page", f"only records of other types: {detail}", expected=True)
        else:
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
