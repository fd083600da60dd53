"""MinHash against datasketch, and the clusters of planted duplicates against all pairs compared."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tasks import minhash, shingles

VOCABULARY = [f"{a}{b}{c}" for a in "bdfgklmnprst" for b in ("a", "e", "io", "ou") for c in ("", "n", "r", "st", "lk")]


def text_of(rng: random.Random, words: int = 300) -> str:
    return " ".join(rng.choice(VOCABULARY) for _ in range(words))


def replace_words(rng: random.Random, text: str, count: int) -> str:
    words = text.split()
    for position in rng.sample(range(len(words)), count):
        words[position] = f"changed{rng.randrange(10**6)}"
    return " ".join(words)


def sets_of(texts: list[str], n: int = 5) -> list[np.ndarray]:
    values, starts = shingles.shingle_sets(texts, n)
    return [values[a:b] for a, b in zip(starts, starts[1:])]


def mutations(seed: int) -> list[str]:
    rng = random.Random(seed)
    texts = [text_of(rng, 120) for _ in range(60)]
    return texts + [replace_words(rng, t, k) for k in (1, 2, 4, 8) for t in texts[:30]] + texts[:5] + ["", "?"]


def test_signatures_equal_datasketch():
    from datasketch import MinHash

    rng = random.Random(0)
    texts = [text_of(rng, n) for n in (1, 4, 5, 60, 300, 2000)] + [""]
    ours = minhash.sketch(texts, 5, 16, 8).signature
    for row, values in zip(ours, sets_of(texts)):
        reference = MinHash(num_perm=128, seed=1, scheme="affine32", hashfunc=lambda v: v & 0xFFFFFFFF)
        reference.update_batch([int(v) for v in values])
        np.testing.assert_array_equal(row, reference.hashvalues)


def candidates(texts: list[str]) -> set[tuple[int, int]]:
    sketch = minhash.sketch(texts, 5, 16, 8)
    filled = np.flatnonzero(sketch.words > 0)
    groups = minhash.candidate_groups(sketch.bands[filled].ravel(), np.repeat(filled, 16))
    parts = [groups.members[a:b].tolist() for a, b in zip(groups.starts, groups.starts[1:])]
    assert all(part == sorted(part) and len(part) > 1 for part in parts)
    return {(i, j) for part in parts for i in part for j in part if i < j}


def their_candidates(texts: list[str], signature: np.ndarray, scheme: str) -> set[tuple[int, int]]:
    from datasketch import MinHash, MinHashLSH

    lsh, out = MinHashLSH(num_perm=128, params=(16, 8)), set()
    for i, values in enumerate(sets_of(texts)):
        if not len(values):
            continue
        if scheme == "affine32":
            m = MinHash(num_perm=128, seed=1, scheme=scheme, hashvalues=signature[i])
        else:
            m = MinHash(num_perm=128, seed=7, hashfunc=lambda v: v & 0xFFFFFFFF)
            m.update_batch([int(v) for v in values])
        out |= {(int(j), i) for j in lsh.query(m)}
        lsh.insert(str(i), m)
    return out


def test_candidates_are_those_of_datasketch():
    texts = mutations(1)
    signature = minhash.sketch(texts, 5, 16, 8).signature
    ours = candidates(texts)
    assert ours == their_candidates(texts, signature, "affine32") and len(ours) > 100


def test_candidates_are_those_of_another_hash_family_up_to_chance():
    """datasketch's other scheme (affine modulo a Mersenne prime): about as many, and all pairs above Jaccard 0.95 in both."""
    texts = mutations(2)
    ours, theirs = candidates(texts), their_candidates(texts, None, "prime")
    assert 0.9 < len(ours) / len(theirs) < 1.1
    sets = sets_of(texts)
    for i, j in ours ^ theirs:
        assert minhash.jaccard(sets[i], sets[j]) < 0.95


