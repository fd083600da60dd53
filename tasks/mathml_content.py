"""Content MathML to LaTeX: what a formula means (`apply`, `ci`, `cn`) written as it is usually set. Used by tasks/mathml.py."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from tasks.mathml_symbols import FUNCTIONS, join, to_latex

if TYPE_CHECKING:
    from tasks.mathml import Node

_NARY = {
    "plus": "+", "minus": "-", "times": " ", "eq": "=", "neq": r"\neq ", "lt": "<", "gt": ">", "leq": r"\leq ", "geq": r"\geq ",
    "and": r"\wedge ", "or": r"\vee ", "xor": r"\oplus ", "implies": r"\Rightarrow ", "equivalent": r"\equiv ",
    "approx": r"\approx ", "in": r"\in ", "notin": r"\notin ", "subset": r"\subseteq ", "prsubset": r"\subset ",
    "union": r"\cup ", "intersect": r"\cap ", "setdiff": r"\setminus ", "cartesianproduct": r"\times ", "compose": r"\circ ",
    "vectorproduct": r"\times ", "scalarproduct": r"\cdot ", "outerproduct": r"\otimes ", "tendsto": r"\to ", "rem": r"\bmod ",
}  # fmt: skip
_CONSTANTS = {
    "pi": r"\pi", "infinity": r"\infty", "exponentiale": "e", "imaginaryi": "i", "emptyset": r"\emptyset", "reals": r"\mathbb{R}",
    "integers": r"\mathbb{Z}", "naturalnumbers": r"\mathbb{N}", "rationals": r"\mathbb{Q}", "complexes": r"\mathbb{C}",
    "primes": r"\mathbb{P}", "true": r"\text{true}", "false": r"\text{false}", "eulergamma": r"\gamma",
}  # fmt: skip
_BIG = {"sum": r"\sum", "product": r"\prod", "int": r"\int", "limit": r"\lim"}
_LOOSE = frozenset(("plus", "minus"))
_TAGS = (
    frozenset("apply ci cn csymbol vector matrix set list interval lambda piecewise reln bind cs".split())
    | frozenset(_CONSTANTS)
)  # fmt: skip


def is_content(node: Node) -> bool:
    """Whether the element belongs to content MathML."""
    return node.tag in _TAGS


def _operator(node: Node) -> str:
    return node.children[0].tag if node.tag in ("apply", "reln") and node.children else ""


def _tight(node: Node) -> str:
    """An operand under a stronger operator: sums are put in parentheses."""
    latex = content(node)
    return rf"\left({latex}\right)" if _operator(node) in _LOOSE and len(node.children) > 2 else latex


def _limits(kids: list[Node]) -> tuple[str, str, list[Node], list[Node]]:
    low = high = ""
    variables: list[Node] = []
    rest: list[Node] = []
    for kid in kids:
        if kid.tag == "bvar":
            variables += [c for c in kid.children if c.tag != "degree"]
        elif kid.tag == "lowlimit":
            low = " ".join(map(content, kid.children))
        elif kid.tag == "uplimit":
            high = " ".join(map(content, kid.children))
        elif kid.tag in ("condition", "domainofapplication"):
            low = " ".join(map(content, kid.children))
            variables = []
        elif kid.tag == "interval" and len(kid.children) == 2 and not low:
            low, high = content(kid.children[0]), content(kid.children[1])
        else:
            rest.append(kid)
    return low, high, variables, rest


def _big(name: str, kids: list[Node]) -> str:
    low, high, variables, rest = _limits(kids)
    names = ",".join(map(content, variables))
    if name == "limit":
        under = f"{names}\\to {low}" if names else low
    else:
        under = f"{names}={low}" if names and low and name != "int" else low or (names if name != "int" else "")
    out = _BIG[name] + (f"_{{{under}}}" if under else "") + (f"^{{{high}}}" if high else "")
    body = " ".join(map(_tight, rest))
    return join(out, body) + (rf"\,d{names}" if name == "int" and names else "")


def _apply(node: Node) -> str:
    operator, *kids = node.children
    name = operator.tag
    if name in _BIG:
        return _big(name, kids)
    if name in ("diff", "partialdiff"):
        _, _, variables, rest = _limits(kids)
        d = "d" if name == "diff" else r"\partial "
        names = "".join(d + content(v) for v in variables) or "dx"
        return rf"\frac{{{d.strip()}}}{{{names}}}" + " ".join(map(_tight, rest))
    qualifiers = {k.tag: k for k in kids if k.tag in ("degree", "logbase")}
    kids = [k for k in kids if k.tag not in ("degree", "logbase", "bvar")]
    inner = [content(k) for k in kids]
    if name == "minus" and len(kids) == 1:
        return f"-{_tight(kids[0])}"
    if name == "divide" and len(kids) == 2:
        return rf"\frac{{{inner[0]}}}{{{inner[1]}}}"
    if name == "power" and len(kids) == 2:
        base = inner[0] if len(inner[0]) == 1 or kids[0].tag != "apply" else rf"\left({inner[0]}\right)"
        return f"{base}^{{{inner[1]}}}"
    if name == "root" and kids:
        degree = " ".join(map(content, qualifiers["degree"].children)) if "degree" in qualifiers else ""
        return rf"\sqrt{f'[{degree}]' if degree not in ('', '2') else ''}{{{inner[-1]}}}"
    if name in ("abs", "card", "determinant") and kids:
        return rf"\left|{inner[0]}\right|"
    if name in ("floor", "ceiling") and kids:
        side = "floor" if name == "floor" else "ceil"
        return rf"\left\l{side} {inner[0]}\right\r{side}"
    if name == "factorial" and kids:
        return f"{_tight(kids[0])}!"
    if name in ("not", "forall", "exists"):
        command = {"not": r"\neg", "forall": r"\forall", "exists": r"\exists"}[name]
        bound = ",".join(content(v) for v in _limits(node.children[1:])[2])
        return join(join(command, bound), (" " if bound else "") + " ".join(inner))
    if name == "times":
        out = ""
        for kid in kids:
            out = join(out, _tight(kid))
        return out
    if name in _NARY:
        return _NARY[name].join(inner)
    if name == "log" and "logbase" in qualifiers:
        return rf"\log_{{{' '.join(map(content, qualifiers['logbase'].children))}}}" + rf"\left({inner[0]}\right)"
    head = f"\\{name}" if name in FUNCTIONS else content(operator) if operator.text or operator.children else name
    return rf"{head}\left({','.join(inner)}\right)"


def content(node: Node) -> str:
    """LaTeX of one content element; presentation elements inside of `ci` are converted as such."""
    from tasks.mathml import convert, row

    tag, kids = node.tag, node.children
    if tag in ("apply", "reln", "bind") and kids:
        return _apply(node)
    if tag in _CONSTANTS:
        return _CONSTANTS[tag]
    if tag == "cn":
        parts = [p for p in re.split(r"\s+", node.all_text().strip()) if p]
        if node.get("type") == "rational" and len(parts) == 2:
            return rf"\frac{{{parts[0]}}}{{{parts[1]}}}"
        if node.get("type") == "e-notation" and len(parts) == 2:
            return rf"{parts[0]}\times 10^{{{parts[1]}}}"
        return "".join(parts)
    if tag in ("ci", "csymbol", "cs"):
        if kids:
            return row(kids)
        return to_latex(node.text) if len(node.text) <= 1 else rf"\mathrm{{{to_latex(node.text)}}}"
    if tag in ("set", "list", "vector", "interval"):
        left, right = {"set": (r"\{", r"\}"), "vector": ("(", ")"), "interval": ("[", "]")}.get(tag, ("(", ")"))
        return left + ",".join(map(content, kids)) + right
    if tag == "matrix":
        return r"\begin{pmatrix}" + r" \\ ".join(" & ".join(map(content, r.children)) for r in kids) + r"\end{pmatrix}"
    if tag == "piecewise":
        rows = [" & ".join(map(content, p.children)) for p in kids]
        return r"\begin{cases}" + r" \\ ".join(rows) + r"\end{cases}"
    if tag == "lambda":
        _, _, variables, rest = _limits(kids)
        return rf"{','.join(map(content, variables))}\mapsto " + " ".join(map(content, rest))
    return convert(node)
