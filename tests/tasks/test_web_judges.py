"""The judges within stage web: rescue, removal of machine-made pages, labels, and what happens when they cannot be trained."""

import random
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tasks.documents import read_documents, read_exclusions
from tasks.knowledge import KnowledgeConfig
from tasks.machine_text import MachineTextConfig
from tasks.web_judges import COLUMNS, Judges, JudgesConfig, Sample, machine_made, rescued, train
from tasks.web_pages import PAGE_SCHEMA
from tests.bench.machine_text_data import mail_merge
from tests.tasks.test_labeller import Endpoint
from tests.tasks.test_machine_text import ESSAY
from tests.tasks.test_web import acquired, run  # noqa: F401 (a fixture)

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "data/acquire/models/potion-base-8M"

needs_model = pytest.mark.skipif(
    not MODEL.is_dir(), reason="needs the embedding model of the acquired corpus (dvc repro acquire)"
)


def page(identity, text, domain="web", removed=None):
    row = {"id": identity, "text": text, "source": "s", "url": "", "domain": domain, "lang": "en", "meta": "{}"}
    return row | {"lang_score": 1.0, "removed": removed, "removed_value": None}


def first_pass(path, rows):
    pq.write_table(pa.Table.from_pylist(rows, schema=PAGE_SCHEMA), path)
    return path


def empty_index(folder):
    columns = {name: pa.array([], pa.string()) for name in ("item", "path", "member", "kind", "use", "url", "sha256")}
    pq.write_table(pa.table(columns), folder / "index.parquet")
    return folder


def test_a_sample_does_not_depend_on_the_order():
    rows = [(f"{i:04d}", f"text {i}") for i in range(500)]
    samples = [Sample(20), Sample(20)]
    for sample, order in zip(samples, (rows, random.Random(0).sample(rows, 500))):
        for row in order:
            sample.add(*row)
    assert samples[0].texts() == samples[1].texts() == [text for _, text in rows[:20]]


def test_templates_of_the_corpus_are_seen_and_what_a_rule_removed_is_not_counted(tmp_path):
    rng = random.Random(0)
    letters = [next(mail_merge(rng)) for _ in range(12)]
    rows = [page(f"a{i}", text) for i, text in enumerate(letters)] + [page("b", ESSAY)]
    rows += [page(f"c{i}", ESSAY, removed="words") for i in range(9)] + [
        page(f"d{i}", ESSAY, "prose") for i in range(9)
    ]
    config = JudgesConfig(knowledge=None, educational=None)
    assert (
        train(config, [first_pass(tmp_path / "p", rows)], empty_index(tmp_path), None, tmp_path / "j", tmp_path) == {}
    )
    scores = Judges(tmp_path / "j").score([*letters, ESSAY, "short"])
    assert set(scores) == set(COLUMNS) and np.isnan(scores["knowledge"]).all()
    assert (
        (scores["template"][:12] > 0.8).all() and scores["template"][12] == 0 and np.isnan(scores["machine_text"][13])
    )
    made = [
        machine_made(config, {c: None if np.isnan(v[i]) else float(v[i]) for c, v in scores.items()}) for i in range(14)
    ]
    assert all(m and m[0] in ("template", "machine_text") for m in made[:12]) and made[12:] == [None, None]


def test_without_a_model_of_embeddings_the_metrics_say_so(tmp_path):
    path = first_pass(tmp_path / "p", [page("a", ESSAY)])
    metrics = train(JudgesConfig(), [path], empty_index(tmp_path), None, tmp_path / "j", tmp_path)
    assert metrics["knowledge"]["labels"].startswith("none: no embedding model")
    assert metrics["educational"]["labels"] == "too few"
    assert np.isnan(Judges(tmp_path / "j").score([ESSAY])["educational"]).all()


def test_limits():
    config = JudgesConfig(knowledge=KnowledgeConfig(threshold=0.8), machine_text=MachineTextConfig(threshold=0.7))
    assert machine_made(config, {"machine_text": 0.7, "template": 1.0}) == ("machine_text", 0.7)
    assert machine_made(config, {"machine_text": None, "template": 0.79}) is None
    assert rescued(config, {"knowledge": 0.8}) and not rescued(config, {"knowledge": None})
    off = JudgesConfig(knowledge=None, machine_text=None)
    assert not rescued(off, {"knowledge": 1.0}) and machine_made(off, {"machine_text": 1.0}) is None


@needs_model
def test_labels_come_from_the_endpoint_once_and_the_metrics_say_what_was_learned_from(tmp_path):
    """The endpoint answers the first digit of a page: ponds are knowledge to it, prices are not."""
    ponds = [
        f"5 The pond number {i} was dug by monks and holds carp, tench and a rare species of newt. " * 3
        for i in range(40)
    ]
    prices = [
        f"0 Buy the item number {i} now, save money, free delivery, order today and pay later. " * 3 for i in range(40)
    ]
    entries = [
        f"A lake is a body of water; lake {i} lies in a valley that a glacier formed long ago. " * 3 for i in range(40)
    ]
    rows = [page(f"p{i:03d}", t) for i, t in enumerate(ponds + prices)]
    rows += [page(f"e{i:03d}", t, "encyclopedia") for i, t in enumerate(entries)]
    path, index = first_pass(tmp_path / "p", rows), empty_index(tmp_path)
    with Endpoint() as server:
        config = JudgesConfig(labeller=server.config(), educational=None, machine_text=None)
        for _ in range(2):
            about = train(config, [path], index, MODEL, tmp_path / "j", tmp_path / "labels")["knowledge"]
            assert about["labels"] == "encyclopedia positives and a language model" and about["label_stop"] == "done"
            assert about["labelled_knowledge"] == 40 and len(server.asked) == 80, "a second run asks nothing"
    told = Judges(tmp_path / "j", str(MODEL)).score([ponds[0], prices[0]])["knowledge"]
    assert told[0] > 0.8 > 0.2 > told[1]


@needs_model
def test_knowledge_in_a_dropped_bucket_is_kept_and_machine_made_pages_go(acquired, tmp_path):  # noqa: F811
    import shutil

    corpus = tmp_path / "corpus"
    shutil.copytree(acquired, corpus, symlinks=True)
    if not (corpus / "models/potion-base-8M").is_dir():
        shutil.copytree(MODEL, corpus / "models/potion-base-8M")
    _, strict = run(tmp_path / "a", corpus, judges={"machine_text": None, "knowledge": None})
    out, kind = run(tmp_path / "b", corpus, judges={"machine_text": None, "knowledge": {"threshold": 0.0}})
    if kind["judges"]["knowledge"]["labels"].startswith("none"):
        pytest.fail(f"the miniature corpus is too small: {kind['judges']}")
    assert strict["removed"]["quality_bucket"] == kind["rescued"] > 0 and "quality_bucket" not in kind["removed"]
    assert kind["funnel"]["quality_bucket"] == strict["funnel"]["quality_bucket"] + kind["rescued"]
    pages = [d for d in read_documents(out) if d["domain"] == "web"]
    assert all(0 <= d["knowledge"] <= 1 for d in pages)
    assert all(d["knowledge"] is None for d in read_documents(out) if d["domain"] != "web")
    out, made = run(tmp_path / "c", corpus, judges={})
    gone = [r for r in read_exclusions(out) if r["reason"] == "template"]
    assert gone and len(gone) == made["removed"]["template"] and min(r["score"] for r in gone) >= 0.8