def test_the_estimate_of_jaccard_is_unbiased():
    """Mean error over 400 pairs of independent texts' signatures: within four standard errors of zero at every similarity."""
    rng = random.Random(3)
    for changed in (2, 6, 15, 30):
        a = [text_of(rng, 150) for _ in range(400)]
        b = [replace_words(rng, text, changed) for text in a]
        agree = (minhash.sketch(a, 5, 16, 8).signature == minhash.sketch(b, 5, 16, 8).signature).mean(axis=1)
        true = np.array([minhash.jaccard(x, y) for x, y in zip(sets_of(a), sets_of(b))])
        error = agree - true
        assert abs(error.mean()) < 4 * error.std() / 20
        assert error.std() == pytest.approx(np.sqrt((true * (1 - true)).mean() / 128), rel=0.2)


def test_salts_keep_texts_apart():
    text = text_of(random.Random(4))
    sketch = minhash.sketch([text, text, text], 5, 16, 8, salts=[1, 2, 1])
    for column in (sketch.bands, sketch.exact):
        assert (column[0] == column[2]).all() and not (column[0] == column[1]).any()


def test_exact_keys():
    same = ["Caf\u00e9  au\tlait\n", "  cafe\u0301 AU lait"]
    other = ["Cafe au lait", "Café aulait", "Café au lait 2", ""]
    keys = [tuple(key) for key in minhash.sketch([*same, *other], 5, 2, 2).exact.tolist()]
    assert keys[0] == keys[1] and len(set(keys)) == 5


def test_jaccard_is_that_of_python_sets():
    rng = random.Random(5)
    for _ in range(200):
        a, b = ({rng.randrange(60) for _ in range(rng.randrange(0, 40))} for _ in range(2))
        got = minhash.jaccard(*(np.array(sorted(s), dtype=np.uint64) for s in (a, b)))
        assert got == pytest.approx(len(a & b) / len(a | b) if a | b else 0.0)


def naive_components(n: int, pairs: list[tuple[int, int]]) -> list[int]:
    root = list(range(n))
    for _ in range(n):
        for i, j in pairs:
            root[i] = root[j] = min(root[i], root[j])
    return root


def test_components_are_those_of_a_naive_search():
    rng = random.Random(6)
    for _ in range(30):
        n = rng.randrange(1, 60)
        pairs = [(rng.randrange(n), rng.randrange(n)) for _ in range(rng.randrange(n))]
        left, right = (np.array(side, dtype=np.int64) for side in zip(*pairs)) if pairs else (np.empty(0), np.empty(0))
        assert minhash.components(left, right, n).tolist() == naive_components(n, pairs)
    chain = np.arange(200_000)
    assert not minhash.components(chain[1:], chain[:-1], len(chain)).any()  # no recursion, near-linear


def test_clusters_are_those_of_all_candidate_pairs_compared():
    texts = mutations(7)
    sets = sets_of(texts)
    pairs = [p for p in candidates(texts) if minhash.jaccard(sets[p[0]], sets[p[1]]) >= 0.8]
    found = minhash.near_duplicates(texts, 5, 16, 8, 0.8)
    assert found.root.tolist() == naive_components(len(texts), pairs)
    assert found.verified < len(pairs) and found.compared <= len(candidates(texts))
    assert (found.root[-2:] == [len(texts) - 2, len(texts) - 1]).all()  # without words: never near anything


def test_a_huge_group_is_cut_and_its_copies_still_meet():
    rng = random.Random(8)
    text = text_of(rng)
    keys, members = np.full(1000, 5, dtype=np.uint64), np.arange(1000)[::-1].copy()
    groups = minhash.candidate_groups(np.append(keys, 9), np.append(members, 3), limit=100)
    assert groups.split == 1 and np.diff(groups.starts).max() <= 100
    parts = [groups.members[a:b] for a, b in zip(groups.starts, groups.starts[1:])]
    assert all(part[0] == 0 for part in parts) and sorted(set(np.concatenate(parts).tolist())) == list(range(1000))
    values, starts = shingles.shingle_sets([text] * 1000, 5)
    bands = np.full((1000, 1), 5, dtype=np.uint64)
    left, right, _, compared = minhash.verified_pairs(groups, bands, values, starts, 0.8)
    assert compared == 999 and not minhash.components(left, right, 1000).any()
