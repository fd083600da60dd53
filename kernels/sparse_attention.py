"""Attention kernels: dense causal, and DSA's attention over selected keys by two routes, chosen explicitly by `attention_path`.

- dense: causal SDPA; taken whenever topk >= length, where DSA equals dense attention.
- masked: rows in chunks, keys cut at each chunk's end, unselected keys masked; no [B,H,S,S] tensor exists. The faster route
  while one selected key costs more to gather than GATHER_RATIO keys cost to multiply.
- gathered: absorbed (MQA-mode) attention over gathered latent keys, also in row chunks; its cost does not grow with length.

Run its tests: `python -m pytest tests/kernels/test_sparse_attention.py`
"""

import torch
import torch.nn.functional as F

from kernels import paths
from kernels.indexer import ROW_CHUNK, causal_mask
from kernels.kept_attention import keeps, kept_attention

# Measured on one CPU thread (forward + backward, 4 heads, latent 72, topk 64, 2048 tokens a step, whole model): at length 1024
# masked 4280 and gathered 4690 tokens/s, at 2048 2870 and 3960.
GATHER_RATIO = 12
GATHER_ELEMENTS = 1 << 18  # gathered floats per chunk: 1 MB, one core's second-level cache
KEPT_ELEMENTS = 1 << 23  # probabilities kept for the backward: 32 MB in one call, above it they are computed again


def attention_path(size: int, topk: int) -> str:
    """ "dense", "masked" or "gathered" for a sequence of `size` tokens under DSA with `topk` keys per query."""
    if size <= topk:
        return "dense"
    return "masked" if size <= GATHER_RATIO * topk else "gathered"


