"""Triton Newton-Schulz against float64: one symmetric product, and the whole orthogonalisation."""

import torch

from tests.kernels.triton_case import triton_checks


def _batch(device, dtype, b, m, n):
    return torch.randn(b, m, n, generator=torch.Generator().manual_seed(0)).to(device, dtype)


def check_symmetric_products_over_several_tiles(device):
    from kernels.triton_newton_schulz import symmetric

    for m, n in ((150, 40), (64, 64), (1, 5)):
        x, add = _batch(device, torch.float32, 2, m, n), _batch(device, torch.float32, 2, m, m)
        add = add + add.transpose(1, 2)
        got = symmetric(x, 2.0, add, -0.5)
        exact = 2.0 * x.double() @ x.double().transpose(1, 2) - 0.5 * add.double()
        torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=1e-4)
        assert torch.equal(got, got.transpose(1, 2))


def _orthogonalises(device, dtype, tolerance, m, n):
    from kernels import paths
    from kernels.newton_schulz import newton_schulz, newton_schulz_reference

    x = _batch(device, dtype, 2, m, n)
    with paths.force(newton_schulz="triton"):
        got = newton_schulz(x)
    assert got.dtype == dtype and got.shape == x.shape
    for one, matrix in zip(got, x):
        exact = newton_schulz_reference(matrix.double())
        assert (one.double() - exact).norm() < tolerance * exact.norm()


def check_wide_fp32(device):
    _orthogonalises(device, torch.float32, 1e-5, 70, 100)


def check_tall_fp32(device):
    _orthogonalises(device, torch.float32, 1e-5, 90, 33)


def check_wide_bf16(device):
    _orthogonalises(device, torch.bfloat16, 5e-2, 40, 72)


def launches(dtype):
    from kernels.triton_newton_schulz import iterate

    iterate(torch.zeros(2, 192, 512, dtype=dtype), 1, (1.0, 1.0, 1.0))


test_triton = triton_checks(__name__)
