"""Gated MLPs: one SwiGLU, and many of them over tokens sorted by expert, with hand-written backwards.

Both save the gate/up product only and recompute the activation, which is cheaper on a CPU than storing and reading it.

Run its tests: `python -m pytest tests/kernels/test_experts.py`
"""

import torch
import torch.nn.functional as F

from kernels.deferred import active_queue
from kernels.paths import choose


def experts_reference(x_nh, gate_up_emh, down_ehm, index_nk, weight_nk):
    """Loop over experts in plain torch, differentiable: y_n = sum_k weight_nk * down_e(silu(gate_e x) * up_e x), e = index_nk."""
    out_nh = torch.zeros_like(x_nh)
    for e in range(gate_up_emh.shape[0]):
        token, slot = (index_nk == e).nonzero(as_tuple=True)
        gate, up = F.linear(x_nh[token], gate_up_emh[e]).chunk(2, dim=-1)
        y = F.linear(F.silu(gate) * up, down_ehm[e]) * weight_nk[token, slot, None]
        out_nh = out_nh.index_add(0, token, y.to(out_nh.dtype))
    return out_nh


def _act_backward(gate_nm, up_nm, silu_nm, dact_nm):
    """Gradient of silu(gate) * up with respect to [gate | up], [N, 2m]. Overwrites dact."""
    m = gate_nm.shape[1]
    dgu_n2m = torch.empty(gate_nm.shape[0], 2 * m, dtype=gate_nm.dtype, device=gate_nm.device)
    torch.mul(dact_nm, silu_nm, out=dgu_n2m[:, m:])
    torch.ops.aten.silu_backward.grad_input(dact_nm.mul_(up_nm), gate_nm, grad_input=dgu_n2m[:, :m])
    return dgu_n2m


def _sum_choices(rows_rh, places_r, k: int):
    """Row n of the result is the sum of rows places[n * k : (n + 1) * k]: one pass instead of a gather and a sum."""
    if rows_rh.device.type != "cpu" or rows_rh.dtype != torch.float32:
        return rows_rh.index_select(0, places_r).view(-1, k, rows_rh.shape[1]).sum(1)
    offsets_n = torch.arange(0, len(places_r), k, device=places_r.device)
    return torch.embedding_bag(rows_rh, places_r, offsets_n, False, 0)[0]


def _swiglu_gradients(x_nh, gu_n2m, dgu_n2m, dy_nh):
    """Gradients of gate, up and down of one SwiGLU."""
    m = gu_n2m.shape[1] // 2
    dgate_up = dgu_n2m.T @ x_nh
    return dgate_up[:m], dgate_up[m:], dy_nh.T @ F.silu(gu_n2m[:, :m]).mul_(gu_n2m[:, m:])


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_nh, gate_mh, up_mh, down_hm, queue):
        gu_n2m = x_nh @ torch.cat([gate_mh, up_mh]).T
        m = gate_mh.shape[0]
        act_nm = F.silu(gu_n2m[:, :m]).mul_(gu_n2m[:, m:])
        # The joined weights are not kept: every micro-batch in flight would hold a copy of them.
        ctx.save_for_backward(x_nh, gate_mh, up_mh, down_hm, gu_n2m)
        ctx.queue, ctx.weights = queue, (gate_mh, up_mh, down_hm) if queue is not None else None
        return act_nm @ down_hm.T

    @staticmethod
    def backward(ctx, dy_nh):
        x_nh, gate_mh, up_mh, down_hm, gu_n2m = ctx.saved_tensors
        m = down_hm.shape[1]
        gate, up = gu_n2m[:, :m], gu_n2m[:, m:]
        silu = F.silu(gate)
        dgu_n2m = _act_backward(gate, up, silu, dy_nh @ down_hm)
        dx = dgu_n2m @ torch.cat([gate_mh, up_mh]) if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return dx, None, None, None, None
        if ctx.queue is not None:
            ctx.queue.put(ctx.weights, _swiglu_gradients, (x_nh, gu_n2m, dgu_n2m, dy_nh))
            return dx, None, None, None, None
        ddown = dy_nh.T @ silu.mul_(up)
        dgate_up = dgu_n2m.T @ x_nh
        return dx, dgate_up[:m], dgate_up[m:], ddown, None


def swiglu(x_nh: torch.Tensor, gate_mh: torch.Tensor, up_mh: torch.Tensor, down_hm: torch.Tensor) -> torch.Tensor:
    """down(silu(gate x) * up x) for x [N,H], gate/up [m,H], down [H,m] -> [N,H]; gate and up in one matrix product."""
    return _SwiGlu.apply(x_nh, gate_mh, up_mh, down_hm, active_queue())


def _grouped_gradients(bounds, num_experts):
    """The function that makes gate_up's and down's gradients [E,2m,H], [E,H,m] from rows sorted by expert."""

    def gradients(x_nh, token_r, gu_r2m, dgu_r2m, ws_r1, dy_nh):
        m = gu_r2m.shape[1] // 2
        dgate_up = x_nh.new_zeros(num_experts, 2 * m, x_nh.shape[1])
        ddown = x_nh.new_zeros(num_experts, x_nh.shape[1], m)
        for e in range(num_experts):
            a, b = bounds[e], bounds[e + 1]
            if a < b:
                tokens = token_r[a:b]
                act = F.silu(gu_r2m[a:b, :m]).mul_(gu_r2m[a:b, m:]).mul_(ws_r1[a:b])
                torch.mm(dy_nh.index_select(0, tokens).T, act, out=ddown[e])
                torch.mm(dgu_r2m[a:b].T, x_nh.index_select(0, tokens), out=dgate_up[e])
        return dgate_up, ddown

    return gradients


