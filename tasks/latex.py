"""Documents with formulas to plain text that keeps the formulas as LaTeX: `$...$` inline, `$$...$$` displayed.

Sources: HTML with MathML, MathJax scripts, KaTeX, alternative texts or TeX delimiters; reStructuredText and MyST Markdown;
TeX. Used by `python -m tasks math`.
"""

from __future__ import annotations

import re
from typing import Any

_MARKUP = re.compile(
    rb"<math[\s>]|math/tex|class=\"[^\"]*\b(math|katex|mwe-math|latex|tex)\b|\\\((?=[^)]{1,200}\\\))|\\\[|\\begin\{(equation|align)",
    re.IGNORECASE,
)
_OPERATORS = {
    "×": r"\times", "÷": r"\div", "±": r"\pm", "∓": r"\mp", "·": r"\cdot", "⋅": r"\cdot", "∗": "*", "−": "-", "≤": r"\le",
    "≥": r"\ge", "≠": r"\ne", "≈": r"\approx", "≡": r"\equiv", "∼": r"\sim", "∝": r"\propto", "∞": r"\infty", "∑": r"\sum",
    "∏": r"\prod", "∫": r"\int", "∮": r"\oint", "∂": r"\partial", "∇": r"\nabla", "√": r"\surd", "∈": r"\in",
    "∉": r"\notin", "∋": r"\ni", "⊂": r"\subset", "⊆": r"\subseteq", "⊃": r"\supset", "⊇": r"\supseteq", "∪": r"\cup",
    "∩": r"\cap", "∅": r"\emptyset", "∀": r"\forall", "∃": r"\exists", "¬": r"\neg", "∧": r"\wedge", "∨": r"\vee",
    "→": r"\to", "←": r"\leftarrow", "↔": r"\leftrightarrow", "⇒": r"\Rightarrow", "⇐": r"\Leftarrow",
    "⇔": r"\Leftrightarrow", "↦": r"\mapsto", "…": r"\dots", "⋯": r"\cdots", "⋮": r"\vdots", "⋱": r"\ddots", "∘": r"\circ",
    "⊕": r"\oplus", "⊗": r"\otimes", "⊥": r"\perp", "∥": r"\parallel", "∣": "|", "⟨": r"\langle", "⟩": r"\rangle",
    "⌊": r"\lfloor", "⌋": r"\rfloor", "⌈": r"\lceil", "⌉": r"\rceil", "′": "'", "″": "''", "ℝ": r"\mathbb{R}",
    "ℂ": r"\mathbb{C}", "ℕ": r"\mathbb{N}", "ℤ": r"\mathbb{Z}", "ℚ": r"\mathbb{Q}", "ℏ": r"\hbar", "ℓ": r"\ell",
    "{": r"\{", "}": r"\}", "%": r"\%", "&": r"\&", "#": r"\#", "\u2061": "", "\u2062": "", "\u2063": "", "\u2064": "",
}  # fmt: skip
_GREEK = {
    "α": "alpha", "β": "beta", "γ": "gamma", "δ": "delta", "ε": "varepsilon", "ϵ": "epsilon", "ζ": "zeta", "η": "eta",
    "θ": "theta", "ϑ": "vartheta", "ι": "iota", "κ": "kappa", "λ": "lambda", "μ": "mu", "ν": "nu", "ξ": "xi", "π": "pi",
    "ρ": "rho", "σ": "sigma", "ς": "varsigma", "τ": "tau", "υ": "upsilon", "φ": "varphi", "ϕ": "phi", "χ": "chi",
    "ψ": "psi", "ω": "omega", "Γ": "Gamma", "Δ": "Delta", "Θ": "Theta", "Λ": "Lambda", "Ξ": "Xi", "Π": "Pi",
    "Σ": "Sigma", "Φ": "Phi", "Ψ": "Psi", "Ω": "Omega",
}  # fmt: skip
_SYMBOLS = _OPERATORS | {k: "\\" + v for k, v in _GREEK.items()}
_FUNCTIONS = frozenset(
    "sin cos tan cot sec csc sinh cosh tanh arcsin arccos arctan exp log ln lim max min sup inf det dim ker gcd deg arg".split()
)
_ACCENTS = {"^": "hat", "ˆ": "hat", "¯": "bar", "‾": "overline", "_": "underline", "~": "tilde", "˜": "tilde", "→": "vec",
            "˙": "dot", "¨": "ddot", "⏞": "overbrace", "⏟": "underbrace"}  # fmt: skip
