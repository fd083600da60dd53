"""Shards on an object store: a real server on loopback, lost connections in mid-shard, and what the pointers promise."""

import functools
import http.server
import json
import random
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from tasks import documents, remote, storage
from tasks.documents import count_documents, document, read_documents, read_footer, write_documents
from tasks.records import read_records
from tasks.stage import StageConfig, run_stage_for_test
from tasks.tokens import TokenSet, TokenWriter
from tests.tasks.object_store import proxy_to, serve_s3, use_endpoint
from tests.tasks.source_fixtures import TEXTS, ingest_sources, jsonl, parquet, warc, zstd
from tests.tasks.test_ingest import make_corpus, progress, start

pytest.importorskip("moto")
PREFIX = "s3://shards/run"


@pytest.fixture
def s3(monkeypatch, tmp_path):
    monkeypatch.setenv("ARCLINE_CACHE", str(tmp_path / "cache"))
    with serve_s3(monkeypatch) as endpoint:
        bucket().mkdir("shards")
        yield endpoint


def bucket():
    return remote.file_system(PREFIX)[0]


def objects() -> dict[str, int]:
    return {name: info["size"] for name, info in bucket().find("shards", detail=True).items()}


def rows(n: int = 60) -> list[dict]:
    rng = random.Random(0)
    return [document("".join(rng.choices("abcdefghij ", k=4000)), "s", "web", quality=i / n) for i in range(n)]


class documents_stage:  # noqa: N801 - stands for a stage's module
    __name__ = "tasks.writer"

    class Config(StageConfig):
        late: bool = False

    @staticmethod
    def run(stage):
        out = stage.out("data/writer")
        found = rows()
        if stage.config.late:
            found[-1] |= {"late": 1.0}
        stage.rows(**{"documents": write_documents(out, found, rows_per_shard=25)["documents"]})


def write(tmp: Path, prefix: str, **config) -> Path:
    run_stage_for_test(documents_stage, config, {"storage": prefix}, outs=["data/writer"], tmp=tmp)
    return tmp / "data/writer"


def test_stored_documents_read_like_local_ones(s3, tmp_path):
    here, there = write(tmp_path / "a", ""), write(tmp_path / "b", PREFIX)
    assert list(read_documents(there)) == list(read_documents(here)) == rows()
    assert list(read_documents(there, ["id", "other"])) == list(read_documents(here, ["id", "other"]))
    assert count_documents(there) == 60
    shards = documents.document_shards(there)
    assert [read_footer(p) for p in shards] == [read_footer(p) for p in documents.document_shards(here)]
    pointers = [storage.read_pointer(p) for p in shards]
    assert [p.rows for p in pointers] == [25, 25, 10]
    assert [p.sha256 for p in pointers] == [storage.sha256_file(p) for p in documents.document_shards(here)]
    assert objects() == {p.address.removeprefix("s3://"): p.bytes for p in pointers}
    assert sum(p.stat().st_size for p in there.rglob("*") if p.is_file()) < 10_000  # what DVC keeps
    assert not list(there.rglob(".storage"))
    manifest = json.loads((there / "manifest.json").read_text())
    assert [f["path"] for f in manifest["files"]] == [f"documents/part-0000{i}.parquet" for i in range(3)]


def test_a_rerun_gives_the_same_pointers_and_uploads_nothing_again(s3, tmp_path, monkeypatch):
    one, before = write(tmp_path / "a", PREFIX), objects()
    uploads = []
    put_file = type(bucket()).put_file
    monkeypatch.setattr(type(bucket()), "put_file", lambda *a, **k: uploads.append(a) or put_file(*a, **k))
    two = write(tmp_path / "b", PREFIX)
    files = [{p.name: p.read_bytes() for p in folder.rglob("*") if p.is_file()} for folder in (one, two)]
    assert files[0] == files[1]
    assert objects() == before and not uploads


def test_a_score_seen_late(s3, tmp_path):
    found = list(read_documents(write(tmp_path, PREFIX, late=True)))
    assert [r["late"] for r in found] == [None] * 59 + [1.0]


