"""Policy losses of the post-training stages, as pure functions with the paper's symbols.

Nothing here knows of a model, an engine or a file: tensors in, a scalar and its statistics out.

    python -m pytest tests/model/test_losses.py
"""

from __future__ import annotations

import torch
from torch import Tensor

NORMALISATIONS = ("sequence", "token")


def pop(rho: Tensor, beta: float = 2.0) -> Tensor:
    """IcePop multiplier pop(rho, 1/beta, beta) of eq. 1 (§3.2).

    rho: any shape, the ratio pi_train_old / pi_infer_old. Returns rho where 1/beta <= rho <= beta (bounds included)
    and 0 elsewhere. The result carries no gradient: it weighs a token, it is not optimised.
    """
    if beta < 1:
        raise ValueError(f"beta must be at least 1, got {beta}")
    rho = rho.detach()
    return torch.where((rho >= 1.0 / beta) & (rho <= beta), rho, torch.zeros_like(rho))


def double_sided(r: Tensor, eps_low: float, eps_high: float) -> Tensor:
    """f(x) of eq. 4-5 (§4.1): x where 1 - eps_low < x < 1 + eps_high (bounds excluded), else 0; carries no gradient."""
    r = r.detach()
    return torch.where((r > 1.0 - eps_low) & (r < 1.0 + eps_high), r, torch.zeros_like(r))


def group_advantages(rewards_pg: Tensor, *, normalise: bool = True, eps: float = 1e-6) -> Tensor:
    """Group-relative advantages A_i = (R_i - mean R) / std R over the last dimension (§3.2).

    rewards_pg: [prompts, group] float. Without `normalise` only the mean is taken off (§4.1). The deviation is the
    population one. A group whose rewards are all equal says nothing, so its advantages are exactly 0.
    """
    centred = rewards_pg - rewards_pg.mean(dim=-1, keepdim=True)
    std = rewards_pg.std(dim=-1, keepdim=True, correction=0)
    advantages = centred / (std + eps) if normalise else centred
    flat = rewards_pg.amax(dim=-1, keepdim=True) == rewards_pg.amin(dim=-1, keepdim=True)
    return torch.where(flat, torch.zeros_like(advantages), advantages)


def distill_advantages(teacher_logp: Tensor, student_logp: Tensor, clamp: float | None = 5.0) -> Tensor:
    """On-policy distillation advantage (§3.5 eq. 2): sg[log pi_teacher(y_t) - log pi_theta(y_t)], clamped to +-clamp."""
    advantage = (teacher_logp - student_logp).detach()
    return advantage if clamp is None else advantage.clamp(-clamp, clamp)


def _reduce(value_bt: Tensor, mask_bt: Tensor, normalisation: str, denominator: float | None) -> Tensor:
    """Mean over sequences of per-sequence token means ("sequence"), or mean over all tokens ("token").

    `denominator` replaces the count of this batch's sequences or tokens, so that micro-batches of one update sum to
    the value of the whole; rows known to contribute nothing may then be left out.
    """
    if normalisation not in NORMALISATIONS:
        raise ValueError(f"normalisation must be one of {NORMALISATIONS}, got {normalisation!r}")
    value_bt = value_bt * mask_bt
    if normalisation == "token":
        return value_bt.sum() / (mask_bt.sum().clamp(min=1) if denominator is None else denominator)
    per_sequence_b = value_bt.sum(dim=-1) / mask_bt.sum(dim=-1).clamp(min=1)
    return per_sequence_b.sum() / (len(mask_bt) if denominator is None else denominator)


def _masked_mean(value_bt: Tensor, mask_bt: Tensor) -> float:
    return float((value_bt * mask_bt).sum() / mask_bt.sum().clamp(min=1))


