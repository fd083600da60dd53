"""SemDedup: against brute force, its keep rule, and template pages against pages of one subject."""

import random

import numpy as np
import pytest

from tasks.semdedup import clusters, group_sizes, kmeans, overlap, same_template, semdedup, size_report, wording


def unit(x):
    return (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)


def groups(rng, count, size, d=32, noise=0.02):
    centres = unit(rng.normal(size=(count, d)))
    return unit(np.repeat(centres, size, axis=0) + noise * rng.normal(size=(count * size, d)))


def keys_of(n, rng):
    return [(float(q), int(length), f"{i:04d}") for i, (q, length) in enumerate(rng.integers(0, 4, size=(n, 2)))]


def brute_force(x, keys, threshold):
    kept, removed = [], {}
    for i in sorted(range(len(x)), key=lambda i: (-keys[i][0], -keys[i][1], keys[i][2])):
        near = [
            (round(float(x[i] @ x[j]), 5), -kept.index(j), j) for j in kept if round(float(x[i] @ x[j]), 5) >= threshold
        ]
        if near:
            removed[i] = max(near)[2]
        else:
            kept.append(i)
    return sorted(kept), removed


def test_one_cluster_equals_brute_force():
    rng = np.random.default_rng(0)
    x = groups(rng, 40, 5, noise=0.1)
    keys = keys_of(len(x), rng)
    found = semdedup(x, keys, 0.8, 0, cluster_size=1000)
    kept, removed = brute_force(x, keys, 0.8)
    assert found.kept == kept and {i: k for i, (k, _) in found.removed.items()} == removed and len(removed) > 20
    assert found.sizes == [200]


def test_clusters_lose_hardly_a_planted_duplicate_and_are_bounded():
    rng = np.random.default_rng(1)
    x = groups(rng, 300, 4)
    keys = keys_of(len(x), rng)
    found = semdedup(x, keys, 0.9, 0, cluster_size=60, max_cluster=120)
    assert sum(found.sizes) == 1200 and max(found.sizes) <= 120
    assert 300 <= len(found.kept) <= 306, "a border between clusters may cut through a group, rarely"
    for i, (keeper, cosine) in found.removed.items():
        assert i // 4 == keeper // 4 and cosine >= 0.9 and keeper in found.kept
        assert (-keys[keeper][0], -keys[keeper][1], keys[keeper][2]) < (-keys[i][0], -keys[i][1], keys[i][2])
    assert group_sizes(found.removed)["4"] >= 290 and size_report(found.sizes)["largest"] == max(found.sizes)


def test_the_same_whatever_the_order_of_the_rest_and_twice():
    rng = np.random.default_rng(2)
    x = groups(rng, 100, 3)
    keys = keys_of(len(x), rng)
    one, two = (semdedup(x, keys, 0.9, 5, cluster_size=40) for _ in range(2))
    assert one == two and semdedup(x, keys, 0.9, 6, cluster_size=40).kept == one.kept


def test_rows_that_cannot_be_told_apart_are_not_split_for_ever():
    x = np.ones((300, 8), np.float32)
    assert sum(map(len, clusters(unit(x), 10, 20, 0))) == 300
    found = semdedup(x, [(0.0, 1, f"{i:03d}") for i in range(300)], 0.99, 0, cluster_size=10, max_cluster=20)
    assert found.kept[0] == 0 and len(found.removed) >= 285


def test_kmeans_finds_separate_groups():
    x = groups(np.random.default_rng(3), 4, 50)
    found = kmeans(x, 12, 0)
    assert all(
        len(set(found[a * 50 : a * 50 + 50]) & set(found[b * 50 : b * 50 + 50])) == 0
        for a in range(4)
        for b in range(a)
    )
    # a row half way between two centres of its group may fall on either side: other products' kernels, other last bits
    assert (found == kmeans(x, 12, 0, batch=7)).mean() > 0.97
    assert (found == kmeans(x, 12, 1)).mean() < 0.9, "another start numbers the clusters otherwise"


def test_zero_rows_stay_and_bad_input_is_refused():
    x = np.zeros((3, 4), np.float32)
    assert semdedup(x, [(0.0, 0, "a")] * 3, 0.5, 0).kept == [0, 1, 2]
    assert semdedup(np.zeros((0, 4), np.float32), [], 0.5, 0).kept == []
    with pytest.raises(ValueError, match="expected"):
        semdedup(x, [(0.0, 0, "a")], 0.5, 0)
    x[1, 2] = np.nan
    with pytest.raises(ValueError, match="document 1"):
        semdedup(x, [(0.0, 0, "a")] * 3, 0.5, 0)


def test_template_pages_are_told_from_pages_of_one_subject():
    """Every embedding is the same here, so that the wording alone decides."""
    rng = random.Random(0)
    towns = [f"{a}{b}" for a in ("Nor", "Sud", "Ash", "Oak", "Lin", "Mar") for b in ("ton", "ford", "by", "ham")]

    def template(town):
        return (
            f"Looking for a plumber in {town}? Our team in {town} repairs pipes, boilers and taps at fair prices. Call us on"
            f" 0{rng.randrange(10**9)} today and get a free quote. Customers in {town} gave us {rng.randrange(100, 999)} good"
            f" reviews. We come to your house in {town} within {rng.randrange(10, 99)} minutes, day and night."
        )

    free = [
        "A boiler that drips at its relief valve usually has too much pressure; let water out until the gauge reads one bar.",
        "Plumbers in Roman cities laid pipes of lead, stamped with the name of the owner and of the maker.",
        "My tap leaked for a year before I learned that a washer costs a few pence and takes ten minutes to change.",
        "The council licences plumbers and publishes their prices; a free quote must be honoured for thirty days.",
    ]
    texts = [template(town) for town in towns] + free
    found = semdedup(
        np.ones((len(texts), 8)),
        [(0.0, len(t), str(i)) for i, t in enumerate(texts)],
        0.9,
        0,
        same=same_template(texts, 0.4),
    )
    assert set(found.removed) == set(range(len(towns))) - set(found.kept) and len(found.removed) == len(towns) - 1
    assert found.refused >= len(free)


def test_wording():
    assert len(wording("")) == 0 and overlap(wording(""), wording("a b c")) == 0
    assert overlap(wording("in 1999 we came"), wording("In 2005, we came.")) == 1
    assert overlap(wording("a b c d"), wording("x a b c")) == 0.5
