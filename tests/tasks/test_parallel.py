"""Training on several ranks: equal to one process, resumed by any number of them, one writer, no orphans, errors shown.

python -m pytest tests/tasks/test_parallel.py
"""

import contextlib
import json
import os
import random
import signal
import time
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

import tasks.trainer as trainer_module
from model.muon import OptimConfig, build_optimizer
from tasks import launch, sft
from tasks.objectives import LanguageModeling
from tasks.parallel import SINGLE, ParallelSettings, current, start
from tasks.parallel_engine import make_engine
from tasks.sequence_balance import sequence_cost, share
from tasks.settings import GuardSettings, LoopSettings
from tasks.spec import StageSpec, fingerprint
from tasks.trainer import Trainer, split_batch
from tests.model.ranks import run_ranks
from tests.tasks import rank_workspace as ws
from tests.tasks.lm_case import micro_model

STEPS, ROWS, SIZE = 12, 4, 24


class FakeStage:
    def __init__(self, path):
        self.scratch, self.evidence, self.points, self.metrics = path, path / "evidence", {}, {}
        path.mkdir(parents=True, exist_ok=True)

    def log(self, step, **values):
        self.points.setdefault(step, {}).update(values)

    def metric(self, **values):
        self.metrics.update(values)

    def print(self, message): ...

    def timing(self, **seconds): ...


@contextlib.contextmanager
def in_float64():
    """The loop computes in the weights' float64, not in float32 copies: nothing but the order of sums can then differ."""
    kept = trainer_module.computing_in
    trainer_module.computing_in = lambda model, dtype: contextlib.nullcontext()
    try:
        yield
    finally:
        trainer_module.computing_in = kept


class Stopped(Exception):
    pass


