r"""TeX sources to text with their LaTeX kept: one file or a directory of an article, as arXiv hands them out.

    python -m tasks.tex_source FILE_OR_DIRECTORY

`\input` and `\include` are followed inside of the directory, simple macros (`\newcommand`, `\def`, `\DeclareMathOperator`)
expanded, comments, preamble, bibliography, index and figures removed; captions stay. A source that cannot be read as TeX is a
`BadTex` with its reason.
"""

from __future__ import annotations

import gzip
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from tasks.latex import _tidy, dollars

MAX_BYTES = 50 << 20
MAX_DEPTH = 12
_ENVIRONMENT = r"\\begin\s*\{(?P<name>%s)\*?\}(?P<body>.*?)\\end\s*\{(?P=name)\*?\}"
_VERBATIM = re.compile(
    _ENVIRONMENT % r"verbatim|Verbatim|lstlisting|minted|alltt|spverbatim|BVerbatim|comment|filecontents", re.DOTALL
)
_VERB = re.compile(r"\\(?:verb|lstinline)\*?(?P<d>[^\sA-Za-z*{])(?P<body>[^\n]*?)(?P=d)")
_DROPPED = re.compile(
    _ENVIRONMENT
    % r"thebibliography|tikzpicture|picture|pgfpicture|pspicture|theindex|filecontents|comment|CCSXML|wrapfigure",
    re.DOTALL,
)
_FLOAT = re.compile(_ENVIRONMENT % r"figure|sidewaysfigure|SCfigure|wrapfigure|marginfigure", re.DOTALL)
_SILENT = re.compile(
    r"\\(?:label|index|sindex|glossary|cite[a-zA-Z]*|nocite|vspace\*?|hspace\*?|vskip|bibliographystyle|bibliography"
    r"|printbibliography|addbibresource|pagestyle|thispagestyle|setlength|addtolength|setcounter|addtocounter|hypersetup"
    r"|includegraphics|usetikzlibrary|usepackage|RequirePackage|graphicspath|pagenumbering|phantomsection"
    r"|addcontentsline)(?![A-Za-z])(?:\s*\[[^\]]*\])*(?:\s*\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}){0,3}"
)
_BARE = re.compile(
    r"\\(?:maketitle|tableofcontents|listoffigures|listoftables|newpage|clearpage|cleardoublepage|pagebreak|noindent|bigskip"
    r"|medskip|smallskip|eject|vfill|vfil|hfill|centering|par|printindex|frontmatter|mainmatter|backmatter|appendix|null"
    r"|bye|relax|protect|sloppy|indent|goodbreak|filbreak|leavevmode|nobreak|allowbreak|linebreak|nolinebreak|raggedright)"
    r"(?![A-Za-z@])[ \t]*"
)
_INPUT = re.compile(r"\\(?:input|include|subfile|loadgeometry)\s*(?:\{([^{}\n]+)\}|[ \t]*([\w./-]+))")
_DOCUMENT = re.compile(
    r"^[ \t]*\\document(?:class|style)\b.*?\\begin\s*\{document\}(?P<body>.*?)(?:\\end\s*\{document\}|\Z)",
    re.DOTALL | re.M,
)
_CONTROL = re.compile(r"\\([A-Za-z@]+)\*?")
_COMPLEX = re.compile(
    r"\\(?:if|else|fi|def|edef|gdef|let|catcode|csname|expandafter|newcommand|begingroup|futurelet|@)|##"
)


class BadTex(ValueError):
    """A source that is not read; `reason` is one word for counting."""

    def __init__(self, reason: str, detail: str):
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail = reason, detail


@dataclass(frozen=True)
class Macro:
    """`body` with #1...#n; `default` is the optional first argument's value, or None when all are mandatory."""

    arguments: int
    body: str
    default: str | None = None