_BIG = {r"\sum", r"\prod", r"\int", r"\oint", r"\lim", r"\max", r"\min", r"\sup", r"\inf", r"\cup", r"\cap"}


def has_math_markup(html: bytes) -> bool:
    """A cheap test that keeps most pages from being parsed: does this HTML hold MathML or TeX at all?"""
    return bool(_MARKUP.search(html))


def _tokens(text: str) -> str:
    out = ""
    for char in text:
        symbol = _SYMBOLS.get(char, char)
        out += symbol + (" " if symbol.startswith("\\") and symbol[-1].isalpha() else "")
    return out.strip()


def _group(latex: str) -> str:
    return latex if len(latex) == 1 else "{" + latex + "}"


def _children(node: Any) -> list[Any]:
    return [c for c in node.child_nodes if c.node_name and not c.node_name.startswith("#")]


def mathml_to_latex(node: Any) -> str:
    """LaTeX of a (resiliparse) MathML element: its TeX annotation where it has one, else rebuilt from presentation MathML."""
    tag = (node.tag or "").lower().rpartition(":")[2]
    if tag == "math":
        for note in node.get_elements_by_tag_name("annotation"):
            if "tex" in (note.getattr("encoding") or "").lower() and note.text.strip():
                return clean_tex(note.text)
    parts = [mathml_to_latex(c) for c in _children(node) if c.tag and "annotation" not in c.tag.lower()]
    text = node.text.strip() if not parts else ""
    if tag == "mi":
        if len(text) > 1:
            return f"\\{text}" if text in _FUNCTIONS else rf"\mathrm{{{_tokens(text)}}}"
        bold = (node.getattr("mathvariant") or "").startswith("bold")
        return rf"\mathbf{{{_tokens(text)}}}" if bold and text else _tokens(text)
    if tag == "mo":
        return f"\\{text}" if text in _FUNCTIONS else _tokens(text)
    if tag == "mn":
        return _tokens(text)
    if tag in ("mtext", "ms"):
        return rf"\text{{{text}}}" if text else ""
    if tag == "mspace":
        return " "
    if tag == "mfrac" and len(parts) == 2:
        return rf"\frac{{{parts[0]}}}{{{parts[1]}}}"
    if tag == "msqrt":
        return rf"\sqrt{{{_join(parts)}}}"
    if tag == "mroot" and len(parts) == 2:
        return rf"\sqrt[{parts[1]}]{{{parts[0]}}}"
    if tag in ("msup", "mover") and len(parts) == 2:
        mark = _children(node)[1].text.strip()
        if tag == "mover" and mark in _ACCENTS:
            return rf"\{_ACCENTS[mark]}{{{parts[0]}}}"
        return f"{_base(parts[0])}^{_group(parts[1])}"
    if tag in ("msub", "munder") and len(parts) == 2:
        mark = _children(node)[1].text.strip()
        if tag == "munder" and mark in ("_", "⏟"):
            return rf"\{_ACCENTS[mark]}{{{parts[0]}}}"
        return f"{_base(parts[0])}_{_group(parts[1])}"
    if tag in ("msubsup", "munderover") and len(parts) == 3:
        return f"{_base(parts[0])}_{_group(parts[1])}^{_group(parts[2])}"
    if tag == "mfenced":
        opening, closing = node.getattr("open") or "(", node.getattr("close") or ")"
        separator = (node.getattr("separators") or ",")[:1]
        return rf"\left{_tokens(opening)}{separator.join(parts)}\right{_tokens(closing)}"
    if tag == "mtable":
        return r"\begin{matrix}" + r" \\ ".join(parts) + r"\end{matrix}"
    if tag in ("mtr", "mlabeledtr"):
        return " & ".join(parts)
    if tag == "mphantom":
        return ""
    return _join(parts) if parts else _tokens(text)


def _base(latex: str) -> str:
    simple = len(latex) <= 1 or latex in _BIG or re.fullmatch(r"\\[A-Za-z]+(\{[^{}]*\})?", latex)
    return latex if simple else "{" + latex + "}"


