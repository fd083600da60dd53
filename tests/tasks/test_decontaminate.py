"""Planted leaks are found and named; texts that merely share words are not."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from tasks import decontaminate, documents
from tasks.decontaminate import ItemIndex
from tasks.stage import run_stage_for_test

WORDS = [
    f"{a}{b}" for a in ("ma", "ke", "zu", "pol", "dri", "fen", "tos") for b in ("ra", "n", "lio", "st", "ek", "um")
]
GOLD = Path(__file__).resolve().parents[3] / "shared" / "gold"


def words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(count))


def test_a_run_of_thirteen_words_is_found_whatever_the_punctuation_and_twelve_are_not():
    rng = random.Random(0)
    item = words(rng, 40)
    index = ItemIndex(13, 5)
    index.add("q1", item)
    run = item.split()[10:23]
    assert index.search(f"{words(rng, 50)}. {', '.join(run).upper()}! {words(rng, 9)}") == [("q1", " ".join(run))]
    assert index.search(f"{words(rng, 50)} other {' '.join(run[:12])} other {words(rng, 9)}") == []


def test_a_short_item_must_be_there_whole_and_a_very_short_one_is_only_counted():
    index = ItemIndex(13, 5)
    index.add("short", "What is 417 plus 288?")
    index.add("tiny", "417 plus 288")
    assert index.too_short == 1 and index.names == ["short"]
    assert [n for n, _ in index.search("he asked: what is 417 plus 288, and left")] == ["short"]
    assert index.search("what is 417 plus 289") == []


def test_every_planted_leak_is_found_and_clean_documents_stay():
    rng = random.Random(1)
    items = {f"item{i}": words(rng, rng.randrange(6, 80)) for i in range(300)}
    index = ItemIndex(13, 5)
    for name, text in items.items():
        index.add(name, text)
    for name, text in items.items():
        found = index.search(f"{words(rng, 200)} {text} {words(rng, 200)}")
        assert name in [n for n, _ in found]
    assert sum(bool(index.search(words(rng, 400))) for _ in range(100)) == 0


def test_two_items_with_a_common_run_are_both_named():
    rng = random.Random(2)
    common = words(rng, 20)
    index = ItemIndex(13, 5)
    index.add("a", f"alpha {common}")
    index.add("b", f"{common} beta")
    assert [n for n, _ in index.search(f"x {common} y")] == ["a", "b"]


def run(tmp_path, texts, config=None, deps=None):
    rows = [documents.document(t, f"s{i}", "web") for i, t in enumerate(texts)]
    documents.write_documents(tmp_path / "real", rows)
    config = {"heldout_problems": False} | (config or {})
    deps = {"data/dedup": tmp_path / "real"} | (deps or {})
    run_stage_for_test(decontaminate, config, deps=deps, outs=["data/decontaminate"], tmp=tmp_path)
    return list(documents.read_documents(tmp_path / "data/decontaminate"))


def test_stage_names_the_items_of_files(tmp_path):
    rng = random.Random(3)
    questions = [words(rng, 30) for _ in range(4)]
    folder = tmp_path / "evals"
    folder.mkdir()
    (folder / "a.jsonl").write_text("".join(json.dumps({"q": q, "n": 1}) + "\n" for q in questions[:2]))
    (folder / "b.json").write_text(json.dumps({"x": {"deep": [questions[2]]}}))
    (folder / "c.txt").write_text(questions[3])
    texts = [f"{words(rng, 60)} {q} {words(rng, 20)}" for q in questions] + [words(rng, 100)]
    kept = run(tmp_path, texts, {"items": ["evals"]}, {"evals": folder})
    assert [row["text"] for row in kept] == texts[4:]
    import pyarrow.parquet as pq

    hits = pq.read_table(tmp_path / "data/decontaminate/hits.parquet").to_pylist()
    assert [h["item"] for h in hits] == ["evals/a.jsonl:1", "evals/a.jsonl:2", "evals/b.json:x", "evals/c.txt"]
    metrics = json.loads((tmp_path / "metrics/decontaminate.json").read_text())
    assert metrics["items"] == {"searched": 4, "too_short": 0, "found": 4}
    assert metrics["removed"] == {"evaluation_overlap": 4}


def test_evaluation_material_of_the_corpus_counts_as_items(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    rng = random.Random(5)
    questions = {"evaluation": words(rng, 30), "": words(rng, 30)}
    rows = []
    for use, question in questions.items():
        path = tmp_path / "acquired" / f"files/bench{use}/q.json"
        path.parent.mkdir(parents=True)
        path.write_text(
            "".join(json.dumps({"id": i, "q": question + suffix}) + "\n" for i, suffix in enumerate(("", " x")))
        )
        rows.append({"path": f"files/bench{use}/q.json", "use": use})
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "acquired/index.parquet")
    texts = [f"{words(rng, 50)} {q} {words(rng, 50)}" for q in questions.values()]
    kept = run(tmp_path, texts, {"items": ["data/acquire"]}, {"data/acquire": tmp_path / "acquired"})
    assert [row["text"] for row in kept] == texts[1:]
    metrics = json.loads((tmp_path / "metrics/decontaminate.json").read_text())
    assert metrics["items_found"] == {"benchevaluation/q.json:1": 1, "benchevaluation/q.json:2": 1}


def test_an_undeclared_or_broken_item_file_is_an_error_that_names_it(tmp_path):
    with pytest.raises(ValueError, match="evals"):
        run(tmp_path, ["a b"], {"items": ["evals"]})
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"q": 1}\n{broken\n')
    with pytest.raises(ValueError, match=r"bad.jsonl:2: not JSON"):
        run(tmp_path, ["a b"], {"items": ["bad.jsonl"]}, {"bad.jsonl": bad})


def test_heldout_problems_are_searched_for(tmp_path):
    problems = pytest.importorskip("tasks.problems")
    first = next(iter(problems.heldout_texts()))
    text = first if isinstance(first, str) else first[1]
    pad = " and then some more words about it"
    config = {"heldout_problems": True, "min_words": 1}
    assert run(tmp_path, [f"Somebody wrote: {text}{pad}"], config) == []


@pytest.mark.skipif(not GOLD.is_dir(), reason="gold data ../shared/gold is not there")
@pytest.mark.parametrize("name", ["gsm8k", "human-eval", "mbpp", "ifeval", "bfcl"])
def test_leaks_of_public_benchmarks_are_found(name):
    from tasks.decontaminate import read_items

    index = ItemIndex(13, 5)
    items = [(n, t) for n, t in read_items(GOLD / name, name) if len(t.split()) >= 13][:400]
    for item, text in items:
        index.add(item, text)
    assert items
    rng = random.Random(4)
    for item, text in items[:100]:
        assert item in [n for n, _ in index.search(f"{words(rng, 100)}\n{text}\n{words(rng, 100)}")]
