"""MathML to LaTeX: presentation, content, annotations, hostile nesting; and back from TeX by an independent converter."""

from __future__ import annotations

import pytest

from tasks import mathml
from tests.bench.math_science import normalise_tex


def tex(inner: str, attributes: str = "") -> str:
    from resiliparse.parse.html import HTMLTree

    tree = HTMLTree.parse(f"<p><math {attributes}>{inner}</math></p>")
    return mathml.to_tex(mathml.from_dom(tree.document.query_selector("math")))


PRESENTATION = [
    ("<mfrac><mrow><mi>a</mi><mo>+</mo><mn>1</mn></mrow><msqrt><mi>x</mi></msqrt></mfrac>", r"\frac{a+1}{\sqrt{x}}"),
    ("<msup><mi>x</mi><mn>2</mn></msup><mo>≤</mo><msub><mi>y</mi><mrow><mi>i</mi><mo>+</mo><mn>1</mn></mrow></msub>",
     r"x^2\leq y_{i+1}"),
    ("<munderover><mo>∑</mo><mrow><mi>i</mi><mo>=</mo><mn>1</mn></mrow><mi>n</mi></munderover><mi>α</mi>",
     r"\sum_{i=1}^n\alpha"),
    ("<mi>α</mi><mi>x</mi>", r"\alpha x"),
    ("<mi>sin</mi><mo>&ApplyFunction;</mo><mi>x</mi>", r"\sin x"),
    ("<mi>sgn</mi><mo>&ApplyFunction;</mo><mi>x</mi>", r"\operatorname{sgn}x"),
    ("<mover><mi>v</mi><mo>→</mo></mover>", r"\vec{v}"),
    ("<mover><mrow><mi>a</mi><mi>b</mi></mrow><mo stretchy='true'>^</mo></mover>", r"\widehat{ab}"),
    ("<munder><mi>x</mi><mo>_</mo></munder>", r"\underline{x}"),
    ("<munder><mo>lim</mo><mrow><mi>n</mi><mo>→</mo><mi>∞</mi></mrow></munder>", r"\lim_{n\to\infty}"),
    ("<mroot><mi>x</mi><mn>3</mn></mroot>", r"\sqrt[3]{x}"),
    ("<msup><mrow><mo>(</mo><mi>a</mi><mo>)</mo></mrow><mn>2</mn></msup>", "(a)^2"),
    ("<msup><mrow><mi>a</mi><mi>b</mi></mrow><mn>2</mn></msup>", "{ab}^2"),
    ("<msubsup><mi>x</mi><mi>i</mi><mo>′</mo></msubsup>", "x_i'"),
    ("<mfenced open='[' close=')'><mi>a</mi><mi>b</mi></mfenced>", r"\left[a,b\right)"),
    ("<mfrac linethickness='0'><mi>n</mi><mi>k</mi></mfrac>", r"\binom{n}{k}"),
    ("<mi mathvariant='double-struck'>R</mi><mo>,</mo><mi>ℝ</mi><mo>,</mo><mi>𝔤</mi><mo>,</mo><mi>𝐱</mi>",
     r"\mathbb{R},\mathbb{R},\mathfrak{g},\mathbf{x}"),
    ("<mi>x</mi><mo>≮</mo><mi>y</mi><mo>∉</mo><mi>S</mi>", r"x\not<y\notin S"),
    ("<mmultiscripts><mi>F</mi><mn>1</mn><none/><mprescripts/><mn>2</mn><none/></mmultiscripts>", "{}_2F_1"),
    ("<mtext>if&nbsp;</mtext><mi>x</mi><mo>&lt;</mo><mn>0</mn>", r"\text{if }x<0"),
    ("<mtable><mtr><mtd><mn>1</mn></mtd><mtd><mn>0</mn></mtd></mtr><mtr><mtd><mn>0</mn></mtd><mtd><mn>1</mn></mtd></mtr>"
     "</mtable>", r"\begin{matrix}1 & 0 \\ 0 & 1\end{matrix}"),
    ("<mrow><mo>(</mo><mtable><mtr><mtd><mi>a</mi></mtd></mtr></mtable><mo>)</mo></mrow>", r"\begin{pmatrix}a\end{pmatrix}"),
    ("<mrow><mo>{</mo><mtable><mtr><mtd><mi>a</mi></mtd><mtd><mi>b</mi></mtd></mtr></mtable></mrow>",
     r"\begin{cases}a & b\end{cases}"),
    ('<semantics><mi>x</mi><annotation encoding="application/x-tex">x^{2}</annotation></semantics>', "x^{2}"),
    ('<semantics><mi>x</mi><annotation encoding="StarMath 5.0">x over 2</annotation></semantics>', "x"),
]  # fmt: skip


