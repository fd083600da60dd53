"""Features of source files, the quality models that come with the code, and the training command."""

from __future__ import annotations

import json
import random
import re
import sys
import sysconfig
import tarfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks import code_quality, code_quality_train
from tasks.code_features import NAMES, comment_mark, features, parses
from tasks.code_variants import VARIANTS

PYTHON = '''"""Shapes."""

import math


class Circle:
    """A circle of a radius in metres."""

    def __init__(self, radius: float):
        self.radius = radius  # metres

    def area(self) -> float:
        """Square metres."""
        return math.pi * self.radius**2
'''


def named(text: str, language: str) -> dict[str, float]:
    return dict(zip(NAMES, features(text, language), strict=True))


def test_features_by_hand():
    f = named(PYTHON, "python")
    assert f["parses"] == 1.0 and named(PYTHON[:-30] + "((", "python")["parses"] == 0.0
    assert f["odd_indent"] == 0 and f["unbalanced"] == 0 and f["conflict_marks"] == 0
    docs = sum(map(len, ('"""Shapes."""', '"""A circle of a radius in metres."""', '"""Square metres."""', "# metres")))
    assert f["comment_share"] == pytest.approx(docs / len(PYTHON))
    c = named('int main(void) { /* a "quoted" word */ char *s = "// no comment"; return 0; }\n', "c")
    assert c["comment_share"] > 0.25 and 0.15 < c["string_share"] < 0.25 and c["parses"] == 0.5
    assert (
        named("-- a\nx = 1\n", "haskell")["comment_share"] > 0.3 and named("-- a\nx = 1\n", "c")["comment_share"] == 0
    )
    assert named("<<<<<<< HEAD\na\n=======\nb\n>>>>>>> x\n", "c")["conflict_marks"] == 3
    body = "int f(void) {\n  int a = 1;\n  return a;\n}\n"
    assert named(body, "c")["ends_open"] == 0 and named(body[:20], "c")["ends_open"] == 1
    assert named(body[:20], "c")["open_at_end"] == 1 and named(body[12:], "c")["starts_inside"] == 0


def test_comment_mark_of_an_unlisted_language_is_read_from_the_text():
    assert comment_mark("; a\n; b\n(x)\n", "unlisted") == ";" and comment_mark("// a\n// b\n", "unlisted") == "//"
    assert comment_mark("x\n", "lua") == "--"


def test_parses_only_where_the_standard_library_can():
    assert parses('{"a": 1}', "json") == 1 and parses("{", "json") == 0 and parses("fn main() {}", "rust") == 0.5
    assert parses("x = '\\d'\n", "python") == 1  # a warning is no error


@settings(max_examples=150, deadline=None)
@given(
    st.text(max_size=400),
    st.sampled_from(["python", "c", "haskell", "visual basic", "vim script", "", "matlab", "fortran"]),
)
def test_no_text_breaks_the_features(text, language):
    assert np.isfinite(features(text, language)).all()


def test_variants_differ_and_repeat_with_their_seed():
    for name, change in VARIANTS.items():
        one, two = (change(PYTHON * 3, "#", random.Random(5)) for _ in range(2))
        assert one == two and one != PYTHON * 3, name


def test_models_are_small_and_fit_this_version():
    models = code_quality.load()
    assert code_quality.MODELS.stat().st_size < 300_000
    assert len(models) >= 8 and {"python", "c++", "javascript", code_quality.SHARED} <= set(models)
    assert all(0 < m.low < m.high < 1 for m in models.values())
    assert code_quality.model_for("scala", models)[0] == code_quality.SHARED
    with pytest.raises(ValueError, match="other features"):
        code_quality.from_json(json.dumps({"features": ["size"], "models": {}}))
    with pytest.raises(ValueError, match="no model"):
        code_quality.from_json(json.dumps({"features": NAMES, "models": {}}))


def test_training_reported_every_model_on_projects_it_had_not_seen():
    report = json.loads(code_quality.MODELS.read_text())["about"]["report"]
    assert set(report) == set(code_quality.load())
    assert all(r["auc_left_out"] > 0.85 and len(r["auc_by_project"]) >= 2 for r in report.values())
    assert report[code_quality.SHARED]["languages"] > 20


