"""HTML to text: charsets by what really decodes, main content without furniture, clear refusal of what is no page."""

import codecs

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks import extract
from tasks.extract import NotText, boilerplate, clean_text, code_blocks, decode_html, extract_page, render
from tasks.extract_hash import hash_table
from tasks.extract_model import segment
from tasks.extract_scan import scan
from tests.bench.extraction import GOLD, REQUIRED_F1, gold_pages, precision_recall, summary

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


@pytest.mark.parametrize(
    "body, http, charset",
    [
        (RUSSIAN.encode("utf-8")[:-1], "windows-1251", "utf-8"),  # cut in the middle of a character
        (RUSSIAN.encode("utf-8") + b" \xe9t\xe9.", "iso-8859-1", "utf-8"),  # a stray Latin-1 word
        (RUSSIAN.encode("windows-1251") * 3, "iso-8859-1", "windows-1251"),  # declared Western, hardly an ASCII letter
        ("<p>café - “quoted”".encode("windows-1252"), "iso-8859-1", "windows-1252"),  # what browsers take it for
        ('<meta charset="gb2312"><p>今天我们介绍网站的购物车，商品和送货的方法。'.encode("gb18030"), "", "gb18030|gbk"),
        (
            '<meta charset="shift_jis"><p>今日は、ウェブサイトの使い方を説明します。'.encode("cp932"),
            "",
            "cp932|shift_jis",
        ),
        ('<?xml version="1.0" encoding="euc-jp"?><p>今日は、使い方を説明します。'.encode("euc-jp"), "", "euc-jp"),
        ("<p>plain text".encode("utf-16-le"), "", "utf-16-le"),  # no byte order mark
    ],
)
def test_charset_that_is_declared_wrongly_loosely_or_not_at_all(body, http, charset):
    text, name = decode_html(body, http)
    assert codecs.lookup(name).name in {codecs.lookup(c).name for c in charset.split("|")}
    assert text[:-6].count("\ufffd") == 0


CODE = b"""<html><body><div id="toc"><a href="#a">Contents</a></div><main><h1>How to greet</h1>
<p>The following function greets whoever calls it, and it is written with care, so that it can be read.</p>
<div class="highlight-python3 notranslate"><div class="highlight"><pre><span></span><span class="k">def</span> greet(name):
    <span class="k">if</span> name &lt; <span class="s">"m"</span>:
\treturn f"hello {name}"

    return <span>None</span>
</pre></div></div>
<p>The second example does the same thing in a shell, and it prints the result on the standard output.</p>
<table><tr><td class="linenos"><pre>1
2</pre></td><td><pre><code class="language-bash">$ greet --name x | cat
hello x</code></pre></td></tr></table>
<p>It ends with a poem, which is no code and which therefore is not fenced when the page is written out.</p>
<pre>Roses are red,
  violets are blue.</pre>
<ul><li>the first item of a list that says something</li><li>the second item of the list says something else</li></ul>
<table><tr><th>name</th><th>value</th></tr><tr><td>alpha</td><td>one hundred</td></tr></table>
</main></body></html>"""


def test_code_blocks_are_kept_verbatim_with_their_language():
    python = 'def greet(name):\n    if name < "m":\n\treturn f"hello {name}"\n\n    return None'
    shell = "$ greet --name x | cat\nhello x"
    assert code_blocks(CODE) == [("python3", python), ("bash", shell)]
    page = extract_page(CODE)
    assert f"```python3\n{python}\n```" in page.text and f"```bash\n{shell}\n```" in page.text
    assert page.code_blocks == 2 and "Roses are red,\n  violets are blue." in page.text
    assert extract_page(PAGE).code_blocks == 0


def test_lists_and_tables_keep_their_lines():
    blocks, _ = segment(CODE.decode())
    text, _ = render(blocks, np.arange(len(blocks)))
    assert "- the first item of a list that says something\n- the second item of" in text
    assert "name | value\nalpha | one hundred" in text


