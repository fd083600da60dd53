"""Reasoning RL: GRPO with IcePop on verifiable problems, fully on-policy, no KL term (§3.2 eq. 1).

Each step samples groups of solutions from the engine process, scores them, takes one gradient step on the exact ids and
log-probs that came back, and publishes the weights. The indexer and the router's bias are frozen, and the engine selects
the same keys as the training forward; a parity gate checks that before anything is trained.

    dvc repro reasoning_rl          python -m tasks reasoning_rl
"""

from __future__ import annotations

import functools

import torch

from model.losses import group_advantages
from tasks.init_from import starting_checkpoint
from tasks.rl import IcePopConfig, draw_problems, update
from tasks.rl_run import PolicyRun, RunConfig
from tasks.rollouts import statistics
from tasks.stage import Stage


class Config(RunConfig):
    STARTS_FROM = "data/sft"

    icepop: IcePopConfig = IcePopConfig()


def run(stage: Stage) -> None:
    """Train data/sft's policy; write data/reasoning_rl."""
    config: Config = stage.config
    with PolicyRun(stage, starting_checkpoint(stage), config) as policy:
        for step in policy.steps():
            problems = draw_problems(policy.families, config.prompts, step)
            groups = policy.roller.roll(policy.engine, problems, config.group_size, stage.rng_seed("rollout", step))
            rewards_pg = torch.tensor([[sample.reward for sample in group] for group in groups])
            flat = [sample for group in groups for sample in group]
            advantages = policy.advantages(group_advantages(rewards_pg).flatten().tolist(), step)
            loss = functools.partial(config.icepop.on_policy, denominator=config.icepop.denominator(flat))
            scale = config.policy.lr_scale(step, config.steps)
            logs = update(policy.model, policy.optimizer, flat, advantages, loss, config.policy, scale)
            policy.end_step(step, {**statistics(groups, policy.model.cfg.index_topk), **logs})
        policy.finish(stage.out("data/reasoning_rl"))
