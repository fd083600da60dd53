"""MathML to LaTeX: the TeX annotation where there is one, else presentation MathML, else content MathML.

    python -m tasks.mathml FILE        (prints the LaTeX of every formula of a page)

The input is a small tree of our own (`Node`), made from a parsed page by `from_dom`. Nesting deeper than `MAX_DEPTH` and
formulas of more than `MAX_NODES` elements are a ValueError: pages are written by strangers.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tasks.mathml_symbols import FUNCTIONS, LARGE, OVER, UNDER, VARIANTS, WIDE, alphabet, join, to_latex

MAX_DEPTH = 120
MAX_NODES = 20_000
_TRANSPARENT = frozenset("math mrow mstyle mpadded semantics merror maction none mprescripts menclose".split())
_FENCES = {"(": ")", "[": "]", "{": "}", "|": "|", "‖": "‖", "∥": "∥"}
_MATRICES = {"(": "pmatrix", "[": "bmatrix", "{": "Bmatrix", "|": "vmatrix", "‖": "Vmatrix", "∥": "Vmatrix"}
_INVISIBLE = frozenset("\u2061\u2062\u2063\u2064\u200b")


@dataclass
class Node:
    """An element: lower-case local name, attributes, element children, and its own text with surrounding blanks removed."""

    tag: str
    attributes: dict[str, str] = field(default_factory=dict)
    children: list[Node] = field(default_factory=list)
    text: str = ""

    def get(self, name: str) -> str:
        return self.attributes.get(name, "")

    def all_text(self) -> str:
        return self.text or "".join(c.all_text() for c in self.children)


def dom_children(dom: Any) -> Iterator[Any]:
    """Child nodes in order. resiliparse's own list of them takes time quadratic in its length."""
    child = dom.first_child
    while child is not None:
        following = child.next
        yield child
        child = following


def from_dom(element: Any) -> Node:
    """The tree of a resiliparse element; comments and processing instructions are left out."""
    count = 0

    def build(dom: Any, depth: int) -> Node:
        nonlocal count
        count += 1
        if depth > MAX_DEPTH or count > MAX_NODES:
            raise ValueError(f"MathML of more than {MAX_DEPTH} levels or {MAX_NODES} elements")
        node = Node(dom.tag.lower().rpartition(":")[2], {a: dom.getattr(a) or "" for a in dom.attrs or ()})
        texts = []
        for child in dom_children(dom):
            name = child.node_name or ""
            if name == "#text":
                texts.append(child.text)
            elif name and not name.startswith(("#", "!")):
                node.children.append(build(child, depth + 1))
        text = re.sub(r"\s+", " ", "".join(texts)) if not node.children else ""
        node.text = text if node.tag in ("mtext", "ms") else text.strip()
        return node

    return build(element, 0)


def annotation(node: Node) -> str:
    """The TeX that the formula's author wrote, from `<annotation encoding="...tex">` or an `alttext`; "" without one."""
    stack = [node]
    while stack:
        found = stack.pop()
        if found.tag == "annotation" and re.search(r"tex", found.get("encoding"), re.IGNORECASE) and found.text:
            return found.text
        stack += reversed(found.children)
    alttext = node.get("alttext")
    return alttext if re.search(r"[\\^_{]", alttext) else ""


def is_display(node: Node) -> bool:
    """Whether the formula stands on a line of its own."""
    return node.get("display") == "block" or node.get("mode") == "display"


def to_tex(node: Node) -> str:
    """LaTeX of a `<math>` element without delimiters. ValueError when its nesting is too deep."""
    tex = annotation(node)
    if tex:
        return tex
    return presentation(node)


def presentation(node: Node) -> str:
    """LaTeX of the presentation (or content) tree, whatever annotations stand beside it."""
    from tasks.mathml_content import content, is_content

    semantics = next((c for c in node.children if c.tag == "semantics"), node)
    shown = [c for c in semantics.children if not c.tag.startswith("annotation")]
    if semantics.children and not shown:
        notes = [c for c in semantics.children if c.tag == "annotation-xml" and c.children]
        shown = notes[0].children if notes else []
    if shown and all(is_content(c) for c in shown):
        return " ".join(content(c) for c in shown).strip()
    return row(shown).strip() if shown else to_latex(node.text)


def group(latex: str) -> str:
    """`latex` as one argument of ^ or _."""
    return latex if len(latex) == 1 else "{" + latex + "}"


