"""The stage ingest: wrong parameters are named; killed runs lose and double nothing; memory stays bounded."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tasks.ingest import Config
from tasks.records import Record, RecordWriter, read_record_shard, read_records, record_id, write_records
from tasks.sources import parse_sources
from tests.tasks.source_fixtures import TEXTS, gz, ingest_sources, jsonl, parquet, warc, zstd

ROOT = Path(__file__).resolve().parents[2]


# ---- records -----------------------------------------------------------------------------------------------------


def some_records(n: int) -> list[Record]:
    kinds = ("html", "pdf", "code", "text")
    return [
        Record(
            record_id("s", "p", i, b"x"), kinds[i % 4], b"x" * (i * 37), "p", "u", "s", "utf-8", "en", "MIT", {"n": i}
        )
        for i in range(n)
    ]


def test_records_round_trip_by_kind_over_shards(tmp_path):
    records = some_records(200)
    summary = write_records(tmp_path / "a", iter(records), shard_bytes=100_000)
    assert summary["records"] == 200 and summary["kinds"] == {"code": 50, "html": 50, "pdf": 50, "text": 50}
    assert len(list((tmp_path / "a/records").iterdir())) > 2
    assert list(read_records(tmp_path / "a")) == records
    assert list(read_records(tmp_path / "a", ["pdf", "code"])) == [r for r in records if r.kind in ("pdf", "code")]
    write_records(tmp_path / "b", records, shard_bytes=100_000)
    for one, two in zip(
        sorted((tmp_path / "a/records").iterdir()), sorted((tmp_path / "b/records").iterdir()), strict=True
    ):
        assert one.read_bytes() == two.read_bytes()


def test_records_say_what_is_wrong(tmp_path):
    with pytest.raises(ValueError, match="run the stage that writes it"):
        list(read_records(tmp_path))
    with pytest.raises(ValueError, match="kind 'film' is not one of"):
        write_records(tmp_path, [Record("i", "film", b"")])
    with pytest.raises(ValueError, match="no such kind of record: film"):
        list(read_record_shard(tmp_path / "x", ["film"]))
    pq.write_table(pa.table({"a": [1]}), tmp_path / "other.parquet")
    with pytest.raises(ValueError, match="not a shard of records"):
        list(read_record_shard(tmp_path / "other.parquet"))


def test_no_record_still_gives_a_table(tmp_path):
    with RecordWriter(tmp_path / "records"):
        pass
    assert list(read_records(tmp_path)) == []
    assert ingest_sources(tmp_path / "run", []).records == []


# ---- parameters --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "entry, words",
    [
        ({"name": "a", "type": "jsonl"}, r"sources\[0\] \(a\): path: Field required"),
        ({"name": "a", "type": "jsonl", "path": "x", "colums": {}}, "colums: unknown key for type jsonl"),
        ({"name": "a", "type": "jsonl", "path": "x", "columns": {"txt": "t"}}, r"columns.txt: unknown key"),
        ({"name": "a", "type": "jsonl", "path": 3}, r"path: Input should be a valid string \(found 3\)"),
        ({"name": "a", "type": "tape", "path": "x"}, "Input tag 'tape' found .* 'warc'"),
        ({"name": "a", "type": "warc", "path": "x", "ref": "main"}, "ref: unknown key for type warc"),
        ({"name": "a b", "type": "warc", "path": "x"}, "name: String should match"),
        ({"name": "a", "type": "warc", "path": "x", "domain": "poems"}, "domain: 'poems' is not one of web"),
        ({"name": "a", "type": "warc", "path": "x", "limit": 0}, "limit: Input should be greater than or equal to 1"),
        ({"name": "a", "type": "pdf", "path": "x", "kind": "code"}, "gives records of kind pdf, not code"),
        ({"name": "a", "type": "jsonl", "path": "x", "split": "train"}, "split: only a source of type hf"),
        ("path", r"sources\[0\]"),
    ],
)
def test_wrong_entries_are_named(entry, words):
    with pytest.raises(ValueError, match=words):
        parse_sources([entry])


def test_two_sources_of_one_name_and_no_list():
    entry = {"name": "a", "type": "warc", "path": "x"}
    with pytest.raises(ValueError, match=r"sources\[1\] \(a\): name: given twice"):
        parse_sources([entry, entry])
    with pytest.raises(ValueError, match="sources: expected a list of entries, found dict"):
        parse_sources(entry)


def test_missing_files_columns_and_refs_name_source_and_key(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(jsonl())
    parquet(tmp_path / "a.parquet")
    subprocess.run(["git", "init", "-q", str(tmp_path / "repo")], check=True)
    (tmp_path / "folder").mkdir()
    cases = [
        ({"type": "warc", "path": str(tmp_path / "*.warc")}, r"source 'a': path: .*\*.warc: no file there"),
        ({"type": "pdf", "path": str(tmp_path)}, "source 'a': path: .*no file there that ends in .pdf"),
        ({"type": "jsonl", "path": str(tmp_path / "a.jsonl"), "columns": {"text": "body"}}, "'a': columns.text: a.jsonl"),
        ({"type": "parquet", "path": str(tmp_path / "a.parquet"), "columns": {"lang": "l"}}, "columns.lang: .* 'l'; it has text"),
        ({"type": "parquet", "path": str(tmp_path / "a.parquet"), "columns": {"keep": ["z"]}}, r"columns.keep\[0\]: .* 'z'"),
        ({"type": "git", "path": str(tmp_path / "folder")}, "source 'a': path: folder: not a git repository"),
        ({"type": "git", "path": str(tmp_path / "repo")}, "source 'a': ref: 'HEAD' is no commit of repo"),
        ({"type": "git", "path": "https://example.org/x.git"}, "source 'a': .*must be on disk"),
        ({"type": "jsonl", "path": "ftp://x/y"}, "source 'a': ftp://x/y: expected a local path or one of http"),
        ({"type": "tree", "path": str(tmp_path), "globs": ["*.rs"]}, r"globs: \['\*.rs'\] match no file"),
        ({"type": "hf", "path": str(tmp_path), "split": "dev"}, "source 'a': split: no file of split 'dev'"),
    ]  # fmt: skip
    for i, (entry, words) in enumerate(cases):
        with pytest.raises(ValueError, match=words):
            ingest_sources(tmp_path / f"run{i}", [{"name": "a"} | entry])


def test_too_many_rejects_fail_the_stage(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(jsonl() + b"broken\n" * 3)
    with pytest.raises(ValueError, match="3 of 11 records were rejected, above max_reject_share"):
        ingest_sources(
            tmp_path / "run", [{"name": "a", "type": "jsonl", "path": str(tmp_path / "a.jsonl")}], max_reject_share=0.2
        )


def test_limit_takes_the_first_records(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_bytes(jsonl())
    source = {"name": "a", "type": "jsonl", "path": str(tmp_path / "*.jsonl"), "limit": 11, "domain": "prose"}
    found = ingest_sources(tmp_path / "run", [source], shard_mb=0.001)
    assert found.texts == TEXTS + TEXTS[:3]
    assert found.records[-1].meta == {"file": "b.jsonl", "record": 3, "domain": "prose"}


# ---- equal bytes, kills ------------------------------------------------------------------------------------------


def make_corpus(folder: Path, size: int) -> list[dict]:
    """A few thousand records in several formats, with faults in between."""
    rng = random.Random(5)
    folder.mkdir()
    texts = [f"{i} " + "".join(rng.choices("abcdefgh \n", k=400)) for i in range(size)]
    for part in range(3):
        lines = jsonl(texts[part::3]).splitlines(keepends=True)
        lines[size // 9 : size // 9] = [b"broken\n", b'{"text": 1}\n']
        (folder / f"p{part}.jsonl.gz").write_bytes(gz(b"".join(lines)))
    pages = [(f"http://x/{i}", f"<p>{t}".encode(), "text/html") for i, t in enumerate(texts)]
    (folder / "a.warc.gz").write_bytes(warc(pages)[:-20])
    parquet(folder / "t.parquet", texts, row_group_size=200)
    return [
        {"name": "j", "type": "jsonl", "path": str(folder / "p*.jsonl.gz")},
        {"name": "w", "type": "warc", "path": str(folder / "a.warc.gz")},
        {"name": "t", "type": "parquet", "path": str(folder / "t.parquet")},
    ]


def content(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def equal_but_for_the_engine(one: Path, two: Path) -> bool:
    a, b = content(one), content(two)
    a.pop("manifest.json"), b.pop("manifest.json")
    return a == b


def test_the_number_of_workers_changes_no_byte(tmp_path):
    sources = make_corpus(tmp_path / "in", 60)
    one = ingest_sources(tmp_path / "one", sources, workers=1, shard_mb=0.02)
    two = ingest_sources(tmp_path / "two", sources, workers=2, shard_mb=0.02)
    assert len(one.records) == 60 * 3 - 1 and len(one.rejects) == 7
    assert equal_but_for_the_engine(one.folder, two.folder)


@pytest.mark.slow
def test_ray_changes_no_byte(tmp_path):
    pytest.importorskip("ray")
    sources = make_corpus(tmp_path / "in", 60)
    one = ingest_sources(tmp_path / "one", sources, workers=1, shard_mb=0.02)
    two = ingest_sources(tmp_path / "two", sources, engine="ray", workers=2, shard_mb=0.02)
    assert equal_but_for_the_engine(one.folder, two.folder)


CODE = """
import json, sys
from pathlib import Path
from tests.tasks.source_fixtures import ingest_sources
if __name__ == "__main__":
    sources, tmp, workers, storage = json.loads(sys.argv[1])
    ingest_sources(Path(tmp), sources, storage, workers=workers, shard_mb=0.05)
