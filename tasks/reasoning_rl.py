"""Reasoning RL: GRPO with IcePop on verifiable problems, fully on-policy, no KL term (§3.2 eq. 1).

Each step samples groups of solutions from the engine process, scores them, takes one gradient step on the exact ids and
log-probs that came back, and publishes the weights. The indexer and the router's bias are frozen, and the engine selects
the same keys as the training forward; a parity gate checks that before anything is trained.

    dvc repro reasoning_rl          python -m tasks reasoning_rl
"""

from __future__ import annotations

import torch
from pydantic import Field

from model.losses import group_advantages, grpo_icepop_loss
from tasks.rl import draw_problems, update
from tasks.rl_run import PolicyRun, RunConfig
from tasks.rollouts import statistics
from tasks.stage import Stage


class Config(RunConfig):
    beta: float = Field(2.0, ge=1, description="IcePop bound: tokens with rho outside [1/beta, beta] are dropped")
    eps_low: float = Field(0.2, gt=0, lt=1)
    eps_high: float = Field(0.28, gt=0)
    normalisation: str = Field(
        "sequence", pattern="^(sequence|token)$", description="mean over sequences or over tokens"
    )


def run(stage: Stage) -> None:
    """Train data/sft's policy; write data/reasoning_rl."""
    config: Config = stage.config
    with PolicyRun(stage, stage.dep("data/sft"), config) as policy:
        for step in policy.steps():
            problems = draw_problems(policy.families, config.prompts, step)
            groups = policy.roller.roll(policy.engine, problems, config.group_size, stage.rng_seed("rollout", step))
            rewards_pg = torch.tensor([[sample.reward for sample in group] for group in groups])
            flat = [sample for group in groups for sample in group]
            advantages = policy.advantages(group_advantages(rewards_pg).flatten().tolist(), step)
            sequences = len(flat) if config.normalisation == "sequence" else sum(sum(s.loss_mask) for s in flat)

            def loss(logp_bt, rollout_bt, advantages_b, mask_bt, denominator=sequences):
                # one update per batch: pi_train_old is the policy itself, so r = 1 and rho is engine against trainer
                return grpo_icepop_loss(
                    logp_bt,
                    logp_bt.detach(),
                    rollout_bt,
                    advantages_b,
                    mask_bt,
                    beta=config.beta,
                    eps_low=config.eps_low,
                    eps_high=config.eps_high,
                    normalisation=config.normalisation,
                    denominator=denominator,
                )

            scale = config.policy.lr_scale(step, config.steps)
            logs = update(policy.model, policy.optimizer, flat, advantages, loss, config.policy, scale)
            policy.end_step(step, {**statistics(groups), **logs})
        policy.finish(stage.out("data/reasoning_rl"))
