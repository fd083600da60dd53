"""Template pages in stage dedup: pages filled into one text go but for the best, whatever the workers; the rest stays."""

import json
import random
import zlib
from functools import cache
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from tasks import dedup, dedup_steps, dedup_templates
from tasks.documents import document, document_shards, read_documents, read_exclusions, write_documents
from tasks.mapshuffle import LocalEngine
from tasks.semdedup import SemdedupConfig, group_sizes, same_template, semdedup
from tasks.stage import run_stage_for_test
from tests.bench.machine_text_data import mail_merge
from tests.tasks.test_machine_text import ESSAY

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "data/acquire/models/potion-base-8M"
SEMDEDUP = {"threshold": 0.8, "shared": 0.6}


def corpus(folder):
    rng = random.Random(0)
    letters = [next(mail_merge(rng)) for _ in range(30)]
    rows = [document(t, "shop", "web", url=str(i), quality=i / 100) for i, t in enumerate(letters)]
    rows += [document(next(mail_merge(rng)), "shop", "prose", quality=0.1) for _ in range(5)]
    rows += [document(ESSAY, "essays", "web", quality=0.5), document(ESSAY, "copies", "web", quality=0.4)]
    write_documents(folder, rows, rows_per_shard=16)
    return letters


def run(tmp_path, web, semdedup=SEMDEDUP, acquired=None, workers=1):
    deps = {"data/web": web, "data/acquire": acquired or MODEL.parents[1]}
    config = {"semdedup": semdedup, "workers": workers, "threshold": 0.95}
    run_stage_for_test(dedup, config, deps=deps, outs=["data/dedup"], tmp=tmp_path)
    return tmp_path / "data/dedup", json.loads((tmp_path / "metrics/dedup.json").read_text())


@pytest.mark.skipif(not MODEL.is_dir(), reason="needs the embedding model of the acquired corpus (dvc repro acquire)")
def test_one_page_of_a_template_stays(tmp_path):
    letters = corpus(tmp_path / "web")
    out, metrics = run(tmp_path / "a", tmp_path / "web")
    kept = list(read_documents(out))
    web = [d for d in kept if d["source"] == "shop" and d["domain"] == "web"]
    assert len(web) <= 3 and letters[-1] in {d["text"] for d in web}, "the best of the template is among the kept"
    assert sum(d["domain"] == "prose" for d in kept) == 5, "web pages alone are compared"
    assert [d["source"] for d in kept if d["text"] == ESSAY] == ["essays"]
    gone = [r for r in read_exclusions(out) if r["reason"] == "template_page"]
    assert len(gone) == metrics["removed"]["template_page"] == metrics["templates"]["removed"] == 30 - len(web)
    table = pq.read_table(out / "duplicates.parquet").to_pylist()
    ids = {d["id"] for d in kept}
    assert all(r["keeper"] in ids and r["similarity"] >= 0.8 for r in table if r["reason"] == "template_page")
    assert metrics["funnel"]["web"]["template_page"] == len(gone) and metrics["documents_out"] == len(kept)
    again, _ = run(tmp_path / "b", tmp_path / "web", workers=2)
    for path in sorted(out.rglob("*.parquet")):
        assert path.read_bytes() == (again / path.relative_to(out)).read_bytes()


def test_without_the_step_or_the_model_every_page_stays(tmp_path):
    corpus(tmp_path / "web")
    (tmp_path / "empty").mkdir()
    for name, limits in (("off", None), ("no-model", SEMDEDUP)):
        out, metrics = run(tmp_path / name, tmp_path / "web", limits, tmp_path / "empty")
        assert metrics["documents_out"] == 36 and "templates" not in metrics
        assert not [r for r in read_exclusions(out) if r["reason"] == "template_page"]


@cache
def vector_of(word, dimension):
    return np.random.default_rng(zlib.crc32(word.encode())).normal(size=dimension)


class Letters:
    """Stands for the embedding model: 32 numbers from the text's words, the zero vector for a text without letters."""

    dimension = 32

    def __init__(self, _):
        pass

    def embed(self, texts):
        out = np.zeros((len(texts), self.dimension), np.float32)
        for row, text in enumerate(texts):
            for word in text.split():
                if word.isalpha():
                    out[row] += vector_of(word, self.dimension)
        return out


