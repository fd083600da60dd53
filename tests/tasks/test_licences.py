"""Licence texts, notices and labels against what package metadata states."""

from __future__ import annotations

from importlib import metadata

import pytest

from tasks import licences


def stated():
    """(name, expression, texts) of every installed distribution that states an SPDX expression and ships its licences."""
    for found in metadata.distributions():
        expression = found.metadata.get("License-Expression")
        files = [f for f in found.files or () if ".dist-info/" in str(f) and licences.is_licence_file(str(f))]
        texts = [f.locate().read_text(errors="replace") for f in files if f.locate().is_file()]
        if expression and texts:
            yield found.metadata["Name"], expression, texts


def test_texts_of_installed_packages_against_their_license_expression():
    exact = held = total = 0
    for _, expression, texts in stated():
        wanted = licences.ids(expression)
        found = frozenset().union(*(licences.ids(i) for t in texts for i in licences.identify(t).ids))
        total += 1
        held += wanted <= found
        exact += wanted == found or len(texts) > 1 and wanted <= found  # bundled parts bring texts that are not stated
    assert total > 60
    assert held >= 0.95 * total and exact >= 0.93 * total, (held, exact, total)


MIT = """Permission is hereby granted, free of charge, to any person obtaining a copy of this software and associated
documentation files (the "Software"), to deal in the Software without restriction, including without limitation the rights
to use, copy, modify, merge, publish, distribute, sublicense, and/or sell copies of the Software, and to permit persons to
whom the Software is furnished to do so"""
CONDITION = """, subject to the following conditions:

The above copyright notice and this permission notice shall be included in all copies or substantial portions of the
Software."""


@pytest.mark.parametrize(
    "head, expression",
    [
        ("// SPDX-License-Identifier: (MIT OR Apache-2.0)\n", "MIT OR Apache-2.0"),
        ("/* SPDX-License-Identifier: GPL-2.0-only WITH Linux-syscall-note */\n", "GPL-2.0-only WITH Linux-syscall-note"),
        ("# Licensed under the Apache License, Version 2.0 (the\n# \"License\"); you may not use", "Apache-2.0"),
        (" * This program is free software; you can redistribute it and/or modify it under the terms of the\n * GNU General"
         " Public License as published by the FSF; either version 2 of\n * the License, or (at your option) any later version.",
         "GPL-2.0-or-later"),
        ("(* under the terms of the GNU Lesser General Public License version 2.1, with the special exception *)",
         "LGPL-2.1-only"),
        ("-- This Source Code Form is subject to the terms of the Mozilla Public\n-- License, v. 2.0.", "MPL-2.0"),
        ("/*\n * " + (MIT + CONDITION).replace("\n", "\n * "), "MIT"),
        ("/*\n * " + MIT.replace("\n", "\n * ") + ".\n */", "MIT-0"),
        ("# This source code is licensed under the MIT license found in the\n# LICENSE file in the root", "MIT"),
        ("import os  # no licence is mentioned here\n", ""),
        ("def licensed_under(name):\n    return name\n", ""),
        ("x = 1\n", ""),
    ],
)  # fmt: skip
def test_header(head, expression):
    assert licences.header(head) == expression


def test_clauses_tell_licences_of_one_family_apart():
    from identify.vendor.licenses import LICENSES

    texts = dict(LICENSES)
    for name, text in texts.items():
        assert licences.ids(licences.identify(text).expression) == {name}, name
    both = licences.identify(texts["Apache-2.0"] + "\n\n" + texts["BSD-2-Clause"])
    assert both.expression == "Apache-2.0 AND BSD-2-Clause" and both.explained > 0.95
    advert = (
        texts["BSD-3-Clause"]
        + "\nAll advertising materials mentioning features or use of this software must display this"
    )
    assert licences.identify(advert).ids == ("BSD-4-Clause",)
    assert licences.identify("All rights reserved. You may not copy this text, nor read it aloud.").ids == ()
    assert licences.identify("").expression == ""


@pytest.mark.parametrize(
    "label, expression",
    [("MIT License", "MIT"), ("mit", "MIT"), ("Apache 2.0", "Apache-2.0"), ("MIT OR Apache-2.0", "MIT OR Apache-2.0"),
     ("Expat BSD-3-clause CC-BY-SA-3.0", "BSD-3-Clause AND CC-BY-SA-3.0 AND MIT"), ("see the web site", ""), ("", "")],
)  # fmt: skip
def test_labels_of_metadata(label, expression):
    assert licences.normalise(label) == expression


def test_allow_and_deny():
    deny = ("GPL-*", "AGPL-*")
    assert licences.permitted("MIT", (), deny, False) and not licences.permitted("GPL-3.0-only", (), deny, True)
    assert licences.permitted("MIT OR GPL-2.0-only", (), deny, False)
    assert not licences.permitted("MIT AND GPL-2.0-or-later", (), deny, False)
    assert licences.permitted("Apache-2.0 WITH LLVM-exception", ("Apache-2.0",), (), False)
    assert not licences.permitted("MPL-2.0", ("MIT",), (), True)
    assert licences.permitted("", ("MIT",), (), True) and not licences.permitted("", ("MIT",), (), False)
    assert licences.permitted("LicenseRef-Public-Domain", ("MIT",), (), True)


def test_the_nearest_folders_licence_is_inherited():
    from identify.vendor.licenses import LICENSES

    texts = dict(LICENSES)
    folders = licences.by_folder(
        {"LICENSE": texts["MIT"], "third/lua/COPYING": texts["Zlib"], "docs/LICENSE": "unreadable"}
    )
    assert folders == {".": "MIT", "third/lua": "Zlib"}
    assert licences.inherited("third/lua/src/a.c", folders) == "Zlib"
    assert licences.inherited("docs/a.py", folders) == "MIT" and licences.inherited("a.py", {}) == ""


@pytest.mark.parametrize(
    "path, yes",
    [("LICENSE", True), ("a/COPYING.LESSER", True), ("MIT-LICENSE", True), ("LICENSE-APACHE", True), ("UNLICENSE", True),
     ("licenses.py", False), ("license.js", False), ("src/copyright.rs", False), ("README", False)],
)  # fmt: skip
def test_names_of_licence_files(path, yes):
    assert licences.is_licence_file(path) is yes
