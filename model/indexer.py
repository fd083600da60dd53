"""The lightning indexer module: its queries, key, head weights, and its training loss (notes B.2, B.3).

Its inputs are detached by the caller, so it learns only from the KL loss and the backbone never from it.

Run its tests: `python -m pytest tests/model/test_indexer.py`
"""

import torch
import torch.nn.functional as F
from torch import nn

from kernels.indexer import SelectedKeys, index_scores, select_index, select_keys
from kernels.mlapo import rotate_columns
from model.config import ModelConfig

K_NORM_EPS = 1e-6


class Indexer(nn.Module):
    """Scores every earlier token for every query with `index_n_heads` small heads over one shared key.

    queries, keys and weights are separate so that decoding caches keys and shares the exact arithmetic.
    """

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.n_heads, self.head_dim, self.rope_dim, self.topk = (
            cfg.index_n_heads,
            cfg.index_head_dim,
            cfg.qk_rope_head_dim,
            cfg.index_topk,
        )
        self.wq_b = nn.Linear(cfg.q_lora_rank, self.n_heads * self.head_dim, bias=False)
        self.wk = nn.Linear(cfg.hidden_size, self.head_dim, bias=False)
        self.k_norm = nn.LayerNorm(self.head_dim, eps=K_NORM_EPS)
        self.weights_proj = nn.Linear(cfg.hidden_size, self.n_heads, bias=False)

    def queries(self, c_q_bsr: torch.Tensor, cis_bsr: torch.Tensor) -> torch.Tensor:
        """[B,S,n_I,d_I] from the normalised q latent; the first qk_rope_head_dim dims of each head are rotated."""
        q = self.wq_b(c_q_bsr).unflatten(-1, (self.n_heads, self.head_dim))
        return rotate_columns(q, cis_bsr, 0)

    def keys(self, x_bsh: torch.Tensor, cis_bsr: torch.Tensor) -> torch.Tensor:
        """[B,S,d_I]: one key per token, LayerNorm then partial RoPE. This is what a decode cache stores."""
        k = self.k_norm(self.wk(x_bsh))
        return rotate_columns(k, cis_bsr, 0)

    def weights(self, x_bsh: torch.Tensor) -> torch.Tensor:
        """[B,S,n_I] head weights, at least fp32, times n_I^-0.5 * d_I^-0.5 (positive, so it commutes with ReLU)."""
        w = F.linear(x_bsh.to(self.weights_proj.weight.dtype), self.weights_proj.weight)
        w = w if w.dtype == torch.float64 else w.float()
        return w * (self.n_heads**-0.5 * self.head_dim**-0.5)

    def scores(self, c_q_bqr, x_bqh, cis_bqr, k_btd) -> torch.Tensor:
        """Index scores fp32 [B,Q,T] of queries against given keys, no causal mask. Differentiable."""
        return index_scores(self.queries(c_q_bqr, cis_bqr), k_btd, self.weights(x_bqh))

    @torch.no_grad()
    def select(self, c_q_bsr, x_bsh, cis_bsr) -> list[torch.Tensor]:
        """Selected keys of every row of a sequence as row-chunk masks (kernels.indexer.select_keys)."""
        return select_keys(self.queries(c_q_bsr, cis_bsr), self.keys(x_bsh, cis_bsr), self.weights(x_bsh), self.topk)

    @torch.no_grad()
    def select_index(self, c_q_bsr, x_bsh, cis_bsr) -> SelectedKeys:
        """The same selection as indices (kernels.indexer.select_index): for long sequences, memory linear in the length."""
        return select_index(self.queries(c_q_bsr, cis_bsr), self.keys(x_bsh, cis_bsr), self.weights(x_bsh), self.topk)
