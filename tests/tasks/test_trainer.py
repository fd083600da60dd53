"""The loop: resume is exact, accumulation is exact, keeping the best. Faults: test_guard.py."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from model.muon import OptimConfig, build_optimizer
from tasks.objectives import IndexerWarmup, LanguageModeling
from tasks.trainer import LoopSettings, Trainer, batch_count, computing_in, split_batch
from tests.tasks.lm_case import micro_model, random_ids

VOCAB, STEPS = 20, 12


class Tiny(nn.Module):
    """A bigram-like model with a router whose bias the loop must update."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.cfg = SimpleNamespace()
        self.embed_tokens = nn.Embedding(VOCAB, 16)
        self.up = nn.Linear(16, 24)
        self.lm_head = nn.Linear(24, VOCAB, bias=False)
        self.register_buffer("bias", torch.zeros(4))

    def update_router_bias(self, counts, rate):
        self.bias += rate * torch.sign(counts[0].float().mean() - counts[0])


class FakeStage:
    """Scratch and logs of a stage in a test's directory."""

    def __init__(self, path):
        self.scratch, self.evidence = path, path / "evidence"
        self.points, self.lines, self.metrics = {}, [], {}

    def log(self, step, **values):
        self.points.setdefault(step, {}).update(values)

    def print(self, message):
        self.lines.append(message)

    def metric(self, **values):
        self.metrics.update(values)

    def timing(self, **seconds):
        self.lines.append(str(seconds))


class Killed(Exception):
    pass


def objective(model, batch, step):
    hidden = torch.tanh(model.up(model.embed_tokens(batch["input_ids_bs"])))
    loss = nn.functional.cross_entropy(
        model.lm_head(hidden).flatten(0, 1), batch["targets_bs"].flatten(), ignore_index=-100
    )
    counts = torch.bincount(batch["input_ids_bs"].flatten() // 5, minlength=4)
    return loss, {"router_counts": [counts], "twice": 2 * loss.detach()}


def batches(step, micro_rows=2):
    generator = torch.Generator().manual_seed(step)
    ids = (torch.randint(VOCAB, (4, 1), generator=generator) + torch.arange(9)) % VOCAB
    targets = ids[:, 1:].clone()
    targets[0, 3:] = -100
    return split_batch({"input_ids_bs": ids[:, :-1], "targets_bs": targets}, micro_rows)


def make(path, kill_at=None, objective=objective, batches=batches, **settings):
    path.mkdir(exist_ok=True)
    model = Tiny()

    def draw(step):
        if step == kill_at:
            raise Killed
        return batches(step)

    return Trainer(
        FakeStage(path),
        model,
        build_optimizer(model, OptimConfig(lr_matrix=1e-2)),
        objective,
        draw,
        steps=STEPS,
        lr_factor=lambda step: 1 - step / STEPS,
        settings=LoopSettings(**{"checkpoint_every": 4, "log_every": 1, **settings}),
        evaluate=lambda model, step: {"val/bits_per_byte": float(model.bias.sum())},
    )


def test_it_learns_and_logs(tmp_path):
    trainer = make(tmp_path / "a", eval_every=6)
    result = trainer.run()
    points = trainer.stage.points
    assert sorted(points) == list(range(1, STEPS + 1))
    assert points[STEPS]["loss"] < points[1]["loss"]
    assert points[1]["twice"] == pytest.approx(2 * points[1]["loss"], rel=1e-5)
    assert points[3]["lr_factor"] == pytest.approx(1 - 2 / STEPS) and points[2]["tokens"] == 64
    assert "val/bits_per_byte" in points[6] and result["val/bits_per_byte"] == points[STEPS]["val/bits_per_byte"]
    assert trainer.model.bias.abs().sum() > 0 and points[1]["router_max_load"] >= 1
    assert any("adamw" in line and "lm_head" in line for line in trainer.stage.lines), "start-up prints the owners"


@pytest.mark.parametrize("kill_at", [2, 4, 7, 11])
def test_killed_run_resumes_to_identical_weights_and_curves(tmp_path, kill_at):
    whole = make(tmp_path / "whole")
    whole.run()
    with pytest.raises(Killed):
        make(tmp_path / "cut", kill_at=kill_at).run()
    again = make(tmp_path / "cut")
    again.run()
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, again.model.state_dict()[name]), name
    a, b = whole.optimizer.state_tensors(), again.optimizer.state_tensors()
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
    resumed_at = kill_at // 4 * 4
    assert {s: whole.stage.points[s] for s in range(resumed_at + 1, STEPS + 1)} == again.stage.points
    assert again.counters == whole.counters


