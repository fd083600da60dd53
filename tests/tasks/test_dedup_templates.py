"""Template pages in stage dedup: pages filled into one text go but for the best, whatever the workers; the rest stays."""

import json
import random
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tasks import dedup
from tasks.documents import document, read_documents, read_exclusions, write_documents
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
    for name, semdedup in (("off", None), ("no-model", SEMDEDUP)):
        out, metrics = run(tmp_path / name, tmp_path / "web", semdedup, tmp_path / "empty")
        assert metrics["documents_out"] == 36 and "templates" not in metrics
        assert not [r for r in read_exclusions(out) if r["reason"] == "template_page"]
