"""Sigmoid routing, bias balancing and the balance loss, each against numbers worked out by hand."""

import math

import pytest
import torch

from model.moe import MoE, Router
from tests.model.sizes import micro, spread


def hand_router(bias, **changes) -> Router:
    """hidden 2, 4 experts: logits of x are (x0, x1, -x0, 0)."""
    cfg = micro(hidden_size=2, n_routed_experts=4, num_experts_per_tok=2, routed_scaling_factor=2.5, **changes)
    router = Router(cfg)
    with torch.no_grad():
        router.weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.0, 0.0]]))
        router.e_score_correction_bias.copy_(torch.tensor(bias))
    return router


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def test_routing_by_hand_bias_chooses_but_does_not_weigh():
    x = torch.tensor([[2.0, 1.0]])
    scores = [sigmoid(2), sigmoid(1), sigmoid(-2), 0.5]
    got, index, weight = hand_router([0.0, 0.0, 0.0, 0.0])(x)
    assert got[0].tolist() == pytest.approx(scores, abs=1e-6)
    assert index[0].tolist() == [0, 1]
    total = scores[0] + scores[1]
    assert weight[0].tolist() == pytest.approx([2.5 * scores[0] / total, 2.5 * scores[1] / total], abs=1e-6)
    # A bias of +0.4 on expert 3 lifts 0.5 to 0.9, above sigmoid(2) = 0.881; its weight still comes from 0.5.
    _, index, weight = hand_router([0.0, 0.0, 0.0, 0.4])(x)
    assert index[0].tolist() == [3, 0]
    total = 0.5 + scores[0]
    assert weight[0].tolist() == pytest.approx([2.5 * 0.5 / total, 2.5 * scores[0] / total], abs=1e-6)
    _, _, weight = hand_router([0.0] * 4, norm_topk_prob=False)(x)
    assert weight[0].tolist() == pytest.approx([2.5 * scores[0], 2.5 * scores[1]], abs=1e-6)


def test_group_limited_choice_by_hand():
    # Groups {0,1} and {2,3}; sums .881+.731 against .119+.5: only the first group is open, whatever expert 3 scores.
    _, index, _ = hand_router([0.0] * 4, n_group=2, topk_group=1)(torch.tensor([[2.0, 1.0]]))
    assert sorted(index[0].tolist()) == [0, 1]
    _, index, _ = hand_router([0.0, 0.0, 0.7, 0.7], n_group=2, topk_group=1)(torch.tensor([[2.0, 1.0]]))
    assert sorted(index[0].tolist()) == [2, 3]


def test_bias_update_by_hand():
    router = hand_router([0.0, 0.01, 0.0, 0.0])
    router.update_bias(torch.tensor([10, 2, 6, 6]), rate=1e-3)  # mean 6: over, under, exactly balanced
    assert router.e_score_correction_bias.tolist() == pytest.approx([-1e-3, 0.011, 0.0, 0.0])


def test_bias_balances_a_skewed_router():
    """The paper's rule, repeated, evens out a load that starts far off."""
    torch.manual_seed(0)
    router = hand_router([0.3, 0.0, 0.0, -0.3])
    x = torch.randn(512, 2)

    def load():
        return torch.bincount(router(x)[1].flatten(), minlength=4)

    start = load()
    for _ in range(400):
        router.update_bias(load(), rate=1e-2)
    assert start.max() > 400 and start.min() < 50
    # Tokens are discrete and the step is fixed, so the load settles into a band around the mean of 256.
    assert load().max() < 330 and load().min() > 180


def test_moe_output_by_hand_and_counts():
    moe = spread(MoE(micro()))
    x = torch.randn(2, 5, 48)
    out, counts, aux = moe(x)
    _, index, weight = moe.gate(x.view(-1, 48))
    for n, row in enumerate(x.view(-1, 48)):
        expected = moe.shared_experts(row.view(1, 1, -1)).flatten()
        for e, w in zip(index[n], weight[n]):
            gate, up = (moe.experts.gate_up_proj[e] @ row).chunk(2)
            expected = expected + w * (moe.experts.down_proj[e] @ (torch.nn.functional.silu(gate) * up))
        torch.testing.assert_close(out.view(-1, 48)[n], expected, atol=2e-5, rtol=1e-4)
    assert counts.tolist() == torch.bincount(index.flatten(), minlength=6).tolist() and aux.item() > 0


def test_masked_tokens_do_not_count():
    moe = spread(MoE(micro()))
    x = torch.randn(2, 6, 48)
    mask = torch.tensor([[True] * 4 + [False] * 2, [True] * 6])
    _, counts, aux = moe(x, mask)
    _, first, aux_first = moe(x[:1, :4])
    _, second, aux_second = moe(x[1:])
    assert counts.sum() == 10 * 2 and torch.equal(counts, first + second)
    torch.testing.assert_close(aux, (aux_first + aux_second) / 2)


def test_balance_loss_by_hand():
    """f_e = E/(kT) count_e, P_e = mean share; perfectly even routing and scores give exactly 1."""
    moe = MoE(micro(n_routed_experts=4, num_experts_per_tok=2))
    even = torch.full((1, 4, 4), 0.3)
    assert moe._balance_loss(even, torch.tensor([[2, 2, 2, 2]]), None).item() == pytest.approx(1.0)
    scores = torch.tensor([[[0.6, 0.2, 0.1, 0.1], [0.4, 0.4, 0.1, 0.1]]])
    # counts (2,2,0,0), T=2: f = 4/(2*2) * counts = (2,2,0,0); P = (.5,.3,.1,.1); sum = 1.0 + 0.6
    assert moe._balance_loss(scores, torch.tensor([[2, 2, 0, 0]]), None).item() == pytest.approx(1.6)


def test_the_router_decides_in_fp32_whatever_the_rest_computes_in():
    """Inputs that differ below bf16's resolution of the score still get the fp32 order; rounded router weights are refused."""
    moe = spread(MoE(micro()))
    moe.experts.bfloat16()
    moe.shared_experts.bfloat16()
    x = torch.randn(3, 7, 48).bfloat16()
    scores, index, weight = moe.gate(x.view(-1, 48))
    exact = (x.view(-1, 48).double() @ moe.gate.weight.double().T).sigmoid()
    assert scores.dtype == weight.dtype == torch.float32
    assert (scores.double() - exact).abs().max() < 1e-6, "bf16 would be off by 1e-3"
    assert moe(x)[0].dtype == torch.bfloat16
    moe.gate.bfloat16()
    with pytest.raises(AssertionError, match="router weights are torch.bfloat16"):
        moe(x)
