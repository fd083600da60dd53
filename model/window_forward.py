"""Cached forward of several new tokens per row: one verification of drafted tokens, one chunk of a prompt, one MTP depth.

    python -m pytest tests/model/test_speculative.py

The decoder's own step (model/decode_forward.py) takes one token per row. Here a row brings a window of consecutive positions,
which may overlap what its cache holds: entries are written again, and a query reads only positions up to its own, so what
lies past a row's length (rejected drafts, padding) needs no clean-up. Key selection follows kernels.topk as everywhere.
"""

from __future__ import annotations

import torch

from kernels.topk import topk_mask
from model.block import Block
from model.kv_cache import LatentCache


def check_windows(model: torch.nn.Module) -> None:
    """ValueError when the model has layers other than MLA with an indexer of its own."""
    cfg = model.cfg
    kinds = set(getattr(cfg, "layer_types", None) or ()) | {getattr(cfg, "attention", "mla")}
    kinds |= set(getattr(cfg, "indexer_types", None) or ())
    if kinds - {"mla", "full"}:
        raise ValueError(
            f"cached windows need MLA layers with full attention; this model has {', '.join(sorted(kinds))}"
        )


def empty_cache(model: torch.nn.Module, layers: int, rows: int, capacity: int) -> LatentCache:
    """A zeroed cache for `layers` of the model's blocks."""
    cfg, like = model.cfg, model.model.embed_tokens.weight
    return LatentCache.empty(
        layers, rows, capacity, cfg.kv_lora_rank + cfg.qk_rope_head_dim, cfg.index_head_dim, like=like
    )


def cached_block(
    block: Block, x_bwh: torch.Tensor, cis_bwr: torch.Tensor, positions_bw: torch.Tensor, cache: LatentCache, layer: int
) -> torch.Tensor:
    """One block over a window: x [B,W,H] at int64 positions [B,W] -> [B,W,H]. Writes entry `layer` of the cache.

    The cache must hold every position below the window's first that a query should see.
    """
    attn = block.self_attn
    h_bwh = block.input_layernorm(x_bwh)
    c_q_bwq = attn.project_q_latent(h_bwh)
    c_kv, k_rope = attn.project_kv_latent(h_bwh, cis_bwr)
    rows_b1 = torch.arange(x_bwh.shape[0], device=x_bwh.device)[:, None]
    cache.kv[layer].index_put_((rows_b1, positions_bw), torch.cat([c_kv, k_rope], dim=-1))
    cache.index[layer].index_put_((rows_b1, positions_bw), attn.indexer.keys(h_bwh, cis_bwr))
    longest = int(positions_bw.max()) + 1
    kv_btc = cache.kv[layer, :, :longest]
    allowed_bwt = torch.arange(longest, device=x_bwh.device) <= positions_bw[..., None]
    if longest > attn.topk:
        scores_bwt = attn.indexer.scores(c_q_bwq, h_bwh, cis_bwr, cache.index[layer, :, :longest])
        allowed_bwt &= topk_mask(scores_bwt.masked_fill(~allowed_bwt, -torch.inf), attn.topk)
    q_nope, q_rope = attn.project_q(c_q_bwq, cis_bwr)
    w_uk_hnc, w_uv_hvc = attn.absorbed_weights()
    q_bwhc = torch.cat([torch.einsum("bwhn,hnc->bwhc", q_nope, w_uk_hnc), q_rope], dim=-1)
    logits_bhwt = torch.einsum("bwhc,btc->bhwt", q_bwhc, kv_btc).float() * attn.softmax_scale
    probs_bhwt = logits_bhwt.masked_fill(~allowed_bwt[:, None], -torch.inf).softmax(-1).to(kv_btc.dtype)
    latent_bwhc = torch.einsum("bhwt,btc->bwhc", probs_bhwt, kv_btc[..., : attn.kv_lora])
    x_bwh = x_bwh + attn.output(torch.einsum("bwhc,hvc->bwhv", latent_bwhc, w_uv_hvc))
    y = block.mlp(block.post_attention_layernorm(x_bwh))
    return x_bwh + (y[0] if isinstance(y, tuple) else y)


def backbone_window(
    model: torch.nn.Module, ids_bw: torch.Tensor, positions_bw: torch.Tensor, cache: LatentCache
) -> torch.Tensor:
    """The backbone over a window of tokens: hidden [B,W,H] after the final norm. Writes the cache."""
    cis_bwr = model.rope(positions_bw)
    x_bwh = model.model.embed_tokens(ids_bw)
    for layer, block in enumerate(model.blocks):
        x_bwh = cached_block(block, x_bwh, cis_bwr, positions_bw, cache, layer)
    return model.model.norm(x_bwh)
