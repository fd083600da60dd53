"""The attention interface, and multi-head latent attention with DSA (notes A.2, B): forward, the indexer's loss, decoding parts.

Every attention module (model/block.py `build_attention` picks it by the layer's kind) is called as

    out_bsh, index_loss, masks = module(
        x_bsh,                  # normalised layer input [B,S,hidden]
        cis_bsr,                # rope factors of the positions, complex [B or 1,S,qk_rope_head_dim/2]
        attention="sparse",     # or "dense": whether DSA selects; modules without DSA ignore it
        rows_br=None,           # int64 [B,R]: query rows of the indexer's KL loss; None asks for no loss
        row_weight_br=None,     # [B,R]: their weights, 0 for padding
        index_only=False,       # everything but the indexer's loss runs without gradient
        shared_masks=None,      # what the layer before returned as masks; only layers that share a selection (IndexShare) read it
    )

out is [B,S,hidden]; index_loss a scalar, or None where there is no indexer; masks the selection in force as
kernels.indexer.select_keys returns it (on the gathered path: as select_index does), or None where every earlier key is attended
to. All are causal. Right padding needs no mask. Every module also has
`project_qkv(x, cis) -> (q [B,S,H,d], k [B,S,G,d], v [B,S,G,dv])`, rotated, with H = G * n heads,
`output(o [B,S,H,dv]) -> [B,S,hidden]`, and `softmax_scale`.

Run its tests: `python -m pytest tests/model/test_attention.py`
"""

from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from kernels.indexer import SelectedKeys, attention_mass, index_kl
from kernels.kept_attention import fits
from kernels.mlapo import expand_heads, rotate_columns, split_latents
from kernels.norms import rms_norm
from kernels.rope import apply_rope
from kernels.sparse_attention import (
    attention_path,
    dense_attention,
    gathered_attention,
    masked_attention,
    masks_to_index,
)
from model.config import ModelConfig
from model.indexer import Indexer

LATENT_NORM_EPS = 1e-6  # transformers builds the two latent norms with the class default, not rms_norm_eps


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps)