def test_finished_run_is_not_trained_again(tmp_path):
    first = make(tmp_path / "a")
    first.run()
    second = make(tmp_path / "a", kill_at=0)
    assert second.run() == first.last_eval
    assert all(torch.equal(v, second.model.state_dict()[k]) for k, v in first.model.state_dict().items())


def test_accumulation_equals_one_big_batch(tmp_path):
    small = make(tmp_path / "small", batches=lambda step: batches(step, micro_rows=1))
    big = make(tmp_path / "big", batches=lambda step: batches(step, micro_rows=4))
    small.run()
    big.run()
    assert small.stage.points[1]["loss"] == pytest.approx(big.stage.points[1]["loss"], rel=1e-6)
    assert small.stage.points[1]["grad_norm"] == pytest.approx(big.stage.points[1]["grad_norm"], rel=1e-5)
    assert small.stage.points[STEPS]["loss"] == pytest.approx(big.stage.points[STEPS]["loss"], rel=1e-3)


def test_clipping_bounds_the_gradient(tmp_path):
    trainer = make(tmp_path / "a", grad_clip=1e-6)
    seen = []
    step = trainer.optimizer.step
    trainer.optimizer.step = lambda: (
        seen.append(
            torch.cat([p.grad.flatten() for p in trainer.model.parameters() if p.grad is not None]).norm().item()
        ),
        step(),
    )
    trainer.run()
    assert max(seen) <= 1.01e-6 and trainer.stage.points[1]["grad_norm"] > 1e-3


def test_the_best_evaluation_can_be_the_output(tmp_path):
    """The value falls until step 6 and rises again: best/ holds step 6, and as output it comes back."""
    values = {3: 5.0, 6: 1.0, 9: 2.0, 12: 4.0}
    weights = {}

    def evaluate(model, step):
        weights[step] = {k: v.clone() for k, v in model.state_dict().items()}
        return {"val/loss": values[step]}

    for kill_at in (None, 7, 10):
        path = tmp_path / str(kill_at)
        settings = {"eval_every": 3, "keep_best": "val/loss", "best_as_output": True}
        if kill_at:
            trainer = make(path, kill_at=kill_at, **settings)
            trainer.evaluate = evaluate
            with pytest.raises(Killed):
                trainer.run()
        trainer = make(path, **settings)
        trainer.evaluate = evaluate
        assert trainer.run() == {"val/loss": 1.0}
        assert trainer.stage.metrics["best"] == {"step": 6, "name": "val/loss", "value": 1.0} and trainer.step == 6
        assert all(torch.equal(v, weights[6][k]) for k, v in trainer.model.state_dict().items())
        assert not torch.equal(weights[6]["up.weight"], weights[12]["up.weight"])
    last = make(tmp_path / "last", eval_every=3, keep_best="val/loss", keep_best_goal="max")
    last.evaluate = evaluate
    last.run()
    assert last.step == 12 and last.best["step"] == 3, "without best_as_output the last step is the output"
    wrong = make(tmp_path / "wrong", keep_best="val/nothing")
    with pytest.raises(ValueError, match="keep_best names 'val/nothing'; the evaluation has val/bits_per_byte"):
        wrong.run()
    with pytest.raises(ValueError, match="best_as_output needs keep_best"):
        LoopSettings(best_as_output=True)


