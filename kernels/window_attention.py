"""Sliding-window attention in row chunks with cut keys: cost and memory grow with length * window, never with length squared.

Run its tests: `python -m pytest tests/kernels/test_window_attention.py`
"""

import torch
import torch.nn.functional as F

ROW_CHUNK = 256  # upper bound; a chunk multiplies fewer than window + 2 * rows keys, of which each row uses `window`


def window_attention(q_bhsd, k_bgsd, v_bgsv, window: int, scale: float, row_chunk: int | None = None) -> torch.Tensor:
    """Query t attends to the `window` keys max(0, t - window + 1) .. t (notes A.6): [B,H,S,dv]. Differentiable.

    q [B,H,S,d], k [B,G,S,d], v [B,G,S,dv] with H a multiple of G (each key head serves H/G query heads in a row).
    """
    size, gqa = q_bhsd.shape[2], q_bhsd.shape[1] != k_bgsd.shape[1]
    if size <= window:
        return F.scaled_dot_product_attention(q_bhsd, k_bgsd, v_bgsv, is_causal=True, scale=scale, enable_gqa=gqa)
    chunk = row_chunk or max(16, min(window, ROW_CHUNK))
    back = -(-(window - 1) // chunk)  # earlier chunks that a chunk's rows reach into
    rows_r = torch.arange(back * chunk, (back + 1) * chunk, device=q_bhsd.device)
    keys_k = torch.arange((back + 1) * chunk, device=q_bhsd.device)
    outside_rk = (keys_k > rows_r[:, None]) | (keys_k <= rows_r[:, None] - window)
    bias_rk = torch.zeros(outside_rk.shape, dtype=q_bhsd.dtype, device=q_bhsd.device)
    bias_rk.masked_fill_(outside_rk, float("-inf"))
    # split and cat, not a slice per chunk: the backward of a slice fills a whole tensor with zeros, which is quadratic in all
    q_pieces, k_pieces, v_pieces = (x.split(chunk, dim=2) for x in (q_bhsd, k_bgsd, v_bgsv))
    outs = []
    for i, q in enumerate(q_pieces):
        first = max(0, i - back)
        k, v = (torch.cat(pieces[first : i + 1], dim=2) for pieces in (k_pieces, v_pieces))
        start = (back - (i - first)) * chunk
        bias = bias_rk[: q.shape[2], start : start + k.shape[2]]
        outs.append(F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale, enable_gqa=gqa))
    return torch.cat(outs, dim=2)
