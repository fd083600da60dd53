"""Multi-token prediction: one parameter set applied several times in training, or one layer per depth (notes A.5).

    z_i^k = eh_proj([enorm(Emb(t_{i+k})) ; hnorm(h_i^{k-1})]);  h^k = Block(z^k)
    logits^k = lm_head(shared_head.norm(h^k)) predict t_{i+k+1}

h^0 is the backbone's hidden state after its final norm (as DeepSeek and vLLM feed it); deeper steps feed the block's raw output.
num_nextn_predict_layers 1 is GLM-5's way: every depth applies the same layer. Above 1 it is DeepSeek's: depth k has layer k,
and depths beyond the last layer reuse it. Drafting with either: model/speculative.py.

Run its tests: `python -m pytest tests/model/test_mtp.py`
"""

from collections.abc import Sequence

import torch
from torch import nn

from model.attention import RMSNorm
from model.block import Block, BlockArgs
from model.config import ModelConfig


class SharedHead(nn.Module):
    """Holds the norm in front of the shared lm_head, so that weight names follow released checkpoints."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.norm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)


class MtpLayer(Block):
    """A whole MoE decoder block plus the projections that merge the next token's embedding; stored from layer N on."""

    def __init__(self, cfg: ModelConfig):
        super().__init__(cfg, layer=cfg.num_hidden_layers, dense=False)
        self.enorm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        self.hnorm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        self.eh_proj = nn.Linear(2 * cfg.hidden_size, cfg.hidden_size, bias=False)
        self.shared_head = SharedHead(cfg)

    def merge(self, embedding_bsh: torch.Tensor, hidden_bsh: torch.Tensor) -> torch.Tensor:
        """Block input z [B,S,H] from the embedding of the token k ahead and the previous depth's hidden state."""
        return self.eh_proj(torch.cat([self.enorm(embedding_bsh), self.hnorm(hidden_bsh)], dim=-1))


def unroll(
    layers: Sequence[MtpLayer], embed: nn.Embedding, input_ids_bs, hidden_bsh, cis_bsr, depth: int, args: BlockArgs
):
    """Run depths 1..depth: (list of shared_head-normed hidden [B,S,H], list of block results), one entry per depth.

    Depth k applies layers[k - 1], or the last layer when there are fewer. Position i of depth k predicts token i+k+1. The
    last k positions have no token i+k; they are fed token 0 and their outputs are meaningless: the caller must ignore them
    (a loss has no targets there).
    """
    hiddens, results = [], []
    shifted_bs = input_ids_bs
    for k in range(depth):
        layer = layers[min(k, len(layers) - 1)]
        shifted_bs = torch.cat([shifted_bs[:, 1:], shifted_bs.new_zeros(shifted_bs.shape[0], 1)], dim=1)
        result = layer(layer.merge(embed(args.local(shifted_bs)), hidden_bsh), cis_bsr, args)
        hidden_bsh = result.hidden_bsh
        hiddens.append(layer.shared_head.norm(hidden_bsh))
        results.append(result)
    return hiddens, results