def row(nodes: Iterable[Node]) -> str:
    """Siblings in a row: a table between fences becomes a matrix or cases, an operator name is told by function application."""
    nodes = [n for n in nodes if not n.tag.startswith("annotation")]
    out, i = "", 0
    while i < len(nodes):
        node = nodes[i]
        opening = node.text if node.tag == "mo" else ""
        if opening in _FENCES and i + 1 < len(nodes):
            table = _only_table(nodes[i + 1])
            closing = nodes[i + 2].text if i + 2 < len(nodes) and nodes[i + 2].tag == "mo" else None
            if table is not None and closing == _FENCES[opening]:
                out, i = join(out, _table(table, _MATRICES[opening])), i + 3
                continue
            if table is not None and opening == "{" and (closing is None or not closing):
                out, i = join(out, _table(table, "cases")), i + (2 if closing is None else 3)
                continue
        if opening == "(" and i + 2 < len(nodes) and nodes[i + 2].text == ")" and _is_binomial(nodes[i + 1]):
            out, i = join(out, convert(nodes[i + 1])), i + 3
            continue
        if node.tag == "mi" and len(node.text) > 1 and node.text not in FUNCTIONS and _applied(nodes, i):
            out = join(out, rf"\operatorname{{{to_latex(node.text)}}}")
        else:
            out = join(out, convert(node))
        i += 1
    return out


def _applied(nodes: list[Node], i: int) -> bool:
    return i + 1 < len(nodes) and nodes[i + 1].tag == "mo" and nodes[i + 1].text == "\u2061"


def _is_binomial(node: Node) -> bool:
    while node.tag in _TRANSPARENT and len(node.children) == 1:
        node = node.children[0]
    return node.tag == "mfrac" and re.fullmatch(r"0(\.0*)?(pt|em|px|ex|in)?", node.get("linethickness")) is not None


def _only_table(node: Node) -> Node | None:
    while node.tag in _TRANSPARENT and len(node.children) == 1:
        node = node.children[0]
    return node if node.tag == "mtable" else None


def _base(node: Node) -> str:
    latex = convert(node)
    if len(latex) <= 1 or re.fullmatch(r"\\[A-Za-z]+(\{([^{}]|\{[^{}]*\})*\})*", latex):
        return latex
    if node.tag in ("mn", "mfenced") or re.fullmatch(r"(\\left)?[(\[|].*[)\]|]", latex):
        return latex
    return "{" + latex + "}"


def _mark(node: Node) -> str:
    return node.all_text().strip() if len(node.all_text().strip()) == 1 else ""


def _stretched(node: Node) -> bool:
    return node.get("stretchy") != "false" and len(node.all_text()) == 1 and node.get("accent") == ""


def _script(node: Node) -> str:
    latex = convert(node).strip()
    return latex if re.fullmatch("'+", latex) else group(latex)


def _scripts(base: str, sub: Node | None, sup: Node | None) -> str:
    out = base
    if sup is not None and (primes := re.match(r"('+)([^'].*)", convert(sup).strip(), re.DOTALL)):
        return _scripts(out, sub, None) + f"^{{{primes[1].replace(chr(39), chr(92) + 'prime ')}{primes[2]}}}"
    if sub is not None and convert(sub).strip():
        out += f"_{group(convert(sub).strip())}"
    if sup is not None and convert(sup).strip():
        script = _script(sup)
        out += script if script[0] == "'" else f"^{script}"
    return out


def _over(node: Node) -> str:
    base, over = node.children
    mark = _mark(over)
    if mark in OVER and base.all_text().strip() not in LARGE:
        command = OVER[mark]
        if len(base.all_text()) > 1 and _stretched(over):
            command = WIDE.get(command, command)
        return rf"\{command}{{{convert(base).strip()}}}"
    if base.tag == "mo" and base.text in "→⟶" and base.text:
        return rf"\xrightarrow{{{convert(over).strip()}}}"
    if base.tag == "mo" and base.text not in LARGE and base.text not in FUNCTIONS and len(base.text) == 1:
        return rf"\overset{{{convert(over).strip()}}}{{{convert(base).strip()}}}"
    return _scripts(_base(base), None, over)


def _under(node: Node) -> str:
    base, under = node.children
    mark = _mark(under)
    if mark in UNDER and base.all_text().strip() not in LARGE and base.all_text().strip() not in FUNCTIONS:
        return rf"\{UNDER[mark]}{{{convert(base).strip()}}}"
    return _scripts(_base(base), under, None)


def _multiscripts(node: Node) -> str:
    base, rest = _base(node.children[0]), node.children[1:]
    split = next((i for i, c in enumerate(rest) if c.tag == "mprescripts"), len(rest))
    after, before = rest[:split], rest[split + 1 :]
    left = "".join(_scripts("", *pair) for pair in zip(before[::2], before[1::2]))
    right = "".join(_scripts("", *pair) for pair in zip(after[::2], after[1::2]))
    return ("{}" + left if left else "") + base + right


def _table(node: Node, environment: str = "") -> str:
    if not environment:
        align = node.get("columnalign").split()
        environment = "aligned" if align[:2] == ["right", "left"] else "matrix"
    rows = []
    for line in node.children:
        cells = line.children[1:] if line.tag == "mlabeledtr" else line.children
        rows.append(" & ".join(row(c.children) if c.children else to_latex(c.text) for c in cells))
    return rf"\begin{{{environment}}}" + r" \\ ".join(rows) + rf"\end{{{environment}}}"


