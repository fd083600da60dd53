"""One pre-norm decoder block: h + Attn(norm(h)), then h + MLP(norm(h)). `build_attention` picks the attention by config.

Run its tests: `python -m pytest tests/model/test_transformer.py`
"""

from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from kernels.indexer import SelectedKeys
from model.attention import MLA, RMSNorm
from model.config import ModelConfig
from model.gdn import GdnGQA, GdnMLA, SimpleGdnGQA, SimpleGdnMLA
from model.gqa import GQA
from model.moe import MLP, MoE
from model.swa import SlidingGQA, SlidingMLA

if TYPE_CHECKING:
    from model.context_parallel import Context


def build_attention(cfg: ModelConfig, layer: int) -> nn.Module:
    """The attention module of a layer (model/attention.py describes the interface); layers from num_hidden_layers on are MTP."""
    mla = cfg.attention == "mla"
    if cfg.kind(layer) == "full":
        return MLA(cfg, indexer=cfg.has_indexer(layer), loss_share=cfg.index_loss_share(layer)) if mla else GQA(cfg)
    kinds = {
        "swa": (SlidingMLA, SlidingGQA),
        "gdn": (GdnMLA, GdnGQA),
        "simple_gdn": (SimpleGdnMLA, SimpleGdnGQA),
    }
    return kinds[cfg.kind(layer)][0 if mla else 1](cfg)


@dataclass
class BlockArgs:
    """What every block of one forward pass shares; see GlmMoeDsa.forward."""

    attention: str = "sparse"
    index_only: bool = False
    rows_br: torch.Tensor | None = None
    row_weight_br: torch.Tensor | None = None
    token_mask_bs: torch.Tensor | None = None
    context: "Context | None" = None  # model/context_parallel.py: the ranks that share each sequence

    def local(self, whole_bs: torch.Tensor) -> torch.Tensor:
        """This rank's columns of [B,S]: all of them, unless sequences are spread over ranks."""
        return whole_bs if self.context is None else self.context.take(whole_bs)


@dataclass
class BlockResult:
    hidden_bsh: torch.Tensor
    index_loss: torch.Tensor | None
    counts_e: torch.Tensor | None  # int64 tokens per expert, MoE blocks only
    aux_loss: torch.Tensor | None
    masks: list[torch.Tensor] | SelectedKeys | None = None  # the selection that a following shared layer reuses


class Block(nn.Module):
    def __init__(self, cfg: ModelConfig, layer: int, dense: bool):
        super().__init__()
        self.self_attn = build_attention(cfg, layer)
        self.mlp = MLP(cfg.hidden_size, cfg.intermediate_size) if dense else MoE(cfg)
        self.input_layernorm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)

    def forward(
        self,
        hidden_bsh: torch.Tensor,
        cis_bsr: torch.Tensor,
        args: BlockArgs,
        shared_masks: list[torch.Tensor] | SelectedKeys | None = None,
    ) -> BlockResult:
        frozen = torch.no_grad if args.index_only else nullcontext
        with frozen():
            x_bsh = self.input_layernorm(hidden_bsh)
        attn_bsh, index_loss, masks = self.self_attn(
            x_bsh,
            cis_bsr,
            attention=args.attention,
            rows_br=args.rows_br,
            row_weight_br=args.row_weight_br,
            index_only=args.index_only,
            shared_masks=shared_masks,
        )
        with frozen():
            hidden_bsh = hidden_bsh + attn_bsh
            x_bsh = self.post_attention_layernorm(hidden_bsh)
            counts = aux = None
            if isinstance(self.mlp, MoE):
                y_bsh, counts, aux = self.mlp(x_bsh, args.token_mask_bs)
            else:
                y_bsh = self.mlp(x_bsh)
            return BlockResult(hidden_bsh + y_bsh, index_loss, counts, aux, masks)
