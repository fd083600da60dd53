"""Which licence a file is under, as an SPDX expression: tags, notices in file headers, licence texts, inheritance by folder.

Licence texts are matched by word trigrams on normalised text against the templates that the package `identify` ships and a
few short ones derived from them; `identify(text)` says which templates a text covers and how far. Expressions are read by
`license_expression` (SPDX's own list of identifiers).

Ask about files:  python -m tasks.licences LICENSE src/a.c
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath

HEADER_CHARS = 5000
MIN_COVERAGE = 0.8  # of a template's trigrams: clauses with another holder's name stay above, another licence below

_TAG = re.compile(r"SPDX-License-Identifier:\s*([\w.+ ()-]+?)\s*(?:\*/|-->|$)", re.MULTILINE)
_FILE = re.compile(
    r"(?i)^(un)?(licen[cs]es?|copying|copyright|notice)([.-][\w.-]+)?$|^[\w.+-]+[-.](licen[cs]e|copying)$"
)
_NO_FILE = re.compile(r"(?i)\.(py|js|ts|c|h|cc|cpp|go|rs|java|rb|json|html?|css|php|svg)$")
_WORD = re.compile(r"[a-z0-9]+")
_NOISE = re.compile(r"(?im)^\W*(copyright\b|\(c\)|©|all rights reserved|spdx-).*$|https?://\S+")
# Licences whose wording has no template here: a sentence that no other licence holds.
_SENTENCES = {
    "PSF-2.0": "python software foundation license version 2",
    "CNRI-Python": "cnri open source license agreement|cnri license agreement",
    "BSD-4-Clause": "all advertising materials mentioning features or use of this software must display",
    "HPND": "permission to use copy modify and distribute this software and its documentation for any purpose and without fee",
    "MIT-CMU": "by obtaining using and or copying this software and or its associated documentation you agree",
    "JSON": "the software shall be used for good not evil",
    "OpenSSL": "this product includes software developed by the openssl project",
    "PHP-3.01": "the php license version 3 01",
    "CDDL-1.0": "common development and distribution license cddl version 1 0",
    "Ruby": "you may make and give away verbatim copies of the source form of the software without restriction",
    "Artistic-1.0": "the artistic license preamble",
    "LLVM-exception": "llvm exceptions to the apache 2 0 license",
}  # fmt: skip
_GNU = re.compile(
    r"gnu (?P<kind>lesser |library |affero )?general public licen[cs]e.{0,160}?version (?P<version>[123](?: ?\.? ?[01])?)\b"
    r"|version (?P<version2>[123](?: \d)?) of the gnu (?P<kind2>lesser |library |affero )?general public"
)
# Notices in headers, on text reduced to lower-case words and single spaces; the first that fits.
_NOTICES = tuple(
    (name, re.compile(pattern))
    for name, pattern in (
        ("Apache-2.0 WITH LLVM-exception", r"apache license v ?2 0 with llvm exceptions"),
        ("Apache-2.0 OR MIT", r"licensed under the apache license version 2 0.{0,200} or the mit license"
                              r"|licensed under either of apache license|under the terms of the mit (license )?(or|and) apache"),
        ("Apache-2.0", r"licensed under the apache license|apache license (v|version )?2( 0)?\b"
                       r"|licensed to the apache software foundation"),
        ("MPL-2.0", r"mozilla public license v(ersion)? ?2 0"),
        ("EPL-2.0", r"eclipse public license (v|version )? ?2 0"),
        ("EPL-1.0", r"eclipse public license (v|version )? ?1 0"),
        ("BSL-1.0", r"boost software license"),
        ("BSD-4-Clause", r"redistributions in binary form.*advertising materials mentioning"),
        ("BSD-3-Clause", r"redistributions in binary form.*(neither the names? of|names? of .{0,80} may not be used to endorse)"),
        ("BSD-2-Clause", r"redistributions in binary form must reproduce"),
        ("MIT", r"permission is hereby granted free of charge to any person obtaining.*shall be included in"),
        ("MIT-0", r"permission is hereby granted free of charge to any person obtaining"),
        ("ISC", r"permission to use copy modify and (or )?distribute this software for any purpose with or without fee is hereby"
                r" granted provided"),
        ("0BSD", r"permission to use copy modify and (or )?distribute this software for any purpose with or without fee"),
        ("Zlib", r"the origin of this software must not be misrepresented"),
        ("Unlicense", r"this is free and unencumbered software released into the public domain"),
        ("CC0-1.0", r"creative commons zero|\bcc0 1 0"),
        ("PHP-3.01", r"version 3 01 of the php license"),
        ("PSF-2.0", r"licensed to psf under a contributor agreement"),
        ("BSD-3-Clause", r"\bthe (new |modified |3 clause |three clause )bsd licen[cs]e|\bbsd 3 clause|3 clause bsd"),
        ("BSD-2-Clause", r"\bthe (simplified |2 clause )bsd licen[cs]e|\bbsd 2 clause"),
        ("MIT", r"(under|under the terms of) (the )?(an )?mit (style )?licen[cs]e|licen[cs]e mit\b|\bmit licensed\b"),
        ("ISC", r"under the (terms of the )?isc licen[cs]e"),
    )
)  # fmt: skip
_ALIASES = {
    "mit license": "MIT", "the mit license": "MIT", "expat": "MIT", "mit/x11": "MIT", "x11": "X11", "mit license (mit)": "MIT",
    "apache 2": "Apache-2.0", "apache 2.0": "Apache-2.0", "apache-2": "Apache-2.0", "apache license 2.0": "Apache-2.0",
    "apache license, version 2.0": "Apache-2.0",
    "apache license version 2.0": "Apache-2.0", "apache software license": "Apache-2.0",
    "apache software license 2.0": "Apache-2.0", "apache2": "Apache-2.0", "asl 2.0": "Apache-2.0",
    "bsd-3": "BSD-3-Clause", "3-clause bsd": "BSD-3-Clause", "bsd 3-clause": "BSD-3-Clause", "new bsd": "BSD-3-Clause",
    "new bsd license": "BSD-3-Clause", "modified bsd license": "BSD-3-Clause", "bsd-3-clause license": "BSD-3-Clause",
    "bsd 3-clause license": "BSD-3-Clause", "3-clause bsd license": "BSD-3-Clause", "bsd-2": "BSD-2-Clause",
    "simplified bsd": "BSD-2-Clause", "2-clause bsd": "BSD-2-Clause", "bsd 2-clause": "BSD-2-Clause", "isc license": "ISC",
    "mozilla public license 2.0 (mpl 2.0)": "MPL-2.0", "mpl 2.0": "MPL-2.0", "mpl2": "MPL-2.0", "zlib license": "Zlib",
    "gpl-2": "GPL-2.0-only", "gpl-2+": "GPL-2.0-or-later", "gpl-3": "GPL-3.0-only", "gpl-3+": "GPL-3.0-or-later",
    "gplv2": "GPL-2.0-only", "gplv3": "GPL-3.0-only", "lgpl-2.1": "LGPL-2.1-only", "lgpl-2.1+": "LGPL-2.1-or-later",
    "lgpl-3": "LGPL-3.0-only", "lgpl-3+": "LGPL-3.0-or-later", "lgplv3": "LGPL-3.0-only", "agpl-3": "AGPL-3.0-only",
    "gnu gpl v3": "GPL-3.0-only", "psf": "PSF-2.0", "psf license": "PSF-2.0", "python-2": "Python-2.0",
    "python software foundation license": "PSF-2.0", "unlicense": "Unlicense", "the unlicense (unlicense)": "Unlicense",
    "public-domain": "LicenseRef-Public-Domain", "public domain": "LicenseRef-Public-Domain",
    "cc0": "CC0-1.0", "boost": "BSL-1.0",
}  # fmt: skip


@dataclass(frozen=True)
class Match:
    """Templates that a text covers (their ids, in order of matched length) and the share of the text they explain."""

    ids: tuple[str, ...] = ()
    coverage: float = 0.0  # smallest share of a matched template that the text holds
    explained: float = 0.0  # share of the text's trigrams that some matched template holds

    @property
    def expression(self) -> str:
        """The ids joined by AND, sorted; "" for none."""
        return " AND ".join(sorted(self.ids))


def words(text: str) -> list[str]:
    """Lower-case words of a text without copyright lines and addresses; British and American spelling made one."""
    return [w.replace("licence", "license") for w in _WORD.findall(_NOISE.sub(" ", text).lower())]


def _trigrams(tokens: list[str]) -> set[tuple[str, ...]]:
    return set(zip(tokens, tokens[1:], tokens[2:]))


@lru_cache(maxsize=1)
def _templates() -> dict[str, set[tuple[str, ...]]]:
    from identify.vendor.licenses import LICENSES

    gnu = {name: f"{name}-only" for name in ("GPL-2.0", "GPL-3.0", "LGPL-2.1", "LGPL-3.0", "AGPL-3.0")}
    texts = {gnu.get(name, name): text for name, text in LICENSES}
    # MIT without its only condition is MIT-0.
    texts["MIT-0"] = re.sub(r"(?s),?\s*subject to\s+the following conditions:.*?substantial portions of the Software", "",
                            texts["MIT"])  # fmt: skip
    return {name: _trigrams(words(text)) for name, text in texts.items()}


def identify(text: str, min_coverage: float = MIN_COVERAGE) -> Match:
    """Which licences a licence text holds; several for a file that bundles some. An empty match when none is covered."""
    tokens = words(text)
    mine = _trigrams(tokens)
    if not mine:
        return Match()
    left, found, coverages = set(mine), [], []
    templates = {name: grams for name, grams in _templates().items() if len(grams & mine) >= min_coverage * len(grams)}
    while templates:
        matched = {name: len(grams & left) for name, grams in templates.items()}
        # What the text lacks of a template counts against it: BSD-2-Clause is not BSD-3-Clause less a clause.
        name = max(sorted(matched), key=lambda n: 2 * matched[n] - len(templates[n]))
        if matched[name] < min_coverage * len(templates[name]):
            templates = {n: g for n, g in templates.items() if matched[n] >= min_coverage * len(g)}
            continue
        found.append(name)
        coverages.append(matched[name] / len(templates[name]))
        left -= templates.pop(name)
    joined = " ".join(tokens)
    for name, sentence in _SENTENCES.items():
        if re.search(sentence, joined):
            coverages.append(1.0)
            found.append(name)
    if "BSD-4-Clause" in found:
        found = [n for n in found if n not in ("BSD-3-Clause", "BSD-2-Clause")]
    if "LLVM-exception" in found:
        found = [n for n in found if n not in ("LLVM-exception", "Apache-2.0")] + ["Apache-2.0 WITH LLVM-exception"]
    if not found and (notice := header(text)):  # a COPYING file that only says which licence applies
        return Match((notice,))
    return Match(tuple(found), min(coverages, default=0.0), 1 - len(left) / len(mine))


def header(text: str) -> str:
    """Licence that a source file states about itself: its SPDX tag, else the notice in its first characters, else ""."""
    head = text[:HEADER_CHARS]
    lower = head.lower()
    if (
        "licen" not in lower
        and "permission" not in lower
        and "redistribution" not in lower
        and "public domain" not in lower
    ):
        return ""
    tag = _TAG.search(head)
    if tag:
        return normalise(tag.group(1)) or tag.group(1).strip()
    plain = " ".join(_WORD.findall(lower))
    gnu = _GNU.search(plain)
    if gnu:
        kind = (gnu["kind"] or gnu["kind2"] or "").strip()
        version = (gnu["version"] or gnu["version2"]).replace(" ", ".").replace("..", ".")
        version = version if "." in version else f"{version}.0"
        name = {"lesser": "LGPL", "library": "LGPL", "affero": "AGPL"}.get(kind, "GPL")
        later = "any later version" in plain or "or later" in plain
        return normalise(f"{name}-{version}-{'or-later' if later else 'only'}")
    return next((name for name, pattern in _NOTICES if pattern.search(plain)), "")


@lru_cache(maxsize=1)
def _licensing():
    from license_expression import get_spdx_licensing

    return get_spdx_licensing()


@lru_cache(maxsize=4096)
def normalise(label: str) -> str:
    """A licence label of package metadata as an SPDX expression; "" when it is none and no alias or list of names is known."""
    label = " ".join(label.split()).strip(" .")
    if not label or len(label) > 300:
        return ""
    alias = _ALIASES.get(label.lower())
    if alias:
        return alias
    try:
        parsed = _licensing().parse(label, validate=True)
        return parsed.render("{symbol.key}") if parsed is not None else ""
    except Exception:  # ExpressionError and its kin, of two packages
        pass
    parts = [p for p in re.split(r"[\s,;/]+(?:and\s+)?|\s*&\s*", label) if p]
    names = [normalise(p) if len(parts) > 1 else "" for p in parts]
    return " AND ".join(sorted(set(names))) if names and all(names) and len(parts) > 1 else ""


@lru_cache(maxsize=4096)
def ids(expression: str) -> frozenset[str]:
    """Identifiers of an expression, `-only` and `-or-later` dropped; the label itself when it does not parse."""
    try:
        keys = _licensing().license_keys(expression, unique=True)
    except Exception:
        keys = [expression]
    return frozenset(re.sub(r"-(only|or-later)$|\+$", "", k) for k in keys)


def permitted(expression: str, allow: Iterable[str], deny: Iterable[str], unknown: bool) -> bool:
    """Whether an expression passes: each AND part and one OR part must be in `allow` (empty: all) and not in `deny`.

    Names end in `*` to stand for a family (`GPL-*`). `unknown` decides for "" and for what is no SPDX expression.
    """
    if not expression or expression.startswith("LicenseRef-"):
        return unknown
    try:
        parsed = _licensing().parse(expression, validate=True, simple=False)
    except Exception:
        return unknown

    def listed(name: str, names: Iterable[str]) -> bool:
        return any(name == n or (n.endswith("*") and name.startswith(n[:-1])) for n in names)

    def passes(node) -> bool:
        operator = getattr(node, "operator", None)
        if operator and operator.strip() == "OR":
            return any(passes(a) for a in node.args)
        if operator:
            return all(passes(a) for a in node.args)
        name = node.render("{symbol.key}")
        base = name.partition(" WITH ")[0]
        fine = not tuple(allow) or listed(name, allow) or listed(base, allow)
        return fine and not listed(name, deny) and not listed(base, deny)

    return passes(parsed)


def is_licence_file(path: str) -> bool:
    """Whether a path is a licence text by its name (LICENSE, COPYING.LESSER, MIT-LICENSE, ...)."""
    name = PurePosixPath(path).name
    return bool(_FILE.match(name)) and not _NO_FILE.search(name)


def inherited(path: str, by_folder: Mapping[str, str]) -> str:
    """Expression of the nearest folder above `path` that has a licence file; keys are folders, "." the root."""
    for folder in PurePosixPath(path).parents:
        if by_folder.get(str(folder)):
            return by_folder[str(folder)]
    return ""


def by_folder(texts: Mapping[str, str]) -> dict[str, str]:
    """folder -> expression of its licence files, from {path: text}; folders whose texts are unknown are left out."""
    found: dict[str, set[str]] = {}
    for path, text in texts.items():
        match = identify(text)
        if match.ids:
            found.setdefault(str(PurePosixPath(path).parent), set()).update(match.ids)
    return {folder: " AND ".join(sorted(names)) for folder, names in sorted(found.items())}


def main() -> None:
    for name in sys.argv[1:]:
        text = Path(name).read_text(encoding="utf-8", errors="replace")
        match = identify(text)
        print(f"{name}: header {header(text) or '-'}, text {match.expression or '-'} "
              f"(coverage {match.coverage:.2f}, explains {match.explained:.2f})")  # fmt: skip


if __name__ == "__main__":
    main()
