"""Attention kernels: dense causal, and DSA's attention over selected keys by two routes, chosen explicitly by `attention_path`.

- dense: causal SDPA; taken whenever topk >= length, where DSA equals dense attention.
- masked: rows in chunks, keys cut at each chunk's end, unselected keys masked; no [B,H,S,S] tensor exists. On a CPU it is the
  faster route up to tens of thousands of keys (../shared notes: gathering costs more per selected key than a product costs).
- gathered: absorbed (MQA-mode) attention over gathered latent keys, cost independent of length; what GPU kernels do.

Run its tests: `python -m pytest tests/kernels/test_sparse_attention.py`
"""

import torch
import torch.nn.functional as F


def dense_attention(q_bhsd, k_bhtd, v_bhtv, scale: float) -> torch.Tensor:
    """Causal attention through SDPA: q [B,H,S,d], k [B,H,S,d], v [B,H,S,dv] -> [B,H,S,dv]."""
    return F.scaled_dot_product_attention(q_bhsd, k_bhtd, v_bhtv, is_causal=True, scale=scale)


def masked_attention(q_bhsd, k_bhtd, v_bhtv, masks: list[torch.Tensor], scale: float) -> torch.Tensor:
    """Attention over selected keys; masks as kernels.indexer.select_keys returns them. Differentiable in q, k, v."""
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


def gathered_attention(q_bshc, kv_btc, index_bsk, valid_bsk, value_dim: int, scale: float) -> torch.Tensor:
    """MQA-mode attention over gathered latents: q [B,S,H,c], kv [B,T,c] shared by all heads, index int64 [B,S,k] -> [B,S,H,value_dim].

    valid [B,S,k] marks real entries of index. The value is the first `value_dim` columns of the latent. Differentiable in q and kv.
    """
    b, s, k = index_bsk.shape
    offset = torch.arange(b, device=kv_btc.device).view(b, 1, 1) * kv_btc.shape[1]
    gathered = kv_btc.reshape(-1, kv_btc.shape[-1]).index_select(0, (index_bsk + offset).view(-1)).view(b * s, k, -1)
    logits = torch.bmm(q_bshc.reshape(b * s, *q_bshc.shape[2:]), gathered.transpose(1, 2)) * scale
    logits = logits.masked_fill(~valid_bsk.view(b * s, 1, k), float("-inf"))
    out = torch.bmm(logits.softmax(-1), gathered[..., :value_dim])
    return out.view(b, s, q_bshc.shape[2], value_dim)
