"""What every policy-gradient stage shares: batches of samples, log-probs of the policy, one update, resume state.

python -m pytest tests/tasks/test_rl.py
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from kernels.cross_entropy import linear_logprobs
from model.losses import grpo_icepop_loss
from model.muon import MuonSplit, OptimConfig, build_optimizer
from tasks.problems import Problem, sample
from tasks.resume import ResumeStore
from tasks.rollouts import Sample

# (logp_theta [B, T], logp_rollout [B, T], advantages [B] or [B, T], mask [B, T]) -> (these rows' share of the loss, numbers)
Loss = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, dict[str, float]]]


class PolicyConfig(BaseModel):
    """How an RL stage optimises. The indexer and the router's bias are frozen, there is no weight decay (notes G.1)."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    lr: float = Field(1e-3, gt=0, description="peak learning rate of every group")
    lr_embed: float | None = Field(None, gt=0, description="of embeddings, head and norms; None takes lr")
    muon: str = Field("split", description="'split', or 'off' for AdamW everywhere")
    warmup_steps: int = Field(3, ge=0)
    final_lr_share: float = Field(0.1, gt=0, le=1, description="of the peak, reached linearly at the last step")
    clip_norm: float = Field(1.0, gt=0)
    micro_tokens: int = Field(8192, ge=64, description="padded tokens of one forward")

    def optimizer(self, model: torch.nn.Module) -> MuonSplit:
        """The optimizer of a policy; freezes the indexer's parameters."""
        other = self.lr if self.lr_embed is None else self.lr_embed
        lrs = {"lr_matrix": self.lr, "lr_embed": other, "lr_head": other, "lr_norm": other}
        return build_optimizer(model, OptimConfig(**lrs, muon=self.muon, train="backbone", weight_decay=0.0))

    def lr_scale(self, step: int, steps: int) -> float:
        """Factor of the peak learning rate at update `step` of `steps`: linear warm-up, then linear decay."""
        warm = min(1.0, (step + 1) / (self.warmup_steps + 1))
        return warm * (1.0 - (1.0 - self.final_lr_share) * step / max(1, steps - 1))


class IcePopConfig(BaseModel):
    """Constants of eq. 1 (§3.2)."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    beta: float = Field(2.0, ge=1, description="tokens with rho outside [1/beta, beta] are dropped")
    eps_low: float = Field(0.2, gt=0, lt=1)
    eps_high: float = Field(0.28, gt=0)
    normalisation: str = Field(
        "sequence", pattern="^(sequence|token)$", description="mean over sequences or over tokens"
    )

    def denominator(self, samples: Sequence[Sample]) -> int:
        """What the whole batch's loss is divided by."""
        return len(samples) if self.normalisation == "sequence" else sum(sum(s.loss_mask) for s in samples)

    def on_policy(
        self, logp_bt: Tensor, rollout_bt: Tensor, advantages: Tensor, mask_bt: Tensor, denominator: int
    ) -> Any:
        """The loss of the one update that a batch gets: pi_train_old is the policy itself (r = 1), rho is trainer / engine."""
        return grpo_icepop_loss(
            logp_bt, logp_bt.detach(), rollout_bt, advantages, mask_bt, denominator=denominator, **self.model_dump()
        )


def micro_batches(samples: Sequence[Sample], max_tokens: int) -> list[list[int]]:
    """Indices grouped by similar length, each group at most max_tokens when padded; a pure function of the lengths."""
    order = sorted(range(len(samples)), key=lambda i: (len(samples[i].ids), i))
    groups: list[list[int]] = []
    for i in order:
        if groups and (len(groups[-1]) + 1) * len(samples[i].ids) <= max_tokens:
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


def pad(rows: Sequence[Sequence[float]], dtype: torch.dtype, fill: float = 0) -> Tensor:
    """Rows of different length as one [B, T] tensor, filled on the right."""
    width = max(len(row) for row in rows)
    return torch.tensor([[*row, *[fill] * (width - len(row))] for row in rows], dtype=dtype)


