"""Readers of sources: every format gives the same record shape; hostile input is set aside by name, and the rest is read."""

import json
import os
import random
import tarfile
import zipfile

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.tasks.source_fixtures import (
    TEXTS,
    arrow,
    git,
    gz,
    ingest_sources,
    jsonl,
    parquet,
    warc,
    wet,
    zstd,
)

PAGES = [f"<p>{t}" for t in TEXTS]
PDF = b"%PDF-1.4\n1 0 obj\n<< >>\nendobj\n%%EOF\n"


# ---- every format, undamaged -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, pack", [("a.jsonl", bytes), ("a.jsonl.gz", gz), ("a.json.zst", zstd)])
def test_json_lines(tmp_path, name, pack):
    (tmp_path / name).write_bytes(pack(jsonl()))
    columns = {"url": "at", "lang": "language"}
    source = {"name": "j", "type": "jsonl", "path": str(tmp_path / name), "licence": "CC0-1.0", "columns": columns}
    found = ingest_sources(tmp_path / "run", [source])
    assert found.texts == TEXTS and not found.rejects
    first = found.records[0]
    assert (first.kind, first.path, first.url, first.lang) == ("text", name, "http://x/0", "en")
    assert (first.source, first.charset, first.licence) == ("j", "utf-8", "CC0-1.0")
    assert first.meta == {"file": name, "record": 1}
    assert len({r.id for r in found.records}) == len(TEXTS)


@pytest.mark.parametrize("name, pack", [("a.warc", None), ("a.warc.gz", None), ("b.warc.gz", gz), ("a.warc.zst", zstd)])
def test_warc(tmp_path, name, pack):
    data = warc(compress=name == "a.warc.gz")
    (tmp_path / name).write_bytes(pack(data) if pack else data)
    found = ingest_sources(tmp_path / "run", [{"name": "w", "type": "warc", "path": str(tmp_path / "*.warc*")}])
    assert found.texts == PAGES and not found.rejects
    assert (found.records[2].kind, found.records[2].url, found.records[2].path) == ("html", "http://x/2", name)
    assert "date" in found.records[2].meta


def test_warc_zstd_with_a_dictionary(tmp_path):
    from fastwarc.stream_io import ZstdReader, ZstdWriter, zstd_train_dictionary_from_files  # noqa: F401

    samples = [
        f"<html><head><title>{i}</title></head><body>{t}</body></html>".encode() * 3 for i, t in enumerate(TEXTS * 40)
    ]
    for i, sample in enumerate(samples):
        (tmp_path / f"{i}.sample").write_bytes(sample)
    dictionary = zstd_train_dictionary_from_files([str(p) for p in sorted(tmp_path.glob("*.sample"))], 4096)
    dictionary = (
        getattr(dictionary, "as_bytes", lambda: dictionary)() if not isinstance(dictionary, bytes) else dictionary
    )
    import io

    packed = io.BytesIO()
    writer = ZstdWriter(packed, dictionary=dictionary)
    writer.write(warc(compress=False))
    writer.close() if not packed.closed else None
    frame = b"\x5d\x2a\x4d\x18" + len(dictionary).to_bytes(4, "little") + dictionary
    (tmp_path / "d.warc.zst").write_bytes(frame + packed.getvalue())
    found = ingest_sources(tmp_path / "run", [{"name": "w", "type": "warc", "path": str(tmp_path / "d.warc.zst")}])
    assert found.texts == PAGES and not found.rejects


def test_warc_kinds_by_content_type(tmp_path):
    pages = [
        ("http://x/a", b"<p>page", "text/html; charset=ISO-8859-2"),
        ("http://x/b", PDF, "application/pdf"),
        ("http://x/c", b"plain", "text/plain"),
        ("http://x/d", b"\x89PNG....", "image/png"),
        ("http://x/e", b"<!DOCTYPE html><p>x", ""),
    ]
    (tmp_path / "a.warc.gz").write_bytes(warc(pages))
    found = ingest_sources(tmp_path / "run", [{"name": "w", "type": "warc", "path": str(tmp_path / "a.warc.gz")}])
    assert [r.kind for r in found.records] == ["html", "pdf", "text", "html"]
    assert found.records[0].charset == "iso-8859-2"
    assert [s["reason"] for s in found.skipped] == ["content_type"] and not found.rejects


