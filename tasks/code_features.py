"""Surface features of a source file, the same for every language; input of the quality models (tasks/code_quality.py)."""

from __future__ import annotations

import ast
import json
import math
import re
import warnings
import zlib
from collections import Counter

NAMES = (
    "log_lines mean_line log_max_line std_line blank_share long_lines comment_share comment_lines doc_marks string_share"
    " number_share identifier_length identifier_variety single_letters digit_identifiers long_identifiers"
    " identifiers_per_line operator_share mean_indent log_max_indent odd_indent unbalanced open_at_end parses definitions"
    " returns stubs commented_code repeated_lines compression entropy same_shape asserts ends_open trailing_blanks"
    " non_ascii upper_identifiers conflict_marks starts_inside imports"
).split()
MAX_CHARS = 40_000  # of a longer file the first part is looked at
PARSE_CHARS = 60_000

_LINE_COMMENT = {
    "#": "python cython ruby perl shell r julia makefile elixir nim tcl awk powershell crystal gdscript fish cmake starlark"
    " meson gap raku coffeescript dockerfile sed graphql puppet nix",
    "//": "c c++ java javascript typescript go rust swift kotlin scala dart php c# objective-c objective-c++ groovy zig v"
    " solidity cuda glsl hlsl verilog systemverilog f# odin protocol-buffer thrift pony haxe less scss d vala stan chapel",
    "--": "haskell lua sql ada elm vhdl idris agda purescript applescript lean",
    ";": "common-lisp scheme clojure emacs-lisp assembly newlisp racket autohotkey llvm fennel nsis rebol red",
    "%": "erlang matlab prolog postscript mercury tex logtalk lilypond",
    "!": "fortran",
    "'": "visual-basic",
    '"': "vim-script",
}  # fmt: skip
_MARK = {name.replace("-", " "): mark for mark, names in _LINE_COMMENT.items() for name in names.split()}
_MARK |= {"objective-c": "//", "objective-c++": "//"}
_BLOCKS = {
    "//": r"/\*.*?(?:\*/|\Z)",
    "--": r"\{-.*?(?:-\}|\Z)|--\[\[.*?(?:\]\]|\Z)|/\*.*?(?:\*/|\Z)",
    ";": r"#\|.*?(?:\|#|\Z)",
}
_STRINGS = r"\"{3}.*?(?:\"{3}|\Z)|'{3}.*?(?:'{3}|\Z)|\"(?:\\.|[^\"\\\n])*\"|`(?:\\.|[^`\\])*`|'(?:\\.|[^'\\\n]){0,200}'"
_IDENTIFIER = re.compile(r"[^\W\d]\w*")
_NUMBER = re.compile(r"\b\d[\w.]*")
_SPACE = re.compile(r"[ \t]*")
_DEFINITION = re.compile(
    r"\b(?:def|function|func|fn|fun|sub|proc|procedure|class|struct|interface|trait|impl|module|defun|defn|define|macro)\b"
    r"|^[\w:*&<>,\s~]{3,80}\([^;{}]{0,200}\)[\w\s]{0,30}\{",
    re.MULTILINE,
)
_RETURN = re.compile(r"\b(?:return|yield|raise|throw|Ok|Err|emit)\b")
_STUB = re.compile(r"(?m)^\s*pass\s*$|\bTODO\b|\bFIXME\b|\bXXX\b|NotImplemented|unimplemented|UnsupportedOperation"
                   r"|not implemented|\{\s*\}|\.{3}\s*$")  # fmt: skip
_DOC = re.compile(r"/\*\*|///|\"\"\"|'''|##'|--\s*\||\(\*\*|=begin|=pod")
_ASSERT = re.compile(r"(?i)\b(?:assert\w*|expect|should|require[sd]?|test_\w+|@test|it)\b\s*[(.!\s]")
_CONFLICT = re.compile(r"(?m)^(?:<{7}|={7}|>{7})(?: |$)")
_IMPORT = re.compile(r"(?m)^\s*(?:import|from|#\s*include|using|use|require|package|open|library|module)\b")
_LIKE_CODE = re.compile(r"[;{}]\s*$|\)\s*[;:{]?\s*$|\w\s*=\s*\S|^\s*(?:if|for|return|def|var|let|int)\b")
_LETTERS, _DIGITS = re.compile(r"[^\W\d_]+"), re.compile(r"\d+")


def _pattern(mark: str) -> re.Pattern:
    comment = re.escape(mark) + r"[^\n]*"
    if mark == "'":
        return re.compile(rf"(?P<c>{comment})|(?P<s>\"[^\"\n]*\")", re.DOTALL)
    if mark == '"':
        return re.compile(r"(?P<c>(?m:^\s*\"[^\n]*))|(?P<s>'[^'\n]*'|\"[^\"\n]*\")", re.DOTALL)
    blocks = _BLOCKS.get(mark)
    strings = _STRINGS if mark not in (";", "--") else r"\"(?:\\.|[^\"\\])*\""
    first = f"{blocks}|{comment}" if blocks else comment
    # Three quotes open a string before one quote does; a comment mark inside a string is none.
    return re.compile(f"(?P<s>{strings})|(?P<c>{first})", re.DOTALL)


_PATTERNS = {mark: _pattern(mark) for mark in _LINE_COMMENT}


