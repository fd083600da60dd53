"""The real trainer over pipeline ranks: equal to one process, resumed with and without, refusals by name.

python -m pytest tests/tasks/test_pipeline_engine.py
"""

import contextlib
import dataclasses
import json
import random
import signal
import time

import pytest
import torch
import yaml
from safetensors.torch import load_file

from model.checkpoint import save_checkpoint
from model.config import ModelConfig
from model.muon import OptimConfig, build_optimizer
from model.transformer import GlmMoeDsa
from tasks import launch, sft
from tasks.model_parallel import apply_parallelism
from tasks.objectives import IndexerWarmup, LanguageModeling
from tasks.parallel import SINGLE, ParallelSettings, current
from tasks.parallel_engine import make_engine
from tasks.sequence_balance import sequence_cost
from tasks.settings import GuardSettings, LoopSettings
from tasks.trainer import Trainer, split_batch
from tests.model.ranks import run_ranks
from tests.tasks import rank_workspace as ws
from tests.tasks.lm_case import MODEL, random_ids
from tests.tasks.test_model_parallel import Conversations, compare
from tests.tasks.test_parallel import FakeStage, Stopped, far, in_float64

STEPS, ROWS, SIZE = 5, 8, 17
DENSE = LanguageModeling(mtp_depth=2, mtp_every=2, mtp_late_lambda=0.1, mtp_late_step=3, balance_coef=0.01)
ADAPT = LanguageModeling(attention="sparse", mtp_depth=1, balance_coef=0.01, index_rows="all")


def four_layers(**changes):
    return GlmMoeDsa(ModelConfig.from_params(MODEL | {"num_hidden_layers": 4} | changes)).init_weights(0)


def rows_of(step, count=ROWS):
    """Unequal numbers of targets per row, so that micro-batches and replicas have unequal shares."""
    ids = random_ids(count, SIZE + 1, seed=step)
    targets = ids[:, 1:].clone()
    for i in range(count):
        targets[i, SIZE - 2 * i :] = -100
    return {"input_ids_bs": ids[:, :-1], "targets_bs": targets}


@dataclasses.dataclass(frozen=True)
class Broken(LanguageModeling):
    """The loss of step 3 is no number on the rank that has the output layers."""

    def head_loss(self, model, hidden_bsh, mtp_hidden, targets_bs, step, part=None):
        loss, logs = super().head_loss(model, hidden_bsh, mtp_hidden, targets_bs, step, part)
        bad = step == 3
        return (loss * float("nan") if bad else loss), logs


def train(rank, world, folder, options):
    """One run of the trainer on this rank. options: parallel, micro (rows per forward), stop (step to die at), lm, tied, rows."""
    settings = ParallelSettings(processes=world, **options.get("parallel", {}))
    exact = options.get("precision", "float32") == "float32"  # then in float64: only the order of sums differs
    model = four_layers(tie_word_embeddings=options.get("tied", False))
    model = model.double() if exact else model
    layout = apply_parallelism(model, settings, current())
    count = options.get("rows", ROWS)

    def batches(step):
        if step == options.get("stop"):
            raise Stopped
        share = {k: v[layout.data_rank :: layout.data_world] for k, v in rows_of(step, count).items()}
        return split_batch(share, options.get("micro", 1)) if len(share["targets_bs"]) else []

    def evaluate(m, step):
        out = m(rows_of(99)["input_ids_bs"], attention="dense", mtp_depth=1)
        return {"val/x": float(out.hidden_bsh.square().mean() + out.mtp_hidden[0].square().mean())}

    stage = FakeStage(folder)
    loop = LoopSettings(checkpoint_every=2, log_every=1, eval_every=3, grad_clip=0.3, router_bias_rate=0.01,
                        keep_best="val/x", recompute=options.get("recompute", "none"),
                        precision=options.get("precision", "float32"),
                        guard=GuardSettings(history=100, window=100))  # fmt: skip
    trainer = Trainer(
        stage, model, build_optimizer(model, OptimConfig(lr_matrix=5e-3, train=options.get("train", "all"))),
        options.get("lm", DENSE), batches, steps=STEPS, lr_factor=lambda step: 1 - step / 50, settings=loop,
        evaluate=evaluate, parallel=settings, layout=layout,
    )  # fmt: skip
    if settings.pipeline > 1:
        trainer.engine.precision = torch.float64 if exact else torch.bfloat16
        held = sum(p.numel() for p in model.parameters() if not p.is_meta)
        assert held < 0.8 * sum(p.numel() for p in model.parameters()), "a rank keeps its own stages only"
    try:
        with in_float64() if exact else contextlib.nullcontext():
            result = trainer.run()
    except Stopped:
        return None
    state = trainer.optimizer.state_tensors()
    owned = sum(piece.values.numel() for piece in trainer.optimizer.owned_state())
    if settings.gradient_shards and layout.data_world > 1:
        kept, most = trainer.engine.pipe.gradients, trainer.engine.pipe.ledger.most["gradients"]
        mine = sum(p.numel() for p in trainer.engine.sharded.mine.values())
        assert most <= 8 * (2 * kept.ranks * max(kept.sizes.values()) + mine), (
            "two full buffers, and what the rank owns"
        )
    whole = layout.whole_model(model)
    return {
        "points": stage.points, "result": result, "weights": {k: v.clone() for k, v in whole.state_dict().items()},
        "state": state, "counters": trainer.counters, "metrics": stage.metrics,
        "files": sorted(p.name for p in folder.iterdir()), "owned": owned,
    }  # fmt: skip


