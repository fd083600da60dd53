"""Language identification: gold sentences, short and odd inputs, mixed documents, the table of misses."""

import json
import zipfile
from pathlib import Path

import pytest

from tasks import langid, langid_fit, langid_rules
from tasks.langid import LanguageIdentifier
from tests.tasks.corpus_fixtures import ENGLISH, FRENCH, train_language_model

ROOT = Path(__file__).resolve().parents[2]
GOLD = ROOT.parent / "shared/gold/lingua-lid/sentences"
MODEL = ROOT / "data/acquire/models/lid.176.ftz"
LARGEST = "en zh es fr de ru ja pt it ar nl pl tr ko vi id".split()
needs_model = pytest.mark.skipif(not MODEL.is_file(), reason="needs the acquired corpus (dvc repro acquire)")

GERMAN = "Der Zug nach Hamburg fährt heute wegen einer Störung an der Strecke eine halbe Stunde später ab."
GREEK = "Το τρένο για την Αθήνα θα αναχωρήσει σήμερα με μισή ώρα καθυστέρηση λόγω βλάβης."


@pytest.fixture(scope="module")
def identifier():
    return LanguageIdentifier(MODEL)


def test_small_model_tells_its_languages_apart_and_empty_text_has_none(tmp_path):
    train_language_model(tmp_path)
    small = LanguageIdentifier(tmp_path / "model.ftz")
    assert small.identify(ENGLISH.replace(" ", "\n"))[0] == "en"
    assert small.identify(FRENCH)[0] == "fr"
    assert small.identify("") == small.identify(" 12 \n --") == ("", 0.0)


def test_a_file_that_is_no_model_is_named(tmp_path):
    (tmp_path / "x.ftz").write_bytes(b"not a model")
    with pytest.raises(ValueError, match="x.ftz: not a fastText"):
        LanguageIdentifier(tmp_path / "x.ftz")


@needs_model
@pytest.mark.skipif(not GOLD.is_dir(), reason="../shared/gold/lingua-lid is absent")
def test_macro_accuracy_on_the_lingua_sentences(identifier):
    accuracy = {}
    for path in sorted(GOLD.glob("*.txt")):
        kin = langid_rules.group(langid_rules.normalize(path.stem))
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()][::4]
        accuracy[path.stem] = sum(langid_rules.group(identifier.identify(s)[0]) == kin for s in lines) / len(lines)
    assert len(accuracy) == 75
    assert sum(accuracy.values()) / 75 >= 0.980
    assert sum(accuracy[language] for language in LARGEST) / 16 >= 0.993
    assert min(accuracy.values()) > 0.75


@needs_model
@pytest.mark.parametrize(
    "text",
    [
        "", "   ", "1,234.50 + 77%", "😀 🎉 ❤️", "-> 12 <-", "Admin", "OK", "en la", "GmbH Co 2024", "\ufffd\ufffd\ufffd \ufffd",
        "for (i = 0; i < n; i++) { a[i] = b[i] + c[i]; }", "<div class='x'><a href='/y'>z</a></div>",
        "Ã©tÃ© Ã  la mÃªme Ã©poque dÃ©jÃ  dÃ©cidÃ©", "\ud800\udfff", "\x00\x01\x02\x7f",
    ],
)  # fmt: skip
def test_nothing_is_guessed_from_what_is_no_sentence(identifier, text):
    assert identifier.identify(text) == ("", 0.0)


@needs_model
def test_refused_characters_cost_the_sentence_nothing(identifier):
    with pytest.raises(Exception, match="invalid UTF-8"):
        langid.pycld2.detect((GERMAN + "\x00\x07").encode())  # why they are taken out
    for odd in ("\x00", "\x07", "\ud800", "\uffff", "\ufdd0", "\U0010ffff", "\x80"):
        assert identifier.identify(f"{odd}{GERMAN[:40]}{odd}{GERMAN[40:]}")[0] == "de", repr(odd)


@needs_model
@pytest.mark.parametrize(
    "text, language",
    [
        (GERMAN, "de"), (GREEK, "el"), ("Guten Morgen zusammen, wie geht es euch?", "de"),
        ("Es una república parlamentaria con un presidente electo que ejerce de jefe de Estado.", "es"),  # cld2: English
        ("Во Скопје денес ќе биде сончево и топло.", "mk"), ("У Београду ће данас бити сунчано и топло.", "sr"),
        ("Dnes je ve městě hezky a děti si hrají u řeky.", "cs"), ("Dnes je v meste pekne a deti sa hrajú pri rieke.", "sk"),
        ("東京は日本の首都です。", "ja"), ("北京是中国的首都，人口很多。", "zh"),
    ],
)  # fmt: skip
def test_sentences_that_one_of_the_identifiers_misplaces(identifier, text, language):
    found, score = identifier.identify(text)
    assert (found, score > 0.4) == (language, True)
    assert identifier.identify_batch([text, ""]) == [(found, score), ("", 0.0)]


