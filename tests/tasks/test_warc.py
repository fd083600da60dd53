"""WARC: what we write other readers read, equal pages give equal bytes, and bad input never stops the reader."""

import gzip
import io
from pathlib import Path

import pytest
from warcio.archiveiterator import ArchiveIterator
from warcio.statusandheaders import StatusAndHeaders
from warcio.warcwriter import WARCWriter

from tasks.warc import BadRecord, Page, WarcWriter, read_warc

GOLD = Path(__file__).resolve().parents[3] / "shared/gold/warc"
PAGES = [(f"http://example.org/{i}?q=a b\u00e9", f"<p>page {i} {'x' * 500}</p>".encode()) for i in range(6)]


def write(folder, pages=PAGES, shard_bytes=1 << 20):
    writer = WarcWriter(folder, "2026-01-01", shard_bytes)
    for url, html in pages:
        writer.write_page(url, html, "pip/demo/1", "forms=l")
    writer.close()
    return writer.shards


def test_an_independent_reader_reads_it_and_its_digests_hold(tmp_path):
    (shard,) = write(tmp_path)
    with shard.open("rb") as stream:
        records = []
        for record in ArchiveIterator(stream, check_digests="raise"):
            records.append(
                (record.rec_type, record.rec_headers.get_header("WARC-Target-URI"), record.content_stream().read())
            )
    assert [r[0] for r in records] == ["warcinfo"] + ["response"] * 6
    assert records[1][1:] == ("http://example.org/0?q=a%20b%C3%A9", PAGES[0][1])


def test_round_trip_shards_and_determinism(tmp_path):
    shards = write(tmp_path / "a", shard_bytes=1000)
    assert [p.name for p in shards] == ["part-00000.warc.gz", "part-00001.warc.gz", "part-00002.warc.gz"]
    pages = [page for shard in shards for page in read_warc(shard)]
    assert [page.body for page in pages] == [html for _, html in PAGES]
    assert (pages[0].package, pages[0].label, pages[0].content_type) == ("pip/demo/1", "forms=l", "text/html")
    for one, two in zip(shards, write(tmp_path / "b", shard_bytes=1000), strict=True):
        assert one.read_bytes() == two.read_bytes()


def test_plain_warc_is_read_too(tmp_path):
    (shard,) = write(tmp_path)
    plain = tmp_path / "plain.warc"
    plain.write_bytes(gzip.decompress(shard.read_bytes()))
    assert list(read_warc(plain)) == list(read_warc(shard))


@pytest.mark.parametrize("cut", [3, 40, 200])
def test_truncated_gzip_gives_the_whole_records_and_one_bad_one(tmp_path, cut):
    (shard,) = write(tmp_path)
    shard.write_bytes(shard.read_bytes()[:-cut])
    found = list(read_warc(shard))
    pages = [f for f in found if isinstance(f, Page)]
    assert [p.body for p in pages[:5]] == [html for _, html in PAGES[:5]]
    assert all(p.body == html for p, (_, html) in zip(pages, PAGES, strict=False))  # never a torn page
    assert [f for f in found if isinstance(f, BadRecord)]


def test_garbage_in_the_middle_is_reported(tmp_path):
    (shard,) = write(tmp_path)
    data = bytearray(shard.read_bytes())
    half = len(data) // 2
    data[half : half + 60] = b"\x00" * 60
    shard.write_bytes(bytes(data))
    found = list(read_warc(shard))
    assert isinstance(found[0], Page) and any(isinstance(f, BadRecord) for f in found)


def test_empty_and_foreign_files(tmp_path):
    (tmp_path / "zero.warc.gz").write_bytes(b"")
    assert [f.reason for f in read_warc(tmp_path / "zero.warc.gz")] == ["empty_file"]
    (tmp_path / "text.warc").write_bytes(b"this is no WARC file\n" * 50)
    assert all(isinstance(f, BadRecord) for f in read_warc(tmp_path / "text.warc"))


def foreign(tmp_path, headers, body, uri="http://example.org/"):
    path = tmp_path / "foreign.warc.gz"
    with path.open("wb") as stream:
        http = StatusAndHeaders("200 OK", headers, protocol="HTTP/1.1")
        writer = WARCWriter(stream, gzip=True)
        writer.write_record(writer.create_warc_record(uri, "response", io.BytesIO(body), http_headers=http))
    return list(read_warc(path, max_bytes=100_000))


def test_content_encoding_is_undone_within_bounds(tmp_path):
    kind = ("Content-Type", "text/html; charset=ISO-8859-2")
    (page,) = foreign(tmp_path, [kind, ("Content-Encoding", "gzip")], gzip.compress(b"<p>hello"))
    assert page.body == b"<p>hello" and page.charset == "iso-8859-2"
    (bomb,) = foreign(tmp_path, [kind, ("Content-Encoding", "gzip")], gzip.compress(bytes(1 << 20)))
    assert bomb.reason == "too_large"
    (bad,) = foreign(tmp_path, [kind, ("Content-Encoding", "gzip")], b"not gzip")
    assert bad.reason == "bad_content_encoding"


def test_chunked_bodies_are_joined_where_they_really_are_chunked(tmp_path):
    headers = [("Content-Type", "text/html"), ("Transfer-Encoding", "chunked")]
    (page,) = foreign(tmp_path, headers, b"4\r\n<p>h\r\n4;x=y\r\nello\r\n0\r\n\r\n")
    assert page.body == b"<p>hello"
    (page,) = foreign(tmp_path, headers, b"<p>hello")
    assert page.body == b"<p>hello"


def test_a_body_shorter_than_it_says_is_rejected(tmp_path):
    (bad,) = foreign(tmp_path, [("Content-Type", "text/html"), ("Content-Length", "500")], b"<p>hello")
    assert bad.reason == "truncated_record" and "8 of 500" in bad.detail


@pytest.mark.skipif(not GOLD.is_dir(), reason="../shared/gold/warc is absent")
def test_gold_warc_plain_and_gzip_hold_the_same_page():
    found = [list(read_warc(p)) for p in sorted(GOLD.iterdir()) if p.name.endswith((".warc", ".warc.gz"))]
    assert len(found) == 2 and found[0] == found[1]
    assert [type(f) for f in found[0]] == [Page] and b"</html>" in found[0][0].body.lower()
