"""Feed-forward blocks: dense SwiGLU, and sigmoid-routed experts with a shared expert and loss-free balancing (notes A.2).

Run its tests: `python -m pytest tests/model/test_moe.py`
"""

import torch
import torch.nn.functional as F
from torch import nn

from kernels.experts import grouped_experts, swiglu
from model.config import ModelConfig


class MLP(nn.Module):
    """down(silu(gate x) * up x)."""

    def __init__(self, hidden: int, intermediate: int):
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x_bsh: torch.Tensor) -> torch.Tensor:
        flat = x_bsh.reshape(-1, x_bsh.shape[-1])
        return swiglu(flat, self.gate_proj.weight, self.up_proj.weight, self.down_proj.weight).view(x_bsh.shape)


class Router(nn.Module):
    """s = sigmoid(W x) in fp32; choose top-k of s + bias, weigh by s alone, normalised, times routed_scaling_factor.

    With n_group > 1 the choice is limited to the topk_group groups whose two best (s + bias) sum highest.
    """

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.cfg = cfg
        self.weight = nn.Parameter(torch.empty(cfg.n_routed_experts, cfg.hidden_size))
        self.register_buffer("e_score_correction_bias", torch.zeros(cfg.n_routed_experts, dtype=torch.float32))

    def forward(self, x_nh: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x [N,H] -> (scores [N,E], index int64 [N,k], weight [N,k]), at least fp32."""
        cfg = self.cfg
        x_f = x_nh if x_nh.dtype == torch.float64 else x_nh.float()
        # The router decides in fp32 whatever the model computes in (notes A.1): its weights are never rounded either.
        assert self.weight.dtype in (torch.float32, torch.float64), f"router weights are {self.weight.dtype}"
        scores_ne = F.linear(x_f, self.weight.to(x_f.dtype)).sigmoid()
        with torch.no_grad():
            choice_ne = scores_ne + self.e_score_correction_bias
            if cfg.n_group > 1:
                grouped = choice_ne.view(-1, cfg.n_group, cfg.n_routed_experts // cfg.n_group)
                best_g = grouped.topk(2, dim=-1).values.sum(-1).topk(cfg.topk_group, dim=-1).indices
                closed = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter_(1, best_g, False)
                choice_ne = grouped.masked_fill(closed.unsqueeze(-1), float("-inf")).flatten(1)
            index_nk = choice_ne.topk(cfg.num_experts_per_tok, dim=-1).indices
        weight_nk = scores_ne.gather(1, index_nk)
        if cfg.norm_topk_prob:
            weight_nk = weight_nk / (weight_nk.sum(-1, keepdim=True) + 1e-20)
        return scores_ne, index_nk, weight_nk * cfg.routed_scaling_factor

    @torch.no_grad()
    def update_bias(self, counts_e: torch.Tensor, rate: float) -> None:
        """b_e += rate * sign(mean load - load_e) (notes A.2); counts are tokens per expert of the last step."""
        load = counts_e.to(torch.float64)
        self.e_score_correction_bias += rate * torch.sign(load.mean() - load).to(self.e_score_correction_bias.dtype)


class Experts(nn.Module):
    """Routed experts, stacked as transformers stacks them: gate_up_proj [E,2m,H] (gate rows first), down_proj [E,H,m]."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        e, m, h = cfg.n_routed_experts, cfg.moe_intermediate_size, cfg.hidden_size
        self.gate_up_proj = nn.Parameter(torch.empty(e, 2 * m, h))
        self.down_proj = nn.Parameter(torch.empty(e, h, m))

    def start(self, x_nh: torch.Tensor, index_nk: torch.Tensor, weight_nk: torch.Tensor) -> tuple:
        """Begin routed work that `finish` ends. Where experts are spread over ranks (model/expert_parallel.py), tokens travel
        in between."""
        return x_nh, index_nk, weight_nk

    def finish(self, started: tuple) -> torch.Tensor:
        """The routed experts' output [N,H]."""
        x_nh, index_nk, weight_nk = started
        return grouped_experts(x_nh, self.gate_up_proj, self.down_proj, index_nk, weight_nk)


class MoE(nn.Module):
    """y = sum_i w_i E_i(x) + E_shared(x)."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.cfg = cfg
        self.gate = Router(cfg)
        self.experts = Experts(cfg)
        self.shared_experts = MLP(cfg.hidden_size, cfg.moe_intermediate_size * cfg.n_shared_experts)

    def forward(
        self, x_bsh: torch.Tensor, token_mask_bs: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """(output [B,S,H], tokens per expert int64 [E], sequence balance loss or None without gradient)."""
        flat_nh = x_bsh.reshape(-1, x_bsh.shape[-1])
        scores_ne, index_nk, weight_nk = self.gate(flat_nh)
        started = self.experts.start(flat_nh, index_nk, weight_nk)
        shared_bsh = self.shared_experts(x_bsh)
        out_bsh = self.experts.finish(started).view(x_bsh.shape) + shared_bsh
        batch, size = x_bsh.shape[:2]
        counts_be = self._counts(index_nk.view(batch, -1), token_mask_bs)
        aux = None
        if torch.is_grad_enabled() and scores_ne.requires_grad:
            aux = self._balance_loss(scores_ne.view(batch, size, -1), counts_be, token_mask_bs)
        return out_bsh, counts_be.sum(0), aux

    def _counts(self, index_bm: torch.Tensor, token_mask_bs: torch.Tensor | None) -> torch.Tensor:
        """Choices per sequence and expert int64 [B,E]; masked tokens do not count."""
        ones = torch.ones_like(index_bm)
        if token_mask_bs is not None:
            ones = token_mask_bs.to(ones.dtype).repeat_interleave(self.cfg.num_experts_per_tok, dim=1)
        return index_bm.new_zeros(index_bm.shape[0], self.cfg.n_routed_experts).scatter_add_(1, index_bm, ones)

    def _balance_loss(self, scores_bse, counts_be, token_mask_bs) -> torch.Tensor:
        """Sequence-level balance loss without its coefficient: mean over sequences of sum_e f_e P_e (notes A.2)."""
        share_bse = scores_bse / (scores_bse.sum(-1, keepdim=True) + 1e-20)
        if token_mask_bs is None:
            tokens_b1 = scores_bse.new_full((scores_bse.shape[0], 1), scores_bse.shape[1])
            mean_be = share_bse.mean(1)
        else:
            keep_bs1 = token_mask_bs.to(share_bse.dtype).unsqueeze(-1)
            tokens_b1 = keep_bs1.sum(1).clamp(min=1)
            mean_be = (share_bse * keep_bs1).sum(1) / tokens_b1
        frequency_be = (
            counts_be.to(mean_be.dtype) * (self.cfg.n_routed_experts / self.cfg.num_experts_per_tok) / tokens_b1
        )
        return (frequency_be * mean_be).sum(-1).mean()