def test_line_breaks_and_inline_markup():
    blocks, _ = segment(
        "<div>one <b>two</b><br>three &amp; <a href=x>four</a><br><br>five&nbsp;six<hr>seven</div>eight"
    )
    assert [blocks.string(b) for b in range(len(blocks))] == ["one two\nthree & four", "five six", "seven", "eight"]


PARAGRAPHS = {
    "zh": "今天我们介绍这个网站的购物车，商品和送货的方法。顾客可以在网上选择商品，然后付款，三天以后就能收到。",
    "ja": "今日は、このウェブサイトの使い方を説明します。商品を選んで、支払いをすると、三日後に届きます。",
    "ar": "نشرح اليوم كيفية استخدام هذا الموقع، وكيف يختار الزبون البضاعة ويدفع ثمنها، ثم تصل إليه بعد ثلاثة أيام.",
    "th": "วันนี้เราจะอธิบายวิธีใช้เว็บไซต์นี้ ลูกค้าสามารถเลือกสินค้าและชำระเงิน หลังจากนั้นสามวันก็จะได้รับสินค้า",
    "hi": "आज हम बताते हैं कि इस साइट का उपयोग कैसे करें। ग्राहक सामान चुनता है, भुगतान करता है और तीन दिन बाद सामान मिल जाता है।",
    "de": "Heute erklären wir, wie diese Seite benutzt wird. Der Kunde wählt die Ware, bezahlt sie und erhält sie später.",
}


@pytest.mark.parametrize("lang", sorted(PARAGRAPHS))
def test_main_content_does_not_depend_on_the_script(lang):
    text = PARAGRAPHS[lang]
    menu = "".join(f'<li><a href="/{i}">{text[4 * i : 4 * i + 4]}</a></li>' for i in range(8))
    body = f"<body><ul class=menu>{menu}</ul><div class=post><h2>{text[:12]}</h2>" + f"<p>{text}</p>" * 4
    page = extract_page((body + f"</div><ul class=footer>{menu}</ul>").encode())
    assert page.text.count(text) >= 3 and page.text.count("\n- ") == 0


def test_a_page_without_markup_is_its_text():
    assert extract_page(b"just a line\nand another one").text == "just a line\nand another one"


DEEP = 10_000


@pytest.mark.parametrize(
    "body",
    [
        b"<div>" * DEEP + b"<p>deep text",
        b"<table><tr><td>" * 2000 + b"cell" + b"</table>" * 500,
        b"<b>" * DEEP + b"x" + b"</i>" * DEEP,
        b"<p class='" + b"a-" * 2_500_000 + b"'>text after a long attribute",
        b"<p>" + b"w" * 5_000_000,
        b"<p>text\x00with\x00nulls" + b" and more of it" * 100,
        b"<pre>" * 300 + b"x\n y" + b"<br>" * 300,
        b"<!--" + b"<p>never closed",
        b"<script>if (a < b) { '</scr' + 'ipt>' }",
        b"<p>a<svg><style><p>b</p></style><foreignObject><p>c",
        b"</p></div></html><li>x</li></ul><td>y",
        b"<plaintext><p>all of it is text</plaintext>",
        "<p>\U0001f600 \ud83d lone".encode("utf-8", "surrogatepass"),
        b"<a href=x>" * 3000 + b"link",
        b"<" * 10_000,
        b"&amp" * 10_000 + b"&#xD800;&#0;&#x110000;",
    ],
    ids=range(16),
)
def test_hostile_markup_gives_text_or_a_clear_refusal(body):
    try:
        page = extract_page(body)
    except NotText:
        return
    page.text.encode("utf-8")
    code_blocks(body)
    boilerplate(body, page.text)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.binary(max_size=400), st.integers(0, len(CODE)), st.integers(0, len(CODE)))
def test_any_bytes_anywhere_in_a_page_are_no_error(noise, at, cut):
    for body in (noise, CODE[:at] + noise + CODE[at:], CODE[:cut]):
        try:
            page = extract_page(body)
        except NotText:
            continue
        page.text.encode("utf-8")
        code_blocks(body)


