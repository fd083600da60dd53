r"""Pages to text with their formulas as LaTeX, in place: `$...$` inline, `$$...$$` displayed.

    python -m tasks.math_html page.html

Every formula is taken out of the page before its main content is found and is put back into the extracted text, so that
the extractor (tasks/extract.py) sees a word where a formula stood. Carriers, each with its own rule in `CARRIERS`: MathJax 2
scripts (`math/tex`), MathJax 3 containers with assistive MathML, KaTeX (`katex-mathml`; the visible copy is dropped), MathML
(tasks/mathml.py), images whose alternative text is LaTeX (Wikipedia, WordPress, Sphinx), and TeX delimiters in the text.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, unquote_plus

from tasks.extract import MAX_TAGS, Extracted, NotText, decode_html, extract_page
from tasks.latex import clean_tex, math_spans
from tasks.mathml import annotation, dom_children, from_dom, is_display, presentation

_MARKUP = re.compile(
    rb"<(?:\w+:)?math[\s>]|math/(?:tex|asciimath)|class=[\"']?[^\"'=>]*\b(?:math|katex|mwe-math\S*|latex|tex|mjx\S*|MathJax\w*)\b"
    rb"|<mjx-container|\sdata-(?:latex|tex)=|latex\.(?:php\?|codecogs\.com/)|\\\((?=[^)]{1,300}\\\))|\\\[|\\begin\{(?:equation|align|gather|multline|eqnarray)|<img[^<>]+alt=[\"']\$",
    re.IGNORECASE,
)
_IMAGE_CLASSES = frozenset(
    "math tex latex mathtex math-tex mathjax_svg latex_img mwe-math-fallback-image-inline".split()
)
_DISPLAY_CLASSES = frozenset("math-display display mwe-math-fallback-image-display displaymath katex-display".split())
_SKIPPED = frozenset("script style pre code textarea noscript template kbd samp svg annotation".split())
# Copies for the eye of what another element says in TeX or MathML, by class.
_COPIES = frozenset(
    "katex-html mathjax_preview mjx_assistive_mathml mathjax mathjax_svg mathjax_chtml mathjax_display mathjax_svg_display"
    " mjx-chtml".split()
)
_ENVIRONMENTS = r"equation|align|gather|multline|eqnarray|alignat|flalign|displaymath"
_DELIMITED = re.compile(
    r"\\\((?P<i>.{1,2000}?)\\\)|\\\[(?P<d>.{1,8000}?)\\\]|\$\$(?P<dd>[^$]{1,8000}?)\$\$"
    rf"|(?P<e>\\begin\{{(?P<n>(?:{_ENVIRONMENTS})\*?)\}}.{{1,8000}}?\\end\{{(?P=n)\}})",
    re.DOTALL,
)
_SINGLE = re.compile(r"(?<![\\$\w])\$(?P<s>[^$\n]{1,400}?)(?<![\\\s])\$(?![\d$])")
_DOLLARS_DECLARED = re.compile(r"inlineMath\s*[:=]\s*\[\s*\[\s*['\"]\$|class=\"[^\"]*tex2jax_process", re.IGNORECASE)
_TEX_LIKE = re.compile(r"\\[A-Za-z]{2,}|[\^_]|[=<>+]|^\s*[A-Za-z]'*\s*$")
_MARK = re.compile(r"(?:(?<!\s)\s++)?xmathq(\d+)qx\s*")
_MAX_FORMULA = 20_000
_WRITTEN = frozenset("math mathquill-embedded-latex".split())
_DRAWN = re.compile(r"latex\.(?:php\?(?:[^#?]*&)?latex=(?P<php>[^&#]+)|codecogs\.com/\w+(?:\.\w+)?\?(?P<cgi>[^#]+))")


@dataclass
class MathPage:
    """`page.text` holds the formulas; `carriers` counts them by what carried them; `lost` formulas are not in the text
    because they stood outside of the main content."""

    page: Extracted
    carriers: Counter[str] = field(default_factory=Counter)
    lost: int = 0


def has_math_markup(html: bytes) -> bool:
    """A cheap test that keeps most pages from being parsed: does this HTML hold MathML or TeX at all?"""
    return bool(_MARKUP.search(html))


class _Formulas:
    def __init__(self, tree: Any):
        self.tree = tree
        self.found: list[tuple[str, bool]] = []
        self.carriers: Counter[str] = Counter()

    def mark(self, tex: str, display: bool, carrier: str) -> str:
        tex = clean_tex(tex)[:_MAX_FORMULA].strip()
        if not tex:
            return " "
        self.found.append((tex, display))
        self.carriers[carrier] += 1
        return f" xmathq{len(self.found) - 1}qx "

    def put(self, node: Any, tex: str, display: bool, carrier: str) -> None:
        """Replace an element by its formula; one without TeX is removed."""
        parent = node.parent
        if parent is None:
            return
        parent.replace_child(self.tree.create_text_node(self.mark(tex, display, carrier)), node)


def _classes(node: Any) -> set[str]:
    return set((node.getattr("class") or "").lower().split())


def _has_ancestor(node: Any, classes: frozenset[str], levels: int = 4, tag: str = "") -> bool:
    for _ in range(levels):
        node = node.parent
        if node is None or not getattr(node, "tag", None):
            return False
        if _classes(node) & classes and tag in ("", node.tag):
            return True
    return False


def _script(node: Any, formulas: _Formulas) -> None:
    kind = (node.getattr("type") or "").lower()
    if kind.startswith("math/tex"):
        tex = re.sub(r"^\s*%?\s*<!\[CDATA\[|%?\s*\]\]>\s*$", "", node.text)
        formulas.put(node, tex, "display" in kind, "mathjax_script")
    elif kind.startswith("math/mml"):
        inner = formulas.tree.parse(node.text).document.query_selector("math")
        if inner is not None:
            _mathml(inner, formulas, node)


def _mathml(element: Any, formulas: _Formulas, place: Any = None) -> None:
    place = element if place is None else place
    try:
        node = from_dom(element)
        tex = annotation(node)
        carrier = "mathml_annotation" if tex else "mathml"
        tex = tex or presentation(node)
    except ValueError:
        formulas.put(place, "", False, "mathml")
        return
    display = is_display(node) or _has_ancestor(place, _DISPLAY_CLASSES)
    if _has_ancestor(place, frozenset(("katex", "katex-mathml"))):
        carrier = "katex"
    elif _has_ancestor(place, frozenset(("mwe-math-element",))):
        carrier = "wikipedia"
    formulas.put(place, tex, display, carrier)


def _mathjax3(node: Any, formulas: _Formulas) -> None:
    inner = node.query_selector("mjx-assistive-mml math")
    display = node.getattr("display") in ("true", "block", "")
    if inner is None:
        written = node.query_selector("[data-latex]")
        tex = (written.getattr("data-latex") if written is not None else "") or node.getattr("aria-label") or ""
        formulas.put(node, tex, display, "mathjax3_label")
        return
    display = display or inner.getattr("display") == "block"
    try:
        tree = from_dom(inner)
        tex = annotation(tree) or presentation(tree)
    except ValueError:
        tex = ""
    formulas.put(node, tex, display, "mathjax3")


def _source_tex(source: str) -> str:
    """LaTeX in the address of a service that draws it, or ""."""
    found = _DRAWN.search(source) if len(source) <= _MAX_FORMULA else None
    tex = "" if found is None else unquote_plus(found["php"]) if found["php"] else unquote(found["cgi"])
    return re.sub(r"^\s*(?:\\(?:d?pi\{\d+\}|bg_?\w*|fn_\w+|(?:inline|small|large|tiny)(?![a-z]))\s*)+", "", tex)


def _written_tex(node: Any) -> str:
    """LaTeX that an element gives in an attribute, or, by its class, as its text without delimiters; else ""."""
    given = node.getattr("data-latex") or node.getattr("data-tex")
    if given:
        return given
    classes = _classes(node)
    if not classes & _WRITTEN or ("math" in classes and not classes & {"inline", "display", "js-render-math"}):
        return ""
    if any((c.node_name or "").lower() != "#text" for c in dom_children(node)):
        return ""
    text = node.text or ""
    return text if _TEX_LIKE.search(text) and not re.search(r"\\[(\[]|\$|\\begin", text) else ""


def _formula_before(node: Any) -> bool:
    """Whether one of the three siblings before an element holds a formula's mark: KaTeX writes MathML, then what is shown."""
    for _ in range(3):
        node = node.prev
        if node is None:
            return False
        if "xmathq" in (node.text or ""):
            return True
    return False


