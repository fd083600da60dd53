"""Changelog entries, matching of changes to issues, diffs that apply, git histories, and the swe_data stage."""

from __future__ import annotations

import json
import os
import subprocess

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks import changes, documents, swe_data
from tasks.changes import Change, FileChange
from tasks.stage import run_stage_for_test
from tasks.swe_data import CodeSplits
from tasks.tokens import SPLITS, split_of

OLD_LOG = """
1.0 (2024-01-01)
================

- First release. (`#1 <https://example.org/1>`__)
"""
NEW_LOG = (
    """
1.1 (2024-02-01)
================

Bugfixes
--------

- Fixed ``parse_header`` to accept empty values, which
  raised ``HeaderError`` before:

  - nested detail

  (`#12 <https://example.org/12>`__, :pr:`13`)
- Added a timeout to :class:`pool.Pool` connections. (#14)
- Documentation only.
"""
    + OLD_LOG
)
HEADERS = (
    "class HeaderError(Exception):\n    pass\n\n\ndef parse_header(line):\n    name, _, value = line.partition(':')\n"
)
OLD = {
    "src/pkg/headers.py": HEADERS + "    if not value:\n        raise HeaderError(line)\n    return name, value\n",
    "src/pkg/pool.py": "class Pool:\n    def connect(self, host):\n        return open_connection(host)\n",
    "src/pkg/misc.py": "VALUE = 1\n",
    "tests/test_headers.py": "def test_parse_header():\n    assert parse_header('a:b') == ('a', 'b')\n",
}
NEW = OLD | {
    "src/pkg/headers.py": HEADERS + "    return name, value\n",
    "src/pkg/pool.py": "class Pool:\n    def connect(self, host, timeout=None):\n        return open_connection(host, timeout)\n",
    "src/pkg/misc.py": "VALUE = 2\n",
    "tests/test_headers.py": OLD["tests/test_headers.py"] + "    assert parse_header('a:') == ('a', '')\n",
}


def test_changelog_entries_and_references():
    entries = changes.changelog_entries(NEW_LOG)
    assert [h for h, _ in entries] == ["Bugfixes"] * 3 + ["1.0 (2024-01-01)"]
    assert entries[0][1] == (
        "Fixed `parse_header` to accept empty values, which raised `HeaderError` before: - nested detail (#12, #13)"
    )
    assert entries[1][1] == "Added a timeout to pool.Pool connections. (#14)"
    assert changes.references(entries[0][1]) == (12, 13)
    assert changes.references("see https://github.com/a/b/issues/7 and b/pull/8, color #123abc, &#39;") == (7, 8)
    markdown = "## 2.0\n\n### Added\n* One ([#3](http://x))\n* Two\n## 1.0\n- Three\n"
    assert changes.changelog_entries(markdown) == [("Added", "One (#3)"), ("Added", "Two"), ("1.0", "Three")]


def test_versions_sort_as_releases_do():
    versions = ["2.10", "2.9.1", "2.9", "2.10rc1", "10.0", "2.9.post1"]
    assert sorted(versions, key=changes.version_key)[-1] == "10.0"
    order = sorted(["2.10", "2.9", "2.10rc1", "2.9.1"], key=changes.version_key)
    assert order == ["2.9", "2.9.1", "2.10rc1", "2.10"]


def test_changed_files_go_to_the_entry_they_are_about():
    found = list(changes.release_changes("pkg", ("1.0", OLD, OLD_LOG), ("1.1", NEW, NEW_LOG), least_score=0.5))
    by_title = {c.issue_title or c.pr_title: c for c in found}
    headers = next(c for c in found if 12 in c.references)
    assert [f.path for f in headers.files] == ["src/pkg/headers.py", "tests/test_headers.py"]
    assert headers.pr_body == "Closes #12. Closes #13." and headers.pr_title.startswith("Bugfixes: Fixed")
    pool = by_title["Added a timeout to pool.Pool connections"]
    assert [f.path for f in pool.files] == ["src/pkg/pool.py"] and pool.references == (14,)
    rest = [c for c in found if not c.issue_title]
    assert [f.path for c in rest for f in c.files] == ["src/pkg/misc.py"]
    assert len(found) == 3  # an entry without changed files makes no change


LINES = st.lists(st.sampled_from(["a", "b", "c", "", "  d", "e\x0cf\u2028g", "\r"]), max_size=12).map(
    lambda x: "\n".join(x)
)


