"""Sliding-window attention in row chunks with cut keys: cost and memory grow with length * window, never with length squared.

Run its tests: `python -m pytest tests/kernels/test_window_attention.py`
"""

import torch
import torch.nn.functional as F

ROW_CHUNK = 256  # upper bound; a chunk multiplies at most rows + window - 1 keys, of which each row uses `window`


def window_attention(q_bhsd, k_bgsd, v_bgsv, window: int, scale: float, row_chunk: int | None = None) -> torch.Tensor:
    """Query t attends to the `window` keys max(0, t - window + 1) .. t (notes A.6): [B,H,S,dv]. Differentiable.

    q [B,H,S,d], k [B,G,S,d], v [B,G,S,dv] with H a multiple of G (each key head serves H/G query heads in a row).
    """
    size, gqa = q_bhsd.shape[2], q_bhsd.shape[1] != k_bgsd.shape[1]
    if size <= window:
        return F.scaled_dot_product_attention(q_bhsd, k_bgsd, v_bgsv, is_causal=True, scale=scale, enable_gqa=gqa)
    chunk = row_chunk or max(16, min(window, ROW_CHUNK))
    rows_r, keys_k = torch.arange(chunk, device=q_bhsd.device), torch.arange(chunk + window - 1, device=q_bhsd.device)
    # row r of a chunk whose keys begin window - 1 before it: keys r .. r + window - 1
    outside_rk = (keys_k < rows_r[:, None]) | (keys_k >= rows_r[:, None] + window)
    bias_rk = torch.zeros(outside_rk.shape, dtype=q_bhsd.dtype, device=q_bhsd.device)
    bias_rk.masked_fill_(outside_rk, float("-inf"))
    outs = []
    for start in range(0, size, chunk):
        stop, first = min(start + chunk, size), start - window + 1
        cut = max(0, -first)  # keys before the sequence
        outs.append(
            F.scaled_dot_product_attention(
                q_bhsd[:, :, start:stop],
                k_bgsd[:, :, first + cut : stop],
                v_bgsv[:, :, first + cut : stop],
                attn_mask=bias_rk[: stop - start, cut : stop - first],
                scale=scale,
                enable_gqa=gqa,
            )
        )
    return torch.cat(outs, dim=2)
