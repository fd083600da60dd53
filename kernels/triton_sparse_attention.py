"""Triton attention over gathered latent keys in MQA (absorbed) mode, forward and backward (notes A.2, I "SFA").

One program takes one query's heads: it loads its selected latents from the shared cache straight into the block (no gathered copy
in memory), with an online softmax; the log-sum-exp is saved for the backward. A latent is read once for a block of heads.

The gradient of the latents sums over all queries that selected a key. Two ways:
- deterministic (default): each (query, place) writes its contribution to a scratch buffer of one chunk of query rows, and one
  program per key adds the chunk's contributions in query order. Same bits every time; costs a write and a read of the scratch.
- atomic adds: no scratch, but on a GPU the order of the additions, and so the last bits, change from run to run.

Run its tests: `python -m pytest tests/kernels/test_triton_sparse_attention.py`
"""

import torch
import triton
import triton.language as tl

from kernels.triton_common import INTERPRETED, block, dot

SCRATCH_ELEMENTS = 1 << 26  # fp32 contributions of one chunk of query rows: 256 MB
MAX_HEADS = 64  # heads per program


@triton.jit
def _load_part(base, rows, row_in, start, size, stride, BLOCK: tl.constexpr):
    """Columns [start, start + size) of the given rows of a [.., stride] matrix, zero outside."""
    columns = tl.arange(0, BLOCK)
    mask = row_in[:, None] & (columns < size)[None, :]
    return tl.load(base + rows.to(tl.int64)[:, None] * stride + start + columns[None, :], mask=mask, other=0.0)


