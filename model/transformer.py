"""GlmMoeDsa: the GLM-5 network (MLA + DSA + MoE + MTP) for training and scoring whole sequences.

    model = GlmMoeDsa(ModelConfig.from_params(params["model"])).init_weights(seed=0)
    out = model(input_ids, attention="sparse", mtp_depth=3)
    loss = linear_cross_entropy(out.hidden_bsh.flatten(0, 1), model.lm_head.weight, targets.flatten())

Run its tests: `python -m pytest tests/model/test_transformer.py`
"""

import hashlib
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import nn

from kernels.rope import rope_cis
from model.attention import RMSNorm
from model.block import Block, BlockArgs
from model.config import ModelConfig
from model.gdn import RECURRENCE_PARAMETERS, init_recurrence
from model.moe import MoE
from model.mtp import MtpLayer, unroll


@dataclass
class ModelOutput:
    """hidden [B,S,H] after the final norm; index_loss summed over layers (None unless asked for); mtp_hidden per depth;
    router_counts int64 [E] per MoE layer (MTP layers last, when they ran; a layer that several depths share has their sum);
    aux_loss: sequence balance loss summed over MoE layers, without coefficient (None without gradient)."""

    hidden_bsh: torch.Tensor
    index_loss: torch.Tensor | None = None
    mtp_hidden: list[torch.Tensor] = field(default_factory=list)
    router_counts: list[torch.Tensor] = field(default_factory=list)
    aux_loss: torch.Tensor | None = None