def test_wet(tmp_path):
    (tmp_path / "a.warc.wet.gz").write_bytes(wet([t.encode() for t in TEXTS]))
    found = ingest_sources(tmp_path / "run", [{"name": "w", "type": "wet", "path": str(tmp_path / "a.warc.wet.gz")}])
    assert found.texts == TEXTS and {(r.kind, r.lang, r.charset) for r in found.records} == {("text", "eng", "utf-8")}


def test_parquet(tmp_path):
    parquet(tmp_path / "a.parquet", row_group_size=3)
    columns = {"url": "url", "keep": ["n"]}
    found = ingest_sources(
        tmp_path / "run", [{"name": "p", "type": "parquet", "path": str(tmp_path), "columns": columns}]
    )
    assert found.texts == TEXTS and not found.rejects
    assert [r.meta["columns"] for r in found.records] == [{"n": i} for i in range(len(TEXTS))]


def test_hugging_face_directories(tmp_path):
    saved, hub = tmp_path / "saved", tmp_path / "hub"
    for split, texts in (("train", TEXTS[:5]), ("test", TEXTS[5:])):
        (saved / split).mkdir(parents=True)
        arrow(saved / split / "data-00000-of-00001.arrow", texts)
        state = {"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}
        (saved / split / "state.json").write_text(json.dumps(state))
        (saved / split / "dataset_info.json").write_text("{}")
        (hub / "data").mkdir(parents=True, exist_ok=True)
        parquet(hub / "data" / f"{split}-00000-of-00001.parquet", texts)
    (saved / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    (hub / "README.md").write_text("a card")
    for folder in (saved, hub):
        source = {"name": "h", "type": "hf", "path": str(folder)}
        assert sorted(ingest_sources(tmp_path / f"{folder.name}-all", [source]).texts) == sorted(TEXTS)
        found = ingest_sources(tmp_path / f"{folder.name}-one", [source | {"split": "train"}])
        assert found.texts == TEXTS[:5] and not found.rejects


def test_directories_of_html_and_pdf(tmp_path):
    (tmp_path / "in/sub").mkdir(parents=True)
    (tmp_path / "in/sub/a.html").write_bytes(b"<p>a")
    (tmp_path / "in/b.htm.gz").write_bytes(gz(b"<p>b"))
    (tmp_path / "in/c.pdf").write_bytes(PDF)
    sources = [{"name": n, "type": n, "path": str(tmp_path / "in")} for n in ("html", "pdf")]
    found = ingest_sources(tmp_path / "run", sources)
    assert [(r.kind, r.path, r.content) for r in found.records] == [
        ("html", "b.htm.gz", b"<p>b"),
        ("html", "sub/a.html", b"<p>a"),
        ("pdf", "c.pdf", PDF),
    ]


MIT = """Permission is hereby granted, free of charge, to any person obtaining a copy of this software and associated
documentation files (the "Software"), to deal in the Software without restriction, including without limitation the rights
to use, copy, modify, merge, publish, distribute, sublicense, and/or sell copies of the Software, and to permit persons to
whom the Software is furnished to do so, subject to the following conditions:

The above copyright notice and this permission notice shall be included in all copies or substantial portions of the
Software.

THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR IMPLIED, INCLUDING BUT NOT LIMITED TO THE
WARRANTIES OF MERCHANTABILITY, FITNESS FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL THE AUTHORS OR
COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR OTHERWISE,
ARISING FROM, OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE SOFTWARE.
"""


def repository(folder):
    folder.mkdir()
    git(folder, "init", "-q")
    (folder / "src").mkdir()
    (folder / "src/a.py").write_text("print('a')\n")
    (folder / "LICENSE").write_text(MIT)
    (folder / "picture.png").write_bytes(b"\x89PNG\r\n\x1a\n\x00")
    (folder / "link").symlink_to("/etc/passwd")
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "one")
    git(folder, "tag", "v1")
    (folder / "src/a.py").write_text("print('b')\n")
    git(folder, "commit", "-qam", "two")
    return folder


def test_git_normal_and_bare_at_a_ref_without_running_a_hook(tmp_path):
    normal = repository(tmp_path / "normal")
    git(tmp_path, "clone", "-q", "--bare", "normal", "bare.git")
    for folder in (normal / ".git", tmp_path / "bare.git"):
        for hook in ("post-checkout", "pre-commit", "post-index-change", "reference-transaction"):
            script = folder / "hooks" / hook
            script.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
            script.chmod(0o755)
        git(folder, "config", "core.fsmonitor", f"touch {tmp_path}/ran")
    sources = [
        {"name": "n", "type": "git", "path": str(normal), "licence": "CC0-1.0"},
        {"name": "b", "type": "git", "path": str(tmp_path / "bare.git"), "ref": "v1", "globs": ["src/**"]},
    ]
    found = ingest_sources(tmp_path / "run", sources)
    head, tag = git(normal, "rev-parse", "HEAD"), git(normal, "rev-parse", "v1")
    records = [(r.source, r.path, r.content, r.meta["commit"], r.meta["repo"], r.licence) for r in found.records]
    assert records == [
        ("n", "LICENSE", MIT.encode(), head, "normal", "CC0-1.0"),
        ("n", "src/a.py", b"print('b')\n", head, "normal", "CC0-1.0"),
        ("b", "LICENSE", MIT.encode(), tag, "bare", "MIT"),
        ("b", "src/a.py", b"print('a')\n", tag, "bare", "MIT"),
    ]
    assert {r.meta["licence_file"] for r in found.records} == {"LICENSE"}
    assert [(s["id"], s["reason"]) for s in found.skipped] == [
        ("n:normal:link", "symlink"),
        ("n:normal:picture.png", "mis_declared"),
    ]
    assert not (tmp_path / "ran").exists() and not found.rejects


def test_git_tree_that_points_outside(tmp_path):
    """A tree object with `..` and `.git` as names, which git itself would not check out."""
    folder = tmp_path / "evil"
    folder.mkdir()
    git(folder, "init", "-q")
    blob = git(folder, "hash-object", "-w", "--stdin", data=b"code\n")

    def tree(*entries: tuple[str, str, str]) -> str:
        data = b"".join(f"{mode} {name}\0".encode() + bytes.fromhex(oid) for mode, name, oid in entries)
        return git(folder, "hash-object", "-w", "-t", "tree", "--literally", "--stdin", data=data)

    inner = tree(("100644", "a.py", blob))
    top = tree(("40000", "..", inner), ("40000", ".git", inner), ("100644", "good.py", blob))
    commit = git(folder, "commit-tree", top, "-m", "x")
    git(folder, "update-ref", "refs/heads/main", commit)
    found = ingest_sources(tmp_path / "run", [{"name": "g", "type": "git", "path": str(folder), "ref": "main"}])
    assert [r.path for r in found.records] == ["good.py"]
    assert found.reasons == ["unsafe_path", "unsafe_path"]


def test_source_tree_and_archives_never_leave_the_root(tmp_path):
    tree = tmp_path / "tree"
    (tree / "sub").mkdir(parents=True)
    (tmp_path / "secret.py").write_text("secret")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/s.py").write_text("secret")
    (tree / "sub/a.py").write_text("a = 1\n")
    (tree / "file.py").symlink_to(tmp_path / "secret.py")
    (tree / "folder").symlink_to(tmp_path / "outside")
    (tree / "fifo.py").touch() if not hasattr(os, "mkfifo") else os.mkfifo(tree / "fifo.py")
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("../evil.py", "x = 1")
        archive.writestr("/abs.py", "x = 1")
        archive.writestr("z/good.py", "z = 1\n")
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "secret.py", "root/t.py")
        link = tarfile.TarInfo("root/link.py")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
        archive.add(tmp_path / "secret.py", "root/../../up.py")
    sources = [
        {"name": "t", "type": "tree", "path": str(tree)},
        {"name": "z", "type": "tree", "path": str(tmp_path / "a.zip")},
        {"name": "r", "type": "tree", "path": str(tmp_path / "a.tar.gz")},
    ]
    found = ingest_sources(tmp_path / "run", sources)
    assert [(r.source, r.path) for r in found.records] == [("t", "sub/a.py"), ("z", "z/good.py"), ("r", "t.py")]
    assert sorted(found.reasons) == ["unsafe_path"] * 3
    assert sorted(s["reason"] for s in found.skipped) == ["link", "symlink", "symlink"]


