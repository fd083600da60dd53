"""RMSNorm's hand-written backward against autograd through the formula."""

import pytest
import torch

from kernels.norms import rms_norm, rms_norm_reference


def case(shape, dtype):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    w = (torch.rand(shape[-1], generator=generator, dtype=torch.float64) + 0.5).to(dtype).requires_grad_()
    return x, w


@pytest.mark.parametrize("shape", [(7, 16), (2, 3, 5, 8), (1, 1, 33)])
def test_equals_the_reference_with_gradients(shape):
    x, w = case(shape, torch.float64)
    a, b = rms_norm(x, w, 1e-5), rms_norm_reference(x, w, 1e-5)
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    up = torch.randn_like(a)
    for g, r in zip(torch.autograd.grad(a, (x, w), up), torch.autograd.grad(b, (x, w), up)):
        torch.testing.assert_close(g, r, rtol=1e-10, atol=1e-12)
    with torch.no_grad():
        torch.testing.assert_close(rms_norm(x, w, 1e-5), b, rtol=1e-12, atol=1e-12)


def test_reads_slices_of_a_wider_tensor():
    x, w = case((4, 20), torch.float32)
    torch.testing.assert_close(rms_norm(x[:, 3:11], w[:8], 1e-6), rms_norm_reference(x[:, 3:11].clone(), w[:8], 1e-6))


def test_low_precision_takes_fp32_statistics():
    x, w = case((3, 64), torch.bfloat16)
    exact = rms_norm_reference(x.double(), w.double(), 1e-5)
    assert rms_norm(x, w, 1e-5).dtype == torch.bfloat16
    torch.testing.assert_close(rms_norm(x, w, 1e-5).double(), exact, rtol=2e-2, atol=1e-2)