class MLAProjections(nn.Module):
    """MLA's weights and its parts in MHA mode, shared by all kinds of layer; `absorbed_weights` is what MQA mode needs."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.heads, self.nope, self.rope, self.v_dim = (
            cfg.num_attention_heads,
            cfg.qk_nope_head_dim,
            cfg.qk_rope_head_dim,
            cfg.v_head_dim,
        )
        self.q_lora, self.kv_lora = cfg.q_lora_rank, cfg.kv_lora_rank
        self.softmax_scale = cfg.qk_head_dim**-0.5
        self.q_a_proj = nn.Linear(cfg.hidden_size, self.q_lora, bias=False)
        self.q_a_layernorm = RMSNorm(self.q_lora, LATENT_NORM_EPS)
        self.q_b_proj = nn.Linear(self.q_lora, self.heads * cfg.qk_head_dim, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(cfg.hidden_size, self.kv_lora + self.rope, bias=False)
        self.kv_a_layernorm = RMSNorm(self.kv_lora, LATENT_NORM_EPS)
        self.kv_b_proj = nn.Linear(self.kv_lora, self.heads * (self.nope + self.v_dim), bias=False)
        self.o_proj = nn.Linear(self.heads * self.v_dim, cfg.hidden_size, bias=False)

    # ---- parts, shared with decoding

    def project_q_latent(self, x_bsh: torch.Tensor) -> torch.Tensor:
        """c_q [B,S,q_lora]: the normalised q latent, which the indexer reads too."""
        return self.q_a_layernorm(self.q_a_proj(x_bsh))

    def project_q(self, c_q_bsr: torch.Tensor, cis_bsr: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(q_nope [B,S,H,nope], q_rope [B,S,H,rope] rotated) from c_q; cis None, here and below: not rotated."""
        q = self.q_b_proj(c_q_bsr).unflatten(-1, (self.heads, self.nope + self.rope))
        q_rope = q[..., self.nope :]
        return q[..., : self.nope], q_rope if cis_bsr is None else apply_rope(q_rope, cis_bsr)

    def project_kv_latent(self, x_bsh: torch.Tensor, cis_bsr: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(c_kv [B,S,kv_lora] normalised, k_rope [B,S,rope] rotated, one head for all): the cacheable latents."""
        kv = self.kv_a_proj_with_mqa(x_bsh)
        k_rope = kv[..., self.kv_lora :]
        return self.kv_a_layernorm(kv[..., : self.kv_lora]), k_rope if cis_bsr is None else apply_rope(k_rope, cis_bsr)

    def expand_kv(self, c_kv_btr: torch.Tensor, k_rope_btr: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(k [B,T,H,nope+rope], v [B,T,H,v]) in MHA mode; rows of kv_b_proj are packed per head, nope then v."""
        kv = self.kv_b_proj(c_kv_btr).unflatten(-1, (self.heads, self.nope + self.v_dim))
        return expand_heads(kv, k_rope_btr, self.nope)

    def absorbed_weights(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(W_UK [H,nope,kv_lora], W_UV [H,v,kv_lora]) views: q_latent = q_nope @ W_UK, out = latent @ W_UV^T (MQA mode)."""
        w = self.kv_b_proj.weight.view(self.heads, self.nope + self.v_dim, self.kv_lora)
        return w[:, : self.nope], w[:, self.nope :]

    def output(self, o_bshv: torch.Tensor) -> torch.Tensor:
        """o_proj over concatenated heads: [B,S,H,v] -> [B,S,hidden]."""
        return self.o_proj(o_bshv.flatten(-2))

    def project_qkv(
        self, x_bsh: torch.Tensor, cis_bsr: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(q [B,S,H,nope+rope], k [B,S,H,nope+rope], v [B,S,H,v]): what softmax attention compares, rotated."""
        q_bshd = torch.cat(self.project_q(self.project_q_latent(x_bsh), cis_bsr), dim=-1)
        return q_bshd, *self.expand_kv(*self.project_kv_latent(x_bsh, cis_bsr))


@dataclass
class Shared:
    """What a layer with an indexer hands to the layers it serves where they add to its loss (index_share_loss "served")."""

    masks: list[torch.Tensor] | SelectedKeys | None
    scores_brt: torch.Tensor  # its index scores of the loss's rows, with gradient


class MLA(MLAProjections):
    """Full MLA, dense or under DSA; with indexer=False it shares the selection of an earlier layer (IndexShare).

    Cache per token for decoding: c_kv [kv_lora_rank] and k_rope [qk_rope_head_dim] (project_kv_latent), and the indexer's key
    (indexer.keys). loss_share (ModelConfig.index_loss_share): by default an indexer learns from its own layer's attention, also
    where later layers share its selection, as Megatron-LM trains it; GLM-5.2's own target is not published. Under
    index_share_loss "served" the layers of a group each add KL(p || softmax(I)) against its one indexer, divided by their
    number: the gradient of the KL against the average of their p (arXiv 2603.12201), a value larger by a constant.
    """

    def __init__(self, cfg: ModelConfig, indexer: bool = True, loss_share: float = 1.0):
        super().__init__(cfg)
        self.loss_share, self.hands_on = loss_share, loss_share not in (0.0, 1.0)
        self.topk = cfg.index_topk
        self.indexer = Indexer(cfg) if indexer else None

    def forward(
        self,
        x_bsh: torch.Tensor,
        cis_bsr: torch.Tensor,
        *,
        attention: str = "sparse",
        rows_br: torch.Tensor | None = None,
        row_weight_br: torch.Tensor | None = None,
        index_only: bool = False,
        shared_masks: list[torch.Tensor] | SelectedKeys | Shared | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None, list[torch.Tensor] | SelectedKeys | Shared | None]:
        """See the module's docstring. A layer that shares must be given the masks wherever the layer before selected."""
        scores_brt = None  # of this layer's indexer, or of the one that serves it
        if isinstance(shared_masks, Shared):
            shared_masks, scores_brt = shared_masks.masks, shared_masks.scores_brt
        path = attention_path(x_bsh.shape[1], self.topk) if attention == "sparse" else "dense"
        with torch.no_grad() if index_only else nullcontext():
            both = F.linear(x_bsh, torch.cat([self.q_a_proj.weight, self.kv_a_proj_with_mqa.weight]))
            c_q, c_kv, k_rope = split_latents(
                both, self.q_a_layernorm.weight, self.kv_a_layernorm.weight, cis_bsr, LATENT_NORM_EPS
            )
            q_bshd = self.q_b_proj(c_q).unflatten(-1, (self.heads, self.nope + self.rope))
            # by heads for products over [B * H]; SDPA's output has the layout of its queries, and by heads it would be copied
            by_heads = path != "gathered" and fits(x_bsh.shape[0], self.heads, x_bsh.shape[1] ** 2 // 2)
            q_bshd = rotate_columns(q_bshd, cis_bsr, self.nope, by_heads=by_heads)
            masks = None
            if path != "dense":
                masks = shared_masks
                if self.indexer is not None:
                    select = self.indexer.select_index if path == "gathered" else self.indexer.select
                    masks = select(c_q.detach(), x_bsh.detach(), cis_bsr)
                assert masks is not None, "a layer that shares a selection ran without one"
            k_bthd = None
            if path != "gathered" or rows_br is not None:
                k_bthd, v_bthv = self.expand_kv(c_kv, k_rope)
            if path == "gathered":
                q_nope, q_rope = q_bshd.split([self.nope, self.rope], dim=-1)
                out_bsh = self.output(self._gathered(q_nope, q_rope, c_kv, k_rope, masks))
            else:
                q, k, v = (t.transpose(1, 2) for t in (q_bshd, k_bthd, v_bthv))
                if path == "masked":
                    o_bhsv = masked_attention(q, k, v, masks, self.softmax_scale)
                else:
                    o_bhsv = dense_attention(q, k, v, self.softmax_scale)
                out_bsh = self.output(o_bhsv.transpose(1, 2))
        loss = None
        if rows_br is not None and self.loss_share:
            if self.indexer is not None:
                scores_brt = self._row_scores(x_bsh.detach(), c_q.detach(), cis_bsr, rows_br)
            loss = self._index_loss(scores_brt, q_bshd, k_bthd, masks, rows_br, row_weight_br)
            if self.hands_on:
                return out_bsh, loss * self.loss_share, Shared(masks, scores_brt)
        return out_bsh, loss, masks

    def _gathered(self, q_nope_bshn, q_rope_bshr, c_kv_btc, k_rope_btr, masks) -> torch.Tensor:
        """MQA-mode attention over each row's selected latents: [B,S,H,v]."""
        w_uk_hnc, w_uv_hvc = self.absorbed_weights()
        q_bshc = torch.cat([torch.einsum("bshn,hnc->bshc", q_nope_bshn, w_uk_hnc), q_rope_bshr], dim=-1)
        kv_btc = torch.cat([c_kv_btc, k_rope_btr], dim=-1)
        index_bsk, valid_bsk = masks if isinstance(masks, SelectedKeys) else masks_to_index(masks, self.topk)
        latent_bshc = gathered_attention(q_bshc, kv_btc, index_bsk, valid_bsk, self.kv_lora, self.softmax_scale)
        return torch.einsum("bshc,hvc->bshv", latent_bshc, w_uv_hvc)

    def _row_scores(self, x_bsh, c_q_bsr, cis_bsr, rows_br) -> torch.Tensor:
        """Index scores [B,R,T] of the given rows, with gradient."""
        pick = torch.arange(len(x_bsh), device=rows_br.device)[:, None]
        cis_rows = cis_bsr.expand(len(x_bsh), -1, -1)[pick, rows_br]
        with torch.enable_grad():
            keys_bsd = self.indexer.keys(x_bsh, cis_bsr)
            return self.indexer.scores(c_q_bsr[pick, rows_br], x_bsh[pick, rows_br], cis_rows, keys_bsd)

    def _index_loss(self, scores_brt, q_bshd, k_bthd, masks, rows_br, row_weight_br) -> torch.Tensor:
        """KL(p || softmax(I)) averaged over the given rows; the key set is all s <= t (masks None) or the row's selection."""
        batch, size = q_bshd.shape[:2]
        pick = torch.arange(batch, device=rows_br.device)[:, None]
        if masks is None:
            allowed_brt = torch.arange(size, device=rows_br.device) <= rows_br[..., None]
        elif isinstance(masks, SelectedKeys):
            allowed_brt = masks.allowed(rows_br, size)
        else:
            chunk = masks[0].shape[1]
            allowed_brt = torch.zeros(*rows_br.shape, size, dtype=torch.bool, device=rows_br.device)
            for c, mask in enumerate(masks):
                b, r = (rows_br // chunk == c).nonzero(as_tuple=True)
                allowed_brt[b, r, : mask.shape[2]] = mask[b, rows_br[b, r] - c * chunk]
        mass = attention_mass(q_bshd.detach()[pick, rows_br], k_bthd.detach(), allowed_brt, self.softmax_scale)
        with torch.enable_grad():
            kl_br = index_kl(scores_brt, mass, allowed_brt)
            return (kl_br * row_weight_br).sum() / row_weight_br.sum().clamp(min=1)