def rows_of(step, count=ROWS):
    """Counting sequences; the last row of a step has few targets, so that ranks have unequal counts."""
    start = torch.randint(90, (count, 1), generator=torch.Generator().manual_seed(step))
    ids = (start + torch.arange(SIZE + 1)) % 95
    targets = ids[:, 1:].clone()
    targets[-1, SIZE // 3 :] = -100
    return {"input_ids_bs": ids[:, :-1], "targets_bs": targets}


def train(rank, world, folder, options):
    """One run on this rank; see the options' defaults."""
    o = {
        "stop": None,
        "rows": ROWS,
        "nan": None,
        "micro": 4,
        "cfg": OptimConfig(lr_matrix=5e-3),
        "settings": None,
        "dtype": torch.float64,
        "mtp": 0,
        "lm": {},
    } | options
    model = micro_model().to(o["dtype"])
    stage = FakeStage(folder)
    lm = LanguageModeling(mtp_depth=o["mtp"], **o["lm"])

    def batches(step):
        if step == o["stop"]:
            raise Stopped
        share = {k: v[rank::world] for k, v in rows_of(step, o["rows"]).items()}
        return split_batch(share, o["micro"]) if len(share["targets_bs"]) else []

    def goal(model, batch, step, part):
        loss, logs = lm(model, batch, step, part)
        if step == o["nan"] and (batch["input_ids_bs"] == rows_of(step, o["rows"])["input_ids_bs"][1]).all(1).any():
            loss = loss * float("nan")  # only the rank that has row 1 sees it
        return loss, logs

    goal.terms = lm.terms
    trainer = Trainer(
        stage, model, build_optimizer(model, o["cfg"]), goal, batches,
        steps=STEPS, lr_factor=lambda step: 1 - step / 50,
        settings=LoopSettings(checkpoint_every=4, log_every=1, eval_every=6, grad_clip=0.3, keep_best="val/x",
                              guard=GuardSettings(history=100, window=100)),
        evaluate=lambda m, step: {"val/x": float(m.lm_head.weight.norm())}, parallel=o["settings"],
    )  # fmt: skip
    try:
        with in_float64():
            result = trainer.run()
    except Stopped:
        return None
    return {
        "points": stage.points, "weights": {k: v.clone() for k, v in model.state_dict().items()}, "result": result,
        "state": trainer.optimizer.state_tensors(), "counters": trainer.counters, "metrics": stage.metrics,
        "files": sorted(p.name for p in folder.iterdir()),
    }  # fmt: skip


def many(rank, world, folder, runs):
    return {name: train(rank, world, folder / name, options) for name, options in runs.items()}


def agreements(rank, world):
    ranks = current()
    logs, counts = ranks.sum_step({"a": 1.0, **({"b": 2.0} if rank else {})}, [torch.tensor([rank, 3])] if rank else [])
    same, loads = ranks.sum_step({"a": rank + 0.5}, [torch.tensor([rank, 1]), torch.tensor([2, 2, 2])])
    model = torch.nn.Linear(2, 2)
    with torch.no_grad():
        model.weight.fill_(1.0)
        model.bias.fill_(1.0)
    ranks.check_same(model)
    with torch.no_grad():
        model.weight.fill_(float(rank))
    with pytest.raises(ValueError, match="same weights"):
        ranks.check_same(model)
    return {
        "sum": ranks.sum_(rank + 1), "any": (ranks.any_(rank == 1), ranks.any_(False)), "writer": ranks.is_writer,
        "exchange": ranks.exchange({"rank": rank, "text": "x" * rank}), "first": ranks.first([rank, None]),
        "logs": logs, "counts": [c.tolist() for c in counts], "same": same, "loads": [c.tolist() for c in loads],
    }  # fmt: skip


def far(a, b):
    return max(float((a[k].double() - b[k].double()).abs().max()) for k in b)


def test_agreements():
    for rank, found in enumerate(run_ranks(2, agreements)):
        assert found["sum"] == 3 and found["any"] == (True, False) and found["writer"] == (rank == 0)
        assert found["exchange"] == [{"rank": 0, "text": ""}, {"rank": 1, "text": "x"}] and found["first"] == [0, None]
        assert found["logs"] == {"a": 2.0, "b": 2.0} and found["counts"] == [[1, 3]], (
            "ranks with other names agree, too"
        )
        assert found["same"] == {"a": 2.0} and found["loads"] == [[1, 2], [4, 4, 4]]


def test_one_process_is_a_parallel_of_one():
    assert current() is SINGLE and SINGLE.is_writer and SINGLE.sum_(2.5) == 2.5 and SINGLE.exchange([1]) == [[1]]
    assert SINGLE.sum_step({"a": 1.0}, [torch.tensor([1])]) == ({"a": 1.0}, [torch.tensor([1])])


RUNS = {
    "plain": {},
    "micro": {"micro": 1},
    "all terms": {"mtp": 2, "lm": {"balance_coef": 0.1, "index_rows": 6, "attention": "sparse"}},
    "few rows": {"rows": 3},
    "one row": {"rows": 1},
    "adamw": {"cfg": OptimConfig(lr_matrix=2e-3, muon="off")},
    "fault": {"nan": 5},
    "buckets": {"settings": ParallelSettings(bucket_mb=0.01)},
}


def compare(found, whole, tolerance=1e-9):
    assert far(found["weights"], whole["weights"]) < tolerance
    assert found["counters"] == whole["counters"]
    assert found["points"].keys() == whole["points"].keys()
    for step, point in whole["points"].items():
        assert found["points"][step] == pytest.approx(point, rel=1e-5, abs=1e-5), step
    assert found["metrics"] == pytest.approx(whole["metrics"]) if "best" not in whole["metrics"] else True
    assert found["result"] == pytest.approx(whole["result"])


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return run_ranks(2, many, tmp_path_factory.mktemp("two"), RUNS)


@pytest.mark.parametrize("name", RUNS)
def test_two_ranks_equal_one_process(two, tmp_path, name):
    whole = train(0, 1, tmp_path / name, RUNS[name])
    for found in two:
        compare(found[name], whole)
    assert far(two[0][name]["state"], whole["state"]) < 1e-8 and two[1][name]["state"] == {}
    if name == "fault":
        assert whole["points"][6]["guard_skipped"] == 1.0, "the fault was seen, or this tests nothing"
    else:
        assert whole["points"][STEPS]["loss"] < whole["points"][1]["loss"] - 0.2
    assert two[0][name]["files"] == sorted(p.name for p in (tmp_path / name).iterdir())


@pytest.mark.parametrize("before, after", [(1, 2), pytest.param(2, 1, marks=pytest.mark.slow)])
def test_another_number_of_ranks_resumes(two, tmp_path, before, after):
    whole = two[0]["plain"]
    for world, options in ((before, {"stop": 6}), (after, {})):
        if world == 1:
            found = [train(0, 1, tmp_path / "a", options)]
        else:
            found = [r["a"] for r in run_ranks(world, many, tmp_path, {"a": options})]
    for one in found:
        assert far(one["weights"], whole["weights"]) < 1e-9
        assert min(one["points"]) == 5, "it went on from the checkpoint of step 4"
        for step, point in one["points"].items():
            assert point == pytest.approx(whole["points"][step], rel=1e-5, abs=1e-5)


@pytest.mark.slow
def test_four_ranks_equal_one_process_and_hand_over_to_two(two, tmp_path):
    whole = two[0]["plain"]
    run_ranks(4, many, tmp_path, {"a": {"stop": 7}})
    for found in run_ranks(2, many, tmp_path, {"a": {}}):
        assert far(found["a"]["weights"], whole["weights"]) < 1e-9 and min(found["a"]["points"]) == 5
    for found in run_ranks(4, many, tmp_path / "b", {n: RUNS[n] for n in ("plain", "few rows", "fault")}):
        for name, run in found.items():
            assert far(run["weights"], two[0][name]["weights"]) < 1e-9, name


class Samples:
    """Conversations of unequal lengths, as SftSet gives them."""

    def __len__(self):
        return 40

    def __getitem__(self, i):
        import numpy as np

        ids = np.arange(i, i + 8 + i % 13) % 95
        return "x", ids, (np.arange(len(ids)) >= len(ids) // 2).astype(int)


def dealt(rank, world, balance="none"):
    cost = sequence_cost(micro_model().cfg, sparse=True)
    return lambda lengths: share(lengths, cost, world, balance)[rank]


def test_sft_batches_of_ranks_make_up_the_step():
    def rows(batches):
        return sorted(
            tuple(r[m].tolist()) for b in batches for r, m in zip(b["input_ids_bs"], b["token_mask_bs"], strict=True)
        )

    for world, balance in ((2, "none"), (3, "none"), (3, "tokens"), (3, "cost")):
        shares = [sft.sft_batches(Samples(), 16, 64, 5, 3, dealt(rank, world, balance)) for rank in range(world)]
        assert rows([b for share in shares for b in share]) == rows(sft.sft_batches(Samples(), 16, 64, 5, 3))
        sizes = [sum(b["input_ids_bs"].numel() for b in share) for share in shares]
        assert max(sizes) < 1.5 * min(sizes)


def sft_step(rank, world):
    model = micro_model().double()
    trainer = Trainer(
        SimpleNamespace(scratch=launch.Path("/nonexistent"), evidence=launch.Path("/nonexistent"), print=print),
        model, build_optimizer(model, OptimConfig(lr_matrix=5e-3, train="backbone")), sft.objective,
        lambda step: sft.sft_batches(Samples(), 16, 64, 5, step, dealt(rank, world)),
        steps=4, lr_factor=lambda step: 1.0, settings=LoopSettings(),
    )  # fmt: skip
    points = []
    for _ in range(4):
        with in_float64():
            points.append(trainer._one_step())
        trainer.step += 1
    return points, {k: v.clone() for k, v in model.state_dict().items()}


def test_sft_on_two_ranks_equals_one_process():
    points, weights = sft_step(0, 1)
    for ours, found in run_ranks(2, sft_step):
        assert far(found, weights) < 1e-9
        for a, b in zip(ours, points, strict=True):
            a.pop("tokens"), b.get("tokens")  # padding differs
            assert a == pytest.approx({k: v for k, v in b.items() if k != "tokens"}, rel=1e-6)


def test_identity_does_not_depend_on_the_number_of_processes():
    spec = StageSpec("pretrain-general", (), (), ())
    base = {"pretrain": {"general": {"rows": 8}}, "model": {}}
    more = {"pretrain": {"general": {"rows": 8, "parallel": {"processes": 2}}}, "model": {}}
    assert fingerprint(spec, base, {}) == fingerprint(spec, more, {})
    assert fingerprint(spec, {"pretrain": {"general": {"rows": 9}}, "model": {}}, {}) != fingerprint(spec, base, {})
    flat = StageSpec("sft", (), (), ())
    assert fingerprint(flat, {"sft": {"parallel": {"processes": 2}}}, {}) == fingerprint(flat, {"sft": {}}, {})


def test_no_more_processes_than_rows(tmp_path):
    for processes, expected in ((2, 2), (9, 4)):
        (tmp_path / "params.yaml").write_text(
            f"pretrain: {{general: {{rows: 4, parallel: {{processes: {processes}}}}}}}\nsft: {{batch_samples: 1}}\n"
        )
        assert launch.settings_of("pretrain-general", tmp_path)["processes"] == expected
    assert launch.settings_of("sft", tmp_path) == {} == launch.settings_of("report", tmp_path)


def test_settings_that_do_not_fit():
    model = micro_model()
    optimizer = build_optimizer(model, OptimConfig())
    with pytest.raises(ValueError, match="parallel.zero_stage is 1.*optimizer.muon: off"):
        make_engine(model, optimizer, SINGLE, ParallelSettings(engine="deepspeed", zero_stage=1))
    with pytest.raises(ValueError, match="zero_stage"):
        make_engine(model, build_optimizer(model, OptimConfig(muon="off")), SINGLE, ParallelSettings(zero_stage=2))
    with pytest.raises(ValueError, match="engine"):
        ParallelSettings(engine="horovod")


def test_missing_environment_is_named(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "ARCLINE_STORE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(ValueError, match="lacks WORLD_SIZE, MASTER_ADDR, MASTER_PORT"):
        start()


# real processes

LONG = {"tokens": 60 * 128, "save_optimizer": True, "loop": {"checkpoint_every": 7, "log_every": 3}}


def results(base):
    curve = json.loads((base / "plots/pretrain_general.json").read_text())
    return (
        load_file(base / ws.OUT / "model.safetensors"),
        load_file(base / ws.OUT / "optimizer/optimizer.safetensors"),
        curve,
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The stage in one process, and a workspace to copy."""
    base = ws.workspace(tmp_path_factory.mktemp("whole") / "w", **LONG)
    ws.finish(ws.start(base))
    return base


def same_as(base, whole):
    for ours, theirs in zip(results(base)[:2], results(whole)[:2], strict=True):
        assert ours.keys() == theirs.keys() and far(ours, theirs) < 1e-4  # fp32; AdamW turns noise into steps
    ours, theirs = results(base)[2], results(whole)[2]
    assert [p["step"] for p in ours] == [p["step"] for p in theirs]
    for a, b in zip(ours, theirs, strict=True):
        if "loss" in a:
            assert a["loss"] == pytest.approx(b["loss"], abs=1e-5)
    assert not (base / "work" / ws.STAGE).exists() and not list((base / "work").glob("*.rank-*"))


@pytest.mark.slow
def test_a_stage_on_two_ranks(whole, tmp_path):
    base = ws.workspace(tmp_path / "w", **LONG)
    ws.spread_over(base, processes=2)
    output = ws.finish(ws.start(base))
    same_as(base, whole)
    assert output.count("step 60/60") == 1, "only rank 0 speaks"


@pytest.mark.slow
@pytest.mark.parametrize("counts", [(1, 2), (2, 1), (4, 2)])
def test_kill_9_and_resume_on_another_number_of_processes(whole, tmp_path, counts):
    base = ws.workspace(tmp_path / "w", **LONG)
    before, after = counts
    ws.spread_over(base, processes=before)
    process = ws.start(base)
    others = ws.wait_for_ranks(process, base, count=before - 1)
    time.sleep(random.Random(before).random() * 0.3)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert ws.ended(others), "an orphan was left"
    ws.spread_over(base, processes=after)
    output = ws.finish(ws.start(base))
    assert "resumed at step" in output
    same_as(base, whole)


@pytest.mark.slow
def test_a_rank_that_dies_ends_the_stage(tmp_path):
    base = ws.workspace(tmp_path / "w", **LONG | {"tokens": 600 * 128})
    ws.spread_over(base, processes=2)
    process = ws.start(base)
    other = ws.wait_for_ranks(process, base)
    os.kill(other[0].pid, signal.SIGKILL)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 1 and "rank 1 of 2: killed by signal 9" in output
    assert not (base / ws.OUT).exists()


@pytest.mark.slow
def test_an_error_of_a_rank_is_shown(tmp_path):
    base = ws.workspace(tmp_path / "w", **LONG)
    ws.spread_over(base, processes=2)
    path = base / "tasks/objectives.py"
    line = "        return self.mtp_depth if"
    assert path.read_text().count(line) == 1
    fault = '        if __import__("os").environ["RANK"] == "1" and step == 4:\n            raise ValueError("out of luck")\n'
    code = path.read_text().replace(line, fault + line)
    path.write_text(code)
    process = ws.start(base)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 1 and "rank 1 of 2: out of luck" in output


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["spawn", "torchrun"])
def test_other_launchers(whole, tmp_path, launcher):
    base = ws.workspace(tmp_path / "w", **LONG)
    ws.spread_over(base, processes=2, launcher=launcher)
    output = ws.finish(ws.start(base))
    same_as(base, whole)
    assert output.count("step 60/60") == 1


def dies_with_its_ranks(tmp_path, launcher):
    base = ws.workspace(tmp_path / "w", **LONG | {"tokens": 800 * 128})
    ws.spread_over(base, processes=2, launcher=launcher)
    process = ws.start(base)
    others = ws.wait_for_ranks(process, base, count=2)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert ws.ended(others), "an orphan was left"


@pytest.mark.slow
def test_torchrun_and_its_ranks_die_together(tmp_path):
    dies_with_its_ranks(tmp_path, "torchrun")