def decode_tex(data: bytes) -> str:
    """UTF-8, else Latin-1 as sources older than it rarely say what they are in. BadTex for what is no text."""
    if data[:2] == b"\x1f\x8b":
        try:
            data = gzip.decompress(data) if len(data) < MAX_BYTES else b""
        except (OSError, EOFError) as error:
            raise BadTex("bad_gzip", str(error)) from None
    if len(data) > MAX_BYTES:
        raise BadTex("too_large", f"{len(data)} bytes, more than {MAX_BYTES}")
    if data[:5] == b"%PDF-" or data.count(b"\0") > 0:
        raise BadTex("binary", "NUL bytes or a PDF header in a TeX source")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        text = data.decode("latin-1")
    return text.lstrip("\ufeff").replace("\r\n", "\n").replace("\r", "\n")


def group_end(text: str, start: int) -> int:
    """Index after the brace that closes the one at `start`; -1 when none does."""
    depth, i = 0, start
    while i < len(text):
        char = text[i]
        if char == "\\":
            i += 2
            continue
        if char == "{":
            depth += 1
        elif char == "}":
            depth -= 1
            if not depth:
                return i + 1
        i += 1
    return -1


def _argument(text: str, i: int) -> tuple[str, int]:
    """(argument, index after it): a group, a control word, or one character; index -1 at the end of the text."""
    while i < len(text) and text[i].isspace():
        i += 1
    if i >= len(text):
        return "", -1
    if text[i] == "{":
        end = group_end(text, i)
        return (text[i + 1 : end - 1], end) if end > 0 else ("", -1)
    found = re.match(r"\\(?:[A-Za-z@]+|.)", text[i:])
    return (found.group(), i + found.end()) if found else (text[i], i + 1)


_DEFINITION = re.compile(
    r"\\(?:(?P<new>(?:re)?newcommand|providecommand|DeclareRobustCommand|newrobustcmd)\*?\s*\{?\s*\\(?P<a>[A-Za-z@]+)\s*\}?"
    r"\s*(?:\[(?P<n>\d)\])?\s*(?:\[(?P<default>[^\]]*)\])?\s*(?=\{)"
    r"|(?P<operator>DeclareMathOperator)(?P<star>\*?)\s*\{?\s*\\(?P<b>[A-Za-z]+)\s*\}?\s*(?=\{)"
    r"|(?:long\\)?(?:def|gdef)\s*\\(?P<c>[A-Za-z@]+)\s*(?P<params>(?:#\d)*)\s*(?=\{))"
)


def take_macros(text: str) -> tuple[str, dict[str, Macro]]:
    """(text without its definitions, the simple macros by name). Bodies with conditionals or definitions are not simple."""
    macros: dict[str, Macro] = {}
    out, last = [], 0
    for found in _DEFINITION.finditer(text):
        if found.start() < last:
            continue
        end = group_end(text, found.end())
        if end < 0:
            continue
        name = found["a"] or found["b"] or found["c"]
        body = text[found.end() + 1 : end - 1]
        if found["b"]:
            macros[name] = Macro(0, rf"\operatorname{found['star']}{{{body}}}")
        elif len(body) <= 1000 and not _COMPLEX.search(body):
            count = int(found["n"] or 0) if found["a"] else len(found["params"]) // 2
            macros[name] = Macro(count, body, found["default"] if count else None)
        out.append(text[last : found.start()])
        last = end
    return "".join(out) + text[last:], macros


