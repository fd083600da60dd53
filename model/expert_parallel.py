"""Expert parallelism: each rank of a group holds a part of every layer's experts; tokens travel to them and back (notes E).

    route = make_route(ranks, per_node=8, stages=2)
    shard_experts(model, route)               # swaps the experts of every MoE layer, the MTP layer's too
    whole = whole_experts(model.state_dict(), route)      # names and shapes of an unsharded model, for checkpoints

Every rank routes its own tokens, so router, shared expert and counts stay local: the counts of all ranks are the sum, as in
data parallelism. A choice (token, expert) is sent as one row of H + 1 numbers, the token's vector and its routing weight, and
comes back as a row of H. The shared expert computes while the rows travel, forward and backward. An expert's gradient already
holds the tokens of all ranks of the group: it is summed over ranks with the same experts only, never within the group
(`is_expert` tells the parameters apart).

Run its tests: `python -m pytest tests/model/test_expert_parallel.py`
"""

import math
from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import nn

from kernels.experts import grouped_experts
from model.all_to_all import Exchange, Route, gather_counts
from model.moe import Experts, MoE
from model.state_parts import Piece, Region, Source

SHARDED = (".experts.gate_up_proj", ".experts.down_proj")


class ShardedExperts(nn.Module):
    """This rank's experts [first, last) of `experts`, behind the interface of model.moe.Experts.

    gate_up_proj [E/P,2m,H], down_proj [E/P,H,m]. ValueError when the experts cannot be split evenly.
    """

    def __init__(self, experts: Experts, route: Route):
        super().__init__()
        self.total, self.route = experts.gate_up_proj.shape[0], route
        first, last = local_experts(self.total, route)
        self.gate_up_proj = nn.Parameter(experts.gate_up_proj.detach()[first:last].clone())
        self.down_proj = nn.Parameter(experts.down_proj.detach()[first:last].clone())

    def start(self, x_nh, index_nk, weight_nk) -> tuple:
        """Send every choice to its expert's rank; rows are ordered by expert, so by rank."""
        ranks, here = self.route.size, self.total // self.route.size
        flat_r = index_nk.reshape(-1)
        order_r = flat_r.argsort(stable=True)
        counts_pe = gather_counts(torch.bincount(flat_r, minlength=self.total), self.route)
        exchange = Exchange(counts_pe.view(ranks, ranks, here).sum(-1).tolist(), self.route)
        token_r = order_r.div(index_nk.shape[1], rounding_mode="floor")
        weight_r1 = weight_nk.reshape(-1, 1).index_select(0, order_r).to(x_nh.dtype)
        rows = exchange.start(torch.cat([x_nh.index_select(0, token_r), weight_r1], dim=1))
        mine_pe = counts_pe.view(ranks, ranks, here)[:, self.route.rank]
        expert_r = torch.arange(here, device=rows.device).repeat(ranks).repeat_interleave(mine_pe.flatten())
        return exchange, rows, expert_r, order_r, index_nk.shape

    def finish(self, started: tuple) -> torch.Tensor:
        """Compute what arrived, send it back, add up each token's choices: [N,H]."""
        exchange, rows, expert_r, order_r, (tokens, k) = started
        rows = exchange.finish(rows)
        x_rh, weight_r1 = rows[:, :-1], rows[:, -1:]
        y_rh = grouped_experts(x_rh.contiguous(), self.gate_up_proj, self.down_proj, expert_r[:, None], weight_r1)
        back_rh = Exchange(exchange.back_pp, self.route)(y_rh)
        inverse_r = torch.empty_like(order_r)
        inverse_r[order_r] = torch.arange(order_r.numel(), device=order_r.device)
        return back_rh.index_select(0, inverse_r).view(tokens, k, -1).sum(1)


def local_experts(total: int, route: Route) -> tuple[int, int]:
    """[first, last) of the experts that this rank holds. ValueError when `total` does not divide by the group's size."""
    if total % route.size:
        raise ValueError(
            f"parallel.expert is {route.size}: the {total} experts (n_routed_experts) cannot be split evenly"
        )
    here = total // route.size
    return route.rank * here, (route.rank + 1) * here


def shard_experts(model: nn.Module, route: Route) -> nn.Module:
    """Replace the experts of every MoE layer by this rank's part. Returns the model. Build the optimizer afterwards."""
    for module in model.modules():
        if isinstance(module, MoE) and isinstance(module.experts, Experts):
            module.experts = ShardedExperts(module.experts, route)
    return model


def is_expert(name: str) -> bool:
    """Whether the parameter (or optimizer slot '<parameter>.<slot>') of this name is spread over the expert group."""
    return any(name.endswith(end) or f"{end}." in name for end in SHARDED)


def whole_experts(tensors: Mapping[str, torch.Tensor], route: Route) -> dict[str, torch.Tensor]:
    """The tensors of an unsharded model (or its optimizer) from every rank's: expert tensors joined, others as they are.

    Collective over the group. Slots of an expert parameter that have no expert dimension (step counters) are left alone.
    """
    whole = {}
    for name in sorted(tensors):
        tensor = tensors[name]
        if is_expert(name) and tensor.dim() == 3:
            parts = [torch.empty_like(tensor) for _ in range(route.size)]
            dist.all_gather(parts, tensor.contiguous(), group=route.group)
            tensor = torch.cat(parts)
        whole[name] = tensor
    return whole


def placed(piece: Piece, route: Route) -> Piece | None:
    """A piece of this rank's experts as one of the unsharded model's; None for what another rank of the group writes."""
    if len(piece.shape) != 3:
        return piece if route.rank == 0 else None
    first = route.rank * math.prod(piece.shape)
    region = (piece.region or Region.range(0, math.prod(piece.shape))).shifted(first)
    return Piece.part(piece.name, (piece.shape[0] * route.size, *piece.shape[1:]), piece.values, region)


class LocalExperts(Source):
    """A source of an unsharded model as a rank of an expert group sees it: of expert tensors, its experts only."""

    def __init__(self, source: Source, route: Route) -> None:
        self.source, self.route = source, route

    def __iter__(self) -> Iterator[str]:
        return iter(self.source)

    def __contains__(self, name: object) -> bool:
        return name in self.source

    def shape(self, name: str) -> tuple[int, ...]:
        shape = self.source.shape(name)
        if not is_expert(name) or len(shape) != 3:
            return shape
        first, last = local_experts(shape[0], self.route)
        return (last - first, *shape[1:])

    def read(self, name: str, region: Region | None = None) -> torch.Tensor:
        shape = self.shape(name)
        if not is_expert(name) or len(shape) != 3:
            return self.source.read(name, region)
        size = math.prod(shape)
        values = self.source.read(name, (region or Region.range(0, size)).shifted(self.route.rank * size))
        return values if region else values.view(shape)


def exchange_bytes(choices_pp: list[list[int]], hidden: int, element: int) -> int:
    """Bytes that all ranks together send for one MoE layer's forward pass: choices_pp[s][d] rows of H + 1 there, of H back.

    Rows that stay on their rank are free; the backward pass sends the same number again. Under even routing this is
    N k (1 - 1/P) (2H + 1) elements for N tokens of all ranks and k choices each.
    """
    away = sum(c for s, row in enumerate(choices_pp) for d, c in enumerate(row) if s != d)
    return away * (2 * hidden + 1) * element