def test_batch_weight():
    assert batch_count({"targets_bs": torch.tensor([[1, -100, 3]])}) == 2
    assert batch_count({"targets_bs": torch.tensor([[1, 2]]), "weights": torch.tensor([[0.5, 0.0]])}) == 0.5
    assert batch_count({"chosen": torch.zeros(3, 2)}) == 3


def test_empty_batch_is_an_error(tmp_path):
    trainer = make(tmp_path / "a", batches=lambda step: [{"targets_bs": torch.full((2, 3), -100)}])
    with pytest.raises(ValueError, match="step 0: the batch has no target"):
        trainer.run()


def test_indexer_gradients_are_clipped_apart(tmp_path):
    """A huge indexer loss must not shrink the backbone's step."""
    grads = []
    for scale in (1.0, 1e4):
        trainer = make(tmp_path / f"{scale:g}", grad_clip=0.5)
        trainer.model.indexer = nn.Linear(3, 3, bias=False)
        trainer.optimizer = build_optimizer(trainer.model, OptimConfig(lr_matrix=1e-2))

        def both(model, batch, step, scale=scale):
            loss, logs = objective(model, batch, step)
            return loss + scale * model.indexer.weight.square().sum(), logs

        trainer.objective = both
        norms = trainer._one_step()
        grads.append((norms["grad_norm"], norms["index_grad_norm"], trainer.model.up.weight.detach().clone()))
    assert grads[0][0] == pytest.approx(grads[1][0]) and grads[1][1] == pytest.approx(1e4 * grads[0][1], rel=1e-4)
    assert torch.equal(grads[0][2], grads[1][2])


def test_recomputation_offload_and_the_guard_change_no_number(tmp_path):
    """Trained weights and curves of a model with experts and MTP are the same bytes under every setting."""
    ends = []

    def batches(step):
        ids = random_ids(4, 33, step)
        return split_batch({"input_ids_bs": ids[:, :-1], "targets_bs": ids[:, 1:]}, 2)

    for i, settings in enumerate(
        [
            {"guard": {"on": False}},
            {},
            {"recompute": "block", "offload": True},
            {"recompute": "selective", "async_save": True, "keep_best": "val/x"},
        ]
    ):
        (tmp_path / str(i)).mkdir()
        model = micro_model()
        trainer = Trainer(
            FakeStage(tmp_path / str(i)),
            model,
            build_optimizer(model, OptimConfig(lr_matrix=1e-2)),
            LanguageModeling(mtp_depth=2, balance_coef=0.01),
            batches,
            steps=3,
            lr_factor=lambda step: 1.0,
            settings=LoopSettings.model_validate({"log_every": 1, **settings}),
            evaluate=lambda model, step: {"val/x": 1.0},
        )
        trainer.run()
        ends.append((model.state_dict(), trainer.optimizer.state_tensors(), trainer.stage.points))
    for weights, state, points in ends[1:]:
        assert all(torch.equal(v, weights[k]) for k, v in ends[0][0].items())
        assert all(torch.equal(v, state[k]) for k, v in ends[0][1].items())
        assert points == ends[0][2]


