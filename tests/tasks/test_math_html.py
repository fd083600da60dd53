"""Formulas of pages stay in place as LaTeX, whatever carries them; nothing is doubled; hostile pages do not crash."""

from __future__ import annotations

import random

import pytest

from tasks.latex import math_spans
from tasks.math_html import extract_math_page, has_math_markup, image_tex, restore

PROSE = (
    "This paragraph holds enough plain words of running text that every extractor takes it for the main content of the page, "
    "since it is long and has several sentences. It goes on about numbers and what they are good for, in general terms. "
)


def page(*parts: str, head: str = "") -> bytes:
    inner = "".join(f"<p>{PROSE} {part} {PROSE}</p>" for part in parts)
    return f"<html><head><title>T</title>{head}</head><body><article><h1>A title</h1>{inner}</article></body></html>".encode()


KATEX = (
    '<span class="katex"><span class="katex-mathml"><math><semantics><mrow><mi>z</mi></mrow>'
    '<annotation encoding="application/x-tex">z_0</annotation></semantics></math></span>'
    '<span class="katex-html" aria-hidden="true"><span>z0VISIBLE</span></span></span>'
)
KATEX_DISPLAY = f'<span class="katex-display">{KATEX}</span>'
MATHJAX3 = (
    '<mjx-container class="MathJax" jax="CHTML"{}><mjx-math><mjx-mi>xVISIBLE</mjx-mi></mjx-math>'
    "<mjx-assistive-mml><math><msup><mi>x</mi><mn>2</mn></msup></math></mjx-assistive-mml></mjx-container>"
)
WIKIPEDIA = (
    '<span class="mwe-math-element"><span class="mwe-math-mathml-inline"><math><semantics><mrow><mi>E</mi></mrow>'
    '<annotation encoding="application/x-tex">{\\displaystyle E=mc^{2}}</annotation></semantics></math></span>'
    '<img class="mwe-math-fallback-image-inline" alt="{\\displaystyle E=mc^{2}}" src="x.svg"></span>'
)
CASES = [
    (KATEX, "$z_0$", "katex"),
    (KATEX_DISPLAY, "$$z_0$$", "katex"),
    (MATHJAX3.format(""), "$x^2$", "mathjax3"),
    (MATHJAX3.format(' display="true"'), "$$x^2$$", "mathjax3"),
    (WIKIPEDIA, "$E=mc^{2}$", "wikipedia"),
    ('<span class="MathJax_Preview">VISIBLE</span><span class="MathJax">VISIBLE</span><script type="math/tex">c &lt d</script>',
     "$c &lt d$", "mathjax_script"),
    ('<script type="math/tex; mode=display">\\int_0^1 f < 2</script>', "$$\\int_0^1 f < 2$$", "mathjax_script"),
    ("<math><mfrac><mn>1</mn><mi>n</mi></mfrac></math>", "$\\frac{1}{n}$", "mathml"),
    ('<math display="block"><mi>n</mi></math>', "$$n$$", "mathml"),
    ('<m:math xmlns:m="http://www.w3.org/1998/Math/MathML"><m:mi>q</m:mi></m:math>', "$q$", "mathml"),
    ('<img class="math" src="x.png" alt="\\frac{1}{2}">', "$\\frac{1}{2}$", "image_alt"),
    ('<img class="latex" src="https://s0.wp.example/latex.php?latex=a" alt="a+b">', "$a+b$", "image_alt"),
    ('<img src="i.png" alt="$a^2$">', "$a^2$", "image_alt"),
    ('<div class="math"><p><img src="../_images/math/0a1b2c3d4e5f.png" alt="F = m a"></p></div>', "$$F = m a$$", "image_alt"),
    ('<span class="math">\\(a_1 + b\\)</span>', "$a_1 + b$", "delimiters"),
    ("\\[ e = m c^2 \\]", "$$e = m c^2$$", "delimiters"),
    ("$$ e = m $$", "$$e = m$$", "delimiters"),
    ("\\begin{align}a &amp;= b\\end{align}", "$$\\begin{align}a &= b\\end{align}$$", "delimiters"),
]  # fmt: skip


@pytest.mark.parametrize("markup, expected, carrier", CASES, ids=[f"{c[2]}-{i}" for i, c in enumerate(CASES)])
def test_carriers(markup, expected, carrier):
    body = page(f"before {markup} after")
    assert has_math_markup(body) or carrier == "delimiters"
    found = extract_math_page(body)
    assert dict(found.carriers) == {carrier: 1} and found.lost == 0
    assert " ".join(found.page.text.split()).count(f"before {expected} after") == 1
    assert "VISIBLE" not in found.page.text and "xmathq" not in found.page.text
    assert math_spans(found.page.text) == [expected.strip("$")]
    assert (f"\n\n{expected}\n\n" in found.page.text) == expected.startswith("$$")


