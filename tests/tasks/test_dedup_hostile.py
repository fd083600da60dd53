"""The dedup stage against input and machines that mean it ill: copies without end, odd texts and ids, kills, a full disk."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tasks import dedup, dedup_steps, documents, mapshuffle, minhash
from tasks.mapshuffle import LocalEngine
from tasks.params import ROOT
from tests.tasks.test_dedup import corpus, outputs, stage
from tests.tasks.test_minhash import replace_words, text_of


def found(
    tmp_path: Path, shards: list[list[dict]], partitions: int = 1, **config
) -> tuple[dict, list[dict], list[int]]:
    """(metrics, clusters, numbers of removed documents) of shards of rows."""
    paths = []
    for number, rows in enumerate(shards):
        documents.write_documents(tmp_path / "in" / str(number), rows)
        paths += documents.document_shards(tmp_path / "in" / str(number))
    job = dedup.make_job(dedup.Config(**config), paths, tmp_path / f"scratch{partitions}", partitions)
    metrics = dedup.search(job, LocalEngine(1))
    gone = [dedup_steps.removed_of(job, number)["doc"].tolist() for number in range(len(paths))]
    return metrics, list(dedup.clusters(job)), sum(gone, [])


def row(text: str, source: str, **more) -> dict:
    return documents.document(text, source, "web") | more


def test_one_line_a_thousand_times_is_one_record_of_each_shard(tmp_path):
    """What is shuffled of copies does not grow with them; their cluster is whole all the same."""
    shards = [[row(text, f"{s}/{i}") for i in range(500) for text in ("A short line.", "?")] for s in range(3)]
    metrics, clusters, gone = found(tmp_path, shards, 2)
    assert [(c["size"], c["exact"], c["near"]) for c in clusters] == [(1500, 1499, 0)] * 2
    assert all(len(c["sample"]) == dedup.SAMPLE == len(set(c["sample"])) for c in clusters)
    assert len(gone) == 2998 and metrics["largest_cluster"] == 1500 and metrics["clusters"] == {"1025-2048": 2}
    for name in ("00000", "00001", "00002"):
        assert len(np.load(tmp_path / f"scratch2/sketch/exact/{name}.npy")) == 2
        assert len(np.load(tmp_path / f"scratch2/sketch/bands/{name}.npy")) == dedup.Config().bands
        assert len(np.load(tmp_path / f"scratch2/members/best/{name}.npy")) == 2


def test_copies_and_near_copies_in_one_cluster_are_told_apart(tmp_path):
    """exact counts copies of the keeper's text, wherever they lie; near everything else of the cluster."""
    text = text_of(random.Random(0))
    near = replace_words(random.Random(1), text, 2)
    shards = [
        [row(text, "a"), row(near, "b", quality=0.9), row(near.upper(), "c", quality=0.1)],
        [row(near + " ", "d", quality=0.1), row(text, "e"), row("alone " * 30, "f")],
    ]
    for partitions in (1, 3):
        metrics, clusters, gone = found(tmp_path, shards, partitions)
        assert [(c["size"], c["exact"], c["near"]) for c in clusters] == [(5, 2, 2)] and gone == [0, 2, 3, 4]
        assert clusters[0]["keeper"] == shards[0][1]["id"] and metrics["clusters"] == {"1": 1, "5-8": 1}


def test_equal_ids_do_not_mix_up_documents(tmp_path):
    """Ids are the user's: three sources that number from 0. Documents go by their place, not by their id."""
    rng = random.Random(2)
    texts = [text_of(rng, 60) for _ in range(20)]
    shards = [
        [row(text, str(s), id=str(i)) for i, text in enumerate(texts if s < 2 else texts[:10] + ["other"] * 1)]
        for s in range(3)
    ]
    first = found(tmp_path, shards, 1)
    assert first == found(tmp_path, shards, 5)
    assert [c["size"] for c in first[1]] == [3] * 10 + [2] * 10 and first[2] == [*range(20, 40), *range(40, 50)]


def test_documents_of_three_words_compare_as_wholes(tmp_path):
    rng = random.Random(3)
    words = [f"w{i}" for i in range(12)]
    rows = [row(" ".join(rng.choices(words, k=3)), str(i)) for i in range(400)]
    _, clusters, gone = found(tmp_path, [rows[:200], rows[200:]])
    texts = [r["text"] for r in rows]
    assert len(texts) - len(gone) == len(set(texts)) and sum(c["size"] - 1 for c in clusters) == len(gone)
    assert all(c["near"] == 0 for c in clusters)