def test_software_heritage_export(tmp_path):
    contents = pa.table({"blob_id": ["k1", "k2", "k3"], "content": ["int a;\n", "print(1)\n", "lost\n"]})
    pq.write_table(contents, tmp_path / "content.parquet")
    about = [
        {"blob_id": "k2", "path": "a/b.py", "repo": "r1", "language": "Python", "licenses": ["MIT", "BSD-2-Clause"]},
        {"blob_id": "k1", "path": "x.c", "repo": "r1", "language": "C", "licenses": []},
        {"blob_id": "k2", "path": "copy.py", "repo": "r2", "language": "Python", "licenses": ["MIT"]},
    ]
    (tmp_path / "meta.jsonl.gz").write_bytes(gz(b"".join(json.dumps(a).encode() + b"\n" for a in about) + b"{broken\n"))
    source = {
        "name": "s",
        "type": "swh",
        "path": str(tmp_path / "content.parquet"),
        "columns": {"key": "blob_id"},
        "metadata": {
            "path": str(tmp_path / "meta.jsonl.gz"),
            "key": "blob_id",
            "columns": {"path": "path", "lang": "language", "licence": "licenses"},
        },
    }
    found = ingest_sources(tmp_path / "run", [source])
    assert [(r.kind, r.path, r.lang, r.licence) for r in found.records] == [
        ("code", "x.c", "C", ""),
        ("code", "a/b.py", "Python", "MIT AND BSD-2-Clause"),
        ("code", "content.parquet", "", ""),
    ]
    assert found.records[1].meta["swh"] == about[0] and found.records[1].meta["others"] == [about[2]]
    assert found.records[2].meta["swh"] is None
    assert found.reasons == ["bad_json_line"]