def test_several_formulas_keep_their_places():
    found = extract_math_page(page(f"one {KATEX}, two <math><mi>b</mi></math>.", "three \\(c\\)", KATEX_DISPLAY))
    flat = " ".join(found.page.text.split())
    assert "one $z_0$, two $b$. This" in flat
    assert flat.index("$z_0$") < flat.index("$b$") < flat.index("$c$") < flat.index("$$z_0$$")


def test_single_dollars_only_where_the_page_says_so():
    text = "costs $5 or $6, and $x_1$ is"
    assert "$5 or $6" in extract_math_page(page(text)).page.text
    declared = "<script>MathJax = {tex: {inlineMath: [['$', '$'], ['\\\\(', '\\\\)']]}}</script>"
    found = extract_math_page(page(text, head=declared))
    assert found.carriers == {"dollars": 1} and "$5 or $6, and $x_1$ is" in found.page.text


def test_code_is_left_alone():
    found = extract_math_page(page("<code>\\(not\\)</code> and \\(yes\\)"))
    assert found.carriers == {"delimiters": 1}


def test_pages_without_mathematics():
    assert not has_math_markup(b"<p>No formulas (here) [or here].</p>")
    found = extract_math_page(page("plain"))
    assert not found.carriers and "plain" in found.page.text


def test_images_that_are_no_formulas():
    from resiliparse.parse.html import HTMLTree

    def tex(markup: str) -> str:
        return image_tex(HTMLTree.parse(markup).document.query_selector("img"))

    assert tex('<img alt="A photograph of a cat">') == ""
    assert tex('<img class="tex" alt="An image of something, large">') == ""
    assert tex('<img class="math" alt="x">') == "x"


def test_restore_counts_what_is_lost():
    assert restore("a xmathq0qx , b", [("x", False), ("y", True)]) == ("a $x$, b", 1)


def test_hostile_pages_do_not_crash():
    deep = page("<math>" + "<mrow>" * 3000 + "x" + "</mrow>" * 3000 + "</math> tail")
    assert "tail" in extract_math_page(deep).page.text
    wide = page("<math>" + "<mi>x</mi>" * 30_000 + "</math> tail")
    assert "tail" in extract_math_page(wide).page.text
    extract_math_page(page("<div>" * 3000 + "\\(x\\)"))
    extract_math_page(page("\\(" * 5000 + "$$" * 5001))


def test_random_damage_never_crashes():
    rng = random.Random(0)
    good = page(KATEX, WIKIPEDIA, MATHJAX3.format(""), "<math><mfrac><mi>a</mi><mi>b</mi></mfrac></math> \\(x\\)")
    for _ in range(40):
        data = bytearray(good)
        for _ in range(rng.randrange(1, 60)):
            data[rng.randrange(len(data))] = rng.choice(b"<>/=\"' amth\\$")
        extract_math_page(bytes(data[: rng.randrange(200, len(data))]))


@pytest.mark.parametrize(
    "carrier, text",
    [
        ('<img src="https://latex.codecogs.com/svg.image?\\dpi{110}x^2+y"/>', "$x^2+y$"),
        ('<img src="https://s0.wp.com/latex.php?bg=fff&latex=a%5E2%2Bb&s=0">', "$a^2+b$"),
        ('<mjx-container jax="CHTML"><mjx-math data-latex="\\frac{a}{b}"><mjx-mi></mjx-mi></mjx-math></mjx-container>',
         "$\\frac{a}{b}$"),
        ('<span class="equation" data-latex="a^2+b^2">copy</span>', "$a^2+b^2$"),
        ('<span class="math inline">a^2+b^2=c^2</span>', "$a^2+b^2=c^2$"),
        ('<code class="code math js-render-math">a_1</code>', "$a_1$"),
        ('<span class="math inline">\\(x_1\\)</span>', "$x_1$"),
        ('<span class="katex"><span class="katex-html"><span>E</span><span>=m</span></span></span>', "E=m"),
    ],
)  # fmt: skip
def test_formulas_that_only_an_attribute_an_address_or_plain_text_holds(carrier, text):
    around = "This is a paragraph of prose that says what the formula means, at some length, for the reader. "
    page = f"<html><body><p>{around}</p><p>Before {carrier} after, and {around}</p><p>{around}</p></body></html>"
    assert f"Before {text} after" in extract_math_page(page.encode()).page.text
    assert has_math_markup(page.encode())
