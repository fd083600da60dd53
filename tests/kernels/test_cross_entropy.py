"""Chunked cross entropy and log-probabilities against float64 torch."""

import pytest
import torch
import torch.nn.functional as F

from kernels.cross_entropy import linear_cross_entropy, linear_logprobs, linear_logprobs_entropy


def case(n=37, h=8, v=50, dtype=torch.float64):
    g = torch.Generator().manual_seed(0)
    hidden = (torch.randn(n, h, generator=g, dtype=torch.float64) * 2).to(dtype).requires_grad_()
    weight = torch.randn(v, h, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    targets = torch.randint(0, v, (n,), generator=g)
    targets[[2, 30, 36]] = -100
    return hidden, weight, targets


def exact(hidden, weight, targets, reduction, temperature=1.0):
    h, w = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    loss = F.cross_entropy(h @ w.T / temperature, targets, reduction=reduction, ignore_index=-100)
    return loss, h, w


@pytest.mark.parametrize("chunk", [1, 7, 37, 100, None])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_values_and_gradients_in_float64(reduction, chunk):
    hidden, weight, targets = case()
    loss = linear_cross_entropy(hidden, weight, targets, reduction=reduction, chunk=chunk)
    reference, h, w = exact(hidden, weight, targets, reduction)
    torch.testing.assert_close(loss, reference, rtol=1e-12, atol=1e-12)
    up = torch.randn_like(reference)
    for a, b in zip(torch.autograd.grad(loss, (hidden, weight), up), torch.autograd.grad(reference, (h, w), up)):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_lower_precisions_against_float64(reduction, dtype, tolerance):
    hidden, weight, targets = case(n=300, v=200, dtype=dtype)
    loss = linear_cross_entropy(hidden, weight, targets, reduction=reduction, chunk=11)
    reference, h, w = exact(hidden, weight, targets, reduction)
    assert loss.dtype == torch.float32
    scale = reference.abs().max()
    torch.testing.assert_close(loss.double() / scale, reference / scale, rtol=0, atol=tolerance)
    got = torch.autograd.grad(loss.sum(), (hidden, weight))
    for a, b in zip(got, torch.autograd.grad(reference.sum(), (h, w))):
        assert a.dtype == dtype
        torch.testing.assert_close(a.double() / b.abs().max(), b / b.abs().max(), rtol=0, atol=2 * tolerance)


def test_all_targets_ignored_is_zero():
    hidden, weight, targets = case()
    loss = linear_cross_entropy(hidden, weight, torch.full_like(targets, -100))
    grads = torch.autograd.grad(loss, (hidden, weight))
    assert loss.item() == 0 and all((g == 0).all() for g in grads)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
def test_logprobs_and_entropy(temperature):
    hidden, weight, targets = case()
    logp = linear_logprobs(hidden, weight, targets, temperature, chunk=5)
    reference, h, w = exact(hidden, weight, targets, "none", temperature)
    torch.testing.assert_close(logp, -reference, rtol=1e-12, atol=1e-12)
    up = torch.randn_like(logp)
    for a, b in zip(torch.autograd.grad(logp, (hidden, weight), up), torch.autograd.grad(-reference, (h, w), up)):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
    again, entropy = linear_logprobs_entropy(hidden, weight, targets, temperature, chunk=5)
    torch.testing.assert_close(again, logp.detach())
    torch.testing.assert_close(
        entropy, torch.distributions.Categorical(logits=h @ w.T / temperature).entropy().detach()
    )


def test_frozen_head_and_bad_input():
    hidden, weight, targets = case()
    a = torch.autograd.grad(linear_cross_entropy(hidden, weight.detach(), targets), hidden)[0]
    torch.testing.assert_close(a, torch.autograd.grad(linear_cross_entropy(hidden, weight, targets), hidden)[0])
    with pytest.raises(ValueError, match="reduction"):
        linear_cross_entropy(hidden, weight, targets, reduction="median")
    with pytest.raises(ValueError, match="temperature"):
        linear_logprobs(hidden, weight, targets, temperature=0)
    with pytest.raises(ValueError, match=r"must be \[N,H\] and \[V,H\]"):
        linear_cross_entropy(hidden[:, :3], weight, targets)
    with pytest.raises(ValueError, match="N = 37"):
        linear_cross_entropy(hidden, weight, targets[:5])
