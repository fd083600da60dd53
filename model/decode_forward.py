"""The decoder's forward pass: packed prefill of prompts, then one cached token per row in absorbed MLA form (notes A.2, B).

    python -m pytest tests/model/test_decode.py

A query at position t attends to the min(index_topk, t + 1) keys that `kernels.topk` selects, ties to the lower index: the rule of
the training forward, through the same kernels. Selections agree except where two scores differ by less than rounding. Under
IndexShare (model.indexer_types) a shared layer takes the selection of the nearest full layer before it, and caches no index keys.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from kernels.experts import grouped_experts
from kernels.indexer import ROW_CHUNK, select_keys
from kernels.mlapo import mla_preprocess, rotate_columns
from kernels.norms import rms_norm
from kernels.rope import apply_rope, rope_cis
from kernels.sparse_attention import dense_attention, masked_attention
from kernels.topk import topk_lower_index, topk_mask
from model.decode_weights import LATENT_EPS, DecoderWeights, LayerWeights
from model.kv_cache import LatentCache

# selected bool [B, T], or None where the positions int64 [B, topk] are given: few of T
Chosen = tuple[torch.Tensor | None, torch.Tensor | None]


class CachedForward:
    """Forward functions over one reading of a model's weights. `cfg` has the checkpoint's config names."""

    def __init__(self, cfg, weights: DecoderWeights) -> None:
        self.cfg, self.weights = cfg, weights

    def logits(self, hidden_nh: torch.Tensor) -> torch.Tensor:
        """Final norm and head: [N, H] -> float32 [N, V]."""
        w = self.weights
        return F.linear(rms_norm(hidden_nh, w.final_norm, self.cfg.rms_norm_eps), w.lm_head).float()

    def _project(self, lw: LayerWeights, h_nh: torch.Tensor, cis_nr: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """x after input_layernorm -> (q latent, kv [N, kv_lora + rope], index key [N, d_I], index head weights [N, n_I]).

        The last two have no columns in a layer without an indexer.
        """
        q_a, kv_a, rope_k, idx_k, idx_w = F.linear(h_nh, lw.w_in).split(lw.in_sizes, dim=-1)
        q_lat_nq = rms_norm(q_a, lw.q_a_norm, LATENT_EPS)
        kv_nc = torch.cat([rms_norm(kv_a, lw.kv_a_norm, LATENT_EPS), apply_rope(rope_k, cis_nr)], dim=-1)
        return q_lat_nq, kv_nc, idx_k if lw.index_slot is None else self._index_key(lw, idx_k, cis_nr), idx_w

    def _index_key(self, lw: LayerWeights, idx_k_nd: torch.Tensor, cis_nr: torch.Tensor) -> torch.Tensor:
        """Raw indexer key [N, d_I] -> LayerNorm, first rope dims rotated."""
        idx_k = F.layer_norm(idx_k_nd, idx_k_nd.shape[-1:], lw.index_norm_weight, lw.index_norm_bias, LATENT_EPS)
        return rotate_columns(idx_k, cis_nr, 0)

    def _queries(
        self, lw: LayerWeights, q_lat_nq: torch.Tensor, cis_nr: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """q latent -> (q_nope [N, heads, nope], q_rope [N, heads, rope] rotated)."""
        cfg = self.cfg
        q_nhd = F.linear(q_lat_nq, lw.w_q).view(
            -1, cfg.num_attention_heads, cfg.qk_nope_head_dim + cfg.qk_rope_head_dim
        )
        q_nope, q_rope = q_nhd.split([cfg.qk_nope_head_dim, cfg.qk_rope_head_dim], dim=-1)
        return q_nope, apply_rope(q_rope, cis_nr)

    def _index_queries(self, lw: LayerWeights, q_lat_nq: torch.Tensor, cis_nr: torch.Tensor) -> torch.Tensor:
        """q latent -> indexer queries [N, n_I, d_I], first rope dims rotated."""
        q_njd = F.linear(q_lat_nq, lw.index_wq_b).view(-1, self.cfg.index_n_heads, self.cfg.index_head_dim)
        return rotate_columns(q_njd, cis_nr, 0)

    def _index_weights(self, idx_w: torch.Tensor) -> torch.Tensor:
        """Raw head weights -> what `index_scores` takes: fp32, times n_I^-0.5 d_I^-0.5 in the order of model/indexer.py."""
        return idx_w.float() * (self.cfg.index_n_heads**-0.5 * self.cfg.index_head_dim**-0.5)

    def _select(self, idx_q_bsjd: torch.Tensor, idx_k_bsd: torch.Tensor, idx_w_bsj: torch.Tensor) -> list[torch.Tensor]:
        """Selected keys of whole prompts as row-chunk masks (kernels.indexer.select_keys)."""
        return select_keys(idx_q_bsjd, idx_k_bsd, idx_w_bsj, self.cfg.index_topk)

    def _mlp(self, lw: LayerWeights, h_nh: torch.Tensor) -> torch.Tensor:
        """Dense SwiGLU, or routed experts plus the shared expert."""
        if lw.router is None:
            return _swiglu(h_nh, lw.gate_up, lw.down)
        cfg = self.cfg
        scores_ne = F.linear(h_nh.float(), lw.router).sigmoid()
        choice_ne = scores_ne + lw.router_bias
        if cfg.n_group > 1:
            choice_ne = _limit_groups(choice_ne, cfg.n_group, cfg.topk_group)
        experts_nk = choice_ne.topk(cfg.num_experts_per_tok, dim=-1, sorted=False).indices
        gates_nk = scores_ne.gather(1, experts_nk)
        if cfg.norm_topk_prob:
            gates_nk = gates_nk / (gates_nk.sum(-1, keepdim=True) + 1e-20)
        gates_nk = gates_nk * cfg.routed_scaling_factor
        routed_nh = grouped_experts(h_nh, lw.gate_up, lw.down, experts_nk, gates_nk)
        return routed_nh + _swiglu(h_nh, lw.shared_gate_up, lw.shared_down)

    def _attend_cached(
        self,
        layer: int,
        lw: LayerWeights,
        cache: LatentCache,
        q_bhc: torch.Tensor,
        q_lat_bq: torch.Tensor,
        idx_w_bj: torch.Tensor,
        cis_br: torch.Tensor,
        lengths_b: torch.Tensor,
        longest: int,
        uniform: bool,
        chosen: Chosen | None,
    ) -> tuple[torch.Tensor, Chosen | None]:
        """One query per row against its cache, absorbed (MQA) form: ([B, H], selection for the shared layers that follow).

        q is absorbed and rotated, q_lat what the indexer reads. lengths_b counts the query's own key.
        chosen: the selection of the full layer before, read by a shared layer.
        """
        cfg = self.cfg
        kv_btc = cache.kv[layer, :, :longest]
        allowed_bt = None
        if not uniform:
            allowed_bt = torch.arange(longest, device=lengths_b.device)[None, :] < lengths_b[:, None]
        if longest > cfg.index_topk:
            if lw.index_slot is not None:
                idx_q = self._index_queries(lw, q_lat_bq, cis_br)
                keys_btd = cache.index[lw.index_slot, :, :longest]
                scores_bt = _index_scores_one(idx_q, keys_btd, self._index_weights(idx_w_bj))
                if allowed_bt is not None:
                    scores_bt = scores_bt.masked_fill_(~allowed_bt, -torch.inf)
                far = longest > 2 * cfg.index_topk  # reading only the selected latents is cheaper than masking all
                pick = topk_lower_index if far else topk_mask
                selected = pick(scores_bt, cfg.index_topk)
                chosen = (None, selected) if far else (selected, None)
            selected_bt, picks_bk = chosen
            if picks_bk is not None:
                kv_btc = kv_btc.gather(1, picks_bk[:, :, None].expand(-1, -1, kv_btc.shape[-1]))
                allowed_bt = None if allowed_bt is None else allowed_bt.gather(1, picks_bk)
            else:
                allowed_bt = selected_bt if allowed_bt is None else allowed_bt & selected_bt
        scores_bht = torch.bmm(q_bhc, kv_btc.transpose(1, 2)).float() * lw.scale
        if allowed_bt is not None:
            scores_bht = scores_bht.masked_fill(~allowed_bt[:, None], -torch.inf)
        probs_bht = torch.softmax(scores_bht, dim=-1).to(kv_btc.dtype)
        o_lat_bhc = torch.bmm(probs_bht, kv_btc[..., : cfg.kv_lora_rank])
        o_bhv = torch.bmm(o_lat_bhc.transpose(0, 1), lw.w_uv).transpose(0, 1)
        return F.linear(o_bhv.reshape(o_bhv.shape[0], -1), lw.w_o), chosen

    def _choose(self, selected_bt: torch.Tensor) -> Chosen:
        """A selection with its key positions where reading only these is cheaper than masking all: far beyond top-k."""
        topk = self.cfg.index_topk
        return selected_bt, selected_bt.nonzero()[:, 1].view(-1, topk) if selected_bt.shape[1] > 2 * topk else None

    def _chosen_last(self, masks: list[torch.Tensor] | None, lengths_b: torch.Tensor) -> Chosen | None:
        """What the last token of each prompt selected, from the masks of whole prompts; rows below top-k keys select all."""
        if masks is None:
            return None
        selected_bt = torch.zeros(len(lengths_b), masks[-1].shape[2], dtype=torch.bool, device=lengths_b.device)
        for b, row in enumerate((lengths_b - 1).tolist()):
            mask_brt = masks[row // ROW_CHUNK]
            selected_bt[b, : mask_brt.shape[2]] = mask_brt[b, row % ROW_CHUNK]
        if (
            int(selected_bt.sum(-1).min()) < self.cfg.index_topk
        ):  # picks need equal counts: fill up with keys that are masked
            selected_bt = topk_mask(selected_bt.float(), self.cfg.index_topk)
        return self._choose(selected_bt)

    def prefill(self, prompts: Sequence[Sequence[int]], last_only: bool) -> tuple[torch.Tensor, LatentCache | None]:
        """Run whole prompts, packed without padding outside attention.

        last_only: returns (hidden [B, H] of each prompt's last token, before the final norm; filled cache), and the last layer
        computes queries for those tokens alone. Otherwise (hidden [N, H] of all tokens in order, None).
        """
        cfg, w = self.cfg, self.weights
        device = w.embed.device
        lengths = [len(ids) for ids in prompts]
        batch, longest = len(prompts), max(lengths)
        lengths_b = torch.tensor(lengths, device=device)
        pos_n = torch.cat([torch.arange(n, device=device) for n in lengths])
        uniform = min(lengths) == longest
        slot_n = (
            None
            if uniform
            else torch.repeat_interleave(torch.arange(batch, device=device), lengths_b) * longest + pos_n
        )

        def pad(x_nd: torch.Tensor) -> torch.Tensor:
            if slot_n is None:
                return x_nd.view(batch, longest, *x_nd.shape[1:])
            flat = x_nd.new_zeros(batch * longest, *x_nd.shape[1:]).index_copy_(0, slot_n, x_nd)
            return flat.view(batch, longest, *x_nd.shape[1:])

        x_nh = w.embed[torch.tensor([t for ids in prompts for t in ids], device=device)]
        cis_nr = rope_cis(pos_n, cfg.qk_rope_head_dim, cfg.rope_theta)
        cache = None
        if last_only:
            kv_dim = cfg.kv_lora_rank + cfg.qk_rope_head_dim
            cache = LatentCache.empty(
                len(w.layers), batch, longest + 1, kv_dim, cfg.index_head_dim, w.embed, index_layers=w.index_layers
            )
        masks = None
        for layer, lw in enumerate(w.layers):
            q_lat, kv_nc, idx_k, idx_w = self._project(lw, rms_norm(x_nh, lw.input_norm, cfg.rms_norm_eps), cis_nr)
            if cache is not None:
                cache.kv[layer, :, :longest] = pad(kv_nc)
                if lw.index_slot is not None:
                    cache.index[lw.index_slot, :, :longest] = pad(idx_k)
            if last_only and layer == len(w.layers) - 1:
                last_b = lengths_b.cumsum(0) - 1
                x_nh, q_lat, cis_br = x_nh[last_b], q_lat[last_b], cis_nr[last_b]
                q_nope, q_rope = self._queries(lw, q_lat, cis_br)
                q_bhc = torch.cat([torch.bmm(q_nope.transpose(0, 1), lw.w_uk).transpose(0, 1), q_rope], dim=-1)
                chosen = self._chosen_last(masks, lengths_b) if lw.index_slot is None else None
                out, _ = self._attend_cached(
                    layer, lw, cache, q_bhc, q_lat, idx_w[last_b], cis_br, lengths_b, longest, uniform, chosen
                )
            else:
                out, masks = self._attend_prompt(lw, q_lat, kv_nc, idx_k, idx_w, cis_nr, pad, masks)
                out = out.flatten(0, 1) if slot_n is None else out.flatten(0, 1)[slot_n]
                out = F.linear(out, lw.w_o)
            x_nh = x_nh + out
            x_nh = x_nh + self._mlp(lw, rms_norm(x_nh, lw.post_norm, cfg.rms_norm_eps))
        return x_nh, cache

    def _attend_prompt(
        self, lw, q_lat, kv_nc, idx_k, idx_w, cis_nr, pad, masks
    ) -> tuple[torch.Tensor, list[torch.Tensor] | None]:
        """Causal attention of whole prompts, multi-head form: ([B, S, heads * v_head_dim], selection); rows past a prompt's end
        are unused. masks: the selection of the full layer before, read by a shared layer."""
        cfg = self.cfg
        q_nope, q_rope = self._queries(lw, q_lat, cis_nr)
        q_bhsd = pad(torch.cat([q_nope, q_rope], dim=-1)).transpose(1, 2)
        latent_nc, rope_nr = kv_nc.split([cfg.kv_lora_rank, cfg.qk_rope_head_dim], dim=-1)
        kv_nhd = F.linear(latent_nc, lw.kv_b).view(-1, cfg.num_attention_heads, cfg.qk_nope_head_dim + cfg.v_head_dim)
        k_nope, v_nhd = kv_nhd.split([cfg.qk_nope_head_dim, cfg.v_head_dim], dim=-1)
        k_nhd = torch.cat([k_nope, rope_nr[:, None].expand(-1, cfg.num_attention_heads, -1)], dim=-1)
        k_bhsd, v_bhsd = pad(k_nhd).transpose(1, 2), pad(v_nhd).transpose(1, 2)
        if k_bhsd.shape[2] <= cfg.index_topk:
            o_bhsv = dense_attention(q_bhsd, k_bhsd, v_bhsd, lw.scale)
        else:
            if lw.index_slot is not None:
                idx_q, idx_w = pad(self._index_queries(lw, q_lat, cis_nr)), pad(self._index_weights(idx_w))
                masks = self._select(idx_q, pad(idx_k), idx_w)
            o_bhsv = masked_attention(q_bhsd, k_bhsd, v_bhsd, masks, lw.scale)
        return o_bhsv.transpose(1, 2).flatten(2), masks

    def step(self, ids_b: torch.Tensor, lengths_b: torch.Tensor, cache: LatentCache) -> torch.Tensor:
        """Write each row's token `ids_b` at position `lengths_b` of its cache and return the logits after it, float32 [B, V]."""
        cfg, w = self.cfg, self.weights
        lengths = lengths_b.tolist()
        longest = max(lengths) + 1
        uniform = min(lengths) + 1 == longest
        cache.reserve(longest)
        slot_b = torch.arange(len(lengths), device=ids_b.device) * cache.capacity + lengths_b
        cis_br = rope_cis(lengths_b, cfg.qk_rope_head_dim, cfg.rope_theta)
        x_bh = w.embed[ids_b]
        counts_b, chosen = lengths_b + 1, None
        for layer, lw in enumerate(w.layers):
            kv_mc = cache.kv[layer].view(-1, cache.kv.shape[-1])
            q_bhc, q_lat, extra = mla_preprocess(x_bh, lw.preprocess(cfg.rms_norm_eps), cis_br, kv_mc, slot_b)
            idx_k, idx_w = extra.split(lw.in_sizes[3:], dim=-1)
            if lw.index_slot is not None:
                keys_md = cache.index[lw.index_slot].view(-1, cache.index.shape[-1])
                keys_md.index_copy_(0, slot_b, self._index_key(lw, idx_k, cis_br))
            out_bh, chosen = self._attend_cached(
                layer, lw, cache, q_bhc, q_lat, idx_w, cis_br, counts_b, longest, uniform, chosen
            )
            x_bh = x_bh + out_bh
            x_bh = x_bh + self._mlp(lw, rms_norm(x_bh, lw.post_norm, cfg.rms_norm_eps))
        return self.logits(x_bh)


def _index_scores_one(q_bjd: torch.Tensor, k_btd: torch.Tensor, w_bj: torch.Tensor) -> torch.Tensor:
    """kernels.indexer.index_scores for one query per row, fp32 [B, T]: all heads in one product, so the keys are read once."""
    dots_bjt = torch.bmm(q_bjd.float(), k_btd.float().transpose(1, 2)).relu_()
    return torch.bmm(w_bj[:, None], dots_bjt).squeeze(1)


def _swiglu(x_nh: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    gate, up = F.linear(x_nh, gate_up).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, down)


def _limit_groups(choice_ne: torch.Tensor, groups: int, topk_group: int) -> torch.Tensor:
    """Node-limited routing: only the topk_group groups with the largest sum of their two best experts stay."""
    grouped = choice_ne.view(choice_ne.shape[0], groups, -1)
    best = grouped.topk(2, dim=-1).values.sum(-1).topk(topk_group, dim=-1, sorted=False).indices
    keep = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter_(1, best, True)
    return grouped.masked_fill(~keep[..., None], -torch.inf).view_as(choice_ne)