def grpo_icepop_loss(
    logp_theta_bt: Tensor,
    logp_train_old_bt: Tensor,
    logp_infer_old_bt: Tensor,
    advantages: Tensor,
    mask_bt: Tensor,
    *,
    beta: float = 2.0,
    eps_low: float = 0.2,
    eps_high: float = 0.28,
    normalisation: str = "sequence",
    denominator: float | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """GRPO with IcePop, eq. 1 (§3.2), as a loss to minimise; there is no KL term.

    -(1/G) sum_i (1/|y_i|) sum_t pop(rho_it, 1/beta, beta) min(r_it A_it, clip(r_it, 1-eps_low, 1+eps_high) A_it)
    with rho = pi_train_old / pi_infer_old and r = pi_theta / pi_train_old.

    logp_*_bt: [B, T] float log-probabilities of the sampled tokens; advantages: [B] or [B, T]; mask_bt: [B, T], 1 on
    tokens the policy sampled. `denominator`: see the micro-batching note of `_reduce`. Returns the scalar loss and
    statistics: drop_rate (share of tokens popped), clip_rate, mismatch (mean |rho - 1|), ratio (mean r).
    """
    mask_bt = mask_bt.to(logp_theta_bt.dtype)
    advantages_bt = advantages if advantages.dim() == 2 else advantages[:, None]
    rho_bt = torch.exp(logp_train_old_bt - logp_infer_old_bt).detach()
    weight_bt = pop(rho_bt, beta)
    r_bt = torch.exp(logp_theta_bt - logp_train_old_bt.detach())
    clipped_bt = r_bt.clamp(1.0 - eps_low, 1.0 + eps_high)
    surrogate_bt = torch.minimum(r_bt * advantages_bt, clipped_bt * advantages_bt)
    loss = -_reduce(weight_bt * surrogate_bt, mask_bt, normalisation, denominator)
    with torch.no_grad():
        bound_bt = (clipped_bt * advantages_bt < r_bt * advantages_bt).to(mask_bt.dtype)
        stats = {
            "drop_rate": _masked_mean((weight_bt == 0).to(mask_bt.dtype), mask_bt),
            "clip_rate": _masked_mean(bound_bt, mask_bt),
            "mismatch": _masked_mean((rho_bt - 1).abs(), mask_bt),
            "ratio": _masked_mean(r_bt, mask_bt),
        }
    return loss, stats


def double_sided_is_loss(
    logp_theta_bt: Tensor,
    logp_rollout_bt: Tensor,
    advantages: Tensor,
    mask_bt: Tensor,
    *,
    eps_low: float = 0.2,
    eps_high: float = 0.28,
    normalisation: str = "token",
    denominator: float | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """Asynchronous agentic objective, eq. 3-5 (§4.1), as a loss: -E_t[ f(r_t) A_t log pi_theta(a_t | s_t) ].

    r_t = exp(log pi_theta - log pi_rollout): one ratio, straight against the rollout policy; no old policy is kept.
    f is a coefficient (stop-gradient), zero outside the open interval (1-eps_low, 1+eps_high), so the gradient is that
    of an importance-weighted policy gradient on the tokens still near the policy that sampled them.

    Shapes as in `grpo_icepop_loss`. Statistics: drop_rate (tokens with f = 0), mismatch (mean |r - 1|), ratio.
    """
    mask_bt = mask_bt.to(logp_theta_bt.dtype)
    advantages_bt = advantages if advantages.dim() == 2 else advantages[:, None]
    r_bt = torch.exp(logp_theta_bt - logp_rollout_bt).detach()
    f_bt = double_sided(r_bt, eps_low, eps_high)
    loss = -_reduce(f_bt * advantages_bt * logp_theta_bt, mask_bt, normalisation, denominator)
    stats = {
        "drop_rate": _masked_mean((f_bt == 0).to(mask_bt.dtype), mask_bt),
        "mismatch": _masked_mean((r_bt - 1).abs(), mask_bt),
        "ratio": _masked_mean(r_bt, mask_bt),
    }
    return loss, stats


def bradley_terry_loss(chosen_n: Tensor, rejected_n: Tensor) -> Tensor:
    """-mean log sigmoid(r_chosen - r_rejected) over pairs of scalar rewards [N] (reward model of §3.4)."""
    return -torch.nn.functional.logsigmoid(chosen_n - rejected_n).mean()