class Backbone(nn.Module):
    """Holds the parameters under transformers' names; from layers[num_hidden_layers] on are MTP layers."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.embed_tokens = nn.Embedding(cfg.vocab_size, cfg.hidden_size)
        blocks: list[nn.Module] = [
            Block(cfg, i, dense=i < cfg.first_k_dense_replace) for i in range(cfg.num_hidden_layers)
        ]
        blocks += [MtpLayer(cfg) for _ in range(cfg.num_nextn_predict_layers)]
        self.layers = nn.ModuleList(blocks)
        self.norm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)


class GlmMoeDsa(nn.Module):
    parts = None  # set by tasks.model_parallel: the pipeline stages that this rank keeps (model.pipeline_parts.Parts)
    context = None  # set by model.context_parallel.set_context: hidden states are then those of this rank's tokens

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.cfg = cfg
        self.model = Backbone(cfg)
        self.lm_head = nn.Linear(cfg.hidden_size, cfg.vocab_size, bias=False)
        if cfg.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    @property
    def blocks(self) -> list[Block]:
        """The backbone's blocks, without the MTP layer."""
        return list(self.model.layers[: self.cfg.num_hidden_layers])

    @property
    def mtp_layers(self) -> list[MtpLayer]:
        """One MTP layer that every depth shares, or one layer per depth (model/mtp.py); empty without MTP."""
        return list(self.model.layers[self.cfg.num_hidden_layers :])

    @property
    def mtp(self) -> MtpLayer | None:
        """The first MTP layer, None when there is none."""
        return self.model.layers[self.cfg.num_hidden_layers] if self.cfg.num_nextn_predict_layers else None

    @torch.no_grad()
    def init_weights(self, seed: int) -> "GlmMoeDsa":
        """Normal(0, initializer_range); o_proj and down_proj divided by sqrt(2 * layers); norms 1, biases 0. Returns self.

        Every tensor draws from its own generator, seeded by (seed, name): adding a layer does not change the others.
        """
        std, layers = self.cfg.initializer_range, self.cfg.num_hidden_layers
        for name, p in self.named_parameters():
            if name.endswith("norm.weight"):
                p.fill_(1.0)
            elif name.endswith("norm.bias"):
                p.zero_()
            else:
                digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
                generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
                if name.endswith(RECURRENCE_PARAMETERS):
                    init_recurrence(name, p, generator)
                    continue
                residual = name.endswith(("o_proj.weight", "down_proj.weight", "down_proj"))
                scale = std / (2 * layers) ** 0.5 if residual else std
                p.copy_(torch.randn(p.shape, generator=generator) * scale)
        for block in self.modules():
            if isinstance(block, MoE):
                block.gate.e_score_correction_bias.zero_()
        return self

    def rope(self, positions_bs: torch.Tensor) -> torch.Tensor:
        """complex64 [B,S,rope/2] for integer positions [B,S]; shared by attention and indexer of every layer."""
        return rope_cis(positions_bs, self.cfg.qk_rope_head_dim, self.cfg.rope_theta)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [...,H] (after the final norm) -> logits [...,V]."""
        return hidden @ self.lm_head.weight.T

    def forward(
        self,
        input_ids_bs: torch.Tensor,
        *,
        attention: str = "sparse",
        positions_bs: torch.Tensor | None = None,
        token_mask_bs: torch.Tensor | None = None,
        index_loss_rows: int | str | None = None,
        rows_seed: int = 0,
        rows_of: tuple[int, ...] = (0, 1),
        index_only: bool = False,
        mtp_depth: int = 0,
    ) -> ModelOutput:
        """Whole-sequence forward of int64 ids [B,S].

        attention: "sparse" attends to the indexer's top min(index_topk, t+1) keys (plain causal attention when S <= index_topk),
        "dense" to all. index_loss_rows: None (no indexer loss), "all", or how many query rows per sequence, drawn by rows_seed.
        index_only: indexer-only gradients (dense warm-up, notes B.3). token_mask bool [B,S] marks real tokens for the router's
        counts, the balance loss and the indexer's rows; right padding needs no attention mask. mtp_depth: unrolled MTP steps.
        """
        if attention not in ("sparse", "dense"):
            raise ValueError(f"attention must be 'sparse' or 'dense', got {attention!r}")
        if self.cfg.attention != "mla" and (attention == "sparse" or index_loss_rows is not None):
            raise ValueError(
                f"DSA (attention='sparse', index_loss_rows) needs model.attention 'mla', this model has {self.cfg.attention!r}: "
                "call it with attention='dense'"
            )
        if mtp_depth and self.mtp is None:
            raise ValueError("mtp_depth > 0 but the model has no MTP layer (num_nextn_predict_layers is 0)")
        batch, size = input_ids_bs.shape
        if positions_bs is None:
            positions_bs = torch.arange(size, device=input_ids_bs.device)[None]
        args = BlockArgs(attention, index_only, token_mask_bs=token_mask_bs, context=self.context)
        if self.context is not None:
            self.context.begin(size)
        if index_loss_rows is not None:
            args.rows_br = self._draw_rows(index_loss_rows, rows_seed, batch, size, rows_of).to(input_ids_bs.device)
            args.row_weight_br = torch.ones(args.rows_br.shape, device=input_ids_bs.device)
            if token_mask_bs is not None:
                args.row_weight_br = token_mask_bs.gather(1, args.rows_br).float()
        frozen = torch.no_grad if index_only else nullcontext
        with frozen():
            cis_bsr = self.rope(args.local(positions_bs))
            hidden_bsh = self.model.embed_tokens(args.local(input_ids_bs))
        index_losses, aux_losses, out = [], [], ModelOutput(hidden_bsh)
        masks = None
        for block in self.blocks:
            result = block(hidden_bsh, cis_bsr, args, masks)
            hidden_bsh, masks = result.hidden_bsh, result.masks
            if result.index_loss is not None:
                index_losses.append(result.index_loss)
            if result.counts_e is not None:
                out.router_counts.append(result.counts_e)
                aux_losses.append(result.aux_loss)
        with frozen():
            out.hidden_bsh = self.model.norm(hidden_bsh)
            if mtp_depth:
                layers = self.mtp_layers
                hiddens, results = unroll(
                    layers, self.model.embed_tokens, input_ids_bs, out.hidden_bsh, cis_bsr, mtp_depth, args
                )
                out.mtp_hidden = hiddens
                for i in range(min(len(layers), mtp_depth)):  # the last layer serves all depths from its own on
                    own = results[i : i + 1] if i + 1 < len(layers) else results[i:]
                    out.router_counts.append(torch.stack([r.counts_e for r in own]).sum(0))
                aux_losses.append(
                    None if results[0].aux_loss is None else torch.stack([r.aux_loss for r in results]).mean()
                )
        if index_loss_rows is not None:
            if mtp_depth:  # outside of `frozen`: this loss has a gradient even where nothing else has
                index_losses.append(torch.stack([r.index_loss for r in results]).mean())
            if not index_losses:
                raise ValueError("index_loss_rows asks for the indexer's loss, but no layer that ran has an indexer")
            out.index_loss = torch.stack(index_losses).sum()
        if aux_losses and all(a is not None for a in aux_losses):
            out.aux_loss = torch.stack(aux_losses).sum()
        return out

    @staticmethod
    def _draw_rows(rows: int | str, seed: int, batch: int, size: int, share: tuple[int, ...] = (0, 1)) -> torch.Tensor:
        """Distinct query rows per sequence, ascending: int64 [B,R].

        share: (r, w) when these are every w-th sequence of a larger batch, from r on, or (r, w, f) when they follow f such
        sequences (micro-batches): they draw what they would in it.
        """
        if rows == "all":
            return torch.arange(size).expand(batch, -1)
        if not isinstance(rows, int) or rows < 1:
            raise ValueError(f"index_loss_rows must be None, 'all' or a positive integer, got {rows!r}")
        generator = torch.Generator().manual_seed(seed)
        first = share[2] if len(share) > 2 else 0
        drawn = torch.rand((first + batch) * share[1], size, generator=generator)[share[0] :: share[1]][first:]
        return drawn.topk(min(rows, size), dim=1).indices.sort(dim=1).values

    def update_router_bias(self, router_counts: list[torch.Tensor], rate: float) -> None:
        """Loss-free balancing after a step: counts per MoE layer as forward returns them (sum over micro-batches and ranks)."""
        gates = [m.mlp.gate for m in self.model.layers if isinstance(m.mlp, MoE)]
        if len(router_counts) > len(gates):
            raise ValueError(f"got counts for {len(router_counts)} MoE layers, the model has {len(gates)}")
        for gate, counts_e in zip(gates, router_counts):
            gate.update_bias(counts_e, rate)