@needs_model
def test_paragraphs_of_a_mixed_page(identifier):
    text = f"{GERMAN} {GERMAN}\n\n{GREEK}\n\n12.5\n \n{GERMAN}\n"
    found = identifier.identify_paragraphs(text)
    assert [p.language for p in found.paragraphs] == ["de", "el", "", "de"]
    assert found.language == "de" and text[found.paragraphs[1].start : found.paragraphs[1].end] == GREEK
    assert found.share == pytest.approx(3 * 77 / (3 * 77 + 66), abs=0.03)
    assert found.mixed == pytest.approx(1 - found.share) and list(found.shares) == ["de", "el"]
    empty = identifier.identify_paragraphs("12\n\n--\n")
    assert (empty.language, empty.share, empty.mixed, empty.shares) == ("", 0.0, 0.0, {})


def test_the_table_covers_the_languages_and_is_what_the_command_writes():
    tables = json.loads(langid.TABLES.read_text())
    assert set(tables) == {"cld2", "lid176", "trusted"} and set(tables["cld2"]) == set(tables["lid176"])
    assert all(0 < value <= 1 for name in ("cld2", "lid176") for value in tables[name].values())
    assert tables["lid176"]["zu"] > 0.9 and tables["cld2"]["zu"] < 0.1  # lid.176 has no Zulu
    assert {"el", "ja"} <= set(tables["trusted"]) and not {"en", "es", "da"} & set(tables["trusted"])


def test_catalogue_reader_drops_placeholders_headers_and_fuzzy_messages(tmp_path):
    catalogue = (
        'msgid ""\nmsgstr ""\n"Content-Type: text/plain; charset=UTF-8\\n"\n\n'
        'msgid "a"\nmsgstr ""\n"Bitte wählen Sie %(name)s aus "\n"der Liste aus.\\n"\n\n'
        '#, fuzzy\nmsgid "b"\nmsgstr "Diese Meldung ist nur halb übersetzt worden."\n'
    )
    with zipfile.ZipFile(tmp_path / "d.whl", "w") as wheel:
        wheel.writestr("django/conf/locale/de/LC_MESSAGES/django.po", catalogue)
        wheel.writestr("django/conf/locale/de_CH/LC_MESSAGES/django.po", catalogue)
    assert list(langid_fit.messages(tmp_path / "d.whl")) == [("de", "Bitte wählen Sie  aus der Liste aus.")]


MIXED = {
    "en": "This is a paragraph about the weather in London, which is often rainy in the autumn and mild in spring. ",
    "fr": "Ceci est un paragraphe qui parle du temps à Paris, souvent agréable au printemps pour se promener. ",
    "ja": "これは東京の天気についての日本語の段落です。夏はとても蒸し暑くなりますが、秋は過ごしやすいです。",
    "ru": "Это абзац о погоде в Москве, где зимой бывает очень холодно, а летом жарко и солнечно. ",
}


@needs_model
def test_mixed_pages_are_told_by_their_paragraphs(identifier):
    page = "\n\n".join(MIXED[lang] * n for lang, n in (("en", 3), ("fr", 7), ("en", 2)))
    language, share, shares = identifier.identify_page(page)
    assert language == "fr" and set(shares) == {"en", "fr"} and share == shares["fr"] and 0.5 < share < 0.7
    late = MIXED["en"] * 40 + "\n\n" + MIXED["fr"] * 70  # its beginning says nothing of the end
    assert identifier.identify(late)[0] == "en" and identifier.identify_page(late)[0] == "fr"
    assert identifier.identify_page(MIXED["en"] * 50)[::2] == ("en", {})
    lines = identifier.identify_paragraphs("\n".join(MIXED[lang] for lang in ("ru", "en", "ja")))
    assert [p.language for p in lines.paragraphs] == ["ru", "en", "ja"]


@needs_model
@pytest.mark.parametrize(
    "text", ["Hi", "OK", "https://example.com/a/page.html", "www.example.org", "", "12:30", "😀😀"]
)
def test_what_says_nothing_is_unknown(identifier, text):
    assert identifier.identify(text) == ("", 0.0)
