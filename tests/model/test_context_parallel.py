"""Sequences spread over ranks against one process: hidden states, losses, gradients; dense and sparse, both forms.

python -m pytest tests/model/test_context_parallel.py
"""

import pytest
import torch

from model.all_to_all import make_route
from model.context_parallel import Context, segments, set_context
from model.transformer import GlmMoeDsa
from tasks.objectives import IndexerWarmup, LanguageModeling
from tests.model.ranks import run_ranks
from tests.model.sizes import micro, spread

# index_topk is 8: up to 96 tokens the selection is masked, above it is gathered
CASES = {
    "dense": dict(size=33, attention="dense", rows=None),
    "dense-index": dict(size=29, attention="dense", rows="all"),
    "masked": dict(size=37, attention="sparse", rows=5),
    "gathered": dict(size=131, attention="sparse", rows=9),
    "shared": dict(size=45, attention="sparse", rows="all", types=("full", "shared")),
    "warm-up": dict(size=30, attention="dense", rows=7, warm_up=True),
}


def build(case, dtype=torch.float64):
    cfg = micro(
        num_hidden_layers=2, num_attention_heads=5, num_nextn_predict_layers=1, indexer_types=CASES[case].get("types")
    )
    model = GlmMoeDsa(cfg)
    return spread(model).double() if dtype == torch.float64 else model.init_weights(0)


def batch_of(case):
    """Two sequences, the second padded on the right and with some targets masked."""
    size = CASES[case]["size"]
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(2, 96, (2, size + 1), generator=generator)
    targets = ids[:, 1:].clone()
    targets[1, size - 6 :] = -100
    targets[0, ::5] = -100
    return {"input_ids_bs": ids[:, :-1], "targets_bs": targets}


def run_case(model, case):
    """(loss, logs, hidden of this process's tokens, gradients) of one objective."""
    settings, hidden = CASES[case], []
    if settings.get("warm_up"):
        objective = IndexerWarmup(index_rows=settings["rows"])
    else:
        objective = LanguageModeling(
            attention=settings["attention"], mtp_depth=2, balance_coef=0.1, index_rows=settings["rows"]
        )
    handle = model.register_forward_hook(lambda _m, _i, out: hidden.append(out))
    loss, logs = objective(model, batch_of(case), 0)
    handle.remove()
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), logs, hidden[0], grads


def spread_over_ranks(rank, world, cases, form, stages):
    """Per case: what run_case gives, hidden states gathered to whole sequences."""
    results = {}
    for case, dtype in cases:
        context = Context(make_route(per_node=2 if stages == 2 else None, stages=stages), form)
        model = set_context(build(case, dtype), context)
        loss, logs, out, grads = run_case(model, case)
        with torch.no_grad():
            whole = [context.gather(h) for h in (out.hidden_bsh, *out.mtp_hidden)]
        results[case] = loss, logs, whole, grads
    return results


def close(got, want, limit, name):
    difference, size = float((got - want).abs().max()), max(1.0, float(want.abs().max()))
    assert difference <= limit * size, f"{name} differs by {difference}"


def compare(results, case, dtype):
    loss, logs, out, grads = run_case(build(case, dtype), case)
    limit = 1e-10 if dtype == torch.float64 else 1e-5
    world = len(results)
    mine = [r[case] for r in results]
    close(sum(m[0] for m in mine) / world, loss, 1e-6, "loss")
    for key, value in logs.items():
        if key == "router_counts":
            for got, want in zip(zip(*(m[1][key] for m in mine)), value, strict=True):
                assert torch.equal(sum(got), want)
        else:
            close(sum(m[1][key] for m in mine) / world, value, 1e-6, key)
    for m in mine:
        for i, want in enumerate((out.hidden_bsh, *out.mtp_hidden)):
            close(m[2][i], want.detach(), limit, f"hidden {i}")
    assert all(set(m[3]) == set(grads) for m in mine)
    for name, want in grads.items():
        close(sum(m[3][name] for m in mine) / world, want, limit, name)


