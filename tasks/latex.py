"""Formulas in plain text as LaTeX, `$...$` inline and `$$...$$` displayed: finding them, cleaning them, and the light markup
formats (reStructuredText, MyST Markdown) that carry them. HTML: tasks/math_html.py. TeX: tasks/tex_source.py.
"""

from __future__ import annotations

import re

_WRAPPERS = re.compile(r"\{\\displaystyle\b\s*(.*)\}|\\displaystyle\b\s*(.*)|\\[(\[](.*)\\[)\]]|\$+(.*?)\$+", re.DOTALL)


def balanced(tex: str) -> bool:
    """Whether every brace closes one that was opened before it."""
    depth = 0
    for brace in re.findall(r"\\.|[{}]", tex):
        depth += {"{": 1, "}": -1}.get(brace, 0)
        if depth < 0:
            return False
    return depth == 0


def clean_tex(tex: str) -> str:
    """A formula on one line, without comments, labels and outer delimiters."""
    tex = re.sub(r"(?<!\\)%[^\n]*", "", tex)
    tex = re.sub(r"\\(label|tag)\*?\{[^}]*\}", "", tex)
    tex = " ".join(tex.split())
    while found := _WRAPPERS.fullmatch(tex):
        inner = next(g for g in found.groups() if g is not None).strip()
        if not balanced(inner):
            break
        tex = inner
    return tex


def dollars(text: str) -> str:
    r"""`\(...\)` to `$...$` and `\[...\]` to `$$...$$`."""
    text = re.sub(r"\\\((.{1,2000}?)\\\)", lambda m: f"${clean_tex(m[1])}$", text, flags=re.DOTALL)
    return re.sub(r"\\\[(.{1,5000}?)\\\]", lambda m: f"$${clean_tex(m[1])}$$", text, flags=re.DOTALL)


def _tidy(text: str) -> str:
    text = re.sub(r"[ \t]+(?=[,.;:)\]])", "", re.sub(r"[ \t]{2,}", " ", text))
    return re.sub(r"\n{3,}", "\n\n", re.sub(r"[ \t]+\n", "\n", text)).strip()


_ROLE = re.compile(r":(?P<role>[a-z:+-]{1,60}):`(?P<text>[^`]*)`", re.IGNORECASE)
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


_SPAN = re.compile(
    r"\$\$(?P<d>.+?)\$\$|(?<![\\$\w])\$(?P<i>[^$\n]{1,400}?)(?<![\\\s])\$(?!\d)"
    r"|\\begin\{(equation|align|gather|eqnarray|multline)\*?\}(?P<e>.+?)\\end",
    re.DOTALL,
)


def math_spans(text: str) -> list[str]:
    """The formulas of a text, without their delimiters."""
    return [next(g for g in (m["d"], m["i"], m["e"]) if g is not None).strip() for m in _SPAN.finditer(text)]
