"""World knowledge: PU learning with hidden positives, labels, and other languages and packages held out."""

from pathlib import Path

import numpy as np
import pytest

from tasks.knowledge import KnowledgeClassifier, KnowledgeConfig, top_half
from tasks.quality import StaticEmbedder, roc_auc

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "data/acquire/models/potion-base-8M"


class BagEmbedder:
    """Words of two vocabularies as two-dimensional vectors with noise; a text without them is the zero vector."""

    dimension = 3

    def embed(self, texts):
        out = np.zeros((len(texts), 3), np.float32)
        for row, text in enumerate(texts):
            words = text.split()
            know, sell = (sum(w.startswith(p) for w in words) for p in ("fact", "sale"))
            if know + sell:
                out[row] = [know, sell, len(words) % 7]
                out[row] /= np.linalg.norm(out[row])
        return out


def page(rng, share, words=60):
    return " ".join(f"{'fact' if rng.random() < share else 'sale'}{rng.integers(99)}" for _ in range(words))


def data(seed=0):
    rng = np.random.default_rng(seed)
    entries = [page(rng, 0.9) for _ in range(200)]
    hidden = [page(rng, 0.9) for _ in range(40)]
    plain = [page(rng, 0.2) for _ in range(200)]
    return entries, hidden, plain


def test_knowledge_hidden_among_the_pages_is_not_taken_for_its_absence():
    entries, hidden, plain = data()
    classifier = KnowledgeClassifier(BagEmbedder(), KnowledgeConfig())
    counts = classifier.fit(entries, hidden + plain)
    assert 190 <= counts["reliable_negatives"] <= 215, "the 40 hidden ones are left out but for the spies' quantile"
    fresh_entries, fresh_hidden, fresh_plain = data(1)
    assert (classifier.score(fresh_hidden) > 0.9).mean() > 0.9 and (classifier.score(fresh_plain) < 0.1).mean() > 0.95


def test_labels_of_a_language_model_overrule_the_spies():
    entries, hidden, plain = data()
    rng = np.random.default_rng(9)
    odd = [page(rng, 0.5) for _ in range(60)]
    pages = plain + odd
    scores = {}
    for label in (0, 5):
        classifier = KnowledgeClassifier(BagEmbedder(), KnowledgeConfig())
        counts = classifier.fit(entries, pages, {len(plain) + i: label for i in range(60)})
        assert counts["labelled"] == 60 and counts["labelled_knowledge"] == (60 if label else 0)
        scores[label] = classifier.score(odd).mean()
    assert scores[5] > scores[0] + 0.3


def test_a_text_without_a_known_word_holds_no_knowledge_and_furniture_does_not_count():
    entries, hidden, plain = data()
    classifier = KnowledgeClassifier(BagEmbedder(), KnowledgeConfig())
    classifier.fit(entries, plain)
    assert classifier.score(["", "zzz " * 50]).tolist() == [0, 0]
    assert classifier.score([entries[0] + "\n\n" + plain[0]])[0] == classifier.score([entries[0]])[0]
    assert top_half(np.array([0.2, 1.0, 0.8]), np.array([1.0, 1.0, 3.0])) == pytest.approx(0.85)


def test_saved_and_loaded_is_the_same(tmp_path):
    entries, hidden, plain = data()
    classifier = KnowledgeClassifier(BagEmbedder(), KnowledgeConfig())
    classifier.fit(entries, plain)
    classifier.save(tmp_path)
    again = KnowledgeClassifier.load(tmp_path, BagEmbedder(), KnowledgeConfig())
    np.testing.assert_array_equal(again.score(plain), classifier.score(plain))
    with pytest.raises(ValueError, match="expects"):
        KnowledgeClassifier.load(tmp_path, BagEmbedder(), KnowledgeConfig(chars=700))


def test_too_little_to_learn_from():
    with pytest.raises(ValueError, match="10 of each"):
        KnowledgeClassifier(BagEmbedder(), KnowledgeConfig()).fit(["fact " * 40] * 30, ["sale " * 40] * 3)


@pytest.mark.slow
def test_entries_of_another_package_and_language_against_pages():
    """English and French entries teach; Spanish ones, and pages that were not learned from, are scored."""
    if not MODEL.is_dir() or not (ROOT / "data/web/documents").is_dir():
        pytest.skip("needs the acquired corpus and the web stage (dvc repro web)")
    from tests.bench.judges import knowledge_figures

    figures = knowledge_figures(StaticEmbedder(MODEL))
    assert figures["held-out English entries / English pages"] > 0.99
    assert figures["Spanish entries / non-English pages"] > 0.85
    assert roc_auc(np.array([1.0, 0.0]), np.array([True, False])) == 1.0
