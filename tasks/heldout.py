"""Held-out measurements shared by training and evaluation: loss and bits per byte per domain, and the indexer's recall.

Check it:  python -m pytest tests/tasks/test_heldout.py
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import torch
from torch import Tensor, nn

from kernels.cross_entropy import linear_cross_entropy
from kernels.indexer import attention_mass
from kernels.topk import topk_mask
from tasks.samplers import validation_windows
from tasks.tokens import TokenSet

IGNORE = -100


@torch.no_grad()
def heldout_loss(
    model: nn.Module,
    tokens: TokenSet,
    seq_len: int,
    windows: int,
    attention: str = "dense",
    domains: Iterable[str] | None = None,
    rows_per_forward: int = 8,
) -> dict[str, dict[str, float]]:
    """Per domain, over up to `windows` windows of its validation split: {domain: {loss, bits_per_byte, tokens, bytes}}.

    loss: nats per token. bits_per_byte: total nats / ln 2 / bytes of the target tokens' text, so that models with
    different tokenizers compare; special tokens cost nats and have no bytes. The key 'all' pools the domains; domains
    without validation text are left out.
    """
    device = next(model.parameters()).device
    byte_lengths = torch.as_tensor(tokens.token_bytes, dtype=torch.int64)
    sums: dict[str, np.ndarray] = {}
    for domain in domains or tokens.domains:
        ids, targets = validation_windows(tokens.shard(domain, "val"), seq_len, windows)
        total = np.zeros(3)
        for first in range(0, len(ids), rows_per_forward):
            inputs_bs = torch.as_tensor(ids[first : first + rows_per_forward])
            targets_bs = torch.as_tensor(targets[first : first + rows_per_forward])
            hidden_bsh = model(inputs_bs.to(device), attention=attention).hidden_bsh
            nats = linear_cross_entropy(
                hidden_bsh.flatten(0, 1), model.lm_head.weight, targets_bs.flatten().to(device), reduction="sum"
            )
            valid = targets_bs[targets_bs != IGNORE]
            total += [float(nats), valid.numel(), int(byte_lengths[valid].sum())]
        if total[1]:
            sums[domain] = total
    if sums:
        sums["all"] = sum(sums.values())
    return {
        domain: {
            "loss": float(nats / count),
            "bits_per_byte": float(nats / math.log(2) / size) if size else float("inf"),
            "tokens": int(count),
            "bytes": int(size),
        }
        for domain, (nats, count, size) in sums.items()
    }


def flat_heldout(results: dict[str, dict[str, float]]) -> dict[str, float]:
    """The curves' names of `heldout_loss`: val/<domain>/bits_per_byte and val/<domain>/loss."""
    return {f"val/{d}/{k}": v[k] for d, v in results.items() for k in ("bits_per_byte", "loss")}


@contextlib.contextmanager
def _attention_inputs(model: nn.Module, visit: Callable[[nn.Module, Tensor, Tensor], None]) -> Iterator[None]:
    """While open, calls visit(attention module, x [B,S,H], rope factors) for every backbone layer of a forward pass."""

    def hook(attention: nn.Module, args: tuple, kwargs: dict) -> None:
        visit(attention, args[0], args[1])

    hooks = [block.self_attn.register_forward_pre_hook(hook, with_kwargs=True) for block in model.blocks]
    try:
        yield
    finally:
        for handle in hooks:
            handle.remove()


@torch.no_grad()
def max_attention_logits(model: nn.Module, input_ids_bs: Tensor) -> list[float]:
    """The largest scaled attention logit of each layer over causal pairs: what Muon Split keeps bounded (GLM-5 §2.1)."""
    size = input_ids_bs.shape[1]
    future = torch.ones(size, size, dtype=torch.bool, device=input_ids_bs.device).triu(1)
    largest: list[float] = []

    def visit(attention: nn.Module, x_bsh: Tensor, cis_bsr: Tensor) -> None:
        q, k, _ = attention.project_qkv(x_bsh, cis_bsr)
        k = k.repeat_interleave(q.shape[2] // k.shape[2], dim=2)  # a group of GQA's serves neighbouring heads
        logits = torch.einsum("bqhd,bkhd->bhqk", q, k) * attention.softmax_scale
        largest.append(float(logits.masked_fill(future, float("-inf")).max()))

    with _attention_inputs(model, visit):
        model(input_ids_bs, attention="dense")
    return largest


@torch.no_grad()
def indexer_recall(
    model: nn.Module, input_ids_bs: Tensor, topks: Iterable[int], rows: int = 64, seed: int = 0
) -> list[dict[str, dict[str, float]]]:
    """How much attention mass the indexer's top-k keys hold, per layer: [{str(k): {indexer, oracle, recent, ratio}}].

    Measured under dense attention on `rows` random query rows with more than k keys: the mean share of the main attention
    (heads summed) on the indexer's k keys, on the best possible k keys, and on the last k. ratio = indexer / oracle:
    where attention is diffuse no selection holds much, so the share alone says little. ValueError when no row has > k keys.
    A layer that shares a selection (IndexShare) is measured by the keys of the layer that made it; one outside DSA has {}.
    """
    topks = list(topks)
    batch, size = input_ids_bs.shape
    if size <= max(topks):
        raise ValueError(f"recall at {max(topks)} needs sequences longer than {size} tokens")
    generator = torch.Generator().manual_seed(seed)
    low = max(topks)
    rows_br = torch.stack(
        [torch.randperm(size - low, generator=generator)[:rows].sort().values + low for _ in range(batch)]
    )
    results: list[dict[str, dict[str, float]]] = []
    newest: list[Tensor] = []  # scores of the nearest layer with an indexer

    def measure(attention: nn.Module, x_bsh: Tensor, cis_bsr: Tensor) -> None:
        if not hasattr(attention, "indexer"):
            results.append({})
            return
        pick = torch.arange(batch, device=x_bsh.device)[:, None]
        at = rows_br.to(x_bsh.device)
        c_q = attention.project_q_latent(x_bsh)
        q = torch.cat(attention.project_q(c_q, cis_bsr), dim=-1)
        k, _ = attention.expand_kv(*attention.project_kv_latent(x_bsh, cis_bsr))
        allowed_brt = torch.arange(size, device=x_bsh.device) <= at[..., None]
        mass_brt = attention_mass(q[pick, at], k, allowed_brt, attention.softmax_scale)
        mass_brt = mass_brt / mass_brt.sum(-1, keepdim=True)
        if attention.indexer is not None:
            keys = attention.indexer.keys(x_bsh, cis_bsr)
            cis_rows = cis_bsr.expand(batch, -1, -1)[pick, at]
            scores_brt = attention.indexer.scores(c_q[pick, at], x_bsh[pick, at], cis_rows, keys)
            newest[:] = [scores_brt.masked_fill(~allowed_brt, float("-inf"))]
        scores_brt = newest[0]
        layer = {}
        for topk in topks:
            recent_brt = allowed_brt & (torch.arange(size, device=x_bsh.device) > at[..., None] - topk)
            held = {
                "indexer": mass_brt[topk_mask(scores_brt, topk)],
                "oracle": mass_brt.topk(topk, dim=-1).values,
                "recent": mass_brt[recent_brt],
            }
            shares = {name: float(values.double().sum() / at.numel()) for name, values in held.items()}
            layer[str(topk)] = shares | {"ratio": shares["indexer"] / shares["oracle"]}
        results.append(layer)

    with _attention_inputs(model, measure):
        model(input_ids_bs, attention="dense")
    return results
