"""Reading sources into records: MB and records per CPU second, per format, beside the bare readers of the field.

    python -m tests.bench.ingest_speed            (make bench runs it)

The corpus is made from this machine's data/acquire when it is there, else from made-up pages. What the peers do is less: they
give bytes; ingest checks, copies and writes each record to zstd parquet and journals its place.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tasks import ingest
from tasks.params import ROOT
from tasks.stage import run_stage_for_test
from tests.tasks.source_fixtures import warc

MEGABYTES = 24


def pages() -> list[bytes]:
    """About 24 MB of pages."""
    from tasks.warc import Page, read_warc

    found, size = [], 0
    for path in sorted((ROOT / "data/acquire/warc").glob("*.warc*")):
        for page in read_warc(path):
            if isinstance(page, Page) and size < MEGABYTES << 20:
                found.append(page.body)
                size += len(page.body)
    if not found:
        found = [f"<html><p>{i} {'some words of a page ' * 300}</html>".encode() for i in range(MEGABYTES * 150)]
    return found


def timed(action: Callable[[], Any]) -> tuple[Any, float]:
    began = time.process_time()
    return action(), time.process_time() - began


def fastwarc(path: Path) -> int:
    from fastwarc.warc import ArchiveIterator, WarcRecordType

    with open(path, "rb") as stream:
        return sum(1 for r in ArchiveIterator(stream, record_types=WarcRecordType.response) if r.reader.read())


def warcio(path: Path) -> int:
    from warcio.archiveiterator import ArchiveIterator

    with open(path, "rb") as stream:
        return sum(r.rec_type == "response" and bool(r.content_stream().read()) for r in ArchiveIterator(stream))


def json_lines(path: Path) -> int:
    with gzip.open(path, "rb") as stream:
        return sum(bool(json.loads(line)["text"]) for line in stream)


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        bodies = pages()
        size = sum(map(len, bodies))
        texts = [b.decode("utf-8", "replace").replace("\x00", "") for b in bodies]
        (folder / "a.warc.gz").write_bytes(warc([(f"http://x/{i}", b, "text/html") for i, b in enumerate(bodies)]))
        with gzip.open(folder / "a.jsonl.gz", "wb") as stream:
            for text in texts:
                stream.write(json.dumps({"text": text}).encode() + b"\n")
        pq.write_table(pa.table({"text": texts}), folder / "a.parquet", row_group_size=1000)
        print(f"{len(bodies)} pages, {size / 1e6:.0f} MB")
        peers = {"warc": [fastwarc, warcio], "jsonl": [json_lines], "parquet": []}
        for kind, file in (("warc", "a.warc.gz"), ("jsonl", "a.jsonl.gz"), ("parquet", "a.parquet")):
            for peer in peers[kind]:
                count, seconds = timed(lambda peer=peer, file=file: peer(folder / file))
                print(
                    f"  {kind:<8} {peer.__name__:<10} {size / seconds / 1e6:8.1f} MB/s {count / seconds:9.0f} records/s"
                )
            source = {"name": "s", "type": kind, "path": str(folder / file)}
            options = {"params": {"sources": [source]}, "outs": ["data/ingest"], "tmp": folder / f"run-{kind}"}
            with contextlib.redirect_stdout(io.StringIO()):
                stage, seconds = timed(lambda o=options: run_stage_for_test(ingest, {"workers": 1}, **o))
            count = json.loads((stage.root / "metrics/ingest.json").read_text())["records"]
            print(f"  {kind:<8} {'ingest':<10} {size / seconds / 1e6:8.1f} MB/s {count / seconds:9.0f} records/s")


if __name__ == "__main__":
    main()
