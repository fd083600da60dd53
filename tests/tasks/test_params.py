"""Profiles compose into params.yaml, and the committed params.yaml is tiny's."""

from __future__ import annotations

import pytest

from tasks.params import ROOT, compose, dump, edited, load_yaml, profiles, use_profile, write_profile


def test_params_yaml_holds_the_tiny_profile():
    assert (ROOT / "params.yaml").read_text() == dump(compose("tiny"), "tiny")


@pytest.mark.parametrize("name", profiles())
def test_every_profile_has_every_key_of_tiny(name):
    def keys(tree, prefix=""):
        found = {prefix + key for key in tree}
        for key, value in tree.items():
            found |= keys(value, f"{prefix}{key}.") if isinstance(value, dict) else set()
        return found

    assert keys(compose("tiny")) - keys(compose(name)) == set()


def test_merge_order_and_numbers(tmp_path):
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf/a.yaml").write_text("profile: a\nx: {p: 1, q: 1e-3}\n")
    (tmp_path / "conf/b.yaml").write_text("extends: a\nprofile: b\nx: {p: 2}\n")
    assert compose("b", tmp_path / "conf") == {"profile": "b", "x": {"p": 2, "q": 0.001}}
    assert write_profile("b", tmp_path) and not write_profile("b", tmp_path)
    assert load_yaml(tmp_path / "params.yaml") == compose("b", tmp_path / "conf")


def test_a_run_keeps_what_somebody_wrote_into_params_yaml(tmp_path):
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf/a.yaml").write_text("profile: a\nsources: []\n")
    (tmp_path / "conf/b.yaml").write_text("extends: a\nprofile: b\n")
    params = tmp_path / "params.yaml"
    assert use_profile("a", tmp_path) == "params.yaml now holds profile a" and use_profile("a", tmp_path) == ""
    assert use_profile("b", tmp_path) == "params.yaml now holds profile b" and not edited(tmp_path)
    params.write_text(params.read_text().replace("sources: []", "sources: [{name: mine}]"))
    assert edited(tmp_path) and "kept" in use_profile("b", tmp_path)
    assert load_yaml(params)["sources"] == [{"name": "mine"}]
    with pytest.raises(ValueError, match="edited by hand.*make profile NAME=a"):
        use_profile("a", tmp_path)
    (tmp_path / "conf/a.yaml").write_text("profile: a\nsources: []\nseed: 1\n")
    with pytest.raises(ValueError, match="edited by hand"):
        use_profile("b", tmp_path)
    assert write_profile("b", tmp_path) and load_yaml(params)["sources"] == []
    params.write_text("profile: a\n")  # written by something else: composed over, as ever
    assert not edited(tmp_path) and use_profile("b", tmp_path)


def test_errors_name_the_file_and_the_key(tmp_path):
    with pytest.raises(ValueError, match="unknown profile 'nope'"):
        compose("nope")
    bad = tmp_path / "bad.yaml"
    bad.write_text("a: 1\nb: 2\na: 3\n")
    with pytest.raises(ValueError, match=r"bad\.yaml:3: key 'a' is given twice"):
        load_yaml(bad)
    bad.write_text("a: [1,\n")
    with pytest.raises(ValueError, match="bad.yaml: not readable as YAML"):
        load_yaml(bad)
    bad.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="bad.yaml"):
        load_yaml(bad)
    for name, text in {"a": "extends: b\n", "b": "extends: a\n"}.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    with pytest.raises(ValueError, match="circle"):
        compose("a", tmp_path)