def expand(text: str, macros: dict[str, Macro]) -> str:
    """Macros replaced by their bodies. BadTex when that makes the text explode."""
    budget = 20 * len(text) + 1_000_000

    def run(part: str, depth: int, active: frozenset[str]) -> str:
        nonlocal budget
        out, i = [], 0
        for found in _CONTROL.finditer(part):
            name = found[1]
            if found.start() < i or name not in macros or name in active or depth > MAX_DEPTH:
                continue
            macro, end, values = macros[name], found.end(1), []
            if macro.default is not None:
                optional = re.match(r"\s*\[([^\]]*)\]", part[end:])
                values.append(optional[1] if optional else macro.default)
                end += optional.end() if optional else 0
            while len(values) < macro.arguments and end > 0:
                value, end = _argument(part, end)
                values.append(value)
            if end < 0:
                continue
            pieces = re.split(r"#(\d)", macro.body)
            pieces[1::2] = [values[int(n) - 1] if 0 < int(n) <= len(values) else "" for n in pieces[1::2]]
            body = run("".join(pieces), depth + 1, active | {name})
            budget -= len(body)
            if budget < 0:
                raise BadTex("macro_explosion", f"expanding \\{name} makes the text more than twenty times longer")
            out += [part[i : found.start()], body]
            if end < len(part) and part[end].isalpha() and re.search(r"\\[A-Za-z]+$", body):
                out.append(" ")
            i = end
        return "".join(out) + part[i:]

    return run(text, 0, frozenset())


def captions(text: str) -> list[str]:
    r"""Contents of the `\caption`s of a float."""
    found = []
    for match in re.finditer(r"\\caption\*?\s*(?:\[[^\]]*\])?\s*(?=\{)", text):
        end = group_end(text, match.end())
        if end > 0:
            found.append(text[match.end() + 1 : end - 1].strip())
    return found


class _Verbatim:
    """Verbatim parts are taken out before comments are looked for, and put back at the end."""

    def __init__(self) -> None:
        self.parts: list[str] = []

    def hide(self, text: str) -> str:
        def keep(part: str) -> str:
            self.parts.append(part)
            return f"\x00{len(self.parts) - 1}\x00"

        def environment(match: re.Match) -> str:
            return "" if match["name"] in ("comment", "filecontents") else keep(match.group())

        return _VERB.sub(lambda m: keep(m.group()), _VERBATIM.sub(environment, text))

    def show(self, text: str) -> str:
        return re.sub("\x00(\\d+)\x00", lambda m: self.parts[int(m[1])], text)


def _no_comments(text: str) -> str:
    text = re.sub(r"^[ \t]*%[^\n]*\n", "", text, flags=re.MULTILINE)
    return re.sub(r"(?<!\\)((?:\\\\)*)%[^\n]*\n?[ \t]*", r"\1", text)


def _inputs(text: str, include: Callable[[str], str | None], depth: int = 0) -> str:
    def one(match: re.Match) -> str:
        name = (match[1] or match[2]).strip()
        found = include(name) if depth < MAX_DEPTH else None
        return "" if found is None else _inputs(_no_comments(found), include, depth + 1)

    text = _INPUT.sub(one, text)
    if len(text) > MAX_BYTES:
        raise BadTex("too_large", f"more than {MAX_BYTES} characters with its inputs")
    return text


def tex_to_text(source: str, include: Callable[[str], str | None] = lambda name: None) -> str:
    r"""Body of a TeX document with its LaTeX kept; `include` gives the text of an `\input` file or None.

    BadTex: `unbalanced` (braces that never close over much of the text), `macro_explosion`, `too_large`.
    """
    verbatim = _Verbatim()
    source = source.replace("\x00", "").replace("\r\n", "\n")
    text = verbatim.hide(_inputs(_no_comments(verbatim.hide(source)), lambda n: _hidden(include(n), verbatim)))
    text = re.sub(r"\\iffalse\b.*?\\fi\b", "", text, flags=re.DOTALL)
    text, macros = take_macros(text)
    found = _DOCUMENT.search(text)
    title = re.search(r"\\title\s*(?:\[[^\]]*\])?\s*(?=\{)", text)
    end = group_end(text, title.end()) if title else -1
    head = text[title.end() + 1 : end - 1].strip() if title and 0 < end - title.end() < 500 else ""
    text = found["body"] if found else re.sub(r"^\\(?:bye|end)[ \t]*$.*", "", text, flags=re.DOTALL | re.M)
    opened, closed = len(re.findall(r"(?<!\\)\{", text)), len(re.findall(r"(?<!\\)\}", text))
    if abs(opened - closed) > 10 + 0.1 * max(opened, closed):
        raise BadTex("unbalanced", f"{opened} opening and {closed} closing braces")
    text = _DROPPED.sub("", text)
    text = _FLOAT.sub(lambda m: "\n\n" + "\n\n".join(captions(m["body"])) + "\n\n", text)
    text = expand(text, macros)
    text = _BARE.sub("", _SILENT.sub("", text))
    text = _tidy(dollars(text))
    if head and head not in text:
        text = rf"\title{{{_SILENT.sub('', expand(head, macros))}}}" + "\n\n" + text
    return verbatim.show(text)


