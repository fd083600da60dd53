"""Alignment of archive exports: real files with planted faults of every kind, and each repair by itself."""

from __future__ import annotations

import sysconfig
from dataclasses import replace
from pathlib import Path

import pytest

from tasks import licences
from tasks.records import Record
from tasks.swh_align import Aligner, content_hashes, is_export
from tasks.swh_evidence import best_offsets
from tests.tasks.swh_export import LABELS, MOVED, REJECTED, clean_rows, measure, plant, source_files

LICENCES = {"numpy": "BSD-3-Clause", "sympy": "BSD-3-Clause", "pygments": "BSD-2-Clause", "torch": "BSD-3-Clause",
            "pydantic": "MIT", "httpx": "BSD-3-Clause", "starlette": "BSD-3-Clause", "rich": "MIT"}  # fmt: skip


@pytest.fixture(scope="module")
def rows() -> list[Record]:
    root = Path(sysconfig.get_paths()["purelib"])
    found = source_files(root, [p for p in LICENCES if (root / p).is_dir()], 60, {".py", ".h", ".f90", ".cuh", ".js"})
    return clean_rows(
        (repo, path, content, licences.header(content.decode("utf-8", "replace")) or LICENCES[repo])
        for repo, path, content, _ in found
    )


@pytest.mark.parametrize("seed", [1, 2])
def test_planted_faults_are_repaired_or_rejected(rows, seed):
    result = measure(plant(rows, seed, runs=1))
    recall = result["recall"]
    assert {*recall} >= {*LABELS, *REJECTED, "rows_shifted", "hash_shifted", "swapped"}
    for kinds, least in (([k for k in MOVED if k != "path_shifted"], 0.95), (LABELS, 0.95), (REJECTED, 0.95)):
        right = sum(recall[k][0] for k in kinds if k in recall)
        planted = sum(recall[k][1] for k in kinds if k in recall)
        assert planted >= 10 and right >= least * planted, (kinds, recall)
    right, changed = result["repairs_right"]
    assert changed > 50 and right >= 0.95 * changed, result["repairs_right"]
    wrong, clean = result["clean_lost_or_changed"]
    assert wrong <= 0.02 * clean, result["clean_lost_or_changed"]
    assert any(abs(s["offset"]) in (1, 2, 3, 5, 11) for s in result["report"]["shifts"])


def test_a_shifted_path_column_is_seen_where_the_languages_differ():
    """Paths alone, one row off: extensions and file names tell, hashes do not."""
    made = []
    for n in range(40):
        name = f"Widget{n}Part"
        java = f"package a;\n\npublic class {name} {{\n  int size = {n};\n}}\n"
        python = f"import os\n\n\ndef widget{n}part(folder):\n    return os.listdir(folder)\n"
        made.append(row(java, f"src/{name}.java") if n % 2 else row(python, f"lib/widget{n}part.py"))
    given = [replace(r, path=made[(n + 1) % 40].path) for n, r in enumerate(made)]
    aligner = Aligner(lambda *x: None)
    out = list(aligner.run(given))
    right = sum(r.path == next(m.path for m in made if m.content == r.content) for r in out)
    assert right >= 39 and aligner.report.shifts[0] == {"column": "place", "first_row": 1, "rows": 39, "offset": -1}


def test_a_clean_export_passes_unchanged(rows):
    rejected = []
    out = list(Aligner(lambda *x: rejected.append(x)).run(rows))
    assert len(rejected) <= 0.01 * len(rows)
    kept = {r.id: r for r in rows}
    assert all(r == kept[r.id] for r in out)


def row(content: str, path: str, **meta) -> Record:
    data = content.encode()
    hashes = content_hashes(data)
    return Record(
        path, "code", data, path, meta={"blob_id": hashes["sha1_git"], "length": len(data), "repo": "r", **meta}
    )


def test_gits_own_hash():
    assert content_hashes(b"hello\n")["sha1_git"] == "ce013625030ba8dba906f756967f9e9ca394464a"
    assert content_hashes(b"")["sha1"] == "da39a3ee5e6b4b0d3255bfef95601890afd80709"


def test_a_record_without_an_exports_columns_is_none():
    assert is_export(row("x = 1\n", "a.py")) and not is_export(
        Record("1", "code", b"x", "a.py", meta={"commit": "f" * 40})
    )


def test_the_ingest_stages_nested_metadata_row_is_read():
    good = row("value = 1\n" * 9, "value.py")
    nested = replace(good, meta={"key": good.meta["blob_id"], "swh": good.meta})
    wrong = replace(row("total = 1\n" * 9, "total.py"), meta={"key": "x", "swh": good.meta | {"repo": "q"}})
    rejected = []
    out = list(Aligner(lambda record, reason, detail: rejected.append(reason)).run([nested, wrong]))
    assert is_export(nested) and [r.meta["repo"] for r in out] == ["r"] and rejected == ["hash_mismatch"]


def test_every_reject_says_what_was_found_and_expected():
    rejected = []
    good, cut = row("value = 1\n" * 9, "value.py"), row("total = 2\n" * 9, "total.py")
    cut = replace(cut, content=cut.content[:40])
    strange = replace(row("other = 3\n" * 9, "other.py"), content=b"changed = 3\n" * 20)
    empty = replace(row("gone = 4\n" * 9, "gone.py"), content=b"")
    aligner = Aligner(lambda record, reason, detail: rejected.append((record.path, reason, detail)))
    assert list(aligner.run([good, cut, good, strange, empty])) == [good]
    told = [(path, reason) for path, reason, _ in rejected]
    assert told == [
        ("total.py", "truncated_content"),
        ("value.py", "duplicated_row"),
        ("other.py", "hash_mismatch"),
        ("gone.py", "missing_content"),
    ]
    assert "40 bytes" in rejected[0][2] and "states 90 bytes" in rejected[0][2]
    assert aligner.report.as_dict()["rejected"]["hash_mismatch"] == 1


def test_blocks_bound_the_memory_and_the_report_counts_over_all(rows):
    whole, parts = Aligner(lambda *x: None), Aligner(lambda *x: None, block_rows=50)
    assert [r.id for r in whole.run(rows)] == [r.id for r in parts.run(rows)]
    assert parts.report.records == len(rows)


def test_offsets_of_nothing():
    assert best_offsets(None, [], 4) == ([], [])
