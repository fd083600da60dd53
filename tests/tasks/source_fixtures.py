"""Sources of every format for the tests of ingest, and a run of the stage over them."""

import gzip
import io
import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from warcio.statusandheaders import StatusAndHeaders
from warcio.warcwriter import WARCWriter

from tasks import ingest
from tasks.records import Record, read_records
from tasks.stage import run_stage_for_test

TEXTS = [f"document {i} \u00e9\u6f22 " + "word " * 40 for i in range(8)]


@dataclass
class Result:
    records: list[Record]
    rejects: list[dict]
    skipped: list[dict]
    folder: Path

    @property
    def texts(self) -> list[str]:
        return [r.content.decode() for r in self.records]

    @property
    def reasons(self) -> list[str]:
        return [r["reason"] for r in self.rejects]


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def ingest_sources(tmp: Path, sources: list[dict], storage: str = "", **config) -> Result:
    config = {"max_reject_share": 1.0, "workers": 1} | config
    run_stage_for_test(ingest, config, {"sources": sources, "storage": storage}, outs=["data/ingest"], tmp=tmp)
    out = tmp / "data/ingest"
    skipped = lines(out / "skipped/part-00000.jsonl")
    return Result(list(read_records(out)), lines(out / "rejects/part-00000.jsonl"), skipped, out)


def zstd(data: bytes) -> bytes:
    return pa.Codec("zstd").compress(data, asbytes=True)


def jsonl(texts=TEXTS) -> bytes:
    return b"".join(
        json.dumps({"text": t, "at": f"http://x/{i}", "language": "en"}).encode() + b"\n" for i, t in enumerate(texts)
    )


def warc_record(writer: WARCWriter, url: str, body: bytes, kind="text/html", status="200 OK", extra=()) -> None:
    headers = StatusAndHeaders(status, [("Content-Type", kind), *extra], protocol="HTTP/1.1")
    writer.write_record(writer.create_warc_record(url, "response", io.BytesIO(body), http_headers=headers))


def warc(pages=None, compress=True) -> bytes:
    """A WARC file of warcio's, an independent writer: pages [(url, body, content type)]."""
    stream = io.BytesIO()
    writer = WARCWriter(stream, gzip=compress)
    writer.write_record(writer.create_warcinfo_record("x.warc", {"software": "test"}))
    for url, body, kind in pages or [(f"http://x/{i}", f"<p>{t}".encode(), "text/html") for i, t in enumerate(TEXTS)]:
        warc_record(writer, url, body, kind)
    return stream.getvalue()


def wet(bodies: list[bytes]) -> bytes:
    stream = io.BytesIO()
    writer = WARCWriter(stream, gzip=True)
    for i, body in enumerate(bodies):
        writer.write_record(
            writer.create_warc_record(
                f"http://x/{i}",
                "conversion",
                io.BytesIO(body),
                warc_content_type="text/plain",
                warc_headers_dict={"WARC-Identified-Content-Language": "eng"},
            )
        )
    return stream.getvalue()


def parquet(path: Path, texts=TEXTS, **options) -> Path:
    table = pa.table({"text": texts, "url": [f"http://x/{i}" for i in range(len(texts))], "n": list(range(len(texts)))})
    pq.write_table(table, path, **options)
    return path


def arrow(path: Path, texts=TEXTS) -> Path:
    table = pa.table({"text": texts})
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=3)
    return path


def git(folder: Path, *arguments: str, data: bytes = b"") -> str:
    command = [
        "git",
        "-c",
        "user.name=t",
        "-c",
        "user.email=t@example.org",
        "-c",
        "init.defaultBranch=main",
        *arguments,
    ]
    return subprocess.run(command, cwd=folder, input=data, check=True, capture_output=True).stdout.decode().strip()


def gz(data: bytes) -> bytes:
    return gzip.compress(data, mtime=0)
