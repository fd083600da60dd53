"""Triton experts: values and all four gradients against float64 autograd; experts without tokens; uneven splits."""

import torch

from tests.kernels.triton_case import triton_checks


def _case(device, dtype, n=21, k=2, experts=5, h=40, m=24, index=None):
    g = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=g)  # noqa: E731
    x, gate_up, down = draw(n, h), draw(experts, 2 * m, h) * h**-0.5, draw(experts, h, m) * m**-0.5
    if index is None:
        index = torch.stack(
            [torch.randperm(experts - 1, generator=g)[:k] for _ in range(n)]
        )  # the last expert gets none
    weight = torch.rand(n, k, generator=g)
    return [t.to(device, dtype) for t in (x, gate_up, down)], index.to(device), weight.to(device)


def _against_float64(device, dtype, tolerance, **shape):
    from kernels.experts import experts_reference
    from kernels.triton_experts import grouped_experts

    tensors, index, weight = _case(device, dtype, **shape)
    exact = [t.double().requires_grad_() for t in (*tensors, weight)]
    mine = [t.clone().requires_grad_() for t in (*tensors, weight)]
    expected, got = experts_reference(*exact[:3], index, exact[3]), grouped_experts(*mine[:3], index, mine[3])
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=tolerance)
    up = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1)).to(device)
    got.backward(up.to(dtype))
    expected.backward(up.to(dtype).double())
    for a, b in zip(mine, exact):
        assert a.grad.dtype == a.dtype
        torch.testing.assert_close(a.grad.double(), b.grad, rtol=tolerance, atol=tolerance * b.grad.abs().max().item())
    return mine, exact


def check_values_and_gradients_fp32(device):
    mine, exact = _against_float64(device, torch.float32, 2e-5)
    assert not mine[1].grad[-1].any() and exact[1].grad[0].any()


def check_values_and_gradients_bf16(device):
    _against_float64(device, torch.bfloat16, 3e-2)


def check_one_expert_takes_nearly_all_rows(device):
    """130 rows: tiles of 64 + 64 + 2 of one expert beside a tile of a single row."""
    index = torch.full((131, 1), 2)
    index[7] = 0
    _against_float64(device, torch.float32, 2e-5, n=131, k=1, experts=3, h=16, m=16, index=index)


def check_no_token_at_all(device):
    from kernels.triton_experts import grouped_experts

    tensors, index, weight = _case(device, torch.float32)
    x = tensors[0][:0].clone().requires_grad_()
    gate_up = tensors[1].requires_grad_()
    out = grouped_experts(x, gate_up, tensors[2], index[:0], weight[:0])
    assert out.shape == (0, 40)
    out.sum().backward()
    assert not gate_up.grad.any() and x.grad.shape == (0, 40)


def check_the_public_function_takes_the_triton_path(device):
    from kernels import experts, paths

    tensors, index, weight = _case(device, torch.float32)
    with paths.force(grouped_experts="triton"):
        got = experts.grouped_experts(*tensors, index, weight)
    with paths.force(grouped_experts="cpu"):
        torch.testing.assert_close(got, experts.grouped_experts(*tensors, index, weight), rtol=1e-5, atol=1e-5)
    with paths.force(grouped_experts="reference"):
        torch.testing.assert_close(got, experts.grouped_experts(*tensors, index, weight), rtol=1e-5, atol=1e-5)


def launches(dtype):
    from kernels.triton_experts import grouped_experts

    tensors, index, weight = _case("cpu", dtype, n=64, k=2, experts=4, h=128, m=64)
    grouped_experts(*(t.requires_grad_() for t in tensors), index, weight.requires_grad_()).sum().backward()


test_triton = triton_checks(__name__)
