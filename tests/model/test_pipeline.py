"""Every pipeline technique against one process: loss, all gradients, router counts; and what is held when."""

import functools

import pytest
import torch

from kernels.cross_entropy import linear_cross_entropy
from model.pipeline import Grid, Pipeline
from model.pipeline_place import allowed_cuts, place
from model.pipeline_schedule import build, full_buffers, in_flight, with_offload, with_reductions
from model.pipeline_stage import Work
from model.transformer import GlmMoeDsa
from tasks.objectives import LanguageModeling
from tests.model.ranks import run_ranks
from tests.model.sizes import micro, spread

ROWS, SIZE = 2, 12
BALANCE = 0.03


def config(**changes):
    return micro(num_hidden_layers=5, **changes)


def head(depth_weight, model, hidden, depths, batch):
    from tasks.objectives import shift_targets

    def loss(h, targets):
        return linear_cross_entropy(h.flatten(0, 1), model.lm_head.weight, targets.flatten())

    total = main = loss(hidden, batch["targets_bs"])
    if depths:
        parts = [loss(h, shift_targets(batch["targets_bs"], k)) for k, h in enumerate(depths, 1)]
        total = total + depth_weight * torch.stack(parts).mean()
    return total, {"lm_loss": main.detach()}


def batches(count, vocab=96):
    generator = torch.Generator().manual_seed(3)
    found = []
    for i in range(count):
        ids = torch.randint(3, vocab, (ROWS, SIZE + 1), generator=generator)
        targets = ids[:, 1:].clone()
        targets[0, : i % 4] = -100
        found.append({"input_ids_bs": ids[:, :-1].contiguous(), "targets_bs": targets})
    weights = [float((b["targets_bs"] != -100).sum()) for b in found]
    return found, [w / sum(weights) for w in weights]


def one_process(cfg, micros, attention, depth, rows):
    """Loss, logs, router counts and gradients of the whole model by the objective that the stages train with."""
    model = spread(GlmMoeDsa(cfg))
    objective = LanguageModeling(
        attention, depth, mtp_lambda=0.3, balance_coef=BALANCE, index_rows=rows, index_coef=0.7, row_seed=5
    )
    loss, counts = 0.0, None
    data, shares = batches(micros)
    for batch, share in zip(data, shares):
        part, logs = objective(model, batch, 0)
        (part * share).backward()
        loss += float(part.detach()) * share
        new = logs["router_counts"]
        counts = new if counts is None else [a + b for a, b in zip(counts, new)]
    return loss, counts, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}, model.state_dict()


def check_rank(rank, world, cfg, name, virtual, micros, pipeline, options, reference):
    loss, counts, gradients, state = reference
    attention, depth, rows = options["attention"], options["depth"], options["rows"]
    grid = Grid.create(pipeline)
    schedule = build(name, ranks=pipeline, micros=micros // grid.data, virtual=virtual)
    schedule = with_reductions(schedule) if options.get("shards") else schedule
    schedule = with_offload(schedule) if options.get("offload") else schedule
    specs = place(
        cfg.num_hidden_layers,
        pipeline * virtual,
        mtp=cfg.num_nextn_predict_layers > 0,
        flexible=options.get("flexible", True),
        cuts=allowed_cuts(cfg),
    )
    pipe = Pipeline(cfg, schedule, specs, grid)
    pipe.local.load(state)
    data, shares = batches(micros)
    mine = slice(grid.replica * schedule.micros, (grid.replica + 1) * schedule.micros)
    work = Work(
        functools.partial(head, 0.3), attention, depth, BALANCE, rows, 0.7, 5, recompute=options.get("recompute", False)
    )
    result = pipe.run(work, data[mine], shares[mine])
    assert result.loss == pytest.approx(loss, rel=1e-5)
    assert [c.tolist() for c in result.router_counts] == [c.tolist() for c in counts]
    found = pipe.whole_gradients()
    held = {n for n, p in pipe.local.named_parameters()}
    assert set(found) == held & set(gradients), set(found) ^ (held & set(gradients))
    for n, gradient in found.items():
        torch.testing.assert_close(gradient, gradients[n], rtol=1e-5, atol=1e-5 * float(gradients[n].abs().max()), msg=n)
    assert pipe.ledger.now["activations"] == pipe.ledger.now["deferred"] == pipe.ledger.host == 0
    return {
        "names": sorted(found),
        "peak": pipe.ledger.peak,
        "host": pipe.ledger.host_peak,
        "in_flight": in_flight(schedule)[grid.place],
        "buffers": full_buffers(schedule)[grid.place],
        "reductions": getattr(pipe.gradients, "reductions", 0),
        "specs": [str(s) for s in specs],
    }


def compare(world, name, virtual, micros, *, pipeline=None, cfg=None, attention="dense", depth=2, rows=None, **options):
    cfg = config() if cfg is None else cfg
    reference = one_process(cfg, micros, attention, depth, rows)
    options |= {"attention": attention, "depth": depth, "rows": rows}
    if world == 1:
        return [check_rank(0, 1, cfg, name, virtual, micros, 1, options, reference)]
    found = run_ranks(world, check_rank, cfg, name, virtual, micros, pipeline or world, options, reference)
    assert {n for r in found for n in r["names"]} == set(reference[2])
    return found


@pytest.mark.parametrize("name, virtual", [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero_bubble", 2)])
def test_schedules_on_two_ranks_equal_one_process(name, virtual):
    compare(2, name, virtual, 4)


def test_one_rank_with_several_stages():
    compare(1, "interleaved", 3, 4)
    compare(1, "zero_bubble", 2, 4, recompute=True)
