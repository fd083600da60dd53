"""Grouped-query attention, the paper's baseline (notes A.4, Table 1): model.attention "gqa".

num_key_value_heads key and value heads of head_dim each serve num_attention_heads / num_key_value_heads query heads in a row. The
first qk_rope_head_dim dimensions of a head are rotated in interleaved pairs, as everywhere in this model: set it to head_dim for
full rotation, to half of it for GLM-4.5's. No bias and no QK norm. There is no DSA: the indexer reads MLA's query latent.

Run its tests: `python -m pytest tests/model/test_gqa.py`
"""

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import nn

from kernels.rope import apply_rope
from model.config import ModelConfig


class GQAProjections(nn.Module):
    """The weights and the parts that all kinds of layer share; names as in transformers' Llama-like models."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.heads, self.groups, self.head_dim, self.rope = (
            cfg.num_attention_heads,
            cfg.kv_heads,
            cfg.head_dim,
            cfg.qk_rope_head_dim,
        )
        self.softmax_scale = cfg.head_dim**-0.5
        self.q_proj = nn.Linear(cfg.hidden_size, self.heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(cfg.hidden_size, self.groups * self.head_dim, bias=False)
        self.v_proj = nn.Linear(cfg.hidden_size, self.groups * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.head_dim, cfg.hidden_size, bias=False)

    def _rotated(self, x_bshd: torch.Tensor, cis_bsr: torch.Tensor) -> torch.Tensor:
        if cis_bsr is None:
            return x_bshd
        if self.rope == self.head_dim:
            return apply_rope(x_bshd, cis_bsr)
        return torch.cat([apply_rope(x_bshd[..., : self.rope], cis_bsr), x_bshd[..., self.rope :]], dim=-1)

    def project_qkv(
        self, x_bsh: torch.Tensor, cis_bsr: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(q [B,S,H,d], k [B,S,G,d], v [B,S,G,d]); q and k rotated unless cis is None."""
        q, k, v = (p(x_bsh).unflatten(-1, (-1, self.head_dim)) for p in (self.q_proj, self.k_proj, self.v_proj))
        return self._rotated(q, cis_bsr), self._rotated(k, cis_bsr), v

    def output(self, o_bshv: torch.Tensor) -> torch.Tensor:
        """o_proj over concatenated heads: [B,S,H,d] -> [B,S,hidden]."""
        return self.o_proj(o_bshv.flatten(-2))


class GQA(GQAProjections):
    """Causal attention to all earlier keys. Interface: model/attention.py."""

    def forward(self, x_bsh, cis_bsr, *, index_only: bool = False, **_) -> tuple[torch.Tensor, None, None]:
        with torch.no_grad() if index_only else nullcontext():
            q, k, v = (t.transpose(1, 2) for t in self.project_qkv(x_bsh, cis_bsr))
            gqa = self.groups != self.heads
            o = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.softmax_scale, enable_gqa=gqa)
            return self.output(o.transpose(1, 2)), None, None
