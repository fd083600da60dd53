"""One pre-norm decoder block: h + Attn(norm(h)), then h + MLP(norm(h)).

Run its tests: `python -m pytest tests/model/test_transformer.py`
"""

from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import nn

from model.attention import MLA, RMSNorm
from model.config import ModelConfig
from model.moe import MLP, MoE


@dataclass
class BlockArgs:
    """What every block of one forward pass shares; see GlmMoeDsa.forward."""

    attention: str = "sparse"
    index_only: bool = False
    rows_br: torch.Tensor | None = None
    row_weight_br: torch.Tensor | None = None
    token_mask_bs: torch.Tensor | None = None


@dataclass
class BlockResult:
    hidden_bsh: torch.Tensor
    index_loss: torch.Tensor | None
    counts_e: torch.Tensor | None  # int64 tokens per expert, MoE blocks only
    aux_loss: torch.Tensor | None


class Block(nn.Module):
    def __init__(self, cfg: ModelConfig, dense: bool):
        super().__init__()
        self.self_attn = MLA(cfg)
        self.mlp = MLP(cfg.hidden_size, cfg.intermediate_size) if dense else MoE(cfg)
        self.input_layernorm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)

    def forward(self, hidden_bsh: torch.Tensor, cis_bsr: torch.Tensor, args: BlockArgs) -> BlockResult:
        frozen = torch.no_grad if args.index_only else nullcontext
        with frozen():
            x_bsh = self.input_layernorm(hidden_bsh)
        attn_bsh, index_loss = self.self_attn(
            x_bsh,
            cis_bsr,
            attention=args.attention,
            rows_br=args.rows_br,
            row_weight_br=args.row_weight_br,
            index_only=args.index_only,
        )
        with frozen():
            hidden_bsh = hidden_bsh + attn_bsh
            x_bsh = self.post_attention_layernorm(hidden_bsh)
            counts = aux = None
            if isinstance(self.mlp, MoE):
                y_bsh, counts, aux = self.mlp(x_bsh, args.token_mask_bs)
            else:
                y_bsh = self.mlp(x_bsh)
            return BlockResult(hidden_bsh + y_bsh, index_loss, counts, aux)