@pytest.mark.parametrize(
    "goal", [LanguageModeling(mtp_depth=2), LanguageModeling(attention="sparse", index_rows=8), IndexerWarmup(8)]
)
def test_bfloat16_arithmetic_keeps_fp32_weights_and_gradients(goal):
    model, ids = micro_model(), random_ids(2, 65)
    data = {"input_ids_bs": ids[:, :-1], "targets_bs": ids[:, 1:]}
    weights = {n: p for n, p in model.named_parameters()}
    norms, losses = [], []
    for dtype in (torch.float32, torch.bfloat16):
        model.zero_grad()
        with computing_in(model, dtype):
            assert model.lm_head.weight.dtype == dtype and model.model.layers[1].mlp.gate.weight.dtype == torch.float32
            loss, _ = goal(model, data, 0)
        loss.backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        assert all(g.dtype == torch.float32 for g in grads)
        losses.append(float(loss.detach()))
        norms.append(float(torch.cat([g.flatten() for g in grads]).norm()))
    assert all(p is weights[n] for n, p in model.named_parameters()), "the weights are the same objects again"
    assert losses[1] == pytest.approx(losses[0], rel=1e-2) and losses[1] != losses[0]
    assert norms[1] == pytest.approx(norms[0], rel=2e-2)


@pytest.mark.parametrize("goal", ["min", "max"])
def test_an_evaluation_that_is_not_a_number_is_no_best(tmp_path, goal):
    values = {3: float("nan"), 6: 2.0, 9: float("nan"), 12: 3.0}
    trainer = make(tmp_path / "a", eval_every=3, keep_best="val/loss", keep_best_goal=goal)
    trainer.evaluate = lambda model, step: {"val/loss": values[step]}
    trainer.run()
    assert trainer.best["step"] == {"min": 6, "max": 12}[goal]
    assert sum("val/loss is nan, which is no best" in line for line in trainer.stage.lines) == 2
    empty = make(tmp_path / "b", eval_every=3, keep_best="val/loss", best_as_output=True)
    empty.evaluate = lambda model, step: {"val/loss": float("nan")}
    empty.run()
    assert empty.best is None and empty.step == STEPS, "without a best the output is the last step"


def test_after_a_rewind_the_best_on_disk_is_the_best_that_is_named(tmp_path):
    """Step 6 is evaluated as the best, then skipped: what `best` says must be what best/ holds."""
    seen = []

    def broken(model, batch, step):
        loss, logs = objective(model, batch, step)
        return (loss * float("nan") if step == 6 else loss), logs

    def evaluate(model, step):
        seen.append(step)
        return {"val/loss": 1.0 if step == 6 and seen.count(6) == 1 else 5.0 - step / 100}

    trainer = make(tmp_path / "a", objective=broken, eval_every=2, keep_best="val/loss")
    trainer.evaluate = evaluate
    trainer.run()
    assert seen.count(6) == 2, "the replay came by the step again and found it worse"
    assert trainer.best == {"step": 6, "name": "val/loss", "value": 1.0} and trainer.store.load_best().step == 6


@pytest.mark.parametrize("goal", [LanguageModeling(attention="sparse", index_rows=5, mtp_depth=1), IndexerWarmup(5)])
def test_accumulation_draws_the_indexers_rows_of_the_whole_batch(tmp_path, goal):
    ids, targets = random_ids(5, 33), random_ids(5, 33)[:, 1:]
    targets[1, 3:], targets[3, :20] = -100, -100
    data = {"input_ids_bs": ids[:, :-1], "targets_bs": targets}
    points = []
    for micro_rows in (5, 2, 1):
        model = micro_model()
        train = "indexer" if isinstance(goal, IndexerWarmup) else "all"
        (tmp_path / str(micro_rows)).mkdir()
        trainer = Trainer(
            FakeStage(tmp_path / str(micro_rows)), model, build_optimizer(model, OptimConfig(lr_matrix=0.0, train=train)), goal,
            lambda step, rows=micro_rows: split_batch(data, rows), steps=1, lr_factor=lambda step: 1.0,
            settings=LoopSettings(grad_clip=0.0),
        )  # fmt: skip
        points.append(trainer._one_step())
    for other in points[1:]:
        assert other["index_kl"] == pytest.approx(points[0]["index_kl"], rel=1e-5)
        assert other["loss"] == pytest.approx(points[0]["loss"], rel=1e-5)
        assert other["index_grad_norm"] == pytest.approx(points[0]["index_grad_norm"], rel=1e-4)
