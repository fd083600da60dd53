"""Formulas come through every source format as LaTeX; PDF reading order; scores; the math stage."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tasks import documents, latex, math, pdf
from tasks.stage import run_stage_for_test


def mathml(inner: str, attributes: str = "") -> str:
    return latex.html_to_text(f"<html><body><p>A <math {attributes}>{inner}</math> B</p></body></html>", False)


@pytest.mark.parametrize(
    "inner, expected",
    [
        ("<mfrac><mrow><mi>a</mi><mo>+</mo><mn>1</mn></mrow><msqrt><mi>x</mi></msqrt></mfrac>", r"\frac{a+1}{\sqrt{x}}"),
        ("<msup><mi>x</mi><mn>2</mn></msup><mo>≤</mo><msub><mi>y</mi><mrow><mi>i</mi><mo>+</mo><mn>1</mn></mrow></msub>",
         r"x^2\ley_{i+1}"),
        ("<munderover><mo>∑</mo><mrow><mi>i</mi><mo>=</mo><mn>1</mn></mrow><mi>n</mi></munderover><mi>α</mi>",
         r"\sum_{i=1}^n\alpha"),
        ("<mi>α</mi><mi>x</mi>", r"\alpha x"),
        ("<mi>sin</mi><mo>\u2061</mo><mi>x</mi>", r"\sin x"),
        ("<mover><mi>v</mi><mo>→</mo></mover>", r"\vec{v}"),
        ("<mroot><mi>x</mi><mn>3</mn></mroot>", r"\sqrt[3]{x}"),
        ("<msup><mrow><mo>(</mo><mi>a</mi><mo>)</mo></mrow><mn>2</mn></msup>", "{(a)}^2"),
        ("<mtable><mtr><mtd><mn>1</mn></mtd><mtd><mn>0</mn></mtd></mtr><mtr><mtd><mn>0</mn></mtd><mtd><mn>1</mn></mtd></mtr>"
         "</mtable>", r"\begin{matrix}1 & 0 \\ 0 & 1\end{matrix}"),
        ('<semantics><mi>x</mi><annotation encoding="application/x-tex">x^{2}\n+1</annotation></semantics>', "x^{2} +1"),
    ],
)  # fmt: skip
def test_mathml(inner, expected):
    got = mathml(inner)
    expected = expected.replace(r"\ley", r"\le y")
    assert got == f"A ${expected}$ B"
    assert mathml(inner, 'display="block"') == f"A $${expected}$$ B"


def test_html_carriers_of_tex():
    page = r"""<html><body><main><p>One <span class="math">\(a_1 + b\)</span> and
    <span class="MathJax_Preview">junk</span><script type="math/tex">c^2</script> and
    <script type="math/tex; mode=display">\int_0^1 f</script>.</p>
    <p>Two <img class="math" src="x.png" alt="\frac{1}{2}"> and <span class="katex"><span class="katex-mathml"><math><semantics>
    <mrow><mi>z</mi></mrow><annotation encoding="application/x-tex">z_0</annotation></semantics></math></span>
    <span class="katex-html">z0</span></span>.</p><div class="math">\[ e = m c^2 \]</div></main></body></html>"""
    text = latex.html_to_text(page, False)
    assert latex.math_spans(text) == ["a_1 + b", "c^2", r"\int_0^1 f", r"\frac{1}{2}", "z_0", "e = m c^2"]
    assert "junk" not in text and "z0" not in text
    assert latex.has_math_markup(page.encode()) and not latex.has_math_markup(b"<p>No formulas (here) [or here].</p>")


def test_rst():
    source = r"""
Title
=====

.. _label:

Let :math:`x_i \in \mathbb{R}` be, see :func:`~sympy.solve` and :doc:`the docs <x>` or `a link <http://a>`_.

.. math::
   :label: eq

   a &= b \\
   c &= d

   e = f

.. note::

   Keep this.

.. autoclass:: gone.Gone
   :members:

