"""Recomputation and offload change memory only: loss, every gradient and every count are equal bit for bit."""

import pytest
import torch

from model.recompute import HostOffload, recomputing, saving
from model.transformer import GlmMoeDsa
from tasks.objectives import IndexerWarmup, LanguageModeling
from tasks.trainer import computing_in
from tests.model.peak import Peak
from tests.model.sizes import micro, spread

GOALS = {
    "dense, mtp, balance": LanguageModeling(mtp_depth=3, balance_coef=0.01),
    "sparse adaptation": LanguageModeling(attention="sparse", mtp_depth=2, index_rows=8, balance_coef=0.01),
    "indexer warm-up": IndexerWarmup(8),
}


def step(goal, context, dtype=torch.float32, offload=None):
    """(loss, gradients by name, logs) of one forward and backward under `context(model)`."""
    torch.manual_seed(0)
    model = spread(GlmMoeDsa(micro()), 0.1)
    ids = torch.randint(96, (2, 41), generator=torch.Generator().manual_seed(1))
    with computing_in(model, dtype), context(model):
        loss, logs = goal(model, {"input_ids_bs": ids[:, :-1], "targets_bs": ids[:, 1:]}, 0)
        loss.backward()
    counts = [c.tolist() for c in logs.pop("router_counts", [])]
    return loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}, counts, logs


def plain(model):
    return recomputing(model, "none")


def equal(one, two):
    assert torch.equal(one[0], two[0])
    assert one[1].keys() == two[1].keys() and one[1]
    for name, grad in one[1].items():
        assert torch.equal(grad, two[1][name]), name
    assert one[2] == two[2], "router counts"
    assert one[3].keys() == two[3].keys() and all(torch.equal(v, two[3][k]) for k, v in one[3].items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("goal", GOALS)
@pytest.mark.parametrize("kind", ["selective", "block"])
def test_recomputation_is_exact(goal, kind, dtype):
    goal = GOALS[goal]
    equal(step(goal, plain, dtype), step(goal, lambda model: recomputing(model, kind), dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("goal", GOALS)
def test_offload_is_exact_alone_and_with_recomputation(goal, dtype):
    goal, seen = GOALS[goal], []

    def moved(model):
        seen.append(HostOffload(model, least_bytes=256, copy_on_cpu=True))
        return seen[-1]

    reference = step(goal, plain, dtype)
    equal(reference, step(goal, moved, dtype))

    class Both:
        def __init__(self, model):
            self.parts = recomputing(model, "block"), moved(model)

        def __enter__(self):
            for part in self.parts:
                part.__enter__()

        def __exit__(self, *exc):
            for part in reversed(self.parts):
                part.__exit__(*exc)

    equal(reference, step(goal, Both, dtype))
    alone, both = seen
    assert alone.moved_bytes > 20 * alone.kept_bytes > 0, "what is left behind is small"
    assert 0 < both.moved_bytes < alone.moved_bytes / 2, "only the blocks' inputs travel"


def test_parameters_stay_where_they_are():
    """Also their low-precision copies: nothing of the model's own size is moved."""
    model = spread(GlmMoeDsa(micro()), 0.1)
    ids = torch.randint(96, (1, 9), generator=torch.Generator().manual_seed(1))
    for dtype in (torch.float32, torch.bfloat16):
        with computing_in(model, dtype), HostOffload(model, least_bytes=4096, copy_on_cpu=True) as one:
            model(ids, attention="dense").hidden_bsh.sum().backward()
            weights = sum(
                p.numel() * p.element_size() for m in model.modules() for p in m._parameters.values() if p is not None
            )
        assert one.moved_bytes < 0.25 * weights


def test_memory_falls_in_the_promised_order():
    """What is alive at the end of the forward, beside the model: block < selective < none."""
    ids = torch.randint(96, (4, 128), generator=torch.Generator().manual_seed(1))
    held = {}
    for kind in ("none", "selective", "block"):
        model = spread(GlmMoeDsa(micro(num_hidden_layers=6)), 0.1)
        with recomputing(model, kind), Peak() as peak:
            out = model(ids, attention="dense")
            held[kind] = peak.live
            out.hidden_bsh.sum().backward()
    assert held["block"] < 0.25 * held["none"] and held["block"] < held["selective"] < 0.9 * held["none"]


def test_the_model_is_itself_again_and_without_gradient_nothing_changes():
    model = spread(GlmMoeDsa(micro()), 0.1)
    ids = torch.arange(20)[None]
    with saving(model, "block", True), torch.no_grad():
        inside = model(ids).hidden_bsh
    with torch.no_grad():  # with a gradient, other kernels run
        assert torch.equal(inside, model(ids).hidden_bsh)
    assert not any("forward" in vars(m) for m in model.modules())
    with (
        pytest.raises(ValueError, match="recompute is 'all'; expected one of none, selective, block"),
        saving(model, "all"),
    ):
        pass