def _join(parts: list[str]) -> str:
    out = ""
    for part in parts:
        glued = re.search(r"\\[A-Za-z]+$", out) and part[:1].isalpha()
        out += (" " if glued else "") + part
    return out


def clean_tex(tex: str) -> str:
    """A formula on one line, without comments, labels and outer delimiters."""
    tex = re.sub(r"(?<!\\)%[^\n]*", "", tex)
    tex = re.sub(r"\\(label|tag)\{[^}]*\}", "", tex)
    tex = " ".join(tex.split()).strip().strip("$").strip()
    found = re.fullmatch(r"\\displaystyle\s*(.*)|\{\\displaystyle\s*(.*)\}|\\[(\[](.*)\\[)\]]", tex)
    return next((g.strip() for g in found.groups() if g is not None), tex) if found else tex


def dollars(text: str) -> str:
    r"""`\(...\)` to `$...$` and `\[...\]` to `$$...$$`."""
    text = re.sub(r"\\\((.{1,2000}?)\\\)", lambda m: f"${clean_tex(m[1])}$", text, flags=re.DOTALL)
    return re.sub(r"\\\[(.{1,5000}?)\\\]", lambda m: f"$${clean_tex(m[1])}$$", text, flags=re.DOTALL)


def _put(tree: Any, node: Any, latex: str, display: bool) -> None:
    if latex:
        node.parent.replace_child(tree.create_text_node(f" $${latex}$$ " if display else f" ${latex}$ "), node)
    else:
        node.parent.remove_child(node)


def html_to_text(html: bytes | str, main_content: bool = True) -> str:
    """Plain text of a page with its formulas as LaTeX. Bytes are decoded as the page declares."""
    from resiliparse.extract.html2text import extract_plain_text
    from resiliparse.parse.encoding import detect_encoding
    from resiliparse.parse.html import HTMLTree

    if isinstance(html, bytes):
        tree = HTMLTree.parse_from_bytes(html, detect_encoding(html))
    else:
        tree = HTMLTree.parse(html)
    document = tree.document
    for selector in (
        ".katex-html",
        ".MathJax_Preview",
        "span.MathJax",
        "div.MathJax_Display",
        "mjx-container mjx-math",
    ):
        for node in document.query_selector_all(selector):
            node.parent.remove_child(node)
    for node in document.query_selector_all("script"):
        kind = (node.getattr("type") or "").lower()
        if kind.startswith("math/tex"):
            _put(tree, node, clean_tex(node.text), "display" in kind)
    for node in document.query_selector_all("math"):
        display = (node.getattr("display") or "") == "block" or (node.getattr("mode") or "") == "display"
        _put(tree, node, mathml_to_latex(node), display)
    for node in document.query_selector_all("img[alt]"):
        classes = set((node.getattr("class") or "").lower().split())
        if classes & {"math", "tex", "latex"}:
            _put(tree, node, clean_tex(node.getattr("alt")), False)
        elif any(c.startswith("mwe-math") for c in classes):
            node.parent.remove_child(node)  # the MathML beside it has been taken
    text = dollars(extract_plain_text(tree, main_content=main_content, alt_texts=False, links=False))
    return _tidy(text)


def _tidy(text: str) -> str:
    text = re.sub(r"[ \t]+(?=[,.;:)\]])", "", re.sub(r"[ \t]{2,}", " ", text))
    return re.sub(r"\n{3,}", "\n\n", re.sub(r"[ \t]+\n", "\n", text)).strip()


_ROLE = re.compile(r":(?P<role>[a-z:+-]+):`(?P<text>[^`]*)`", re.IGNORECASE)
_DIRECTIVE = re.compile(r"^(?P<indent>[ \t]*)\.\. (?P<name>[\w:.-]+)::[ \t]*(?P<argument>.*)$")
_DROPPED = frozenset(
    "image figure plot toctree autoclass autofunction automodule automethod autoattribute autosummary module currentmodule"
    " index include only raw inheritance-diagram contents meta highlight py:module py:currentmodule sectionauthor".split()
)


def _role(match: re.Match) -> str:
    name, text = match["role"].rpartition(":")[2], match["text"]
    if name == "math":
        return f"${clean_tex(text)}$"
    return re.sub(r"\s*<[^>]*>$", "", text).lstrip("~!")