def test_the_compiled_passes_stay_inside_their_buffers():
    """The scanner takes bytes that no parser wrote: results stay in range, whatever they are."""
    random = np.random.default_rng(0)
    alphabet = np.frombuffer(b'<>/="& abpredivtscrlyxm!-\n&amp;\xe3\x80\x82\xf0', np.uint8)
    none = hash_table([], [], 4)
    for size in list(range(40)) + [500] * 200:
        buf = alphabet[random.integers(0, len(alphabet), size)]
        elements, text, blocks, stats, words, owner = scan(buf, *none)
        assert len(blocks) == len(stats) and len(words) == len(owner)
        if len(blocks):
            assert (blocks[:, 0] < blocks[:, 1]).all() and blocks[-1, 1] <= len(text)
            assert (0 <= blocks[:, 2:]).all() and (blocks[:, 2:] < len(elements)).all()
            assert (stats[:, 0] > 0).all() and (0 <= owner).all() and (owner < len(blocks)).all()
        assert (elements[1:, 1] < np.arange(1, len(elements))).all() and (elements[1:, 1] >= 0).all()


def test_the_same_page_gives_the_same_text():
    assert len({extract_page(CODE).text for _ in range(3)}) == 1


def test_trees_are_those_of_the_library():
    """Exported arrays against scikit-learn's own predictions."""
    ensemble = pytest.importorskip("sklearn.ensemble", reason="scikit-learn (training only) is not installed")
    from tasks.extract_train import export

    random = np.random.default_rng(0)
    x = random.normal(size=(2000, 5)).astype(np.float32)
    model = ensemble.HistGradientBoostingClassifier(max_iter=20, random_state=0).fit(x, x[:, 0] * x[:, 1] > 0.1)
    np.testing.assert_allclose(export(model)(x), model.predict_proba(x)[:, 1], atol=1e-5)


def test_training_asks_every_tree_and_use_leaves_early():
    ensemble = pytest.importorskip("sklearn.ensemble", reason="scikit-learn (training only) is not installed")
    from tasks.extract_train import all_trees, export

    x = np.random.default_rng(0).normal(size=(2000, 3)).astype(np.float32)
    model = ensemble.HistGradientBoostingClassifier(max_iter=80, random_state=0).fit(x, x[:, 0] > 1.5)
    trees, library = export(model), model.predict_proba(x)[:, 1]
    arrays = (trees.roots, trees.feature, trees.threshold, trees.left, trees.value, np.float32(trees.bias))
    np.testing.assert_allclose(all_trees(x, *arrays), library, atol=1e-5)
    plain = np.abs(trees(x) - library) > 1e-4
    assert plain.any() and library[plain].max() < 0.03


def test_labels_find_the_expected_text_once():
    """A teaser that repeats a sentence of the article is not main content; a short line of it is."""
    pytest.importorskip("sklearn", reason="scikit-learn (training only) is not installed")
    from tasks.extract_train import block_labels

    first = "The council met on Monday and it decided to build a new bridge."
    expected = f"{first}\n\nWhy now\n\nNobody could say what it would cost in the end."
    html = f"<p>{first}</p><h2>Why now</h2><p>Nobody could say what it would cost in the end.</p><p>Share</p>"
    html += f"<ul><li><a href=x>Weather</a></li><li><a href=y>{first}</a></li><li><a href=z>Sports today</a></li></ul>"
    labels, _ = block_labels(segment(html)[0], expected)
    assert (labels > 0.5).tolist() == [True, True, True, False, False, False, False]


@pytest.mark.skipif(not GOLD.is_dir(), reason="../shared/gold/article-extraction is absent")
def test_scorer_is_the_benchmarks():
    assert precision_recall("", "") == (1, 1) and precision_recall("a b c d", "") == (0, 0)
    assert precision_recall("a b c d e", "a b c d") == (0.5, 1)
    p, r = precision_recall("x y z a b c d", "a b c d a b c d")
    assert (p, r) == (1 / 4, 1 / 5)


