"""Cutting documents, scoring passages together, and regressions on disk."""

import numpy as np
import pytest

from tasks.passages import load_regression, save_regression, score_passages, split_passages, spread
from tasks.quality import LogisticRegression


def test_nothing_is_lost_and_lengths_are_bounded():
    text = "\n\n".join("Sentence one is here. And two. " * n for n in (1, 3, 40, 2, 1, 90)) + "x" * 5000
    found = split_passages(text, 500)
    assert "".join("".join(found).split()) == "".join(text.split())
    assert max(map(len, found)) <= 750 and split_passages("", 500) == [""] and split_passages("a\n\n\n\n", 9) == ["a"]
    assert all(p.rstrip().endswith(".") for p in found if "x" not in p), "cut behind sentences"


def test_spread_keeps_the_ends():
    assert spread(range(10), 3) == [0, 4, 9] and spread([1, 2], 5) == [1, 2]


def test_scores_do_not_depend_on_the_batch():
    texts = ["aa\n\nb" * n for n in (1, 5, 0, 9)]

    def score(batch):
        return np.array([len(t) for t in batch], float)

    def aggregate(scores, lengths):
        return float(np.average(scores, weights=lengths))

    one, two = (score_passages(texts, 4, 100, score, aggregate, batch=b) for b in (1, 1000))
    np.testing.assert_array_equal(one, two)
    assert len(score_passages([], 4, 9, score, aggregate)) == 0


def test_a_regression_returns_only_to_what_it_was_trained_for(tmp_path):
    x = np.random.default_rng(0).normal(size=(50, 3))
    regression = LogisticRegression.fit(x, x[:, 0] > 0, 0.1)
    save_regression(tmp_path, "r", regression, {"size": 3})
    np.testing.assert_array_equal(load_regression(tmp_path, "r", {"size": 3}).score(x), regression.score(x))
    with pytest.raises(ValueError, match="expects"):
        load_regression(tmp_path, "r", {"size": 4})