After.
"""
    text = latex.rst_to_text(source)
    assert latex.math_spans(text) == [r"x_i \in \mathbb{R}", r"a &= b \\ c &= d", "e = f"]
    for kept in ("Title", "Keep this.", "After.", "see sympy.solve and the docs or a link."):
        assert kept in text
    for gone in ("====", "label", "autoclass", "members", "gone"):
        assert gone not in text


def test_markdown_and_tex():
    markdown = "# T\n\nInline {math}`a^2` and \\(b\\).\n\n```{math}\n:label: x\nc = d\n```\n\n```py\nx = 1\n```\n[text](http://x)"
    text = latex.markdown_to_text(markdown)
    assert latex.math_spans(text) == ["a^2", "b", "c = d"] and "x = 1" in text and "http" not in text
    tex = (
        "\\documentclass{article}\\newcommand{\\x}{y}\n\\begin{document}\n% comment\n\\section{S}\\label{s}\nWe have 50\\% of"
        " $a$ % more\nand \\begin{equation}b = c\\end{equation}\n\\end{document}\nignored"
    )
    text = latex.tex_to_text(tex)
    assert "newcommand" not in text and "comment" not in text and "ignored" not in text and "\\label" not in text
    assert "\\section{S}" in text and "50\\% of" in text and latex.math_spans(text) == ["a", "b = c"]


def test_prices_are_not_formulas():
    assert latex.math_spans("It costs $5 and then $6 more, \\$7 in all.") == []


def make_pdf(pages: list[list[tuple[float, float, str]]]) -> bytes:
    """A PDF by hand: each page is a list of (x, y, line) set in Helvetica 10."""
    objects = ["<< /Type /Catalog /Pages 2 0 R >>", "", "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>"]
    kids = []
    for page in pages:
        stream = "BT /F1 10 Tf " + " ".join(
            f"1 0 0 1 {x} {y} Tm ({line.replace('(', chr(92) + '(').replace(')', chr(92) + ')')}) Tj"
            for x, y, line in page
        )
        stream += " ET"
        objects.append(f"<< /Length {len(stream)} >>\nstream\n{stream}\nendstream")
        objects.append(
            f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 600 800] /Contents {len(objects)} 0 R"
            " /Resources << /Font << /F1 3 0 R >> >> >>"
        )
        kids.append(f"{len(objects)} 0 R")
    objects[1] = f"<< /Type /Pages /Kids [{' '.join(kids)}] /Count {len(kids)} >>"
    out, offsets = b"%PDF-1.4\n", []
    for number, body in enumerate(objects, 1):
        offsets.append(len(out))
        out += f"{number} 0 obj\n{body}\nendobj\n".encode("latin-1")
    table = "".join(f"{o:010d} 00000 n \n" for o in offsets)
    return (
        out
        + (
            f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n{table}trailer\n<< /Size {len(objects) + 1} /Root 1 0 R >>\n"
            f"startxref\n{len(out)}\n%%EOF\n"
        ).encode()
    )


LEFT = [
    "The left column begins here and has",
    "a first sentence of several lines that",
    "ends with a hyphen-",
    "ated word, and then it goes",
    "on with more text about primes.",
]
RIGHT = [
    "The right column is read second and",
    "tells about fields and rings that",
    "have an ideal structure in",
    "some sense that we define",
    "in the next part of this",
]


def two_columns(number: int) -> list[tuple[float, float, str]]:
    page = [(60, 770, "Journal of Examples, volume 7"), (290, 20, str(number))]
    page += [
        (
            60,
            740,
            f"A title over both of the columns of page {'abcdefgh'[number % 8]} of this journal, long enough to span them",
        )
    ]
    rows = list(zip(LEFT, RIGHT))
    rows = [
        (left, f"{right} {'abcdefgh'[number % 8] * 3}" if right.endswith("of this") else right) for left, right in rows
    ]
    for i, (left, right) in enumerate(rows):  # line by line across the columns, as many PDFs store them
        page += [(60, 700 - 14 * i, left), (330, 700 - 14 * i, right)]
    return page


def test_pdf_columns_running_heads_and_hyphens(tmp_path):
    path = tmp_path / "a.pdf"
    path.write_bytes(make_pdf([two_columns(n) for n in (11, 12, 13, 14)]))
    text, pages = pdf.pdf_to_text(path)
    assert pages == 4
    assert "Journal" not in text and "\n11" not in text
    assert "hyphenated word" in text
    flat = " ".join(text.split())
    first = flat.index("The left column")
    assert flat.index("about primes.") < flat.index("The right column", first) < flat.index("part of this ddd", first)
    assert flat.index("A title over both") < first
    assert pdf.pdf_to_text(path, max_pages=1)[1] == 1


def test_hyphens_of_compounds_stay():
    lines = [
        "A well-known fact about wholly differ-",
        "ent things that are well-",
        "known by everybody in the field today.",
    ]
    assert pdf.join_lines(lines).replace("\n", " ") == (
        "A well-known fact about wholly different things that are well-known by everybody in the field today."
    )


def test_a_broken_pdf_is_an_error(tmp_path):
    (tmp_path / "a.pdf").write_bytes(b"%PDF-1.4 nothing")
    with pytest.raises(ValueError, match="not a readable PDF"):
        pdf.pdf_to_text(tmp_path / "a.pdf")


LESSON = (
    r"Let $f(x) = x^2 + 1$ be a function. Its derivative is $f'(x) = 2x$, and hence the equation $f'(x) = 0$ has the solution "
    r"$x = 0$. We compute the integral $$\int_0^1 f(x)\,dx = \frac{4}{3}.$$ The proof of this theorem is an exercise. "
) * 4
NOVEL = (
    "She walked along the river and thought of nothing at all. The evening was warm, and the lamps were lit early. " * 8
)


def test_score_orders_a_lesson_over_an_index_over_a_novel():
    listing = " ".join(f"$f_{{{i}}}$" + f" sympy.module.name{i}" for i in range(60))
    lesson, index, novel = (math.score(t, 2000)[0] for t in (LESSON, listing, NOVEL))
    assert lesson > 0.7 and novel < 0.01 and novel < index < lesson
    mean, best = math.score(LESSON[:1000] + NOVEL * 10, 1000)
    assert best > 0.7 > 0.2 > mean


def test_stage_reads_files_and_pages(tmp_path):
    from tasks.warc import WarcWriter

    real = tmp_path / "real"
    files = {"a.rst": ("rst", LESSON.encode()), "b.tex": ("tex", LESSON.encode("latin-1")), "c.rst": ("rst", NOVEL.encode()),
             "d.rst": ("rst", b"short"), "e.pdf": ("pdf", make_pdf([two_columns(1)])), "f.pdf": ("pdf", b"no"),
             "g.py": ("code", LESSON.encode())}  # fmt: skip
    rows = []
    for name, (kind, data) in files.items():
        target = real / "files" / "it" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
        row = {
            "item": "it",
            "version": "1",
            "path": f"files/it/{name}",
            "kind": kind,
            "domain": "math",
            "licence": "MIT",
        }
        rows.append(row | {"bytes": len(data), "sha256": "", "url": ""})
    pq.write_table(pa.Table.from_pylist(rows), real / "index.parquet")
    writer = WarcWriter(real / "warc", "2026-01-01")
    body = "".join(f"<p>{part}.</p>" for part in LESSON.replace("$$", "$").split(". "))
    page = f"<html><body><main>{body}<p><math><mi>x</mi></math></p></main></body></html>"
    writer.write_page("https://a.example/lesson", page.encode(), "pip/a/1")
    writer.write_page("https://a.example/novel", f"<html><body><p>{NOVEL}</p></body></html>".encode(), "pip/a/1")
    writer.close()
    config = {"max_reject_share": 0.5}
    for run in ("one", "two"):
        run_stage_for_test(math, config, deps={"data/acquire": real}, outs=["data/math"], tmp=tmp_path / run)
    out = tmp_path / "one/data/math"
    assert (out / "manifest.json").read_text() == (tmp_path / "two/data/math/manifest.json").read_text()
    kept = {Path(r["url"] or r["source"]).name: r for r in documents.read_documents(out)}
    assert set(kept) == {"a.rst", "b.tex", "lesson"}
    assert all(r["domain"] == "math" and r["math_score"] > 0.5 for r in kept.values())
    assert json.loads(kept["a.rst"]["meta"])["formulas"] == 20
    reasons = {e["source"]: e["reason"] for e in documents.read_exclusions(out)}
    assert reasons == {"it/1/c.rst": "few_formulas", "it/1/d.rst": "too_short", "it/1/e.pdf": "few_formulas"}
    rejects = [json.loads(line)["id"] for line in (out / "rejects/part-00000.jsonl").read_text().splitlines()]
    assert rejects == ["files/it/f.pdf"]