def many(rank, world, folder, runs):
    return {name: train(rank, world, folder / name, options) for name, options in runs.items()}


def against_one_process(world, runs, tmp_path):
    found = run_ranks(world, many, tmp_path, runs)
    for name, options in runs.items():
        whole = train(0, 1, tmp_path / f"one {name}", {k: v for k, v in options.items() if k != "parallel"})
        compare([f[name] for f in found], whole)
        elements = sum(t.numel() for t in whole["state"].values())
        owned = [f[name]["owned"] for f in found]
        assert sum(owned) == elements and max(owned) < 0.8 * elements, "state is owned once"
        assert found[0][name]["metrics"]["best"]["step"] == whole["metrics"]["best"]["step"]
        if isinstance(options.get("lm"), Broken):
            assert whole["points"][4]["guard_skipped"] == 1.0, "the fault was seen, or this tests nothing"
            assert {p for p in found[0][name]["files"] if p.startswith("step-")} == {"step-00000004", "step-00000005"}


TWO = {
    "one stage per rank": {"parallel": {"pipeline": 2}},
    "all techniques": {
        "parallel": {
            "pipeline": 2, "virtual": 2, "deferred_weight_gradient": True, "gradient_shards": True,
            "activation_offload": True,
        },
        "recompute": "block",
    },
    "adaptation": {"parallel": {"pipeline": 2, "deferred_weight_gradient": True}, "lm": ADAPT, "micro": 2},
    "fault": {"parallel": {"pipeline": 2}, "lm": Broken(mtp_depth=1), "micro": 4},
}  # fmt: skip
FOUR = {
    "replicas": {"parallel": {"pipeline": 2, "virtual": 2, "gradient_shards": True}, "micro": 2},
    "few rows": {"parallel": {"pipeline": 2}, "rows": 1},
    "four stages": {"parallel": {"pipeline": 4, "schedule": "gpipe", "flexible_mtp": False}},
    "tied": {"parallel": {"pipeline": 2, "activation_offload": True}, "tied": True},
    "fault": {"parallel": {"pipeline": 2}, "lm": Broken(mtp_depth=1)},
}


def test_two_ranks_equal_one_process(tmp_path):
    against_one_process(2, TWO, tmp_path)


@pytest.mark.slow
def test_four_ranks_equal_one_process(tmp_path):
    against_one_process(4, FOUR, tmp_path)


@pytest.mark.slow
def test_arithmetic_in_bfloat16(tmp_path):
    options = {"precision": "bfloat16"}
    whole = train(0, 1, tmp_path / "one", options)
    parallel = {"pipeline": 2, "virtual": 2, "deferred_weight_gradient": True, "activation_offload": True}
    for found in run_ranks(2, train, tmp_path / "two", options | {"parallel": parallel}):
        for step in range(1, STEPS + 1):
            assert found["points"][step]["loss"] == pytest.approx(whole["points"][step]["loss"], rel=1e-3), step
        assert found["result"] == pytest.approx(whole["result"], rel=1e-2)