def test_lost_connections_in_mid_shard(s3, tmp_path, monkeypatch):
    """One cut while a shard goes up, one while a shard comes down: both are done again, and nothing differs."""
    expected = list(read_documents(write(tmp_path / "a", "")))
    with proxy_to(s3) as proxy:
        use_endpoint(monkeypatch, f"http://127.0.0.1:{proxy.port}")
        proxy.cut_up = 30_000
        out = write(tmp_path / "b", PREFIX)
        assert proxy.cuts == 1
        proxy.cut_down = 30_000
        assert list(read_documents(out)) == expected
        assert proxy.cuts == 2
    for path, pointer in storage.stored(out):
        assert storage.sha256_file(storage.local(path)) == pointer.sha256
    assert len(objects()) == 3


@pytest.mark.slow
def test_a_store_that_is_gone_lists_nothing(s3, tmp_path, monkeypatch):
    """No pointer without its object: the run fails, and the next one, with the store back, is whole."""
    monkeypatch.setattr(remote, "ATTEMPTS", 2)
    with proxy_to(s3) as proxy:
        use_endpoint(monkeypatch, f"http://127.0.0.1:{proxy.port}")
        original = storage.put

        def put_then_lose(path, prefix):
            done = original(path, prefix)
            proxy.closed = True
            use_endpoint(monkeypatch, f"http://127.0.0.1:{proxy.port}")
            return done

        monkeypatch.setattr(storage, "put", put_then_lose)
        with pytest.raises(remote.Interrupted, match="after 2 attempts"):
            write(tmp_path, PREFIX)
    assert not (tmp_path / "data/writer").exists() and not list(tmp_path.rglob("part-*.parquet"))
    monkeypatch.setattr(storage, "put", original)
    use_endpoint(monkeypatch, s3)
    out = write(tmp_path, PREFIX)
    assert list(read_documents(out)) == rows()


def test_objects_that_are_gone_or_changed_are_named(s3, tmp_path):
    out = write(tmp_path, PREFIX)
    (first, pointer), (second, other), *_ = storage.stored(out)
    bucket().rm(pointer.address)
    bucket().pipe_file(other.address, b"x" * other.bytes)
    with pytest.raises(ValueError, match=r"part-00000.parquet: .*is not there any more"):
        list(read_documents(out))
    with pytest.raises(ValueError, match=r"part-00001.parquet: s3://.* has sha256 .*, expected"):
        list(documents.read_shard(second))
    with pytest.raises(SystemExit) as ended:
        storage.main([str(out)])
    assert ended.value.code == 1
    first.write_text('{"address":3')
    with pytest.raises(ValueError, match="damaged pointer"):
        list(documents.read_shard(first))


def test_wrong_prefixes_and_buckets_are_named(s3, tmp_path):
    for prefix in ("bucket/run", "s3://", "http://x/y"):
        with pytest.raises(ValueError, match="storage: expected an address like s3://"):
            write(tmp_path, prefix)
    with pytest.raises(ValueError, match="s3://nobucket/.* cannot be written"):
        write(tmp_path, "s3://nobucket/run")


def test_the_cache_is_bounded(s3, tmp_path, monkeypatch):
    out = write(tmp_path, PREFIX)
    monkeypatch.setattr(storage, "_EVICT_AFTER_S", 0)
    size = max(p.bytes for _, p in storage.stored(out))
    monkeypatch.setenv("ARCLINE_CACHE_GB", str(1.5 * size / 1e9))
    assert list(read_documents(out)) == rows()
    assert 1 <= len(list((tmp_path / "cache/shards").iterdir())) <= 2