# ---- damaged input -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [1, 9, 60])
@pytest.mark.parametrize(
    "kind, name, data",
    [
        ("jsonl", "a.jsonl.gz", gz(jsonl())),
        ("jsonl", "a.jsonl.zst", zstd(jsonl())),
        ("jsonl", "a.jsonl", jsonl()),
        ("warc", "a.warc.gz", warc()),
        ("warc", "a.warc", warc(compress=False)),
        ("warc", "a.warc.zst", zstd(warc(compress=False))),
        ("wet", "a.wet.gz", wet([t.encode() for t in TEXTS])),
    ],
)
def test_truncated_files_give_whole_records_and_one_reject(tmp_path, kind, name, data, cut):
    if name == "a.jsonl" and cut == 1:
        cut = 2  # without its last line feed alone, the file is whole
    if kind in ("warc", "wet") and not name.endswith("gz"):
        cut += 4  # the blank lines after a record are not of it
    (tmp_path / name).write_bytes(data[:-cut])
    (tmp_path / "z.jsonl").write_bytes(jsonl(["the next source"]))
    sources = [{"name": "s", "type": kind, "path": str(tmp_path / name)}]
    sources.append({"name": "next", "type": "jsonl", "path": str(tmp_path / "z.jsonl")})
    found = ingest_sources(tmp_path / "run", sources)
    good = TEXTS if kind in ("jsonl", "wet") else PAGES
    texts = found.texts
    assert texts.pop() == "the next source"
    assert texts == good[: len(texts)]  # whole records, in order, never a torn one
    if name.endswith((".gz", ".jsonl", ".warc")):
        assert len(texts) >= len(good) - 1 or kind == "jsonl"
    assert len(found.rejects) == 1, found.rejects
    assert name in found.rejects[0]["id"] and found.rejects[0]["detail"]


