"""JSON that is not quite JSON lines: arrays, values over several lines, NaN, other compressions; struct columns; hub datasets."""

import gzip
import io
import json
import random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tasks.documents import document
from tasks.readers_json import read_values
from tests.tasks.source_fixtures import TEXTS, gz, ingest_sources, jsonl, zstd

ROWS = [{"text": t, "n": {"deep": ['"', "}]\\", "[{"]}, "x": i} for i, t in enumerate(TEXTS)]


def read(tmp_path, name, data, **more):
    (tmp_path / name).write_bytes(data)
    source = {"name": "j", "type": "jsonl", "path": str(tmp_path / name)} | more
    return ingest_sources(tmp_path / "run", [source], max_record_mb=1.0)


@pytest.mark.parametrize("pack", [bytes, gz, zstd])
@pytest.mark.parametrize("data", [
    json.dumps(ROWS), json.dumps(ROWS, indent=2, ensure_ascii=False), "\ufeff [\n" + ",\n".join(map(json.dumps, ROWS)) + "\n]\n",
    "\n".join(json.dumps(r, indent=1) for r in ROWS), "".join(f"\x1e{json.dumps(r)}\n" for r in ROWS),
])  # fmt: skip
def test_arrays_and_values_over_several_lines(tmp_path, data, pack):
    found = read(tmp_path, "a.json", pack(data.encode()), columns={"keep": ["x", "n"]})
    assert found.texts == TEXTS and not found.rejects
    assert [r.meta["columns"] for r in found.records] == [{"x": r["x"], "n": r["n"]} for r in ROWS]


def test_an_array_with_a_huge_and_a_damaged_object_and_no_end(tmp_path):
    objects = [json.dumps(r) for r in ROWS[:5]]
    objects[1] = json.dumps({"text": '\\"' * (1 << 20)})
    objects[3] = '{"text": nothing}'
    found = read(tmp_path, "a.json", ("[" + ",".join(objects) + ', {"text": "cu').encode())
    assert found.texts == [TEXTS[0], TEXTS[2], TEXTS[4]]
    assert found.reasons == ["too_large", "bad_json_line", "bad_json_line"]


def test_values_are_the_same_at_any_size_of_reads():
    rng = random.Random(0)
    strings = ["".join(rng.choice('a"\\{}[],\n\u00e9') for _ in range(rng.randrange(30))) for _ in range(200)]
    rows = [{s: [s, {"x": s}]} for s in strings]

    class Slow(io.BytesIO):
        def read(self, size=-1):
            return super().read(rng.choice([1, 2, 3, 7]))

    for stream in (io.BytesIO(json.dumps(rows).encode()), Slow(json.dumps(rows, indent=1).encode())):
        assert [json.loads(value) for value, _ in read_values(stream, 1 << 20)] == rows


def test_what_pandas_and_cut_strings_make(tmp_path):
    data = b'{"text": "a", "x": NaN}\n{"text": "b", "x": -Infinity}\n{"text": "c", "x": "\\ud83d"}\n{"text": "d \\ud83d"}\n'
    found = read(tmp_path, "a.jsonl", data, columns={"keep": ["x"]})
    assert found.texts == ["a", "b", "c"] and found.reasons == ["wrong_charset"]
    assert [r.meta["columns"]["x"] for r in found.records[:2]] == [None, None]


def test_other_compressions_are_named_once(tmp_path):
    import bz2
    import lzma

    for name, data in {"a.jsonl": bz2.compress(jsonl()), "b.jsonl": lzma.compress(jsonl())}.items():
        found = read(tmp_path, name, data)
        assert found.reasons == ["mis_declared"] and ("bzip2" if name[0] == "a" else "xz") in found.rejects[0]["detail"]