def dense_attention(q_bhsd, k_bhtd, v_bhtv, scale: float) -> torch.Tensor:
    """Causal attention: q [B,H,S,d], k [B,H,S,d], v [B,H,S,dv] -> [B,H,S,dv]; SDPA, or `kept_attention` where it is faster."""
    size = q_bhsd.shape[2]
    if keeps(q_bhsd, k_bhtd, v_bhtv, size * size // 2):
        ends = (min(a + ROW_CHUNK, size) for a in range(0, size, ROW_CHUNK))
        masks = [causal_mask(stop - 1 - (stop - 1) % ROW_CHUNK, stop, stop)[None] for stop in ends]
        return kept_attention(q_bhsd, k_bhtd, v_bhtv, masks, scale)
    return F.scaled_dot_product_attention(q_bhsd, k_bhtd, v_bhtv, is_causal=True, scale=scale)


def masked_attention(q_bhsd, k_bhtd, v_bhtv, masks: list[torch.Tensor], scale: float) -> torch.Tensor:
    """Attention over selected keys; masks as kernels.indexer.select_keys returns them. Differentiable in q, k, v."""
    if keeps(q_bhsd, k_bhtd, v_bhtv, sum(m.shape[1] * m.shape[2] for m in masks)):
        return kept_attention(q_bhsd, k_bhtd, v_bhtv, masks, scale)
    outs, start = [], 0
    for mask_brt in masks:
        rows, stop = mask_brt.shape[1:]
        bias = torch.zeros(mask_brt.shape, dtype=q_bhsd.dtype, device=q_bhsd.device)
        bias.masked_fill_(~mask_brt, float("-inf"))
        outs.append(
            F.scaled_dot_product_attention(
                q_bhsd[:, :, start : start + rows],
                k_bhtd[:, :, :stop],
                v_bhtv[:, :, :stop],
                attn_mask=bias.unsqueeze(1),
                scale=scale,
            )
        )
        start += rows
    return torch.cat(outs, dim=2)


def masks_to_index(masks: list[torch.Tensor], topk: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Selection masks (kernels.indexer.select_keys) as (index int64 [B,S,k] ascending, valid bool [B,S,k]), k = min(topk, S).

    Rows with fewer than k keys are filled with index 0, valid False.
    """
    k = min(topk, masks[-1].shape[2])
    index, valid = [], []
    for mask_brt in masks:
        counts_br1 = mask_brt.sum(-1, keepdim=True)
        valid_brk = torch.arange(k, device=mask_brt.device) < counts_br1
        index_brk = torch.zeros(valid_brk.shape, dtype=torch.long, device=mask_brt.device)
        index_brk[valid_brk] = mask_brt.nonzero()[:, -1]
        index.append(index_brk)
        valid.append(valid_brk)
    return torch.cat(index, dim=1), torch.cat(valid, dim=1)


class _Gathered(torch.autograd.Function):
    """Rows are flattened over the batch; each chunk gathers its latents, and the backward gathers them again."""

    @staticmethod
    def _gather(kv_mc, index_nk, rows, buffer_xc):
        """One chunk's latents [rows, k, c], in the buffer: page faults of a fresh tensor cost more than the copy."""
        flat = index_nk[rows].reshape(-1)
        out = torch.index_select(kv_mc, 0, flat, out=buffer_xc[: len(flat)])
        return out.view(-1, index_nk.shape[1], kv_mc.shape[1])

    @staticmethod
    def _probs(q_rhc, gathered_rkc, valid_rk, full: bool, out=None):
        """Softmax of the (already scaled) queries over their latents."""
        logits_rhk = torch.bmm(q_rhc, gathered_rkc.transpose(1, 2))
        if not full:
            logits_rhk.masked_fill_(~valid_rk.unsqueeze(1), float("-inf"))
        return torch.softmax(logits_rhk, -1, out=out)

    @staticmethod
    def forward(ctx, q_nhc, kv_mc, index_nk, valid_nk, value_dim, scale, rows_per_chunk):
        n, heads = q_nhc.shape[:2]
        scaled_nhc = q_nhc * scale
        out_nhv = q_nhc.new_empty(n, heads, value_dim)
        # Probabilities are kept where that is little: H numbers per selected key, next to the c that the gather moves anyway.
        keep = any(ctx.needs_input_grad) and heads * index_nk.numel() <= KEPT_ELEMENTS
        probs_nhk = q_nhc.new_empty(n, heads, index_nk.shape[1]) if keep else None
        full = [bool(part.all()) for part in valid_nk.split(rows_per_chunk)]
        buffer_xc = kv_mc.new_empty(rows_per_chunk * index_nk.shape[1], kv_mc.shape[1])
        for c, a in enumerate(range(0, n, rows_per_chunk)):
            rows = slice(a, a + rows_per_chunk)
            gathered = _Gathered._gather(kv_mc, index_nk, rows, buffer_xc)
            out = probs_nhk[rows] if keep else None
            probs = _Gathered._probs(scaled_nhc[rows], gathered, valid_nk[rows], full[c], out)
            torch.bmm(probs, gathered[..., :value_dim], out=out_nhv[rows])
        ctx.save_for_backward(scaled_nhc, kv_mc, index_nk, valid_nk, probs_nhk)
        ctx.rest = value_dim, scale, rows_per_chunk, full
        return out_nhv

    @staticmethod
    def backward(ctx, dout_nhv):
        scaled_nhc, kv_mc, index_nk, valid_nk, probs_nhk = ctx.saved_tensors
        value_dim, scale, rows_per_chunk, full = ctx.rest
        n, heads, c_dim = scaled_nhc.shape
        dq_nhc, dkv_mc = torch.empty_like(scaled_nhc), torch.zeros_like(kv_mc)
        buffer_xc = kv_mc.new_empty(rows_per_chunk * index_nk.shape[1], c_dim)
        dbuffer_rkc = torch.empty_like(buffer_xc).view(rows_per_chunk, -1, c_dim)
        right_nxc = torch.cat([scaled_nhc, F.pad(dout_nhv, (0, c_dim - value_dim))], dim=1)
        for c, a in enumerate(range(0, n, rows_per_chunk)):
            rows = slice(a, a + rows_per_chunk)
            gathered = _Gathered._gather(kv_mc, index_nk, rows, buffer_xc)
            if probs_nhk is None:
                probs = _Gathered._probs(scaled_nhc[rows], gathered, valid_nk[rows], full[c])
            else:
                probs = probs_nhk[rows]
            dprobs = torch.bmm(dout_nhv[rows], gathered[..., :value_dim].transpose(1, 2))
            dlogits = torch.ops.aten._softmax_backward_data(dprobs, probs, -1, probs.dtype)
            torch.bmm(dlogits, gathered, out=dq_nhc[rows])
            # dlogits^T q + probs^T dout in one product: an in-place baddbmm into columns would run row by row.
            left_rxk = torch.cat([dlogits, probs], dim=1)
            dgathered = torch.bmm(left_rxk.transpose(1, 2), right_nxc[rows], out=dbuffer_rkc[: len(left_rxk)])
            dkv_mc.index_add_(0, index_nk[rows].reshape(-1), dgathered.flatten(0, 1))
        return dq_nhc.mul_(scale), dkv_mc, None, None, None, None, None


def gathered_attention_reference(q_bshc, kv_btc, index_bsk, valid_bsk, value_dim: int, scale: float) -> torch.Tensor:
    """The formula of gathered_attention in one piece, [B,S,k,c] included; gradients by autograd."""
    batch = torch.arange(kv_btc.shape[0], device=kv_btc.device)[:, None, None]
    gathered_bskc = kv_btc[batch, index_bsk]
    logits_bshk = torch.einsum("bshc,bskc->bshk", q_bshc, gathered_bskc) * scale
    probs_bshk = logits_bshk.masked_fill(~valid_bsk.unsqueeze(2), float("-inf")).softmax(-1)
    return torch.einsum("bshk,bskv->bshv", probs_bshk, gathered_bskc[..., :value_dim])


def gathered_attention(q_bshc, kv_btc, index_bsk, valid_bsk, value_dim: int, scale: float) -> torch.Tensor:
    """MQA-mode attention over gathered latents: q [B,S,H,c], kv [B,T,c] shared by all heads, index int64 [B,S,k].

    Returns [B,S,H,value_dim]. valid [B,S,k] marks real entries of index; the value is the first value_dim columns of the latent.
    Differentiable in q and kv.
    """
    path = paths.choose("gathered_attention", q_bshc.device, q_bshc.dtype)
    if path == "reference":
        return gathered_attention_reference(q_bshc, kv_btc, index_bsk, valid_bsk, value_dim, scale)
    batch, size, k = index_bsk.shape
    offset_b11 = torch.arange(batch, device=kv_btc.device).view(batch, 1, 1) * kv_btc.shape[1]
    if path == "triton":
        from kernels.triton_sparse_attention import sparse_attention

        flat = (t.flatten(0, 1) for t in (q_bshc, kv_btc, index_bsk + offset_b11, valid_bsk))
        return sparse_attention(*flat, value_dim, scale)[0].unflatten(0, (batch, size))
    rows_per_chunk = max(4, GATHER_ELEMENTS // (k * kv_btc.shape[2]))
    out_nhv = _Gathered.apply(
        q_bshc.flatten(0, 1),
        kv_btc.flatten(0, 1),
        (index_bsk + offset_b11).flatten(0, 1),
        valid_bsk.flatten(0, 1),
        value_dim,
        scale,
        rows_per_chunk,
    )
    return out_nhv.unflatten(0, (batch, size))
