"""Triton MLA pre-processing for decoding: the thirteen steps of kernels.mlapo in three launches.

1. `_input_kernel`: RMSNorm(x) and the product with W_DQKV; the norm's factor is summed on the way through x, applied at the end.
2. `latent_kernel`, one program per token: split, RMSNorm(q latent), RMSNorm(kv latent), RoPE(k), both cache writes at the slot.
3. `_query_kernel`, one program per token block and head: product with W_UQ, split, RoPE(q), nope part times W_UK.

Rotated pairs are (0,1), (2,3), ...: even and odd columns are two blocks, so that a rotation stays in registers. Training has
launches of its own, with gradients (kernels/triton_mla_training.py); the second one above is the same there.

Run its tests: `python -m pytest tests/kernels/test_triton_mlapo.py`
"""

import torch
import triton
import triton.language as tl

from kernels.triton_common import INTERPRETED, block, dot


@triton.jit
def _input_kernel(
    x, gain, w, out, eps, n_rows, n_columns, WIDTH: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr, K: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    rows, columns = tl.program_id(0) * R + tl.arange(0, R), tl.program_id(1) * C + tl.arange(0, C)
    row_in, column_in = rows < n_rows, columns < n_columns
    acc_rc, squares_r = tl.zeros([R, C], tl.float32), tl.zeros([R], tl.float32)
    for start in range(0, WIDTH, K):
        inner = start + tl.arange(0, K)
        inside = inner < WIDTH
        x_rk = tl.load(x + rows[:, None] * WIDTH + inner[None, :], mask=row_in[:, None] & inside[None, :], other=0.0)
        w_ck = tl.load(
            w + columns[:, None] * WIDTH + inner[None, :], mask=column_in[:, None] & inside[None, :], other=0.0
        )
        gain_k = tl.load(gain + inner, mask=inside, other=0.0)
        wide_rk = x_rk.to(tl.float32)
        squares_r += tl.sum(wide_rk * wide_rk, 1)
        acc_rc += dot((wide_rk * gain_k[None, :].to(tl.float32)).to(x_rk.dtype), tl.trans(w_ck), WIDEN)
    scaled = acc_rc * tl.rsqrt(squares_r / WIDTH + eps)[:, None]
    tl.store(out + rows[:, None] * n_columns + columns[None, :], scaled, mask=row_in[:, None] & column_in[None, :])


@triton.jit
def _norm(x, gain, out, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """RMSNorm of SIZE numbers at x times gain, stored at out."""
    at = tl.arange(0, BLOCK)
    inside = at < SIZE
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    value = value * tl.rsqrt(tl.sum(value * value, 0) / SIZE + eps)
    tl.store(out + at, value * tl.load(gain + at, mask=inside, other=0.0).to(tl.float32), mask=inside)


@triton.jit
def turn(x, at_cis, out, row_in, PAIRS: tl.constexpr, BACK: tl.constexpr, BP: tl.constexpr):
    """RoPE of PAIRS pairs at x, stored at out; BACK turns the other way, as the gradient does."""
    pair = tl.arange(0, BP)
    inside = (pair < PAIRS) & row_in
    even = tl.load(x + 2 * pair, mask=inside, other=0.0).to(tl.float32)
    odd = tl.load(x + 2 * pair + 1, mask=inside, other=0.0).to(tl.float32)
    cos = tl.load(at_cis + 2 * pair, mask=inside, other=0.0)
    sin = tl.load(at_cis + 2 * pair + 1, mask=inside, other=0.0)
    if BACK:
        sin = -sin
    tl.store(out + 2 * pair, even * cos - odd * sin, mask=inside)
    tl.store(out + 2 * pair + 1, even * sin + odd * cos, mask=inside)


@triton.jit
def latent_kernel(
    y, q_gain, kv_gain, cis, slots, q_lat, kv, key, eps, n_columns, n_cis, kv_stride, key_stride,
    Q: tl.constexpr, L: tl.constexpr, ROPE: tl.constexpr, BQ: tl.constexpr, BL: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """Row `slots[row]` (slots None: `row`) of kv and key is written; cis has n_cis rows and repeats."""
    row = tl.program_id(0).to(tl.int64)
    slot = row
    if slots is not None:
        slot = tl.load(slots + row)
    y += row * n_columns
    _norm(y, q_gain, q_lat + row * Q, eps, Q, BQ)
    _norm(y + Q, kv_gain, kv + slot * kv_stride, eps, L, BL)
    turn(y + Q + L, cis + (row % n_cis) * ROPE, key + slot * key_stride, True, ROPE // 2, False, BP)


@triton.jit
def _weight_block(w, rows, row_in, inner, inside, Q: tl.constexpr):
    return tl.load(w + rows[:, None] * Q + inner[None, :], mask=row_in[:, None] & inside[None, :], other=0.0)


@triton.jit
def _query_kernel(
    q_lat, w_q, w_uk, cis, out, n_rows, uk_head, uk_nope, HEADS: tl.constexpr, Q: tl.constexpr, NOPE: tl.constexpr,
    L: tl.constexpr, ROPE: tl.constexpr, R: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr,
    CL: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    rows, head = tl.program_id(0) * R + tl.arange(0, R), tl.program_id(1)
    row_in = rows < n_rows
    nopes, pairs = tl.arange(0, BN), tl.arange(0, BP)
    nope_in, pair_in = nopes < NOPE, pairs < ROPE // 2
    first = head * (NOPE + ROPE)
    nope_rn = tl.zeros([R, BN], tl.float32)
    even_rp, odd_rp = tl.zeros([R, BP], tl.float32), tl.zeros([R, BP], tl.float32)
    for start in range(0, Q, K):
        inner = start + tl.arange(0, K)
        inside = inner < Q
        lat_rk = tl.load(q_lat + rows[:, None] * Q + inner[None, :], mask=row_in[:, None] & inside[None, :], other=0.0)
        nope_rn += dot(lat_rk, tl.trans(_weight_block(w_q, first + nopes, nope_in, inner, inside, Q)), WIDEN)
        even_rp += dot(lat_rk, tl.trans(_weight_block(w_q, first + NOPE + 2 * pairs, pair_in, inner, inside, Q)), WIDEN)
        odd_rp += dot(
            lat_rk, tl.trans(_weight_block(w_q, first + NOPE + 2 * pairs + 1, pair_in, inner, inside, Q)), WIDEN
        )
    base = out + (rows[:, None].to(tl.int64) * HEADS + head) * (L + ROPE)
    both = row_in[:, None] & pair_in[None, :]
    cos = tl.load(cis + rows[:, None] * ROPE + 2 * pairs[None, :], mask=both, other=0.0)
    sin = tl.load(cis + rows[:, None] * ROPE + 2 * pairs[None, :] + 1, mask=both, other=0.0)
    tl.store(base + L + 2 * pairs[None, :], even_rp * cos - odd_rp * sin, mask=both)
    tl.store(base + L + 2 * pairs[None, :] + 1, even_rp * sin + odd_rp * cos, mask=both)
    for start in range(0, L, CL):
        columns = start + tl.arange(0, CL)
        column_in = columns < L
        uk_nc = tl.load(
            w_uk + head * uk_head + nopes[:, None] * uk_nope + columns[None, :],
            mask=nope_in[:, None] & column_in[None, :],
            other=0.0,
        )
        absorbed_rc = dot(nope_rn.to(uk_nc.dtype), uk_nc, WIDEN)
        tl.store(base + columns[None, :], absorbed_rc, mask=row_in[:, None] & column_in[None, :])


def mla_preprocess(x_nh, w, cis_nr, cache_mc, slot_n):
    """kernels.mlapo.mla_preprocess on contiguous tensors; w_uk may be a view with contiguous latents."""
    q_lora, latent, nope, rope, heads = w.sizes
    x, (n, width), columns = x_nh.contiguous(), x_nh.shape, len(w.w_in)
    assert w.w_uk.stride(2) == 1 and cache_mc.is_contiguous()
    y_ny = torch.empty(n, columns, dtype=x.dtype, device=x.device)
    q_lat_nq = torch.empty(n, q_lora, dtype=x.dtype, device=x.device)
    q_nhc = torch.empty(n, heads, latent + rope, dtype=x.dtype, device=x.device)
    cis = torch.view_as_real(cis_nr.contiguous())
    rows, inner, pairs = block(n, most=64), 64, block(rope // 2)
    _input_kernel[(triton.cdiv(n, rows), triton.cdiv(columns, 64))](
        x, w.input_norm, w.w_in, y_ny, w.input_eps, n, columns, WIDTH=width, R=rows, C=64, K=inner, WIDEN=INTERPRETED
    )
    latent_kernel[(n,)](
        y_ny, w.q_norm, w.kv_norm, cis, slot_n, q_lat_nq, cache_mc, cache_mc[:, latent:], w.latent_eps, columns, n,
        latent + rope, latent + rope, Q=q_lora, L=latent, ROPE=rope, BQ=block(q_lora), BL=block(latent), BP=pairs,
    )  # fmt: skip
    _query_kernel[(triton.cdiv(n, rows), heads)](
        q_lat_nq, w.w_q, w.w_uk, cis, q_nhc, n, w.w_uk.stride(0), w.w_uk.stride(1), HEADS=heads, Q=q_lora, NOPE=nope,
        L=latent, ROPE=rope, R=rows, K=inner, BN=block(nope), BP=pairs, CL=block(latent, most=64), WIDEN=INTERPRETED,
    )  # fmt: skip
    return q_nhc, q_lat_nq, y_ny[:, q_lora + latent + rope :]
