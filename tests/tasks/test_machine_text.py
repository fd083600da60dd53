"""Machine-made text: the trees against scikit-learn, the features, the shipped detector on texts it never saw, templates."""

import json
import random

import numpy as np
import pytest

from tasks.machine_text import (
    FEATURES,
    MODEL,
    MachineTextConfig,
    MachineTextDetector,
    TemplateCounter,
    Trees,
    text_features,
    words_of,
)
from tests.bench.machine_text_data import mail_merge, plain_wiki, weather_reports

ESSAY = (
    "My grandfather kept bees at the far end of the orchard, where the wall gave shelter from the north. I was seven when he"
    " first let me hold the smoker. He did not wear gloves; the bees knew him, he said, though I later learned that bees live"
    " for six weeks in summer and know nobody. What he had was slowness. He lifted each frame as one lifts a sleeping child.\n\n"
    "The war took the orchard. A road runs there now, and of the wall only the corner remains, with the iron ring where he"
    " tied the mule. When I drive past I open the window, in any weather, and listen. It is foolish, of course: what would I"
    " hear? But once, in May, a swarm hung from the road sign like a brown beard, and the traffic had stopped for it.\n\n"
    "Swarms are mild. They have no house to defend and have eaten their fill before they left. I told the policeman so, and"
    " he looked at me as people look at the old. Then a woman came with a box, a bed sheet and no gloves, and she was slow."
)


def test_features_are_finite_and_named():
    for text in ("", " ", "x", "\ud800", ESSAY, "…" * 5000, "a b " * 4000, "中文。没有空格的文字。" * 50):
        assert len(text_features(text)) == len(FEATURES) and np.isfinite(text_features(text)).all()
    essay, loop = (
        dict(zip(FEATURES, text_features(t), strict=True)) for t in (ESSAY, "Buy it now, buy it here. " * 60)
    )
    assert loop["repeated_5"] > 0.9 > 0.05 > essay["repeated_5"] and loop["compression"] < essay["compression"] / 4
    assert essay["unbalanced"] == 0 < dict(zip(FEATURES, text_features(ESSAY + " (((")))["unbalanced"]
    assert words_of("Ça va? 漢字 x2") == ["ça", "va", "漢", "字", "x", "2"]


def test_trees_equal_scikit_learn():
    ensemble = pytest.importorskip("sklearn.ensemble")
    rng = np.random.default_rng(0)
    x = rng.normal(size=(400, 5))
    model = ensemble.HistGradientBoostingClassifier(max_iter=9, max_leaf_nodes=6, random_state=0)
    model.fit(x, x[:, 0] * x[:, 1] > 0)
    trees = []
    for (tree,) in model._predictors:
        n = tree.nodes
        names = {
            "feature": "feature_idx",
            "threshold": "num_threshold",
            "left": "left",
            "right": "right",
            "value": "value",
        }
        arrays = {k: n[v].astype(float) for k, v in names.items()}
        arrays["feature"][n["is_leaf"].astype(bool)] = -1
        trees.append({k: v.tolist() for k, v in arrays.items()})
    ours = Trees(float(model._baseline_prediction.ravel()[0]), trees)
    np.testing.assert_allclose(ours.raw(x), model.decision_function(x), atol=1e-9)


def test_the_shipped_detector_on_texts_of_this_file():
    detector = MachineTextDetector()
    assert detector.score([]).shape == (0,)
    rng, words = random.Random(3), ESSAY.split()
    shuffled = [" ".join(rng.choice(words) for _ in range(250)) for _ in range(10)]
    latin = "Lorem ipsum dolor sit amet, consectetur adipiscing elit, sed do eiusmod tempor incididunt ut labore. " * 6
    scores = detector.score([ESSAY, latin, *shuffled])
    assert scores[0] < detector.threshold - 0.2 and scores[1] == 1.0 and (scores[2:] > detector.threshold).mean() >= 0.8
    np.testing.assert_array_equal(scores, [detector.score([t])[0] for t in (ESSAY, latin, *shuffled)])


def test_a_model_for_other_features_is_refused(tmp_path):
    model = json.loads(MODEL.read_text())
    (tmp_path / "m.json").write_text(json.dumps(model | {"features": FEATURES[1:]}))
    with pytest.raises(ValueError, match="other features"):
        MachineTextDetector(tmp_path / "m.json")
    assert MODEL.stat().st_size < 300_000


def test_templates_are_seen_across_the_corpus_and_plain_prose_is_not():
    rng = random.Random(0)
    made = [next(g(rng)) for g in (mail_merge, weather_reports) for _ in range(20)]
    prose = [ESSAY] * 3 + [" ".join(rng.sample(ESSAY.split(), 150)) for _ in range(30)]
    one, two = TemplateCounter(), TemplateCounter(bits=18)
    for counter in (one, two):
        counter.add(made + prose)
    assert np.mean([one.share(t, 5) >= 0.8 for t in made]) > 0.9
    assert max(one.share(t, 5) for t in prose) == 0.0, "three copies are not five documents"
    assert all(two.share(t, 5) >= one.share(t, 5) for t in made + prose), "a collision only raises a count"
    assert one.share("too short", 1) == 0.0


def test_wiki_markup_is_taken_out():
    text = plain_wiki(
        "{{Infobox|a={{b}}}}'''Bees''' are [[insect|insects]].<ref name=x>y</ref>\n== Life ==\n[[File:a.png|[[x]] y]]Six weeks."
    )
    assert text == "Bees are insects.\n\nSix weeks."


@pytest.mark.slow
def test_precision_on_held_out_sources_and_generators():
    from tests.bench.judges import EMBEDDER, ROOT, machine_text_figures

    if (
        not EMBEDDER.is_dir()
        or not (ROOT / "data/web/documents").is_dir()
        or not (ROOT / "data/math/documents").is_dir()
    ):
        pytest.skip("needs the acquired corpus, web and math (dvc repro web math)")
    figures = machine_text_figures()
    assert figures["single text: precision"] >= 0.95 and figures["with templates: precision"] >= 0.95
    assert figures["single text: recall"] > 0.3 and figures["non-English pages removed"] < 0.02


def test_what_is_made_is_named_with_its_score_and_short_texts_stay():
    detector, latin = (
        MachineTextDetector(),
        "Lorem ipsum dolor sit amet, consectetur adipiscing elit, sed do eiusmod. " * 6,
    )
    assert detector.made([ESSAY, latin, latin[:200]], MachineTextConfig()) == [None, 1.0, None]
    assert detector.made([ESSAY], MachineTextConfig(threshold=0.0))[0] is not None
