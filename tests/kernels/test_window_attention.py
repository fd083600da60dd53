"""Window attention against a brute-force mask in float64: values, gradients, edges, and that its cost is linear."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from kernels.window_attention import window_attention


def inputs(size, heads=4, groups=4, d=6, dv=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((2, heads, size, d), (2, groups, size, d), (2, groups, size, dv))
    return [torch.randn(s, dtype=torch.float64, generator=generator, requires_grad=True) for s in shapes]


def brute(q, k, v, window, scale):
    """Row by row, key by key."""
    n, size = q.shape[1] // k.shape[1], q.shape[2]
    k, v = k.repeat_interleave(n, dim=1), v.repeat_interleave(n, dim=1)
    rows = []
    for t in range(size):
        first = max(0, t - window + 1)
        logits = (q[:, :, t, None] * k[:, :, first : t + 1]).sum(-1) * scale
        rows.append((logits.softmax(-1)[..., None] * v[:, :, first : t + 1]).sum(2))
    return torch.stack(rows, dim=2)


@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize(
    ("size", "window", "chunk"),
    [(1, 4, None), (37, 5, 8), (37, 5, 3), (37, 1, 8), (40, 12, 8), (9, 9, 4), (9, 20, 4), (70, 20, None)],
)
def test_equals_brute_force_with_gradients(size, window, chunk, groups):
    q, k, v = inputs(size, groups=groups)
    got = window_attention(q, k, v, window, 0.4, chunk)
    expected = brute(q, k, v, window, 0.4)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    probe = torch.randn(got.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    for a, b in zip(
        torch.autograd.grad((got * probe).sum(), [q, k, v]), torch.autograd.grad((expected * probe).sum(), [q, k, v])
    ):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11)


def test_operations_grow_with_the_length_not_its_square():
    def operations(size):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            window_attention(*(t.detach() for t in inputs(size)), 64, 1.0)
        return counter.get_total_flops()

    assert operations(2048) < 2.2 * operations(1024)
    # at most a chunk's worth of keys beside the window for each query
    assert operations(2048) <= 2 * 4 * 2 * (6 + 5) * 2048 * (64 + 64)
