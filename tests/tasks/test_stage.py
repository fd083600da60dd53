"""The stage contract: outputs whole or absent, fingerprints, rejects, seeds, errors that name what is wrong."""

from __future__ import annotations

import json
import types

import pytest

from tasks import spec as spec_mod
from tasks.files import atomic_dir, atomic_write, content_hash, derive_seed, replace_path
from tasks.spec import StageConfig, StageSpec, fingerprint, select, validate_config
from tasks.stage import Stage, run_stage_for_test


class Config(StageConfig):
    count: int
    rate: float = 0.5


def module(run):
    made = types.ModuleType("tasks.toy")
    made.Config, made.run = Config, run
    return made


def write_one(stage: Stage) -> None:
    (stage.out("data/toy") / "value.txt").write_text(str(stage.config.count))
    stage.rows(values=1)
    stage.metric(score={"a": 1.5})


def test_outputs_have_a_manifest_with_hashes(tmp_path):
    run_stage_for_test(module(write_one), {"count": 3}, outs=["data/toy"], tmp=tmp_path)
    manifest = json.loads((tmp_path / "data/toy/manifest.json").read_text())
    assert manifest["files"][0]["path"] == "value.txt" and manifest["rows"] == {"values": 1}
    assert manifest["config"]["count"] == 3
    assert json.loads((tmp_path / "metrics/toy.json").read_text()) == {"score": {"a": 1.5}}


def test_two_runs_give_the_same_bytes(tmp_path):
    for name in ("a", "b"):
        run_stage_for_test(module(write_one), {"count": 3}, outs=["data/toy"], tmp=tmp_path / name)
    assert (tmp_path / "a/data/toy/manifest.json").read_bytes() == (tmp_path / "b/data/toy/manifest.json").read_bytes()


def test_a_failing_stage_leaves_the_old_output_and_no_staging(tmp_path):
    run_stage_for_test(module(write_one), {"count": 3}, outs=["data/toy"], tmp=tmp_path)

    def fail(stage: Stage) -> None:
        write_one(stage)
        raise ValueError("half-way")

    with pytest.raises(ValueError, match="half-way"):
        run_stage_for_test(module(fail), {"count": 4}, outs=["data/toy"], tmp=tmp_path)
    assert (tmp_path / "data/toy/value.txt").read_text() == "3"
    assert [p.name for p in (tmp_path / "data").iterdir()] == ["toy"]


def test_unknown_and_mistyped_keys_are_named_by_their_path():
    spec = StageSpec("toy-small", (), (), ())
    with pytest.raises(ValueError, match=r"toy\.small\.cuont: unknown key"):
        validate_config(spec, {"toy": {"small": {"count": 1, "cuont": 2}}}, Config)
    with pytest.raises(ValueError, match=r"toy\.small\.count.*found 'x'"):
        validate_config(spec, {"toy": {"small": {"count": "x"}}}, Config)


def test_undeclared_paths_are_refused(tmp_path):
    def reads(stage: Stage) -> None:
        stage.dep("data/other")

    with pytest.raises(ValueError, match="does not list among its deps"):
        run_stage_for_test(module(reads), {"count": 1}, outs=["data/toy"], tmp=tmp_path)


def test_rejects_are_kept_counted_and_bounded(tmp_path):
    def rejecting(stage: Stage) -> None:
        stage.seen(100)
        for i in range(stage.config.count):
            stage.reject(f"record-{i}", "empty", "found nothing, expected text")

    run_stage_for_test(module(rejecting), {"count": 5}, outs=["data/toy"], tmp=tmp_path)
    lines = (tmp_path / "data/toy/rejects/part-00000.jsonl").read_text().splitlines()
    assert len(lines) == 5 and json.loads(lines[0])["reason"] == "empty"
    with pytest.raises(ValueError, match="6 of 100 records"):
        run_stage_for_test(module(rejecting), {"count": 6}, outs=["data/toy"], tmp=tmp_path)
    assert len((tmp_path / "work/rejects/toy.jsonl").read_text().splitlines()) == 6


def test_fingerprint_moves_with_params_and_content(tmp_path):
    spec = StageSpec("toy", ("in.txt",), (), ())
    (tmp_path / "in.txt").write_text("one")
    first = fingerprint(spec, {"a": 1}, {"in.txt": content_hash(tmp_path / "in.txt")})
    (tmp_path / "in.txt").write_text("two")
    second = fingerprint(spec, {"a": 1}, {"in.txt": content_hash(tmp_path / "in.txt")})
    assert len({first, second, fingerprint(spec, {"a": 2}, {"in.txt": "x"})}) == 3


