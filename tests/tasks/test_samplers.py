"""Samplers: coverage, purity, packing without cuts, mixture shares and epoch caps."""

from collections import Counter

import numpy as np
import pytest

from tasks.samplers import (
    IGNORE,
    BatchSampler,
    Mixture,
    PackedSource,
    WindowSource,
    best_fit_decreasing,
    capped_weights,
    permute,
    validation_windows,
)
from tasks.tokens import TokenSet, TokenWriter


def corpus(path, domains, eot=999, vocab=1000):
    """domains: name -> list of document lengths (end mark included); token values count up, so a token names its place."""
    with TokenWriter(path, vocab, eot, np.ones(vocab, np.int32)) as writer:
        for domain, lengths in domains.items():
            at = 0
            for length in lengths:
                ids = [(at + i) % eot for i in range(length - 1)]
                at += length
                writer.add("train", domain, ids, length)
                writer.add("val", domain, ids, length)
    return TokenSet(path)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 1000])
def test_permute_is_a_permutation_and_depends_on_the_key(size):
    images = [permute(i, size, 12345) for i in range(size)]
    assert sorted(images) == list(range(size))
    if size >= 64:
        assert images != [permute(i, size, 54321) for i in range(size)]
        assert np.corrcoef(images, range(size))[0, 1] < 0.5


def test_windows_cover_every_token_once_per_epoch(tmp_path):
    shard = corpus(tmp_path, {"web": [40] * 16}).shard("web")
    source = WindowSource(shard, 32, seed=1)
    assert source.rows_per_epoch == 20
    for epoch in range(2):
        targets = np.concatenate([source.row(epoch * 20 + i)[1] for i in range(20)])
        assert Counter(targets.tolist()) == Counter(shard.tokens.tolist())
    ids, targets = source.row(3)
    assert ids[1:].tolist() == targets[:-1].tolist()
    starts = [{int(source.row(e * 20 + i)[0][0]) for i in range(20)} for e in range(2)]
    assert starts[0] != starts[1], "the second epoch must cut documents at other places"


def test_best_fit_decreasing():
    bins = best_fit_decreasing([5, 7, 3, 2, 8, 1, 4], 10)
    assert sorted(i for b in bins for i in b) == list(range(7))
    lengths = [[5, 7, 3, 2, 8, 1, 4][i] for b in bins for i in b]
    assert len(bins) == 3 and sum(lengths) == 30  # a perfect packing exists and best fit finds it
    with pytest.raises(ValueError, match="11 does not fit"):
        best_fit_decreasing([11], 10)
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 100, 2000).tolist()
    bins = best_fit_decreasing(lengths, 100)
    assert all(sum(lengths[i] for i in b) <= 100 for b in bins)
    assert len(bins) <= 1.03 * sum(lengths) / 100


def test_packing_cuts_only_what_is_too_long(tmp_path):
    lengths = [20, 33, 10, 70, 5, 31, 1]
    shard = corpus(tmp_path, {"web": lengths}).shard("web")
    source = PackedSource(shard, 32, seed=0)
    whole = {(int(shard.offsets[i]), lengths[i]) for i in (0, 1, 2, 4, 5)}
    assert whole <= set(source.pieces)
    assert {p for p in source.pieces if p not in whole} == {(63, 33), (95, 33), (127, 6)}
    seen = Counter()
    for n in range(source.rows_per_epoch):
        ids, targets = source.row(n)
        assert len(ids) == len(targets) == 32
        for i in np.flatnonzero(targets != IGNORE):
            seen[int(targets[i])] += 1
            if i + 1 < 32:
                assert ids[i + 1] == targets[i]
    expected = Counter()
    for i, n in enumerate(lengths):
        expected.update(shard.document(i)[1:].tolist() if n > 1 else [])
    assert seen == expected, "every token but a document's first is a target exactly once"
    assert 0.5 < source.fill() <= 1


def test_mixture_gives_exact_shares_and_counts_within_domains():
    mixture = Mixture({"web": 0.5, "code": 0.3, "math": 0.2}, seed=3)
    rows = [mixture.row(r) for r in range(2048)]
    counts = Counter(d for d, _ in rows)
    assert counts == {"web": 1024, "code": 614, "math": 410}
    for domain in counts:
        assert [n for d, n in rows if d == domain] == list(range(counts[domain]))
    assert mixture.row(1500) == rows[1500] == Mixture({"web": 5, "code": 3, "math": 2}, seed=3).row(1500)


