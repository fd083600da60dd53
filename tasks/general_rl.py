"""General RL: instructions judged by rules and by the reward model together, on-policy GRPO with IcePop (§3.4).

dvc repro general_rl          python -m tasks general_rl
"""

from __future__ import annotations

import functools

import torch
from pydantic import Field

from model.losses import group_advantages
from model.reward import RewardModel
from tasks.init_from import starting_checkpoint
from tasks.problems import Problem
from tasks.rl import IcePopConfig, draw_problems, micro_batches, pad, update
from tasks.rl_run import PolicyRun, RunConfig
from tasks.rollouts import Sample, statistics
from tasks.stage import Stage


class Config(RunConfig):
    STARTS_FROM = "data/agentic_rl"

    reward_model_weight: float = Field(0.2, ge=0, le=1, description="share of the reward model; the rest is rules")
    partial_weight: float = Field(
        0.5, ge=0, le=1, description="within the rules: share of rules kept, against all or none"
    )
    normalise_advantages: bool = Field(
        False,
        description="divide by the group's deviation; where the rules agree that blows the reward model's noise up to full size",
    )
    icepop: IcePopConfig = IcePopConfig()


@torch.no_grad()
def model_rewards(model: RewardModel, samples: list[Sample], micro_tokens: int) -> list[float]:
    """The reward model's sigmoid score of each whole sample, in (0, 1)."""
    scores = [0.0] * len(samples)
    for group in micro_batches(samples, micro_tokens):
        ids = pad([samples[i].ids for i in group], torch.long)
        lengths = torch.tensor([len(samples[i].ids) for i in group])
        for i, score in zip(group, model(ids, lengths).sigmoid().tolist()):
            scores[i] = score
    return scores


def rule_reward(problem: Problem, sample: Sample, partial_weight: float) -> float:
    """What the rules pay: all or nothing, mixed with the share of rules kept; 0 for a turn that did not end."""
    if sample.status != "completed":
        return 0.0
    return (1 - partial_weight) * sample.reward + partial_weight * problem.credit(sample.text)


def run(stage: Stage) -> None:
    """Train data/agentic_rl's policy; write data/general_rl."""
    config: Config = stage.config
    weight = config.reward_model_weight
    judge = RewardModel.load(stage.dep("data/reward_model")).eval()
    with PolicyRun(stage, starting_checkpoint(stage), config) as policy:
        for step in policy.steps():
            problems = draw_problems(policy.families, config.prompts, step)
            groups = policy.roller.roll(policy.engine, problems, config.group_size, stage.rng_seed("rollout", step))
            flat = [sample for group in groups for sample in group]
            judged = model_rewards(judge, flat, config.policy.micro_tokens)
            kept = [
                rule_reward(problem, s, config.partial_weight)
                for problem, group in zip(problems, groups)
                for s in group
            ]
            blended = [(1 - weight) * rules + weight * score for rules, score in zip(kept, judged)]
            rewards_pg = torch.tensor(blended).view(len(groups), config.group_size)
            advantages_pg = group_advantages(rewards_pg, normalise=config.normalise_advantages)
            advantages = policy.advantages(advantages_pg.flatten().tolist(), step)
            loss = functools.partial(config.icepop.on_policy, denominator=config.icepop.denominator(flat))
            scale = config.policy.lr_scale(step, config.steps)
            logs = update(policy.model, policy.optimizer, flat, advantages, loss, config.policy, scale)
            shown = {"reward_model": sum(judged) / len(judged), "blended": sum(blended) / len(blended)}
            policy.end_step(step, {**statistics(groups, policy.model.cfg.index_topk), **shown, **logs})
        policy.finish(stage.out("data/general_rl"))
