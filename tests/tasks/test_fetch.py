"""Fetching by exact file and hash: pip's own configuration, the cache, wrong bytes, missing files, retries."""

import os
import shutil

import pytest

from tasks import fetch
from tasks.fetch import Fetched, Fetcher, FetchError, PipIndexes, Wanted
from tests.tasks.package_index import digest, serve


@pytest.fixture
def index(monkeypatch, tmp_path):
    with serve() as running:
        for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_NO_INDEX"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
        monkeypatch.setenv("PIP_INDEX_URL", running.url)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        monkeypatch.setattr(fetch.time, "sleep", lambda seconds: None)
        # pip itself takes a second to start; test_pip_is_asked asks it.
        monkeypatch.setattr(PipIndexes, "from_pip", lambda: PipIndexes.from_config_text("", dict(os.environ)))
        yield running


def wanted(data: bytes, file="demo-1.0.tar.gz", **change):
    fields = {"item": "demo", "registry": "pip", "package": "demo", "version": "1.0", "file": file}
    return Wanted(**(fields | {"sha256": digest(data), "size": len(data)} | change))


def one(tmp_path, w, **options):
    return Fetcher(tmp_path / "cache", **options).fetch_all([w])[w]


def test_fetched_once_then_read_from_the_cache_without_network(index, tmp_path):
    index.files["demo-1.0.tar.gz"] = data = b"content" * 1000
    got = one(tmp_path, wanted(data))
    assert isinstance(got, Fetched) and got.path.read_bytes() == data
    asked = len(index.requests)
    index.files.clear()
    assert one(tmp_path, wanted(data)) == got
    assert len(index.requests) == asked


def test_damaged_cache_entry_is_fetched_again(index, tmp_path):
    index.files["demo-1.0.tar.gz"] = data = b"content"
    one(tmp_path, wanted(data)).path.write_bytes(b"damaged")
    lines = []
    assert one(tmp_path, wanted(data), say=lines.append).path.read_bytes() == data
    assert "no longer has its hash" in lines[0]


@pytest.mark.parametrize("served, why", [(b"other..", "sha256"), (b"much longer than expected", "larger than")])
def test_wrong_bytes_never_enter_the_cache(index, tmp_path, served, why):
    index.files["demo-1.0.tar.gz"] = served
    w = wanted(b"content")
    error = one(tmp_path, w)
    assert isinstance(error, FetchError)
    assert "item demo" in str(error) and w.sha256 in str(error) and why in str(error)
    assert not list((tmp_path / "cache/sha256").glob("**/*.tar.gz"))


def test_missing_file_and_missing_project_are_told_apart(index, tmp_path):
    index.files["demo-2.0.tar.gz"] = b"x"
    assert "has demo but not this file" in str(one(tmp_path, wanted(b"content")))
    assert "no project absent" in str(one(tmp_path, wanted(b"content", package="absent")))


def test_errors_name_no_address(index, tmp_path):
    assert "127.0.0.1" not in str(one(tmp_path, wanted(b"content")))
    index.fail_next = 100
    assert "127.0.0.1" not in str(one(tmp_path, wanted(b"content")))


def test_a_busy_index_is_asked_again(index, tmp_path):
    index.files["demo-1.0.tar.gz"] = data = b"content"
    index.fail_next = 2
    assert isinstance(one(tmp_path, wanted(data)), Fetched)


def test_extra_index_and_local_places(index, tmp_path, monkeypatch):
    data = {name: name.encode() for name in ("a-1.tar.gz", "b-1.tar.gz", "c-1.tar.gz", "d-1.tar.gz")}
    links, simple = tmp_path / "links", tmp_path / "simple"
    for folder in (links, simple / "b", simple / "c", tmp_path / "files"):
        folder.mkdir(parents=True)
    (links / "a-1.tar.gz").write_bytes(data["a-1.tar.gz"])
    (simple / "b/b-1.tar.gz").write_bytes(data["b-1.tar.gz"])
    (tmp_path / "files/c-1.tar.gz").write_bytes(data["c-1.tar.gz"])
    (simple / "c/index.html").write_text('<a href="../../files/c-1.tar.gz#sha256=0">c-1.tar.gz</a>')
    index.files["d-1.tar.gz"] = data["d-1.tar.gz"]
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    monkeypatch.setenv("PIP_INDEX_URL", simple.as_uri())
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", index.url)
    all_wanted = [wanted(d, name, package=name[0], item=name[0]) for name, d in data.items()]
    results = Fetcher(tmp_path / "cache").fetch_all(all_wanted)
    assert [results[w].path.read_bytes() for w in all_wanted] == list(data.values())


def test_pip_configuration_is_parsed_and_variables_win():
    text = "global.index-url='http://conf/simple'\nglobal.extra-index-url='\\nhttp://x/ \\nhttp://y/'\n:env:.cert='/env.pem'\n"
    found = PipIndexes.from_config_text(text + "global.cert='/conf.pem'\n", {})
    assert found.indexes == ("http://conf/simple", "http://x/", "http://y/") and found.cert == "/env.pem"
    assert PipIndexes.from_config_text(text, {"PIP_INDEX_URL": "http://env/"}).indexes[0] == "http://env/"
    assert len(PipIndexes.from_config_text("", {}).indexes) == 1  # pip's default
    assert PipIndexes.from_config_text("global.no-index='true'", {}).indexes == ()


def test_pip_is_asked(tmp_path):
    config = tmp_path / "pip.conf"
    config.write_text("[global]\nindex-url = http://from-file.invalid/simple\n")
    environ = {k: v for k, v in os.environ.items() if not k.startswith("PIP_")} | {"PIP_CONFIG_FILE": str(config)}
    assert PipIndexes.from_pip(environ).indexes[0] == "http://from-file.invalid/simple"


def test_absent_programs_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    for registry, program in (("npm", "npm"), ("apt", "apt-get")):
        error = one(tmp_path, wanted(b"x", registry=registry))
        assert isinstance(error, FetchError) and f"program {program} is not installed" in str(error)


def test_local_files_are_checked_in_place(tmp_path):
    (tmp_path / "mine.jsonl").write_bytes(b"{}")
    good = wanted(b"{}", "mine.jsonl", registry="local")
    assert one(tmp_path, good, root=tmp_path).path == tmp_path / "mine.jsonl"
    changed = one(tmp_path, wanted(b"[]", "mine.jsonl", registry="local"), root=tmp_path)
    assert "pin it again" in str(changed)
    assert "no file absent" in str(one(tmp_path, wanted(b"", "absent", registry="local"), root=tmp_path))


@pytest.mark.network
def test_npm_packs_a_pinned_file(tmp_path):
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    sha = "e81986966d6ab96083351ca686b179f1d952b1d037368e9c21b531ea0c935e51"
    w = Wanted("ios", "npm", "@capacitor/ios", "8.5.2", "capacitor-ios-8.5.2.tgz", sha, 87631)
    got = one(tmp_path, w)
    if isinstance(got, FetchError) and "npm pack failed" in str(got):
        pytest.skip(f"no npm registry here: {got}")
    assert isinstance(got, Fetched) and got.path.stat().st_size == 87631
