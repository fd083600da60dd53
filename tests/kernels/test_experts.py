"""Sorted-slice experts and the fused SwiGLU against plain torch, values and gradients."""

import pytest
import torch
import torch.nn.functional as F

from kernels.experts import experts_reference, grouped_experts, swiglu


def case(n=13, h=6, m=4, experts=5, k=2, seed=0):
    g = torch.Generator().manual_seed(seed)
    x, up, down = (
        torch.randn(s, generator=g, dtype=torch.float64, requires_grad=True)
        for s in ((n, h), (experts, 2 * m, h), (experts, h, m))
    )
    weight = torch.rand(n, k, generator=g, dtype=torch.float64, requires_grad=True)
    index = torch.rand(n, experts, generator=g).topk(k, dim=1).indices
    return x, up, down, index, weight


@pytest.mark.parametrize("k", [1, 2, 5])
def test_grouped_equals_reference_with_gradients(k):
    x, up, down, index, weight = case(k=k)
    a, b = grouped_experts(x, up, down, index, weight), experts_reference(x, up, down, index, weight)
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    grad = torch.randn_like(a)
    inputs = (x, up, down, weight)
    for g, r in zip(torch.autograd.grad(a, inputs, grad), torch.autograd.grad(b, inputs, grad)):
        torch.testing.assert_close(g, r, rtol=1e-11, atol=1e-12)


def test_unused_experts_get_zero_gradients():
    x, up, down, index, weight = case()
    index = index.clamp(max=1)
    index[:, 0], index[:, 1] = 0, 1
    grads = torch.autograd.grad(grouped_experts(x, up, down, index, weight).sum(), (up, down))
    for g in grads:
        assert g[:2].abs().sum() > 0 and (g[2:] == 0).all()


def test_expanded_gradients_and_frozen_weights():
    x, up, down, index, weight = case()
    frozen = grouped_experts(x, up.detach(), down.detach(), index, weight).sum()
    reference = experts_reference(x, up, down, index, weight).sum()
    for a, b in zip(torch.autograd.grad(frozen, (x, weight)), torch.autograd.grad(reference, (x, weight))):
        torch.testing.assert_close(a, b)


def test_swiglu_equals_plain_torch():
    x, up, down, _, _ = case()
    gate_w, up_w, down_w = up[0, :4], up[0, 4:], down[0]
    a = swiglu(x, gate_w, up_w, down_w)
    b = F.linear(F.silu(F.linear(x, gate_w)) * F.linear(x, up_w), down_w)
    torch.testing.assert_close(a, b)
    for g, r in zip(torch.autograd.grad(a.sum(), (x, up, down)), torch.autograd.grad(b.sum(), (x, up, down))):
        torch.testing.assert_close(g, r)
