r"""Mathematics from HTML, PDF and TeX: how much of what the author wrote comes back.

    python -m tests.bench.math_science mathml [--node-modules DIR]
    python -m tests.bench.math_science pdf DIR [DIR ...] [--half held]
    python -m tests.bench.math_science html DIR [DIR ...]
    python -m tests.bench.math_science tex DIR [DIR ...]

`pdf` compares the text of PDFs with the TeX source beside them (Debian's pari-doc and texlive-science-doc ship both: `apt-get
download`, `dpkg-deb -x`). The source is read by tasks/tex_source.py and freed of its commands (`detex`); both sides are
brought to one form (`comparable`); the figure is 1 - Levenshtein distance / longer length, over the first `--chars`
characters. Pairs whose source is less than half or more than twice as long as pdfium's own text are no pairs (documents made
by macros or from other files) and left out for every method. Halves are by package, so that nothing chosen on one is measured
on it again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import time
import unicodedata
from collections.abc import Iterator
from pathlib import Path

from tasks import latex, tex_source
from tasks.mathml_symbols import SYMBOLS

_SAME = {
    r"\rightarrow": r"\to", r"\le": r"\leq", r"\ge": r"\geq", r"\ne": r"\neq", r"\dots": r"\ldots", r"\land": r"\wedge",
    r"\lor": r"\vee", r"\lnot": r"\neg", r"\gets": r"\leftarrow", r"\lbrace": r"\{", r"\rbrace": r"\}", r"\lvert": "|",
    r"\rvert": "|", r"\vert": "|", r"\lVert": r"\Vert", r"\rVert": r"\Vert", r"\|": r"\Vert", r"\dfrac": r"\frac",
    r"\tfrac": r"\frac", r"\prime": "'", r"\cdots": r"\ldots", r"\dotsc": r"\ldots", r"\dotsb": r"\ldots", r"\colon": ":",
    r"\lbrack": "[", r"\rbrack": "]", r"\operatorname": r"\mathrm", r"\text": r"\mathrm", r"\textrm": r"\mathrm",
    r"\mbox": r"\mathrm", r"\rm": r"\mathrm", r"\bf": r"\mathbf", r"\pmb": r"\mathbf", r"\boldsymbol": r"\mathbf",
    r"\bm": r"\mathbf", r"\mathit": "", r"\varnothing": r"\emptyset", r"\epsilon": r"\varepsilon", r"\phi": r"\varphi",
    r"\asymp": r"\asymp", r"\over": r"\frac", r"\widehat": r"\hat", r"\widetilde": r"\tilde", r"\overline": r"\bar",
    r"\ast": "*", r"\mid": "|", r"\parallel": r"\Vert", r"\bot": r"\perp", r"\Longleftrightarrow": r"\iff",
    r"\mathscr": r"\mathcal", r"\cal": r"\mathcal", r"\dbinom": r"\binom", r"\tbinom": r"\binom", r"\choose": r"\binom",
    r"\smallsetminus": r"\setminus", r"\implies": r"\Longrightarrow", r"\sb": "_", r"\sp": "^", r"\bmod": r"\mathrm mod",
}  # fmt: skip
_NOTHING = frozenset(
    r"\, \; \: \! \quad \qquad \left \right \big \Big \bigg \Bigg \bigl \bigr \Bigl \Bigr \biggl \biggr \displaystyle \limits"
    r" \nolimits \textstyle \scriptstyle \middle \mathopen \mathclose \mathrel \mathbin \mathord \nonumber \notag \mathstrut"
    r" \hspace \enspace \thinspace \hfill \mathrm \mathop \mathstrut \phantom".split()
) | {r"\ "}
_ARGUMENT = r"(?:\s*(?:\{(?:[^{}]|\{[^{}]*\})*\}|\\[A-Za-z]+|[^\s{}\\]))"


def normalise_tex(tex: str) -> str:
    """TeX up to what no reader sees: aliases, sizes, spacing, upright type, braces, blanks, the name of a table environment."""
    tex = re.sub(r"\\(begin|end)\{(\w+)\*?\}(\{[lcr|@{}! ]*\})?", "", tex)
    tex = re.sub(r"\\\\?\[[-.\\d]+\\w+\]", " ", tex)
    tex = re.sub(rf"'(_{_ARGUMENT})", r"\1'", tex)
    tex = re.sub(rf"(\^{_ARGUMENT})\s*(_{_ARGUMENT})", r"\2\1", tex)
    tokens = re.findall(r"\\(?:[A-Za-z]+|.)|[^\s{}]", tex)
    out = [_SAME.get(t, t) for t in tokens]
    return "".join(t for t in out if t not in _NOTHING and t != "~")


# PDF against TeX

_UNICODE = {command[1:]: char for char, command in reversed(SYMBOLS.items()) if re.fullmatch(r"\\[A-Za-z]+", command)}
_UNICODE |= {
    "le": "≤", "ge": "≥", "ne": "≠", "rightarrow": "→", "dots": "…", "ldots": "…", "cdots": "⋯", "quad": " ", "qquad": " ",
    "epsilon": "ε", "phi": "φ", "land": "∧", "lor": "∨", "LaTeX": "LaTeX", "TeX": "TeX", "ss": "ß", "o": "ø", "ae": "æ",
    "textbackslash": "\\", "vert": "|", "gets": "←", "colon": ":", "item": "• ", "prime": "′", "textasciitilde": "~",
}  # fmt: skip
_UNICODE |= {f: f for f in "sin cos tan log ln exp lim max min sup inf det dim ker gcd deg arg mod".split()}
_ACCENTS = {
    "'": "\u0301",
    "`": "\u0300",
    "^": "\u0302",
    '"': "\u0308",
    "~": "\u0303",
    "c": "\u0327",
    "v": "\u030c",
    "=": "\u0304",
}


def detex(text: str) -> str:
    """LaTeX without its commands: their arguments stay, symbols become characters, ^ and _ stay."""
    text = re.sub(
        r"\\begin\{(?:tabular|array|longtable|tabularx|minipage|multicols|list|enumerate|itemize)\*?\}(\[[^\]]*\])?(\{[^{}]*\})*",
        " ",
        text,
    )
    text = re.sub(r"\\(?:begin|end)\s*\{[^{}]*\}(\[[^\]]*\])?", " ", text)
    text = re.sub(r"\\(?:verb|lstinline)\*?([^\sA-Za-z*{])(.*?)\1", r"\2", text)
    text = re.sub(
        r"\\(?:ref|eqref|pageref|url|href|color|textcolor|fontsize|selectfont|hbox to)\s*\{[^{}]*\}", " ", text
    )
    text = re.sub(
        r"\\(['`^\"~=]|[cv](?![A-Za-z]))\s*\{?\\?([A-Za-z])\}?",
        lambda m: unicodedata.normalize("NFC", m[2] + _ACCENTS.get(m[1], "")), text,
    )  # fmt: skip
    text = re.sub(
        r"\\(?:,|;|:|!| |/|-|\\(?:\[[^\]]*\])?)", lambda m: "" if m[0] in (r"\!", r"\-", r"\/", r"\,") else " ", text
    )
    text = re.sub(r"\\([A-Za-z@]+)\*?[ \t]*", lambda m: _UNICODE.get(m[1], ""), text)
    text = re.sub(r"\\([%&#$_{}])", r"\1", text).replace("~", " ")
    return re.sub(r"\$+|(?<=\s)&(?=\s)|(?<!\\)[{}]", "", text)


def comparable(text: str) -> str:
    """One form for both sides: compatibility characters, quotes, dashes and primes unified, braces and runs of blanks gone."""
    text = unicodedata.normalize("NFKC", text)
    table = {"“": '"', "”": '"', "‘": "'", "’": "'", "′": "'", "–": "-", "—": "-", "−": "-", "…": "...", "⋯": "...", "·": "⋅",
             "ϵ": "ε", "ϕ": "φ", "∗": "*", "∣": "|", "µ": "μ", "•": ""}  # fmt: skip
    text = text.replace("``", '"').replace("''", '"')
    text = "".join(table.get(c, c) for c in text)
    text = re.sub(r"-{2,}", "-", text).replace(". . .", "...")
    return re.sub(r"\s+", " ", re.sub(r"[{}]", "", text)).strip()


def pairs(roots: list[Path]) -> Iterator[tuple[str, Path, Path]]:
    """(package directory, PDF, TeX source) wherever both stand beside each other."""
    for root in roots:
        for pdf in sorted(root.rglob("*.pdf")):
            for source in (pdf.with_suffix(".tex"), pdf.with_suffix(".tex.gz")):
                if source.is_file():
                    yield pdf.parent.relative_to(root).as_posix(), pdf, source
                    break


def half(package: str) -> str:
    """ "development" or "held": by the package's name alone."""
    return ("development", "held")[hashlib.sha256(package.encode()).digest()[0] & 1]


