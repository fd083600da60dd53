"""MLA pre-processing as one operator (paper section 5 "MLAPO"; notes I): what happens between a layer's input and its attention.

Decoding, `mla_preprocess`: RMSNorm(x); product with W_DQKV; split; RMSNorm(q latent); product with W_UQ; split nope/rope; q_nope
times W_UK (absorbed); RoPE(q); RMSNorm(kv latent); RoPE(k); cache writes of latent and rope part at the tokens' slots. W_DQKV is
one matrix (q_a, kv_a, then whatever else reads the same input: the indexer's key and head weights).

Training in MHA mode, the same steps without cache or absorption, around the model's own matrix products (so that deferred weight
gradients and hooks on them keep working): `split_latents`, `rotate_columns`, `expand_heads`, each one pass forward and one
backward where slices, concatenations and autograd's zero-filled slice gradients took several. They share the path `mla_training`.

Run its tests: `python -m pytest tests/kernels/test_mlapo.py`        measure: `python -m tests.bench.mlapo`
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from kernels import paths
from kernels.norms import rms_norm, rms_norm_reference
from kernels.rope import apply_rope

FAST = (torch.float32, torch.float64)  # lower precisions keep the reference's order of roundings


@dataclass(frozen=True)
class PreprocessWeights:
    """Weights of mla_preprocess. Sizes: hid input, Q q latent, L kv latent, r rope, n nope, H heads, X extra columns."""

    input_norm: torch.Tensor  # [hid]
    w_in: torch.Tensor  # [Q + L + r + X, hid]: q_a, kv_a_with_mqa, extra
    q_norm: torch.Tensor  # [Q]
    w_q: torch.Tensor  # [H * (n + r), Q], per head nope then rope
    w_uk: torch.Tensor  # [H, n, L]
    kv_norm: torch.Tensor  # [L]
    input_eps: float
    latent_eps: float

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """(Q, L, n, r, H)."""
        (heads, nope, latent), q_lora = self.w_uk.shape, self.w_q.shape[1]
        return q_lora, latent, nope, self.w_q.shape[0] // heads - nope, heads


def mla_preprocess_reference(x_nh, w: PreprocessWeights, cis_nr, cache_mc, slot_n):
    """The thirteen steps one after the other, as mla_preprocess returns them."""
    q_lora, latent, nope, rope, heads = w.sizes
    h_nh = rms_norm_reference(x_nh, w.input_norm, w.input_eps)
    q_a, kv_a, rope_k, extra_nx = F.linear(h_nh, w.w_in).split(
        [q_lora, latent, rope, len(w.w_in) - q_lora - latent - rope], dim=-1
    )
    q_lat_nq = rms_norm_reference(q_a, w.q_norm, w.latent_eps)
    q_nhd = F.linear(q_lat_nq, w.w_q).view(-1, heads, nope + rope)
    q_abs_nhl = torch.einsum("nhd,hdl->nhl", q_nhd[..., :nope], w.w_uk)
    q_nhc = torch.cat([q_abs_nhl, apply_rope(q_nhd[..., nope:], cis_nr)], dim=-1)
    kv_nc = torch.cat([rms_norm_reference(kv_a, w.kv_norm, w.latent_eps), apply_rope(rope_k, cis_nr)], dim=-1)
    cache_mc[slot_n] = kv_nc
    return q_nhc, q_lat_nq, extra_nx


def _complex(x_xr: torch.Tensor) -> torch.Tensor:
    return torch.view_as_complex(x_xr.unflatten(-1, (-1, 2)))


def _rotate_(x_xr: torch.Tensor, cis_xr: torch.Tensor) -> None:
    """RoPE in place on interleaved pairs of a view whose last dimension is contiguous."""
    _complex(x_xr).mul_(cis_xr.to(torch.complex128) if x_xr.dtype == torch.float64 else cis_xr)


def _inverse_rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()


def _preprocess_cpu(x_nh, w: PreprocessWeights, cis_nr, cache_mc, slot_n):
    """In place wherever a buffer is ours: fewer passes and fewer calls, which is what a small batch's time goes into."""
    q_lora, latent, nope, rope, heads = w.sizes
    y_ny = F.linear(rms_norm(x_nh, w.input_norm, w.input_eps), w.w_in)
    q_lat_nq = rms_norm(y_ny[:, :q_lora], w.q_norm, w.latent_eps)
    q_nhd = F.linear(q_lat_nq, w.w_q).view(-1, heads, nope + rope)
    q_nhc = torch.empty(len(x_nh), heads, latent + rope, dtype=x_nh.dtype, device=x_nh.device)
    q_nhc[..., :latent] = torch.bmm(q_nhd[..., :nope].transpose(0, 1), w.w_uk).transpose(0, 1)
    kv_nc = y_ny[:, q_lora : q_lora + latent + rope]
    kv_a = kv_nc[:, :latent]
    kv_a.mul_(_inverse_rms(kv_a, w.latent_eps)).mul_(w.kv_norm)
    if x_nh.dtype == torch.float64:
        cis_nr = cis_nr.to(torch.complex128)
    if (nope | latent | q_lora | y_ny.shape[1]) % 2:  # pairs of these views do not start at even addresses
        q_nhc[..., latent:] = apply_rope(q_nhd[..., nope:], cis_nr)
        kv_nc[:, latent:] = apply_rope(kv_nc[:, latent:], cis_nr)
    else:
        torch.mul(_complex(q_nhd[..., nope:]), cis_nr[:, None], out=_complex(q_nhc[..., latent:]))
        _complex(kv_nc[:, latent:]).mul_(cis_nr)
    cache_mc.index_copy_(0, slot_n, kv_nc)
    return q_nhc, q_lat_nq, y_ny[:, q_lora + latent + rope :]


