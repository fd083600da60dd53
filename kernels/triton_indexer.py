"""Triton lightning indexer (notes B.1, B.5): scores with backward, and causal top-k selection in row chunks.

Neither [S, S] nor [S, n_I, S] exists: scores of one chunk of query rows are written, selected from, and overwritten.
Selection is a radix search for the k-th largest score on the scores' ordered bits, then one pass that writes indices in ascending
order: everything above the threshold, and equal scores from the lowest index on until k are found. No atomics: deterministic.

Run its tests: `python -m pytest tests/kernels/test_triton_indexer.py`
"""

import torch
import triton
import triton.language as tl

from kernels.triton_common import INTERPRETED, block, dot

SCORE_ELEMENTS = 1 << 24  # scores of one row chunk: 64 MB
LEAST_ROWS = 64  # of a chunk
BLOCK_ROWS, BLOCK_KEYS = 32, 64


@triton.jit
def _load_head(q, w, head, rows, row_in, dims, dim_in, HEADS: tl.constexpr, D: tl.constexpr):
    """Queries [R, D] and weights [R] of one head; q and w point at a batch element."""
    q_rd = tl.load(
        q + (rows[:, None] * HEADS + head) * D + dims[None, :], mask=row_in[:, None] & dim_in[None, :], other=0.0
    )
    return q_rd, tl.load(w + rows * HEADS + head, mask=row_in, other=0.0)