def test_a_damaged_gzip_member_costs_its_record_alone(tmp_path):
    data = warc()
    starts = [i for i in range(len(data) - 3) if data[i : i + 4] == b"\x1f\x8b\x08\x00"]
    assert len(starts) == len(TEXTS) + 1
    damaged = bytearray(data)
    damaged[starts[4] + 30 : starts[4] + 60] = b"\xff" * 30
    (tmp_path / "a.warc.gz").write_bytes(bytes(damaged))
    found = ingest_sources(tmp_path / "run", [{"name": "w", "type": "warc", "path": str(tmp_path / "a.warc.gz")}])
    assert found.texts == PAGES[:3] + PAGES[4:]
    assert found.reasons == ["corrupt_record"] and "a.warc.gz" in found.rejects[0]["id"]


@pytest.mark.parametrize("name, pack", [("a.warc", bytes), ("a.warc.gz", gz), ("a.warc.zst", zstd)])
def test_a_damaged_header_in_one_stream_costs_its_record_alone(tmp_path, name, pack):
    data = bytearray(warc(compress=False))
    starts = [i for i in range(len(data)) if data.startswith(b"WARC/1.0", i)]
    for number in (4, 7):
        data[starts[number] : starts[number] + 4] = b"XXXX"
    (tmp_path / name).write_bytes(pack(bytes(data)))
    found = ingest_sources(tmp_path / "run", [{"name": "w", "type": "warc", "path": str(tmp_path / name)}])
    assert found.texts == PAGES[:3] + PAGES[4:6] + PAGES[7:]
    assert found.reasons == ["corrupt_record"] * 2


@pytest.mark.parametrize("cut", [1, 40, 400])
def test_truncated_tables(tmp_path, cut):
    path = parquet(tmp_path / "a.parquet", row_group_size=2)
    path.write_bytes(path.read_bytes()[:-cut])
    stream = arrow(tmp_path / "b.arrow")
    stream.write_bytes(stream.read_bytes()[: -cut - 8])  # eight bytes are the end mark
    sources = [{"name": "p", "type": "parquet", "path": str(path)}]
    sources.append({"name": "h", "type": "hf", "path": str(tmp_path)})
    found = ingest_sources(tmp_path / "run", sources)
    assert found.texts == TEXTS[: len(found.texts)]
    assert found.reasons.count("corrupt_file") == len(found.reasons) == 3


def test_every_type_given_every_other_format_or_nothing_or_junk(tmp_path):
    files = {
        "warc": warc(),
        "jsonl": jsonl(),
        "zip": b"PK\x03\x04" + b"x" * 50,
        "pdf": PDF,
        "parquet": parquet(tmp_path / "x.parquet").read_bytes(),
        "arrow": arrow(tmp_path / "x.arrow").read_bytes(),
        "zero": b"",
        "junk": random.Random(0).randbytes(5000),
        "nul": bytes(5000),
        "gzjunk": b"\x1f\x8b\x08" + random.Random(1).randbytes(500),
        "zstjunk": b"\x28\xb5\x2f\xfd" + random.Random(2).randbytes(500),
        "gzzero": gz(b""),
    }
    own = {
        "warc": {"warc"},
        "jsonl": {"jsonl"},
        "parquet": {"parquet"},
        "html": {"jsonl", "warc"},
        "pdf": {"pdf"},
        "hf": set(),
    }
    suffix = {"html": ".html", "pdf": ".pdf", "hf": ".arrow"}
    own["hf"] = {"arrow"}
    for kind in own:
        folder = tmp_path / kind
        folder.mkdir()
        for name, data in files.items():
            (folder / (name + suffix.get(kind, "." + kind))).write_bytes(data)
        found = ingest_sources(tmp_path / f"run-{kind}", [{"name": kind, "type": kind, "path": str(folder)}])
        bad = {r["id"].split(":")[1].partition(".")[0] for r in found.rejects}
        read = {r.meta["file"].partition(".")[0] for r in found.records}
        assert read <= own[kind], kind
        assert bad >= set(files) - own[kind], (kind, set(files) - own[kind] - bad)