"""


def start(tmp: Path, sources: list[dict], workers: int, storage: str = "") -> subprocess.Popen:
    command = [sys.executable, "-c", CODE, json.dumps([sources, str(tmp), workers, storage])]
    if workers > 1:  # the workers are started afresh and need a file to import
        script = tmp.with_suffix(".py")
        script.write_text(CODE)
        command[1:3] = [str(script)]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.DEVNULL, start_new_session=True)


def progress(tmp: Path) -> int:
    """Events that the units' journals have written down."""
    found = 0
    for path in (tmp / "work/ingest").glob("*/*/journal.json"):
        try:
            found += json.loads(path.read_text())["found"]
        except (OSError, ValueError):
            pass
    return found


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_kill_9_in_mid_file_loses_and_doubles_no_record(tmp_path, workers):
    sources = make_corpus(tmp_path / "in", 1500)
    assert start(tmp_path / "whole", sources, workers).wait() == 0
    cut, kills, kept = tmp_path / "cut", 0, set()
    rng = random.Random(workers)
    for _ in range(4):
        before = progress(cut)
        process = start(cut, sources, workers)
        while process.poll() is None and progress(cut) <= before:
            time.sleep(0.002)
        time.sleep(rng.random() * 0.05)
        if process.poll() is not None:
            break
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        kills += 1
        assert not (cut / "data/ingest").exists()
        done = [
            p
            for j in cut.glob("work/ingest/*/*/journal.json")
            for p in sorted(j.parent.glob("part-*"))[: json.loads(j.read_text())["shards"]]
        ]
        kept = {p.stat().st_ino for p in done}
    assert kills >= 2, "the run ended before it could be killed"
    assert start(cut, sources, workers).wait() == 0
    assert content(cut / "data/ingest") == content(tmp_path / "whole/data/ingest")
    ids = [r.id for r in read_records(cut / "data/ingest")]
    assert len(ids) == len(set(ids)) == 1500 * 3 - 1
    # What was on disk when it was killed was not made again: the very same files are the output's.
    assert kept <= {p.stat().st_ino for p in (cut / "data/ingest/records").iterdir()}
    assert not (cut / "work/ingest").exists()