class _GroupedSwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_nh, gate_up_emh, down_ehm, index_nk, weight_nk, queue):
        n, k = index_nk.shape
        num_experts, m2, h = gate_up_emh.shape
        m = m2 // 2
        flat_r = index_nk.reshape(-1)
        order_r = flat_r.argsort(stable=True)
        bounds = [0, *torch.bincount(flat_r, minlength=num_experts).cumsum(0).tolist()]
        token_r = order_r.div(k, rounding_mode="floor")
        xs_rh = x_nh.index_select(0, token_r)
        ws_r1 = weight_nk.reshape(-1).index_select(0, order_r).unsqueeze(1).to(x_nh.dtype)
        gu_r2m = torch.empty(n * k, m2, dtype=x_nh.dtype, device=x_nh.device)
        ys_rh = torch.empty(n * k, h, dtype=x_nh.dtype, device=x_nh.device)
        counts = [b - a for a, b in zip(bounds, bounds[1:])]
        # split, unbind: all views in one call each; a slice per use is a fifth of a small expert's time
        parts = (t.split(counts) for t in (xs_rh, gu_r2m, gu_r2m[:, :m], gu_r2m[:, m:], ws_r1, ys_rh))
        weights = gate_up_emh.transpose(1, 2).unbind(), down_ehm.transpose(1, 2).unbind()
        for xs, gu, gate, up, ws, ys, gate_up_h2m, down_mh in zip(*parts, *weights):
            if len(xs):
                torch.mm(xs, gate_up_h2m, out=gu)
                # The routing weight scales the m-wide activation, not the H-wide output: same value, less traffic.
                torch.mm(F.silu(gate).mul_(up).mul_(ws), down_mh, out=ys)
        inverse_r = torch.empty_like(order_r)
        inverse_r[order_r] = torch.arange(n * k, device=order_r.device)
        ctx.save_for_backward(x_nh, gate_up_emh, down_ehm, gu_r2m, ws_r1, token_r, inverse_r)
        ctx.bounds, ctx.shape = bounds, (n, k)
        ctx.queue, ctx.weights = queue, (gate_up_emh, down_ehm) if queue is not None else None
        return _sum_choices(ys_rh, inverse_r, k)

    @staticmethod
    def backward(ctx, dy_nh):
        x_nh, gate_up_emh, down_ehm, gu_r2m, ws_r1, token_r, inverse_r = ctx.saved_tensors
        bounds, (n, k) = ctx.bounds, ctx.shape
        num_experts, m2, h = gate_up_emh.shape
        m = m2 // 2
        trained = ctx.needs_input_grad[1] or ctx.needs_input_grad[2]
        need_w = trained and ctx.queue is None
        later_r2m = torch.empty_like(gu_r2m) if trained and ctx.queue is not None else None
        dys_rh = dy_nh.index_select(0, token_r)
        xs_rh = x_nh.index_select(0, token_r) if need_w else None
        dxs_rh = torch.empty(n * k, h, dtype=x_nh.dtype, device=x_nh.device)
        dws_r = torch.empty(n * k, dtype=x_nh.dtype, device=x_nh.device)
        dgate_up = torch.empty_like(gate_up_emh) if need_w else None
        ddown = torch.empty_like(down_ehm) if need_w else None
        counts = [b - a for a, b in zip(bounds, bounds[1:])]
        parts = (t.split(counts) for t in (gu_r2m[:, :m], gu_r2m[:, m:], ws_r1, dys_rh, dxs_rh, dws_r))
        for e, (gate, up, ws, dys, dxs, dws) in enumerate(zip(*parts)):
            if not len(gate):
                if need_w:
                    dgate_up[e].zero_()
                    ddown[e].zero_()
                continue
            silu = F.silu(gate)
            act = silu * up
            dact = dys @ down_ehm[e]  # gradient of the weighted activation
            torch.sum(dact * act, dim=1, out=dws)
            dgu = _act_backward(gate, up, silu, dact.mul_(ws))
            torch.mm(dgu, gate_up_emh[e], out=dxs)
            if later_r2m is not None:
                later_r2m[bounds[e] : bounds[e + 1]] = dgu
            if need_w:
                torch.mm(dys.T, act.mul_(ws), out=ddown[e])
                torch.mm(dgu.T, xs_rh[bounds[e] : bounds[e + 1]], out=dgate_up[e])
        dx_nh = _sum_choices(dxs_rh, inverse_r, k)
        dweight_nk = dws_r.index_select(0, inverse_r).view(n, k)
        if later_r2m is not None:
            kept = (x_nh, token_r, gu_r2m, later_r2m, ws_r1, dy_nh)
            ctx.queue.put(ctx.weights, _grouped_gradients(bounds, num_experts), kept)
        return dx_nh, dgate_up, ddown, None, dweight_nk, None


def grouped_experts(x_nh, gate_up_emh, down_ehm, index_nk, weight_nk) -> torch.Tensor:
    """Routed experts over sorted slices: x [N,H], gate_up [E,2m,H], down [E,H,m], index int64 [N,k], weight [N,k] -> [N,H].

    Differentiable in x, both expert tensors and the routing weights. Experts without tokens get zero gradients. The path is
    kernels.paths' choice for "grouped_experts".
    """
    path = choose("grouped_experts", x_nh.device, x_nh.dtype)
    if path == "reference":
        return experts_reference(x_nh, gate_up_emh, down_ehm, index_nk, weight_nk)
    if path == "triton":
        from kernels.triton_experts import grouped_experts as triton_experts

        return triton_experts(x_nh, gate_up_emh, down_ehm, index_nk, weight_nk)
    return _GroupedSwiGlu.apply(x_nh, gate_up_emh, down_ehm, index_nk, weight_nk, active_queue())