def test_wrong_charsets(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "caf\xe9"}\n{"text": "good"}\n')
    (tmp_path / "b.jsonl").write_bytes('{"text": "wide"}\n'.encode("utf-16"))
    (tmp_path / "c.wet.gz").write_bytes(wet([b"caf\xe9 au lait", b"good"]))
    (tmp_path / "d.warc.gz").write_bytes(
        warc(
            [
                ("http://x/1", b"caf\xe9", "text/plain; charset=utf-8"),
                ("http://x/2", b"caf\xe9", "text/html; charset=utf-8"),
            ]
        )
    )
    column = pa.array([b"caf\xe9", b"good"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"text": column}), tmp_path / "e.parquet")
    kinds = {"a.jsonl": "jsonl", "b.jsonl": "jsonl", "c.wet.gz": "wet", "d.warc.gz": "warc", "e.parquet": "parquet"}
    sources = [{"name": n[0], "type": t, "path": str(tmp_path / n)} for n, t in kinds.items()]
    found = ingest_sources(tmp_path / "run", sources)
    assert found.reasons == ["wrong_charset"] * 5
    # A page's declaration is a hint: browsers and the stage web detect; its bytes are kept.
    assert [(r.source, r.content) for r in found.records] == [
        ("a", b"good"), ("c", b"good"), ("d", b"caf\xe9"), ("e", b"good"),
    ]  # fmt: skip


def test_content_encodings_declared_wrongly(tmp_path):
    import io

    from warcio.warcwriter import WARCWriter

    from tests.tasks.source_fixtures import warc_record

    stream = io.BytesIO()
    writer = WARCWriter(stream, gzip=True)
    plain, packed = b"<p>hello", gz(b"<p>hello")
    cases = [
        (packed, "gzip"), (zstd(plain), "zstd"), (plain, "gzip"), (plain, "zstd"), (plain, "br"), (packed[:-3], "gzip"),
        (gz(bytes(1 << 26)), "gzip"), (zstd(bytes(1 << 26)), "zstd"), (packed, ""),
    ]  # fmt: skip
    for i, (body, encoding) in enumerate(cases):
        warc_record(writer, f"http://x/{i}", body, extra=[("Content-Encoding", encoding)] if encoding else [])
    (tmp_path / "a.warc.gz").write_bytes(stream.getvalue())
    source = {"name": "w", "type": "warc", "path": str(tmp_path / "a.warc.gz")}
    found = ingest_sources(tmp_path / "run", [source], max_record_mb=1.0)
    assert found.texts == ["<p>hello"] * 2
    assert found.reasons == ["bad_content_encoding"] * 4 + ["too_large"] * 2 + ["mis_declared"]


def test_nul_bytes_deep_json_and_binary_text(tmp_path):
    deep = b'{"text": ' + b"[" * 200_000 + b"]" * 200_000 + b"}\n"
    data = deep + b'{"text": "a\\u0000b"}\n' + b'{"text": "\\u0001\\u0002\\u0003\\u0004x"}\n' + b"\x00\x00\n" + jsonl()
    (tmp_path / "a.jsonl").write_bytes(data)
    found = ingest_sources(tmp_path / "run", [{"name": "j", "type": "jsonl", "path": str(tmp_path / "a.jsonl")}])
    assert found.texts == TEXTS
    assert found.reasons == ["bad_json_line", "nul_bytes", "binary", "bad_json_line"]


def test_utf16_pages_are_not_taken_for_binary(tmp_path):
    (tmp_path / "a.html").write_bytes("<p>wide page".encode("utf-16"))
    found = ingest_sources(tmp_path / "run", [{"name": "h", "type": "html", "path": str(tmp_path / "a.html")}])
    assert len(found.records) == 1 and not found.rejects


