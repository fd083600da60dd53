"""Imports inside a repository, the order they give, and bounded groups of ordered files."""

from __future__ import annotations

import random
import sysconfig
from pathlib import Path

import pytest

from tasks.repo_order import Tree, components, imports, order, pack

CASES = {
    "python": (
        {"pkg/__init__.py": "", "pkg/core.py": "", "pkg/sub/deep.py": "", "pkg/sub/__init__.py": "", "other.py": ""},
        "pkg/app.py",
        "import os, pkg.core\nfrom .sub import deep\nfrom . import core as c\nfrom numpy import array\nimport other\n",
        {"pkg/core.py", "pkg/sub/deep.py", "pkg/sub/__init__.py", "other.py"},
    ),
    "typescript": (
        {"src/a.ts": "", "src/lib/index.ts": "", "src/view.tsx": "", "src/x.js": ""},
        "src/main.ts",
        "import {a} from './a.js';\nexport * from \"./lib\";\nconst v = await import('./view');\nimport fs from 'fs';\n",
        {"src/a.ts", "src/lib/index.ts", "src/view.tsx"},
    ),
    "c": (
        {"include/util/log.h": "", "src/own.h": "", "src/other.c": ""},
        "src/own.c",
        '#include <stdio.h>\n#include "own.h"\n#  include <util/log.h>\n',
        {"src/own.h", "include/util/log.h"},
    ),
    "go": (
        {"pkg/store/a.go": "", "pkg/store/b.go": "", "pkg/store/a_test.go": "", "cmd/x.go": ""},
        "cmd/main.go",
        'package main\n\nimport (\n\t"fmt"\n\ts "github.com/me/repo/pkg/store"\n)\n',
        {"pkg/store/a.go", "pkg/store/b.go"},
    ),
    "rust": (
        {"src/store.rs": "", "src/net/mod.rs": "", "src/net/http.rs": "", "src/util.rs": ""},
        "src/lib.rs",
        "mod store;\npub mod net;\nuse crate::net::http::{Client, Server};\nuse crate::{util, missing};\nuse std::io;\n",
        {"src/store.rs", "src/net/mod.rs", "src/net/http.rs", "src/util.rs"},
    ),
    "java": (
        {"app/src/main/java/org/me/Store.java": "", "app/src/main/java/org/me/Kinds.kt": ""},
        "app/src/main/java/org/me/Main.java",
        "package org.me;\nimport java.util.List;\nimport org.me.Store;\nimport static org.me.Kinds.ALL;\n",
        {"app/src/main/java/org/me/Store.java", "app/src/main/java/org/me/Kinds.kt"},
    ),
    "php": (
        {"Twig/Node/Node.php": "", "Twig/boot.php": ""},
        "Twig/Compiler.php",
        "<?php\nuse Twig\\Node\\Node;\nrequire_once __DIR__.'/boot.php';\n",
        {"Twig/Node/Node.php", "Twig/boot.php"},
    ),
    "ruby": ({"lib/a/b.rb": "", "lib/a/c.rb": ""}, "lib/a.rb", "require 'a/b'\nrequire_relative 'a/c'\nrequire 'json'\n",
             {"lib/a/b.rb", "lib/a/c.rb"}),
    "lua": ({"lua/m/util.lua": "", "lua/n/init.lua": ""}, "lua/main.lua",
            "local u = require('m.util')\nlocal n = require 'n'\n",
            {"lua/m/util.lua", "lua/n/init.lua"}),
    "haskell": ({"src/Data/Tree.hs": ""}, "src/Main.hs",
                "import qualified Data.Tree as T\nimport Prelude\n", {"src/Data/Tree.hs"}),
}  # fmt: skip


@pytest.mark.parametrize("language", CASES)
def test_imports_of(language):
    others, path, text, wanted = CASES[language]
    assert imports(path, text, language, Tree([*others, path])) == wanted


def test_a_language_without_a_reader_has_no_imports():
    assert imports("a.xyz", "import b", "cobol", Tree(["a.xyz", "b.xyz"])) == set()


def test_imported_files_come_first_and_cycles_are_broken_the_same_way():
    files = {
        "m/top.py": ("from m import mid, low\n", "python"),
        "m/mid.py": ("from m import low\n", "python"),
        "m/low.py": ("import os\n", "python"),
        "m/ring_a.py": ("from m import ring_b, mid\n", "python"),
        "m/ring_b.py": ("from m import ring_c\n", "python"),
        "m/ring_c.py": ("from m import ring_a, low\n", "python"),
        "m/user.py": ("from m import ring_a\n", "python"),
    }
    found = order(files)
    assert sorted(found) == sorted(files)
    at = {path: n for n, path in enumerate(found)}
    assert at["m/low.py"] < at["m/mid.py"] < at["m/top.py"]
    assert at["m/mid.py"] < min(at[f"m/ring_{x}.py"] for x in "abc") and at["m/user.py"] > max(
        at[f"m/ring_{x}.py"] for x in "abc"
    )
    for seed in range(5):
        paths = list(files)
        random.Random(seed).shuffle(paths)
        assert order({p: files[p] for p in paths}) == found


def test_order_of_a_real_library_breaks_no_import_outside_cycles():
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(
        p for folder in ("asyncio", "email", "concurrent", "importlib") for p in (root / folder).rglob("*.py")
    )
    files = {p.relative_to(root).as_posix(): (p.read_text(encoding="utf-8"), "python") for p in paths}
    tree = Tree(files)
    needs = {path: imports(path, *files[path], tree) for path in files}
    group = {path: n for n, paths in enumerate(components(needs)) for path in paths}
    at = {path: n for n, path in enumerate(order(files))}
    edges = [(path, other) for path, wanted in needs.items() for other in wanted]
    outside = [(path, other) for path, other in edges if group[path] != group[other]]
    assert len(outside) > 100
    assert all(at[other] < at[path] for path, other in outside)
    assert sum(at[other] < at[path] for path, other in edges) > 0.75 * len(edges)


def test_groups_are_bounded_and_hold_at_least_two():
    sizes = {"a": 4, "b": 4, "c": 4, "d": 99, "e": 3, "f": 3}
    assert pack("abcdef", sizes, 9) == [["a", "b"], ["e", "f"]]
    assert pack("abc", sizes, 100) == [["a", "b", "c"]] and pack("", sizes, 9) == [] and pack("a", sizes, 9) == []
