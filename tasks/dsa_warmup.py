"""DSA warm-up (GLM-5 §2.1.1, App. A): the lightning indexer alone learns to imitate dense attention; all else is frozen.

    python -m tasks dsa_warmup

Reports, per layer, how much attention mass the indexer's top-k keys hold beside the best possible k and the last k: a
layer with diffuse attention cannot be judged by the share alone, only by its ratio to the best possible.
"""

from __future__ import annotations

import torch
import xxhash
from pydantic import Field

from tasks.heldout import indexer_recall
from tasks.lm_run import LmConfig, run_lm, start_model, token_dep
from tasks.objectives import IndexerWarmup
from tasks.samplers import validation_windows
from tasks.stage import Stage
from tasks.tokens import TokenSet


class Config(LmConfig):
    """See tasks/lm_run.py."""

    index_rows: int | None = Field(None, ge=1, description="query rows per sequence in the loss; null: all of them")
    recall_windows: int = Field(4, ge=1, description="held-out windows for the recall")
    recall_rows: int = Field(64, ge=1, description="query rows per window for the recall")
    recall_topk: list[int] = Field([], description="further k beside the model's index_topk")


def recall_windows(tokens: TokenSet, seq_len: int, windows: int) -> torch.Tensor:
    """Held-out windows [N, seq_len] from the domains with most validation text."""
    rows = []
    for domain in sorted(tokens.domains, key=lambda d: (-tokens.tokens(d, "val"), d)):
        if tokens.tokens(domain, "val") > seq_len:
            rows.append(torch.as_tensor(validation_windows(tokens.shard(domain, "val"), seq_len, windows)[0]))
    if not rows:
        raise ValueError(f"no domain has {seq_len} validation tokens; lower heldout.seq_len")
    return torch.cat(rows)[:windows]


def report_recall(stage: Stage, before: list[dict], after: list[dict], topk: int) -> None:
    """Recall per layer, before and after the stage: a line each, and the stage's metrics."""
    k = str(topk)
    for layer, (old, new) in enumerate(zip(before, after, strict=True)):
        stage.print(
            f"layer {layer}: top-{k} keys hold {new[k]['indexer']:.3f} of attention, {new[k]['ratio']:.1%} of the best "
            f"possible (before {old[k]['ratio']:.1%}; the last {k}: {new[k]['recent']:.3f})"
        )
    stage.metric(
        recall={f"layer_{i}": layer for i, layer in enumerate(after)},
        recall_before={f"layer_{i}": layer for i, layer in enumerate(before)},
        recall_ratio=min(layer[k]["ratio"] for layer in after),
    )


def frozen_hashes(model: torch.nn.Module) -> dict[str, str]:
    """Digest of every parameter and buffer that warm-up must leave as it is: all but the indexers'."""
    kept = {n: t for n, t in model.state_dict().items() if ".indexer." not in n}
    return {n: xxhash.xxh3_128(t.detach().cpu().contiguous().numpy()).hexdigest() for n, t in kept.items()}


def run(stage: Stage) -> None:
    config: Config = stage.config
    tokens = token_dep(stage)
    model = start_model(stage, tokens, train="indexer")
    seq_len = config.heldout.seq_len or config.seq_len
    topks = sorted({model.cfg.index_topk, *config.recall_topk})
    ids = recall_windows(tokens, seq_len, config.recall_windows).to(next(model.parameters()).device)
    measure = lambda: indexer_recall(model, ids, topks, config.recall_rows, stage.rng_seed("recall"))  # noqa: E731
    before, frozen = measure(), frozen_hashes(model)
    objective = IndexerWarmup(config.index_rows or "all", stage.rng_seed("rows"), mtp_depth=min(1, config.mtp.depth))
    run_lm(stage, model, objective, packing="best_fit", attention="sparse", train="indexer")
    changed = sum(1 for n, value in frozen_hashes(model).items() if value != frozen[n])
    assert not changed, f"warm-up changed {changed} tensors that are not the indexer's"
    trained = sum(1 for p in model.parameters() if p.requires_grad)
    stage.metric(audit={"trained_tensors": trained, "frozen_tensors_changed": changed})
    report_recall(stage, before, measure(), model.cfg.index_topk)
