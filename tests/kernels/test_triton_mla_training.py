"""Triton training form of MLA pre-processing: values and every gradient of its three pieces against float64 autograd."""

import torch

from tests.kernels.triton_case import triton_checks


def _draw(device, dtype, *shapes):
    g = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=g).to(device, dtype) for shape in shapes]


def _turned(x, cis, start):
    """RoPE by its definition on columns [start, start + 2 r), pair by pair; cis [B or 1,S,r] complex128."""
    cos, sin = cis.real, cis.imag
    if x.dim() > cis.dim():
        cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    columns = list(x.unbind(-1))
    for j in range(cis.shape[-1]):
        a, b = x[..., start + 2 * j], x[..., start + 2 * j + 1]
        columns[start + 2 * j] = a * cos[..., j] - b * sin[..., j]
        columns[start + 2 * j + 1] = a * sin[..., j] + b * cos[..., j]
    return torch.stack(columns, -1)


def _against_float64(ours, formula, tensors, tolerance, transposed=False):
    """Values, then gradients for the same upstream ones, which come with heads before tokens where `transposed`."""
    mine = [t.clone().requires_grad_() for t in tensors]
    exact = [t.double().requires_grad_() for t in tensors]
    got, expected = ours(*mine), formula(*exact)
    g, ups = torch.Generator().manual_seed(4), []
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == tensors[0].dtype and a.shape == b.shape
        torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=tolerance * b.abs().max().item())
        up = torch.randn(a.shape, generator=g).to(a)
        ups.append(up.transpose(1, 2).contiguous().transpose(1, 2) if transposed else up)
    grads = torch.autograd.grad(got, mine, ups)
    for a, b in zip(grads, torch.autograd.grad(expected, exact, [u.double() for u in ups]), strict=True):
        assert a.dtype == tensors[0].dtype
        torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=tolerance * b.abs().max().item())
    return grads


def _split(device, dtype, tolerance, b=2, s=7, q=20, latent=18, rope=6, rows=1):
    from kernels import mlapo, paths
    from kernels.rope import rope_cis

    both, q_norm, kv_norm = _draw(device, dtype, (b, s, q + latent + rope), (q,), (latent,))
    cis = rope_cis(torch.arange(s) + 5 * torch.arange(rows)[:, None], rope, 1e4).to(device)

    def formula(both, q_norm, kv_norm):
        def norm(x, gain):
            return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * gain

        key = _turned(both[..., q + latent :], cis.to(torch.complex128), 0)
        return norm(both[..., :q], q_norm), norm(both[..., q : q + latent], kv_norm), key

    with paths.force(mla_training="triton"):
        return _against_float64(
            lambda *t: mlapo.split_latents(*t, cis, 1e-6), formula, [both, q_norm, kv_norm], tolerance
        )


def check_latents_fp32(device):
    _split(device, torch.float32, 1e-5)


def check_latents_bf16_and_positions_of_every_sequence(device):
    _split(device, torch.bfloat16, 2e-2, rows=2)


def check_latents_with_several_rows_a_program(device):
    """14 tokens on 4 programs of 4 rows, the last one short; twice the same bits."""
    from kernels import triton_mla_training

    triton_mla_training.PROGRAMS, before = 4, triton_mla_training.PROGRAMS
    one, two = _split(device, torch.float32, 1e-5), _split(device, torch.float32, 1e-5)
    triton_mla_training.PROGRAMS = before
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def _rotate(device, dtype, tolerance, shape, start, rope=6, transposed=True, rows=1):
    from kernels import mlapo, paths
    from kernels.rope import rope_cis

    cis = rope_cis(torch.arange(shape[1]) + 5 * torch.arange(rows)[:, None], rope, 1e4).to(device)
    with paths.force(mla_training="triton"):
        _against_float64(
            lambda x: [mlapo.rotate_columns(x, cis, start)],
            lambda x: [_turned(x, cis.to(torch.complex128), start)],
            _draw(device, dtype, shape),
            tolerance,
            transposed,
        )