@pytest.mark.parametrize(
    "before, after",
    [
        ((2, {"pipeline": 2}), (1, {})),
        pytest.param((1, {}), (2, {"pipeline": 2}), marks=pytest.mark.slow),
    ],
)
def test_a_run_goes_on_without_and_with_a_pipeline(before, after, tmp_path):
    whole = train(0, 1, tmp_path / "one", {})
    for (world, parallel), stop in ((before, {"stop": 3}), (after, {})):
        options = {"a": stop | {"parallel": parallel}}
        found = [many(0, 1, tmp_path, options)] if world == 1 else run_ranks(world, many, tmp_path, options)
    for one in found:
        assert min(one["a"]["points"]) == 3, "it went on from the checkpoint of step 2"
        assert far(one["a"]["weights"], whole["weights"]) < 1e-7


@pytest.mark.slow
def test_a_run_goes_on_with_other_stages(tmp_path):
    whole = train(0, 1, tmp_path / "one", {})
    shapes = [
        (4, {"pipeline": 2, "virtual": 2}, {"stop": 2}),
        (4, {"pipeline": 4}, {"stop": 4}),
        (2, {"pipeline": 2}, {}),
    ]
    for world, parallel, stop in shapes:
        found = run_ranks(world, many, tmp_path, {"a": {"parallel": parallel} | stop})
    compare([one["a"] for one in found], whole)
    assert min(found[0]["a"]["points"]) == 5, "it went on from the checkpoint of step 4"


def fine_tune(rank, world, folder, parallel):
    """A few steps of fine-tuning: (losses, held-out, weights)."""
    settings = ParallelSettings(processes=world, **parallel)
    model = four_layers().double()
    layout = apply_parallelism(model, settings, current(), {"name": "sft", "seq_len": 64, "sparse": True})
    cost, stage = sequence_cost(model.cfg, sparse=True), FakeStage(folder)

    def batches(step):
        deal = lambda lengths: layout.deal(model, lengths, cost, "none")  # noqa: E731
        return layout.weighed(sft.sft_batches(Conversations(), 4, 64, 5, step, deal))

    trainer = Trainer(
        stage, model, build_optimizer(model, OptimConfig(lr_matrix=5e-3, train="backbone")), sft.objective, batches,
        steps=3, lr_factor=lambda step: 1.0, settings=LoopSettings(log_every=1, eval_every=3), parallel=settings,
        evaluate=lambda m, step: sft.heldout_losses(m, Conversations(), 64), layout=layout,
    )  # fmt: skip
    if world > 1:
        trainer.engine.precision = torch.float64
    with in_float64():
        result = trainer.run()
    losses = [stage.points[step]["loss"] for step in sorted(stage.points) if "loss" in stage.points[step]]
    weights = {k: v.clone() for k, v in layout.whole_model(model).state_dict().items()}
    return losses, result, weights


@pytest.mark.slow
@pytest.mark.parametrize("world, parallel", [(2, {"pipeline": 2, "virtual": 2}), (4, {"pipeline": 2})])
def test_fine_tuning_equals_one_process(world, parallel, tmp_path):
    losses, result, weights = fine_tune(0, 1, tmp_path / "one", {})
    for one in run_ranks(world, fine_tune, tmp_path / "many", parallel):
        assert one[0] == pytest.approx(losses, rel=1e-6) and one[1] == pytest.approx(result)
        assert far(one[2], weights) < 1e-7


# refusals

TOGETHER = {
    "expert": ({"pipeline": 2, "expert": 2}, "parallel.pipeline is 2 and parallel.expert is 2: not together"),
    "context": ({"pipeline": 2, "context": 2}, "parallel.context is 2: not together"),
    "deepspeed": ({"pipeline": 2, "engine": "deepspeed"}, "parallel.engine is 'deepspeed': not together"),
    "processes": ({"pipeline": 2, "processes": 3}, r"pipeline is 2, which does not divide parallel.processes \(3\)"),
    "1f1b": ({"pipeline": 2, "virtual": 2, "schedule": "1f1b"}, "parallel.virtual is 2: schedule 1f1b"),
    "gpipe": ({"pipeline": 2, "schedule": "gpipe", "deferred_weight_gradient": True}, "it is gpipe"),
}


