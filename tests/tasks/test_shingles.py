"""Words and shingles against a plain Python reading of the same rules."""

from __future__ import annotations

import random
import unicodedata

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks import documents, shingles
from tasks.params import ROOT


def reference_words(text: str) -> list[str]:
    """The rules of the module's docstring, character by character."""
    text = unicodedata.normalize("NFC", text)
    out, run = [], []

    def close():
        out.extend(run if len(run) > shingles.MAX_WORD else ["".join(run)] if run else [])
        run.clear()

    for char in text:
        category = unicodedata.category(char)
        plain = unicodedata.normalize("NFKC", char).lower()
        if category == "Nd":
            plain = str(unicodedata.decimal(char))
        elif len(plain) != 1:
            plain = char.lower()[0]
        alone = any(a <= ord(char) <= b for a, b in shingles._ALONE) or 0x20000 <= ord(char) <= shingles._LAST_HAN
        number = plain in "0123456789"
        if number or (not alone and (category[0] in "LNM" or char == "_")):
            run.append(plain)
        elif alone and (category[0] in "LNM" or ord(char) >= 0x20000):
            close()
            out.append(plain)
        elif category == "Cf" and not alone:
            pass
        else:
            close()
    close()
    return out


def reference_set(text: str, n: int) -> set[tuple[str, ...]]:
    words = reference_words(text)
    n = min(n, len(words))
    return {tuple(words[i : i + n]) for i in range(len(words) - n + 1)} if n else set()


ALPHABET = st.sampled_from(
    "abcXYZ _09-,.\n\u00ad\u200d\u00e9e\u0301\u0130\u00df\u0666\uff11\uff21\u4e2d\u6587\u3042\u0e44\u0e15"
    "\u0915\u093f\U00020000\U0001f600\u0f00"
)


@settings(max_examples=300, deadline=None)
@given(st.text(ALPHABET, max_size=120), st.integers(1, 6))
def test_shingles_are_those_of_the_reference(text, n):
    values, bounds = shingles.shingle_sets([text], n)
    assert len(shingles.words(text)) == len(reference_words(text))
    assert bounds.tolist() == [0, len(reference_set(text, n))]
    assert (np.diff(values.astype(object)) > 0).all()


@settings(max_examples=100, deadline=None)
@given(st.lists(st.text(ALPHABET, max_size=60), min_size=2, max_size=6), st.integers(1, 4))
def test_texts_share_the_shingles_that_the_reference_says(texts, n):
    values, bounds = shingles.shingle_sets(texts, n)
    ours = [set(values[a:b].tolist()) for a, b in zip(bounds, bounds[1:])]
    theirs = [reference_set(text, n) for text in texts]
    for i in range(len(texts)):
        for j in range(i):
            assert len(ours[i] & ours[j]) == len(theirs[i] & theirs[j])


@pytest.mark.parametrize(
    "text,expected",
    [
        ("Déjà-vu x_1!", ["déjà", "vu", "x_1"]),
        ("自然言語 NLP処理", ["自", "然", "言", "語", "nlp", "処", "理"]),
        ("soft\u00adhyphen", ["soft\u00adhyphen"]),
        ("हिन्दी में", ["हिन्दी", "में"]),
        ("", []),
        ("?!… —", []),
    ],
)
def test_what_a_word_is(text, expected):
    assert shingles.words(text) == expected


def test_forms_that_count_as_equal():
    for a, b in [("Straße １２３", "straße 123"), ("cafe\u0301", "CAFÉ"), ("٤٥", "45"), ("co\u00adop", "coop")]:
        np.testing.assert_array_equal(shingles.word_hashes(a), shingles.word_hashes(b))
    for a, b in [("ab c", "a bc"), ("a b", "b a"), ("x", "y"), ("resume", "résumé")]:
        assert shingles.word_hashes(a).tolist() != shingles.word_hashes(b).tolist()


def test_text_without_spaces_has_character_ngrams():
    """A shift or a change inside a long unbroken run costs a few n-grams, not all of them."""
    rng = random.Random(0)
    run = "".join(rng.choice("acgt") for _ in range(400))
    for changed in ("t" + run, run[:200] + "x" + run[201:]):
        (values, bounds) = shingles.shingle_sets([run, changed], 12)
        a, b = (set(values[i:j].tolist()) for i, j in zip(bounds, bounds[1:]))
        assert len(a & b) / len(a | b) > 0.9


def test_short_and_empty_texts():
    _, bounds = shingles.shingle_sets(["", " . ", "one", "one two", "one two three four five", "a b c d e f"], 5)
    assert np.diff(bounds).tolist() == [0, 0, 1, 1, 1, 2]
    values, bounds = shingles.shingle_sets(["one two", "One, TWO."], 5)
    assert values[0] == values[1]


def test_bad_n_is_an_error():
    with pytest.raises(ValueError, match="1 to 64 words, got 65"):
        shingles.shingle_sets(["a"], 65)


@pytest.mark.skipif(not (ROOT / "data/acquire").is_dir(), reason="data/acquire is not there: run `dvc repro acquire`")
def test_on_real_documents_hashes_do_not_collide():
    source = next((ROOT / d for d in ("data/web", "data/math") if (ROOT / d / "documents").is_dir()), None)
    if source is None:
        pytest.skip("no stage has written documents yet")
    texts = [row["text"][:3000] for row, _ in zip(documents.read_documents(source), range(300))]
    _, bounds = shingles.shingle_sets(texts, 5)
    assert np.diff(bounds).tolist() == [len(reference_set(text, 5)) for text in texts]