@pytest.mark.parametrize(
    "world, form, stages, cases, single",
    [
        (4, "gather", 1, ["dense", "masked", "gathered", "warm-up"], []),
        (2, "gather", 1, ["dense", "dense-index", "masked", "shared"], ["dense", "masked"]),
        (4, "ulysses", 2, ["dense", "masked"], ["dense"]),
        pytest.param(3, "gather", 1, list(CASES), [], marks=pytest.mark.slow),
        pytest.param(3, "ulysses", 1, list(CASES), [], marks=pytest.mark.slow),
        pytest.param(2, "ulysses", 1, list(CASES), list(CASES), marks=pytest.mark.slow),
    ],
)
def test_ranks_equal_one_process(world, form, stages, cases, single):
    """Five heads and odd lengths divide by none of these numbers of ranks."""
    cases = [(case, torch.float32 if case in single else torch.float64) for case in cases]
    results = run_ranks(world, spread_over_ranks, cases, form, stages)
    for case, dtype in cases:
        compare(results, case, dtype)


def padded(rank, world):
    context = Context(make_route())
    model = set_context(build("masked"), context)
    ids, mask = padded_batch()
    out = model(ids, attention="sparse", token_mask_bs=mask, index_loss_rows="all", mtp_depth=1)
    with torch.no_grad():
        whole = context.gather(out.hidden_bsh)
    set_context(model, None)  # and back: every rank alone with the whole sequences
    alone = model(ids, attention="sparse", token_mask_bs=mask, index_loss_rows="all", mtp_depth=1)
    return out.index_loss.detach(), out.aux_loss.detach(), out.router_counts, whole, alone.hidden_bsh.detach()


def padded_batch():
    ids = torch.randint(2, 96, (3, 26), generator=torch.Generator().manual_seed(5))
    return ids, torch.arange(26) < torch.tensor([[26], [11], [3]])


def test_padding_counts_nowhere_and_the_context_can_be_taken_away_again():
    model = build("masked")
    ids, mask = padded_batch()
    want = model(ids, attention="sparse", token_mask_bs=mask, index_loss_rows="all", mtp_depth=1)
    results = run_ranks(2, padded)
    close(sum(r[0] for r in results) / 2, want.index_loss.detach(), 1e-6, "index loss")
    close(sum(r[1] for r in results) / 2, want.aux_loss.detach(), 1e-10, "balance loss")
    for got, counts in zip(zip(*(r[2] for r in results)), want.router_counts, strict=True):
        assert torch.equal(sum(got), counts)
    for r in results:
        close(r[3], want.hidden_bsh.detach(), 1e-10, "spread")
        close(
            r[4], want.hidden_bsh.detach(), 1e-12, "alone again"
        )  # other processes may share sums among other threads


def test_every_rank_has_an_even_share_of_the_causal_triangle():
    for size, ranks in ((64, 4), (61, 3), (8, 4)):
        pieces = segments(size, ranks, "gather")
        places = sorted(t for rank in pieces for a, b in rank for t in range(a, b))
        assert places == list(range(size))
        work = [sum(t + 1 for a, b in rank for t in range(a, b)) for rank in pieces]
        assert max(work) - min(work) <= 2 * size  # equal up to the chunks that are one token longer
    whole = [sum(t + 1 for a, b in rank for t in range(a, b)) for rank in segments(64, 4, "ulysses")]
    assert max(whole) > 1.7 * sum(whole) / 4  # what contiguous pieces would cost
    with pytest.raises(ValueError, match="7 tokens cannot be spread over 4 context ranks"):
        segments(7, 4, "gather")


def test_other_attention_is_refused_by_name():
    model = GlmMoeDsa(micro(layer_types=("full", "swa", "full"), sliding_window=8))
    with pytest.raises(ValueError, match="full MLA only; this model has MLA, SlidingMLA"):
        set_context(model, object())
