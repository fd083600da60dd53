"""Context parallelism: the tokens of every sequence are spread over the ranks of a group (notes E).

    context = Context(make_route(ranks))              # form="gather" (default) or "ulysses"
    set_context(model, context)                       # every rank then calls model(input_ids) with the same whole sequences
    loss = context.cross_entropy(out.hidden_bsh, model.lm_head.weight, targets)      # this rank's hidden, all targets

Two forms. "gather" fits DSA: a rank keeps its queries, and the latent keys of all tokens (kv_lora_rank + qk_rope_head_dim
numbers, and the indexer's key) are gathered on every rank, where the indexer selects for the rank's queries over the whole
sequence. The causal triangle is split evenly: of 2P chunks rank r has chunks r and 2P - 1 - r. "ulysses" exchanges tokens for
heads around attention, which the heads of the model limit.

A rank's losses (cross entropy, indexer, balance) are its part of the sequence's loss times the group's size, so that the mean
over ranks is the loss and the mean of the gradients its gradient: what data parallelism averages anyway. Router counts are
those of the rank's tokens. Token ids are known on all ranks, so the MTP layer's next token needs no message.

Run its tests: `python -m pytest tests/model/test_context_parallel.py`
"""

from functools import cache

import torch
import torch.distributed as dist
from torch import nn

from kernels.cross_entropy import linear_cross_entropy
from model.all_to_all import Exchange, Route, gather_rows
from model.attention import MLA
from model.moe import MoE

IGNORE = -100
FORMS = ("gather", "ulysses")


