"""WARC as found: header forms of many writers, wrong lengths, HTTP encodings; a damaged record costs itself alone."""

import gzip
import io
import random
import zlib

import brotli
import pytest
from warcio.archiveiterator import ArchiveIterator

from tasks.warc_http import Cut, dechunk, decode, media_type
from tasks.warc_records import header_fields, read_raw
from tests.tasks.source_fixtures import ingest_sources, warc, zstd

HTML = b"<html><body><p>hello "
OK = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n"


def chunked(data, size=7):
    return (
        b"".join(b"%x\r\n%s\r\n" % (len(p := data[i : i + size]), p) for i in range(0, len(data), size)) + b"0\r\n\r\n"
    )


def record(n, http=OK + b"\r\n", body=None, kind=b"response", media=b"application/http", eol=b"\r\n", **other):
    block = http + (HTML + b"%d" % n if body is None else body)
    fields = {b"WARC-Type": kind, b"WARC-Target-URI": other.get("url", b"http://x/%d" % n)}
    fields |= {b"Content-Type": media} if media else {}
    fields |= {b"Content-Length": b"%d" % other.get("length", len(block))}
    fields = {k.lower() if other.get("lower") else k: v for k, v in fields.items()}
    head = eol.join([other.get("version", b"WARC/1.0"), *(k + b": " + v for k, v in fields.items())])
    return head + eol + eol + block + eol + eol


def http(*lines):
    return b"\r\n".join([b"HTTP/1.1 200 OK", *lines, b"", b""])


FORMS = {  # that hold HTML + number, whole
    "lower-case names": lambda n: record(n, lower=True),
    "lines that end in LF": lambda n: record(n, eol=b"\n"),
    "version 0.18": lambda n: record(n, version=b"WARC/0.18"),
    "address in brackets": lambda n: record(n, url=b"<http://x/%d>" % n),
    "no content type of the record": lambda n: record(n, media=b""),
    "resource": lambda n: record(n, b"", kind=b"resource", media=b"text/html; charset=utf-8"),
    "a response that is no HTTP": lambda n: record(n, b"", media=b"text/html"),
    "HTTP 0.9": lambda n: record(n, b""),
    "HTTP header with LF": lambda n: record(n, b"HTTP/1.1 200 OK\nContent-Type: text/html\n\n"),
    "HTTP/2": lambda n: record(n, b"HTTP/2 200\r\ncontent-type: text/html\r\n\r\n"),
    "100 first": lambda n: record(n, b"HTTP/1.1 100 Continue\r\n\r\n" + OK + b"\r\n"),
    "folded field": lambda n: record(n, http(b"X: a", b" b: c", b"Content-Type:", b" text/html")),
    "type twice": lambda n: record(n, http(b"Content-Type: text/html, text/html; charset=utf-8")),
    "type without semicolon": lambda n: record(n, http(b"Content-Type: text/html charset=utf-8")),
    "no type": lambda n: record(n, http()),
    "chunked gzip": lambda n: record(
        n, OK + b"Transfer-Encoding: chunked\r\nContent-Encoding: gzip\r\n\r\n", chunked(gzip.compress(HTML + b"%d" % n))
    ),
    "gzip as transfer encoding": lambda n: record(
        n, OK + b"Transfer-Encoding: gzip, chunked\r\n\r\n", chunked(gzip.compress(HTML + b"%d" % n))
    ),
    "gzip twice": lambda n: record(
        n, OK + b"Content-Encoding: gzip, gzip\r\n\r\n", gzip.compress(gzip.compress(HTML + b"%d" % n))
    ),
    "brotli": lambda n: record(n, OK + b"content-encoding: BR\r\n\r\n", brotli.compress(HTML + b"%d" % n)),
    "raw deflate": lambda n: record(
        n, OK + b"Content-Encoding: deflate\r\n\r\n", zlib.compress(HTML + b"%d" % n)[2:-4]
    ),
    "two gzip members": lambda n: record(
        n, OK + b"Content-Encoding: gzip\r\n\r\n", gzip.compress(HTML) + gzip.compress(b"%d" % n)
    ),
    "chunked, already undone": lambda n: record(n, OK + b"Transfer-Encoding: chunked\r\n\r\n"),
    "length of the unpacked body": lambda n: record(
        n, OK + b"Content-Encoding: gzip\r\nContent-Length: 5000\r\n\r\n", gzip.compress(HTML + b"%d" % n)
    ),
}  # fmt: skip