def test_tokens(s3, tmp_path):
    class module:  # noqa: N801
        __name__ = "tasks.packer"
        Config = StageConfig

        @staticmethod
        def run(stage):
            with TokenWriter(stage.out("data/packer"), 300, 0, np.ones(300, np.int32)) as writer:
                for i in range(50):
                    writer.add("train", "web", list(range(i, i + 100)), 100)

    for name, prefix in (("a", ""), ("b", PREFIX)):
        run_stage_for_test(module, {}, {"storage": prefix}, outs=["data/packer"], tmp=tmp_path / name)
    here, there = (TokenSet(tmp_path / n / "data/packer").shard("web") for n in "ab")
    assert storage.read_pointer(there.path) and len(there) == 50
    assert np.array_equal(here.tokens, there.tokens) and np.array_equal(here.window(99, 5000), there.window(99, 5000))
    assert len(TokenSet(tmp_path / "b/data/packer").shard("web", "val")) == 0


def test_ingest_to_and_from_a_store(s3, tmp_path, monkeypatch):
    """Sources on S3, through connections that are cut, to records on S3; the same as from disk to disk."""
    (tmp_path / "in").mkdir()
    rng = random.Random(1)
    texts = [t + "".join(rng.choices("abcdefghij ", k=20_000)) for t in TEXTS]
    (tmp_path / "in/a.jsonl.zst").write_bytes(zstd(jsonl(texts)))
    (tmp_path / "in/b.warc.gz").write_bytes(
        warc([(f"http://x/{i}", t.encode(), "text/html") for i, t in enumerate(texts)])
    )
    parquet(tmp_path / "in/c.parquet", texts)
    bucket().mkdir("user")
    bucket().put(str(tmp_path / "in") + "/", "user/in/", recursive=True)

    def sources(base: str) -> list[dict]:
        kinds = {"j": ("jsonl", "*.jsonl.zst"), "w": ("warc", "b.warc.gz"), "p": ("parquet", "*.parquet")}
        return [{"name": n, "type": t, "path": f"{base}/{p}"} for n, (t, p) in kinds.items()]

    local = ingest_sources(tmp_path / "a", sources(str(tmp_path / "in")), shard_mb=0.05)
    with proxy_to(s3) as proxy:
        use_endpoint(monkeypatch, f"http://127.0.0.1:{proxy.port}")
        proxy.cut_down = 40_000
        far = ingest_sources(tmp_path / "b", sources("s3://user/in"), PREFIX, shard_mb=0.05)
        assert proxy.cuts == 1
    assert far.records == local.records and len(far.records) == 3 * len(TEXTS) and not far.rejects
    assert len(list(storage.stored(far.folder))) == len(list((local.folder / "records").iterdir())) > 3
    assert list(read_records(far.folder, ["html"])) == [r for r in local.records if r.kind == "html"]


@pytest.mark.parametrize("name, kind", [("a.jsonl.zst", "jsonl"), ("b.warc.gz", "warc"), ("c.parquet", "parquet")])
def test_a_source_that_cannot_be_reached_stops_the_run_and_is_no_reject(s3, tmp_path, monkeypatch, name, kind):
    texts = ["".join(random.Random(i).choices("abcdefghij ", k=50_000)) for i in range(20)]
    (tmp_path / "a.jsonl.zst").write_bytes(zstd(jsonl(texts)))
    (tmp_path / "b.warc.gz").write_bytes(
        warc([(f"http://x/{i}", t.encode(), "text/html") for i, t in enumerate(texts)])
    )
    parquet(tmp_path / "c.parquet", texts, row_group_size=3)
    bucket().put_file(str(tmp_path / name), f"shards/{name}")
    source = {"name": "s", "type": kind, "path": f"s3://shards/{name}"}
    monkeypatch.setattr(remote, "ATTEMPTS", 1)
    monkeypatch.setattr(remote, "BLOCK_BYTES", 50_000)
    whole, calls = remote.RemoteReader._range, []

    def lost(self, start, end):
        calls.append(start)
        if len(calls) == 4:
            raise OSError("the connection is lost")
        return whole(self, start, end)

    monkeypatch.setattr(remote.RemoteReader, "_range", lost)
    with pytest.raises(remote.Interrupted, match="the connection is lost"):
        ingest_sources(tmp_path / "run", [source], shard_mb=0.1)
    assert not (tmp_path / "run/data/ingest").exists()
    found = ingest_sources(tmp_path / "run", [source], shard_mb=0.1)
    assert found.texts == texts and not found.rejects


