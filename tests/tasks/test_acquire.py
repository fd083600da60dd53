"""Stage acquire on a miniature index: layout, licences, traps, determinism, what may and what may not be missing."""

import json
import os

import pyarrow.parquet as pq
import pytest

from tasks import acquire, fetch
from tasks.fetch import PipIndexes
from tasks.files import list_files, sha256_file
from tasks.stage import run_stage_for_test
from tasks.warc import Page, read_warc
from tests.tasks.corpus_fixtures import archives, corpus_list, write_list
from tests.tasks.package_index import serve

FILES = archives(b"stands for a model file")


@pytest.fixture
def index(monkeypatch, tmp_path):
    with serve() as running:
        running.files.update(FILES)
        monkeypatch.setenv("PIP_INDEX_URL", running.url)
        for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        monkeypatch.setenv("ARCLINE_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(fetch.time, "sleep", lambda seconds: None)
        monkeypatch.setattr(PipIndexes, "from_pip", lambda: PipIndexes.from_config_text("", dict(os.environ)))
        yield running


def run(tmp_path, corpus=None, **config):
    path = write_list(tmp_path / "list/corpus.yaml", corpus or corpus_list(FILES))
    config = {"sets": {"base": True}, "max_reject_share": 0.5} | config
    run_stage_for_test(acquire, config, deps={"conf/corpus.yaml": path}, outs=["data/acquire"], tmp=tmp_path)
    return tmp_path / "data/acquire"


def rows(out):
    return {(r["item"], r["version"], r["member"]): r for r in pq.read_table(out / "index.parquet").to_pylist()}


def test_layout_index_and_licences(index, tmp_path):
    out = run(tmp_path)
    found = rows(out)
    assert (out / "files/code-1/src/a.py").read_text() == "print(1)\n"
    assert (out / "files/code-2/src/a.py").read_text() == "print(2)\n"
    assert (out / "models/lid.176.ftz").read_bytes() == b"stands for a model file"
    row = found["code", "1", "src/vendor/b.c"]
    assert (row["path"], row["kind"], row["licence_file"]) == (
        "files/code-1/src/vendor/b.c",
        "code",
        "src/vendor/LICENSE",
    )
    assert found["code", "1", "src/a.py"]["licence_file"] == "LICENSE"
    assert found["articles", "1.0", "LICENSE"]["kind"] == "licence"
    page = found["articles", "1.0", "doc/00.html"]
    assert (page["path"], page["kind"], page["domain"]) == ("warc/part-00000.warc.gz", "html", "web")
    assert ("articles", "1.0", "doc/skip/x.html") not in found
    assert found["wiki", "3.0", "data/en.json"]["licence"] == "CC-BY-SA-4.0"
    for row in found.values():
        assert row["url"] and (row["kind"] == "html" or (out / row["path"]).stat().st_size == row["bytes"])


def test_pages_are_in_the_warc_under_their_addresses(index, tmp_path):
    out = run(tmp_path, warc_shard_mb=1)
    pages = [p for shard in sorted((out / "warc").iterdir()) for p in read_warc(shard)]
    assert all(isinstance(p, Page) for p in pages)
    assert pages[0].url == "package:pip/articles/1.0/doc/00.html" and pages[0].package == "pip/articles/1.0"
    last = pages[-1]
    assert (last.url, last.label, last.package) == ("http://shop9.example/log%20in", "forms=l,s", "pip/logins/2.0")
    assert len(pages) == 27 + 3 + 24


def test_unsafe_members_are_rejected_and_stay_inside(index, tmp_path):
    out = run(tmp_path)
    lines = [json.loads(line) for line in (out / "rejects/part-00000.jsonl").read_text().splitlines()]
    assert [(x["id"], x["reason"]) for x in lines] == [
        ("articles/articles-1.0/doc/../../evil.html", "archive_member_unsafe_path")
    ]
    assert not list(tmp_path.rglob("evil.html"))


def test_two_runs_are_identical_and_the_second_asks_nobody(index, tmp_path):
    def hashes():
        out = run(tmp_path)
        return {p.relative_to(out): sha256_file(p) for p in list_files(out)}

    first = hashes()
    asked = len(index.requests)
    index.files.clear()
    assert hashes() == first and len(index.requests) == asked


def test_required_files_that_are_missing_are_all_named(index, tmp_path):
    del index.files["code-2.tar.gz"], index.files["wiki-3.0.tar.gz"]
    with pytest.raises(ValueError, match="2 required file") as error:
        run(tmp_path)
    assert "item wiki" in str(error.value) and "item code: code-2.tar.gz (sha256 " in str(error.value)
    assert not (tmp_path / "data/acquire").exists()


def test_auto_sets_and_optional_items_may_be_missing_and_that_is_recorded(index, tmp_path):
    del index.files["code-2.tar.gz"]
    corpus = corpus_list(FILES, code={"optional": True})
    out = run(tmp_path, corpus, sets={"base": True, "more": "auto"})
    told = json.loads((out / "items.json").read_text())
    assert told["sets"] == {"base": {"asked": True, "used": True}, "more": {"asked": "auto", "used": False}}
    assert {i["item"]: i["state"] for i in told["items"] if i["state"] != "had"} == {
        "code": "partly had",
        "extra": "not had",
    }
    manifest = json.loads((out / "manifest.json").read_text())
    assert (manifest["rows"]["set:base"], manifest["rows"]["set:more"]) == (1, 0)


def test_items_can_be_left_out_and_unknown_names_are_errors(index, tmp_path):
    out = run(tmp_path, without=["code"])
    assert not (out / "files/code-1").exists()
    with pytest.raises(ValueError, match="acquire.without: the corpus list has no item cod"):
        run(tmp_path, without=["cod"])
    with pytest.raises(ValueError, match="no set bas"):
        run(tmp_path, sets={"bas": True})


def test_a_model_file_with_other_bytes_is_an_error(index, tmp_path):
    corpus = corpus_list(FILES)
    corpus["models"][0]["sha256"] = "0" * 64
    with pytest.raises(ValueError, match="models: lid.176.ftz of item lid has sha256"):
        run(tmp_path, corpus)


def test_a_broken_archive_is_a_rejected_record(index, tmp_path):
    from tests.tasks.package_index import digest

    cut = FILES["code-2.tar.gz"][:-20]
    corpus = corpus_list(FILES)
    corpus["items"][3]["releases"]["2"]["sha256"] = digest(cut)
    index.files["code-2.tar.gz"] = cut
    out = run(tmp_path, corpus)
    assert '"archive_unreadable"' in (out / "rejects/part-00000.jsonl").read_text()
    assert (out / "files/code-1/src/a.py").exists()


def test_your_own_files(index, tmp_path):
    """A WARC goes in as it is, a page into our WARC, text below files/."""
    from tasks.warc import WarcWriter
    from tests.tasks.package_index import digest

    raw = tmp_path / "data/raw"
    raw.mkdir(parents=True)
    writer = WarcWriter(raw, "2026-01-01")
    writer.write_page("http://mine.example/", b"<p>mine", "")
    writer.close()
    (raw / "part-00000.warc.gz").rename(raw / "mine.warc.gz")
    (raw / "page.html").write_text("<p>a page of mine")
    (raw / "notes.jsonl").write_text('{"text": "a note of mine"}\n')
    items = [
        {"name": name.partition(".")[0], "set": "own", "registry": "local", "version": "1", "file": f"data/raw/{name}"}
        | {"sha256": digest((raw / name).read_bytes()), "licence": "own", "domain": "web", "globs": ["**"]}
        for name in ("mine.warc.gz", "page.html", "notes.jsonl")
    ]
    corpus = corpus_list(FILES)
    corpus["items"] += items
    out = run(tmp_path, corpus, sets={"own": True})
    assert {r["item"]: (r["kind"], r["path"]) for r in rows(out).values()} == {
        "mine": ("warc", "warc/mine-mine.warc.gz"),
        "page": ("html", "warc/part-00000.warc.gz"),
        "notes": ("jsonl", "files/notes/notes.jsonl"),
    }
    assert [p.body for p in read_warc(out / "warc/mine-mine.warc.gz")] == [b"<p>mine"]
