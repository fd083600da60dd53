"""HTML to text: charsets by what really decodes, main content without furniture, clear refusal of what is no page."""

import codecs
import json
import re
from collections import Counter
from pathlib import Path

import pytest

from tasks.extract import NotText, boilerplate, clean_text, decode_html, extract_page

GOLD = Path(__file__).resolve().parents[3] / "shared/gold/article-extraction"
RUSSIAN = "Корзина пуста. Сегодня мы расскажем вам о том, как работает наш магазин и доставка товаров по всей стране."


@pytest.mark.parametrize(
    "body, http, charset",
    [
        (RUSSIAN.encode("utf-8"), "windows-1251", "utf-8"),  # re-encoded, declaration left behind
        (RUSSIAN.encode("windows-1251"), "windows-1251", "windows-1251"),
        (RUSSIAN.encode("windows-1251"), "utf-8", "windows-1251"),  # wrong header
        (b'<meta charset="koi8-r"><p>' + RUSSIAN.encode("koi8-r"), "", "koi8-r"),
        (b"\xff\xfe" + RUSSIAN.encode("utf-16-le"), "", "utf-16"),
        (b"\xef\xbb\xbf" + RUSSIAN.encode("utf-8"), "ascii", "utf-8-sig"),
        (RUSSIAN.encode("utf-8"), "no-such-charset", "utf-8"),
    ],
)
def test_charset(body, http, charset):
    text, name = decode_html(body, http)
    assert RUSSIAN in text and codecs.lookup(name).name == codecs.lookup(charset).name


@pytest.mark.parametrize("body", [b"", b"  \n", b"%PDF-1.4 ...", b"\x1f\x8b\x08data", b"\x00\x01" * 500])
def test_what_is_no_page_is_refused(body):
    with pytest.raises(NotText):
        decode_html(body)


PAGE = b"""<html lang="EN-us"><head><title> A  title </title><script>var x = 1</script></head><body>
<nav><ul><li><a href="/">Home</a></li><li><a href="/login">Log in</a></li></ul></nav>
<main><article><h1>Heading</h1><p>The first paragraph of the article has a number of words in it.</p>
<p>The second one follows, and it is on a line of its own.</p></article></main>
<footer>Copyright 2014 Example Ltd</footer></body></html>"""


def test_main_content_title_and_declared_language():
    page = extract_page(PAGE)
    lines = [line for line in page.text.splitlines() if line]
    assert lines == [
        "Heading",
        "The first paragraph of the article has a number of words in it.",
        "The second one follows, and it is on a line of its own.",
    ]
    assert (page.title, page.declared_lang) == ("A title", "en-us")


def test_boilerplate_is_what_main_content_leaves_out():
    rest = boilerplate(PAGE, extract_page(PAGE).text)
    assert "Log in" in rest and "Copyright 2014" in rest and "first paragraph" not in rest and "var x" not in rest


def test_clean_text():
    assert clean_text("a \u00a0\r\nb\x00\x07\n \n\n\n c\ud800\n") == "a\nb\n\n c"


def test_deep_nesting_and_broken_markup_do_not_fail():
    assert "deep text" in extract_page(b"<div>" * 3000 + b"<p>deep text of some length, so that it is content.").text
    assert extract_page(b"<p>unclosed <b>text <table><tr><td>cell that is long enough to be read").text


def shingles(text):
    words = re.findall(r"\w+", text)
    return Counter(tuple(words[i : i + 4]) for i in range(max(1, len(words) - 3)))


@pytest.mark.slow
@pytest.mark.skipif(not GOLD.is_dir(), reason="../shared/gold/article-extraction is absent")
def test_f1_on_the_article_extraction_benchmark():
    """Official score: F1 of precision and recall over 4-token shingles, each averaged over 181 pages."""
    import gzip

    truth = json.loads(next(GOLD.rglob("ground-truth.json")).read_text())
    files = {p.name.partition(".")[0]: p for p in GOLD.rglob("*.html*")}
    precision, recall = [], []
    for name, entry in truth.items():
        body = files[name].read_bytes()
        body = gzip.decompress(body) if body[:2] == b"\x1f\x8b" else body
        found, want = shingles(extract_page(body).text), shingles(entry["articleBody"])
        hit = sum((found & want).values())
        precision.append(hit / max(1, sum(found.values())))
        recall.append(hit / max(1, sum(want.values())))
    p, r = sum(precision) / len(precision), sum(recall) / len(recall)
    assert 2 * p * r / (p + r) > 0.90
