"""Which programming language a source file is in: name, extension and shebang first, content where they say little or err.

Names are Linguist's in lower case, except a few dialects it splits further (visual basic) or has renamed (coq).
Nothing here reads files; `python -m tasks code` calls `detect` on each. Content alone: tasks/code_lang_model.py.
"""

from __future__ import annotations

import re
from pathlib import PurePosixPath

from tasks import code_lang_model, code_lang_syntax

# language -> extensions. An extension that several languages use stands in `_SHARED` and is settled by content.
_EXTENSIONS = {
    "ada": "adb ads",
    "agda": "agda",
    "apl": "apl dyalog",
    "applescript": "applescript scpt",
    "arduino": "ino",
    "assembly": "asm nasm",
    "autohotkey": "ahk",
    "autoit": "au3",
    "awk": "awk gawk",
    "batchfile": "bat cmd",
    "blitzbasic": "bb",
    "boo": "boo",
    "c": "c",
    "c#": "cs csx",
    "c++": "cpp cc cxx hpp hh hxx c++ h++ ipp tpp",
    "ceylon": "ceylon",
    "chapel": "chpl",
    "clojure": "clj cljs cljc",
    "cmake": "cmake",
    "cobol": "cob cbl cobol",
    "coffeescript": "coffee",
    "common lisp": "lisp",
    "crystal": "cr",
    "css": "css",
    "cuda": "cu cuh",
    "cython": "pyx pxd pxi",
    "dart": "dart",
    "dylan": "dylan dyl",
    "eiffel": "e",
    "elixir": "ex exs",
    "elm": "elm",
    "emacs lisp": "el",
    "erlang": "erl hrl",
    "factor": "factor",
    "fennel": "fnl",
    "fish": "fish",
    "fortran": "f f77 f90 f95 f03 f08 for",
    "gap": "gap gi",
    "gleam": "gleam",
    "glsl": "glsl vert frag geom",
    "gnuplot": "gp gnu gnuplot plt",
    "go": "go",
    "graphql": "graphql gql",
    "groovy": "groovy gradle",
    "haskell": "hs hsc",
    "haxe": "hx",
    "hlsl": "hlsl",
    "html": "html htm xhtml",
    "idris": "idr",
    "io": "io",
    "isabelle": "thy",
    "j": "ijs",
    "java": "java",
    "javascript": "js mjs cjs jsx",
    "jsonnet": "jsonnet libsonnet",
    "julia": "jl",
    "kotlin": "kt kts",
    "lean": "lean hlean",
    "less": "less",
    "livescript": "ls",
    "llvm": "ll mir",
    "logtalk": "lgt",
    "lua": "lua luau rockspec",
    "macaulay2": "m2",
    "makefile": "mk mak",
    "maple": "mpl",
    "maxima": "mac",
    "meson": "meson",
    "modelica": "mo",
    "modula-2": "def",
    "nim": "nim nims",
    "nix": "nix",
    "nsis": "nsi nsh",
    "objective-c++": "mm",
    "ocaml": "ml mli",
    "odin": "odin",
    "pascal": "pas dpr lpr",
    "perl": "pm",
    "php": "php php3 php4 php5 phtml",
    "pony": "pony",
    "postscript": "ps eps",
    "pov-ray sdl": "pov",
    "powershell": "ps1 psm1 psd1",
    "promela": "pml",
    "protocol buffer": "proto",
    "purescript": "purs",
    "python": "py pyi pyw py3",
    "qml": "qml",
    "r": "rd",
    "racket": "rkt rktd",
    "raku": "p6 pl6 pm6 raku rakumod",
    "reason": "rei",
    "rebol": "reb rebol",
    "red": "red reds",
    "rexx": "rexx arexx",
    "ruby": "rb rake gemspec ru",
    "rust": "rs",
    "sass": "sass",
    "scala": "scala sc",
    "scheme": "scm ss sld",
    "scss": "scss",
    "sed": "sed",
    "shell": "sh bash zsh ksh",
    "smali": "smali",
    "smalltalk": "st",
    "solidity": "sol",
    "sparql": "sparql rq",
    "sql": "sql psql",
    "standard ml": "sml sig fun",
    "stan": "stan",
    "starlark": "bzl star",
    "swift": "swift",
    "swig": "swg swig",
    "systemverilog": "sv svh",
    "tcl": "tcl tk",
    "thrift": "thrift",
    "typescript": "mts cts tsx",
    "typst": "typ",
    "vala": "vala vapi",
    "verilog": "vh",
    "vhdl": "vhd vhdl",
    "vim script": "vim",
    "visual basic": "vb bas vbs frm",
    "vue": "vue",
    "webassembly": "wat wast",
    "wren": "wren",
    "xquery": "xq xqy xquery",
    "xslt": "xsl xslt",
    "zig": "zig",
}
# Data, prose and mark-up that carries no program: a kind of their own, so that the filter can say so.
_DATA = {
    "data": "json jsonl csv tsv xml svg yaml yml toml ini cfg conf properties po pot lock plist geojson xsd dtd rdf ttl nt",
    "prose": "txt md rst markdown org adoc tex bib log pod texi rtf",
}
_NAMES = {
    "makefile": "makefile", "gnumakefile": "makefile", "cmakelists.txt": "cmake", "dockerfile": "dockerfile",
    "rakefile": "ruby", "gemfile": "ruby", "meson.build": "meson", "sconstruct": "python", "jenkinsfile": "groovy",
    "build.bazel": "starlark", "vimrc": "vim script", ".vimrc": "vim script", "configure.ac": "m4", "kconfig": "kconfig",
    "package.json": "data", "license": "prose", "readme": "prose", "changelog": "prose",
}  # fmt: skip
_INTERPRETERS = {
    "sh": "shell", "bash": "shell", "zsh": "shell", "ksh": "shell", "dash": "shell", "fish": "fish",
    "python": "python", "pypy": "python", "perl": "perl", "perl6": "raku", "raku": "raku", "ruby": "ruby",
    "node": "javascript", "nodejs": "javascript", "deno": "typescript", "php": "php", "lua": "lua", "luajit": "lua",
    "awk": "awk", "gawk": "awk", "sed": "sed", "tclsh": "tcl", "wish": "tcl", "rscript": "r", "julia": "julia",
    "groovy": "groovy", "scala": "scala", "escript": "erlang", "elixir": "elixir", "guile": "scheme", "racket": "racket",
    "runhaskell": "haskell", "ocaml": "ocaml", "swipl": "prolog", "gnuplot": "gnuplot", "make": "makefile", "nu": "nushell",
    "crystal": "crystal", "newlisp": "newlisp", "sbcl": "common lisp", "pwsh": "powershell",
}  # fmt: skip
_EMACS_MODES = {"c++": "c++", "cperl": "perl", "shell-script": "shell", "lisp": "common lisp", "scheme": "scheme"}


