"""Planted leaks of every kind are found and named; texts that merely share words are not."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest

from tasks import decontaminate, documents
from tasks.overlap import ItemIndex
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
    (hit,) = index.search(f"{words(rng, 50)}. {', '.join(run).upper()}! {words(rng, 9)}")
    assert (hit.item, hit.kind, hit.score, hit.matched) == ("q1", "exact", 1.0, ", ".join(run).upper())
    assert index.search(f"{words(rng, 50)} other {' '.join(run[:12])} other {words(rng, 9)}") == []


def test_a_short_item_must_be_there_whole_and_a_very_short_one_is_only_counted():
    index = ItemIndex(13, 5)
    index.add("short", "What is 417 plus 288?")
    index.add("tiny", "417 plus 288")
    assert index.too_short == 1 and index.names == ["short"]
    assert [hit.item for hit in index.search("he asked: what is 417 plus 288, and left")] == ["short"]
    assert index.search("what is 417 plus 289") == []


def test_every_planted_leak_is_found_and_clean_documents_stay():
    rng = random.Random(1)
    items = {f"item{i}": words(rng, rng.randrange(6, 80)) for i in range(300)}
    index = ItemIndex(13, 5)
    for name, text in items.items():
        index.add(name, text)
    for name, text in items.items():
        found = index.search(f"{words(rng, 200)} {text} {words(rng, 200)}")
        assert name in [hit.item for hit in found]
    assert sum(bool(index.search(words(rng, 400))) for _ in range(100)) == 0


def story(rng: random.Random) -> str:
    """A problem of about 30 words with numbers in it."""
    name = rng.choice(("Ann", "Bo", "Cem", "Dee"))
    return (
        f"{name} {words(rng, 9)} with {rng.randrange(20, 99)} {words(rng, 3)} and {rng.randrange(2, 9)} {words(rng, 4)}. "
        f"How many {words(rng, 4)} does {name} {words(rng, 3)}?"
    )


def changed(rng: random.Random, text: str, count: int) -> str:
    """`count` words, at places spread over the text, replaced by others."""
    parts = text.split()
    step = len(parts) // count
    for k in range(count):
        parts[k * step + rng.randrange(step)] = rng.choice(("another", "something", "elsewhere"))
    return " ".join(parts)


SPELT = dict(zip("23456789", "two three four five six seven eight nine".split()))
LEAKS = {
    "verbatim": lambda rng, t: t,
    "upper case": lambda rng, t: t.upper(),
    "no punctuation": lambda rng, t: t.replace("?", "").replace(".", ""),
    "more punctuation": lambda rng, t: " -- ".join(t.split()),
    "line breaks": lambda rng, t: t.replace(" ", "\n"),
    "full width": lambda rng, t: "".join(chr(ord(c) + 0xFEE0) if "!" <= c <= "~" else c for c in t),
    "Arabic digits": lambda rng, t: t.translate({ord("0") + i: chr(0x660 + i) for i in range(10)}),
    "numbers in words": lambda rng, t: " ".join(SPELT.get(w, w) for w in t.split()),
    "four words changed": lambda rng, t: changed(rng, t, 4),
    "a word dropped every ten": lambda rng, t: " ".join(w for i, w in enumerate(t.split()) if i % 10 != 7),
    "soft hyphens": lambda rng, t: t.replace("o", "o\u00ad"),
    "references of HTML": lambda rng, t: t.replace(" ", "&nbsp;").replace("e", "&#101;"),
    "underscores": lambda rng, t: " ".join(f"_{w}_" for w in t.split()),
    "one name": lambda rng, t: t.replace(" ", "_"),
}


@pytest.mark.parametrize("kind", LEAKS)
def test_leaks_in_other_dress_are_found_and_named(kind):
    """100 items; each leak stands in a document of 40 or of 20,000 words and names its own item, alone."""
    rng = random.Random(kind)
    index = ItemIndex(13, 5)
    items = {f"q{i}": story(rng) for i in range(100)}
    for name, text in items.items():
        index.add(name, text)
    for name, text in items.items():
        size = 20_000 if name == "q7" else 20
        found = index.search(f"{words(rng, size)}. {LEAKS[kind](rng, text)} {words(rng, size)}")
        assert [hit.item for hit in found] == [name], (kind, text)


def test_a_changed_passage_of_a_long_item_is_found():
    rng = random.Random(6)
    item = words(rng, 1000)
    index = ItemIndex(13, 5)
    index.add("book", item)
    part = changed(rng, " ".join(item.split()[300:380]), 10)
    (hit,) = index.search(f"{words(rng, 100)} {part} {words(rng, 100)}")
    assert (hit.item, hit.kind) == ("book", "fuzzy") and 0.8 <= hit.score < 1
    index = ItemIndex(13, 5, threshold=None)
    index.add("book", item)
    assert index.search(part) == []


def test_half_of_the_words_changed_is_another_text():
    rng = random.Random(7)
    index = ItemIndex(13, 5)
    items = [story(rng) for _ in range(100)]
    for number, text in enumerate(items):
        index.add(str(number), text)
    assert not any(index.search(changed(rng, text, len(text.split()) // 2)) for text in items)


def longest_common_subsequence(a: list, b: list) -> int:
    row = [0] * (len(b) + 1)
    for x in a:
        before = 0
        for j, y in enumerate(b, 1):
            before, row[j] = row[j], before + 1 if x == y else max(row[j], row[j - 1])
    return row[-1]


def test_the_score_is_the_longest_common_subsequence():
    from tasks.overlap import _common

    rng = random.Random(8)
    for _ in range(300):
        a, b = ([rng.randrange(8) for _ in range(rng.randrange(1, size))] for size in (65, 90))
        arrays = (np.array(v, dtype=np.uint64) for v in (a, b))
        assert _common(*arrays) == longest_common_subsequence(a, b)


def test_a_saved_index_finds_the_same(tmp_path):
    rng = random.Random(9)
    index = ItemIndex(13, 5)
    for number in range(50):
        index.add(f"q{number}", words(rng, rng.randrange(5, 200)))
    texts = [words(rng, 30) + " " + changed(rng, words(rng, 30), 3) for _ in range(20)]
    index.add("known", texts[3])
    index.save(tmp_path)
    loaded = ItemIndex.load(tmp_path)
    assert [loaded.search(t) for t in texts] == [index.search(t) for t in texts]
    assert [hit.item for hit in loaded.search(texts[3])] == ["known"]
    assert loaded.names == index.names


def test_the_same_text_twice_is_one_item():
    index = ItemIndex(13, 5)
    for name in ("a", "b"):
        index.add(name, "one two three four five six")
    assert index.names == ["a"] and index.repeated == 1
    assert [hit.item for hit in index.search("one two three four five six")] == ["a"]


def test_a_passage_across_the_parts_of_a_long_document_is_found(monkeypatch):
    from tasks import overlap

    rng = random.Random(12)
    index = ItemIndex(13, 5)
    index.add("q", item := words(rng, 40))
    leak = changed(rng, item, 5)
    for before in range(180, 260, 7):
        monkeypatch.setattr(overlap, "PART", 100_000)
        whole = index.search(text := f"{words(rng, before)} {leak} {words(rng, 300)}")
        monkeypatch.setattr(overlap, "PART", 200)
        assert index.search(text) == whole and len(whole) == 1


def test_an_empty_index_finds_nothing():
    index = ItemIndex(13, 5)
    assert index.search("a b c d e f g h i j k l m n o p") == []
    index.add("q", "one two three four five six")
    assert index.search("") == [] and index.search("one two three") == []


def test_two_items_with_a_common_run_are_both_named():
    rng = random.Random(2)
    common = words(rng, 20)
    index = ItemIndex(13, 5)
    index.add("a", f"alpha {common}")
    index.add("b", f"{common} beta")
    assert [hit.item for hit in index.search(f"x {common} y")] == ["a", "b"]


def run(tmp_path, texts, config=None, deps=None):
    rows = [documents.document(t, f"s{i}", "web") for i, t in enumerate(texts)]
    documents.write_documents(tmp_path / "real", rows)
    config = {"heldout_problems": False, "needles": False, "workers": 1} | (config or {})
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
    assert metrics["items"] == {"searched": 4, "too_short": 0, "repeated": 0, "found": 4}
    first = documents.document_id("s0", texts[0])
    assert metrics["items_found"]["evals/a.jsonl:1"] == {"documents": 1, "first": first}
    assert (hits[0]["id"], hits[0]["kind"], hits[0]["score"]) == (first, "exact", 1.0) and questions[0].startswith(
        hits[0]["matched"]
    )
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
    assert {k: v["documents"] for k, v in metrics["items_found"].items()} == {
        "benchevaluation/q.json:1": 1,
        "benchevaluation/q.json:2": 1,
    }
    assert metrics["sets"] == {"benchevaluation/q.json": {"searched": 2, "found": 2}}


def test_benchmarks_beside_the_checkout_are_read_where_they_exist(tmp_path):
    rng = random.Random(10)
    question = words(rng, 30)
    texts = [f"{words(rng, 60)} {changed(rng, question, 5)}", words(rng, 60)]
    assert len(run(tmp_path / "a", texts, {"optional_items": ["bench"]})) == 2
    folder = tmp_path / "b/bench/set"
    folder.mkdir(parents=True)
    (folder / "test.jsonl").write_text(json.dumps({"question": question}) + "\n")
    (folder / "LICENSE").write_text(texts[1])
    (folder / "page.html").write_bytes(b"\xff\xfe")
    kept = run(tmp_path / "b", texts, {"optional_items": ["bench"]})
    assert [row["text"] for row in kept] == texts[1:]
    metrics = json.loads((tmp_path / "b/metrics/decontaminate.json").read_text())
    assert metrics["removed"] == {"evaluation_paraphrase": 1} and list(metrics["optional_items"]) == ["bench"]
    assert list(metrics["items_found"]) == ["bench/set/test.jsonl:1"]


def test_the_number_of_workers_changes_nothing(tmp_path):
    rng = random.Random(11)
    texts = [words(rng, 60) for _ in range(30)]
    (tmp_path / "evals.txt").write_text(texts[4])

    def out(name: str, workers: int) -> dict:
        for number in range(3):
            rows = [documents.document(t, f"s{i}", "web") for i, t in enumerate(texts)][number::3]
            documents.write_documents(tmp_path / name / "one", rows)
            target = tmp_path / name / f"real/documents/part-{number:05d}.parquet"
            target.parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name / "one/documents/part-00000.parquet").rename(target)
        config = {"heldout_problems": False, "items": ["evals.txt"], "workers": workers}
        deps = {"data/dedup": tmp_path / name / "real", "evals.txt": tmp_path / "evals.txt"}
        run_stage_for_test(decontaminate, config, deps=deps, outs=["data/decontaminate"], tmp=tmp_path / name)
        root = tmp_path / name / "data/decontaminate"
        files = [p for p in sorted(root.rglob("*.parquet"))]
        return {p.relative_to(root).as_posix(): p.read_bytes() for p in files}

    assert out("one", 1) == out("two", 2)


def test_needle_questions_are_searched_for(tmp_path):
    from tasks import needle

    assert run(tmp_path, ["x " + needle.STATEMENT.format(name="Raven", value=1234)], {"needles": True}) == []


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
        assert item in [hit.item for hit in index.search(f"{words(rng, 100)}\n{text}\n{words(rng, 100)}")]