METHODS = ("pypdfium2", "lines", "+columns", "+scripts", "+heads", "+strip", "+hyphens", "+footnotes")
_SWITCHES = {
    "+columns": "columns",
    "+scripts": "scripts",
    "+heads": "heads",
    "+strip": "strip",
    "+hyphens": "hyphens",
    "+footnotes": "notes",
}


def _texts(path: Path, seconds: dict[str, float], max_pages: int) -> tuple[dict[str, str], int]:
    """Text of a PDF per method, and pages."""
    import pypdfium2

    from tasks.pdf_chars import page_runs
    from tasks.pdf_layout import page_lines
    from tasks.pdf_text import clean

    document = pypdfium2.PdfDocument(path.read_bytes())
    count = min(len(document), max_pages)
    start = time.process_time()
    plain = []
    for i in range(count):
        text_page = document[i].get_textpage()
        plain.append(text_page.get_text_range())
        text_page.close()
    seconds["pypdfium2"] = seconds.get("pypdfium2", 0) + time.process_time() - start
    found = {"pypdfium2": "\n".join(plain)}
    start = time.process_time()
    runs = [page_runs(document[i], 10**6) for i in range(count)]
    shared = time.process_time() - start
    for number, method in enumerate(METHODS[1:], 1):
        on = {_SWITCHES[m]: METHODS.index(m) <= number for m in _SWITCHES}
        start = time.process_time()
        pages = [page_lines(r, scripts=on["scripts"], columns=on["columns"]) for r in runs]
        found[method] = clean(pages, on["heads"], on["strip"], on["hyphens"], on["notes"]).text
        seconds[method] = seconds.get(method, 0) + shared + time.process_time() - start
    document.close()
    return found, count


