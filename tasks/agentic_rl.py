"""Agentic RL: turns with tool calls, generation and training overlapped in separate processes (§4.1).

The engine process generates batch i + lag with weight version i while this process trains on batch i, made by version
max(0, i - lag). The schedule is fixed, so a run is reproducible although both sides work at once. Trajectories older
than the staleness bound tau are dropped, environment failures are taken out and their groups repaired, the loss is the
double-sided importance-sampling one, and the optimizer forgets its state at every weight sync.

    dvc repro agentic_rl          python -m tasks agentic_rl
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from pydantic import Field

from model.losses import double_sided_is_loss, group_advantages
from tasks.init_from import starting_checkpoint
from tasks.rl import draw_problems, update
from tasks.rl_run import PolicyRun, RunConfig
from tasks.rollouts import Sample, repair_groups, statistics
from tasks.stage import Stage

Groups = list[list[Sample]]


class Config(RunConfig):
    STARTS_FROM = "data/reasoning_rl"

    lag: int = Field(1, ge=1, description="weight versions that generation runs behind training")
    tau: int = Field(
        2, ge=0, description="staleness bound: samples with tokens older than this many versions are dropped"
    )
    updates_per_sync: int = Field(2, ge=1, description="gradient updates between two weight versions")
    eps_low: float = Field(0.2, gt=0, lt=1)
    eps_high: float = Field(0.28, gt=0)
    normalise_advantages: bool = Field(False, description="divide by the group's deviation; the paper only centres")


def drop_stale(groups: Groups, version: int, tau: int) -> tuple[Groups, int]:
    """Mark samples whose oldest weight version is more than tau behind as failed, so that group repair handles them."""
    stale = 0
    for group in groups:
        for sample in group:
            if sample.versions and version - min(sample.versions) > tau:
                sample.status, stale = "failed", stale + 1
    return groups, stale


def train_round(policy: PolicyRun, groups: Groups, step: int) -> dict[str, float]:
    """The updates of one weight version on one batch of repaired groups."""
    config: Config = policy.config
    policy.optimizer.reset_state()
    logs: dict[str, float] = {}
    share = -(-len(groups) // config.updates_per_sync)
    parts = [groups[i : i + share] for i in range(0, len(groups), share)]
    for number, part in enumerate(parts):
        flat = [sample for group in part for sample in group]
        rewards_pg = torch.tensor([[sample.reward for sample in group] for group in part])
        values = group_advantages(rewards_pg, normalise=config.normalise_advantages).flatten().tolist()
        advantages = policy.advantages(values, step * config.updates_per_sync + number)
        tokens = max(1, sum(sum(sample.loss_mask) for sample in flat))

        def loss(logp_bt, rollout_bt, advantages_b, mask_bt, denominator=tokens):
            bounds = {"eps_low": config.eps_low, "eps_high": config.eps_high}
            return double_sided_is_loss(logp_bt, rollout_bt, advantages_b, mask_bt, denominator=denominator, **bounds)

        scale = config.policy.lr_scale(step, config.steps)
        found = update(policy.model, policy.optimizer, flat, advantages, loss, config.policy, scale)
        for key, value in found.items():
            logs[key] = logs.get(key, 0.0) + value / len(parts)
    return logs


def pack(groups: Groups) -> list[list[str]]:
    """Groups as JSON lines, for the resume state."""
    return [[sample.to_json() for sample in group] for group in groups]


def unpack(groups: Sequence[Sequence[str]]) -> Groups:
    return [[Sample.from_json(line) for line in group] for group in groups]


def run(stage: Stage) -> None:
    """Train data/reasoning_rl's policy; write data/agentic_rl."""
    config: Config = stage.config
    with (
        PolicyRun(stage, starting_checkpoint(stage), config) as policy,
        ThreadPoolExecutor(1) as generator,
    ):

        def generate(batch: int) -> Groups:
            problems = draw_problems(policy.families, config.prompts, batch)
            return policy.roller.roll(policy.engine, problems, config.group_size, stage.rng_seed("rollout", batch))

        ready = {int(i): unpack(groups) for i, groups in policy.extra.get("ready", {}).items()}
        for batch in range(policy.first, min(policy.first + config.lag, config.steps)):
            if batch not in ready:
                ready[batch] = generate(batch)
        for step in policy.steps():
            ahead = step + config.lag
            future = generator.submit(generate, ahead) if ahead < config.steps else None
            groups, stale = drop_stale(ready.pop(step), step, config.tau)
            logs = statistics(groups, policy.model.cfg.index_topk)
            kept, counts = repair_groups(groups, config.group_size)
            logs |= {
                "stale": stale,
                **counts,
                "version_lag": step - min(v for g in groups for s in g for v in s.versions),
            }
            if kept:
                logs |= train_round(policy, kept, step)
            if future is not None:
                ready[ahead] = future.result()
            policy.extra = {"ready": {str(i): pack(batch) for i, batch in ready.items()}}
            policy.end_step(step, logs)
        policy.finish(stage.out("data/agentic_rl"))