@pytest.mark.parametrize("empty", [[[]], [[], [], []]])
def test_nothing_at_all(tmp_path, empty):
    metrics, clusters, gone = found(tmp_path, empty)
    assert (clusters, gone) == ([], []) and metrics["clusters"] == {} and metrics["near_pairs"]["compared"] == 0


def test_empty_shards_among_others(tmp_path):
    text = text_of(random.Random(4))
    _, clusters, gone = found(tmp_path, [[], [row(text, "a")], [], [row(text, "b", quality=1.0)], []], 3)
    assert gone == [0] and [c["size"] for c in clusters] == [2]


def test_lone_surrogates_and_bytes_that_are_not_utf_8(tmp_path):
    texts = ["\ud800 half a pair \udfff here", "\ud800 HALF a pair \udfff here", "half a pair here"]
    keys = minhash.sketch(texts, 5, 4, 2).exact.tolist()
    assert keys[0] == keys[1] != keys[2]
    table = pa.table({c: pa.array([b"x" if c != "domain" else b"web"], pa.binary()) for c in documents.COLUMNS})
    table = table.set_column(1, "text", pa.array([b"broken \xff\xfe text"], pa.binary()))
    path = tmp_path / "in/documents/part-00000.parquet"
    path.parent.mkdir(parents=True)
    columns = [pa.Array.from_buffers(pa.string(), 1, table[c].chunk(0).buffers()) for c in documents.COLUMNS]
    pq.write_table(pa.table(columns, names=list(documents.COLUMNS)), path)
    with pytest.raises(ValueError, match=r"shard 00000.*(utf-8|UTF-?8)"):
        stage(tmp_path / "out", [path], workers=1)


def test_one_huge_document_among_small_ones(tmp_path):
    """2 MB of text, once as it is and once with a tail: near-duplicates, in memory that its own size bounds."""
    rng = random.Random(5)
    words = [text_of(rng, 1) for _ in range(2000)]
    huge = " ".join(rng.choices(words, k=300_000))
    shards = [[row("small " + text_of(rng, 30), "a"), row(huge, "b")], [row(huge + " and a tail", "c")]]
    metrics, clusters, gone = found(tmp_path, shards)
    assert gone == [1] and metrics["near_pairs"] == {"compared": 1, "verified": 1}


def test_groups_above_the_limit_lose_no_copy_of_their_first(tmp_path):
    """Same words, other punctuation: no exact copies, one group of every band, cut at the limit."""
    rows = [row("the same five words here" + "." * i, str(i)) for i in range(1, 200)]
    metrics, clusters, gone = found(tmp_path, [rows[:100], rows[100:]], group_limit=16)
    assert metrics["split_groups"] == dedup.Config().bands and len(gone) == 198
    assert [(c["size"], c["near"]) for c in clusters] == [(199, 198)]


DRIVER = """
import json, sys, time
from pathlib import Path
from tasks import dedup, dedup_steps
from tasks.stage import run_stage_for_test
if __name__ == "__main__":
    tmp, config, slow, paths = Path(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3], sys.argv[4:]
    def slowly(step):
        def run(argument):
            result = step(argument)
            print(step.__name__, argument[1], flush=True)
            time.sleep(60 if step.__name__ == slow and argument[1] else 0)
            return result
        run.__name__ = step.__name__
        return run
    for name in ("sketch", "sets"):
        setattr(dedup_steps, name, slowly(getattr(dedup_steps, name)))
    deps = dict(zip(("data/web", "data/code", "data/math"), map(Path, paths)))
    run_stage_for_test(dedup, config, deps=deps, outs=["data/dedup"], tmp=tmp)
"""


@pytest.mark.parametrize("slow,last", [pytest.param("sketch", "sketch 1", marks=pytest.mark.slow), ("sets", "sets 1")])
def test_a_killed_stage_goes_on_with_another_number_of_workers(tmp_path, slow, last):
    """kill -9 in the middle of a step; what was done is found again by two workers, and the bytes are the same."""
    shards = corpus(tmp_path / "in")
    expected = stage(tmp_path / "whole", shards, workers=1)
    (tmp_path / "driver.py").write_text(DRIVER)
    folders = [str(path.parent.parent) for path in shards]
    command = [sys.executable, str(tmp_path / "driver.py"), str(tmp_path / "again"), '{"workers": 1}', slow, *folders]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    running = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    for line in running.stdout:
        if line.strip() == last:
            break
    time.sleep(0.3)
    running.send_signal(signal.SIGKILL)
    running.wait()
    (scratch,) = (tmp_path / "again/work/dedup").iterdir()
    done = {path: path.stat().st_mtime_ns for path in scratch.rglob("*.result.json")}
    assert done and any(slow in str(path) for path in done)
    kept = []
    collect = dedup.collect

    def look(*arguments):
        kept.append({path: path.stat().st_mtime_ns for path in done})
        return collect(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dedup, "collect", look)
        assert stage(tmp_path / "again", shards, workers=2) == expected
    assert kept == [done], "finished shards were done again"