def measure_pdf(roots: list[Path], which: str, limit: int, max_pages: int, chars: int, worst: int) -> None:
    from rapidfuzz.distance import Levenshtein

    rows: list[tuple[str, str, dict[str, float]]] = []
    seconds: dict[str, float] = {}
    pages = left = 0
    for package, pdf, source in pairs(roots):
        part = half(package)
        if which not in ("both", part) or (limit and len(rows) >= limit):
            continue
        try:
            gold = comparable(detex(tex_source.read_source(source)))
        except tex_source.BadTex:
            left += 1
            continue
        texts, count = _texts(pdf, seconds, max_pages)
        forms = {m: comparable(t) for m, t in texts.items()}
        whole = len(forms["pypdfium2"])
        if not 0.5 < len(gold) / max(1, whole) < 2.0:
            left += 1
            continue
        pages += count
        scores = {m: Levenshtein.normalized_similarity(f[:chars], gold[:chars]) for m, f in forms.items()}
        rows.append((part, f"{package}/{pdf.name}", scores))
    for part in ("development", "held"):
        own = [r[2] for r in rows if r[0] == part]
        if own:
            print(f"\n{part}: {len(own)} pairs")
            for method in METHODS:
                values = sorted(r[method] for r in own)
                print(f"  {method:12} mean {sum(values) / len(values):.4f}  median {values[len(values) // 2]:.4f}")
    total = {m: s for m, s in seconds.items()}
    print(f"\n{pages} pages of {len(rows)} pairs, {left} left out")
    print(f"pages/s of one core: pypdfium2 {pages / total['pypdfium2']:.0f}, ours {pages / total[METHODS[-1]]:.0f}")
    for _, name, scores in sorted(rows, key=lambda r: r[2][METHODS[-1]] - r[2][METHODS[0]])[:worst]:
        print(f"  {name}  " + "  ".join(f"{m} {scores[m]:.3f}" for m in METHODS))


# MathML against TeX


def _formulas(directory: Path) -> list[str]:
    """Distinct formulas of the corpus' reStructuredText and Markdown files."""
    from tasks.texts import read_index

    readers = {"rst": latex.rst_to_text, "md": latex.markdown_to_text}
    found: dict[str, None] = {}
    for row in read_index(directory):
        if row["kind"] in readers and row["domain"] == "math":
            text = readers[row["kind"]]((directory / row["path"]).read_text(encoding="utf-8"))
            found.update(dict.fromkeys(" ".join(f.split()) for f in latex.math_spans(text) if len(f) < 400))
    return list(found)


_KATEX = """const katex=require('katex');const out=[];for(const f of JSON.parse(require('fs').readFileSync(0,'utf8')))
{try{out.push([f,katex.renderToString(f,{output:'mathml',throwOnError:true,strict:'ignore'})])}catch(e){}}
process.stdout.write(JSON.stringify(out))"""


def _compare(name: str, made: list[tuple[str, str]]) -> None:
    from rapidfuzz.distance import Levenshtein
    from resiliparse.parse.html import HTMLTree

    from tasks import mathml

    exact, total, failed = 0, 0.0, 0
    start = time.process_time()
    for formula, html in made:
        try:
            node = mathml.from_dom(HTMLTree.parse(html).document.query_selector("math"))
            back = mathml.presentation(node)
        except ValueError:
            failed += 1
            continue
        a, b = normalise_tex(formula), normalise_tex(back)
        exact += a == b
        total += Levenshtein.normalized_similarity(a, b)
    rate = len(made) / max(1e-9, time.process_time() - start)
    print(
        f"{name:14} {len(made)} formulas: equal after normalisation {exact / len(made):.3f}, similarity {total / len(made):.4f},"
        f" failed {failed}, {rate:.0f} formulas/s"
    )