def _rules(*pairs: tuple[str, str]) -> list[tuple[str, re.Pattern]]:
    return [(language, re.compile(pattern, re.MULTILINE)) for language, pattern in pairs]


_OBJC = r"^\s*(@(interface|implementation|protocol|property|end|class)\b|#import\s)"
_CPP = (
    r"^\s*(template\s*<|namespace\s+\w|using\s+(namespace|\w+\s*=)|class\s+\w+[^;]*\{|(public|private|protected)\s*:)"
    r"|#include\s*<(iostream|string|vector|memory|map|algorithm|utility|functional)>|\bstd::"
)
# What a C header says to C++ compilers only (`extern "C" {`) is no sign of C++.
_FOR_CPP = re.compile(
    r"^[ \t]*#[ \t]*if(def|[ \t]+defined)[ \t(]+__cplusplus\b.*\n(?:(?![ \t]*#[ \t]*(if|else|endif)).*\n)*", re.M
)
# extension -> rules in order; the last entry, whose pattern matches anything, is the most frequent owner.
_SHARED: dict[str, list[tuple[str, re.Pattern]]] = {
    "h": _rules(("objective-c", _OBJC), ("c++", _CPP), ("c", "")),
    "m": _rules(
        ("objective-c", _OBJC + r"|^\s*#\s*(include|import|ifdef|define)\b"),
        ("mathematica", r"\(\*|\bBeginPackage\[|:=\s*\w+\["),
        ("mercury", r":-\s+module\b"),
        ("matlab", r"^\s*(%|function\b|classdef\b|end\b)|;\s*$"),
        ("matlab", ""),
    ),
    "pl": _rules(
        ("perl", r"^\s*(use\s+(strict|warnings|v?5|\w+::)|my\s*[\$@%(]|sub\s+\w+|package\s+\w)|[\$@]\w+\s*="),
        ("prolog", r"^\s*:-|^[a-z]\w*(\([^()]*\))?\s*(:-|-->|\.\s*$)"),
        ("perl", ""),
    ),
    "t": _rules(("raku", r"^use v6"), ("perl", r"^\s*use\s+\w|\$\w+"), ("turing", "")),
    "pro": _rules(
        ("prolog", r"^\s*:-|^[a-z]\w*(\([^()]*\))?\s*(:-|\.\s*$)|^\s*(clauses|predicates|domains)\b"),
        ("idl", r"^\s*(pro|function|compile_opt)\s"),
        ("qmake", ""),
    ),
    "prolog": _rules(("prolog", "")),
    "v": _rules(
        ("coq", r"^\s*(Require|Theorem|Lemma|Proof|Inductive|Definition|Fixpoint|Qed)\b"),
        ("verilog", r"\b(module|endmodule|always|wire|reg)\b"),
        ("v", ""),
    ),
    "r": _rules(("rebol", r"^\s*REBOL\s*\["), ("r", r"<-|\bfunction\s*\(|\blibrary\("), ("r", "")),
    "s": _rules(("r", r"<-\s*function\("), ("assembly", "")),
    "fs": _rules(("glsl", r"^\s*(#version|precision|uniform|varying|void main)\b"), ("forth", r"^: \S+"), ("f#", "")),
    "fsi": _rules(("f#", "")),
    "fsx": _rules(("f#", "")),
    "4th": _rules(("forth", "")),
    "frt": _rules(("forth", "")),
    "ts": _rules(("xml", r"<TS\b|<\?xml"), ("typescript", "")),
    "d": _rules(("makefile", r"^[^\s:]+\.o\s*:\s.*\.[ch]"), ("d", "")),
    "di": _rules(("d", "")),
    "inc": _rules(
        ("php", r"<\?php"),
        ("pov-ray sdl", r"^\s*#(declare|macro|local)\b"),
        ("assembly", r"^\s*(\.?(macro|equ)|mov|db|dw)\b"),
        ("pascal", r"\b(begin|procedure|unit)\b"),
        ("c", ""),
    ),
    "lsp": _rules(("newlisp", r"\(context\b|newlisp"), ("common lisp", "")),
    "cls": _rules(
        ("openedge abl", r"(?i)^\s*(using progress\.|(class|method) [^{]*:\s*$)"),
        ("tex", r"\\(NeedsTeXFormat|ProvidesClass|def\\)"),
        ("visual basic", r"^(VERSION|Attribute|Option)\s"),
        ("apex", r"\b(public|private|global)\s+(static\s+|with\s+sharing\s+)?class\b"),
        ("visual basic", ""),
    ),
    "p": _rules(
        ("pawn", r"^\s*#(include|define)\b|^(stock|native|public|forward|main)\b"),
        ("openedge abl", r"(?i)^\s*(define|find|for each|procedure)\b"),
        ("gnuplot", r"^\s*s?plot\b"),
        ("pawn", ""),
    ),
    "pp": _rules(
        (
            "pascal",
            r"(?i)^[ \t]*((unit|program|library)[ \t]+\w+[ \t]*[;(]|(procedure|function)[ \t]+\w+|begin\s*$)|\{\$\w",
        ),
        ("puppet", ""),
    ),
    "gd": _rules(("gap", r"^\s*Declare\w+\(|:=|^#####"), ("gdscript", "")),
    "g": _rules(("antlr", r"^\s*((lexer|parser|tree) )?grammar \w+"), ("gap", "")),
    "mod": _rules(("go module", r"^module\s+\S+/"), ("modula-2", r"\bMODULE\b"), ("linux kernel module", "")),
    "as": _rules(("actionscript", r"^\s*(package|import\s+flash|class|public)\b"), ("actionscript", "")),
    "pyt": _rules(("python", "")),
    "re": _rules(("c++", _CPP), ("reason", "")),
    "res": _rules(("rescript", "")),
    "l": _rules(("lex", r"^%%"), ("common lisp", r"^\("), ("lex", "")),
    "y": _rules(("yacc", "")),
    "ly": _rules(("lilypond", "")),
    "n": _rules(("nemerle", "")),
    "i": _rules(("swig", r"^%\w+"), ("c", "")),
    "in": _rules(("makefile", r"^\w[\w ./$(){}-]*:\s|^\w+\s*[:?+]?=\s"), ("template", "")),
}
_BY_EXTENSION = {ext: language for language, exts in _EXTENSIONS.items() for ext in exts.split()}
_BY_EXTENSION |= {ext: kind for kind, exts in _DATA.items() for ext in exts.split()}
_CONTENT = _rules(
    ("php", r"\A\s*<\?php"),
    ("xml", r"\A\s*<\?xml"),
    ("html", r"(?i)\A\s*<(!doctype html|html)\b"),
    ("java", r"^(package [\w.]+;|import java[\w.*]+;)|^public (final |abstract )?(class|interface|enum) \w"),
    ("go", r"\A(\s*//[^\n]*\n)*\s*package \w+\s*$"),
    ("rust", r"^\s*(pub )?fn \w+[^;{]*\{|^use (std|crate)::"),
    ("c++", _CPP),
    ("c", r"^\s*#\s*include\s*[<\"]"),
    ("python", r"^(from [\w.]+ import |import \w+\s*$|def \w+\(.*\).*:\s*$|class \w+.*:\s*$)"),
    ("perl", r"^use strict;|^my [$@%]"),
    ("ruby", r"^\s*(require ['\"]|def \w+[^:]*$|module [A-Z]\w*$)"),
    ("javascript", r"^\s*(const|let|var) \w+ = |^\s*function \w*\("),
    ("haskell", r"^module [A-Z][\w.]* |^import (qualified )?[A-Z]"),
    ("lua", r"^local (function )?\w+"),
)
DATA_KINDS = frozenset(_DATA)