def test_epoch_caps_hand_the_rest_to_the_others():
    weights = capped_weights({"a": 0.5, "b": 0.25, "c": 0.25}, {"a": 10, "b": 1000, "c": 30}, 200, max_epochs=2)
    assert weights == pytest.approx({"a": 0.1, "c": 0.3, "b": 0.6})
    with pytest.raises(ValueError, match="the run wants 5000 rows"):
        capped_weights({"a": 1.0}, {"a": 10}, 5000, max_epochs=2)
    rows = {"a": 10, "b": 1000, "c": 30}
    by_domain = capped_weights({"a": 0.5, "b": 0.25, "c": 0.25}, rows, 200, {"a": 6, "c": 1})
    assert by_domain == pytest.approx({"a": 0.3, "c": 0.15, "b": 0.55}), "a is passed six times, b has no cap"
    with pytest.raises(ValueError, match="the run wants 200 rows, but {'a': 2, 'c': 1} epochs over .* give only 50"):
        capped_weights({"a": 0.5, "c": 0.5}, rows, 200, {"a": 2, "c": 1})
    with pytest.raises(ValueError, match="max_epochs names 'd', which has no weight; weighted are a"):
        capped_weights({"a": 1.0}, rows, 5, {"d": 1.0})


@pytest.mark.parametrize("packing", ["window", "best_fit"])
def test_batches_are_a_pure_function_of_their_place(tmp_path, packing):
    tokens = corpus(tmp_path, {"web": [50] * 40, "code": [80, 20] * 20})
    make = lambda seed: BatchSampler(tokens, 64, 100, seed, {"web": 0.7, "code": 0.3}, 8.0, packing)  # noqa: E731
    first, second = make(1), make(1)
    for start in (40, 8, 40, 0):  # any order, any number of times
        a, b = first.batch(start, 8), second.batch(start, 8)
        assert all(np.array_equal(a[k], b[k]) for k in a) and a["input_ids_bs"].shape == (8, 64)
    assert not np.array_equal(make(2).batch(0, 8)["input_ids_bs"], first.batch(0, 8)["input_ids_bs"])
    whole = first.batch(16, 8)["input_ids_bs"]
    parts = [first.batch(16, 8, rank, 2)["input_ids_bs"] for rank in range(2)]
    assert np.array_equal(whole[0::2], parts[0]) and np.array_equal(whole[1::2], parts[1])


def test_sampler_errors_name_the_domain(tmp_path):
    tokens = corpus(tmp_path, {"web": [50] * 4})
    with pytest.raises(ValueError, match="no domain 'maths'; it has web"):
        BatchSampler(tokens, 16, 4, 0, {"maths": 1.0})


def test_validation_windows(tmp_path):
    shard = corpus(tmp_path / "a", {"web": [100] * 5}).shard("web", "val")
    ids, targets = validation_windows(shard, 32, 8)
    assert ids.shape == (8, 32) and np.array_equal(ids[:, 1:], targets[:, :-1])
    assert validation_windows(shard, 32, 1000)[0].shape == (15, 32)
    short = corpus(tmp_path / "b", {"web": [10]}).shard("web", "val")
    ids, targets = validation_windows(short, 32, 8)
    assert ids.shape == (1, 32) and (targets != IGNORE).sum() == 9


def test_a_domain_below_one_row_of_a_period_is_not_lost():
    weights = {"big": 0.7, "other": 0.2999, "rare": 6e-5, "rarer": 4e-5}
    mixture = Mixture(weights, seed=3)
    rows = [mixture.row(r) for r in range(1024 * 60)]
    counts = Counter(domain for domain, _ in rows)
    assert counts["rare"] == pytest.approx(6e-5 * len(rows), abs=1) and counts["rarer"] in (2, 3)
    assert counts["other"] == 60 * round(1024 * 0.2999) and sum(counts.values()) == len(rows)
    for domain in weights:
        assert sorted(n for d, n in rows if d == domain) == list(range(counts[domain])), "numbers have no gap or double"
    assert Mixture(weights, seed=3).row(50_000) == rows[50_000], "a pure function of the row"
    with pytest.raises(ValueError, match="3000 domains with shares as small"):
        Mixture({str(i): 1.0 for i in range(3000)}, seed=0)
