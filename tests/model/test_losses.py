"""Each loss against a case worked out by hand (numbers in the comments), and its gradient."""

import math

import pytest
import torch

from model.losses import (
    bradley_terry_loss,
    distill_advantages,
    double_sided,
    double_sided_is_loss,
    group_advantages,
    grpo_icepop_loss,
    pop,
)


def test_pop_keeps_the_bounds_and_zeroes_the_rest():
    rho = torch.tensor([0.49, 0.5, 1.0, 2.0, 2.01], requires_grad=True)
    weight = pop(rho, 2.0)
    assert weight.tolist() == [0.0, 0.5, 1.0, 2.0, 0.0]
    assert not weight.requires_grad
    with pytest.raises(ValueError, match="beta"):
        pop(rho, 0.5)


def test_double_sided_excludes_the_bounds():
    # 0.75 and 1.25 are exact in binary, so equality with the bounds is meant
    assert double_sided(torch.tensor([0.75, 0.76, 1.0, 1.24, 1.25]), 0.25, 0.25).tolist() == pytest.approx(
        [0.0, 0.76, 1.0, 1.24, 0.0]
    )


def test_group_advantages_by_hand():
    # mean 1/4, population std sqrt(3)/4: (3/4)/(sqrt(3)/4) = sqrt(3); (-1/4)/(sqrt(3)/4) = -1/sqrt(3)
    rewards = torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.3, 0.3, 0.3, 0.3]])
    advantages = group_advantages(rewards)
    assert advantages[0].tolist() == pytest.approx([math.sqrt(3)] + [-1 / math.sqrt(3)] * 3, abs=1e-4)
    assert advantages[1].tolist() == [0.0] * 4
    assert group_advantages(rewards, normalise=False)[0].tolist() == pytest.approx([0.75, -0.25, -0.25, -0.25])


def test_distill_advantages_clamp_and_carry_no_gradient():
    student = torch.tensor([-1.0, -9.0, -0.5], requires_grad=True)
    advantage = distill_advantages(torch.tensor([-0.5, -1.0, -20.0]), student)
    assert advantage.tolist() == [0.5, 5.0, -5.0]
    assert not advantage.requires_grad


def _grpo_case():
    log = math.log
    theta = torch.tensor([[log(0.30), log(0.50)], [log(0.20), log(0.40)]], requires_grad=True)
    train_old = torch.tensor([[log(0.20), log(0.50)], [log(0.20), log(0.60)]])
    infer_old = torch.tensor([[log(0.20), log(0.10)], [log(0.25), log(0.60)]])
    mask = torch.tensor([[1, 1], [1, 1]])
    return theta, train_old, infer_old, torch.tensor([1.0, -2.0]), mask


def test_grpo_icepop_by_hand():
    # sequence 1, A = 1:  t1 rho 1.0, r 1.5 -> min(1.5, 1.28) = 1.28;  t2 rho 5 -> popped. mean (1.28 + 0) / 2 = 0.64
    # sequence 2, A = -2: t1 rho 0.8, r 1 -> 0.8 * -2 = -1.6; t2 rho 1, r 2/3 -> min(-4/3, 0.8 * -2) = -1.6. mean -1.6
    # loss = -(0.64 - 1.6) / 2 = 0.48
    theta, train_old, infer_old, advantages, mask = _grpo_case()
    loss, stats = grpo_icepop_loss(theta, train_old, infer_old, advantages, mask)
    assert loss.item() == pytest.approx(0.48, abs=1e-6)
    assert stats["drop_rate"] == pytest.approx(0.25)
    assert stats["clip_rate"] == pytest.approx(0.5)
    # only the unclipped, unpopped token has a gradient: -(1/2)(1/2) * rho * r * A = -0.25 * 0.8 * 1 * -2 = 0.4
    loss.backward()
    assert theta.grad.flatten().tolist() == pytest.approx([0.0, 0.0, 0.4, 0.0], abs=1e-6)