def shebang_language(text: str) -> str:
    """Language of a `#!` first line, "" when there is none or its interpreter is unknown."""
    if not text.startswith("#!"):
        return ""
    parts = text[2 : text.find("\n") if "\n" in text else None].split()
    if parts and PurePosixPath(parts[0]).name == "env":
        parts = [p for p in parts[1:] if "=" not in p and not p.startswith("-")]
    name = PurePosixPath(parts[0]).name.lower() if parts else ""
    return _INTERPRETERS.get(name) or _INTERPRETERS.get(re.sub(r"[\d.]+$", "", name), "")


def _mode_line(text: str) -> str:
    found = re.search(r"-\*-\s*(?:.*?mode:\s*)?([\w+#-]+?)(?:;.*?)?\s*-\*-", text[:500])
    name = found.group(1).lower() if found else ""
    return _EMACS_MODES.get(name, name if name in _EXTENSIONS else "")


def label_from_path(path: str) -> str:
    """The label that a labelled collection gives by its folder (`examplefiles/<language>/<file>`), "" elsewhere."""
    parts = PurePosixPath(path).parts
    return parts[parts.index("examplefiles") + 1] if "examplefiles" in parts[:-2] else ""


def label_by_name(path: str, text: str) -> tuple[str, str]:
    """(language, how it was decided) by name and rules; "data" and "prose" are answers too, ("", "unknown") is none.

    Order: whole file name, shebang, mode line, extension (content decides among its languages), folder label, content rules.
    """
    name = PurePosixPath(path).name.lower()
    extension = name.rpartition(".")[2] if "." in name.lstrip(".") else ""
    if name in _NAMES:
        return _NAMES[name], "name"
    language = shebang_language(text)
    if language:
        return language, "shebang"
    if extension in _SHARED:
        mode = _mode_line(text)
        if mode:
            return mode, "mode line"
        plain = _FOR_CPP.sub("", text) if extension in ("h", "re") else text
        return next(lang for lang, pattern in _SHARED[extension] if pattern.search(plain)), "extension and content"
    if extension in _BY_EXTENSION:
        return _BY_EXTENSION[extension], "extension"
    label = label_from_path(path)
    if label:
        return label, "folder label"
    for lang, pattern in _CONTENT:
        if pattern.search(text[:20_000]):
            return lang, "content"
    return "", "unknown"