@cache
def segments(size: int, ranks: int, form: str) -> list[list[tuple[int, int]]]:
    """[first, last) of the pieces of a sequence that each rank holds, in order. Chunks differ by one token at most.

    ValueError when there are not enough tokens for every rank to hold one of each chunk.
    """
    chunks = ranks if form == "ulysses" or ranks == 1 else 2 * ranks
    if size < chunks:
        raise ValueError(f"a sequence of {size} tokens cannot be spread over {ranks} context ranks ({chunks} chunks)")
    bounds = [i * size // chunks for i in range(chunks + 1)]
    pieces = list(zip(bounds, bounds[1:]))
    return [[piece] for piece in pieces] if chunks == ranks else [[pieces[r], pieces[-1 - r]] for r in range(ranks)]


class Context:
    """The group over which sequences are spread, and where this rank's tokens lie in the sequence at hand."""

    def __init__(self, route: Route, form: str = "gather"):
        if form not in FORMS:
            raise ValueError(f"the form of context parallelism must be one of {', '.join(FORMS)}, got {form!r}")
        self.route, self.form = route, form
        self.ranks, self.rank = route.size, route.rank
        self.size = 0

    def begin(self, size: int) -> None:
        """Called by the model at the start of a forward pass over sequences of `size` tokens."""
        if size != self.size:
            self.size = size
            self.all_segments = segments(size, self.ranks, self.form)
            self.segments = self.all_segments[self.rank]
            self.sizes = [sum(b - a for a, b in pieces) for pieces in self.all_segments]
            places = [torch.cat([torch.arange(a, b) for a, b in pieces]) for pieces in self.all_segments]
            self.places_s = places[self.rank]
            self.order_t = torch.cat(places).argsort()  # where each position lies among the gathered ones

    def take(self, whole_bs: torch.Tensor) -> torch.Tensor:
        """This rank's columns of [B,S]."""
        return whole_bs.index_select(1, self.places_s.to(whole_bs.device))

    def gather(self, mine_bs: torch.Tensor) -> torch.Tensor:
        """[B,S,...] in the sequence's order from every rank's [B,S_r,...]; backward sums the gradients of all ranks."""
        rows = mine_bs.transpose(0, 1).flatten(1)
        whole = gather_rows(rows, self.sizes, self.route).index_select(0, self.order_t.to(rows.device))
        return whole.unflatten(1, (mine_bs.shape[0], *mine_bs.shape[2:])).transpose(0, 1)

    def heads_of(self, heads: int) -> list[int]:
        """How many heads each rank computes ("ulysses"). ValueError when there is none for some."""
        if heads < self.ranks:
            raise ValueError(
                f"parallel.context {self.ranks} in the form ulysses needs at least as many heads, got {heads}"
            )
        return [(r + 1) * heads // self.ranks - r * heads // self.ranks for r in range(self.ranks)]

    def to_heads(self, mine_bshd: torch.Tensor) -> torch.Tensor:
        """[B,S_r,H,d] of this rank's tokens -> [B,S,H_r,d] of this rank's heads, by one all-to-all."""
        batch, _, heads, width = mine_bshd.shape
        split = self.heads_of(heads)
        parts = torch.cat([part.transpose(0, 1).flatten() for part in mine_bshd.split(split, dim=2)])
        cell = batch * width
        counts_pp = [[size * h * cell for h in split] for size in self.sizes]
        got = Exchange(counts_pp, self.route)(parts)
        return got.view(self.size, batch, split[self.rank], width).transpose(0, 1)

    def to_tokens(self, heads_bshd: torch.Tensor, heads: int) -> torch.Tensor:
        """The way back: [B,S,H_r,d] -> [B,S_r,H,d]."""
        batch, _, _, width = heads_bshd.shape
        split, mine = self.heads_of(heads), self.sizes[self.rank]
        cell = batch * width
        counts_pp = [[size * h * cell for size in self.sizes] for h in split]
        got = Exchange(counts_pp, self.route)(heads_bshd.transpose(0, 1).flatten())
        parts = got.split([mine * h * cell for h in split])
        return torch.cat([p.view(mine, batch, h, width) for p, h in zip(parts, split)], dim=2).transpose(0, 1)

    @torch.no_grad()
    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Elementwise sum over the ranks, without gradient."""
        total = tensor.detach().clone()
        dist.all_reduce(total, group=self.route.group)
        return total

    def cross_entropy(
        self, hidden_bsh: torch.Tensor, weight_vh: torch.Tensor, targets_bs: torch.Tensor
    ) -> torch.Tensor:
        """This rank's share (see the module) of the mean over all targets that are not -100; targets are the whole [B,S]."""
        mine_n = self.take(targets_bs).flatten()
        trained_n = mine_n != IGNORE
        total = linear_cross_entropy(hidden_bsh.flatten(0, 1)[trained_n], weight_vh, mine_n[trained_n], reduction="sum")
        return total * (self.ranks / (targets_bs != IGNORE).sum().clamp(min=1).to(total.dtype))


class ContextMoE(MoE):
    """MoE over this rank's tokens; the balance loss is that of the whole sequences."""

    context: Context

    def forward(self, x_bsh: torch.Tensor, token_mask_bs: torch.Tensor | None = None):
        return super().forward(x_bsh, None if token_mask_bs is None else self.context.take(token_mask_bs))

    def _balance_loss(self, scores_bse, counts_be, token_mask_bs) -> torch.Tensor:
        share_bse = scores_bse / (scores_bse.sum(-1, keepdim=True) + 1e-20)
        tokens_b1 = scores_bse.new_full((scores_bse.shape[0], 1), float(self.context.size))
        if token_mask_bs is not None:
            keep_bs1 = token_mask_bs.to(share_bse.dtype).unsqueeze(-1)
            tokens_b1 = self.context.sum(keep_bs1.sum(1)).clamp(min=1)
            share_bse = share_bse * keep_bs1
        counts_be = self.context.sum(counts_be)
        scale = self.cfg.n_routed_experts / self.cfg.num_experts_per_tok
        frequency_be = counts_be.to(share_bse.dtype) * scale / tokens_b1
        return (frequency_be * (share_bse.sum(1) / tokens_b1)).sum(-1).mean() * self.context.ranks


def set_context(model: nn.Module, context: Context | None) -> nn.Module:
    """Spread the sequences of all further forward passes over the context's ranks; None: each rank has whole sequences again.

    Parameters and their names stay. Returns the model. ValueError for a model with other attention than full MLA.
    """
    from model.context_attention import ContextMLA

    plain, spread = {MLA: ContextMLA, MoE: ContextMoE}, {ContextMLA: MLA, ContextMoE: MoE}
    kinds = {type(layer.self_attn).__name__ for layer in model.model.layers}
    if context is not None and not kinds <= {"MLA", "ContextMLA"}:
        raise ValueError(f"context parallelism spreads full MLA only; this model has {', '.join(sorted(kinds))}")
    if context is not None and any(getattr(layer.self_attn, "hands_on", False) for layer in model.model.layers):
        raise ValueError(
            "context parallelism does not train indexers under model.index_share_loss 'served', only 'own'"
        )
    for module in model.modules():
        # The class is exchanged in place, as torch's fully_shard does: the module and its parameters stay the same objects.
        if type(module) in plain and context is not None:
            module.__class__ = plain[type(module)]
        elif type(module) in spread and context is None:
            module.__class__ = spread[type(module)]
        if type(module) in spread:
            module.context = context
    model.context = context
    return model