def image_tex(node: Any) -> str:
    r"""LaTeX in an image's alternative text, or "": by its class, its file (`latex.php`), or `$...$` and `\(` around it."""
    alt = (node.getattr("alt") or "").strip()
    if not alt:
        return _source_tex(node.getattr("src") or "")
    delimited = re.fullmatch(r"\$+(.+?)\$+|\\[(\[](.+)\\[)\]]|\{\\displaystyle.*\}", alt, re.DOTALL)
    source = node.getattr("src") or ""
    told = _classes(node) & _IMAGE_CLASSES or re.search(
        r"latex\.(php|codecogs)|/math/(?:render|[0-9a-f]{6,})|mimetex|mathtex", source
    )
    return alt if delimited or (told and not re.fullmatch(r"[A-Za-z ,.]{12,}", alt)) else ""


def _image(node: Any, formulas: _Formulas) -> None:
    classes = _classes(node)
    fallback = any(c.startswith("mwe-math-fallback") for c in classes)
    if fallback and _has_ancestor(node, frozenset(("mwe-math-element",)), 2) and "xmathq" in (node.parent.text or ""):
        node.parent.remove_child(node)  # the formula beside it has been taken
        return
    tex = image_tex(node)
    if tex:
        display = bool(classes & _DISPLAY_CLASSES) or _has_ancestor(node, frozenset(("math", "displaymath")), 2, "div")
        formulas.put(node, tex, display, "image_alt")


