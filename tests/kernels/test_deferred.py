"""Gradients computed in two parts equal the ones computed at once, and the weights' part really comes later."""

import torch
import torch.nn.functional as F

from kernels.deferred import WeightQueue, deferring
from kernels.experts import experts_reference, grouped_experts, swiglu


def tensors(*shapes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=generator, dtype=torch.float64, requires_grad=True) for s in shapes]


def test_linear_with_a_joined_weight():
    x, a, b = tensors((2, 5, 4), (3, 4), (6, 4))
    queue = WeightQueue()
    with deferring(queue):
        y = F.linear(x, torch.cat([a, b])).sin().sum()
    plain = F.linear(x, torch.cat([a, b])).sin().sum()
    expected = torch.autograd.grad(plain, (x, a, b))
    (dx,) = torch.autograd.grad(y, (x,))
    assert a.grad is None and len(queue) == 1
    queue.run()
    for found, want in zip((dx, a.grad, b.grad), expected):
        torch.testing.assert_close(found, want)
    assert len(queue) == 0


def test_swiglu_and_experts_against_the_reference():
    x, gate, up, down, gate_up, down_e, weight = tensors(
        (10, 6), (5, 6), (5, 6), (6, 5), (4, 10, 6), (4, 6, 5), (10, 2)
    )
    index = torch.randint(0, 3, (10, 2), generator=torch.Generator().manual_seed(1))  # expert 3 gets no token
    reference = F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)
    reference = reference + experts_reference(x, gate_up, down_e, index, weight)
    every = (x, weight, gate, up, down, gate_up, down_e)
    expected = torch.autograd.grad(reference.cos().sum(), every)
    queue = WeightQueue()
    with deferring(queue):
        y = swiglu(x, gate, up, down) + grouped_experts(x, gate_up, down_e, index, weight)
    found = torch.autograd.grad(y.cos().sum(), (x, weight))
    assert gate_up.grad is None and down.grad is None and len(queue) == 2
    queue.run()
    for got, want in zip((*found, gate.grad, up.grad, down.grad, gate_up.grad, down_e.grad), expected):
        torch.testing.assert_close(got, want)


def test_two_passes_accumulate_into_an_existing_gradient():
    x, w = tensors((3, 4), (5, 4))
    w.grad = torch.ones_like(w)
    where = w.grad.data_ptr()
    queue = WeightQueue()
    for _ in range(2):
        with deferring(queue):
            y = F.linear(x, w).sum()
        torch.autograd.grad(y, (x,))
    queue.run()
    torch.testing.assert_close(w.grad, 1 + 2 * torch.ones(5, 3, dtype=torch.float64) @ x.detach())
    assert w.grad.data_ptr() == where


def test_a_whole_block_defers_every_matrix():
    """Only norms, and the indexer that no loss reaches, are left to backward."""
    from model.block import BlockArgs
    from model.transformer import GlmMoeDsa
    from tests.model.sizes import micro, spread

    model = spread(GlmMoeDsa(micro())).double()
    x = torch.randn(1, 9, 48, generator=torch.Generator().manual_seed(2), dtype=torch.float64, requires_grad=True)
    cis = model.rope(torch.arange(9)[None]).to(torch.complex128)
    for block in model.blocks[:2]:  # a dense one and one with experts
        named = {n: p for n, p in block.named_parameters() if "indexer" not in n}
        expected = torch.autograd.grad(block(x, cis, BlockArgs("dense")).hidden_bsh.sin().sum(), [x, *named.values()])
        queue = WeightQueue()
        with deferring(queue):
            y = block(x, cis, BlockArgs("dense")).hidden_bsh.sin().sum()
        now = torch.autograd.grad(y, [x, *named.values()], allow_unused=True, retain_graph=True)
        torch.testing.assert_close(now[0], expected[0])
        assert {n for n, g in zip(named, now[1:]) if g is not None} == {n for n in named if "norm" in n}
        queue.run()
        for (name, p), gradient, want in zip(named.items(), now[1:], expected[1:]):
            torch.testing.assert_close(p.grad if gradient is None else gradient, want, msg=name)


def test_without_a_queue_nothing_changes():
    x, w = tensors((3, 4), (5, 4))
    with deferring(None):
        F.linear(x, w).sum().backward()
    assert w.grad is not None