def test_shipped_models_name_the_packages_they_are_from():
    conf = code_quality.MODELS.parent
    rows = [line.split() for line in (conf / "code_quality_packages.txt").read_text().splitlines() if line[0] != "#"]
    listed = {
        f"site-{row[1]}" if row[0] == "installed" else re.sub(r"\.(deb|tgz|tar\.gz)$", "", row[1]) for row in rows
    }
    projects = json.loads(code_quality.MODELS.read_text())["about"]["projects"]
    assert set(projects) == listed and all(len(p["sha256"]) == 64 for p in projects.values())


def test_a_project_is_the_same_packed_or_not_and_beside_files_that_are_no_source(tmp_path):
    source = Path(__file__).parents[2] / "tasks"
    folder = tmp_path / "open" / "project"
    folder.mkdir(parents=True)
    for path in sorted(source.glob("code_*.py")):
        (folder / path.name).write_text(path.read_text())
    with tarfile.open(tmp_path / "project.tar.gz", "w:gz") as tar:
        tar.add(folder, "project-1.0")
    assert code_quality_train.project_name(tmp_path / "project.tar.gz") == "project"
    packed, digest = code_quality_train.read_project(tmp_path / "project.tar.gz", "project", 0)
    (folder / "__pycache__").mkdir()
    for name in "abcdef":
        (folder / "__pycache__" / f"{name}.pyc").write_bytes(bytes(500))
    beside, same = code_quality_train.read_project(folder, "project", 0)
    assert digest == same and [(e.kind, list(e.x)) for e in packed] == [(e.kind, list(e.x)) for e in beside]
    (folder / "code_kinds.py").write_text("def one():\n    return 1\n" * 30)
    assert code_quality_train.read_project(folder, "project", 0)[1] != digest


def test_unseen_library_code_against_its_bad_variants():
    """The standard library was in no training set."""
    root = Path(sysconfig.get_paths()["stdlib"])
    good, bad = [], []
    for path in sorted(root.glob("*.py"))[::3]:
        text = path.read_text(encoding="utf-8")
        if 1500 < len(text) < 40_000:
            good.append(text)
            kind = sorted(VARIANTS)[len(good) % len(VARIANTS)]
            bad.append(VARIANTS[kind](text, "#", random.Random(len(good))))
    assert len(good) > 30
    rows = code_quality.assess(good + bad, ["python"] * (len(good) + len(bad)))
    scores = np.array([score for score, _, _ in rows])
    labels = np.arange(len(rows)) < len(good)
    assert code_quality_train.auc(scores, labels) > 0.9
    low = [tier == "low" for _, tier, _ in rows]
    assert np.mean(low[: len(good)]) < 0.15 and np.mean(low[len(good) :]) > 0.5


def test_auc_against_the_definition():
    rng = np.random.default_rng(0)
    scores, labels = rng.integers(0, 6, 60) / 5, rng.random(60) < 0.4
    pairs = [(a > b) + (a == b) / 2 for a in scores[labels] for b in scores[~labels]]
    assert code_quality_train.auc(scores, labels) == pytest.approx(np.mean(pairs))
    assert np.isnan(code_quality_train.auc(scores, np.ones(60, bool)))


def test_tiers_need_scores_of_unseen_projects():
    with pytest.raises(ValueError, match="more projects"):
        code_quality_train.tiers(np.full(4, np.nan), np.array([True, True, False, False]))
    low, high = code_quality_train.tiers(np.linspace(0, 1, 200), np.arange(200) >= 60)
    assert 0.3 < low < 0.36 and 0.5 < high < 0.53


def test_training_command_writes_models_that_load(tmp_path, monkeypatch, capsys):
    source = Path(__file__).parents[2] / "tasks"
    for project in "abc":
        folder = tmp_path / "in" / project
        folder.mkdir(parents=True)
        for path in sorted(source.glob("*.py"))["abc".index(project) :: 3][:16]:
            (folder / path.name).write_text(path.read_text())
        for n in range(14):
            body = "".join(
                f"function f{n}_{i}(a)\n  -- {i} times {n}\n  return a * {i + n}\nend\n\n" for i in range(12 + n)
            )
            (folder / f"m{n}.lua").write_text(f"-- part {n} of {project}\n{body}")
    out = tmp_path / "models.json"
    monkeypatch.setattr(sys, "argv", ["train", str(tmp_path / "in"), "--out", str(out), "--least", "44"])
    code_quality_train.main()
    models = code_quality.from_json(out.read_text())
    assert set(models) == {"python", code_quality.SHARED}
    first = out.read_bytes()
    code_quality_train.main()
    assert out.read_bytes() == first and "AUC left out" in capsys.readouterr().out
