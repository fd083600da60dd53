"""Triton MLA pre-processing for training: kernels.mlapo's three pieces between the matrix products, forward and backward.

- `split_latents`: both latents' RMSNorm and the key's RoPE. The backward reads the product again instead of saved normalised
  latents; each program sums the gains' gradients over its rows, and the programs' sums are added in their order: same bits every
  time.
- `rotate_columns`: RoPE of some columns of every head, the others copied; its backward turns the other way.
- `expand_heads`: keys and values of every head; its backward sums the shared rotary key over the heads.

Each is one launch a direction. Gradients may come with any strides (attention hands them back with heads before tokens), all sums
are fp32. The products are not fused: their weight gradients can be deferred (kernels/deferred.py), and large ones gain nothing.

Run its tests: `python -m pytest tests/kernels/test_triton_mla_training.py`
"""

import torch
import triton
import triton.language as tl

from kernels.triton_common import block
from kernels.triton_mlapo import latent_kernel, turn

PROGRAMS = 512  # of split_latents' backward: each keeps one row of partial sums for the gains
TILE = 4096  # elements that a program of the other kernels holds


# ---- split_latents


@triton.jit
def _norm_gradient(x, gain, dout, dx, row_in, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Store the gradient of RMSNorm at dx; return that of the gain, fp32 [BLOCK]."""
    at = tl.arange(0, BLOCK)
    inside = (at < SIZE) & row_in
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(dout + at, mask=inside, other=0.0).to(tl.float32)
    inv = tl.rsqrt(tl.sum(value * value, 0) / SIZE + eps)
    hat = value * inv
    dhat = up * tl.load(gain + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(dx + at, (dhat - hat * (tl.sum(dhat * hat, 0) / SIZE)) * inv, mask=inside)
    return up * hat


@triton.jit
def _latent_backward_kernel(
    y, q_gain, kv_gain, cis, dq, dkv, dkey, dy, dgain, eps, n_rows, n_each, n_cis,
    Q: tl.constexpr, L: tl.constexpr, ROPE: tl.constexpr, BQ: tl.constexpr, BL: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    q_sum, kv_sum = tl.zeros([BQ], tl.float32), tl.zeros([BL], tl.float32)
    for i in range(0, n_each):
        row = program * n_each + i
        row_in = row < n_rows
        at = row * (Q + L + ROPE)
        q_sum += _norm_gradient(y + at, q_gain, dq + row * Q, dy + at, row_in, eps, Q, BQ)
        kv_sum += _norm_gradient(y + at + Q, kv_gain, dkv + row * L, dy + at + Q, row_in, eps, L, BL)
        turn(dkey + row * ROPE, cis + (row % n_cis) * ROPE, dy + at + Q + L, row_in, ROPE // 2, True, BP)
    at_q, at_kv = tl.arange(0, BQ), tl.arange(0, BL)
    tl.store(dgain + program * (Q + L) + at_q, q_sum, mask=at_q < Q)
    tl.store(dgain + program * (Q + L) + Q + at_kv, kv_sum, mask=at_kv < L)


class _SplitLatents(torch.autograd.Function):
    @staticmethod
    def forward(ctx, both_bsy, q_norm_q, kv_norm_l, cis_xr2, eps):
        q_lora, latent = len(q_norm_q), len(kv_norm_l)
        lead, columns, rope = both_bsy.shape[:-1], both_bsy.shape[-1], both_bsy.shape[-1] - q_lora - latent
        both_bsy = both_bsy.contiguous()
        out = [both_bsy.new_empty(*lead, size) for size in (q_lora, latent, rope)]
        ctx.save_for_backward(both_bsy, q_norm_q, kv_norm_l, cis_xr2)
        ctx.eps = eps
        ctx.sizes = dict(Q=q_lora, L=latent, ROPE=rope, BQ=block(q_lora), BL=block(latent), BP=block(rope // 2))
        if lead.numel():
            latent_kernel[(lead.numel(),)](
                both_bsy,
                q_norm_q,
                kv_norm_l,
                cis_xr2,
                None,
                *out,
                eps,
                columns,
                len(cis_xr2),
                latent,
                rope,
                **ctx.sizes,
            )
        return tuple(out)

    @staticmethod
    def backward(ctx, *grads):
        both_bsy, q_norm_q, kv_norm_l, cis_xr2 = ctx.saved_tensors
        q_lora, latent, rows = len(q_norm_q), len(kv_norm_l), both_bsy.shape[:-1].numel()
        each = max(1, triton.cdiv(rows, PROGRAMS))
        programs = triton.cdiv(rows, each)
        dboth_bsy = torch.empty_like(both_bsy)
        dgain = torch.empty(programs, q_lora + latent, dtype=torch.float32, device=both_bsy.device)
        if rows:
            _latent_backward_kernel[(programs,)](
                both_bsy, q_norm_q, kv_norm_l, cis_xr2, *(g.contiguous() for g in grads), dboth_bsy, dgain, ctx.eps, rows,
                each, len(cis_xr2), **ctx.sizes,
            )  # fmt: skip
        dq_norm, dkv_norm = dgain.sum(0).to(q_norm_q.dtype).split([q_lora, latent])
        return dboth_bsy, dq_norm, dkv_norm, None, None


def _cis_rows(cis, lead) -> torch.Tensor:
    """fp32 [X, r, 2] for tokens of shape `lead`; X rows that repeat where one row of positions serves the whole batch."""
    if cis.shape[:-1] != lead and (cis.shape[0] != 1 or cis.shape[1:-1] != lead[1:]):
        cis = cis.expand(*lead, -1)
    return torch.view_as_real(cis.reshape(-1, cis.shape[-1]).contiguous())


def split_latents(both_bsy, q_norm_q, kv_norm_l, cis_bsr, eps: float):
    """kernels.mlapo.split_latents."""
    return _SplitLatents.apply(both_bsy, q_norm_q, kv_norm_l, _cis_rows(cis_bsr, both_bsy.shape[:-1]), eps)


# ---- rotate_columns


@triton.jit
def _rotate_kernel(
    x, cis, out, n_rows, n_heads, n_tokens, n_cis, batch_stride, token_stride, head_stride, HALF: tl.constexpr,
    FIRST: tl.constexpr, PAIRS: tl.constexpr, BACK: tl.constexpr, R: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """A row is one head of one token: HALF pairs, of which [FIRST, FIRST + PAIRS) are turned. x has strides, out has none."""
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    token, head = row // n_heads, row % n_heads
    pair = tl.arange(0, BH)
    inside = (row < n_rows)[:, None] & (pair < HALF)[None, :]
    turned = inside & ((pair >= FIRST) & (pair < FIRST + PAIRS))[None, :]
    at_row = (token // n_tokens) * batch_stride + (token % n_tokens) * token_stride + head * head_stride
    at = x + at_row[:, None] + 2 * pair[None, :]
    even = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    odd = tl.load(at + 1, mask=inside, other=0.0).to(tl.float32)
    at = cis + (token % n_cis)[:, None] * (2 * PAIRS) + 2 * (pair - FIRST)[None, :]
    cos = tl.load(at, mask=turned, other=1.0)
    sin = tl.load(at + 1, mask=turned, other=0.0)
    if BACK:
        sin = -sin
    at = out + row[:, None] * (2 * HALF) + 2 * pair[None, :]
    tl.store(at, even * cos - odd * sin, mask=inside)
    tl.store(at + 1, even * sin + odd * cos, mask=inside)


def _dense_columns(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _rotate(x_bshd, cis_xr2, start, back):
    x_bshd = _dense_columns(x_bshd)
    batch, tokens, heads, width = x_bshd.shape
    rows, half = batch * tokens * heads, width // 2
    out = torch.empty(x_bshd.shape, dtype=x_bshd.dtype, device=x_bshd.device)
    per = max(1, min(32, TILE // block(half)))
    if rows:
        _rotate_kernel[(triton.cdiv(rows, per),)](
            x_bshd, cis_xr2, out, rows, heads, tokens, len(cis_xr2), *x_bshd.stride()[:3], HALF=half, FIRST=start // 2,
            PAIRS=cis_xr2.shape[1], BACK=back, R=per, BH=block(half),
        )  # fmt: skip
    return out


class _RotateColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_bshd, cis_xr2, start):
        ctx.save_for_backward(cis_xr2)
        ctx.start = start
        return _rotate(x_bshd, cis_xr2, start, False)

    @staticmethod
    def backward(ctx, dout_bshd):
        return _rotate(dout_bshd, *ctx.saved_tensors, ctx.start, True), None, None


def rotate_columns(x_bshd, cis_bsr, start: int):
    """kernels.mlapo.rotate_columns, for an even start and width."""
    heads = x_bshd if x_bshd.dim() > cis_bsr.dim() else x_bshd.unsqueeze(-2)
    lead = heads.shape[:-2]
    if len(lead) != 2:
        heads = heads.reshape(1, lead.numel(), *heads.shape[-2:])
    return _RotateColumns.apply(heads, _cis_rows(cis_bsr, lead), start).view(x_bshd.shape)


# ---- expand_heads


@triton.jit
def _expand_kernel(
    kv, key, k, v, n_heads, NOPE: tl.constexpr, ROPE: tl.constexpr, V: tl.constexpr, H: tl.constexpr, BN: tl.constexpr,
    BR: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """One token and H of its heads; everything is contiguous."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * H + tl.arange(0, H)
    nope, rope, value = tl.arange(0, BN), tl.arange(0, BR), tl.arange(0, BV)
    in_nope, in_rope, in_value = nope < NOPE, rope < ROPE, value < V
    head_in = (head < n_heads)[:, None]
    row = (token * n_heads + head)[:, None]
    mask = head_in & in_nope[None, :]
    tl.store(
        k + row * (NOPE + ROPE) + nope[None, :], tl.load(kv + row * (NOPE + V) + nope[None, :], mask=mask), mask=mask
    )
    mask = head_in & in_value[None, :]
    tl.store(v + row * V + value[None, :], tl.load(kv + row * (NOPE + V) + NOPE + value[None, :], mask=mask), mask=mask)
    shared = tl.load(key + token * ROPE + rope, mask=in_rope, other=0.0)
    mask = head_in & in_rope[None, :]
    tl.store(k + row * (NOPE + ROPE) + NOPE + rope[None, :], tl.broadcast_to(shared[None, :], [H, BR]), mask=mask)


@triton.jit
def _expand_backward_kernel(
    dk, dv, dkv, dkey, n_heads, n_tokens, k_batch, k_token, k_head, v_batch, v_token, v_head, NOPE: tl.constexpr,
    ROPE: tl.constexpr, V: tl.constexpr, H: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """One token, all its heads in turn; dk and dv have strides."""
    token = tl.program_id(0).to(tl.int64)
    batch, place = token // n_tokens, token % n_tokens
    dk += batch * k_batch + place * k_token
    dv += batch * v_batch + place * v_token
    nope, rope, value = tl.arange(0, BN), tl.arange(0, BR), tl.arange(0, BV)
    in_nope, in_rope, in_value = nope < NOPE, rope < ROPE, value < V
    sum_r = tl.zeros([BR], tl.float32)
    for start in range(0, n_heads, H):
        head = (start + tl.arange(0, H)).to(tl.int64)
        head_in = (head < n_heads)[:, None]
        row = (token * n_heads + head)[:, None]
        mask = head_in & in_nope[None, :]
        tile = tl.load(dk + head[:, None] * k_head + nope[None, :], mask=mask)
        tl.store(dkv + row * (NOPE + V) + nope[None, :], tile, mask=mask)
        mask = head_in & in_value[None, :]
        tile = tl.load(dv + head[:, None] * v_head + value[None, :], mask=mask)
        tl.store(dkv + row * (NOPE + V) + NOPE + value[None, :], tile, mask=mask)
        mask = head_in & in_rope[None, :]
        tile = tl.load(dk + head[:, None] * k_head + NOPE + rope[None, :], mask=mask, other=0.0)
        sum_r += tl.sum(tile.to(tl.float32), 0)
    tl.store(dkey + token * ROPE + rope, sum_r, mask=in_rope)


class _ExpandHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, kv_bthe, key_btr, nope):
        kv_bthe, key_btr = kv_bthe.contiguous(), key_btr.contiguous()
        *lead, heads, both = kv_bthe.shape
        rope, value = key_btr.shape[-1], both - nope
        ctx.sizes = dict(NOPE=nope, ROPE=rope, V=value, BN=block(nope), BR=block(rope), BV=block(value))
        ctx.sizes["H"] = max(1, min(triton.next_power_of_2(heads), TILE // max(ctx.sizes["BN"], ctx.sizes["BV"])))
        k_bthd, v_bthv = kv_bthe.new_empty(*lead, heads, nope + rope), kv_bthe.new_empty(*lead, heads, value)
        grid = key_btr.shape[:-1].numel(), triton.cdiv(heads, ctx.sizes["H"])
        if grid[0]:
            _expand_kernel[grid](kv_bthe, key_btr, k_bthd, v_bthv, heads, **ctx.sizes)
        return k_bthd, v_bthv

    @staticmethod
    def backward(ctx, dk_bthd, dv_bthv):
        dk_bthd, dv_bthv = _dense_columns(dk_bthd), _dense_columns(dv_bthv)
        batch, tokens, heads, _ = dk_bthd.shape
        nope, rope, value = (ctx.sizes[name] for name in ("NOPE", "ROPE", "V"))
        dkv_bthe = torch.empty(batch, tokens, heads, nope + value, dtype=dk_bthd.dtype, device=dk_bthd.device)
        dkey_btr = torch.empty(batch, tokens, rope, dtype=dk_bthd.dtype, device=dk_bthd.device)
        if batch * tokens:
            _expand_backward_kernel[(batch * tokens,)](
                dk_bthd,
                dv_bthv,
                dkv_bthe,
                dkey_btr,
                heads,
                tokens,
                *dk_bthd.stride()[:3],
                *dv_bthv.stride()[:3],
                **ctx.sizes,
            )
        return dkv_bthe, dkey_btr, None


def expand_heads(kv_bthe, k_rope_btr, nope: int):
    """kernels.mlapo.expand_heads."""
    return _ExpandHeads.apply(kv_bthe, k_rope_btr, nope)
