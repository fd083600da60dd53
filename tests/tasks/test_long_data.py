"""Interleaving, hard negatives, similarity, MRCR-like conversations, and the long_data stage."""

from __future__ import annotations

import json
import random
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks import documents, long_data, mrcr
from tasks.stage import run_stage_for_test

SUBJECTS = {
    "harbour": "ships anchor tide quay sailors cargo crane rope lighthouse captain".split(),
    "garden": "roses soil compost spade tulips hedge greenhouse seedlings pruning orchard".split(),
    "kitchen": "flour oven butter recipe saucepan whisk pastry garlic simmer kettle".split(),
    "railway": "locomotive platform signal timetable carriage junction freight tunnel conductor gauge".split(),
}


def prose(subject: str, rng: random.Random, sentences: int = 20) -> str:
    words = SUBJECTS[subject]
    made = [
        f"The {rng.choice(words)} near the {subject} has number {rng.randrange(1000)} and a {rng.choice(words)} with much care."
        for _ in range(sentences)
    ]
    return "\n".join(" ".join(made[i : i + 4]) for i in range(0, sentences, 4))


def test_similar_documents_are_nearest():
    rng = random.Random(0)
    labels = [s for s in SUBJECTS for _ in range(10)]
    texts = [prose(s, rng) for s in labels]
    embed = long_data.HashedTfidf(texts, 512)
    vectors = embed(texts)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, rtol=1e-5)
    indices, cosines = long_data.nearest(vectors, vectors, 10)
    assert (indices[:, 0] == np.arange(40)).all() and (np.diff(cosines, axis=1) <= 1e-6).all()
    assert all(labels[j] == labels[i] for i in range(40) for j in indices[i])
    np.testing.assert_allclose(cosines, np.sort(vectors @ vectors.T, axis=1)[:, ::-1][:, :10], atol=1e-5)
    groups = list(long_data.clusters(vectors, 2, 4, 0.2))
    assert len({i for g in groups for i in g}) == sum(map(len, groups)) >= 30
    assert all(len({labels[i] for i in g}) == 1 for g in groups)


TEXT = st.text(alphabet="ab. \n", min_size=1, max_size=300).filter(str.strip)


@given(TEXT, st.integers(1, 6))
def test_segments_are_the_text(text, count):
    parts = long_data.segments(text, count)
    assert 1 <= len(parts) <= count
    assert re.sub(r"\s", "", "".join(parts)) == re.sub(r"\s", "", text)


@given(TEXT, st.integers(1, 100), st.integers(0, 2**32))
def test_a_piece_is_a_part_no_longer_than_asked(text, length, seed):
    got = long_data.piece(text, length, random.Random(seed))
    assert got in text and len(got) <= length


def test_interleaving_keeps_each_documents_order_and_alternates():
    texts = ["\n\n".join(f"{name}{i} " * 8 for i in range(6)) for name in "xyz"]
    out = long_data.interleave(texts, 3)
    runs = [m[0] for m in re.finditer(r"([xyz])\d(?:\s+\1\d)*", out)]
    assert [r[0] for r in runs] == list("xyz" * 3)
    for name in "xyz":
        numbers = [int(n) for n in re.findall(name + r"(\d)", out)]
        assert numbers == sorted(numbers) and len(numbers) == 48


def test_hard_negatives_stand_between_the_chunks_of_one_document():
    text = "\n\n".join(f"own{i} " * 8 for i in range(3))
    out = long_data.with_negatives(text, [["first negative"], ["second negative"]], 3)
    order = [
        m[0] for m in re.finditer(r"own\d(?! own)|first negative|second negative", re.sub(r"(own\d )\1*", r"\1", out))
    ]
    assert order == ["own0", "first negative", "own1", "second negative", "own2"]


@pytest.fixture(scope="module")
def bank():
    rng = random.Random(1)
    return mrcr.sentence_bank([prose(s, rng, 60) for s in SUBJECTS])