def _hidden(text: str | None, verbatim: _Verbatim) -> str | None:
    return None if text is None else verbatim.hide(text)


def directory_include(root: Path, base: Path, seen: dict[Path, int] | None = None) -> Callable[[str], str | None]:
    """Finds `\\input` files beside `base` or in `root`, never outside of `root`; each at most 200 times. `seen` counts them."""
    seen = {} if seen is None else seen

    def include(name: str) -> str | None:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            return None
        for folder in (base, root):
            for suffix in ("", ".tex", ".tex.gz", ".ltx"):
                path = folder / (name + suffix)
                inside = path.is_file() and path.resolve().is_relative_to(root.resolve())
                if inside and path.suffix not in (".sty", ".cls", ".def", ".cfg", ".bbl") and seen.get(path, 0) < 200:
                    seen[path] = seen.get(path, 0) + 1
                    return decode_tex(path.read_bytes())
        return None

    return include


def parts_of_articles(paths: Sequence[Path]) -> set[Path]:
    r"""The files among `paths` that an article among them (a file with `\documentclass`) takes in by `\input`, directly or
    through others: their text is part of the article's."""
    parts: set[Path] = set()
    known = {p.resolve() for p in paths}
    for path in paths:
        try:
            text = decode_tex(path.read_bytes())
            if _DOCUMENT.search(text):
                taken: dict[Path, int] = {}
                _inputs(_no_comments(text), directory_include(path.parent, path.parent, taken))
                parts |= {p.resolve() for p in taken} & known
        except (BadTex, OSError):
            continue
    return parts


def main_file(files: dict[str, str]) -> str:
    r"""Name of the file an article begins with: it holds `\documentclass` and `\begin{document}`; the largest when several do,
    the largest of all when none does. BadTex without any file."""
    if not files:
        raise BadTex("no_source", "no .tex file in the directory")

    def rank(name: str) -> tuple[bool, bool, int, str]:
        text = files[name]
        return "\\begin{document}" in text, "\\documentclass" in text or "\\documentstyle" in text, len(text), name

    return max(files, key=rank)


def _nothing(name: str) -> None:
    return None


def read_source(path: Path) -> str:
    r"""Text of a TeX file (plain or gzip), or of a directory that holds one article. BadTex with its reason.

    A single file's `\input`s are followed when it is an article: books of plain TeX are read by the chapter.
    """
    if path.is_dir():
        names = sorted(p for p in path.rglob("*") if p.is_file() and p.name.endswith((".tex", ".ltx", ".tex.gz")))
        files = {p.relative_to(path).as_posix(): decode_tex(p.read_bytes()) for p in names}
        name = main_file(files)
        return tex_to_text(files[name], directory_include(path, (path / name).parent))
    source = decode_tex(path.read_bytes())
    follow = directory_include(path.parent, path.parent) if _DOCUMENT.search(source) else _nothing
    text = tex_to_text(source, follow)
    if len(re.findall(r"[^\W\d_]{2,}", text)) < 5:
        raise BadTex("no_text", "fewer than five words after comments, preamble and figures are gone")
    return text


def main() -> None:
    print(read_source(Path(sys.argv[1])))


if __name__ == "__main__":
    main()