def _text(node: Any, formulas: _Formulas, single: bool) -> None:
    """TeX between delimiters in a text node."""

    def found(match: re.Match) -> str:
        tex = next(g for g in (match["i"], match["d"], match["dd"], match["e"]) if g is not None)
        if match["dd"] is not None and not _TEX_LIKE.search(tex):
            return match.group()
        return formulas.mark(tex, match["i"] is None, "delimiters")

    def found_single(match: re.Match) -> str:
        return formulas.mark(match["s"], False, "dollars") if _TEX_LIKE.search(match["s"]) else match.group()

    text = node.text
    if "\\" not in text and "$" not in text:
        return
    new = _DELIMITED.sub(found, text)
    new = _SINGLE.sub(found_single, new) if single else new
    if new != text:
        node.parent.replace_child(formulas.tree.create_text_node(new), node)


def _take(root: Any, formulas: _Formulas, single: bool) -> None:
    """Every formula below `root` replaced by its mark, in document order, in one walk.

    The walk keeps its own stack, as pages nest as deep as they like; resiliparse's collections take quadratic time.
    """
    stack = list(dom_children(root))[::-1]
    while stack:
        node = stack.pop()
        name = (node.node_name or "").lower()
        if name == "#text":
            _text(node, formulas, single)
            continue
        if not name or name.startswith(("#", "!")):
            continue
        tag = node.tag
        if tag == "mjx-container":
            _mathjax3(node, formulas)
        elif tag == "script":
            _script(node, formulas)
        elif tag == "math" or tag.endswith(":math"):
            _mathml(node, formulas)
        elif tag == "img":
            _image(node, formulas)
        elif (tex := _written_tex(node)) and tag not in ("pre", "textarea"):
            formulas.put(node, tex, bool(_classes(node) & _DISPLAY_CLASSES), "written")
        elif tag in _SKIPPED and not (tag == "code" and "math" in " ".join(_classes(node))):
            continue
        elif (own := _classes(node) & _COPIES) and not (own == {"katex-html"} and not _formula_before(node)):
            node.parent.remove_child(node)  # what is shown stays where it is the only copy
        else:
            stack += list(dom_children(node))[::-1]


def restore(text: str, found: list[tuple[str, bool]]) -> tuple[str, int]:
    """(text with its formulas back, formulas placed): a displayed formula stands on a line of its own."""
    placed = 0

    def put(match: re.Match) -> str:
        nonlocal placed
        index = int(match[1])
        if index >= len(found):
            return match.group()
        placed += 1
        tex, display = found[index]
        if display:
            return f"\n\n$${tex}$$\n\n"
        before, after = match.group()[:1].isspace(), match.group()[-1:].isspace()
        line = "\n" if "\n" in match.group()[: match.group().index("x")] else " "
        return f"{line if before else ''}${tex}${match.group()[match.group().rindex('x') + 1 :] if after else ''}"

    text = _MARK.sub(put, text)
    text = re.sub(r"(?<=\$)[ \t]+(?=[,.;:)\]?!])", "", text)
    text = re.sub(r"(?<=[(\[]) +(?=\$)", "", text)
    text = re.sub(r"\n\n(\$\$.+?\$\$)\n\n[ \t]*([.,;:])(?=\s)", r"\n\n\1\2\n\n", text)
    return re.sub(r"\n{3,}", "\n\n", re.sub(r"[ \t]+\n", "\n", re.sub(r"[ \t]{2,}(?=\$)", " ", text))).strip(), placed


def extract_math_page(body: bytes, http_charset: str = "") -> MathPage:
    """Main content of a page with its formulas. `tasks.extract.NotText` when the bytes are no page."""
    from resiliparse.parse.html import HTMLTree

    html, charset = decode_html(body, http_charset)
    if html.count("<") > MAX_TAGS:
        raise NotText(f"{html.count('<')} tags, more than {MAX_TAGS}")
    tree = HTMLTree.parse(html)
    document, formulas = tree.document, _Formulas(tree)
    if document is None:
        return MathPage(extract_page(body, http_charset))
    single = bool(_DOLLARS_DECLARED.search(html))
    _take(tree.body or document, formulas, single)
    page = extract_page(str(tree).encode("utf-8", "ignore"), "utf-8")
    text, placed = restore(page.text, formulas.found)
    page = Extracted(text, restore(page.title, formulas.found)[0], page.declared_lang, charset)
    return MathPage(page, formulas.carriers, len(formulas.found) - placed)


def main() -> None:
    found = extract_math_page(Path(sys.argv[1]).read_bytes())
    print(f"# {found.page.title} [{found.page.charset}] {dict(found.carriers)}\n\n{found.page.text}")
    print(f"\n{len(math_spans(found.page.text))} formulas, {found.lost} outside of the main content")


if __name__ == "__main__":
    main()