# Languages whose files may hold each other's text, or that one parser reads: no mis-naming is concluded between them.
_RELATIVES = [
    frozenset(names.split("|"))
    for names in (
        "c|c++|objective-c|objective-c++|cuda|glsl|hlsl|swig|arduino|lex|yacc|d|rescript|reason|cython|vala",
        "javascript|typescript|vue|html|php|xml|css|scss|less|sass|xslt|java|json|coffeescript|livescript|qml|groovy|kotlin|dart|haxe"
        "|actionscript|c#|apex|pawn|processing|swift|scala|boo|nemerle",
        "verilog|systemverilog|vhdl", "scheme|racket|common lisp|emacs lisp|newlisp|clojure|fennel|dylan|logtalk|prolog",
        "shell|batchfile|fish|makefile|template|dockerfile|awk|sed|perl|raku|ruby|crystal|tcl|powershell|automake|cmake|meson",
        "python|cython|starlark|boo|nim|sage|gdscript", "haskell|idris|agda|elm|purescript|ocaml|f#|standard ml|coq|lean|reason",
        "matlab|octave|mathematica|mercury|r|julia|gap|maxima|maple", "pascal|modula-2|ada|delphi|eiffel",
        "sql|plsql|tsql|openedge abl", "visual basic|blitzbasic|autoit|vbscript|asp", "fortran|cobol|basic|assembly",
    )
]  # fmt: skip
_KINDS = {name: "data" for name in ("json", "yaml", "toml", "xml", "ini", "csv", "gettext catalog", "diff", "hcl")}
_KINDS |= {name: "prose" for name in ("markdown", "restructuredtext", "tex")}
_SURE = 0.8  # content alone
_SIGN = re.compile(r"[^\w\s.,!?'-]")  # words and full stops alone are no program for certain
_VETO, _VETO_MARKED = 0.98, 0.8  # probability of another language, and with its syntax found as well
_VETO_CHARS, _EXAMINED = 400, 2000