def policy_logprobs(model: torch.nn.Module, ids_bs: Tensor, mask_bt: Tensor) -> Tensor:
    """log pi(ids[:, t+1] | ids[:, :t+1]) at places where mask_bt [B, S-1] is 1, else 0; [B, S-1], differentiable."""
    hidden_bth = model(ids_bs, attention="sparse").hidden_bsh[:, :-1]
    chosen = mask_bt.bool()
    logp_n = linear_logprobs(hidden_bth[chosen], model.lm_head.weight, ids_bs[:, 1:][chosen])
    return torch.zeros(mask_bt.shape, dtype=logp_n.dtype).masked_scatter(chosen, logp_n)


def update(
    model: torch.nn.Module,
    optimizer: MuonSplit,
    samples: Sequence[Sample],
    advantages: Sequence[float] | Sequence[Sequence[float]],
    loss: Loss,
    config: PolicyConfig,
    lr_scale: float,
) -> dict[str, float]:
    """One optimizer step on a batch. advantages: one per sample, or one list per sample over ids[1:].

    `loss` gives the share of the whole batch's loss that a micro-batch's rows have. Samples whose advantage is 0 have
    no gradient and are left out of the forward. Returns the loss, gradient norm and token-weighted statistics.
    """
    optimizer.zero_grad()
    per_token = bool(advantages) and isinstance(advantages[0], Sequence)
    live = [i for i, a in enumerate(advantages) if (any(a) if per_token else a != 0)]
    total, stats, tokens = 0.0, {}, 0
    for group in micro_batches([samples[i] for i in live], config.micro_tokens):
        rows = [live[j] for j in group]
        ids_bs = pad([samples[i].ids for i in rows], torch.long)
        mask_bt = pad([samples[i].loss_mask[1:] for i in rows], torch.float32)
        rollout_bt = pad([samples[i].logprobs[1:] for i in rows], torch.float32)
        chosen = [advantages[i] for i in rows]
        advantage = pad(chosen, torch.float32) if per_token else torch.tensor(chosen, dtype=torch.float32)
        value, found = loss(policy_logprobs(model, ids_bs, mask_bt), rollout_bt, advantage, mask_bt)
        value.backward()
        total += float(value.detach())
        count = int(mask_bt.sum())
        tokens += count
        for key, number in found.items():
            stats[key] = stats.get(key, 0.0) + number * count
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    norm = float(torch.nn.utils.clip_grad_norm_(trained, config.clip_norm)) if live else 0.0
    if not (math.isfinite(total) and math.isfinite(norm)):
        optimizer.zero_grad()
        raise ValueError(
            f"the policy's update is not finite (loss {total}, gradient norm {norm}, {len(live)} samples of "
            f"{max(len(samples[i].ids) for i in live)} tokens at most): the weights are as they were; lower policy.lr"
        )
    if live:
        optimizer.set_lr_scale(lr_scale)
        optimizer.step()
    averages = {key: number / max(1, tokens) for key, number in stats.items()}
    return {"loss": total, "grad_norm": norm, "trained_samples": float(len(live)), **averages}


def draw_problems(families: dict[str, Any], count: int, step: int, split: str = "train") -> list[Problem]:
    """`count` problems for a step, families taking turns; successive steps never repeat an index of a family."""
    names = list(families)
    share = -(-count // len(names))
    return [sample(families[names[i % len(names)]], split, step * share + i // len(names)) for i in range(count)]


def save_state(folder: Path, model: torch.nn.Module, optimizer: MuonSplit, step: int, **extra: Any) -> None:
    """Write the resume state in `folder`: weights, optimizer state, the next step, and JSON-able extras. Two are kept."""
    files = {"model": model.state_dict(), "optimizer": optimizer.state_tensors()}
    ResumeStore(Path(folder), 2, print).save(step, files, {"step": step, **extra})


def load_state(folder: Path, model: torch.nn.Module, optimizer: MuonSplit) -> dict[str, Any] | None:
    """Restore the newest whole `save_state`; None when there is none. The dict holds step and the extras."""
    found = ResumeStore(Path(folder), 2, print).load()
    if found is None:
        return None
    model.load_state_dict(found.files["model"])
    optimizer.load_state_tensors(found.files["optimizer"])
    return found.state