@pytest.mark.slow
def test_a_file_that_changed_after_a_kill_is_read_anew(tmp_path):
    sources = make_corpus(tmp_path / "in", 1500)[:1]
    process = start(tmp_path / "cut", sources, 1)
    while process.poll() is None and progress(tmp_path / "cut") == 0:
        time.sleep(0.002)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    (tmp_path / "in/p0.jsonl.gz").write_bytes(gz(jsonl(["only this"])))
    assert start(tmp_path / "cut", sources, 1).wait() == 0
    assert start(tmp_path / "whole", sources, 1).wait() == 0
    assert content(tmp_path / "cut/data/ingest") == content(tmp_path / "whole/data/ingest")


# ---- memory ------------------------------------------------------------------------------------------------------

MEASURE = """
import json, resource, sys
from pathlib import Path
from tests.tasks.source_fixtures import ingest_sources
found = ingest_sources(Path(sys.argv[2]), json.loads(sys.argv[1]), max_record_mb=4.0, shard_mb=8.0)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(json.dumps([peak, len(found.records), sorted(set(found.reasons))]))
"""


def measure(tmp: Path, source: dict) -> tuple[float, int, list[str]]:
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", MEASURE, json.dumps([{"name": "a"} | source]), str(tmp)]
    done = subprocess.run(command, cwd=ROOT, env=env, check=True, capture_output=True, text=True)
    return tuple(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.slow
def test_huge_documents_and_bombs_are_rejected_in_bounded_memory(tmp_path):
    """100 MB documents and files that expand to 0.25 GB, beside small ones that must be kept; peak memory in MB."""
    big = b"x" * (100 << 20)
    (tmp_path / "small.jsonl").write_bytes(jsonl())
    (tmp_path / "line.jsonl").write_bytes(b'{"text":"' + big + b'"}\n' + jsonl())
    (tmp_path / "bomb.jsonl.gz").write_bytes(gz(jsonl() + bytes(1 << 28)))
    (tmp_path / "bomb.jsonl.zst").write_bytes(zstd(jsonl() + bytes(1 << 28)))
    page = ("http://x/2", b"<p>ok", "text/html")
    (tmp_path / "big.warc.gz").write_bytes(warc([page, ("http://x/1", big, "text/html"), page]))
    pq.write_table(pa.table({"text": [*TEXTS, big.decode(), *TEXTS]}), tmp_path / "cell.parquet")
    few = pa.DictionaryArray.from_arrays(pa.array([0] * 400, pa.int32()), pa.array([big[: 20 << 20].decode()]))
    options = {"dictionary_pagesize_limit": 1 << 30, "store_schema": False}
    pq.write_table(pa.table({"text": few}), tmp_path / "dictionary.parquet", **options)
    (tmp_path / "pages").mkdir()
    (tmp_path / "pages/a.html").write_bytes(b"<p>ok")
    (tmp_path / "pages/big.html").write_bytes(big)
    (tmp_path / "pages/bomb.html.gz").write_bytes(gz(bytes(1 << 28)))
    del big, few
    base, records, reasons = measure(tmp_path / "r0", {"type": "jsonl", "path": str(tmp_path / "small.jsonl")})
    assert (records, reasons) == (8, [])
    cases = [
        ("jsonl", "line.jsonl", 8, ["too_large"], 60),
        ("jsonl", "bomb.jsonl.gz", 8, ["expands_too_far"], 60),
        ("jsonl", "bomb.jsonl.zst", 8, ["expands_too_far"], 60),
        ("warc", "big.warc.gz", 2, ["too_large"], 60),
        ("html", "pages", 1, ["too_large"], 60),
        ("parquet", "cell.parquet", 16, ["too_large"], 800),  # a page is decoded whole: some copies of its 100 MB
        ("parquet", "dictionary.parquet", 0, ["too_large"], 200),  # 400 rows of one 20 MB value, 8 GB if expanded
    ]
    for i, (kind, name, kept, why, bound) in enumerate(cases, 1):
        peak, records, reasons = measure(tmp_path / f"r{i}", {"type": kind, "path": str(tmp_path / name)})
        assert (records, reasons) == (kept, why), name
        assert peak - base < bound, f"{name}: peak {peak:.0f} MB, {base:.0f} MB for small input"


def test_config_bounds():
    with pytest.raises(ValueError):
        Config(max_record_mb=0.0)