@pytest.mark.parametrize("variant", mrcr.VARIANTS)
@pytest.mark.parametrize("needles", [1, 2, 4, 8])
def test_conversation_asks_for_one_of_equal_requests(bank, needles, variant):
    for seed in range(10):
        c = mrcr.conversation(bank, random.Random(seed), 8000, needles, variant, overhead=29)
        assert [m["role"] for m in c.messages] == ["user", "assistant"] * (len(c.messages) // 2) + ["user"]
        question = c.messages[-1]["content"]
        place, kind, topic = re.fullmatch(
            rf"Prepend {c.prefix} to the (\w+(?: from last)?) (\w+) about (\w+)\."
            r" Do not include any other text in your response\.",
            question,
        ).groups()
        request = f"Write a {kind} about {topic}."
        replies = [
            b["content"] for a, b in zip(c.messages, c.messages[1:]) if a == {"role": "user", "content": request}
        ]
        assert len(replies) == needles == len(set(replies))
        number = mrcr._ORDINALS.index(place.split()[0])
        expected = replies[number] if variant == "forward" else replies[::-1][number]
        assert place.endswith("from last") == (variant == "backward")
        assert c.answer == c.prefix + expected
        assert sum(len(m["content"]) for m in c.messages) + len(c.answer) <= 8000
        assert all(topic in text or kind in text for text in replies) and len(c.messages) > 2 * needles + 1


def test_grade_is_the_benchmarks():
    assert mrcr.grade("Xy12the reply", "Xy12the reply", "Xy12") == 1.0
    assert mrcr.grade("the reply", "Xy12the reply", "Xy12") == 0.0
    assert 0.5 < mrcr.grade("Xy12the rep", "Xy12the reply", "Xy12") < 1.0


def test_a_context_too_small_or_a_bank_too_poor_is_an_error(bank):
    with pytest.raises(ValueError, match="more than the 100"):
        mrcr.conversation(bank, random.Random(0), 100, 4)
    with pytest.raises(ValueError, match="topics with at least"):
        mrcr.conversation({}, random.Random(0), 1000, 2)


@pytest.fixture
def sources(tmp_path):
    rng = random.Random(2)
    web = [documents.document(prose(s, rng, 40), f"{s}/{i}", "web", lang="en") for s in SUBJECTS for i in range(15)]
    swe = [documents.document("def f():\n    return 1\n" * 60, f"swe/{i}", "swe", lang="python") for i in range(2)]
    documents.write_documents(tmp_path / "a", web)
    documents.write_documents(tmp_path / "b", swe)
    return {"data/decontaminate": tmp_path / "a", "data/decontaminate_swe": tmp_path / "b"}


CONFIG = {
    "contexts": [256, 1024],
    "interleaved": [4, 3],
    "negatives": [3, 2],
    "mrcr": 4,
    "needles": [2],
    "chars_per_token": 3.0,
}


def test_stage(tmp_path, sources):
    for run in ("one", "two"):
        run_stage_for_test(long_data, CONFIG, deps=sources, outs=["data/long_data"], tmp=tmp_path / run)
    out = tmp_path / "one/data/long_data"
    assert (out / "manifest.json").read_text() == (tmp_path / "two/data/long_data/manifest.json").read_text()
    rows = list(documents.read_documents(out))
    made = json.loads((tmp_path / "one/metrics/long_data.json").read_text())["made"]["train"]
    assert made == {
        "interleaved_256": 4,
        "interleaved_1024": 3,
        "negatives_256": 3,
        "negatives_1024": 2,
        "mrcr_1024": 4,
    }
    seen: set[str] = set()
    for row in rows:
        meta = json.loads(row["meta"])
        assert row["domain"] == "long" and len(row["text"]) <= meta["context"] * 3.0
        if meta["kind"] == "interleaved":
            assert 2 <= len(meta["documents"]) <= 4 and not seen & set(meta["documents"])
            seen |= set(meta["documents"])
        if meta["kind"] == "mrcr":
            assert row["text"].startswith("[gMASK]<sop><|user|>Write a ") and meta["needles"] == 2


def test_training_and_validation_documents_do_not_meet(tmp_path, sources):
    from tasks.tokens import split_of

    config = CONFIG | {"val_fraction": 0.4, "interleaved": [10, 10], "negatives": [10, 10], "mrcr": 0}
    run_stage_for_test(long_data, config, deps=sources, outs=["data/long_data"], tmp=tmp_path)
    splits = set()
    for row in documents.read_documents(tmp_path / "data/long_data"):
        meta = json.loads(row["meta"])
        splits.add(meta["split"])
        assert {split_of(i, 0.4) for i in meta["documents"]} == {meta["split"]}
    assert splits == {"train", "val"}


def test_a_configuration_that_does_not_fit_is_an_error(tmp_path, sources):
    for wrong, message in (
        ({"interleaved": [1]}, "one count per context"),
        ({"contexts": [1024, 256]}, "must grow"),
        ({"needles": [9]}, "1..8"),
        ({"min_chars": 10**6}, "too few to combine"),
    ):
        with pytest.raises(ValueError, match=message):
            run_stage_for_test(long_data, CONFIG | wrong, deps=sources, outs=["data/long_data"], tmp=tmp_path / "x")
