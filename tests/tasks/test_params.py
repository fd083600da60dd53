"""Profiles compose into params.yaml, and the committed params.yaml is tiny's."""

from __future__ import annotations

import pytest

from tasks.params import ROOT, compose, dump, load_yaml, profiles, write_profile


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
