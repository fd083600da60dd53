"""Syntax that gives a language away: openings and marks that no other language has, and what parts close relatives.

The content classifier (tasks/code_lang_model.py) goes by frequency; a small file may hold nothing but one such mark.
"""

from __future__ import annotations

import json
import re
import tomllib


def _compile(*pairs: tuple[str, str]) -> list[tuple[str, re.Pattern[str]]]:
    return [(language, re.compile(pattern, re.MULTILINE)) for language, pattern in pairs]


# At the start of the first line that is neither blank nor a line comment; every pattern here takes linear time.
_OPENINGS = _compile(
    ("php", r"\A<\?php\b"),
    ("html", r"(?i)\A(<\?xml [^>]{0,200}>\s*)?<(!doctype html|html)\b"),
    ("vue", r"\A<template>"),
    ("xml", r"\A<\?xml\b"),
    ("postscript", r"\A%!PS"),
    ("diff", r"\A(diff --git |Index: |--- \S.*\n\+\+\+ \S)"),
    ("racket", r"\A#lang (racket|typed|scribble|at-exp)"),
    ("batchfile", r"(?i)\A@echo off\b"),
    ("toml", r"\A\[(package|project|build-system|workspace|dependencies|tool\.[\w.-]+)\]\s*$"),
    ("dockerfile", r"\AFROM [\w./:@${}-]+( AS \w+)?$"),
    ("go", r"\Apackage [a-z]\w*$"),
    ("gettext catalog", r"\Amsgid \""),
)
_SKIPPED = ("#", "//", ";", "::")
_MARKS = _compile(
    ("objective-c", r"^[ \t]*(@(interface|implementation|protocol)\s+\w|#import\s+[<\"]|@end\s*$)"),
    ("erlang", r"^-module\(\w+\)\."),
    ("elixir", r"^[ \t]*defmodule [A-Z][\w.]* do\s*$"),
    ("vhdl", r"(?i)^[ \t]*(library ieee;|use ieee\.\w+|entity \w+ is\s*$|architecture \w+ of \w+ is)"),
    ("solidity", r"^[ \t]*pragma solidity\b"),
    ("cobol", r"(?i)^.{0,7}[ \t]*(identification|id|procedure|environment)\s+division\s*\."),
    ("cmake", r"(?i)^[ \t]*(cmake_minimum_required|target_link_libraries|add_executable)\s*\("),
    ("clojure", r"^\((ns|defn-?|in-ns) [\w.^-]"),
    ("tex", r"^[ \t]*\\(documentclass|usepackage|begin\{document\})"),
    ("protocol buffer", r"^[ \t]*syntax\s*=\s*\"proto[23]\"\s*;"),
    ("haskell", r"^(\{-# LANGUAGE \w|module [A-Z][\w.]*( *\([^)]{0,2000}\))? +where\b|import qualified [A-Z])"),
    ("emacs lisp", r"^\(provide '[\w-]+\)|^[ \t]*\(interactive[ )]"),
    ("common lisp", r"(?i)^\((in-package|defpackage|asdf:defsystem|defsystem) "),
    ("glsl", r"^[ \t]*#version \d{3}\b"),
    ("zig", r"^[ \t]*(pub )?const \w+ = @import\(\""),
    ("prolog", r"^:- (module|use_module|dynamic|initialization)\("),
    (
        "scala",
        r"^[ \t]*(case (class|object) [A-Z]|implicit (def|val|class) |import scala\.|sealed trait [A-Z]|package object \w"
        r"|((override|private|protected|implicit|final|inline) )*def \w+(\[[^\]\n]{1,60}\])?(\([^)\n]{0,120}\)){0,3} ?: ?[A-Z]"
        r"[\w.]*(\[[^\n=]{1,60}\])? ?=\s)|\bArray\[String\]|\" %%%? \"",
    ),
    (
        "kotlin",
        r"^[ \t]*((override |private |internal |suspend |inline |public )*fun (<[^>\n]{1,40}> )?[\w.]{1,60}\("
        r"|data class [A-Z]|companion object)",
    ),
    (
        "swift",
        r"^import (UIKit|SwiftUI|XCTest|Combine)$|^[ \t]*guard (let|var|!|\w+ )[^\n]{1,100} else \{|^[ \t]*(@objc|fileprivate) ",
    ),
    (
        "sql",
        r"(?i)^(create (or replace )?(table|view|index|function|procedure|database|unique index)|insert into \w|alter table) ",
    ),
    ("puppet", r"^(class|define) [a-z][\w:]*\s*(\(\s*$|\{\s*$|inherits )"),
    ("powershell", r"(?i)^[ \t]*(param\s*\(\s*$|function [A-Z]\w+-\w+\b)|\[CmdletBinding\("),
)
# (found, instead): a pattern that moves the classifier's answer to a relative.
_RELATIVES: dict[str, list[tuple[str, re.Pattern[str]]]] = {
    "c": _compile(
        ("c++", r"^[ \t]*(template\s*<|namespace\s+\w|using\s+(namespace|\w+\s*=)|class\s+\w+[^;{]{0,200}\{"
                r"|(public|private|protected)\s*:)"
                r"|#include\s*<(iostream|string|vector|memory|map|algorithm|utility|functional)>|\bstd::"),
    ),
    "javascript": _compile(
        ("typescript", r"^[ \t]*(export\s+)?(declare\s|interface\s+\w+[^({\n]{0,100}\{|type\s+\w+(<[^>\n]{0,80}>)?\s*="
                       r"|enum\s+\w+\s*\{|abstract class)"
                       r"|^import type |[\w)]\??:\s*(string|number|boolean|any|void|unknown|never)\b"),
    ),
    "css": _compile(
        ("scss", r"^[ \t]*(\$[\w-]+\s*:|@(mixin|include|use|extend|forward|function)\b)|#\{\$"),
        ("less", r"^[ \t]*@[\w-]+\s*:[^{;\n]{0,200};|^[ \t]*\.[\w-]+(\([^)\n]{0,100}\))?\s*;|~\""),
    ),
    "text": _compile(
        ("markdown", r"^#{1,6} \S|^```\w*$|\[[^\]\n]{1,80}\]\(https?://"),
        ("restructuredtext", r"^\.\. (\w[\w-]{0,30}::|_[\w -]{1,60}:)|^:\w[\w ]{0,30}: \S"),
    ),
}  # fmt: skip
_RELATIVES["scss"] = [_RELATIVES["css"][1]]
_RELATIVES |= {
    "vala": _compile(("c", r"^[ \t]*#[ \t]*(include|ifndef|ifdef|endif)\b")),
    "elm": _compile(("haskell", r"^[a-z]\w*\s*::|^import qualified|\bwhere\s*$|^instance ")),
    "f#": _compile(("swift", r"^[ \t]*(var \w+|func \w+)|: (Int|Double|Bool|Character|Float)\b|\bprintln\(|\\\(\w")),
    "makefile": _compile(
        ("shell", r"^(fi|done|esac)\b|^(alias|source|unset|setopt|shopt|autoload|zstyle) |^\. [~/$\"]|^[A-Za-z_]\w*\(\) *\{"),
    ),
}  # fmt: skip
# found: (instead, a mark that nearly every file of `found` has); without it the answer is the plainer relative.
_UNMARKED = {
    "vala": (
        "c",
        re.compile(
            r"\b(class|namespace|using|public|private|protected|internal|interface|signal|foreach|throws|var|errordomain|override"
            r"|owned|unowned)\b"
        ),
    ),
    "scss": ("css", _RELATIVES["css"][0][1]),
    "restructuredtext": (
        "text",
        re.compile(r"^[ \t]*\.\. |::\s*$|``\S|:[a-z]+:`|`_\b|^:\w[\w ]{0,30}:|`[^`\n]+ <", re.M),
    ),
}
_EXAMINED = 6000


