"""Formulas of light markup come through as LaTeX; scores; the math stage over files, pages and records."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tasks import documents, latex, math
from tasks.math_score import score
from tasks.records import Record, write_records
from tasks.stage import run_stage_for_test
from tests.tasks.pdf_fixtures import make_pdf, two_columns
from tests.tasks.test_math_html import KATEX


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


def test_markdown():
    markdown = "# T\n\nInline {math}`a^2` and \\(b\\).\n\n```{math}\n:label: x\nc = d\n```\n\n```py\nx = 1\n```\n[text](http://x)"
    text = latex.markdown_to_text(markdown)
    assert latex.math_spans(text) == ["a^2", "b", "c = d"] and "x = 1" in text and "http" not in text


def test_prices_are_not_formulas():
    assert latex.math_spans("It costs $5 and then $6 more, \\$7 in all.") == []


LESSON = (
    r"Let $f(x) = x^2 + 1$ be a function. Its derivative is $f'(x) = 2x$, and hence the equation $f'(x) = 0$ has the solution "
    r"$x = 0$. We compute the integral $$\int_0^1 f(x)\,dx = \frac{4}{3}.$$ The proof of this theorem is an exercise. "
) * 4
NOVEL = (
    "She walked along the river and thought of nothing at all. The evening was warm, and the lamps were lit early. " * 8
)


LESSON_PAGE = [
    part
    for i in range(20)
    for part in (
        (60, 760 - 20 * i, f"Theorem {i}. Let the function x"),
        (194, 764 - 20 * i, "2", 7),
        (202, 760 - 20 * i, "+ y"),
        (217, 757 - 20 * i, "1", 7),
        (225, 760 - 20 * i, "be a polynomial, and hence an integral equation of it. "),
    )
]


def test_score_orders_a_lesson_over_an_index_over_a_novel():
    listing = " ".join(f"$f_{{{i}}}$" + f" sympy.module.name{i}" for i in range(60))
    lesson, index, novel = (score(t, 2000)[0] for t in (LESSON, listing, NOVEL))
    assert lesson > 0.7 and novel < 0.01 and novel < index < lesson
    mean, best = score(LESSON[:1000] + NOVEL * 10, 1000)
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
            "member": name,
            "use": "train",
        }
        rows.append(row | {"bytes": len(data), "sha256": "", "url": ""})
    pq.write_table(pa.Table.from_pylist(rows), real / "index.parquet")
    writer = WarcWriter(real / "warc", "2026-01-01")
    body = "".join(f"<p>{part}.</p>" for part in LESSON.replace("$$", "$").split(". "))
    page = f"<html><body><main>{body}<p><math><mi>x</mi></math></p></main></body></html>"
    writer.write_page("https://a.example/lesson", page.encode(), "pip/a/1")
    writer.write_page("https://a.example/novel", f"<html><body><p>{NOVEL}</p></body></html>".encode(), "pip/a/1")
    writer.close()
    own = tmp_path / "own"
    shown = f"<html><body><article><h1>Lesson</h1>{body}<p>{KATEX}</p></article></body></html>"
    records = [
        Record(
            "r0",
            "html",
            shown.encode(),
            path="a.html",
            url="https://own.example/a",
            source="mine",
            licence="CC0",
            lang="en",
        ),
        Record("r1", "html", f"<html><body><p>{NOVEL}</p></body></html>".encode(), source="mine"),
        Record("r2", "pdf", make_pdf([LESSON_PAGE] * 1), path="b.pdf", source="mine"),
        Record("r3", "pdf", b"%PDF-1.4 broken", path="c.pdf", source="mine"),
        Record("r4", "code", b"x = 1", source="mine"),
    ]
    write_records(own, records)
    config = {"max_reject_share": 0.5}
    deps = {"data/acquire": real, "data/ingest": own}
    for run, workers in (("one", 1), ("two", 2)):
        run_stage_for_test(math, config | {"workers": workers}, deps=deps, outs=["data/math"], tmp=tmp_path / run)
    out = tmp_path / "one/data/math"
    for path in (
        "documents/part-00000.parquet",
        "exclusions/part-00000.parquet",
        "rejects/part-00000.jsonl",
        "audit/samples.json",
    ):
        assert (out / path).read_bytes() == (tmp_path / "two/data/math" / path).read_bytes(), path
    rows = list(documents.read_documents(out))
    kept = {Path(json.loads(r["meta"]).get("path") or r["url"] or r["source"]).name: r for r in rows}
    assert set(kept) == {"a.rst", "b.tex", "lesson", "a.html", "b.pdf"} and len(rows) == 5
    assert all(r["domain"] == "math" and r["math_score"] > 0.15 for r in kept.values())
    assert json.loads(kept["a.rst"]["meta"])["formulas"] == 20
    own_page = kept["a.html"]
    assert (own_page["lang"], own_page["url"], json.loads(own_page["meta"])["licence"]) == (
        "en",
        "https://own.example/a",
        "CC0",
    )
    assert "z_0" in latex.math_spans(own_page["text"]) and "x^2 + y_1" in kept["b.pdf"]["text"]
    reasons = {e["source"]: e["reason"] for e in documents.read_exclusions(out)}
    assert reasons == {"it/1/c.rst": "few_formulas", "it/1/d.rst": "too_short", "it/1/e.pdf": "few_formulas"}
    rejects = [json.loads(line) for line in (out / "rejects/part-00000.jsonl").read_text().splitlines()]
    assert {r["id"]: r["reason"] for r in rejects} == {"files/it/f.pdf": "not_pdf", "r3": "truncated"}
    samples = json.loads((out / "audit/samples.json").read_text())
    assert samples["carriers"] == {"mathml": 1, "katex": 1}
    assert samples["sources"]["mine"]["kept"] == 2 and samples["removed"]["too_short"][0]["text"] == "short"
    assert "Removed: few_formulas" in (out / "audit/samples.html").read_text()


def test_units_that_are_done_are_not_read_again(tmp_path, monkeypatch):
    from tasks.mapshuffle import LocalEngine

    real, own = tmp_path / "real", tmp_path / "own"
    (real / "files/it").mkdir(parents=True)
    (real / "files/it/a.rst").write_text(LESSON)
    row = {"item": "it", "version": "1", "path": "files/it/a.rst", "kind": "rst", "domain": "math", "licence": "MIT"}
    row |= {"member": "a.rst", "use": "train", "bytes": len(LESSON), "sha256": "", "url": ""}
    pq.write_table(pa.Table.from_pylist([row]), real / "index.parquet")
    write_records(own, [Record("r0", "pdf", make_pdf([LESSON_PAGE]), path="b.pdf", source="mine")])
    given = {"deps": {"data/acquire": real, "data/ingest": own}, "outs": ["data/math"], "tmp": tmp_path}
    write = documents.write_documents

    def killed(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(documents, "write_documents", killed)
    with pytest.raises(KeyboardInterrupt):
        run_stage_for_test(math, {"workers": 1}, **given)

    class Idle(LocalEngine):
        def _run(self, tasks):
            assert not list(tasks)
            return iter(())

    monkeypatch.setattr(documents, "write_documents", write)
    monkeypatch.setattr(math, "open_engine", lambda config: Idle(config.workers))
    run_stage_for_test(math, {"workers": 1}, **given)
    assert len(list(documents.read_documents(tmp_path / "data/math"))) == 2


@pytest.mark.slow
def test_ray_changes_no_byte(tmp_path):
    pytest.importorskip("ray")
    real, own = tmp_path / "real", tmp_path / "own"
    (real / "files/it").mkdir(parents=True)
    rows = []
    for name, text in (("a.rst", LESSON), ("b.rst", NOVEL), ("c.rst", LESSON + NOVEL), ("d.rst", "short")):
        (real / "files/it" / name).write_text(text)
        row = {
            "item": "it",
            "version": "1",
            "path": f"files/it/{name}",
            "kind": "rst",
            "domain": "math",
            "licence": "MIT",
        }
        rows.append(row | {"member": name, "use": "train", "bytes": len(text), "sha256": "", "url": ""})
    pq.write_table(pa.Table.from_pylist(rows), real / "index.parquet")
    write_records(own, [Record("r0", "pdf", make_pdf([LESSON_PAGE]), path="b.pdf", source="mine")])
    outs = []
    for engine in ("local", "ray"):
        given = {"deps": {"data/acquire": real, "data/ingest": own}, "outs": ["data/math"], "tmp": tmp_path / engine}
        run_stage_for_test(math, {"engine": engine, "workers": 2}, **given)
        out = tmp_path / engine / "data/math"
        files = sorted(p.relative_to(out) for p in out.rglob("*") if p.is_file() and p.name != "manifest.json")
        outs.append({name: (out / name).read_bytes() for name in files})
    assert outs[0] == outs[1] and len(outs[0]) > 3
