"""The document table: round trip, stable ids, byte determinism, clear errors, exclusions."""

import hashlib
import json
from pathlib import Path

import pytest

from tasks import documents
from tasks.documents import (
    Exclusions,
    count_documents,
    document,
    document_id,
    read_documents,
    read_exclusions,
    write_documents,
)


def _rows(n: int) -> list[dict]:
    return [
        document(f"text {i} é漢", f"item/{i}", "web", lang="en", meta={"b": 1, "a": i}, quality=i / 7) for i in range(n)
    ]


def _hashes(directory: Path) -> dict[str, str]:
    files = sorted(p for p in directory.rglob("*") if p.is_file())
    return {str(p.relative_to(directory)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def test_round_trip_over_several_shards(tmp_path):
    rows = _rows(10)
    summary = write_documents(tmp_path, iter(rows), rows_per_shard=4)
    assert summary == {"documents": 10, "bytes": sum(len(r["text"].encode()) for r in rows), "domains": {"web": 10}}
    assert len(list((tmp_path / "documents").iterdir())) == 3
    assert list(read_documents(tmp_path)) == rows
    assert count_documents(tmp_path) == 10
    assert json.loads(rows[3]["meta"]) == {"a": 3, "b": 1}
    assert [set(r) for r in read_documents(tmp_path, ["id", "quality", "other"])] == [{"id", "quality", "other"}] * 10


def test_equal_rows_give_equal_bytes(tmp_path):
    for name in ("one", "two"):
        write_documents(tmp_path / name, _rows(50), rows_per_shard=20)
        with Exclusions(tmp_path / name, rows_per_shard=10) as excluded:
            for row in _rows(25):
                excluded.add(row, "short", 3)
    assert _hashes(tmp_path / "one") == _hashes(tmp_path / "two")


def test_id_depends_on_source_and_text_and_is_pinned():
    assert document_id("a", "bc") != document_id("ab", "c")
    assert document_id("source", "text") == document("text", "source", "web")["id"]
    assert document_id("source", "text") == "2ca63e7450af2493"


def test_score_seen_late_becomes_a_null_column_in_every_shard(tmp_path):
    rows = [document("a", "s", "web"), document("b", "s", "code"), document("c", "s", "math", late=1.5)]
    write_documents(tmp_path, rows, rows_per_shard=1, scores=["declared"])
    assert [(r["late"], r["declared"]) for r in read_documents(tmp_path)] == [(None, None), (None, None), (1.5, None)]


def test_no_documents_still_gives_a_readable_table(tmp_path):
    write_documents(tmp_path, [])
    assert list(read_documents(tmp_path)) == []


@pytest.mark.parametrize(
    "change, words",
    [
        ({"domain": "poems"}, "domain 'poems' is not one of"),
        ({"text": None}, "column 'text' must be a string"),
        ({"text": "\ud800"}, "not valid Unicode"),
        ({"quality": "high"}, "column 'quality' is not a score"),
    ],
)
def test_malformed_rows_are_named(tmp_path, change, words):
    with pytest.raises(ValueError, match=words):
        write_documents(tmp_path, [_rows(1)[0] | change])


def test_missing_and_broken_shards_are_named(tmp_path):
    with pytest.raises(ValueError, match="run the stage that writes it"):
        list(read_documents(tmp_path))
    (tmp_path / "documents").mkdir()
    (tmp_path / "documents/part-00000.parquet").write_bytes(b"")
    with pytest.raises(ValueError, match="part-00000.parquet: not a readable parquet"):
        list(read_documents(tmp_path))


def test_exclusions_hold_reason_score_and_head(tmp_path):
    with Exclusions(tmp_path, rows_per_shard=2) as excluded:
        for i, row in enumerate(_rows(3)):
            excluded.add(row | {"text": "x" * 1000}, "long" if i else "short", i)
    rows = list(read_exclusions(tmp_path))
    assert [(r["reason"], r["score"], len(r["text_head"])) for r in rows] == [
        ("short", 0, 200),
        ("long", 1, 200),
        ("long", 2, 200),
    ]
    assert excluded.counts == {"long": 2, "short": 1}


def test_a_kept_part_of_a_shard_is_written_as_write_documents_would(tmp_path):
    rows = [documents.document(f"text {i} \u00e9", f"s{i}", ("web", "code")[i % 2], quality=i / 7) for i in range(50)]
    rows[3].pop("quality")
    documents.write_documents(tmp_path / "in", rows)
    (shard,) = documents.document_shards(tmp_path / "in")
    keep = [i % 3 > 0 for i in range(50)]
    kept = [row for row, stays in zip(rows, keep) if stays]
    for scores in (["quality"], ["lang_score", "quality"]):
        expected = documents.write_documents(tmp_path / "expected", kept, scores=scores)
        assert documents.write_kept(tmp_path / "out", shard, keep, scores) == expected
        name = "documents/part-00000.parquet"
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "expected" / name).read_bytes()
    assert documents.write_kept(tmp_path / "none", shard, [False] * 50, ["quality"])["bytes"] == 0
    shard.write_bytes(b"PAR1")
    with pytest.raises(ValueError, match="part-00000.parquet: not a readable"):
        documents.write_kept(tmp_path / "bad", shard, keep, ["quality"])
