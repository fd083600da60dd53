"""TeX sources: macros, inputs, comments, bibliography and figures; hostile and malformed ones are rejected with a reason."""

from __future__ import annotations

import gzip
import random

import pytest

from tasks import latex
from tasks.tex_source import BadTex, decode_tex, expand, parts_of_articles, read_source, take_macros, tex_to_text

ARTICLE = r"""\documentclass{article}
\newcommand{\R}{\mathbb{R}}
\newcommand*\norm[1]{\lVert #1 \rVert}
\newcommand{\pair}[2][x]{(#1, #2)}
\DeclareMathOperator{\sgn}{sgn}
\def\half#1{\frac{#1}{2}}
\title{On $\R$ and more}
\begin{document}
\maketitle % a comment
\section{First}\label{s}
Let $v \in \R^n$ with $\norm{v} = \half{1}$, 50\% of \pair{y} and \pair[z]{y}, $\sgn x$.\cite{knuth}
\begin{verbatim}
% not a comment \R
\end{verbatim}
\begin{figure}\includegraphics{a.png}\caption{What the \emph{figure} shows.}\label{f}\end{figure}
\iffalse hidden \fi
\begin{equation}b = c\end{equation}
\input{part}
\begin{thebibliography}{9}\bibitem{knuth} Knuth.\end{thebibliography}
\end{document}
ignored
"""


def test_an_article():
    text = tex_to_text(ARTICLE, {"part": "From the part: \\(d\\). % gone\n"}.get)
    assert text.startswith(r"\title{On $\mathbb{R}$ and more}")
    for kept in (
        r"\section{First}",
        r"$v \in \mathbb{R}^n$",
        r"$\lVert v \rVert = \frac{1}{2}$",
        r"50\% of (x, y) and (z, y)",
        r"\operatorname{sgn} x",
        "% not a comment \\R",
        r"What the \emph{figure} shows.",
        "From the part: $d$.",
    ):
        assert kept in text, kept
    for gone in (
        "newcommand",
        "a comment\n",
        "a.png",
        "hidden",
        "Knuth",
        "ignored",
        "\\label",
        "\\cite",
        "gone",
        "documentclass",
    ):
        assert gone not in text.replace("not a comment", ""), gone
    assert "b = c" in latex.math_spans(text)


def test_directory(tmp_path):
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts/one.tex").write_text("One has a value of many plain words.")
    (tmp_path / "main.tex").write_text(
        "\\documentclass{a}\\begin{document}\\input{parts/one}\\include{parts/none}\\input{../secret}\\input{/etc/passwd}\\end{document}"
    )
    (tmp_path.parent / "secret.tex").write_text("SECRET")
    (tmp_path / "macros.tex").write_text("\\def\\x{y}" * 500)
    assert read_source(tmp_path) == "One has a value of many plain words."
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadTex, match="no_source"):
        read_source(tmp_path / "empty")


def test_an_input_of_itself_ends(tmp_path):
    document = "\\documentclass{x}\\begin{document}some words of text here and now \\input{a}\\end{document}"
    (tmp_path / "a.tex").write_text(document)
    assert "some words" in read_source(tmp_path / "a.tex")


def test_files_that_an_article_takes_in(tmp_path):
    for name, text in {
        "a": "\\documentclass{x}\\begin{document}\\input{b}\\end{document}",
        "b": "\\input{c}",
        "c": "x",
        "d": "% \\documentclass{x}\n\\input{e}",
        "e": "y",
    }.items():
        (tmp_path / f"{name}.tex").write_text(text)
    found = parts_of_articles(sorted(tmp_path.glob("*.tex")))
    assert {p.name for p in found} == {"b.tex", "c.tex"}


def test_plain_tex_and_old_encodings(tmp_path):
    path = tmp_path / "a.tex.gz"
    path.write_bytes(
        gzip.compress("\\input other\nGr\u00f6\u00dfe und Formeln wie $x$ sind hier.\n\\bye\nignored".encode("latin-1"))
    )
    assert read_source(path) == "Größe und Formeln wie $x$ sind hier."


@pytest.mark.parametrize(
    "data, reason",
    [(b"%PDF-1.4", "binary"), (b"a\0b", "binary"), (b"\x1f\x8bxx", "bad_gzip")],
)
def test_what_is_no_tex(data, reason):
    with pytest.raises(BadTex) as error:
        decode_tex(data)
    assert error.value.reason == reason


def test_malformed_sources(tmp_path):
    with pytest.raises(BadTex, match="unbalanced"):
        tex_to_text("{{" * 50 + " words of a text")
    billion = "\\newcommand{\\a}{" + "x" * 900 + "}" + "".join(
        f"\\newcommand{{\\{b}}}{{{chr(92) + a} " * 1 + (chr(92) + a + " ") * 20 + "}" for a, b in zip("abcdefgh", "bcdefghi")
    )  # fmt: skip
    with pytest.raises(BadTex, match="macro_explosion"):
        tex_to_text(billion + "\\begin{document}\\i\\end{document}")
    (tmp_path / "a.tex").write_text("% only a comment\n\\relax")
    with pytest.raises(BadTex, match="no_text"):
        read_source(tmp_path / "a.tex")


def test_recursive_macros_end():
    text, macros = take_macros(r"\def\a{\b}\def\b{\a x} \a")
    assert "x" in expand(text, macros)


def test_macros_without_their_arguments_stay():
    text, macros = take_macros(r"\newcommand{\f}[2]{#1/#2}\f{1}{2} and \f{1")
    assert expand(text, macros) == r"1/2 and \f{1"


def test_random_damage_never_crashes():
    rng = random.Random(0)
    for _ in range(150):
        data = list(ARTICLE)
        for _ in range(rng.randrange(1, 40)):
            data[rng.randrange(len(data))] = rng.choice("{}\\$%#[]\n ab")
        try:
            tex_to_text("".join(data[: rng.randrange(len(data))]))
        except BadTex:
            pass