@pytest.mark.parametrize("name", TOGETHER)
def test_settings_that_do_not_fit_together_are_refused(name):
    settings, message = TOGETHER[name]
    with pytest.raises(ValueError, match=message):
        ParallelSettings(**settings)


def build_refused(rank, world):
    """Messages of what only a start on two ranks can refuse."""
    found = []

    def refused(function, *args):
        with pytest.raises(ValueError) as caught:
            function(*args)
        found.append(str(caught.value))

    refused(apply_parallelism, four_layers(), ParallelSettings(pipeline=2, virtual=4), current())
    settings = ParallelSettings(processes=2, pipeline=2)
    model = four_layers()
    refused(make_engine, model, build_optimizer(model, OptimConfig()), current(), settings)
    layout = apply_parallelism(model, settings, current())
    backbone = build_optimizer(model, OptimConfig())
    for loop in (LoopSettings(recompute="selective"), LoopSettings(offload=True)):
        refused(make_engine, model, backbone, current(), settings, layout, loop)
    engine = make_engine(model, backbone, current(), settings, layout)
    refused(engine.run_step, IndexerWarmup(), [rows_of(0)], 0)
    refused(make_engine, model, build_optimizer(model, OptimConfig(train="indexer")), current(), settings, layout)
    return found


def test_what_two_ranks_refuse_names_the_keys():
    expected = [
        r"parallel.pipeline is 2 and parallel.virtual 4: 4 layers (model.num_hidden_layers) cannot be cut into 8",
        "parallel.pipeline is 2: this stage's model is not cut into pipeline stages",
        "loop.recompute is selective and parallel.pipeline is 2",
        "loop.offload and parallel.pipeline (2)",
        "parallel.pipeline is 2: IndexerWarmup is not cut into stages",
        "parallel.pipeline is 2: the indexer's warm-up sends no gradients",
    ]
    for found in run_ranks(2, build_refused):
        assert all(text.startswith(start) for text, start in zip(found, expected, strict=True)), found


def test_sizes_are_refused_by_name():
    with pytest.raises(ValueError, match="parallel.pipeline is 2, which does not divide the 1 ranks"):
        apply_parallelism(four_layers(), ParallelSettings(pipeline=2), SINGLE)
    settings = ParallelSettings(processes=4, pipeline=4, virtual=2)
    with pytest.raises(ValueError, match=r"groups of parallel.pipeline = 4, but a step has 2 .*micro_rows 4"):
        settings.check_micro_batches(2, "micro_rows 4")
    settings.check_micro_batches(4, "")
    ParallelSettings(processes=4, pipeline=4).check_micro_batches(1, "")


def test_ranks_of_a_pipeline_share_rows(tmp_path):
    (tmp_path / "params.yaml").write_text("pretrain: {general: {rows: 1, parallel: {processes: 4, pipeline: 2}}}\n")
    assert launch.settings_of("pretrain-general", tmp_path)["processes"] == 2


# real processes

