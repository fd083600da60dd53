"""The dedup stage: planted duplicates, the keep rule, reports, and the same bytes for any engine, workers and partitions."""

from __future__ import annotations

import importlib.util
import json
import random
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from tasks import dedup, dedup_steps, documents
from tasks.mapshuffle import LocalEngine
from tasks.stage import run_stage_for_test
from tests.tasks.test_minhash import replace_words, text_of

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="the optional package ray is missing")


def build(tmp_path, texts: dict[str, list[tuple[str, float]]], **config):
    deps = {}
    for name, items in texts.items():
        rows = [documents.document(t, f"{name}/{i}", name, quality=q) for i, (t, q) in enumerate(items)]
        documents.write_documents(tmp_path / "real" / name, rows)
        deps[f"data/{name}"] = tmp_path / "real" / name
    run_stage_for_test(dedup, {"workers": 1, **config}, deps=deps, outs=["data/dedup"], tmp=tmp_path)
    kept = [row["text"] for row in documents.read_documents(tmp_path / "data/dedup")]
    return kept, json.loads((tmp_path / "metrics/dedup.json").read_text())


def test_planted_near_duplicates_are_all_found_and_nothing_else(tmp_path):
    rng = random.Random(4)
    originals = [text_of(rng) for _ in range(300)]
    planted = [replace_words(rng, t, 3) for t in originals[:200]]
    kept, metrics = build(
        tmp_path, {"web": [(t, 1.0) for t in originals], "code": [(t, 0.0) for t in planted[:100]],
                   "math": [(t, 0.0) for t in planted[100:]]}
    )  # fmt: skip
    assert kept == originals
    assert metrics["removed"] == {"near_duplicate": 200}
    assert metrics["clusters"] == {"1": 100, "2": 200}


def test_keep_rule_quality_then_length_then_id(tmp_path):
    rng = random.Random(5)
    base = text_of(rng)
    longer, short = base + " one more sentence here", base
    other = text_of(rng)
    kept, metrics = build(
        tmp_path,
        {"web": [(short, 0.5), (longer, 0.5), (other, 0.1), (other.upper() + "  \n", 0.9)], "code": [], "math": []},
    )
    assert kept == [longer, other.upper() + "  \n"]
    assert metrics["removed"] == {"exact_duplicate": 1, "near_duplicate": 1}
    excluded = list(documents.read_exclusions(tmp_path / "data/dedup"))
    assert [e["reason"] for e in excluded] == ["near_duplicate", "exact_duplicate"]
    assert excluded[1]["score"] == 1.0 and 0.8 <= excluded[0]["score"] < 1


def test_below_threshold_pairs_stay(tmp_path):
    rng = random.Random(6)
    base = text_of(rng)
    half = " ".join(base.split()[:150]) + " " + text_of(rng, 150)
    kept, metrics = build(tmp_path, {"web": [(base, 0.0), (half, 0.0)], "code": [], "math": []})
    assert kept == [base, half] and metrics["removed"] == {}


def test_clusters_are_reported_with_their_members(tmp_path):
    rng = random.Random(7)
    big, small = text_of(rng), text_of(rng)
    texts = [replace_words(rng, big, 1) for _ in range(6)] + [small, small.upper(), small]
    _, metrics = build(
        tmp_path, {"web": [(t, 1.0) for t in texts[:5]], "code": [(t, 0.5) for t in texts[5:]], "math": []}
    )
    clusters = pq.read_table(tmp_path / "data/dedup/clusters.parquet").to_pylist()
    assert [(c["size"], c["exact"], c["near"]) for c in clusters] == [(6, 0, 5), (3, 2, 0)]
    kept = {row["id"] for row in documents.read_documents(tmp_path / "data/dedup")}
    assert kept == {c["keeper"] for c in clusters}
    assert metrics["largest"] == clusters and metrics["largest_cluster"] == 6
    duplicates = pq.read_table(tmp_path / "data/dedup/duplicates.parquet").to_pylist()
    assert len(duplicates) == 7 and {d["keeper"] for d in duplicates} == kept


def test_short_and_wordless_documents(tmp_path):
    texts = ["", " ", "???", "!!!", "one two", "One, two!", "one three", "今日は良い天気です。", "今日は良い天気です！"]
    kept, metrics = build(tmp_path, {"web": [(t, 0.0) for t in texts], "code": [], "math": []})
    assert kept == ["", "???", "!!!", "one two", "one three", "今日は良い天気です。"] or len(kept) == 6
    assert metrics["wordless"] == 4
    assert metrics["removed"] == {"exact_duplicate": 1, "near_duplicate": 2}


def test_across_domains_can_be_off(tmp_path):
    text = text_of(random.Random(8))
    rows = {"web": [(text, 0.0), (text, 0.0)], "code": [(text, 0.0)], "math": []}
    assert build(tmp_path / "a", rows)[1]["documents_out"] == 1
    assert build(tmp_path / "b", rows, across_domains=False)[1]["documents_out"] == 2