@pytest.mark.parametrize("inner, expected", PRESENTATION)
def test_presentation(inner, expected):
    assert tex(inner) == expected


CONTENT = [
    ("<apply><eq/><ci>E</ci><apply><times/><ci>m</ci><apply><power/><ci>c</ci><cn>2</cn></apply></apply></apply>", "E=mc^{2}"),
    ("<apply><int/><bvar><ci>x</ci></bvar><lowlimit><cn>0</cn></lowlimit><uplimit><cn>1</cn></uplimit>"
     "<apply><sin/><ci>x</ci></apply></apply>", r"\int_{0}^{1}\sin\left(x\right)\,dx"),
    ("<apply><divide/><apply><plus/><ci>a</ci><ci>b</ci></apply><cn>2</cn></apply>", r"\frac{a+b}{2}"),
    ("<apply><times/><cn>2</cn><apply><plus/><ci>a</ci><pi/></apply></apply>", r"2\left(a+\pi\right)"),
    ("<apply><root/><degree><cn>3</cn></degree><ci>x</ci></apply>", r"\sqrt[3]{x}"),
    ("<apply><sum/><bvar><ci>i</ci></bvar><lowlimit><cn>1</cn></lowlimit><uplimit><ci>n</ci></uplimit><ci>i</ci></apply>",
     r"\sum_{i=1}^{n}i"),
]  # fmt: skip


@pytest.mark.parametrize("inner, expected", CONTENT)
def test_content(inner, expected):
    assert tex(inner) == expected
    assert tex(f"<semantics><annotation-xml encoding='MathML-Content'>{inner}</annotation-xml></semantics>") == expected


def test_presentation_is_preferred_to_content_beside_it():
    both = "<semantics><mi>x</mi><annotation-xml encoding='MathML-Content'><ci>y</ci></annotation-xml></semantics>"
    assert tex(both) == "x"


def test_alttext_that_is_tex():
    assert tex("<mi>x</mi>", r'alttext="\alpha^2"') == r"\alpha^2"
    assert tex("<mi>x</mi>", 'alttext="a formula"') == "x"


def test_hostile_nesting_is_an_error_not_a_crash():
    with pytest.raises(ValueError, match="levels"):
        tex("<mrow>" * 5000 + "<mi>x</mi>" + "</mrow>" * 5000)
    with pytest.raises(ValueError, match="elements"):
        tex("<mi>x</mi>" * 30_000)
    for odd in ("<mfrac><mi>x</mi></mfrac>", "<msup/>", "<mover><mi>a</mi></mover>", "<mtable><mtr/></mtable>", "<apply/>",
                "<mmultiscripts/>", "<mfenced/>", "<apply><int/></apply>", "<apply><diff/></apply>", "<mi></mi>"):  # fmt: skip
        tex(odd)


FORMULAS = r"""
\frac{a+b}{c-d}
x_i^2 + y_{i+1}^{n}
\sum_{k=0}^{\infty} \frac{x^k}{k!}
\int_0^1 \sqrt{1-x^2} dx
\lim_{n \to \infty} a_n = \alpha
\begin{pmatrix} a & b \\ c & d \end{pmatrix}
\begin{cases} 1 & x > 0 \\ 0 & x \leq 0 \end{cases}
\hat{x} + \bar{y} + \vec{v}
\mathbb{R}^n \subset \mathbb{C}^n
\forall \epsilon > 0 \exists \delta
\sqrt[3]{x+1}
\binom{n}{k}
f'(x) = \partial f
\lfloor x \rfloor \neq \lceil x \rceil
""".strip().splitlines()


@pytest.mark.parametrize("formula", FORMULAS)
def test_round_trip_through_an_independent_converter(formula):
    converter = pytest.importorskip("latex2mathml.converter", reason="latex2mathml is not installed")
    back = tex(converter.convert(formula).partition(">")[2].removesuffix("</math>"))
    assert normalise_tex(back) == normalise_tex(formula)
