"""DeepSpeed's engine and launcher against the native ones, on gloo; its own ZeRO with AdamW as a control.

python -m pytest tests/tasks/test_deepspeed.py
"""

import pytest
import torch

from model.muon import OptimConfig, build_optimizer
from tasks.parallel import ParallelSettings, current
from tasks.parallel_engine import make_engine
from tests.model.ranks import run_ranks
from tests.tasks import rank_workspace as ws
from tests.tasks.lm_case import micro_model
from tests.tasks.test_parallel import LONG, STEPS, compare, dies_with_its_ranks, far, many, same_as, train, whole

pytest.importorskip("deepspeed")
__all__ = ["whole"]  # a fixture

ADAMW = OptimConfig(lr_matrix=1e-3, muon="off", train="backbone")


def zero(stage):
    """ZeRO knows no absent gradients, hence MTP at every step."""
    settings = ParallelSettings(engine="deepspeed", zero_stage=stage, bucket_mb=0.05)
    return {"cfg": ADAMW, "dtype": torch.float32, "mtp": 1, "settings": settings}


RUNS = {
    "plain": {"settings": ParallelSettings(engine="deepspeed")},
    "micro, small buckets": {"micro": 1, "settings": ParallelSettings(engine="deepspeed", bucket_mb=0.01)},
    "few rows": {"rows": 1, "settings": ParallelSettings(engine="deepspeed")},
    "fault": {"nan": 5, "settings": ParallelSettings(engine="deepspeed")},
}


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    runs = RUNS | {"zero 1": zero(1), "zero 2": zero(2), "zero 2, cut": zero(2) | {"stop": 7}}
    return run_ranks(2, many, tmp_path_factory.mktemp("two"), runs, limit=400)


@pytest.mark.parametrize("name", RUNS)
def test_the_engine_equals_the_plain_loop(two, tmp_path, name):
    reference = train(0, 1, tmp_path, RUNS[name] | {"settings": None})
    for found in two:
        compare(found[name], reference)
    assert far(two[0][name]["state"], reference["state"]) < 1e-8 and two[1][name]["state"] == {}


@pytest.mark.parametrize("stage", [1, 2])
def test_zero_with_adamw_equals_the_plain_loop(two, tmp_path, stage):
    reference = train(0, 1, tmp_path, zero(stage) | {"settings": None})
    for found in two:
        run = found[f"zero {stage}"]
        for step in range(1, STEPS + 1):
            assert run["points"][step]["loss"] == pytest.approx(reference["points"][step]["loss"], abs=1e-5)
        assert far(run["weights"], reference["weights"]) < 2e-5
    state = two[0][f"zero {stage}"]["state"]
    assert state.keys() == reference["state"].keys()
    assert far(state, reference["state"]) < 1e-5


def test_one_process_under_deepspeed(tmp_path):
    """In a process of its own, as it leaves a process group behind."""
    found = run_ranks(1, many, tmp_path / "a", {"a": RUNS["plain"]})[0]["a"]
    compare(found, train(0, 1, tmp_path / "b", {}))


def zero_with_an_indexer(rank, world):
    model = micro_model()
    optimizer = build_optimizer(model, OptimConfig(muon="off"))
    with pytest.raises(ValueError, match="the indexer trains here"):
        make_engine(model, optimizer, current(), ParallelSettings(engine="deepspeed", zero_stage=1))


def test_zero_refuses_a_training_indexer():
    run_ranks(1, zero_with_an_indexer)


@pytest.mark.slow
def test_resume_between_engines_and_rank_counts(two, tmp_path):
    reference = two[0]["plain"]
    run_ranks(2, many, tmp_path, {"a": RUNS["plain"] | {"stop": 6}}, limit=300)
    found = train(0, 1, tmp_path / "a", {})
    assert min(found["points"]) == 5 and far(found["weights"], reference["weights"]) < 1e-9
    train(0, 1, tmp_path / "b", {"stop": 6})
    for found in run_ranks(4, many, tmp_path, {"b": RUNS["plain"], "plain": RUNS["plain"]}, limit=300):
        assert min(found["b"]["points"]) == 5 and far(found["b"]["weights"], reference["weights"]) < 1e-9
        assert far(found["plain"]["weights"], reference["weights"]) < 1e-9


@pytest.mark.slow
def test_zero_resumes(two, tmp_path):
    for found in run_ranks(2, many, tmp_path, {"a": zero(2) | {"stop": 7}}, limit=300):
        assert found["a"] is None
    for found in run_ranks(2, many, tmp_path, {"a": zero(2)}, limit=300):
        assert min(found["a"]["points"]) == 5
        assert far(found["a"]["weights"], two[0]["zero 2"]["weights"]) < 1e-6


@pytest.mark.slow
def test_zero_hands_over_to_one_process_and_back(two, tmp_path):
    """Its flat partitions are written as ranges of parameters, which any engine reads."""
    plain, whole = zero(2) | {"settings": None}, two[0]["zero 2"]["weights"]
    run_ranks(2, many, tmp_path, {"a": zero(2) | {"stop": 7}}, limit=300)
    found = train(0, 1, tmp_path / "a", plain)
    assert min(found["points"]) == 5 and far(found["weights"], whole) < 2e-5
    train(0, 1, tmp_path / "b", plain | {"stop": 7})
    for found in run_ranks(2, many, tmp_path, {"b": zero(1)}, limit=300):
        assert min(found["b"]["points"]) == 5 and far(found["b"]["weights"], whole) < 2e-5


@pytest.mark.slow
def test_a_stage_under_deepspeeds_launcher_and_engine(whole, tmp_path):
    base = ws.workspace(tmp_path / "w", **LONG)
    ws.spread_over(base, processes=2, launcher="deepspeed", engine="deepspeed")
    output = ws.finish(ws.start(base))
    same_as(base, whole)
    assert output.count("step 60/60") == 1 and "shm_comm" not in output, "nothing is compiled"


@pytest.mark.slow
def test_an_outer_launcher_decides(whole, tmp_path):
    """As on a cluster: `deepspeed --num_gpus N --module tasks STAGE`; params.yaml says one process."""
    base = ws.workspace(tmp_path / "w", **LONG)
    command = [
        "-m",
        "deepspeed.launcher.runner",
        "--num_accelerators",
        "2",
        "--no_ssh_check",
        "--module",
        "tasks",
        ws.STAGE,
    ]
    output = ws.finish(ws.start(base, *command))
    same_as(base, whole)
    assert output.count("step 60/60") == 1


@pytest.mark.slow
def test_no_orphan_after_kill_9(tmp_path):
    dies_with_its_ranks(tmp_path, "deepspeed")