@pytest.mark.parametrize("pack", ["plain", "gzip of all", "gzip each", "zstd"])
def test_records_of_every_form_come_out_whole_in_one_file(tmp_path, pack):
    made = [form(n) for n, form in enumerate(FORMS.values(), 1)]
    packed = {
        "plain": b"".join, "gzip of all": lambda x: gzip.compress(b"".join(x)), "zstd": lambda x: zstd(b"".join(x)),
        "gzip each": lambda x: b"".join(map(gzip.compress, x)),
    }[pack](made)  # fmt: skip
    (tmp_path / "a.warc").write_bytes(packed)
    found = ingest_sources(tmp_path / "run", [{"name": "w", "type": "warc", "path": str(tmp_path / "a.warc")}])
    assert not found.rejects and not found.skipped
    assert dict(zip(FORMS, found.texts, strict=True)) == {
        name: f"{HTML.decode()}{n}" for n, name in enumerate(FORMS, 1)
    }
    assert {r.kind for r in found.records} == {"html"} and found.records[3].url == "http://x/4"


@pytest.mark.parametrize("pages", [
    b"\xef\xbb\xbf<!DOCTYPE html><p>x", b"<!-- c --><html>x", b"<?xml version='1.0'?><html xmlns='a'>x", b"<head><title>t",
    "\ufeff<html>x".encode("utf-16-le"),
])  # fmt: skip
def test_pages_without_a_type_are_told_by_their_first_bytes(tmp_path, pages):
    other = record(2, http(), b"a text about <html>") + record(3, http(b"Content-Type: text/xml"), b"<?xml?><rss><p>")
    (tmp_path / "a.warc").write_bytes(record(1, http(), pages) + other)
    found = ingest_sources(tmp_path / "run", [{"name": "w", "type": "warc", "path": str(tmp_path / "a.warc")}])
    assert [r.content for r in found.records] == [pages]
    assert [s["reason"] for s in found.skipped] == ["content_type"] * 2


@pytest.mark.parametrize("wrong", [3, 40, 100, 200, 10**6, 10**11])
@pytest.mark.parametrize("pack", [b"".join, lambda made: b"".join(map(gzip.compress, made))])
def test_a_wrong_length_costs_its_record_alone(tmp_path, wrong, pack):
    made = [record(1), record(2), record(3, length=wrong), record(4), record(5)]
    (tmp_path / "a.warc").write_bytes(pack(made))
    source = {"name": "w", "type": "warc", "path": str(tmp_path / "a.warc")}
    found = ingest_sources(tmp_path / "run", [source], max_record_mb=10.0)
    assert [r.url[-1] for r in found.records] == ["1", "2", "4", "5"]
    assert found.texts[2] == HTML.decode() + "4"
    assert found.reasons == ["too_large" if wrong > 10**10 else "wrong_length"]


def test_a_body_cut_between_chunks_or_inside_one_is_reported(tmp_path):
    body = chunked(HTML * 3)
    assert dechunk(body) == HTML * 3 and dechunk(b"a text\r\n") == b"a text\r\n"
    assert dechunk(b"abc\r\n" + HTML * 200) == b"abc\r\n" + HTML * 200
    for cut in (len(body) - 5, len(body) - 8, 20, 24):
        with pytest.raises(Cut):
            dechunk(body[:cut])
    (tmp_path / "a.warc").write_bytes(record(1, OK + b"Transfer-Encoding: chunked\r\n\r\n", body[:30]))
    found = ingest_sources(tmp_path / "run", [{"name": "w", "type": "warc", "path": str(tmp_path / "a.warc")}])
    assert found.reasons == ["truncated_record"] and not found.records