def made_pages(count):
    """Pages of 40 templates with a few words filled in, and pages of their own; some without a word."""
    rng = random.Random(1)
    words = ["".join(rng.choices("abcdefghij", k=6)) for _ in range(400)]
    frames = [rng.choices(words, k=60) for _ in range(40)]
    for number in range(count):
        if number % 50 == 0:
            text = f"{number} 000"
        elif number % 3:
            frame = list(rng.choice(frames))
            for place in rng.sample(range(60), 9):
                frame[place] = rng.choice(words)
            text = " ".join(frame)
        else:
            text = " ".join(rng.choices(words, k=60))
        yield document(text, f"s/{number}", "web", quality=rng.randrange(4) / 4)


@pytest.mark.parametrize("partition", [64 << 20, 16 << 10])
def test_by_shards_and_partitions_as_in_memory(tmp_path, monkeypatch, partition):
    """Against `semdedup` over all pages at once, whatever the sizes of shards and partitions."""
    monkeypatch.setattr(dedup_templates, "StaticEmbedder", Letters)
    monkeypatch.setattr(dedup_templates, "PARTITION", partition)
    dedup_templates._embedder.cache_clear()
    rows = list(made_pages(600))
    write_documents(tmp_path / "web", rows, rows_per_shard=130)
    config = SemdedupConfig(threshold=0.8, shared=0.3, cluster_size=60, max_cluster=100)
    job = dedup.make_job(dedup.Config(threshold=1.0), document_shards(tmp_path / "web"), tmp_path / "scratch")
    with LocalEngine(1) as engine:
        dedup.search(job, engine)
        found = dedup_templates.remove_templates(job, config, Path("model"), 7, engine, lambda results, *_: results)
    dedup_templates._embedder.cache_clear()
    removed = np.concatenate([dedup_steps.removed_of(job, number) for number in range(len(job.names))])
    texts = [row["text"] for row in rows]
    keys = [(row["quality"], len(row["text"]), row["id"]) for row in rows]
    same = same_template(texts, config.shared)
    expected = semdedup(
        Letters("").embed(texts), keys, config.threshold, 7, same=same, cluster_size=60, max_cluster=100
    )
    got = {int(r["doc"]): (r["keeper_id"].decode(), r["template"]) for r in removed if r["template"] >= 0}
    assert {i: keeper for i, (keeper, _) in got.items()} == {
        i: rows[keeper]["id"] for i, (keeper, _) in expected.removed.items()
    }
    assert all(abs(cosine - expected.removed[i][1]) < 1e-4 for i, (_, cosine) in got.items())
    assert found["pages"] == 600 and found["removed"] == len(got) > 150 and found["refused"] == expected.refused
    assert found["clusters"] == len(expected.sizes) and found["groups"] == group_sizes(expected.removed)


def test_a_cluster_that_cannot_be_split_is_cut(tmp_path, monkeypatch):
    """Pages with one embedding and one wording, far more than a cluster may hold: work and memory stay bounded."""
    monkeypatch.setattr(dedup_templates, "StaticEmbedder", Letters)
    dedup_templates._embedder.cache_clear()
    same = "one frame of words that every page of this shop has"
    rows = [document(f"{same} {number}", str(number), "web") for number in range(400)]
    write_documents(tmp_path / "web", rows, rows_per_shard=150)
    config = SemdedupConfig(threshold=0.8, shared=0.3, cluster_size=5, max_cluster=10)
    job = dedup.make_job(dedup.Config(threshold=1.0), document_shards(tmp_path / "web"), tmp_path / "scratch")
    with LocalEngine(1) as engine:
        dedup.search(job, engine)
        found = dedup_templates.remove_templates(job, config, Path("model"), 7, engine, lambda results, *_: results)
    dedup_templates._embedder.cache_clear()
    assert found["largest"] <= 10 and found["removed"] >= 400 * 0.8
    assert np.load(tmp_path / "scratch/pieces.npy").sum() >= 400 / 80