def comment_mark(text: str, language: str) -> str:
    """The line comment of a language; where it is not listed, the mark that begins most lines."""
    mark = _MARK.get(language)
    if mark:
        return mark
    starts = Counter(line.lstrip()[:2] for line in text[:8000].split("\n"))
    counts = {m: sum(n for s, n in starts.items() if s.startswith(m)) for m in ("//", "#", "--", ";", "%")}
    return max(counts, key=lambda m: counts[m])


def parses(text: str, language: str) -> float:
    """1 when the standard library parses a file of its language, 0 when it does not, 0.5 where it cannot tell."""
    if language == "python" and len(text) <= PARSE_CHARS:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                ast.parse(text)
            return 1.0
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return 0.0
    if language == "json":
        try:
            json.loads(text)
            return 1.0
        except ValueError:
            return 0.0
    return 0.5


def features(text: str, language: str) -> list[float]:
    """The floats named in NAMES of a source text; none of them depends on the file's name or licence."""
    whole, text = text, text[:MAX_CHARS]
    cut = len(whole) > len(text)
    comments = strings = docs = 0
    comment_texts: list[str] = []

    def drop(match: re.Match) -> str:
        nonlocal comments, strings, docs
        found = match.group()
        if match.lastgroup == "c" or found[:3] in ('"""', "'''"):
            comments += len(found)
            docs += bool(_DOC.match(found))
            comment_texts.append(found)
            return "\n" * found.count("\n")
        strings += len(found)
        return '""'

    code = _PATTERNS[comment_mark(text, language)].sub(drop, text)
    lines = text.split("\n")
    full = [line for line in lines if line.strip()] or [""]
    code_lines = [line for line in code.split("\n") if line.strip()]
    n, size = len(full), max(1, len(text))
    lengths = [len(line) for line in full]
    mean = sum(lengths) / n
    identifiers = _IDENTIFIER.findall(code)
    count = max(1, len(identifiers))
    distinct = set(identifiers)
    solid = max(1, len("".join(code.split())))
    digits = sum(map(len, _NUMBER.findall(code)))
    letters = sum(map(len, identifiers))
    indents = [len(m) for m in map(lambda s: _SPACE.match(s).group().replace("\t", "    "), code_lines)] or [0]
    unit = 4 if sum(i % 4 == 0 for i in indents) >= sum(i % 2 == 0 for i in indents) * 0.9 else 2
    balance = [code.count(a) - code.count(b) for a, b in ("()", "[]", "{}")]
    shapes = [_DIGITS.sub("0", _LETTERS.sub("a", line)) for line in full[:400]]
    stripped = Counter(s for s in (line.strip() for line in full) if len(s) > 8)
    repeated = sum(c - 1 for c in stripped.values()) / max(1, stripped.total())
    said = [line for t in comment_texts for line in t.split("\n")]
    last = full[-1].rstrip()
    definitions = len(_DEFINITION.findall(code[:20_000])) + 0.5
    chars = Counter(text[:8000])
    total = max(1, chars.total())
    head = text[:16_000].encode("utf-8", "replace")
    return [
        math.log1p(n),
        mean,
        math.log1p(max(lengths)),
        math.sqrt(sum((x - mean) ** 2 for x in lengths) / n),
        1 - n / max(1, len(lines)),
        sum(x > 100 for x in lengths) / n,
        comments / size,
        min(1.0, sum(bool(line.strip()) for line in said) / n),
        min(3.0, docs * 10 / n),
        strings / size,
        digits / solid,
        letters / count,
        len(distinct) / math.sqrt(count),
        sum(len(i) == 1 for i in identifiers) / count,
        sum(any(map(str.isdigit, i)) for i in distinct) / max(1, len(distinct)),
        sum(len(i) > 24 for i in distinct) / max(1, len(distinct)),
        len(identifiers) / max(1, len(code_lines)),
        max(0, solid - letters - digits) / solid,
        sum(indents) / len(indents),
        math.log1p(max(indents)),
        sum(i % unit != 0 for i in indents) / len(indents),
        0.0 if cut else min(5.0, sum(map(abs, balance)) * 10 / n),
        0.0 if cut else float(any(b > 0 for b in balance)) - float(any(b < 0 for b in balance)),
        parses(whole, language),
        min(3.0, definitions * 10 / n),
        min(4.0, len(_RETURN.findall(code)) / definitions),
        min(3.0, len(_STUB.findall(text)) * 10 / n),
        sum(bool(_LIKE_CODE.search(s)) for s in said) / max(8, len(said)),
        repeated,
        len(zlib.compress(head, 1)) / max(1, len(head)),
        -sum(c / total * math.log2(c / total) for c in chars.values()),
        sum(a == b for a, b in zip(shapes, shapes[1:])) / max(1, len(shapes)),
        min(1.0, len(_ASSERT.findall(code)) / n),
        float(
            not cut and last[-1:] not in "};)]>" and (len(last) - len(last.lstrip()) > 0 or not whole.endswith("\n"))
        ),
        sum(line != line.rstrip() for line in full) / n,
        sum(n for c, n in chars.items() if c > "\x7f") / total,
        sum(i.isupper() for i in distinct) / max(1, len(distinct)),
        float(min(3, len(_CONFLICT.findall(text)))),
        float(len(full[0]) - len(full[0].lstrip()) > 1 or full[0].lstrip()[:1] in "})]"),
        min(1.0, len(_IMPORT.findall(text)) / n),
    ]