def test_struct_columns_by_dotted_names(tmp_path):
    rows = [{"text": t, "at": {"url": f"http://x/{i}"}} for i, t in enumerate(TEXTS)] + [None]
    pq.write_table(pa.table({"doc": rows, "id": list(range(len(rows)))}), tmp_path / "a.parquet")
    source = {"name": "p", "type": "parquet", "path": str(tmp_path / "a.parquet")}
    found = ingest_sources(
        tmp_path / "run", [source | {"columns": {"text": "doc.text", "url": "doc.at.url", "keep": ["id"]}}]
    )
    assert found.texts == TEXTS and found.records[2].url == "http://x/2" and found.reasons == ["missing_column"]
    assert found.records[3].meta["columns"] == {"id": 3}
    with pytest.raises(ValueError, match="columns.text: a.parquet has no column 'body.text'"):
        ingest_sources(tmp_path / "other", [source | {"columns": {"text": "body.text"}}])


def test_packed_json_files_of_a_hub_dataset_and_a_folder_without_data(tmp_path):
    hub = tmp_path / "hub"
    (hub / "data").mkdir(parents=True)
    (hub / "data/train-00000.json.gz").write_bytes(gzip.compress(jsonl(TEXTS[:3])))
    (hub / "data/train-00001.jsonl.zst").write_bytes(zstd(jsonl(TEXTS[3:])))
    (hub / "dataset_infos.json").write_text("{}")
    found = ingest_sources(tmp_path / "run", [{"name": "h", "type": "hf", "path": str(hub), "split": "train"}])
    assert found.texts == TEXTS and not found.rejects
    (tmp_path / "none").mkdir()
    (tmp_path / "none/train.csv").write_text("text\na\n")
    with pytest.raises(ValueError, match="no data file of a dataset"):
        ingest_sources(tmp_path / "other", [{"name": "h", "type": "hf", "path": str(tmp_path / "none")}])


def test_array_cut_between_two_objects_is_told(tmp_path):
    cut = ("[" + ", ".join(map(json.dumps, ROWS)) + ",").encode()
    found = list(read_values(io.BytesIO(cut), 1 << 20))
    assert [json.loads(value) for value, ended in found if ended] == ROWS
    assert found[len(ROWS) :] == [(b"[", False)]


def test_halves_of_surrogate_pairs_in_kept_columns_do_not_reach_tables(tmp_path):
    rows = b'{"text": "a text", "k": {"\\udfff": ["x\\ud800"]}, "url": "\\ud800x"}'
    (record,) = read(tmp_path, "s.jsonl", rows, columns={"keep": ["k"], "url": "url"}).records
    assert record.meta["columns"] == {"k": {"?": ["x?"]}} and record.url == "?x"
    document(record.content.decode(), "s", "web", meta=record.meta)["meta"].encode("utf-8")


@pytest.mark.parametrize("depth, good", [(90, 3), (300, 2), (1010, 2), (5000, 2)])
def test_deep_values_cost_their_row_alone(tmp_path, depth, good):
    rows = ['{"text": "one"}', '{"text": "two", "k": ' + "[" * depth + "]" * depth + "}", '{"text": "three"}']
    found = read(tmp_path, "d.jsonl", "\n".join(rows).encode(), columns={"keep": ["k"]})
    assert len(found.records) == good and len(found.rejects) == 3 - good


@pytest.mark.parametrize("data", [json.dumps(ROWS, indent=1), "\n".join(json.dumps(r, indent=1) for r in ROWS)])
def test_streams_that_give_a_byte_at_a_time(data):
    class Slow(io.BytesIO):
        def read(self, size=-1):
            return super().read(1)

    assert [json.loads(value) for value, _ in read_values(Slow(data.encode()), 1 << 20)] == ROWS


@pytest.mark.parametrize("bom", ["", "\ufeff"])
def test_what_stands_between_the_objects_of_an_array_is_refused_and_named(tmp_path, bom):
    odd = (
        bom
        + "["
        + json.dumps(ROWS[0])
        + ', 5, "x", '
        + json.dumps(ROWS[1])
        + ", null]\n"
        + json.dumps(ROWS[2])
        + "\nend"
    )
    found = read(tmp_path, "a.json", odd.encode())
    assert found.texts == [row["text"] for row in ROWS[:3]] and len(found.rejects) == 3
    values = [value for value, _ in read_values(io.BytesIO(odd.encode()), 1 << 20)]
    assert [v for v in values if not v.startswith(b"{")] == [b'5"..."', b"null", b"end"]
