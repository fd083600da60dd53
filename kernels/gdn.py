"""Gated DeltaNet's recurrence (notes A.6; arXiv 2412.06464): step by step, and in chunks that are matrix products.

    S_t = a_t * S_{t-1} (I - b_t k_t k_t^T) + b_t v_t k_t^T;  o_t = S_t q_t

per head, with S [dv, dk]; here its transpose [dk, dv] is kept. The chunked form solves one small triangular system per chunk (the
WY representation of the product of Householder-like factors) and carries the state from chunk to chunk: O(S * chunk) instead of
S dependent steps. Both are differentiable.

Run its tests: `python -m pytest tests/kernels/test_gdn.py`
"""

import torch
import torch.nn.functional as F

CHUNK = 64
NORM_EPS = 1e-6


def l2_normalise(x: torch.Tensor) -> torch.Tensor:
    """x / |x| over the last dimension, at least fp32; a zero vector stays zero."""
    x = x if x.dtype == torch.float64 else x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS)


def causal_conv_silu(x_bsc: torch.Tensor, weight_ck: torch.Tensor) -> torch.Tensor:
    """SiLU of a causal depthwise convolution: y_t = sum_j w[:, j] x_{t-K+1+j}, zeros before the sequence. [B,S,C] -> [B,S,C].

    K multiply-adds over whole tensors: for a kernel of 4, conv1d's grouped form does the same work through more copies.
    """
    size, kernel = x_bsc.shape[1], weight_ck.shape[1]
    padded_btc = F.pad(x_bsc, (0, 0, kernel - 1, 0))
    y_bsc = padded_btc[:, kernel - 1 :] * weight_ck[:, -1]
    for j in range(kernel - 1):
        y_bsc = torch.addcmul(y_bsc, padded_btc[:, j : j + size], weight_ck[:, j])
    return F.silu(y_bsc)


def recurrent_gdn(q_bshk, k_bshk, v_bshv, log_a_bsh, b_bsh, state_bhkv=None) -> tuple[torch.Tensor, torch.Tensor]:
    """The recurrence as it is written: (o [B,S,H,dv], last state [B,H,dk,dv]). The reference, and the form of one decoding step.

    q, k [B,S,H,dk] as they enter (normalised by the caller), v [B,S,H,dv], log_a = log of the decay (<= 0) and b (0 to 1)
    [B,S,H]; log_a None is no decay. state: where to go on from.
    """
    state = state_bhkv
    if state is None:
        state = v_bshv.new_zeros(*v_bshv.shape[:1], q_bshk.shape[2], q_bshk.shape[3], v_bshv.shape[3])
    outs = []
    for t in range(q_bshk.shape[1]):
        k_bhk = k_bshk[:, t]
        if log_a_bsh is not None:
            state = state * log_a_bsh[:, t].exp()[..., None, None]
        held_bhv = torch.einsum("bhk,bhkv->bhv", k_bhk, state)
        change_bhv = (v_bshv[:, t] - held_bhv) * b_bsh[:, t, :, None]
        state = state + k_bhk[..., None] * change_bhv[..., None, :]
        outs.append(torch.einsum("bhk,bhkv->bhv", q_bshk[:, t], state))
    return torch.stack(outs, dim=1), state


def segment_sums(x_c: torch.Tensor) -> torch.Tensor:
    """[..., C] -> [..., C, C]: entry i, j is x_{j+1} + ... + x_i for j <= i, -inf above the diagonal.

    Summed afresh for every j: the difference of two running sums would lose small terms behind a large one.
    """
    size = x_c.shape[-1]
    below = torch.ones(size, size, dtype=torch.bool, device=x_c.device).tril(-1)
    terms = x_c[..., :, None].expand(*x_c.shape, size).masked_fill(~below, 0)
    return terms.cumsum(-2).masked_fill(
        ~below.logical_or(torch.eye(size, dtype=torch.bool, device=x_c.device)), -torch.inf
    )


def chunked_gdn(
    q_bshk, k_bshk, v_bshv, log_a_bsh, b_bsh, state_bhkv=None, chunk: int = CHUNK
) -> tuple[torch.Tensor, torch.Tensor]:
    """`recurrent_gdn` in chunks; same arguments and results. Any length; at least fp32 inside, output in v's dtype.

    Within a chunk with decays G_ij = a_{j+1} ... a_i and A = strictly lower part of (b k) k^T * G, the values that the chunk
    writes solve (I + A) U = b v - (b k * a_1..a_i) S, and o_i = a_1..a_i q_i S + sum_{j<=i} G_ij (q_i . k_j) U_j. Exponents are
    sums of logarithms that are never positive, so strong decay underflows to zero and nothing overflows.
    """
    size, dtype = q_bshk.shape[1], v_bshv.dtype
    work = torch.float64 if dtype == torch.float64 else torch.float32
    q, k, v = (x.to(work).transpose(1, 2) for x in (q_bshk, k_bshk, v_bshv))
    b = b_bsh.to(work).transpose(1, 2)
    pad = -size % chunk
    if pad:  # b = 0 writes nothing and log a = 0 keeps the state
        q, k, v, b = F.pad(q, (0, 0, 0, pad)), F.pad(k, (0, 0, 0, pad)), F.pad(v, (0, 0, 0, pad)), F.pad(b, (0, pad))
    q, k, v = (x.unflatten(2, (-1, chunk)) for x in (q, k, v))  # [B,H,N,C,d]
    b = b.unflatten(2, (-1, chunk)).unsqueeze(-1)
    dots_qk, system = q @ k.transpose(-1, -2), (b * k) @ k.transpose(-1, -2)
    bk = b * k
    if log_a_bsh is None:
        causal = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).tril()
        dots_qk, keys, whole = dots_qk.masked_fill(~causal, 0), k, None
    else:
        log_a = F.pad(log_a_bsh.to(work).transpose(1, 2), (0, pad)).unflatten(2, (-1, chunk))
        decay = segment_sums(log_a).exp()  # [B,H,N,C,C]
        dots_qk, system = dots_qk * decay, system * decay
        since = log_a.cumsum(-1).exp().unsqueeze(-1)  # from the chunk's start to i
        q, bk = q * since, bk * since
        keys = k * decay[..., -1, :].unsqueeze(-1)  # from j to the chunk's end
        whole = since[..., -1, :, None]
    right = torch.linalg.solve_triangular(system, torch.cat([b * v, bk], -1), upper=False, unitriangular=True)
    values, reads = right.split([v.shape[-1], k.shape[-1]], dim=-1)
    state = state_bhkv.to(work) if state_bhkv is not None else v.new_zeros(*v.shape[:2], k.shape[-1], v.shape[-1])
    # unbind, not an index per chunk: the backward of an index fills a whole tensor with zeros, which is quadratic in all
    pieces = [x.unbind(2) for x in (q, dots_qk, keys, values, reads)]
    decays = [None] * len(pieces[0]) if whole is None else whole.unbind(2)
    outs = []
    for q_n, dots_n, keys_n, values_n, reads_n, whole_n in zip(*pieces, decays, strict=True):
        new_bhcv = values_n - reads_n @ state
        outs.append(q_n @ state + dots_n @ new_bhcv)
        if whole_n is not None:
            state = state * whole_n
        state = state + keys_n.transpose(-1, -2) @ new_bhcv
    o_bhsv = torch.cat(outs, dim=2)[:, :, :size]
    return o_bhsv.transpose(1, 2).to(dtype), state
