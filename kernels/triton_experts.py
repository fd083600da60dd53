"""Triton grouped GEMM over rows sorted by expert, and routed SwiGLU experts on it, forward and backward (notes A.2).

Row tiles never straddle experts: tile t of the launch belongs to the expert that a table on the device names, so nothing waits
for the host to learn how many tokens each expert got. Weight gradients sum an expert's rows in a fixed order, without atomics.

Run its tests: `python -m pytest tests/kernels/test_triton_experts.py`
"""

import torch
import triton
import triton.language as tl

from kernels.triton_common import INTERPRETED, dot

ROWS, COLS, DEPTH = 64, 64, 32  # tile of a product


@triton.jit
def _rows_kernel(
    x, w, out, tile_expert, tile_first, ends, K, N, w_expert, w_n, w_k,
    R: tl.constexpr, C: tl.constexpr, D: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """out[r] = w[e] x[r] for one tile of rows of expert e; w is addressed by strides, so its transpose needs no copy."""
    tile, col_block = tl.program_id(0), tl.program_id(1)
    expert = tl.load(tile_expert + tile)
    if expert < 0:
        return  # the launch has room for the worst split of rows into tiles
    rows = tl.load(tile_first + tile) + tl.arange(0, R)
    row_in = rows < tl.load(ends + expert)
    cols, deep = col_block * C + tl.arange(0, C), tl.arange(0, D)
    col_in = cols < N
    w += expert.to(tl.int64) * w_expert
    rows = rows.to(tl.int64)
    total_rc = tl.zeros([R, C], tl.float32)
    for start in range(0, K, D):
        k = start + deep
        x_rd = tl.load(x + rows[:, None] * K + k[None, :], mask=row_in[:, None] & (k < K)[None, :], other=0.0)
        w_dc = tl.load(w + cols[None, :] * w_n + k[:, None] * w_k, mask=col_in[None, :] & (k < K)[:, None], other=0.0)
        total_rc += dot(x_rd, w_dc, WIDEN)
    tl.store(out + rows[:, None] * N + cols[None, :], total_rc, row_in[:, None] & col_in[None, :])


@triton.jit
def _weights_kernel(
    dy, x, dw, starts, ends, K, N, R: tl.constexpr, C: tl.constexpr, D: tl.constexpr, WIDEN: tl.constexpr
):
    """dw[e] tile [C of N, D of K] = sum over the expert's rows of dy[r] x[r]^T; zero for an expert without rows."""
    col_block, deep_block, expert = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, last = tl.load(starts + expert), tl.load(ends + expert)
    cols, deep = col_block * C + tl.arange(0, C), deep_block * D + tl.arange(0, D)
    col_in, deep_in = cols < N, deep < K
    total_cd = tl.zeros([C, D], tl.float32)
    for start in range(first, last, R):
        rows = (start + tl.arange(0, R)).to(tl.int64)
        row_in = rows < last
        dy_cr = tl.load(dy + rows[None, :] * N + cols[:, None], mask=row_in[None, :] & col_in[:, None], other=0.0)
        x_rd = tl.load(x + rows[:, None] * K + deep[None, :], mask=row_in[:, None] & deep_in[None, :], other=0.0)
        total_cd += dot(dy_cr, x_rd, WIDEN)
    at = expert.to(tl.int64) * N * K
    tl.store(dw + at + cols[:, None] * K + deep[None, :], total_cd, col_in[:, None] & deep_in[None, :])


@triton.jit
def _swiglu_kernel(gu, weight, act, rows, M, B: tl.constexpr):
    """act[r] = weight[r] * silu(gate[r]) * up[r] from gu = [gate | up] [rows, 2 M]."""
    at = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    inside = at < rows.to(tl.int64) * M
    row, col = at // M, at % M
    gate = tl.load(gu + row * 2 * M + col, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gu + row * 2 * M + M + col, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(weight + row, mask=inside, other=0.0).to(tl.float32)
    tl.store(act + at, gate * tl.sigmoid(gate) * up * scale, inside)


@triton.jit
def _swiglu_backward_kernel(gu, weight, dact, dgu, dweight, M, B: tl.constexpr):
    """One row: dgu [2 M] and the routing weight's gradient from the gradient of the weighted activation."""
    row = tl.program_id(0).to(tl.int64)
    scale = tl.load(weight + row).to(tl.float32)
    sum_b = tl.zeros([B], tl.float32)
    for start in range(0, M, B):
        col = start + tl.arange(0, B)
        inside = col < M
        gate = tl.load(gu + row * 2 * M + col, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(gu + row * 2 * M + M + col, mask=inside, other=0.0).to(tl.float32)
        down = tl.load(dact + row * M + col, mask=inside, other=0.0).to(tl.float32)
        sigmoid = tl.sigmoid(gate)
        silu = gate * sigmoid
        sum_b += down * silu * up
        dgate = down * scale * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
        tl.store(dgu + row * 2 * M + col, dgate, inside)
        tl.store(dgu + row * 2 * M + M + col, down * scale * silu, inside)
    tl.store(dweight + row, tl.sum(sum_b, 0))


def tiles(counts_e: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(starts, ends) of each expert's rows, and (expert or -1, first row) of every tile of a launch; all int32, no host sync."""
    ends_e = counts_e.cumsum(0)
    starts_e = ends_e - counts_e
    tile_ends_e = ((counts_e + ROWS - 1) // ROWS).cumsum(0)
    most = triton.cdiv(rows, ROWS) + len(counts_e)
    tile_t = torch.arange(most, device=counts_e.device)
    expert_t = torch.searchsorted(tile_ends_e, tile_t, right=True)
    inside_t = expert_t < len(counts_e)
    safe_t = expert_t.clamp(max=len(counts_e) - 1)
    before_t = torch.where(safe_t > 0, tile_ends_e[(safe_t - 1).clamp(min=0)], 0)
    first_t = starts_e[safe_t] + (tile_t - before_t) * ROWS
    expert_t = torch.where(inside_t, expert_t, -1)
    return starts_e.int(), ends_e.int(), expert_t.int(), first_t.int()


def grouped_mm(x_rk: torch.Tensor, w_enk: torch.Tensor, plan: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """out[r] = w[e(r)] @ x[r]: [R, N] from x [R, K] sorted by expert and w [E, N, K] (any strides); plan from `tiles`."""
    _, ends_e, expert_t, first_t = plan
    (rows, depth), cols = x_rk.shape, w_enk.shape[1]
    out_rn = torch.empty(rows, cols, dtype=x_rk.dtype, device=x_rk.device)
    if rows:
        _rows_kernel[(len(expert_t), triton.cdiv(cols, COLS))](
            x_rk.contiguous(), w_enk, out_rn, expert_t, first_t, ends_e, depth, cols, *w_enk.stride(),
            R=ROWS, C=COLS, D=DEPTH, WIDEN=INTERPRETED,
        )  # fmt: skip
    return out_rn


def grouped_weight_grad(dy_rn: torch.Tensor, x_rk: torch.Tensor, plan: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """dw [E, N, K], in x's dtype: each expert's sum of dy[r] x[r]^T."""
    starts_e, ends_e, _, _ = plan
    cols, depth = dy_rn.shape[1], x_rk.shape[1]
    dw = torch.empty(len(starts_e), cols, depth, dtype=x_rk.dtype, device=x_rk.device)
    _weights_kernel[(triton.cdiv(cols, COLS), triton.cdiv(depth, COLS), len(starts_e))](
        dy_rn.contiguous(), x_rk.contiguous(), dw, starts_e, ends_e, depth, cols,
        R=DEPTH, C=COLS, D=COLS, WIDEN=INTERPRETED,
    )  # fmt: skip
    return dw


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_nh, gate_up_emh, down_ehm, index_nk, weight_nk):
        n, k = index_nk.shape
        experts, m = gate_up_emh.shape[0], down_ehm.shape[2]
        flat_r = index_nk.reshape(-1)
        order_r = flat_r.argsort(stable=True)
        # bincount would make the host wait; a scatter of ones does not
        counts_e = torch.zeros(experts, dtype=torch.long, device=flat_r.device)
        counts_e.scatter_add_(0, flat_r, torch.ones_like(flat_r))
        plan = tiles(counts_e, n * k)
        xs_rh = x_nh.index_select(0, order_r // k)
        ws_r = weight_nk.reshape(-1).index_select(0, order_r).contiguous()
        gu_r2m = grouped_mm(xs_rh, gate_up_emh, plan)
        act_rm = torch.empty(n * k, m, dtype=x_nh.dtype, device=x_nh.device)
        if n:
            _swiglu_kernel[(triton.cdiv(n * k * m, 1024),)](gu_r2m, ws_r, act_rm, n * k, m, B=1024)
        ys_rh = grouped_mm(act_rm, down_ehm, plan)
        inverse_r = torch.empty_like(order_r)
        inverse_r[order_r] = torch.arange(n * k, device=order_r.device)
        ctx.save_for_backward(xs_rh, gate_up_emh, down_ehm, gu_r2m, ws_r, order_r, inverse_r, *plan)
        ctx.shape = n, k
        return ys_rh.index_select(0, inverse_r).view(n, k, gate_up_emh.shape[2]).sum(1)

    @staticmethod
    def backward(ctx, dy_nh):
        xs_rh, gate_up_emh, down_ehm, gu_r2m, ws_r, order_r, inverse_r, *plan = ctx.saved_tensors
        n, k = ctx.shape
        m = down_ehm.shape[2]
        dys_rh = dy_nh.index_select(0, order_r // k)
        dact_rm = grouped_mm(dys_rh, down_ehm.transpose(1, 2), plan)
        dgu_r2m, dws_r = torch.empty_like(gu_r2m), torch.empty(n * k, dtype=torch.float32, device=dy_nh.device)
        act_rm = torch.empty_like(dact_rm)
        if n:
            _swiglu_kernel[(triton.cdiv(n * k * m, 1024),)](gu_r2m, ws_r, act_rm, n * k, m, B=1024)
            _swiglu_backward_kernel[(n * k,)](gu_r2m, ws_r, dact_rm, dgu_r2m, dws_r, m, B=256)
        dgate_up = ddown = None
        if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
            dgate_up = grouped_weight_grad(dgu_r2m, xs_rh, plan)
            ddown = grouped_weight_grad(dys_rh, act_rm, plan)
        dxs_rh = grouped_mm(dgu_r2m, gate_up_emh.transpose(1, 2), plan)
        dx_nh = dxs_rh.index_select(0, inverse_r).view(n, k, gate_up_emh.shape[2]).sum(1)
        dweight_nk = dws_r.index_select(0, inverse_r).view(n, k).to(ws_r.dtype)
        return dx_nh, dgate_up, ddown, None, dweight_nk


def grouped_experts(x_nh, gate_up_emh, down_ehm, index_nk, weight_nk) -> torch.Tensor:
    """kernels.experts.grouped_experts: x [N,H], gate_up [E,2m,H], down [E,H,m], index int64 [N,k], weight [N,k] -> [N,H]."""
    return _Experts.apply(x_nh.contiguous(), gate_up_emh, down_ehm, index_nk, weight_nk)