def rst_to_text(source: str) -> str:
    """reStructuredText to text: math roles and directives become LaTeX, prose directives keep their content."""
    lines, out, i = source.expandtabs(4).split("\n"), [], 0
    while i < len(lines):
        line = lines[i]
        found = _DIRECTIVE.match(line)
        if not found:
            comment = re.match(r"^\s*\.\. ", line)
            ruler = re.fullmatch(r"([=\-~^\"'#*+.`:_])\1{2,}", line.strip())
            if not comment and not ruler:
                out.append(line)
            i += 1
            continue
        indent, body, i = len(found["indent"]), [], i + 1
        while i < len(lines) and (not lines[i].strip() or len(lines[i]) - len(lines[i].lstrip()) > indent):
            body.append(lines[i].strip() if found["name"] == "math" else lines[i])
            i += 1
        name = found["name"]
        content = [b for b in body if not re.match(r"^\s*:[\w-]+:", b)]
        if name == "math":
            blocks = re.split(r"\n\s*\n", "\n".join([found["argument"], *content]).strip())
            out += [*(f"$${clean_tex(b)}$$" for b in blocks if clean_tex(b)), ""]
        elif name not in _DROPPED:
            out += [found["indent"] + found["argument"], *content] if found["argument"] else content
    text = _ROLE.sub(_role, "\n".join(out))
    text = re.sub(r"`([^`<]+?)\s*<[^>]*>`__?", r"\1", text)
    text = re.sub(r"``(.+?)``", r"`\1`", text).replace("::\n", ":\n")
    # An escaped space separates mark-up in rst; inside a formula it is a space of TeX.
    return _tidy(re.sub(r"(\$\$?.+?\$\$?)|(?<!\\)\\ ", lambda m: m[1] or "", text))


def markdown_to_text(source: str) -> str:
    """Markdown (MyST) to text: math fences and TeX delimiters become `$$`, other fences and the prose stay."""
    text = re.sub(r"\A---\n.*?\n---\n", "", source, flags=re.DOTALL)
    text = re.sub(
        r"^```+\{math\}[^\n]*\n((?::\w+:[^\n]*\n)*)(.*?)^```+[ \t]*$",
        lambda m: f"$${clean_tex(m[2])}$$",
        text,
        flags=re.DOTALL | re.MULTILINE,
    )
    text = re.sub(r"^```+\{(?:eval-rst|toctree|figure|image|plot)\}.*?^```+[ \t]*$", "", text, flags=re.DOTALL | re.M)
    text = re.sub(r"\{([a-z:+-]+)\}`([^`]*)`", lambda m: _role({"role": m[1], "text": m[2]}), text)  # type: ignore[arg-type]
    text = re.sub(r"\[([^\]]+)\]\([^)\s]+\)", r"\1", text)
    return _tidy(dollars(text))


def tex_to_text(source: str) -> str:
    """The body of a TeX file with its LaTeX kept: no preamble, comments, labels, index entries or verbatim white space."""
    source = source.replace("\r\n", "\n")
    found = re.search(r"\\begin\{document\}(.*?)(\\end\{document\}|\Z)", source, re.DOTALL)
    text = found.group(1) if found else source
    text = re.sub(r"^[ \t]*%[^\n]*\n", "", text, flags=re.MULTILINE)
    text = re.sub(r"(?<!\\)%[^\n]*", "", text)
    text = re.sub(
        r"\\(label|index|sindex|cite[tp]?|vspace\*?|hspace\*?|includegraphics(\[[^\]]*\])?)\{[^{}]*\}", "", text
    )
    text = re.sub(
        r"\\(maketitle|tableofcontents|newpage|clearpage|noindent|bigskip|medskip|smallskip|eject)\b[ \t]*", "", text
    )
    return _tidy(dollars(text))


_SPAN = re.compile(
    r"\$\$(?P<d>.+?)\$\$|(?<![\\$\w])\$(?P<i>[^$\n]{1,400}?)(?<![\\\s])\$(?!\d)"
    r"|\\begin\{(equation|align|gather|eqnarray|multline)\*?\}(?P<e>.+?)\\end",
    re.DOTALL,
)


def math_spans(text: str) -> list[str]:
    """The formulas of a text, without their delimiters."""
    return [next(g for g in (m["d"], m["i"], m["e"]) if g is not None).strip() for m in _SPAN.finditer(text)]