LONG = {
    "tokens": 40 * 128, "micro_rows": 1, "save_optimizer": True,
    "loop": {"checkpoint_every": 7, "log_every": 3, "eval_every": 16},
}  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The stage in one process."""
    base = ws.workspace(tmp_path_factory.mktemp("whole") / "w", **LONG)
    ws.finish(ws.start(base))
    return base


def same_as(base, whole):
    for file in ("model.safetensors", "optimizer/optimizer.safetensors"):
        ours, theirs = (load_file(b / ws.OUT / file) for b in (base, whole))
        assert ours.keys() == theirs.keys() and far(ours, theirs) < 1e-4, file  # fp32; AdamW turns noise into steps
    ours, theirs = (json.loads((b / "plots/pretrain_general.json").read_text()) for b in (base, whole))
    assert [p["step"] for p in ours] == [p["step"] for p in theirs]
    for a, b in zip(ours, theirs, strict=True):
        assert a.keys() == b.keys()
        for key in a.keys() & {"loss", "val/all/loss"}:
            assert a[key] == pytest.approx(b[key], abs=1e-5)
    assert not (base / "work" / ws.STAGE).exists() and not list((base / "work").glob("*.rank-*"))


@pytest.mark.slow
def test_a_stage_on_four_ranks_of_two_stages(whole, tmp_path):
    base = ws.workspace(tmp_path / "w", **LONG)
    ws.spread_over(base, processes=4, pipeline=2)
    output = ws.finish(ws.start(base))
    same_as(base, whole)
    assert output.count("step 40/40") == 1, "only rank 0 speaks"


@pytest.mark.slow
@pytest.mark.parametrize(
    "before, after",
    [
        ({"processes": 2, "pipeline": 2}, {"processes": 1}),
        ({"processes": 2}, {"processes": 4, "pipeline": 2, "gradient_shards": True}),
        ({"processes": 4, "pipeline": 2}, {"processes": 2, "pipeline": 2, "deferred_weight_gradient": True}),
    ],
)
def test_kill_9_and_resume_on_another_pipeline(whole, tmp_path, before, after):
    base = ws.workspace(tmp_path / "w", **LONG)
    ws.spread_over(base, **before)
    process = ws.start(base)
    others = ws.wait_for_ranks(process, base, count=before["processes"] - 1)
    time.sleep(random.Random(str(before)).random() * 0.3)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert ws.ended(others), "an orphan was left"
    ws.spread_over(base, **after)
    output = ws.finish(ws.start(base))
    assert "resumed at step" in output
    same_as(base, whole)


def adaptation(base, **parallel):
    """A workspace with the stage of sparse adaptation, from a checkpoint of four layers."""
    ws.workspace(base)
    params = yaml.safe_load((base / "params.yaml").read_text())
    section = params.pop("pretrain")["general"] | {
        "micro_rows": 1,
        "index_rows": 8,
        "recall_rows": 8,
        "recall_windows": 2,
    }
    section |= {
        "optimizer": {"lr_matrix": 1e-3, "indexer_optimizer": "adamw"},
        "parallel": parallel,
        "balance_coef": 0.01,
    }
    (base / "params.yaml").write_text(yaml.safe_dump(params | {"dsa_adapt": section}))
    (base / "data/pack/pretrain").rename(base / "data/pack/midtrain")
    save_checkpoint(four_layers(), base / "data/dsa_warmup", base / "data/tokenizer")
    stage = {
        "cmd": "python -m tasks dsa_adapt", "deps": ["data/dsa_warmup", "data/pack/midtrain"],
        "params": ["dsa_adapt", "seed", "threads"], "outs": ["data/dsa_adapt"],
        "metrics": ["metrics/dsa_adapt.json"], "plots": ["plots/dsa_adapt.json"],
    }  # fmt: skip
    (base / "dvc.yaml").write_text(yaml.safe_dump({"stages": {"dsa_adapt": stage}}))
    return base


@pytest.mark.slow
def test_the_adaptation_stage_measures_and_writes_what_one_process_does(tmp_path):
    bases = [
        adaptation(tmp_path / "one"),
        adaptation(tmp_path / "two", processes=4, pipeline=2, activation_offload=True),
    ]
    outputs = [ws.finish(ws.start(base, "-m", "tasks", "dsa_adapt")) for base in bases]
    assert "pipeline stages: embed+0" in outputs[1]
    one, two = (json.loads((base / "metrics/dsa_adapt.json").read_text()) for base in bases)
    assert one.keys() == two.keys()
    for key in ("heldout", "heldout_before", "heldout_dense"):
        assert two[key]["all"] == pytest.approx(one[key]["all"], rel=1e-4), key
    assert two["recall_ratio"] == pytest.approx(one["recall_ratio"], rel=1e-3)
    one, two = (load_file(base / "data/dsa_adapt/model.safetensors") for base in bases)
    assert one.keys() == two.keys() and far(two, one) < 1e-3  # a key that a last bit turned may be another one
