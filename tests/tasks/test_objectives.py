"""Objectives: what each loss is, and whom its gradient reaches."""

import pytest
import torch
import torch.nn.functional as F

from tasks.objectives import IndexerWarmup, LanguageModeling, shift_targets
from tests.tasks.lm_case import micro_model, random_ids


def batch(size=24, rows=2):
    ids = random_ids(rows, size + 1)
    return {"input_ids_bs": ids[:, :-1], "targets_bs": ids[:, 1:]}


def reached(model):
    return {n for n, p in model.named_parameters() if p.grad is not None and p.grad.abs().max() > 0}


def test_shifted_targets_stop_at_document_borders():
    targets = torch.tensor([[1, 2, -100, 4, 5, 6, 7]])
    assert shift_targets(targets, 1).tolist() == [[2, -100, -100, 5, 6, 7, -100]]
    assert shift_targets(targets, 2).tolist() == [[-100, -100, -100, 6, 7, -100, -100]]
    assert shift_targets(targets, 0).tolist() == targets.tolist()


def test_language_modeling_is_cross_entropy_plus_weighted_mtp():
    model, data = micro_model(), batch()
    loss, logs = LanguageModeling(mtp_depth=3, mtp_lambda=0.3)(model, data, 0)
    out = model(data["input_ids_bs"], attention="dense", mtp_depth=3)
    main = F.cross_entropy(model.logits(out.hidden_bsh).flatten(0, 1), data["targets_bs"].flatten())
    parts = []
    for k, hidden in enumerate(out.mtp_hidden, 1):
        # Position i of depth k predicts the token k + 1 places on.
        logits, target = model.logits(hidden[:, : 24 - k]), data["targets_bs"][:, k:]
        parts.append(F.cross_entropy(logits.flatten(0, 1), target.flatten()))
    assert float(loss.detach()) == pytest.approx(float((main + 0.3 * sum(parts) / 3).detach()), rel=1e-5)
    assert logs["lm_loss"] == pytest.approx(float(main.detach()), rel=1e-5)
    assert [float(logs[f"mtp_loss_{k}"]) for k in (1, 2, 3)] == pytest.approx(
        [float(p.detach()) for p in parts], rel=1e-5
    )


def test_mtp_runs_at_every_nth_step_only():
    model, data = micro_model(), batch()
    objective = LanguageModeling(mtp_depth=1, mtp_every=4)
    assert ["mtp_loss_1" in objective(model, data, s)[1] for s in range(8)] == [False] * 3 + [True] + [False] * 3 + [
        True
    ]


def test_warm_up_reaches_the_indexer_alone():
    model, data = micro_model(), batch()
    loss, logs = IndexerWarmup(mtp_depth=1)(model, data, 0)
    loss.backward()
    assert reached(model) and all(".indexer." in n for n in reached(model))
    assert {n.split(".")[2] for n in reached(model)} == {"0", "1", "2"}, "the MTP layer's indexer learns too"
    assert "router_counts" not in logs, "a frozen backbone keeps its router bias"


def test_adaptation_has_disjoint_gradients():
    data = batch(size=32)
    grads = []
    for objective in (
        LanguageModeling(attention="sparse"),
        LanguageModeling(attention="sparse", index_rows="all", index_coef=7.0),
    ):
        model = micro_model()
        loss, logs = objective(model, data, 0)
        loss.backward()
        grads.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    without, with_index = grads
    assert not any(".indexer." in n for n in without)
    assert any(".indexer." in n for n in with_index) and logs["index_kl"] > 0
    for name, grad in without.items():
        torch.testing.assert_close(with_index[name], grad, msg=name)


def test_sampled_rows_depend_on_the_step_alone():
    model, data = micro_model(), batch(size=32)
    objective = IndexerWarmup(index_rows=4, row_seed=11)
    values = [float(objective(model, data, s)[0].detach()) for s in (0, 1, 0)]
    assert values[0] == values[2] != values[1]


def test_balance_loss_counts_when_asked():
    model, data = micro_model(), batch()
    plain = float(LanguageModeling()(model, data, 0)[0])
    loss, logs = LanguageModeling(balance_coef=0.5)(model, data, 0)
    assert float(loss.detach()) == pytest.approx(plain + 0.5 * float(logs["balance_loss"]), rel=1e-5)


def test_mtp_weight_drops_late():
    model, data = micro_model(), batch()
    objective = LanguageModeling(mtp_depth=1, mtp_lambda=0.3, mtp_late_lambda=0.1, mtp_late_step=5)
    for step, weight in ((4, 0.3), (5, 0.1)):
        loss, logs = objective(model, data, step)
        assert float(loss.detach()) == pytest.approx(float(logs["lm_loss"] + weight * logs["mtp_loss_1"]), rel=1e-5)
