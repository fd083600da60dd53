"""Objectives of the language-model stages, as the trainer takes them: (model, batch, step) -> (loss, logs).

`LanguageModeling` is next-token prediction plus multi-token prediction; with `index_rows` it is sparse adaptation, where
the indexer learns from its KL loss and the backbone from the language-model loss, gradients disjoint (DeepSeek-V3.2 §2.1,
GLM-5 §2.1.1). `IndexerWarmup` trains the indexer alone against dense attention.

Check it:  python -m pytest tests/tasks/test_objectives.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kernels.cross_entropy import linear_cross_entropy
from tasks.parallel import WHOLE, Part
from tasks.trainer import IGNORE, Batch


def shift_targets(targets_bs: Tensor, depth: int) -> Tensor:
    """Targets of MTP depth `depth`: position i of the result is the target of position i + depth, int64 [B, S].

    -100 where the sequence ends, and where any target on the way is -100: what lies beyond a document's end is no
    continuation of this position.
    """
    result = targets_bs
    for _ in range(depth):
        following = torch.cat([result[:, 1:], result.new_full((result.size(0), 1), IGNORE)], dim=1)
        result = torch.where(targets_bs == IGNORE, IGNORE, following)
    return result


def cross_entropy(model: nn.Module, hidden_bsh: Tensor, targets_bs: Tensor) -> Tensor:
    """Mean negative log-likelihood in nats over targets that are not -100; where the sequences are spread over ranks
    (model.context), this rank's share of it."""
    if getattr(model, "context", None) is not None:
        return model.context.cross_entropy(hidden_bsh, model.lm_head.weight, targets_bs)
    return linear_cross_entropy(hidden_bsh.flatten(0, 1), model.lm_head.weight, targets_bs.flatten())


@dataclass(frozen=True)
class LanguageModeling:
    """L = L_main + mtp_lambda * mean_k CE_k (+ balance_coef * L_balance) (+ index_coef * L_index), GLM-5 §2.1 and notes A.5.

    attention: 'dense' or 'sparse'. mtp_depth: how often the one MTP layer is unrolled; mtp_every: only at every n-th step
    (1: always, the paper's way; a depth of three doubles a step's cost on a small model); from mtp_late_step on its weight
    is mtp_late_lambda (GLM-4.5 §2.4: 0.3, then 0.1 after 15T tokens). index_rows: query rows per
    sequence for the indexer's loss, or 'all', or None for no such loss. row_seed: base of the rows' draw.
    """

    attention: str = "dense"
    mtp_depth: int = 0
    mtp_lambda: float = 0.3
    mtp_late_lambda: float = 0.3
    mtp_late_step: int | None = None
    mtp_every: int = 1
    balance_coef: float = 0.0
    index_rows: int | str | None = None
    index_coef: float = 1.0
    row_seed: int = 0

    def depth_at(self, step: int) -> int:
        """MTP steps that this optimizer step unrolls."""
        return self.mtp_depth if (step + 1) % self.mtp_every == 0 else 0

    def stage_work(self, step: int) -> dict[str, Any]:
        """What a pipeline's stages compute (model.pipeline_stage.Work); its last one calls `head_loss`."""
        return {
            "attention": self.attention,
            "mtp_depth": self.depth_at(step),
            "balance_coef": self.balance_coef,
            "index_rows": self.index_rows,
            "index_coef": self.index_coef,
            "rows_seed": self.row_seed + step,
        }

    def terms(self, batch: Batch, step: int) -> dict[str, float]:
        """What each term of the loss beside the main one is a mean over in this batch: valid targets, or rows."""
        targets_bs = batch["targets_bs"]
        found = {
            f"mtp_{k}": float((shift_targets(targets_bs, k) != IGNORE).sum()) for k in range(1, self.depth_at(step) + 1)
        }
        return found | {"rows": float(targets_bs.size(0))}

    def head_loss(
        self,
        model: nn.Module,
        hidden_bsh: Tensor,
        mtp_hidden: Sequence[Tensor],
        targets_bs: Tensor,
        step: int,
        part: Part = WHOLE,
    ) -> tuple[Tensor, dict[str, Any]]:
        """The output layers' terms: main loss and MTP losses of hidden states [B,S,H] (a pipeline's last stage has no others)."""
        loss = main = cross_entropy(model, hidden_bsh, targets_bs)
        logs: dict[str, Any] = {"lm_loss": main.detach()}
        if mtp_hidden:
            parts = [
                part.weigh(f"mtp_{k}", cross_entropy(model, hidden, shift_targets(targets_bs, k)))
                for k, hidden in enumerate(mtp_hidden, 1)
            ]
            late = self.mtp_late_step is not None and step >= self.mtp_late_step
            loss = loss + (self.mtp_late_lambda if late else self.mtp_lambda) * torch.stack(parts).mean()
            logs |= {f"mtp_loss_{k}": term.detach() for k, term in enumerate(parts, 1)}
        return loss, logs

    def __call__(self, model: nn.Module, batch: Batch, step: int, part: Part = WHOLE) -> tuple[Tensor, dict[str, Any]]:
        out = model(
            batch["input_ids_bs"],
            attention=self.attention,
            index_loss_rows=self.index_rows,
            rows_seed=self.row_seed + step,
            rows_of=(part.rank, part.world, int(batch.get("first_row", 0))),
            mtp_depth=self.depth_at(step),
        )
        loss, logs = self.head_loss(model, out.hidden_bsh, out.mtp_hidden, batch["targets_bs"], step, part)
        logs["router_counts"] = out.router_counts
        if self.balance_coef and out.aux_loss is not None:
            balance = part.weigh("rows", out.aux_loss)
            loss = loss + self.balance_coef * balance
            logs["balance_loss"] = balance.detach()
        if out.index_loss is not None:
            index = part.weigh("rows", out.index_loss)
            loss = loss + self.index_coef * index
            logs["index_kl"] = index.detach()
        return loss, logs


@dataclass(frozen=True)
class IndexerWarmup:
    """L_I = mean over query rows of KL(p || softmax(I)), summed over layers, under dense attention with a frozen backbone.

    p is the main attention's mass over the keys, heads summed and normalised. index_rows: rows per sequence, or 'all'.
    """

    index_rows: int | str = "all"
    row_seed: int = 0
    mtp_depth: int = 1

    def terms(self, batch: Batch, step: int) -> dict[str, float]:
        """As LanguageModeling's."""
        return {"rows": float(batch["input_ids_bs"].size(0))}

    def __call__(self, model: nn.Module, batch: Batch, step: int, part: Part = WHOLE) -> tuple[Tensor, dict[str, Any]]:
        out = model(
            batch["input_ids_bs"],
            attention="dense",
            index_loss_rows=self.index_rows,
            rows_seed=self.row_seed + step,
            rows_of=(part.rank, part.world, int(batch.get("first_row", 0))),
            index_only=True,
            mtp_depth=self.mtp_depth if model.mtp is not None else 0,
        )
        loss = part.weigh("rows", out.index_loss)
        return loss, {"index_kl": loss.detach()}
