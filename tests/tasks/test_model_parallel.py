"""The real trainer with experts and sequences spread over ranks: equal to one process, resumed with and without.

python -m pytest tests/tasks/test_model_parallel.py
"""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from model.muon import OptimConfig, build_optimizer
from tasks import sft
from tasks.model_parallel import Layout, apply_parallelism
from tasks.objectives import LanguageModeling
from tasks.parallel import Parallel, ParallelSettings, current
from tasks.sequence_balance import sequence_cost
from tasks.settings import GuardSettings, LoopSettings
from tasks.trainer import Trainer, split_batch
from tests.model.ranks import run_ranks
from tests.tasks import rank_workspace as ws
from tests.tasks.lm_case import micro_model, random_ids
from tests.tasks.test_parallel import FakeStage, Stopped, far, in_float64

STEPS, ROWS, SIZE = 5, 4, 25
LM = LanguageModeling(attention="sparse", mtp_depth=1, balance_coef=0.01, index_rows="all")


def rows_of(step):
    """The last row has few targets: ranks and micro-batches have unequal numbers of them."""
    ids = random_ids(ROWS, SIZE + 1, seed=step)
    targets = ids[:, 1:].clone()
    targets[-1, SIZE // 3 :] = -100
    return {"input_ids_bs": ids[:, :-1], "targets_bs": targets}


def train(rank, world, folder, options):
    """One run of the trainer on this rank. options: settings, micro (rows per forward), stop (step to die at), muon."""
    model = micro_model().double()
    layout = apply_parallelism(model, options.get("settings", ParallelSettings()), current())

    def batches(step):
        if step == options.get("stop"):
            raise Stopped
        share = {k: v[layout.data_rank :: layout.data_world] for k, v in rows_of(step).items()}
        if options.get("uneven") and layout.data_rank == 0:
            return split_batch(share, 1)
        return split_batch(share, options.get("micro", ROWS))

    def evaluate(m, step):
        with torch.no_grad():
            out = m(rows_of(99)["input_ids_bs"], attention="dense")
        return {"val/x": float(out.hidden_bsh.square().mean())}

    stage = FakeStage(folder)
    optimizer = build_optimizer(model, OptimConfig(lr_matrix=5e-3, muon=options.get("muon", "split")))
    trainer = Trainer(
        stage, model, optimizer, LM, batches, steps=STEPS, lr_factor=lambda step: 1 - step / 50,
        settings=LoopSettings(checkpoint_every=2, log_every=1, eval_every=3, grad_clip=0.3, router_bias_rate=0.01,
                              guard=GuardSettings(history=100, window=100)),
        evaluate=evaluate, parallel=options.get("settings"), layout=layout,
    )  # fmt: skip
    try:
        with in_float64():
            result = trainer.run()
    except Stopped:
        return None
    state = trainer.optimizer.state_tensors()
    whole = layout.whole_model(model)
    return {
        "points": stage.points, "result": result, "weights": {k: v.clone() for k, v in whole.state_dict().items()},
        "state": state, "counters": trainer.counters,
    }  # fmt: skip


def many(rank, world, folder, runs):
    return {name: train(rank, world, folder / name, options) for name, options in runs.items()}


def compare(found, whole):
    for one in found:
        assert far(one["weights"], whole["weights"]) < 1e-7
        assert one["counters"] == whole["counters"]
        for step, point in one["points"].items():
            assert point == pytest.approx(whole["points"][step], rel=1e-5, abs=1e-5), step
        assert one["result"] == pytest.approx(whole["result"])
    assert found[0]["state"].keys() == whole["state"].keys()
    assert far(found[0]["state"], whole["state"]) < 1e-6


TWO = {
    "expert": {"settings": ParallelSettings(processes=2, expert=2)},
    "expert, uneven": {"settings": ParallelSettings(processes=2, expert=2), "uneven": True, "micro": 2},
    "context": {"settings": ParallelSettings(processes=2, context=2)},
    "both": {"settings": ParallelSettings(processes=2, expert=2, context=2), "muon": "off"},
}
FOUR = {
    "replicas": {"settings": ParallelSettings(processes=4, expert=2)},
    "both": {
        "settings": ParallelSettings(
            processes=4, expert=4, context=2, per_node=2, exchange_stages=2, context_form="ulysses"
        )
    },
}


def test_two_ranks_equal_one_process(tmp_path):
    found = run_ranks(2, many, tmp_path, TWO)
    for name, options in TWO.items():
        plain = {k: v for k, v in options.items() if k in ("muon", "micro")} | (
            {"micro": 1} if options.get("uneven") else {}
        )
        compare([f[name] for f in found], train(0, 1, tmp_path / f"one {name}", plain))


class Conversations:
    """Unequal samples; every third step of four has one that is as long as the others together."""

    def __len__(self):
        return 24

    def __getitem__(self, i):
        ids = np.arange(i, i + (90 if i % 7 == 0 else 8 + i % 13)) % 95
        return "x", ids, (np.arange(len(ids)) >= len(ids) // 2).astype(int)


def sft_run(rank, world, folder, settings):
    """A few steps of fine-tuning on changing context groups: (losses, weights, ranks that shared this one's samples)."""
    model = micro_model().double()
    layout = apply_parallelism(model, settings, current())
    cost, sharing, stage = sequence_cost(model.cfg, sparse=True), [], FakeStage(folder)

    def batches(step):
        deal = lambda lengths: layout.deal(model, lengths, cost, "cost")  # noqa: E731
        found = layout.weighed(sft.sft_batches(Conversations(), 4, 64, 5, step, deal))
        sharing.append((layout.copies, layout.data_rank))
        return found

    trainer = Trainer(
        stage, model, build_optimizer(model, OptimConfig(lr_matrix=5e-3, train="backbone")), sft.objective, batches,
        steps=6, lr_factor=lambda step: 1.0, settings=LoopSettings(log_every=1, eval_every=3),
        evaluate=lambda m, step: sft.heldout_losses(m, Conversations(), 64), parallel=settings, layout=layout,
    )  # fmt: skip
    with in_float64():
        result = trainer.run()
    losses = [stage.points[step]["loss"] for step in sorted(stage.points) if "loss" in stage.points[step]]
    return losses, result, {k: v.clone() for k, v in model.state_dict().items()}, sharing, trainer.counters


@pytest.mark.slow
def test_fine_tuning_on_context_groups_that_change_equals_one_process(tmp_path):
    settings = ParallelSettings(processes=3, context=2, context_groups="variable")
    losses, result, weights, _, counters = sft_run(0, 1, tmp_path / "one", ParallelSettings())
    found = run_ranks(3, sft_run, tmp_path / "three", settings)
    for one in found:
        assert one[0] == pytest.approx(losses, rel=1e-6) and one[1] == pytest.approx(result)
        assert far(one[2], weights) < 1e-7
    sizes = {tuple(one[3][step][0] for one in found) for step in range(6)}
    assert len(sizes) > 1 and any(2 in size and 1 in size for size in sizes), f"groups of one kind only: {sizes}"


@pytest.mark.slow
def test_four_ranks_equal_one_process(tmp_path):
    whole = train(0, 1, tmp_path / "one", {})
    found = run_ranks(4, many, tmp_path, FOUR)
    for name in FOUR:
        compare([f[name] for f in found], whole)


@pytest.mark.slow
def test_a_run_goes_on_without_and_with_expert_parallelism(tmp_path):
    whole = train(0, 1, tmp_path / "one", {})
    assert run_ranks(2, many, tmp_path, {"a": TWO["expert"] | {"stop": 3}})[0]["a"] is None
    compare([train(0, 1, tmp_path / "a", {})], whole)
    assert train(0, 1, tmp_path / "b", {"stop": 3}) is None
    compare([f["b"] for f in run_ranks(2, many, tmp_path, {"b": TWO["expert"]})], whole)


@pytest.mark.slow
def test_a_stage_with_spread_experts_and_sequences_writes_the_model_of_one_process(tmp_path):
    config = {"tokens": 6 * 4 * 32, "mtp": {"depth": 1}, "save_optimizer": True, "loop": {"log_every": 1}}
    bases = [ws.workspace(tmp_path / name, **config) for name in ("one", "two")]
    ws.spread_over(bases[1], processes=2, expert=2, context=2)
    for base in bases:
        ws.finish(ws.start(base))
    for file in ("model.safetensors", "optimizer/optimizer.safetensors"):
        one, two = (load_file(base / ws.OUT / file) for base in bases)
        assert one.keys() == two.keys() and far(two, one) < 1e-4, file


def test_what_does_not_divide_is_refused_by_name():
    model = micro_model()
    with pytest.raises(ValueError, match="parallel.context is 3, which does not divide the 4 ranks"):
        apply_parallelism(model, ParallelSettings(context=3), Parallel(0, 4))
    with pytest.raises(ValueError, match="parallel.expert is 8, which does not divide the 4 ranks"):
        apply_parallelism(model, ParallelSettings(expert=8), Parallel(0, 4))
    with pytest.raises(ValueError, match="parallel.expert needs parallel.engine: native"):
        apply_parallelism(model, ParallelSettings(expert=2, engine="deepspeed"), Parallel(0, 4))


def test_a_plain_layout_changes_nothing():
    model = micro_model()
    layout = apply_parallelism(model, ParallelSettings(), Parallel())
    assert layout == Layout() and model.context is None
    assert layout.whole_model(model) is model and layout.copies == 1 and not layout.together