@triton.jit
def _store_part(base, rows, row_in, start, size, stride, values, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    mask = row_in[:, None] & (columns < size)[None, :]
    tl.store(base + rows.to(tl.int64)[:, None] * stride + start + columns[None, :], values, mask=mask)


@triton.jit
def _load_row(base, rows, row_in, V: tl.constexpr, REST: tl.constexpr, BV: tl.constexpr, BR: tl.constexpr):
    """The value part and the rotary rest of whole rows."""
    return _load_part(base, rows, row_in, 0, V, V + REST, BV), _load_part(base, rows, row_in, V, REST, V + REST, BR)


@triton.jit
def _load_latents(
    kv, index, valid, row, places, width, V: tl.constexpr, REST: tl.constexpr, BV: tl.constexpr, BR: tl.constexpr
):  # fmt: skip
    """(keep, keys, value part, rest) of the latents that query `row` selected at `places`."""
    keep = tl.load(valid + row * width + places, mask=places < width, other=0) != 0
    keys = tl.load(index + row * width + places, mask=keep, other=0)
    kv_v, kv_r = _load_row(kv, keys, keep, V, REST, BV, BR)
    return keep, keys, kv_v, kv_r


@triton.jit
def _load_gradient(dout, lse, delta, at, head_in, V: tl.constexpr, BV: tl.constexpr):
    """(dout, lse, delta) of the heads at `at`."""
    dout_v = _load_part(dout, at, head_in, 0, V, V, BV)
    return dout_v, tl.load(lse + at, mask=head_in, other=0.0), tl.load(delta + at, mask=head_in, other=0.0)


@triton.jit
def _logits(q_v, q_r, kv_v, kv_r, keep, scale, REST: tl.constexpr, WIDEN: tl.constexpr):
    """Scaled logits [heads, keys], -inf where not kept."""
    s = dot(q_v, tl.trans(kv_v), WIDEN)
    if REST > 0:
        s += dot(q_r, tl.trans(kv_r), WIDEN)
    return tl.where(keep[None, :], s * scale, float("-inf"))


@triton.jit
def _forward_kernel(
    q, kv, index, valid, out, lse, scale, n_heads, width, V: tl.constexpr, REST: tl.constexpr,
    H: tl.constexpr, K: tl.constexpr, BV: tl.constexpr, BR: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * H + tl.arange(0, H)
    head_in = heads < n_heads
    at = row * n_heads + heads
    q_v, q_r = _load_row(q, at, head_in, V, REST, BV, BR)
    top_h = tl.full([H], float("-inf"), tl.float32)
    sum_h = tl.zeros([H], tl.float32)
    acc_hv = tl.zeros([H, BV], tl.float32)
    for start in range(0, width, K):
        places = start + tl.arange(0, K)
        keep, _, kv_v, kv_r = _load_latents(kv, index, valid, row, places, width, V, REST, BV, BR)
        s = _logits(q_v, q_r, kv_v, kv_r, keep, scale, REST, WIDEN)
        new_h = tl.maximum(top_h, tl.max(s, 1))
        safe_h = tl.where(new_h == float("-inf"), 0.0, new_h)  # a row whose keys so far are all invalid
        p = tl.exp(s - safe_h[:, None])
        decay_h = tl.exp(top_h - safe_h)
        sum_h = sum_h * decay_h + tl.sum(p, 1)
        acc_hv = acc_hv * decay_h[:, None] + dot(p.to(kv_v.dtype), kv_v, WIDEN)
        top_h = new_h
    some_h = tl.where(sum_h > 0, sum_h, 1.0)
    _store_part(out, at, head_in, 0, V, V, acc_hv / some_h[:, None], BV)
    tl.store(lse + at, tl.where(sum_h > 0, top_h + tl.log(some_h), float("-inf")), mask=head_in)


@triton.jit
def _probs_and_grads(
    q_v, q_r, kv_v, kv_r, dout_v, lse_h, delta_h, keep, head_in, scale, REST: tl.constexpr, WIDEN: tl.constexpr
):  # fmt: skip
    """(p, ds) [heads, keys]: probabilities, and gradients of the unscaled logits times scale."""
    s = _logits(q_v, q_r, kv_v, kv_r, keep, scale, REST, WIDEN)
    inside = keep[None, :] & head_in[:, None]
    p = tl.where(inside, tl.exp(s - lse_h[:, None]), 0.0)
    ds = p * (dot(dout_v, tl.trans(kv_v), WIDEN) - delta_h[:, None]) * scale
    return p, ds


@triton.jit
def _query_grad_kernel(
    q, kv, index, valid, dout, lse, delta, dq, scale, n_heads, width, V: tl.constexpr, REST: tl.constexpr,
    H: tl.constexpr, K: tl.constexpr, BV: tl.constexpr, BR: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * H + tl.arange(0, H)
    head_in = heads < n_heads
    at = row * n_heads + heads
    q_v, q_r = _load_row(q, at, head_in, V, REST, BV, BR)
    dout_v, lse_h, delta_h = _load_gradient(dout, lse, delta, at, head_in, V, BV)
    dq_v, dq_r = tl.zeros([H, BV], tl.float32), tl.zeros([H, BR], tl.float32)
    for start in range(0, width, K):
        places = start + tl.arange(0, K)
        keep, _, kv_v, kv_r = _load_latents(kv, index, valid, row, places, width, V, REST, BV, BR)
        p, ds = _probs_and_grads(q_v, q_r, kv_v, kv_r, dout_v, lse_h, delta_h, keep, head_in, scale, REST, WIDEN)
        dq_v += dot(ds.to(kv_v.dtype), kv_v, WIDEN)
        if REST > 0:
            dq_r += dot(ds.to(kv_v.dtype), kv_r, WIDEN)
    _store_part(dq, at, head_in, 0, V, V + REST, dq_v, BV)
    if REST > 0:
        _store_part(dq, at, head_in, V, REST, V + REST, dq_r, BR)


@triton.jit
def _latent_grad_kernel(
    q, kv, index, valid, dout, lse, delta, target, first, scale, n_heads, width, V: tl.constexpr, REST: tl.constexpr,
    H: tl.constexpr, K: tl.constexpr, BV: tl.constexpr, BR: tl.constexpr, WIDEN: tl.constexpr, ATOMIC: tl.constexpr,
):  # fmt: skip
    """One query's contribution to K of its latents: into target [rows, width, c], or added to target [keys, c]."""
    local = tl.program_id(0).to(tl.int64)
    row = first + local
    places = tl.program_id(1) * K + tl.arange(0, K)
    keep, keys, kv_v, kv_r = _load_latents(kv, index, valid, row, places, width, V, REST, BV, BR)
    dkv_v, dkv_r = tl.zeros([K, BV], tl.float32), tl.zeros([K, BR], tl.float32)
    for head in range(0, n_heads, H):
        heads = head + tl.arange(0, H)
        head_in = heads < n_heads
        at = row * n_heads + heads
        q_v, q_r = _load_row(q, at, head_in, V, REST, BV, BR)
        dout_v, lse_h, delta_h = _load_gradient(dout, lse, delta, at, head_in, V, BV)
        p, ds = _probs_and_grads(q_v, q_r, kv_v, kv_r, dout_v, lse_h, delta_h, keep, head_in, scale, REST, WIDEN)
        ds_kh = tl.trans(ds).to(q_v.dtype)
        dkv_v += dot(ds_kh, q_v, WIDEN) + dot(tl.trans(p).to(dout_v.dtype), dout_v, WIDEN)
        if REST > 0:
            dkv_r += dot(ds_kh, q_r, WIDEN)
    if ATOMIC:
        columns = tl.arange(0, BV)
        tl.atomic_add(
            target + keys[:, None] * (V + REST) + columns[None, :], dkv_v, mask=keep[:, None] & (columns < V)[None, :]
        )
        if REST > 0:
            rest = tl.arange(0, BR)
            tl.atomic_add(
                target + keys[:, None] * (V + REST) + V + rest[None, :],
                dkv_r,
                mask=keep[:, None] & (rest < REST)[None, :],
            )
    else:
        _store_part(target, local * width + places, keep, 0, V, V + REST, dkv_v, BV)
        if REST > 0:
            _store_part(target, local * width + places, keep, V, REST, V + REST, dkv_r, BR)


@triton.jit
def _segment_sum_kernel(scratch, order, bounds, dkv, C: tl.constexpr, BC: tl.constexpr):
    """dkv[key] += the key's contributions, in ascending (query, place)."""
    key = tl.program_id(0).to(tl.int64)
    start, stop = tl.load(bounds + key), tl.load(bounds + key + 1)
    if start == stop:
        return
    columns = tl.arange(0, BC)
    inside = columns < C
    total = tl.load(dkv + key * C + columns, mask=inside, other=0.0)
    for i in range(start, stop):
        entry = tl.load(order + i)
        total += tl.load(scratch + entry * C + columns, mask=inside, other=0.0)
    tl.store(dkv + key * C + columns, total, mask=inside)


def _blocks(heads: int, width: int, value_dim: int, rest: int) -> dict:
    # 16 latents of 576 columns beside q, dout and the accumulators of 64 heads fill a block's shared memory in the backward
    return dict(
        V=value_dim, REST=rest, H=block(heads, most=MAX_HEADS if value_dim <= 256 else 16), K=block(width, most=32),
        BV=block(value_dim), BR=block(max(rest, 1)), WIDEN=INTERPRETED,
    )  # fmt: skip


class _SparseAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q_nhc, kv_mc, index_nk, valid_nk, value_dim, scale, deterministic):
        q, kv = q_nhc.contiguous(), kv_mc.contiguous()
        index, valid = index_nk.contiguous(), valid_nk.contiguous().view(torch.uint8)
        (n, heads, c), width = q.shape, index.shape[1]
        out_nhv = torch.empty(n, heads, value_dim, dtype=q.dtype, device=q.device)
        lse_nh = torch.empty(n, heads, dtype=torch.float32, device=q.device)
        sizes = _blocks(heads, width, value_dim, c - value_dim)
        _forward_kernel[(n, triton.cdiv(heads, sizes["H"]))](
            q, kv, index, valid, out_nhv, lse_nh, scale, heads, width, **sizes
        )
        ctx.save_for_backward(q, kv, index, valid, out_nhv, lse_nh)
        ctx.rest = value_dim, scale, deterministic
        ctx.mark_non_differentiable(lse_nh)
        return out_nhv, lse_nh

    @staticmethod
    def backward(ctx, dout_nhv, _):
        q, kv, index, valid, out, lse = ctx.saved_tensors
        value_dim, scale, deterministic = ctx.rest
        (n, heads, c), (keys, _), width = q.shape, kv.shape, index.shape[1]
        dout = dout_nhv.contiguous()
        delta_nh = (dout.float() * out.float()).sum(-1)
        sizes = _blocks(heads, width, value_dim, c - value_dim)
        given = q, kv, index, valid, dout, lse, delta_nh
        dq = torch.empty_like(q)
        _query_grad_kernel[(n, triton.cdiv(heads, sizes["H"]))](*given, dq, scale, heads, width, **sizes)
        dkv = torch.zeros(keys, c, dtype=torch.float32, device=q.device)
        places = triton.cdiv(width, sizes["K"])
        if not deterministic:
            _latent_grad_kernel[(n, places)](*given, dkv, 0, scale, heads, width, ATOMIC=True, **sizes)
            return dq, dkv.to(kv.dtype), None, None, None, None, None
        rows = max(1, min(n, SCRATCH_ELEMENTS // (width * c)))
        scratch = torch.empty(rows, width, c, dtype=torch.float32, device=q.device)
        every = torch.arange(keys + 1, device=q.device)
        for first in range(0, n, rows):
            count = min(rows, n - first)
            _latent_grad_kernel[(count, places)](*given, scratch, first, scale, heads, width, ATOMIC=False, **sizes)
            chunk = slice(first, first + count)
            key_e = torch.where(valid[chunk] != 0, index[chunk], keys).flatten()  # unused places sort past the last key
            sorted_e, order_e = key_e.sort(stable=True)
            _segment_sum_kernel[(keys,)](scratch, order_e, torch.searchsorted(sorted_e, every), dkv, C=c, BC=block(c))
        return dq, dkv.to(kv.dtype), None, None, None, None, None


def sparse_attention(
    q_nhc: torch.Tensor,
    kv_mc: torch.Tensor,
    index_nk: torch.Tensor,
    valid_nk: torch.Tensor,
    value_dim: int,
    scale: float,
    deterministic: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [N,H,value_dim] in q's dtype, lse fp32 [N,H]) of N queries, each over its k of the M latents.

    q [N,H,c], kv [M,c], index int64 [N,k] into kv, valid bool [N,k]. Differentiable in q and kv, not through lse. A row without a
    valid entry gives zeros. `deterministic` chooses how the latents' gradient is summed (see above).
    """
    return _SparseAttention.apply(q_nhc, kv_mc, index_nk, valid_nk, value_dim, scale, deterministic)