@settings(max_examples=25, deadline=None)
@given(old=st.one_of(st.none(), LINES), new=st.one_of(st.none(), LINES))
def test_diffs_apply_with_git(tmp_path_factory, old, new):
    change = FileChange("dir/file.txt", old, new)
    diff = change.diff()
    if old == new:
        assert diff == ""
        return
    folder = tmp_path_factory.mktemp("apply")
    (folder / "dir").mkdir()
    if old is not None:
        (folder / "dir/file.txt").write_bytes(old.encode())
    run = subprocess.run(["git", "apply", "-"], input=diff.encode(), cwd=folder, capture_output=True)
    assert run.returncode == 0, run.stderr
    path = folder / "dir/file.txt"
    assert (path.read_bytes().decode() if path.exists() else None) == new


def test_excerpt_shows_what_changes_within_its_limit():
    lines = [f"line {i} of a long file" for i in range(2000)]
    new = list(lines)
    new[1000] = "changed"
    change = FileChange("a.py", "\n".join(lines), "\n".join(new))
    text = changes.excerpt(change, 1500)
    assert len(text) <= 1500 and "line 1000 of" in text and "line 0 of" in text and "line 500 of" not in text
    assert text.count("...\n") == 2
    assert changes.excerpt(FileChange("a", "short\n", "x"), 100) == "short\n"


def test_rendering_has_the_parts_in_order_and_drops_files_that_do_not_fit():
    change = Change(
        "pkg", "1.0", "1.1", (FileChange("a.py", "x = 1\n", "x = 2\n"),), "It fails", "It fails with 1.", ("Me too.",),
        "Fix it", "Closes #5.", (5,), (("b.py", "y = 3\n" * 50),),
    )  # fmt: skip
    text = swe_data.render(change, swe_data.Config())
    parts = ["Repository: pkg at 1.0", "File: a.py\nx = 1", "File: b.py", "Issue #5: It fails\nIt fails with 1.",
             "Comment:\nMe too.", "Pull request: Fix it\nCloses #5.", "diff --git a/a.py b/a.py", "-x = 1\n+x = 2\n"]  # fmt: skip
    positions = [text.index(p) for p in parts]
    assert positions == sorted(positions)
    small = swe_data.render(change, swe_data.Config(max_chars=500))
    assert "File: b.py" not in small and "File: a.py" in small and len(small) <= 500


@pytest.fixture
def repository(tmp_path):
    folder = tmp_path / "repo"
    folder.mkdir()
    environment = os.environ | {
        "GIT_AUTHOR_NAME": "A", "GIT_AUTHOR_EMAIL": "a@b.c", "GIT_COMMITTER_NAME": "A", "GIT_COMMITTER_EMAIL": "a@b.c",
        "GIT_AUTHOR_DATE": "2024-01-01T00:00:00Z", "GIT_COMMITTER_DATE": "2024-01-01T00:00:00Z",
        "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull,
    }  # fmt: skip

    def git(*arguments: str) -> str:
        run = subprocess.run(
            ["git", *arguments], cwd=folder, env=environment, check=True, capture_output=True, text=True
        )
        return run.stdout.strip()

    git("init", "-q")
    for files, message in (
        ({"pkg/a.py": "x = 1\n", "pkg/b.py": "def helper_function():\n    return 1\n"}, "Start"),
        (
            {"pkg/a.py": "x = helper_function()\n"},
            "Use helper_function\n\nx was wrong.\n\nFixes #7\nSigned-off-by: A <a@b.c>",
        ),
        ({"pkg/ünï.bin": "\0\1"}, "A binary file"),
        ({"pkg/c.py": "z = 1\n"}, "Add c (#8)"),
    ):
        for path, text in files.items():
            (folder / path).parent.mkdir(exist_ok=True)
            (folder / path).write_text(text)
        git("add", ".")
        git("commit", "-qm", message)
    return folder, git("rev-parse", "HEAD")


def test_git_history(repository):
    folder, head = repository
    found = list(changes.git_changes(folder, "repo", head, 10))
    assert [c.pr_title for c in found] == ["Start", "Use helper_function", "A binary file", "Add c (#8)"]
    fix = found[1]
    assert fix.issue_title == "Fixes #7" and fix.references == (7,) and "Signed-off-by" not in fix.pr_body
    assert fix.files == (FileChange("pkg/a.py", "x = 1\n", "x = helper_function()\n"),)
    assert [p for p, _ in fix.related] == ["pkg/b.py"]
    assert found[2].files == () and found[0].files[0].old is None
    assert [c.pr_title for c in changes.git_changes(folder, "repo", head, 2)] == ["A binary file", "Add c (#8)"]
    with pytest.raises(ValueError, match="git log failed"):
        list(changes.git_changes(folder, "repo", "0" * 40, 2))