def test_a_file_without_pages_is_no_fault(tmp_path):
    (tmp_path / "a.warc").write_bytes(record(1, kind=b"revisit") + record(2, b"", b"a: b", kind=b"metadata"))
    found = ingest_sources(tmp_path / "run", [{"name": "w", "type": "warc", "path": str(tmp_path / "a.warc")}])
    assert not found.rejects and "1 metadata, 1 revisit" in found.skipped[0]["detail"]


def test_content_types_as_servers_write_them():
    assert media_type('Text/HTML;Charset = "UTF-8"') == ("text/html", "utf-8")
    assert media_type("text/html;charset=windows-1251; a=b") == ("text/html", "windows-1251")
    assert media_type("") == ("", "")


def test_blocks_equal_those_of_an_independent_reader_at_any_size_of_reads():
    rng = random.Random(0)
    pages = [(f"http://x/{i}", rng.randbytes(rng.choice([0, 1, 5, 300_000])), "text/html") for i in range(12)]
    data = warc(pages, compress=False)
    wanted = [
        (r.rec_headers.get_header("WARC-Type"), r.raw_stream.read())
        for r in ArchiveIterator(io.BytesIO(data), no_record_parse=True)
    ]

    class Slow(io.BytesIO):
        def read(self, size=-1):
            return super().read(min(size, rng.choice([1, 2, 3, 50, 1000, 100_000])))

    for stream in (io.BytesIO(data), Slow(data), Slow(data)):
        assert [(r.fields["warc-type"], r.block) for r in read_raw(stream, 1 << 20)] == wanted


def test_blank_lines_behind_a_record_are_not_held():
    class Blank(io.RawIOBase):
        """A record, then 64 MB of line ends; `given` counts what was read."""

        given, first = 0, record(1)

        def read(self, size=-1):
            data = self.first if not self.given else b"\r\n" * (size // 2) if self.given < 64 << 20 else b""
            self.given += len(data)
            return data

    stream = Blank()
    found = next(read_raw(stream, 1 << 20))
    assert found.wrong is None and found.block.endswith(b"1") and stream.given < 2 << 20


@pytest.mark.parametrize("digits", [b"9" * 5000, "\u0663".encode()])
def test_lengths_that_are_no_size_cost_their_record_alone(digits):
    damaged = record(1).replace(b"Content-Length: ", b"Content-Length: " + digits, 1)
    found = list(read_raw(io.BytesIO(damaged + record(2)), 1 << 20))
    assert [r.wrong and r.wrong[0] for r in found] == ["wrong_length", None] and found[1].block.endswith(b"2")


def test_header_lines_are_joined_and_charsets_found():
    assert header_fields(b"A: 1\r\n 2\r\n \r\n\t3\r\nb:\r\n 4") == {"a": "1 2 3", "b": "4"}
    assert len(header_fields(b"a: b\r\n" + b" c\r\n" * 200_000)["a"]) == 400_001
    assert media_type("text/html; charset=" + " " * 400_000 + ";") == ("text/html", "")


def test_gzip_of_many_members_and_numbers_that_are_no_chunks():
    parts = [b"%d " % i * 3000 for i in range(40)]
    packed = b"".join(map(gzip.compress, parts))
    assert decode(packed, "gzip", 1 << 24) == b"".join(parts)
    assert len(decode(packed, "gzip", 1000)) == 1001
    with pytest.raises(EOFError):
        decode(packed[:-4], "gzip", 1 << 24)
    assert decode(gzip.compress(b"") * 100_000, "gzip", 1000) == b""
    assert dechunk(b"0\n1\n2\n") == b"0\n1\n2\n" and dechunk(b"0\r\n\r\n") == b""
