"""Triton sparse attention, forward and both backwards, against float64 autograd of softmax over an explicit set of keys."""

import torch

from tests.kernels.triton_case import triton_checks


def _case(device, dtype, n=9, m=21, h=3, c=24, k=6, seed=0):
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(n, h, c, generator=g).to(device, dtype)
    kv = torch.randn(m, c, generator=g).to(device, dtype)
    index = torch.stack([torch.randperm(m, generator=g)[:k].sort().values for _ in range(n)])
    valid = torch.arange(k) < torch.randint(1, k + 1, (n, 1), generator=g)
    valid[2] = False  # a row that may attend to nothing
    index = torch.where(valid, index, 0)
    return q, kv, index.to(device), valid.to(device)


def _reference(q, kv, index, valid, value_dim, scale):
    """One softmax per row, over the latents that it names."""
    rows, lses = [], []
    for n in range(q.shape[0]):
        latents = kv[index[n][valid[n]]]
        logits = q[n] @ latents.T * scale
        rows.append(logits.softmax(-1) @ latents[:, :value_dim])
        lses.append(logits.logsumexp(-1))
    return torch.stack(rows), torch.stack(lses)


def _against_float64(device, dtype, tolerance, deterministic, value_dim=18, **sizes):
    from kernels.triton_sparse_attention import sparse_attention

    q, kv, index, valid = _case(device, dtype, **sizes)
    exact = [t.double().requires_grad_() for t in (q, kv)]
    mine = [t.clone().requires_grad_() for t in (q, kv)]
    out, lse = sparse_attention(*mine, index, valid, value_dim, 0.3, deterministic)
    expected, expected_lse = _reference(*exact, index, valid, value_dim, 0.3)
    assert out.dtype == dtype and lse.dtype == torch.float32
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=tolerance, atol=tolerance)
    up = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    out.backward(up)
    expected.backward(up.double())
    for a, b in zip(mine, exact):
        assert a.grad.dtype == dtype
        torch.testing.assert_close(a.grad.double(), b.grad, rtol=tolerance, atol=tolerance * b.grad.abs().max().item())


def check_fp32_deterministic(device):
    from kernels import triton_sparse_attention

    triton_sparse_attention.SCRATCH_ELEMENTS = 4 * 6 * 24  # chunks of 4 query rows
    _against_float64(device, torch.float32, 1e-5, True)


def check_fp32_atomic(device):
    _against_float64(device, torch.float32, 1e-5, False)


def check_bf16(device):
    _against_float64(device, torch.bfloat16, 2e-2, True)


def check_more_heads_and_keys_than_a_block(device):
    """20 heads and 40 places: two blocks of either; no rotary part."""
    from kernels import triton_sparse_attention

    triton_sparse_attention.MAX_HEADS = 16
    _against_float64(device, torch.float32, 1e-5, True, value_dim=16, n=4, m=50, h=20, c=16, k=40)
    triton_sparse_attention.MAX_HEADS = 64


def check_the_public_function_takes_the_triton_path(device):
    from kernels import paths
    from kernels.sparse_attention import gathered_attention

    g = torch.Generator().manual_seed(2)
    q, kv = torch.randn(2, 5, 3, 12, generator=g).to(device), torch.randn(2, 7, 12, generator=g).to(device)
    index = torch.arange(3).expand(2, 5, 3).contiguous().to(device)
    valid = torch.ones_like(index, dtype=torch.bool)
    outs = []
    for path in ("triton", "cpu", "reference"):
        with paths.force(gathered_attention=path):
            outs.append(gathered_attention(q, kv, index, valid, 8, 0.5))
    torch.testing.assert_close(outs[0], outs[1])
    torch.testing.assert_close(outs[0], outs[2])
    assert f"gathered_attention {device}/float32: reference" in paths.report()


def launches(dtype):
    from kernels.triton_sparse_attention import sparse_attention

    # GLM-5's heads and latent in bf16; fp32 products are unrolled into scalar code, which takes a minute to compile at that size
    heads, value_dim, c = (64, 512, 576) if dtype == torch.bfloat16 else (16, 32, 40)
    q, kv, index, valid = _case("cpu", dtype, n=3, m=64, h=heads, c=c, k=32)
    for deterministic in (True, False):
        out, _ = sparse_attention(q.requires_grad_(), kv.requires_grad_(), index, valid, value_dim, 0.1, deterministic)
        out.float().sum().backward()


test_triton = triton_checks(__name__)
