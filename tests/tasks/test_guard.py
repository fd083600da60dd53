"""The guard: a run with a bad batch ends as a run that never had it, whenever it is killed; hopeless runs are given up."""

import json

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from model.muon import OptimConfig, build_optimizer
from tasks.guard import Guard, NonFiniteError
from tasks.settings import GuardSettings
from tests.tasks.test_trainer import STEPS, Killed, Tiny, batches, make, objective


def faulty(bad_steps, how):
    def run(model, batch, step):
        loss, logs = objective(model, batch, step)
        if step in bad_steps:
            if how == "loss":
                loss = loss * float("nan")
            elif how == "spike":
                loss = loss + 50.0
            else:  # sqrt at zero: the value is finite, its gradient is not
                loss = loss + (model.up.weight * 0).sum().sqrt()
        return loss, logs

    return run


def without(skipped):
    """The run written out by hand, in which the skipped steps do nothing."""
    model = Tiny()
    optimizer = build_optimizer(model, OptimConfig(lr_matrix=1e-2))
    for step in range(STEPS):
        if step in skipped:
            continue
        optimizer.set_lr_scale(1 - step / STEPS)
        parts = batches(step)
        counts = [int((b["targets_bs"] != -100).sum()) for b in parts]
        router = 0
        for batch, count in zip(parts, counts, strict=True):
            loss, logs = objective(model, batch, step)
            (loss * (count / sum(counts))).backward()
            router = router + logs["router_counts"][0]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        model.update_router_bias([router], 1e-3)
    return model


def same(a, b):
    return all(torch.equal(v, b.state_dict()[k]) for k, v in a.state_dict().items())


GUARD = {"history": 3, "window": 8, "rise": 1.0}


@pytest.mark.parametrize(
    ("how", "bad"),
    [
        (how, bad)
        for how in ("loss", "spike", "gradient")
        for bad in ({0}, {6}, {4, 11})
        if (how, bad) != ("spike", {0})
    ],
)
def test_a_bad_batch_is_as_if_it_had_never_been(tmp_path, how, bad):
    far = GuardSettings(**GUARD | {"window": 3})
    trainer = make(tmp_path / "a", objective=faulty(bad, how), guard=far)
    trainer.run()
    assert same(trainer.model, without(bad))
    assert trainer.stage.metrics["guard"] == {"events": len(bad), "skipped_steps": sorted(bad)}
    for n, step in enumerate(sorted(bad), 1):
        assert trainer.stage.points[step + 1]["guard_events"] == n and trainer.stage.points[step + 1]["guard_skipped"]
        kept = trainer.stage.evidence / f"bad-batch-step-{step:08d}.safetensors"
        assert torch.equal(load_file(kept)["0.input_ids_bs"], batches(step)[0]["input_ids_bs"])
        story = json.loads(kept.with_suffix(".json").read_text())
        assert (
            story["step"] == step
            and {"loss": "nan", "spike": "spike", "gradient": "gradient norm"}[how] in story["reason"]
        )
        assert len(story["history"]) == min(3, step - (n - 1)), "what was normal before"
    assert sum("warning: step" in line for line in trainer.stage.lines) == len(bad)
    assert make(tmp_path / "clean", guard=far).run() and not make(tmp_path / "clean").guard.events


@pytest.mark.parametrize("kill_at", [1, 5, 7, 9])
def test_a_killed_run_skips_the_same_steps(tmp_path, kill_at):
    """Killed before the fault, in the replay after it, and later: draws of the step raise once."""
    path, seen = tmp_path / "a", []

    def draw(step):
        seen.append(step)
        if step == kill_at and seen.count(step) == (2 if kill_at == 5 else 1):
            raise Killed
        return batches(step)

    with pytest.raises(Killed):
        make(path, objective=faulty({6}, "loss"), batches=draw).run()
    trainer = make(path, objective=faulty({6}, "loss"))
    trainer.run()
    assert same(trainer.model, without({6})) and trainer.guard.summary() == {"events": 1, "skipped_steps": [6]}


def test_the_harm_may_have_been_done_a_step_before(tmp_path):
    """Step 5 ruins the weights without showing it and every later loss is high: skipping widens back over step 5."""

    def poison(model, batch, step):
        loss, logs = objective(model, batch, step)
        if step == 5 and (batch["targets_bs"] != -100).all():  # the second micro-batch: the step's own loss is fine
            model.lm_head.weight.data.mul_(1e4)
        return loss, logs

    trainer = make(tmp_path / "a", objective=poison, guard=GuardSettings(**GUARD), checkpoint_every=3, keep_last=3)
    trainer.run()
    assert [e.skipped for e in trainer.guard.events] == [(6,), (6, 7), (5, 6, 7, 8)]
    assert same(trainer.model, without({5, 6, 7, 8}))


def test_hopeless_runs_are_given_up(tmp_path):
    trainer = make(tmp_path / "a", objective=faulty(set(range(5, STEPS)), "loss"), guard=GuardSettings(max_rewinds=2))
    with pytest.raises(
        NonFiniteError, match=r"step 7: loss is nan; given up after 2 rewinds; the batch is kept in"
    ) as error:
        trainer.run()
    assert str(trainer.stage.evidence / "bad-batch-step-00000007.safetensors") in str(error.value)
    off = make(tmp_path / "b", objective=faulty({5}, "loss"), guard=GuardSettings(on=False))
    with pytest.raises(NonFiniteError, match="step 5: loss is nan; given up; the batch"):
        off.run()
    assert not list((tmp_path / "b").glob("step-00000000")), "without the guard nothing is written before it is due"


def test_what_is_no_spike(tmp_path):
    """Regular high steps (text replayed among dialogues), slow rises, and falls."""
    guard = Guard(GuardSettings(), tmp_path, tmp_path)
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(400, generator=generator).tolist()
    for i in range(400):
        loss = 0.3 + 0.02 * noise[i] + (2.5 if i % 4 == 0 else 0.0) + i * 0.01
        assert guard.judge(loss, {}) is None, i
    assert len(guard.history) == 64
    assert guard.judge(0.01, {}) is None
    assert "spike" in guard.judge(20.0, {}) and guard.history[-1] == 0.01, "a refused loss is no history"
    assert guard.judge(3.0, {"grad_norm": float("inf")}) == "gradient norm is inf"
    assert guard.judge(3.0, {"loss": float("nan")}) == "loss is nan"


def test_steps_are_compared_with_their_own_kind(tmp_path):
    """SFT that has learnt its conversations and replays text at every twelfth step: no spike but within a kind."""
    guard = Guard(GuardSettings(), tmp_path, tmp_path / "kept")
    for step in range(480):
        kind = "replay" if step % 12 == 0 else ""
        loss = 3.0 + step / 240 if kind else max(0.05, 3.0 - step / 60)
        assert guard.judge(loss, {}, kind) is None, step
    assert "spike" in guard.judge(5.0, {}, "")
    assert guard.judge(5.1, {}, "replay") is None and "spike" in guard.judge(40.0, {}, "replay")