def _fenced(node: Node) -> str:
    opening = node.attributes.get("open", "(")
    closing = node.attributes.get("close", ")")
    separators = node.attributes.get("separators", ",").replace(" ", "")
    if len(node.children) == 1 and (table := _only_table(node.children[0])) is not None:
        if closing == _FENCES.get(opening):
            return _table(table, _MATRICES[opening])
        if opening == "{" and not closing:
            return _table(table, "cases")
    inner = ""
    for i, child in enumerate(node.children):
        if i and separators:
            inner += to_latex(separators[min(i - 1, len(separators) - 1)])
        inner = join(inner, convert(child))
    return join(rf"\left{to_latex(opening) or '.'}", inner) + rf"\right{to_latex(closing) or '.'}"


def _identifier(node: Node) -> str:
    text, variant = node.text, node.get("mathvariant")
    text = "".join(c for c in text if c not in _INVISIBLE)
    if not text:
        return ""
    if text in FUNCTIONS:
        return f"\\{text}"
    if variant in VARIANTS:
        return rf"\{VARIANTS[variant]}{{{to_latex(text)}}}"
    fonts = {alphabet(c)[1] for c in text}
    if len(text) > 1 and len(fonts) == 1 and "" not in fonts:
        return rf"\{fonts.pop()}{{{''.join(alphabet(c)[0] for c in text)}}}"
    if len(text) > 1 and text.isalpha() and variant != "italic":
        return rf"\mathrm{{{to_latex(text)}}}"
    if variant == "normal" and text.isascii() and text.isalpha():
        return rf"\mathrm{{{text}}}"
    return to_latex(text)


def _operator(node: Node) -> str:
    text = node.text
    if text in FUNCTIONS:
        return f"\\{text}"
    if len(text) > 1 and text.isalpha():
        return rf"\operatorname{{{text}}}"
    if text in ("{", "}") and node.get("stretchy") == "true":
        return to_latex(text)
    return to_latex(text)


def _text(node: Node) -> str:
    inner = node.text or node.all_text()
    return r"\text{" + re.sub(r"([%&#$_{}])", r"\\\1", inner) + "}" if inner.strip() else " "


def convert(node: Node) -> str:
    """LaTeX of one presentation element."""
    tag, kids = node.tag, [c for c in node.children if not c.tag.startswith("annotation")]
    if tag == "mi":
        return _identifier(node)
    if tag == "mo":
        return _operator(node)
    if tag == "mn":
        variant = VARIANTS.get(node.get("mathvariant"))
        return rf"\{variant}{{{to_latex(node.text)}}}" if variant else to_latex(node.text)
    if tag in ("mtext", "ms"):
        return _text(node)
    if tag == "mspace":
        width = node.get("width")
        if node.get("linebreak") == "newline":
            return r" \\ "
        em = float(width[:-2]) if re.fullmatch(r"\d*\.?\d+em", width) else 0
        return r"\quad " if em >= 0.9 else r"\, " if em > 0 else " "
    if tag == "mphantom":
        return ""
    if tag == "mfrac" and len(kids) == 2:
        top, bottom = convert(kids[0]).strip(), convert(kids[1]).strip()
        if _is_binomial(node):
            return rf"\binom{{{top}}}{{{bottom}}}"
        return rf"\frac{{{top}}}{{{bottom}}}"
    if tag == "msqrt":
        return rf"\sqrt{{{row(kids).strip()}}}"
    if tag == "mroot" and len(kids) == 2:
        return rf"\sqrt[{convert(kids[1]).strip()}]{{{convert(kids[0]).strip()}}}"
    if tag == "msup" and len(kids) == 2:
        return _scripts(_base(kids[0]), None, kids[1])
    if tag == "msub" and len(kids) == 2:
        return _scripts(_base(kids[0]), kids[1], None)
    if tag in ("msubsup", "munderover") and len(kids) == 3:
        return _scripts(_base(kids[0]), kids[1], kids[2])
    if tag == "mover" and len(kids) == 2:
        return _over(Node(tag, node.attributes, kids))
    if tag == "munder" and len(kids) == 2:
        return _under(Node(tag, node.attributes, kids))
    if tag == "mmultiscripts" and kids:
        return _multiscripts(Node(tag, node.attributes, kids))
    if tag == "mfenced":
        return _fenced(node)
    if tag == "mtable":
        return _table(node)
    if tag in ("mtr", "mlabeledtr"):
        return " & ".join(convert(c) for c in kids)
    if tag == "menclose":
        inner = row(kids)
        notation = node.get("notation").split()
        command = {"box": "boxed", "updiagonalstrike": "cancel", "top": "overline", "bottom": "underline"}
        name = next((command[n] for n in notation if n in command), "")
        return rf"\{name}{{{inner}}}" if name else inner
    return row(kids) if kids else to_latex(node.text)


def main() -> None:
    from resiliparse.parse.html import HTMLTree

    tree = HTMLTree.parse(Path(sys.argv[1]).read_text(encoding="utf-8"))
    for element in tree.document.query_selector_all("math"):
        print(to_tex(from_dom(element)))


if __name__ == "__main__":
    main()