@pytest.mark.slow
def test_kill_9_while_shards_go_up(s3, tmp_path):
    """What a killed run has written down is whole in the store; the rerun ends with what an uninterrupted one has."""
    sources = make_corpus(tmp_path / "in", 600)
    assert start(tmp_path / "whole", sources, 1, PREFIX).wait() == 0
    expected, there = list(storage.stored(tmp_path / "whole/data/ingest")), objects()
    bucket().rm(PREFIX, recursive=True)
    kills, cut = 0, tmp_path / "cut"
    for _ in range(3):
        before = progress(cut)
        process = start(cut, sources, 1, PREFIX)
        while process.poll() is None and progress(cut) <= before:
            time.sleep(0.002)
        time.sleep(random.Random(kills).random() * 0.1)
        if process.poll() is not None:
            break
        process.kill()
        process.wait()
        kills += 1
        written = [p for path in cut.rglob("part-*.parquet") if (p := _pointer(path))]
        assert written and all(objects()[p.address.removeprefix("s3://")] == p.bytes for p in written)
        assert not (cut / "data/ingest").exists()
    assert kills
    assert start(cut, sources, 1, PREFIX).wait() == 0
    found = list(storage.stored(cut / "data/ingest"))
    assert [(a.name, b) for a, b in found] == [(a.name, b) for a, b in expected] and objects() == there
    assert list(read_records(cut / "data/ingest")) == list(read_records(tmp_path / "whole/data/ingest"))


def _pointer(path: Path) -> storage.Pointer | None:
    return storage.read_pointer(path) if path.stat().st_size else None


@pytest.mark.parametrize("ranges", [True, False])
def test_sources_over_http(tmp_path, ranges):
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.jsonl").write_bytes(jsonl())
    (tmp_path / "in/b.parquet").write_bytes(parquet(tmp_path / "b.parquet").read_bytes())
    dropped = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def do_GET(self):  # noqa: N802
            data = Path(self.translate_path(self.path)).read_bytes()
            span = self.headers.get("Range") if ranges else None
            status = 206 if span else 200
            total = len(data)
            if span:
                first, _, last = span.removeprefix("bytes=").partition("-")
                start, end = int(first), min(int(last or total - 1), total - 1)
                data = data[start : end + 1]
            self.send_response(status)
            if span:
                self.send_header("Content-Range", f"bytes {start}-{end}/{total}")
            if ranges:
                self.send_header("Accept-Ranges", "bytes")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if len(dropped) < 1 and len(data) > 1000:  # one connection is lost in the middle
                dropped.append(self.path)
                self.wfile.write(data[:500])
                self.wfile.flush()
                self.connection.close()
                return
            self.wfile.write(data)

        def do_HEAD(self):  # noqa: N802
            size = Path(self.translate_path(self.path)).stat().st_size
            self.send_response(200)
            if ranges:
                self.send_header("Accept-Ranges", "bytes")
            self.send_header("Content-Length", str(size))
            self.end_headers()

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Handler, directory=str(tmp_path / "in"))
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    base = f"http://127.0.0.1:{server.server_port}"
    try:
        sources = [{"name": "j", "type": "jsonl", "path": f"{base}/a.jsonl"}]
        if ranges:
            sources.append({"name": "p", "type": "parquet", "path": f"{base}/b.parquet"})
        found = ingest_sources(tmp_path / "run", sources)
        assert found.texts == TEXTS * len(sources) and not found.rejects and dropped
        with pytest.raises(ValueError, match="source 'n': path"):
            ingest_sources(tmp_path / "no", [{"name": "n", "type": "jsonl", "path": f"{base}/none.jsonl"}])
    finally:
        server.shutdown()
        server.server_close()


def test_public_buckets_need_no_account(monkeypatch):
    monkeypatch.setenv("ARCLINE_S3_ANONYMOUS", "1")
    assert remote.file_system("s3://bucket/x")[0].anon
    monkeypatch.delenv("ARCLINE_S3_ANONYMOUS")
    assert not remote.file_system("s3://bucket/x")[0].anon
