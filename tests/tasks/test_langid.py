"""Language identification: a real model on gold sentences, and the edges."""

from pathlib import Path

import pytest

from tasks.langid import LanguageIdentifier
from tests.tasks.corpus_fixtures import ENGLISH, FRENCH, train_language_model

ROOT = Path(__file__).resolve().parents[2]
GOLD = ROOT.parent / "shared/gold/lingua-lid"
MODEL = ROOT / "data/acquire/models/lid.176.ftz"
LARGE = "en fr de es it pt nl ru pl zh ja ar tr sv cs ko".split()


def test_small_model_tells_its_languages_apart_and_empty_text_has_none(tmp_path):
    train_language_model(tmp_path)
    identifier = LanguageIdentifier(tmp_path / "model.ftz")
    assert identifier.identify(ENGLISH.replace(" ", "\n"))[0] == "en"
    assert identifier.identify(FRENCH)[0] == "fr"
    assert identifier.identify("") == identifier.identify(" 12 \n --") == ("", 0.0)


def test_a_file_that_is_no_model_is_named(tmp_path):
    (tmp_path / "x.ftz").write_bytes(b"not a model")
    with pytest.raises(ValueError, match="x.ftz: not a fastText"):
        LanguageIdentifier(tmp_path / "x.ftz")


@pytest.mark.skipif(not GOLD.is_dir(), reason="../shared/gold/lingua-lid is absent")
@pytest.mark.skipif(not MODEL.is_file(), reason="needs the acquired corpus (dvc repro acquire)")
def test_accuracy_on_the_lingua_sentences_of_sixteen_large_languages():
    identifier = LanguageIdentifier(MODEL)
    shares = []
    for lang in LARGE:
        lines = next(GOLD.rglob(f"{lang}.txt")).read_text(encoding="utf-8").splitlines()[::3]
        shares.append(sum(identifier.identify(line)[0] == lang for line in lines) / len(lines))
    assert sum(shares) / len(shares) > 0.97 and min(shares) > 0.9