def check_queries_and_index_keys_fp32(device):
    _rotate(device, torch.float32, 1e-5, (2, 7, 3, 18), 12)  # the last columns, as in attention
    _rotate(device, torch.float32, 1e-5, (2, 7, 3, 18), 0, rows=2)  # the first ones, as in the indexer
    _rotate(device, torch.float32, 1e-5, (2, 7, 18), 4, transposed=False)


def check_queries_bf16_in_several_programs(device):
    from kernels import triton_mla_training

    triton_mla_training.TILE, before = 64, triton_mla_training.TILE  # four rows each
    _rotate(device, torch.bfloat16, 1e-2, (2, 7, 3, 18), 12)
    triton_mla_training.TILE = before


def check_decoding_shapes(device):
    """One row of tokens: cis [N,r], x [N,d] or [N,H,d]."""
    from kernels import mlapo, paths
    from kernels.rope import rope_cis

    cis = rope_cis(torch.tensor([5, 0, 90, 7]), 6, 1e4).to(device)
    for x in _draw(device, torch.float32, (4, 10), (4, 3, 10)):
        with paths.force(mla_training="triton"):
            got = mlapo.rotate_columns(x, cis, 0)
        expected = _turned(x.double(), cis.to(torch.complex128), 0)
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)


def _expand(device, dtype, tolerance, heads):
    from kernels import mlapo, paths

    def formula(kv, key):
        key = key[:, :, None].expand(-1, -1, heads, -1)
        return torch.cat([kv[..., :12], key], -1), kv[..., 12:]

    with paths.force(mla_training="triton"):
        _against_float64(
            lambda kv, key: mlapo.expand_heads(kv, key, 12),
            formula,
            _draw(device, dtype, (2, 5, heads, 12 + 9), (2, 5, 6)),
            tolerance,
            transposed=True,
        )


def check_heads_fp32(device):
    _expand(device, torch.float32, 1e-6, 3)


def check_more_heads_than_a_tile_bf16(device):
    from kernels import triton_mla_training

    triton_mla_training.TILE, before = 64, triton_mla_training.TILE  # four heads at a time
    _expand(device, torch.bfloat16, 1e-2, 6)
    triton_mla_training.TILE = before


def check_a_layer_with_both_triton_paths_equals_the_reference(device):
    """MLA as the model calls it: every parameter's gradient, dense and with the indexer's loss."""
    from kernels import paths
    from model.attention import MLA
    from model.transformer import GlmMoeDsa
    from tests.model.sizes import micro, spread

    cfg = micro()
    mla = spread(MLA(cfg)).to(device)
    (x,) = _draw(device, torch.float32, (2, 9, cfg.hidden_size))
    cis = GlmMoeDsa(cfg).rope(torch.arange(9)[None]).to(device)
    found = []
    for path in ("triton", "reference"):
        with paths.force(mla_training=path):
            rows = torch.arange(9, device=device).expand(2, -1)
            out, loss, _ = mla(x, cis, attention="dense", rows_br=rows, row_weight_br=torch.ones(2, 9, device=device))
            found.append([out, *torch.autograd.grad(out.square().sum() + loss, list(mla.parameters()))])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * b.abs().max().item())


def launches(dtype):
    from kernels.rope import rope_cis
    from kernels.triton_mla_training import expand_heads, rotate_columns, split_latents

    cis = rope_cis(torch.arange(4)[None], 64, 1e6)  # GLM-5's sizes; 64 heads
    shapes = (2, 4, 2048 + 512 + 64), (2048,), (512,), (2, 4, 64, 256), (2, 4, 64, 192 + 256)
    both, q_norm, kv_norm, q, kv = (t.requires_grad_() for t in _draw("cpu", dtype, *shapes))
    *latents, key = split_latents(both, q_norm, kv_norm, cis, 1e-6)
    parts = [*latents, rotate_columns(q, cis, 192), *expand_heads(kv, key, 192)]
    torch.autograd.backward(parts, [torch.ones_like(p) for p in parts])


test_triton = triton_checks(__name__)
