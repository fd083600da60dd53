"""On-policy distillation: the student samples, each prompt's teacher scores, the advantage is their difference (§3.5 eq. 2).

Teachers are the final checkpoints of SFT, reasoning RL and general RL, each served by an engine of its own; a prompt goes
to the teacher from whose training set it comes. There is no reward: A_t = log pi_teacher - log pi_theta, clamped, under
the same IcePop objective as reasoning RL with groups of one.

    dvc repro distill          python -m tasks distill
"""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field, model_validator
from torch import Tensor

from model.losses import distill_advantages
from tasks.engine_client import EngineProcess
from tasks.init_from import starting_checkpoint
from tasks.problems import Family, Problem, sample
from tasks.rl import IcePopConfig, update
from tasks.rl_run import PolicyRun, RunConfig
from tasks.rollouts import Sample, statistics
from tasks.sft_set import CHAT, SftSet
from tasks.stage import Stage


@dataclass(frozen=True)
class ChatPrompt:
    """A chat prompt of the SFT set: given as ids, judged by nobody but the teacher."""

    key: str
    ids: tuple[int, ...]
    family: str = CHAT
    thinking: bool = False
    max_new_tokens: int = 24
    max_turns: int = 1

    def prompt_ids(self, tokenizer: Any) -> list[int]:
        return list(self.ids)

    def verify(self, text: str) -> float:
        return 0.0


def chat_prompts(data_dir: Path) -> list[ChatPrompt]:
    """The prompts of the SFT set's chat samples: everything before the last assistant turn's first trained token."""
    data, out = SftSet(data_dir, "train"), []
    for i in range(len(data)):
        name, ids, mask = data[i]
        if name == CHAT and mask.any():
            trained = np.flatnonzero(mask)
            turns = np.flatnonzero(np.diff(trained) > 1)
            start = trained[turns[-1] + 1] if len(turns) else trained[0]
            out.append(ChatPrompt(str(i), tuple(int(t) for t in ids[:start])))
    return out


class Config(RunConfig):
    """`families` of RunConfig are those whose gain is reported; what is trained on is each teacher's."""

    STARTS_FROM = "data/general_rl"

    teachers: dict[str, list[str]] = Field(description="teacher stage -> families of its training set ('chat' for SFT)")
    clamp: float = Field(5.0, gt=0, description="bound of |A_t|")
    icepop: IcePopConfig = IcePopConfig()

    @model_validator(mode="after")
    def _families_known(self) -> Config:
        if self.permute_advantages:
            raise ValueError(
                "permute_advantages is a control of the reward-driven stages; here advantages are per token"
            )
        for teacher, names in self.teachers.items():
            for name in names:
                if name not in self.families and name != CHAT:
                    raise ValueError(f"teachers.{teacher} names {name!r}, which is not in families")
        return self


def step_prompts(
    config: Config, families: dict[str, Family], chats: list[ChatPrompt], step: int
) -> list[tuple[str, Problem | ChatPrompt]]:
    """(teacher, prompt) pairs of a step, all (teacher, family) pairs taking turns, no index twice."""
    sources = [(teacher, name) for teacher, names in config.teachers.items() for name in names if name != CHAT or chats]
    share = -(-config.prompts // len(sources))
    out = []
    for i in range(config.prompts):
        teacher, name = sources[i % len(sources)]
        index = step * share + i // len(sources)
        out.append((teacher, chats[index % len(chats)] if name == CHAT else sample(families[name], "train", index)))
    return out


def teacher_logprobs(engines: dict[str, Any], teachers: list[str], samples: list[Sample]) -> list[list[float]]:
    """log pi_teacher of ids[1:] of each sample by its own teacher; the engines score at the same time."""
    places = {name: [i for i, t in enumerate(teachers) if t == name] for name in engines}
    out: list[list[float]] = [[] for _ in samples]
    with ThreadPoolExecutor(len(engines)) as pool:
        results = pool.map(lambda name: engines[name].score([samples[i].ids for i in places[name]]), places)
        for name, scored in zip(places, results):
            for i, logprobs in zip(places[name], scored, strict=True):
                out[i] = logprobs
    return out


class Distillation:
    """Loss of one batch: the advantages it is given are teacher log-probs, from which the student's own are taken.

    advantage_sum adds up the clamped advantages of all sampled tokens; their mean is minus the reverse KL per token.
    """

    def __init__(self, config: Config, denominator: int) -> None:
        self.config, self.denominator, self.advantage_sum = config, denominator, 0.0

    def __call__(self, logp_bt: Tensor, rollout_bt: Tensor, teacher_bt: Tensor, mask_bt: Tensor) -> Any:
        advantages_bt = distill_advantages(teacher_bt, logp_bt, self.config.clamp)
        self.advantage_sum += float((advantages_bt * mask_bt).sum())
        return self.config.icepop.on_policy(logp_bt, rollout_bt, advantages_bt, mask_bt, self.denominator)


def run(stage: Stage) -> None:
    """Distil into data/general_rl's policy; write data/distill."""
    config: Config = stage.config
    threads = int(stage.params.get("threads", 1))
    chats = chat_prompts(stage.dep("data/sft_data")) if any(CHAT in names for names in config.teachers.values()) else []
    with contextlib.ExitStack() as stack:
        policy = stack.enter_context(PolicyRun(stage, starting_checkpoint(stage), config))
        engines = {
            name: stack.enter_context(EngineProcess(stage.dep(f"data/{name}"), threads=threads)).client
            for name in config.teachers
        }
        for step in policy.steps():
            pairs = step_prompts(config, policy.families, chats, step)
            seed = stage.rng_seed("rollout", step)
            groups = policy.roller.roll(policy.engine, [prompt for _, prompt in pairs], config.group_size, seed)
            flat = [s for group in groups for s in group]
            names = [teacher for teacher, _ in pairs for _ in range(config.group_size)]
            scores = teacher_logprobs(engines, names, flat)
            loss = Distillation(config, config.icepop.denominator(flat))
            scale = config.policy.lr_scale(step, config.steps)
            logs = update(policy.model, policy.optimizer, flat, scores, loss, config.policy, scale)
            logs["reverse_kl"] = -loss.advantage_sum / max(1, sum(sum(s.loss_mask) for s in flat))
            policy.end_step(step, {**statistics(groups, policy.model.cfg.index_topk), **logs})
        policy.finish(stage.out("data/distill"))
