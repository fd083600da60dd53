"""Groups of several sizes at once, changing from step to step, against one process that sees every sequence.

python -m pytest tests/model/test_context_groups.py
"""

import pytest
import torch
import torch.distributed as dist

from model.context_groups import ContextPool
from model.transformer import GlmMoeDsa
from tasks.objectives import LanguageModeling
from tasks.sequence_balance import Group, plan_groups, sequence_cost
from tests.model.ranks import run_ranks
from tests.model.sizes import micro, spread

STEPS = [[150, 21, 9, 30], [40, 41, 40, 39], [16], [131, 130]]
OBJECTIVE = LanguageModeling(attention="sparse", mtp_depth=1, balance_coef=0.1, index_rows=6)


def build():
    return spread(GlmMoeDsa(micro(num_hidden_layers=2, num_nextn_predict_layers=1))).double()


def batch_of(step, i):
    ids = torch.randint(2, 96, (1, STEPS[step][i] + 1), generator=torch.Generator().manual_seed(100 * step + i))
    targets = ids[:, 1:].clone()
    targets[:, ::4] = -100
    return {"input_ids_bs": ids[:, :-1], "targets_bs": targets}


def shares(step):
    counts = [int((batch_of(step, i)["targets_bs"] != -100).sum()) for i in range(len(STEPS[step]))]
    return [c / sum(counts) for c in counts]


def plans():
    cost = sequence_cost(micro(num_hidden_layers=2), sparse=True, mtp_depth=1)
    found = [plan_groups(lengths, 4, cost, sizes=(1, 2, 3, 4)) for lengths in STEPS]
    found[2] = [Group(1, 3, (0,), 0.0)]  # rank 0 has nothing to do
    return found


def train(rank, world):
    model, pool, results = build(), ContextPool(), []
    for step, groups in enumerate(plans()):
        model.zero_grad()
        loss = torch.zeros((), dtype=torch.float64)
        for i in pool.enter(model, groups):
            part = OBJECTIVE(model, batch_of(step, i), step)[0] * shares(step)[i] / pool.sharing
            part.backward()
            loss += part.detach()
        dist.all_reduce(loss)
        for p in model.parameters():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            dist.all_reduce(p.grad)
        results.append((loss, {n: p.grad.clone() for n, p in model.named_parameters()}))
    return results, len(pool.contexts)


def test_steps_on_changing_groups_equal_one_process():
    sizes = [[len(g.ranks) for g in groups] for groups in plans()]
    assert sizes == [[3, 1], [1, 1, 1, 1], [3], [2, 2]]
    results = run_ranks(4, train)
    model = build()
    for step in range(len(STEPS)):
        model.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        for i, share in enumerate(shares(step)):
            loss = OBJECTIVE(model, batch_of(step, i), step)[0] * share
            loss.backward()
            total += loss.detach()
        for of_rank, _ in results:
            loss, grads = of_rank[step]
            torch.testing.assert_close(loss, total, atol=1e-6, rtol=1e-6)
            for name, p in model.named_parameters():
                limit = 1e-10 * max(1.0, float(p.grad.abs().max()))
                assert float((grads[name] - p.grad).abs().max()) <= limit, (step, name)


def test_groups_must_not_overlap(monkeypatch):
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    with pytest.raises(ValueError, match=r"overlap in ranks \[1\]"):
        ContextPool().enter(build(), [Group(0, 2, (0,), 0.0), Group(1, 2, (1,), 0.0)])