@pytest.mark.parametrize("killed, begin", [(3, 2), (5, 5)])  # in the middle; behind the last point
def test_a_resumed_series_equals_an_uninterrupted_one(tmp_path, killed, begin):
    def until(last, begin, kill=False):
        def run(stage: Stage) -> None:
            stage.out("data/toy")
            for step in range(begin, last):
                stage.log(step, loss=step * 0.1)
            if kill:
                raise KeyboardInterrupt

        return run

    with pytest.raises(KeyboardInterrupt):
        run_stage_for_test(
            module(until(killed, 0, True)), {"count": 1}, outs=["data/toy"], tmp=tmp_path, plots=["plots/toy.json"]
        )
    run_stage_for_test(module(until(5, begin)), {"count": 1}, outs=["data/toy"], tmp=tmp_path, plots=["plots/toy.json"])
    points = json.loads((tmp_path / "plots/toy.json").read_text())
    assert [p["step"] for p in points] == [0, 1, 2, 3, 4]
    assert points[2]["loss"] == pytest.approx(0.2)


def test_select_takes_only_what_is_asked():
    params = {"seed": 1, "pack": {"a": {"x": 1}, "b": {"x": 2}}}
    assert select(params, ["seed", "pack.a"]) == {"seed": 1, "pack": {"a": {"x": 1}}}
    with pytest.raises(ValueError, match="'pack.c'"):
        select(params, ["pack.c"])


def test_seeds_differ_by_item_and_are_stable():
    assert derive_seed(0, "web", 1) == derive_seed(0, "web", 1)
    assert len({derive_seed(s, n, i) for s in range(3) for n in "ab" for i in range(50)}) == 300
    assert 0 <= derive_seed(7, "x") < 2**63


def test_atomic_dir_replaces_whole_or_not_at_all(tmp_path):
    target = tmp_path / "out"
    with atomic_dir(target) as staging:
        (staging / "a").write_text("1")
    with pytest.raises(RuntimeError), atomic_dir(target) as staging:
        (staging / "a").write_text("2")
        raise RuntimeError
    assert (target / "a").read_text() == "1"
    with atomic_dir(target) as staging:
        (staging / "b").write_text("3")
    assert [p.name for p in target.iterdir()] == ["b"]
    atomic_write(tmp_path / "f.txt", "x")
    replace_path(tmp_path / "f.txt", tmp_path / "g.txt")
    assert not (tmp_path / "f.txt").exists() and (tmp_path / "g.txt").read_text() == "x"


def test_an_absent_dependency_says_what_to_run(tmp_path):
    with pytest.raises(FileNotFoundError, match="run the stage that produces it"):
        content_hash(tmp_path / "nothing")


def test_a_module_that_is_no_stage_is_refused():
    with pytest.raises(ValueError, match="no stage 'nosuch'"):
        spec_mod.stage_module("nosuch")
    with pytest.raises(ValueError, match="no Config and run"):
        spec_mod.stage_module("files")


def test_what_dvc_said_is_kept_until_a_file_it_read_changes(tmp_path, monkeypatch):
    (tmp_path / ".dvc").mkdir()
    (tmp_path / ".dvc/config").write_text("[core]\n    no_scm = true\n")
    text = (
        "stages:\n  one:\n    cmd: run\n    deps: [input.txt]\n    params: [seed]\n    outs:\n      - data/${where}\n"
    )
    (tmp_path / "dvc.yaml").write_text(text + "    metrics: [metrics/one.json]\n    meta: {phase: first, retries: 2}\n")
    (tmp_path / "params.yaml").write_text("seed: 1\nwhere: a\n")
    fresh = spec_mod.load_specs(tmp_path)
    assert fresh["one"].outs == ("data/a",) and fresh["one"].meta == {"phase": "first", "retries": 2}
    asked = []
    resolve = spec_mod._resolve
    monkeypatch.setattr(spec_mod, "_resolve", lambda root: asked.append(root) or resolve(root))
    assert spec_mod.load_specs(tmp_path) == fresh and not asked
    (tmp_path / "params.yaml").write_text("seed: 1\nwhere: b\n")
    assert spec_mod.load_specs(tmp_path)["one"].outs == ("data/b",) and len(asked) == 1
    cache = tmp_path / "work/cache/specs.json"
    cache.write_text(cache.read_text()[:-9])
    assert spec_mod.load_specs(tmp_path)["one"].outs == ("data/b",) and len(asked) == 2
    (tmp_path / "dvc.yaml").write_text(text.replace("one", "two"))
    assert list(spec_mod.load_specs(tmp_path)) == ["two"]


@pytest.mark.parametrize(
    ("bad", "good", "share", "fails"),
    [
        (1, 13, 0.05, False), (2, 6, 0.05, False), (2, 3, 0.05, True), (3, 13, 0.05, True), (1, 13, 0.0, True),
        (1, 3, 0.05, False), (1, 1, 0.05, True), (5, 95, 0.05, False), (6, 94, 0.05, True), (1, 0, 0.05, True),
    ],
)  # fmt: skip
def test_a_bad_record_or_two_do_not_stop_a_small_run(tmp_path, bad, good, share, fails):
    def run(stage):
        write_one(stage)
        stage.seen(good + bad)
        for i in range(bad):
            stage.reject(f"record {i}", "broken")

    def go():
        run_stage_for_test(module(run), {"count": 1, "max_reject_share": share}, outs=["data/toy"], tmp=tmp_path)

    if fails:
        with pytest.raises(ValueError, match=f"{bad} of {bad + good} records were rejected"):
            go()
    else:
        go()