def identify(text: str) -> tuple[str, float]:
    """(language, probability) by content alone, formats such as `json` and `markdown` included; ("", 0.0) for none.

    A shebang or syntax that one language has alone decides; else the content classifier does, parting close relatives by
    their syntax. Binary data and text without a known token give none; a low probability says how unsure the answer is.
    """
    found, score = code_lang_model.shipped().identify(text)
    if not found:
        return found, score
    language = shebang_language(text) or code_lang_syntax.distinctive(text)
    return (language, max(score, 0.95)) if language else (code_lang_syntax.relative(found, text), score)


def detect(path: str, text: str) -> tuple[str, str]:
    """(language, how it was decided) of a file; "data" and "prose" are answers too, ("", "unknown") is none.

    The name decides (label_by_name) unless the content clearly is in another, unrelated language: a mis-named file. Where
    the name says nothing the content classifier does, if it is sure, and rules for frequent languages otherwise.
    """
    language, how = label_by_name(path, text)
    if how.startswith("extension") and len(text) >= _VETO_CHARS:
        return _veto(language, how, text)
    if how in ("content", "unknown") and _SIGN.search(text):
        found, score = identify(text)
        if score >= _SURE and found != "text":
            return _KINDS.get(found, found), "content"
    return language, how


def _veto(language: str, how: str, text: str) -> tuple[str, str]:
    """The language of the extension, or the content's where that is another for certain."""
    model = code_lang_model.shipped()
    if language not in model.languages:
        return language, how
    p = model.probabilities(text[:_EXAMINED])
    best = int(p.argmax())
    found = model.languages[best]
    if found in ("text", *_KINDS) or p[model.languages.index(language)] > 0.005:
        return language, how
    if p[best] < _VETO and (p[best] < _VETO_MARKED or code_lang_syntax.distinctive(text) != found):
        return language, how
    if any(language in group and found in group for group in _RELATIVES):
        return language, how
    return found, "content against extension"