@triton.jit
def _scores_kernel(
    q, k, w, out, first, n_rows, n_keys, k_batch, HEADS: tl.constexpr, D: tl.constexpr, CAUSAL: tl.constexpr,
    R: tl.constexpr, T: tl.constexpr, BD: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    key_block, row_block, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    if CAUSAL and key_block * T > first + row_block * R + R - 1:
        return  # no query of the block sees these keys
    rows, keys, dims = row_block * R + tl.arange(0, R), key_block * T + tl.arange(0, T), tl.arange(0, BD)
    row_in, key_in, dim_in = rows < n_rows, keys < n_keys, dims < D
    q, w, out = q + batch * n_rows * HEADS * D, w + batch * n_rows * HEADS, out + batch * n_rows * n_keys
    k_dt = tl.load(
        k + batch * k_batch + keys[None, :] * D + dims[:, None], mask=key_in[None, :] & dim_in[:, None], other=0.0
    )
    total_rt = tl.zeros([R, T], tl.float32)
    for head in range(HEADS):
        q_rd, w_r = _load_head(q, w, head, rows, row_in, dims, dim_in, HEADS, D)
        total_rt += tl.maximum(dot(q_rd, k_dt, WIDEN), 0.0) * w_r[:, None].to(tl.float32)
    tl.store(out + rows[:, None].to(tl.int64) * n_keys + keys[None, :], total_rt, row_in[:, None] & key_in[None, :])


@triton.jit
def _query_grad_kernel(
    q, k, w, dout, dq, dw, n_rows, n_keys, HEADS: tl.constexpr, D: tl.constexpr,
    R: tl.constexpr, T: tl.constexpr, BD: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """dq and dw of one head and row block, over all keys."""
    row_block, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    rows, dims = row_block * R + tl.arange(0, R), tl.arange(0, BD)
    row_in, dim_in = rows < n_rows, dims < D
    q, w, dout = q + batch * n_rows * HEADS * D, w + batch * n_rows * HEADS, dout + batch * n_rows * n_keys
    q_rd, w_r = _load_head(q, w, head, rows, row_in, dims, dim_in, HEADS, D)
    dq_rd, dw_r = tl.zeros([R, BD], tl.float32), tl.zeros([R], tl.float32)
    for start in range(0, n_keys, T):
        keys = start + tl.arange(0, T)
        key_in = keys < n_keys
        k_td = tl.load(
            k + batch * n_keys * D + keys[:, None] * D + dims[None, :],
            mask=key_in[:, None] & dim_in[None, :],
            other=0.0,
        )
        up_rt = tl.load(
            dout + rows[:, None].to(tl.int64) * n_keys + keys[None, :],
            mask=row_in[:, None] & key_in[None, :],
            other=0.0,
        )
        dots_rt = tl.maximum(dot(q_rd, tl.trans(k_td), WIDEN), 0.0)
        dw_r += tl.sum(up_rt * dots_rt, 1)
        ddots_rt = tl.where(dots_rt > 0, up_rt * w_r[:, None].to(tl.float32), 0.0)
        dq_rd += dot(ddots_rt.to(k_td.dtype), k_td, WIDEN)
    at = batch * n_rows * HEADS + rows * HEADS + head
    tl.store(dq + at[:, None] * D + dims[None, :], dq_rd, row_in[:, None] & dim_in[None, :])
    tl.store(dw + at, dw_r, row_in)


@triton.jit
def _key_grad_kernel(
    q, k, w, dout, dk, n_rows, n_keys, HEADS: tl.constexpr, D: tl.constexpr,
    R: tl.constexpr, T: tl.constexpr, BD: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """dk of one key block, over all heads and query rows in a fixed order."""
    key_block, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    keys, dims = key_block * T + tl.arange(0, T), tl.arange(0, BD)
    key_in, dim_in = keys < n_keys, dims < D
    q, w, dout = q + batch * n_rows * HEADS * D, w + batch * n_rows * HEADS, dout + batch * n_rows * n_keys
    k_dt = tl.load(
        k + batch * n_keys * D + keys[None, :] * D + dims[:, None], mask=key_in[None, :] & dim_in[:, None], other=0.0
    )
    dk_td = tl.zeros([T, BD], tl.float32)
    for start in range(0, n_rows, R):
        rows = start + tl.arange(0, R)
        row_in = rows < n_rows
        up_rt = tl.load(
            dout + rows[:, None].to(tl.int64) * n_keys + keys[None, :],
            mask=row_in[:, None] & key_in[None, :],
            other=0.0,
        )
        for head in range(HEADS):
            q_rd, w_r = _load_head(q, w, head, rows, row_in, dims, dim_in, HEADS, D)
            positive_rt = dot(q_rd, k_dt, WIDEN) > 0
            ddots_rt = tl.where(positive_rt, up_rt * w_r[:, None].to(tl.float32), 0.0)
            dk_td += dot(tl.trans(ddots_rt).to(q_rd.dtype), q_rd, WIDEN)
    tl.store(dk + batch * n_keys * D + keys[:, None] * D + dims[None, :], dk_td, key_in[:, None] & dim_in[None, :])


@triton.jit
def _ordered(scores_t):
    """uint32 in the order of the fp32 scores; -0.0 equals 0.0."""
    scores_t = tl.where(scores_t == 0.0, 0.0, scores_t)
    bits = scores_t.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, ~bits, bits | -2147483648).to(tl.uint32, bitcast=True)


@triton.jit
def _count(scores, limit, least, STRICT: tl.constexpr, T: tl.constexpr):
    """How many of the row's first `limit` scores are >= least (or > least)."""
    counts_t = tl.zeros([T], tl.int32)
    for start in range(0, limit, T):
        at = start + tl.arange(0, T)
        keys = _ordered(tl.load(scores + at, mask=at < limit, other=0.0))
        hit = keys > least if STRICT else keys >= least
        counts_t += (hit & (at < limit)).to(tl.int32)
    return tl.sum(counts_t, 0)


@triton.jit
def _select_kernel(scores, index, first, n_rows, n_keys, topk, width, size, T: tl.constexpr):
    """One query row: its min(topk, position + 1) best keys, ascending, into index[batch, position]."""
    row, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    scores = scores + (batch * n_rows + row) * n_keys
    index = index + (batch * size + first + row) * width
    limit = first + row + 1
    wanted = tl.minimum(topk, limit)
    # The largest bit pattern that at least `wanted` scores reach, bit by bit from the top. When exactly `wanted` reach a
    # candidate the set is known and the remaining bits need no pass.
    threshold = tl.full([], 0, tl.uint32)
    bit, exact = 31, wanted == limit
    while bit >= 0 and not exact:
        candidate = threshold | (tl.full([], 1, tl.uint32) << bit)
        reached = _count(scores, limit, candidate, False, T)
        if reached >= wanted:
            threshold = candidate
        exact = reached == wanted
        bit -= 1
    room = wanted - _count(scores, limit, threshold, True, T)
    written = 0
    for start in range(0, limit, T):
        at = start + tl.arange(0, T)
        inside = at < limit
        keys = _ordered(tl.load(scores + at, mask=inside, other=0.0))
        equal = (inside & (keys == threshold)).to(tl.int32)
        taken = (inside & (keys > threshold)).to(tl.int32) + tl.where(tl.cumsum(equal, 0) <= room, equal, 0)
        room -= tl.minimum(room, tl.sum(equal, 0))
        place = written + tl.cumsum(taken, 0) - 1
        tl.store(index + place, at.to(tl.int64), mask=taken > 0)
        written += tl.sum(taken, 0)


def _sizes(heads: int, dim: int) -> dict:
    return dict(HEADS=heads, D=dim, R=BLOCK_ROWS, T=BLOCK_KEYS, BD=block(dim), WIDEN=INTERPRETED)


def _scores(q_bqnd, k_btd, w_bqn, keys: int, first: int | None, out_bqt) -> None:
    """Scores of the first `keys` keys into out [B,Q,keys]; keys after a query that stands at `first` + row may be skipped."""
    batch, rows, heads, dim = q_bqnd.shape
    grid = (triton.cdiv(keys, BLOCK_KEYS), triton.cdiv(rows, BLOCK_ROWS), batch)
    _scores_kernel[grid](
        q_bqnd, k_btd, w_bqn, out_bqt, first or 0, rows, keys, k_btd.stride(0), CAUSAL=first is not None,
        **_sizes(heads, dim),
    )  # fmt: skip


class _IndexScores(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q_bqnd, k_btd, w_bqn):
        q, k, w = q_bqnd.contiguous(), k_btd.contiguous(), w_bqn.contiguous()
        out_bqt = torch.empty(*q.shape[:2], k.shape[1], dtype=torch.float32, device=q.device)
        _scores(q, k, w, k.shape[1], None, out_bqt)
        ctx.save_for_backward(q, k, w)
        return out_bqt

    @staticmethod
    def backward(ctx, dout_bqt):
        q, k, w = ctx.saved_tensors
        batch, rows, heads, dim = q.shape
        keys, sizes, dout = k.shape[1], _sizes(heads, dim), dout_bqt.contiguous()
        dq, dk, dw = torch.empty_like(q), torch.empty_like(k), torch.empty_like(w)
        _query_grad_kernel[(triton.cdiv(rows, BLOCK_ROWS), heads, batch)](q, k, w, dout, dq, dw, rows, keys, **sizes)
        _key_grad_kernel[(triton.cdiv(keys, BLOCK_KEYS), batch)](q, k, w, dout, dk, rows, keys, **sizes)
        return dq, dk, dw


def index_scores(q_bqnd: torch.Tensor, k_btd: torch.Tensor, w_bqn: torch.Tensor) -> torch.Tensor:
    """kernels.indexer.index_scores: fp32 [B,Q,T], differentiable in q, k and w (the warm-up's dq, dk, dw)."""
    return _IndexScores.apply(q_bqnd, k_btd, w_bqn)


def select_index(q_bsnd, k_bsd, w_bsn, topk: int) -> torch.Tensor:
    """Selected keys of every causal query, int64 [B,S,min(topk,S)] ascending; places past min(topk, t + 1) hold 0."""
    q, k, w = q_bsnd.contiguous(), k_bsd.contiguous(), w_bsn.contiguous()
    batch, size = q.shape[:2]
    width = min(topk, size)
    index_bsk = torch.zeros(batch, size, width, dtype=torch.long, device=q.device)
    rows = min(size, max(LEAST_ROWS, SCORE_ELEMENTS // (batch * size)))
    for first in range(0, size, rows):
        stop = min(first + rows, size)
        scores_bqt = torch.empty(batch, stop - first, stop, dtype=torch.float32, device=q.device)
        _scores(q[:, first:stop].contiguous(), k, w[:, first:stop].contiguous(), stop, first, scores_bqt)
        _select_kernel[(stop - first, batch)](
            scores_bqt, index_bsk, first, stop - first, stop, topk, width, size, T=block(stop, 64, 2048)
        )
    return index_bsk