def measure_mathml(corpus: Path, modules: Path | None) -> None:
    formulas = _formulas(corpus)
    try:
        from latex2mathml import converter
    except ImportError:
        print("latex2mathml: not installed, skipped")
    else:
        made = []
        for formula in formulas:
            try:
                made.append((formula, converter.convert(formula)))
            except Exception:  # the peer does not know every command
                continue
        _compare("latex2mathml", made)
    if modules is None:
        print("KaTeX: --node-modules not given, skipped")
        return
    environment = {**os.environ, "NODE_PATH": str(modules)}
    done = subprocess.run(
        ["node", "-e", _KATEX], input=json.dumps(formulas), capture_output=True, text=True, env=environment
    )
    if done.returncode:
        print(f"KaTeX: skipped, node said {done.stderr.strip().splitlines()[-1:]}")
        return
    _compare("KaTeX", [tuple(pair) for pair in json.loads(done.stdout)])


def measure_html(roots: list[Path]) -> None:
    """Sphinx pages against the reStructuredText they were made from (`_sources/`): how many of the source's formulas the page's
    text holds, by our extraction and by the extractor alone with TeX delimiters replaced."""
    from collections import Counter

    from tasks.extract import extract_page
    from tasks.math_html import extract_math_page, has_math_markup

    gold_total = pages = lost = 0
    hits: Counter[str] = Counter()
    seconds: Counter[str] = Counter()
    carriers: Counter[str] = Counter()
    for source in sorted(p for root in roots for p in root.rglob("_sources/**/*.rst*")):
        folder = next(p for p in source.parents if p.name == "_sources")
        page = folder.parent / source.relative_to(folder).as_posix().replace(".rst.txt", ".html").replace(
            ".rst", ".html"
        )
        if not page.is_file():
            continue
        body = page.read_bytes()
        gold = Counter(map(normalise_tex, latex.math_spans(latex.rst_to_text(source.read_text(encoding="utf-8")))))
        if not gold or not has_math_markup(body):
            continue
        pages += 1
        gold_total += gold.total()
        start = time.process_time()
        found = extract_math_page(body)
        seconds["ours"] += time.process_time() - start
        start = time.process_time()
        alone = latex.dollars(extract_page(body).text)
        seconds["extractor alone"] += time.process_time() - start
        carriers.update(found.carriers)
        lost += found.lost
        for name, text in (("ours", found.page.text), ("extractor alone", alone)):
            hits[name] += (gold & Counter(map(normalise_tex, latex.math_spans(text)))).total()
    print(
        f"{pages} pages, {gold_total} formulas in their sources; carriers {dict(carriers)}, {lost} outside of the main content"
    )
    for name in ("extractor alone", "ours"):
        rate = pages / max(1e-9, seconds[name])
        print(f"  {name:16} {hits[name] / max(1, gold_total):.4f} of them in the text, {rate:.0f} pages/s")


def measure_tex(roots: list[Path]) -> None:
    """Every TeX file below the directories through tasks/tex_source.py: read, rejected with a reason, or crashed."""
    outcome: dict[str, int] = {}
    size = 0
    start = time.process_time()
    for path in sorted(
        p for root in roots for p in root.rglob("*") if p.name.endswith((".tex", ".tex.gz")) and p.is_file()
    ):
        try:
            size += len(tex_source.read_source(path))
            reason = "read"
        except tex_source.BadTex as error:
            reason = error.reason
        except Exception as error:
            reason = "CRASH"
            print(f"{path}: {error!r}")
        outcome[reason] = outcome.get(reason, 0) + 1
    print(f"{outcome}, {size / 1e6:.2f} M characters, {size / 1e6 / (time.process_time() - start):.2f} M characters/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    pdf = commands.add_parser("pdf")
    pdf.add_argument("directories", nargs="+", type=Path)
    pdf.add_argument("--half", choices=("both", "development", "held"), default="both")
    pdf.add_argument("--limit", type=int, default=0)
    pdf.add_argument("--max-pages", type=int, default=60)
    pdf.add_argument("--chars", type=int, default=100_000)
    pdf.add_argument("--worst", type=int, default=0)
    one = commands.add_parser("mathml")
    one.add_argument("--corpus", type=Path, default=Path("data/acquire"))
    one.add_argument("--node-modules", type=Path)
    commands.add_parser("html").add_argument("directories", nargs="+", type=Path)
    commands.add_parser("tex").add_argument("directories", nargs="+", type=Path)
    args = parser.parse_args()
    if args.command == "pdf":
        measure_pdf(args.directories, args.half, args.limit, args.max_pages, args.chars, args.worst)
    elif args.command == "mathml":
        measure_mathml(args.corpus, args.node_modules)
    elif args.command == "html":
        measure_html(args.directories)
    else:
        measure_tex(args.directories)


if __name__ == "__main__":
    main()