def distinctive(text: str) -> str:
    """The language whose opening or mark the text has, "" for none; a text that parses as JSON is `json`."""
    head = text[:_EXAMINED]
    start = head.lstrip()[:1]
    if start in ("{", "[") and len(text) < 200_000:
        try:
            if isinstance(json.loads(text), dict | list):
                return "json"
        except (ValueError, RecursionError):
            pass
    opening = _opening(head)
    for language, pattern in _OPENINGS:
        if pattern.match(opening) or pattern.match(head):
            return language
    if start == "[" or start.isalpha():
        if _is_toml(text):
            return "toml"
    if _is_ini(opening):
        return "ini"
    for language, pattern in _MARKS:
        if pattern.search(head):
            return language
    return ""


def _opening(head: str) -> str:
    """`head` from its first line on that is neither blank nor a line comment."""
    at = 0
    while at < len(head):
        end = head.find("\n", at)
        line = head[at : end if end >= 0 else len(head)].strip()
        if line and not line.startswith(_SKIPPED):
            return head[at:].lstrip()
        if end < 0:
            break
        at = end + 1
    return ""


def _is_toml(text: str) -> bool:
    """Whether the text parses as TOML and has a quoted value, which tells it from INI, and a table, which tells it from HCL."""
    if len(text) > 50_000 or not re.search(r"^[\w.\"-]+\s*=\s*[\"\[{]", text[:_EXAMINED], re.MULTILINE):
        return False
    if not re.search(r"^\[\[?[\w.\" -]+\]\]?\s*(#|$)", text[:_EXAMINED], re.MULTILINE):
        return False
    try:
        return bool(tomllib.loads(text))
    except (ValueError, RecursionError):
        return False


_INI_LINE = re.compile(r"\s*([#;].*|\[[^\]\n]+\]\s*([#;].*)?|[\w.@$*/: -]{1,60}[=:].*|[\w.-]+)?\s*$")


def _is_ini(opening: str) -> bool:
    """Whether the text opens with a `[section]` of its own line and goes on with settings, sections and comments alone."""
    lines = [line for line in opening.splitlines()[:200] if line.strip()]
    if len(lines) < 2 or not re.match(r"\[[\w .:\"/@*-]+\]\s*$", lines[0]):
        return False
    settings = sum(bool(re.match(r"\s*[\w.@$*/: -]{1,60}=", line)) for line in lines)
    plain = sum(bool(_INI_LINE.match(line)) or line[0] in " \t" for line in lines)  # indented: a value goes on
    return settings > 0 and plain >= 0.9 * len(lines)


def relative(language: str, text: str) -> str:
    """The classifier's `language`, or the relative of it that the text's own syntax names."""
    head = text[:_EXAMINED]
    if language in _UNMARKED:
        plain, mark = _UNMARKED[language]
        if not mark.search(head):
            return plain
    for instead, pattern in _RELATIVES.get(language, ()):
        if pattern.search(head):
            return instead
    return language