def test_a_full_disk_in_mid_shuffle(tmp_path, monkeypatch):
    """The error says so and names the shard, no half file stays, and with room again the stage goes on."""
    shards = corpus(tmp_path / "in")
    expected = stage(tmp_path / "whole", shards, workers=1)
    save, calls = np.save, []

    def full(handle, array, **more):
        calls.append(handle.name)
        if "bands" in handle.name and "00001" in handle.name:
            handle.write(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        save(handle, array, **more)

    with monkeypatch.context() as patch:
        patch.setattr(np, "save", full)
        with pytest.raises(mapshuffle.ShardError, match="shard 00001: .*No space left"):
            stage(tmp_path / "out", shards, workers=1)
    assert calls and not list((tmp_path / "out").rglob("*.partial")) and not (tmp_path / "out/data/dedup").exists()
    assert stage(tmp_path / "out", shards, workers=1) == expected


def test_a_full_disk_is_named_where_numpy_does_not(tmp_path, monkeypatch):
    def short(*_, **__):
        raise OSError("8009 requested and 845 written")

    monkeypatch.setattr(np, "save", short)
    with pytest.raises(OSError, match=r"No space left.* x\.npy: 8009 requested") as error:
        mapshuffle.save_array(tmp_path / "x.npy", np.zeros(9))
    assert error.value.errno == errno.ENOSPC and not list(tmp_path.iterdir())


def test_a_full_disk_is_an_error_and_no_bus_error(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with (
        pytest.raises(OSError, match="No space left"),
        mapshuffle.mapped_array(tmp_path / "a.npy", np.int64, 1000) as array,
    ):
        array[:] = 1
    assert not list(tmp_path.iterdir())


def test_mapped_arrays_are_npy_files(tmp_path):
    for count, dtype in ((0, np.int64), (5, bool), (1000, np.int64)):
        with mapshuffle.mapped_array(tmp_path / "a.npy", dtype, count) as array:
            assert not (tmp_path / "a.npy").exists() or count
            array[:] = 1
        read = np.load(tmp_path / "a.npy", mmap_mode="r")
        assert read.dtype == dtype and read.tolist() == [1] * count


def test_memory_of_the_driver_does_not_hold_the_duplicates(tmp_path, monkeypatch):
    """Every document doubled, at two sizes: what the driver allocates between the steps grows by less than 100 bytes each."""
    import tracemalloc

    monkeypatch.setattr(dedup, "GROUP", 64)
    peaks = []
    for count in (2000, 8000):
        rng = random.Random(6)
        rows = (
            row(text + tail, f"{i}{tail}")
            for i in range(count // 2)
            for text in [" ".join(f"{rng.randrange(10**9)}" for _ in range(8))]
            for tail in ("", " ")
        )
        documents.write_documents(tmp_path / str(count), rows, rows_per_shard=1500)
        job = dedup.make_job(
            dedup.Config(), documents.document_shards(tmp_path / str(count)), tmp_path / f"s{count}", 4
        )
        dedup.search(job, LocalEngine(1))
        (tmp_path / f"out{count}").mkdir()
        dedup.collect(job, LocalEngine(1), tmp_path / f"out{count}")
        tracemalloc.start()  # again: nothing is left for the workers, all that runs is the driver's
        dedup.search(job, LocalEngine(1))
        out = dedup.collect(job, LocalEngine(1), tmp_path / f"again{count}")
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert out["total"]["documents"] == count // 2
    assert (peaks[1] - peaks[0]) / 6000 < 100, peaks


def test_outputs_hold_every_table(tmp_path):
    shards = corpus(tmp_path / "in")
    made = stage(tmp_path / "out", shards, workers=1)
    assert made == outputs(tmp_path / "out")
    removed = pq.read_table(tmp_path / "out/data/dedup/duplicates.parquet")
    clusters = pq.read_table(tmp_path / "out/data/dedup/clusters.parquet")
    metrics = json.loads((tmp_path / "out/metrics/dedup.json").read_text())
    assert (
        len(removed)
        == metrics["documents_in"] - metrics["documents_out"]
        == sum(c["size"] - 1 for c in clusters.to_pylist())
    )
