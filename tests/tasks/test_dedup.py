"""MinHash against datasketch, planted duplicates, and the dedup stage."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
import xxhash

from tasks import dedup, documents, minhash
from tasks.stage import run_stage_for_test

VOCABULARY = [f"{a}{b}{c}" for a in "bdfgklmnprst" for b in ("a", "e", "io", "ou") for c in ("", "n", "r", "st", "lk")]


def text_of(rng: random.Random, words: int = 300) -> str:
    return " ".join(rng.choice(VOCABULARY) for _ in range(words))


def replace_words(rng: random.Random, text: str, count: int) -> str:
    words = text.split()
    for position in rng.sample(range(len(words)), count):
        words[position] = "changed"
    return " ".join(words)


def test_signatures_equal_datasketch():
    from datasketch import MinHash

    rng = random.Random(0)
    hasher = minhash.WordHasher()
    sets = [minhash.shingles(text_of(rng, n), 5, hasher) for n in (1, 4, 5, 60, 300, 2000)]
    ours = minhash.signatures(sets, 128, seed=1, block=100)
    for row, values in zip(ours, sets):
        reference = MinHash(num_perm=128, seed=1, scheme="affine32", hashfunc=lambda v: v & 0xFFFFFFFF)
        reference.update_batch([int(v) for v in values])
        np.testing.assert_array_equal(row, reference.hashvalues)


def test_buckets_are_the_candidates_of_datasketch():
    from datasketch import MinHash, MinHashLSH

    rng = random.Random(1)
    hasher = minhash.WordHasher()
    texts = [text_of(rng, 120) for _ in range(40)]
    texts += [replace_words(rng, t, k) for k in (1, 2, 4, 8) for t in texts[:20]]
    signature = minhash.signatures([minhash.shingles(t, 5, hasher) for t in texts], 128, seed=1)
    ours = {(i, j) for group in minhash.buckets(signature, 16, 8) for i in group for j in group if i < j}
    lsh = MinHashLSH(num_perm=128, params=(16, 8))
    theirs = set()
    for i, row in enumerate(signature):
        m = MinHash(num_perm=128, seed=1, scheme="affine32", hashvalues=row)
        theirs |= {(int(j), i) for j in lsh.query(m)}
        lsh.insert(str(i), m)
    assert ours == theirs and ours


def test_word_ngrams_hash_the_same_anywhere_and_differ_by_order():
    hasher = minhash.WordHasher()
    grams = lambda text: set(minhash.ngram_hashes(hasher.array(minhash.words(text)), 3).tolist())  # noqa: E731
    assert grams("One, two -- three!") <= grams("zero one two three four")
    assert not grams("one two three") & grams("three two one")
    assert len(grams("one two")) == 0
    assert minhash.words("déjà-vu x_1 自然言語") == ["déjà", "vu", "x_1", "自", "然", "言", "語"]


def test_jaccard_is_that_of_python_sets():
    rng = random.Random(2)
    for _ in range(50):
        a, b = ({rng.randrange(60) for _ in range(rng.randrange(1, 40))} for _ in range(2))
        got = minhash.jaccard(*(np.array(sorted(s), dtype=np.uint64) for s in (a, b)))
        assert got == pytest.approx(len(a & b) / len(a | b))


def test_clusters_do_not_depend_on_input_order():
    rng = random.Random(3)
    texts = [text_of(rng, 150) for _ in range(30)]
    texts += [replace_words(rng, t, 2) for t in texts[:15]] + texts[:5]
    config = dedup.Config()

    def partition(order):
        root = dedup.find_duplicates([texts[i] for i in order], config).root
        clusters: dict[int, set] = {}
        for position, r in enumerate(root):
            clusters.setdefault(r, set()).add(order[position])
        return {frozenset(c) for c in clusters.values()}

    order = list(range(len(texts)))
    rng.shuffle(order)
    assert partition(order) == partition(list(range(len(texts))))


def build(tmp_path, texts: dict[str, list[tuple[str, float]]]):
    deps = {}
    for name, items in texts.items():
        rows = [documents.document(t, f"{name}/{i}", name, quality=q) for i, (t, q) in enumerate(items)]
        documents.write_documents(tmp_path / "real" / name, rows)
        deps[f"data/{name}"] = tmp_path / "real" / name
    run_stage_for_test(dedup, {}, deps=deps, outs=["data/dedup"], tmp=tmp_path)
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


def test_word_hash_is_xxhash():
    assert minhash.WordHasher()["abc"] == xxhash.xxh64_intdigest(b"abc")