def test_http_errors_and_unknown_types_are_skipped_not_rejected(tmp_path):
    import io

    from warcio.warcwriter import WARCWriter

    from tests.tasks.source_fixtures import warc_record

    stream = io.BytesIO()
    writer = WARCWriter(stream, gzip=True)
    warc_record(writer, "http://x/1", b"<p>gone", status="404 Not Found")
    warc_record(writer, "http://x/2", b"<p>here")
    (tmp_path / "a.warc.gz").write_bytes(stream.getvalue())
    found = ingest_sources(tmp_path / "run", [{"name": "w", "type": "warc", "path": str(tmp_path / "a.warc.gz")}])
    assert [r.url for r in found.records] == ["http://x/2"]
    assert [s["reason"] for s in found.skipped] == ["http_status"] and not found.rejects


def test_damaged_record_types_and_what_lies_behind_an_end_mark_are_reported(tmp_path):
    data = warc(compress=False)
    data = data.replace(b"WARC-Type: response", b"WARC-Type: re5ponse", 1)
    (tmp_path / "a.warc").write_bytes(data.replace(b"WARC-Type: response", b"WARC-Tipe: response", 1))
    stream = arrow(tmp_path / "b.arrow")
    whole = stream.read_bytes()
    second = whole.index(b"\xff\xff\xff\xff", whole.index(TEXTS[2].encode()))
    stream.write_bytes(whole[:second] + bytes(8) + whole[second + 8 :])
    sources = [{"name": "w", "type": "warc", "path": str(tmp_path / "a.warc")}]
    sources.append({"name": "h", "type": "hf", "path": str(tmp_path)})
    found = ingest_sources(tmp_path / "run", sources)
    assert found.texts == PAGES[2:] + TEXTS[:3]
    assert found.reasons == ["unknown_type", "unknown_type", "corrupt_file"]


@pytest.mark.parametrize("seed", range(3))
def test_random_damage_never_raises(tmp_path, seed):
    """Bits flipped, bytes cut, inserted and copied in every container: records or rejects, and the next file is read."""
    parquet(tmp_path / "p.parquet")
    arrow(tmp_path / "a.arrow")
    originals = {
        "x.warc.gz": warc(), "x.warc": warc(compress=False), "x.warc.zst": zstd(warc(compress=False)), "x.jsonl": jsonl(),
        "x.jsonl.gz": gz(jsonl()), "x.jsonl.zst": zstd(jsonl()), "x.parquet": (tmp_path / "p.parquet").read_bytes(),
        "x.arrow": (tmp_path / "a.arrow").read_bytes(),
    }  # fmt: skip
    kinds = {"warc": "warc", "jsonl": "jsonl", "parquet": "hf", "arrow": "hf"}
    sources = []
    for name, data in originals.items():
        kind, rng = kinds[name.split(".")[1]], random.Random(f"{seed} {name}")
        folder = tmp_path / name
        folder.mkdir()
        for i in range(25):
            damaged = bytearray(data)
            for _ in range(rng.choice([1, 1, 2, 6])):
                place, other = rng.randrange(len(damaged)), rng.randrange(len(damaged))
                change = rng.randrange(4)
                if change == 0:
                    damaged[place] ^= 1 << rng.randrange(8)
                elif change == 1:
                    damaged[place : place + rng.randrange(40)] = b""
                elif change == 2:
                    damaged[place:place] = rng.randbytes(rng.randrange(40))
                else:
                    damaged[place : place + 30] = damaged[other : other + 30]
                damaged = damaged or bytearray(b"x")
            # a column's name may be what was damaged, which is an error of the parameters
            if kind == "jsonl" or b"text" in damaged:
                (folder / f"{i:02d}{name[1:]}").write_bytes(bytes(damaged))
        (folder / f"zz{name[1:]}").write_bytes(data)
        sources.append({"name": name, "type": kind, "path": str(folder)})
    found = ingest_sources(tmp_path / "run", sources, max_record_mb=1.0)
    for name in originals:
        last = [r for r in found.records if r.source == name and r.meta["file"].startswith("zz")]
        assert [r.content.decode().removeprefix("<p>") for r in last] == TEXTS, name
    assert len(found.rejects) > 50