def test_stage(tmp_path, repository):
    folder, head = repository
    real, rows = tmp_path / "real", []
    for version, files, log in (("1.10", NEW, NEW_LOG), ("1.9", OLD, OLD_LOG)):
        for path, text in (files | {"CHANGES.rst": log, "docs/x.rst": "prose\n" + version}).items():
            target = real / f"files/pkg-{version}" / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)
            row = {
                "item": "pkg",
                "version": version,
                "path": f"files/pkg-{version}/{path}",
                "kind": "code",
                "domain": "swe",
            }
            rows.append(row | {"licence": "MIT", "bytes": len(text), "sha256": "", "url": ""})
    pq.write_table(pa.Table.from_pylist(rows), real / "index.parquet")
    config = {"least_score": 0.5, "git_repos": [{"path": str(folder), "name": "repo", "revision": head}]}
    held_out = documents.document("x = 1\n" * 9, "elsewhere", "code", meta={"item": "other", "path": "a.py"})
    documents.write_documents(tmp_path / "code", [held_out])
    deps = {"data/acquire": real, "data/code": tmp_path / "code"}
    for run in ("one", "two"):
        run_stage_for_test(swe_data, config, deps=deps, outs=["data/swe_data"], tmp=tmp_path / run)
    out = tmp_path / "one/data/swe_data"
    assert (out / "manifest.json").read_text() == (tmp_path / "two/data/swe_data/manifest.json").read_text()
    docs = list(documents.read_documents(out))
    assert all(d["domain"] == "swe" and d["lang"] == "python" for d in docs)
    metas = [json.loads(d["meta"]) for d in docs]
    assert [(m["kind"], m["base"], m["references"]) for m in metas if m["kind"] == "release"] == [
        ("release", "1.9", [12, 13]),
        ("release", "1.9", [14]),
        ("release", "1.9", []),
    ]
    assert [d["text"].split("Pull request: ")[1].split("\n")[0] for d in docs[3:]] == ["Use helper_function"]
    assert not any("docs/x.rst" in d["text"] for d in docs)
    reasons = sorted(e["reason"] for e in documents.read_exclusions(out))
    assert reasons == ["empty_diff", "only_new_files", "only_new_files"]


def code_row(split: str, item: str, path: str, text: str, **meta) -> dict:
    """A code document whose id falls on that side of the split."""
    for n in range(1000):
        row = documents.document(text, f"{item}/{n}/{path}", "code", meta={"item": item, "path": path, **meta})
        if split_of(row["id"], 0.2) == split:
            return row
    raise AssertionError("no such id")


def test_a_change_to_a_held_out_file_is_held_out(tmp_path):
    rows = [
        code_row("val", "pkg", "a.py", "a = 1\n"),
        code_row("train", "pkg", "b.py", "b = 1\n"),
        code_row("val", "elsewhere", "copy.py", "c = 1\n"),
        code_row("val", "pkg", "r1.py", "# r1.py\nr = 1\n", files=["r1.py", "r2.py"]),
    ]
    documents.write_documents(tmp_path, rows)
    splits = CodeSplits(tmp_path, 0.2)

    def side(*files, related=(), repo="pkg"):
        return splits.of(Change(repo, "1", "2", tuple(FileChange(*f) for f in files), related=related))

    assert side(("a.py", "a = 0\n", "a = 2\n")) == "val"
    assert side(("b.py", "b = 0\n", "b = 2\n")) == "train"
    assert side(("b.py", "b = 0\n", "b = 2\n"), ("a.py", None, "a = 2\n")) == "val"
    assert side(("new.py", None, "c = 1\n"), repo="fork") == "val"  # by content, whatever its name
    assert side(("b.py", "b = 0\n", "b = 2\n"), related=(("r2.py", "r = 2\n"),)) == "val"
    assert (
        side(("unknown.py", "u = 0\n", "u = 1\n")) is None and side(("a.py", "a = 0\n", "a = 2\n"), repo="fork") is None
    )


def test_documents_carry_their_files_side(tmp_path, repository):
    folder, head = repository
    acquired = tmp_path / "real"
    acquired.mkdir()
    empty = pa.Table.from_pylist([{"item": "x", "version": "1", "path": "w", "domain": "web", "use": "train"}])
    pq.write_table(empty, acquired / "index.parquet")
    config = {"git_repos": [{"path": str(folder), "name": "repo", "revision": head}], "val_fraction": 0.2}
    sides = {}
    for split in SPLITS:
        run = tmp_path / split
        documents.write_documents(
            run / "code", [code_row(split, "repo", path, "x\n") for path in ("pkg/a.py", "pkg/b.py")]
        )
        deps = {"data/acquire": acquired, "data/code": run / "code"}
        run_stage_for_test(swe_data, config, deps=deps, outs=["data/swe_data"], tmp=run)
        found = [json.loads(d["meta"]).get("split") for d in documents.read_documents(run / "data/swe_data")]
        sides[split] = set(found)
        metrics = json.loads((run / "metrics/swe_data.json").read_text())["split_by_code_files"]
        assert metrics[split] == len(found) > 0
    assert sides == {"train": {"train"}, "val": {"val"}}