def mla_preprocess(
    x_nh: torch.Tensor, w: PreprocessWeights, cis_nr: torch.Tensor, cache_mc: torch.Tensor, slot_n: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(absorbed rotated queries [N,H,L+r], normalised q latent [N,Q], extra columns [N,X]); the cache's rows slot_n are written.

    x [N,hid] is the layer's input before its norm; cis complex64 [N,r/2]; cache [M,L+r] (normalised latent, then rotated key);
    slot int64 [N], each slot once. No gradient. ValueError when the cache's rows have another width.
    """
    if torch.is_grad_enabled():
        with torch.no_grad():
            return mla_preprocess(x_nh, w, cis_nr, cache_mc, slot_n)
    if cache_mc.dim() != 2 or cache_mc.shape[1] != w.sizes[1] + w.sizes[3]:
        raise ValueError(f"cache {tuple(cache_mc.shape)} must be [slots, {w.sizes[1]} + {w.sizes[3]}] (latent, rope)")
    path = paths.choose("mla_preprocess", x_nh.device, x_nh.dtype)
    if path == "triton":
        from kernels.triton_mlapo import mla_preprocess as fused

        return fused(x_nh, w, cis_nr, cache_mc, slot_n)
    if path == "reference" or x_nh.dtype not in FAST:
        return mla_preprocess_reference(x_nh, w, cis_nr, cache_mc, slot_n)
    return _preprocess_cpu(x_nh, w, cis_nr, cache_mc, slot_n)


# ---- training form


def _training_path(x: torch.Tensor, fits: bool) -> str:
    """The path of a training piece; what does not fit the fused forms, and low precision on "cpu", takes the reference."""
    path = paths.choose("mla_training", x.device, x.dtype)
    return path if fits and (path == "triton" or x.dtype in FAST) else "reference"


def _normalise(x, eps):
    inv = _inverse_rms(x, eps)
    return x * inv, inv


def _norm_backward(dy, xhat, inv, weight, out) -> torch.Tensor:
    """Gradient of xhat * weight with respect to x into `out`; returns that of the weight."""
    prod = dy * xhat
    mean = (prod @ weight).div_(xhat.shape[-1]).unsqueeze(-1)
    torch.mul((dy * weight).addcmul_(xhat, mean, value=-1.0), inv, out=out)
    return prod.flatten(0, -2).sum(0)


class _SplitLatents(torch.autograd.Function):
    @staticmethod
    def forward(ctx, both_bsy, q_norm_q, kv_norm_l, cis_bsr, eps):
        q_lora, latent = len(q_norm_q), len(kv_norm_l)
        q_hat, q_inv = _normalise(both_bsy[..., :q_lora], eps)
        kv_hat, kv_inv = _normalise(both_bsy[..., q_lora : q_lora + latent], eps)
        # A copy even of one row, which contiguous() would hand back as it is: part of the input, at an odd place perhaps.
        k_rope = both_bsy[..., q_lora + latent :].clone(memory_format=torch.contiguous_format)
        _rotate_(k_rope, cis_bsr)
        ctx.save_for_backward(q_hat, q_inv, kv_hat, kv_inv, q_norm_q, kv_norm_l, cis_bsr)
        return q_hat * q_norm_q, kv_hat * kv_norm_l, k_rope

    @staticmethod
    def backward(ctx, dq, dkv, dk_rope):
        q_hat, q_inv, kv_hat, kv_inv, q_norm_q, kv_norm_l, cis_bsr = ctx.saved_tensors
        q_lora, latent = len(q_norm_q), len(kv_norm_l)
        dboth = torch.empty(*dq.shape[:-1], q_lora + latent + dk_rope.shape[-1], dtype=dq.dtype, device=dq.device)
        dq_norm = _norm_backward(dq, q_hat, q_inv, q_norm_q, dboth[..., :q_lora])
        dkv_norm = _norm_backward(dkv, kv_hat, kv_inv, kv_norm_l, dboth[..., q_lora : q_lora + latent])
        dk_rope = dk_rope.clone(memory_format=torch.contiguous_format)
        _rotate_(dk_rope, cis_bsr.conj())
        dboth[..., q_lora + latent :] = dk_rope
        return dboth, dq_norm, dkv_norm, None, None


def split_latents(both_bsy, q_norm_q, kv_norm_l, cis_bsr, eps: float):
    """(c_q [B,S,Q] normalised, c_kv [B,S,L] normalised, k_rope [B,S,r] rotated) from x @ W_DQKV [B,S,Q+L+r]. Differentiable."""
    path = _training_path(both_bsy, q_norm_q.dtype == both_bsy.dtype)
    if path == "triton":
        from kernels.triton_mla_training import split_latents as fused

        return fused(both_bsy, q_norm_q, kv_norm_l, cis_bsr, eps)
    if path == "cpu":
        return _SplitLatents.apply(both_bsy, q_norm_q, kv_norm_l, cis_bsr, eps)
    q_lora, latent = len(q_norm_q), len(kv_norm_l)
    q, kv, rope = both_bsy.split([q_lora, latent, both_bsy.shape[-1] - q_lora - latent], dim=-1)
    return (
        rms_norm_reference(q, q_norm_q, eps),
        rms_norm_reference(kv, kv_norm_l, eps),
        apply_rope(rope, cis_bsr),
    )


class _RotateColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_bshd, cis_bs1r, start, by_heads):
        ctx.save_for_backward(cis_bs1r)
        ctx.columns = slice(start, start + 2 * cis_bs1r.shape[-1])
        source = x_bshd.transpose(1, 2) if by_heads else x_bshd
        out = source.clone(memory_format=torch.contiguous_format)
        out = out.transpose(1, 2) if by_heads else out
        _rotate_(out[..., ctx.columns], cis_bs1r)
        return out

    @staticmethod
    def backward(ctx, dout_bshd):
        (cis_bs1r,) = ctx.saved_tensors
        dx = dout_bshd.clone(memory_format=torch.contiguous_format)
        _rotate_(dx[..., ctx.columns], cis_bs1r.conj())
        return dx, None, None, None


def rotate_columns(x_bshd: torch.Tensor, cis_bsr: torch.Tensor, start: int, by_heads: bool = False) -> torch.Tensor:
    """x [B,S,H,d] (or [B,S,d]) with columns [start, start + 2 r) of every head rotated, the others kept. Differentiable.

    by_heads: the result of [B,S,H,d] may lie in memory as [B,H,S,d], which attention's products prefer.
    """
    stop = start + 2 * cis_bsr.shape[-1]
    path = _training_path(x_bshd, start % 2 == 0 and x_bshd.shape[-1] % 2 == 0)
    if path == "triton":
        from kernels.triton_mla_training import rotate_columns as fused

        return fused(x_bshd, cis_bsr, start)
    if path == "cpu":
        cis = cis_bsr if x_bshd.dim() == cis_bsr.dim() else cis_bsr.unsqueeze(-2)
        if torch.is_grad_enabled() and x_bshd.requires_grad:
            return _RotateColumns.apply(x_bshd, cis, start, by_heads)
        out = x_bshd.clone(memory_format=torch.contiguous_format)
        _rotate_(out[..., start:stop], cis)
        return out
    return torch.cat([x_bshd[..., :start], apply_rope(x_bshd[..., start:stop], cis_bsr), x_bshd[..., stop:]], dim=-1)


class _ExpandHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, kv_bthe, k_rope_btr, nope):
        ctx.nope = nope
        batch, size, heads, both = kv_bthe.shape
        # Stored by heads, [B,H,T,d]: attention's products run over batch and heads at once.
        k = kv_bthe.new_empty(batch, heads, size, nope + k_rope_btr.shape[-1]).transpose(1, 2)
        k[..., :nope] = kv_bthe[..., :nope]
        k[..., nope:] = k_rope_btr.unsqueeze(-2)
        v = kv_bthe.new_empty(batch, heads, size, both - nope).transpose(1, 2)
        return k, v.copy_(kv_bthe[..., nope:])

    @staticmethod
    def backward(ctx, dk, dv):
        dkv = dk.new_empty(*dk.shape[:-1], ctx.nope + dv.shape[-1])
        dkv[..., : ctx.nope], dkv[..., ctx.nope :] = dk[..., : ctx.nope], dv
        return dkv, dk[..., ctx.nope :].sum(-2), None


def expand_heads(kv_bthe: torch.Tensor, k_rope_btr: torch.Tensor, nope: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(k [B,T,H,nope+r], v [B,T,H,v]) from c_kv @ W_UKV [B,T,H,nope+v] and the rotated key of all heads. Differentiable.

    Both lie in memory by heads, [B,H,T,.]: their transposed views are contiguous.
    """
    path = paths.choose("mla_training", kv_bthe.device, kv_bthe.dtype)
    if path == "triton":
        from kernels.triton_mla_training import expand_heads as fused

        return fused(kv_bthe, k_rope_btr, nope)
    if path == "reference":
        key_bthr = k_rope_btr.unsqueeze(-2).expand(*kv_bthe.shape[:-1], -1)
        return torch.cat([kv_bthe[..., :nope], key_bthr], dim=-1), kv_bthe[..., nope:]
    return _ExpandHeads.apply(kv_bthe, k_rope_btr, nope)