def test_names_that_are_not_utf8_are_read_and_links_in_circles_are_not(tmp_path):
    tree, repo = tmp_path / "tree", tmp_path / "repo"
    (tree / "a/b").mkdir(parents=True)
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/s.py").write_text("secret")
    (tree / "a/x.py").write_text("x = 1\n")
    for i in range(3):
        (tree / f"a/b/loop{i}").symlink_to("..")
    (tree / "a/out").symlink_to(tmp_path / "outside")
    repo.mkdir()
    for folder in (tree, repo):
        with open(os.fsencode(folder) + b"/caf\xe9.py", "wb") as file:
            file.write(b"y = 2\n")
    git(repo, "init")
    git(repo, "add", "-A")
    git(repo, "commit", "-qm", "x")
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz", format=tarfile.GNU_FORMAT, encoding="latin-1") as archive:
        archive.add(tree / "a/x.py", "top.py")
        archive.add(tree / "a/x.py", "lib/caf\u00e9.py")
    sources = [
        {"name": "t", "type": "tree", "path": str(tree)},
        {"name": "glob", "type": "tree", "path": str(tree / "**/*.py")},
        {"name": "g", "type": "git", "path": str(repo / ".git")},
        {"name": "tar", "type": "tree", "path": str(tmp_path / "a.tar.gz")},
    ]
    found = ingest_sources(tmp_path / "run", sources)
    assert not found.rejects
    assert [(r.source, r.path) for r in found.records] == [
        ("t", "a/x.py"), ("t", "caf\ufffd.py"), ("glob", "a/x.py"), ("glob", "caf\ufffd.py"), ("g", "caf\ufffd.py"),
        ("tar", "top.py"), ("tar", "caf\ufffd.py"),
    ]  # fmt: skip
    assert found.records[4].meta["repo"] == "repo"
    assert sorted(s["id"] for s in found.skipped if s["id"].startswith("glob")) == sorted(
        f"glob:{p}:{p}" for p in ("a/b/loop0", "a/b/loop1", "a/b/loop2", "a/out")
    )


def test_globs_with_stars_for_folders(tmp_path):
    from tasks.remote import list_inputs

    for name in ("a.txt", "x/a.txt", "x/y/a.txt", "x/y/.h/b.txt", "z/a.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("t")
    for pattern, names in {
        "**/*.txt": ["a.txt", "x/a.txt", "x/y/.h/b.txt", "x/y/a.txt"],
        "x/**/a.txt": ["a.txt", "y/a.txt"],
        "*/**/a.*": ["x/a.txt", "x/y/a.txt", "z/a.md"],
        "x/**": ["a.txt", "y/.h/b.txt", "y/a.txt"],
        "*/a.*": ["x/a.txt", "z/a.md"],
    }.items():
        assert [f.name for f in list_inputs(str(tmp_path / pattern))] == names, pattern


def test_one_unreadable_repository_or_member_among_many(tmp_path):
    for name in ("good", "empty"):
        (tmp_path / "repos" / name).mkdir(parents=True)
        git(tmp_path / "repos" / name, "init")
    (tmp_path / "repos/good/a.py").write_text("a = 1\n")
    git(tmp_path / "repos/good", "add", "-A")
    git(tmp_path / "repos/good", "commit", "-qm", "x")
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for i in range(3):
            archive.writestr(f"{i}.py", f"a{i} = 1\n" * 50)
    data = bytearray((tmp_path / "a.zip").read_bytes())
    place = data.index(b"1.py") + 4
    data[place : place + 8] = b"\xff" * 8
    (tmp_path / "a.zip").write_bytes(bytes(data))
    sources = [{"name": "g", "type": "git", "path": str(tmp_path / "repos/*")}]
    sources.append({"name": "z", "type": "tree", "path": str(tmp_path / "a.zip")})
    found = ingest_sources(tmp_path / "run", sources)
    assert [r.path for r in found.records] == ["a.py", "0.py", "2.py"]
    assert [(r["reason"], r["id"]) for r in found.rejects] == [
        ("no_such_commit", "g:empty:empty"), ("unreadable_member", "z:a.zip:1.py"),
    ]  # fmt: skip