def test_the_order_of_the_keep_rule():
    fields = [("quality", np.float64), ("length", np.int64), ("id", "S1"), ("doc", np.int64)]
    rows = [(0.5, 9, b"b", 0), (0.5, 9, b"a", 9), (0.5, 9, b"a", 1), (float("nan"), 99, b"0", 2), (0.9, 1, b"z", 3)]
    rows = np.array([*rows, (0.5, 10, b"y", 4)], dtype=fields)
    assert dedup_steps.best_first(rows).tolist() == [4, 5, 2, 1, 0, 3]
    assert dedup_steps.best_first(rows, np.array([1, 1, 1, 0, 0, 0])).tolist() == [4, 5, 3, 2, 1, 0]


def corpus(folder: Path) -> list[Path]:
    """Three shards with exact and near duplicates inside and across them."""
    rng = random.Random(9)
    originals = [text_of(rng, rng.randrange(20, 300)) for _ in range(150)]
    texts = originals + [replace_words(rng, t, rng.randrange(1, 5)) for t in originals for _ in range(rng.randrange(3))]
    texts += originals[:20]
    rng.shuffle(texts)
    for number in range(3):
        part = texts[number::3]
        rows = [documents.document(t, f"{number}/{i}", "web", quality=rng.random()) for i, t in enumerate(part)]
        documents.write_documents(folder / str(number), rows)
    return [path for number in range(3) for path in documents.document_shards(folder / str(number))]


def decided(shards: list[Path], scratch: Path, partitions: int) -> tuple[np.ndarray, list[dict]]:
    job = dedup.make_job(dedup.Config(), shards, scratch, partitions)
    dedup.search(job, LocalEngine(1))
    removed = np.concatenate([dedup_steps.removed_of(job, number) for number in range(len(shards))])
    return removed, list(dedup.clusters(job))


def test_partitions_and_chunks_change_nothing(tmp_path, monkeypatch):
    shards = corpus(tmp_path / "in")
    one, clusters = decided(shards, tmp_path / "one", 1)
    assert len(one) > 100 and len(clusters) > 50
    seven, others = decided(shards, tmp_path / "seven", 7)
    np.testing.assert_array_equal(one, seven)
    assert others == clusters
    monkeypatch.setattr(dedup_steps, "VALUES", 500)
    monkeypatch.setattr(dedup_steps, "BATCH", 3)
    chunked, _ = decided(shards, tmp_path / "chunked", 2)
    np.testing.assert_array_equal(one, chunked)


def outputs(folder: Path) -> dict[str, bytes]:
    """Every file of data/dedup but the manifest, which holds the parameters."""
    root = folder / "data/dedup"
    return {
        p.relative_to(root).as_posix(): p.read_bytes()
        for p in sorted(root.rglob("*"))
        if p.is_file() and p.name != "manifest.json"
    }


def stage(tmp_path: Path, shards: list[Path], **config) -> dict[str, bytes]:
    deps = {f"data/{name}": path.parent.parent for name, path in zip(("web", "code", "math"), shards)}
    run_stage_for_test(dedup, config, deps=deps, outs=["data/dedup"], tmp=tmp_path)
    return outputs(tmp_path)


@pytest.mark.parametrize(
    "engine,workers",
    [
        ("local", 2),
        pytest.param("local", 3, marks=pytest.mark.slow),
        pytest.param("ray", 2, marks=[needs_ray, pytest.mark.slow]),
    ],
)
def test_the_same_bytes_from_any_engine_and_number_of_workers(tmp_path, engine, workers):
    shards = corpus(tmp_path / "in")
    expected = stage(tmp_path / "alone", shards, workers=1)
    assert len(expected) == 8
    assert stage(tmp_path / "many", shards, engine=engine, workers=workers) == expected


def test_a_stage_that_stopped_goes_on_and_gives_the_same_bytes(tmp_path, monkeypatch):
    shards = corpus(tmp_path / "in")
    expected = stage(tmp_path / "whole", shards, workers=1)
    write, sketches = dedup.write, []

    def interrupted(argument):
        if argument[1] == 1:
            raise KeyboardInterrupt
        return write(argument)

    interrupted.__name__ = "write"
    with monkeypatch.context() as patch:
        patch.setattr(dedup, "write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            stage(tmp_path / "again", shards, workers=1)
    assert not (tmp_path / "again/data/dedup").exists()
    sketch = dedup_steps.sketch

    def counted(argument):
        sketches.append(argument)
        return sketch(argument)

    counted.__name__ = "sketch"
    monkeypatch.setattr(dedup_steps, "sketch", counted)
    assert stage(tmp_path / "again", shards, workers=1) == expected
    assert not sketches and not (tmp_path / "again/work/dedup").exists()


def test_a_broken_shard_is_an_error_that_names_it(tmp_path):
    shards = corpus(tmp_path / "in")
    data = shards[1].read_bytes()
    shards[1].write_bytes(data[: len(data) // 2])
    with pytest.raises(ValueError, match=str(shards[1].name)):
        stage(tmp_path / "out", shards, workers=1)


def test_no_documents_is_an_error(tmp_path):
    for name in ("web", "code", "math"):
        documents.write_documents(tmp_path / "in" / name, [])
    shards = [path for name in ("web", "code", "math") for path in documents.document_shards(tmp_path / "in" / name)]
    with pytest.raises(ValueError, match="no documents"):
        stage(tmp_path / "out", shards)
    shutil.rmtree(tmp_path / "in")