@pytest.mark.slow
@pytest.mark.skipif(not GOLD.is_dir(), reason="../shared/gold/article-extraction is absent")
def test_f1_on_the_article_extraction_benchmark():
    scores = [precision_recall(extract_page(body).text, want) for _, body, want, _ in gold_pages()]
    assert summary(scores)[2] >= REQUIRED_F1


def test_what_extraction_leaves_is_the_same_whether_the_page_was_extracted_before(monkeypatch):
    body = _page().encode()
    main = extract.extract_page(body).text
    again = (extract.boilerplate(body, main), extract.code_blocks(body))
    fresh = bytes(bytearray(body))  # equal bytes, another object: parsed anew
    assert again == (extract.boilerplate(fresh, main), extract.code_blocks(fresh))
    calls = []
    monkeypatch.setattr(extract, "segment", lambda html: calls.append(html))
    extract.boilerplate(body, main)
    assert not calls  # no second parse of the page just extracted


def _page() -> str:
    text = "<p>" + "The sea was calm that day, and the boats went out before dawn. " * 5 + "</p>"
    code = "<pre><code>a = 1\nb = 2</code></pre>"
    return f"<html><body><nav><a href=x>Home</a></nav>{text}{code}{text}<footer>Imprint</footer></body></html>"


KOREAN = "이것은 인코딩을 시험하기 위한 한국어 문장입니다. 서울은 대한민국의 수도이며 많은 사람들이 살고 있습니다. "


@pytest.mark.parametrize(
    "text, encoding, declared",
    [
        (KOREAN, "euc_kr", ""),
        (KOREAN, "cp949", '<meta charset="iso-8859-1">'),
        (KOREAN, "utf-32", ""),
        (
            "這是一個用來測試編碼的中文段落。臺北是一個充滿活力的城市，擁有許多夜市與博物館。",
            "big5",
            '<meta charset="iso-8859-1">',
        ),
        ("これは日本語の文章です。文字コードの判定を確かめるために。", "iso2022_jp", '<meta charset="utf-8">'),
        ("这是一个用来测试编码的中文段落。北京是中国的首都，拥有悠久的历史。", "hz", ""),
        ("①番の記事です。髙橋さんが書いた、ⅠとⅡの章について。", "cp932", '<meta charset="shift_jis">'),
    ],
)
def test_wide_charsets_undeclared_or_declared_wrongly(text, encoding, declared):
    body = f"<html><head>{declared}</head><body><p>{text}</p><p>{text}</p></body></html>".encode(encoding)
    assert text.strip() in extract_page(body).text


def test_blank_lines_of_code_stay_and_breaking_hints_go():
    code = "def f():\n    return 1\n\n\ndef g():\n\n\n\n    return 2"
    page = (
        f"<p>The ex\u00adtra\u00adordi\u00adnary function below shows how it is written.</p><pre><code>{code}</code></pre>"
        + ("<p>And this paragraph explains at some length what the two functions above do, and why.</p>" * 2)
    )
    text = extract_page(page.encode()).text
    assert f"```\n{code}\n```" in text and "extraordinary" in text
    assert "\n\n\n" not in text.replace(code, "")


def test_pages_of_nothing_but_tags_take_bounded_time_and_memory():
    with pytest.raises(NotText, match="tags"):
        extract_page(b"<b>" * 500_000)
    body = b"<p>Some text about it here.</p>" + b"<pre>x = 1;</pre>" * 20_000  # slow, were it quadratic
    assert len(code_blocks(body)) == 20_000 and extract_page(body).code_blocks


def test_long_runs_of_blanks_cost_linear_time():
    blanks = " \t\u00a0" * 400_000  # in time that grows with the square: hours
    assert clean_text(f"a{blanks}b {blanks}\n c  \n") == f"a{blanks}b\n c".replace("\u00a0", " ")