def test_grpo_token_mean_and_mask():
    theta, train_old, infer_old, advantages, _ = _grpo_case()
    mask = torch.tensor([[1, 0], [1, 1]])
    # tokens kept: 1.28, -1.6, -1.6 -> -(1.28 - 3.2) / 3 = 0.64 ; sequence: -(1.28 - 1.6) / 2 = 0.16
    token, _ = grpo_icepop_loss(theta, train_old, infer_old, advantages, mask, normalisation="token")
    sequence, _ = grpo_icepop_loss(theta, train_old, infer_old, advantages, mask)
    assert token.item() == pytest.approx(0.64, abs=1e-6)
    assert sequence.item() == pytest.approx(0.16, abs=1e-6)
    with pytest.raises(ValueError, match="normalisation"):
        grpo_icepop_loss(theta, train_old, infer_old, advantages, mask, normalisation="sum")


@pytest.mark.parametrize("normalisation", ["sequence", "token"])
def test_micro_batches_sum_to_the_batch(normalisation):
    generator = torch.Generator().manual_seed(0)
    logp = [-torch.rand(4, 5, generator=generator) for _ in range(3)]
    advantages = torch.tensor([1.0, 0.0, -0.5, 2.0])
    mask = torch.tensor([[1, 1, 1, 0, 0], [1] * 5, [1, 1, 0, 0, 0], [0, 1, 1, 1, 0]])
    whole, _ = grpo_icepop_loss(*logp, advantages, mask, normalisation=normalisation)
    denominator = 4 if normalisation == "sequence" else int(mask.sum())
    parts = [
        grpo_icepop_loss(
            *(x[rows] for x in logp),
            advantages[rows],
            mask[rows],
            normalisation=normalisation,
            denominator=denominator,
        )[0]
        for rows in ([0], [2, 3])  # row 1 has advantage 0: leaving it out changes nothing
    ]
    assert sum(parts).item() == pytest.approx(whole.item(), abs=1e-6)


def test_on_policy_gradient_is_the_policy_gradient():
    theta = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    old = theta.detach().clone()
    loss, stats = grpo_icepop_loss(theta, old, old, torch.tensor([3.0]), torch.ones(1, 2))
    loss.backward()
    assert stats["drop_rate"] == 0 and stats["clip_rate"] == 0 and stats["mismatch"] == 0
    assert theta.grad.flatten().tolist() == pytest.approx([-1.5, -1.5])


def test_double_sided_is_by_hand():
    # r = (1.0, 1.2, 0.5, 1.28): the last two are out of (0.8, 1.28). A = 2.
    # loss = -(1*2*log .5 + 1.2*2*log .6) / 4; d/dlogp = -f * A / 4 = (-0.5, -0.6, 0, 0)
    p_theta = torch.tensor([[0.5, 0.6, 0.2, 0.64]], dtype=torch.float64)
    rollout = torch.tensor([[0.5, 0.5, 0.4, 0.5]], dtype=torch.float64).log()
    theta = p_theta.log().requires_grad_()
    loss, stats = double_sided_is_loss(theta, rollout, torch.tensor([2.0]), torch.ones(1, 4), eps_high=0.279999)
    loss.backward()
    assert loss.item() == pytest.approx(-(2 * math.log(0.5) + 2.4 * math.log(0.6)) / 4)
    assert theta.grad.flatten().tolist() == pytest.approx([-0.5, -0.6, 0.0, 0.0])
    assert stats["drop_rate"] == pytest.approx(0.5)


def test_double_sided_ignores_environment_tokens():
    theta = torch.tensor([[-1.0, -1.0]], requires_grad=True)
    loss, _ = double_sided_is_loss(theta, torch.tensor([[-1.0, -1.0]]), torch.tensor([1.0]), torch.tensor([[1, 0]]))
    loss.backward()
    assert theta.grad.flatten().tolist() == [-1.0, 0.0]


def test_bradley_terry():
    # log sigmoid(log 3) = log(3/4)
    loss = bradley_terry_loss(torch.tensor([math.log(3.0)]), torch.tensor([0.0]))
    assert loss.item() == pytest.approx(-math.log(0.75), abs=1e-6)
