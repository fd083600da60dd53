"""The reward model of general RL: Bradley-Terry on pairs of a clean and a corrupted response (§3.4).

The pairs are synthetic: a family's own solution against the same one with a fault in it. What it learns is form and
fidelity to the request, which rules check only in part.

    dvc repro reward_model          python -m tasks reward_model
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from pydantic import Field

from model.losses import bradley_terry_loss
from model.reward import RewardModel
from tasks.chat import render_tokens
from tasks.init_from import starting_checkpoint
from tasks.parallel import ParallelSettings, current
from tasks.problems import Family, Problem, build_all, mix, sample
from tasks.rl import pad
from tasks.stage import FromCheckpoint, Stage
from tasks.trainer import Batch, LoopSettings, OptimizerSettings, Trainer

_WORDS = "the of and river seven quick stone under paper".split()


def _drop(words: list[str], rng: random.Random) -> list[str]:
    return words[: rng.randrange(len(words))]


def _repeat(words: list[str], rng: random.Random) -> list[str]:
    at = rng.randrange(len(words))
    return [*words[: at + 1], *words[at:]]


def _foreign(words: list[str], rng: random.Random) -> list[str]:
    at = rng.randrange(len(words))
    return [*words[:at], rng.choice(_WORDS), *words[at + 1 :]]


def _scramble(words: list[str], rng: random.Random) -> list[str]:
    at = rng.randrange(len(words))
    letters = list(words[at])
    rng.shuffle(letters)
    return [*words[:at], "".join(letters), *words[at + 1 :]]


def _case(words: list[str], rng: random.Random) -> list[str]:
    at = rng.randrange(len(words))
    return [*words[:at], words[at].swapcase(), *words[at + 1 :]]


CORRUPTIONS: dict[str, Callable[[list[str], random.Random], list[str]]] = {
    "drop": _drop,
    "repeat": _repeat,
    "foreign": _foreign,
    "scramble": _scramble,
    "case": _case,
}


def corrupt(text: str, rng: random.Random) -> str:
    """The text with one fault from CORRUPTIONS, never equal to it."""
    words = text.split(" ")
    for _ in range(100):
        kind = rng.choice(sorted(CORRUPTIONS))
        out = " ".join(CORRUPTIONS[kind](words, rng))
        if out != text:
            return out
    return text + " " + text


def preference_pair(problem: Problem, rng: random.Random) -> tuple[list[dict], list[dict]]:
    """(chosen, rejected) conversations: the problem's solution, and the same with a fault in its last turn."""
    *head, last = [*problem.messages, *problem.solution]
    return [*head, last], [*head, {**last, "content": corrupt(last["content"], rng)}]


class Config(FromCheckpoint):
    STARTS_FROM = "data/sft"

    families: dict[str, dict[str, Any]] = Field(min_length=1, description="families whose solutions make the pairs")
    steps: int = Field(ge=1)
    pairs: int = Field(24, ge=1, description="pairs of one step")
    heldout_pairs: int = Field(128, ge=1)
    optimizer: OptimizerSettings
    loop: LoopSettings = LoopSettings(router_bias_rate=0.0)
    parallel: ParallelSettings = ParallelSettings()


def pair_batch(
    tokenizer: Any,
    families: dict[str, Family],
    split: str,
    start: int,
    count: int,
    seed: int,
    rank: int = 0,
    world: int = 1,
) -> Batch:
    """Chosen rows, then rejected rows: input_ids_bs [2 * count, S], lengths_b [2 * count].

    Rank r of w makes every w-th pair, count / w of them.
    """
    names = list(families)
    rows: tuple[list, list] = ([], [])
    for i in range(start + rank, start + count, world):
        problem = sample(families[names[i % len(names)]], split, i // len(names))
        for side, messages in zip(rows, preference_pair(problem, random.Random(mix(seed, split, i)))):
            side.append(render_tokens(tokenizer, messages, close=True)[0])
    ids = rows[0] + rows[1]
    return {"input_ids_bs": pad(ids, torch.long), "lengths_b": torch.tensor([len(row) for row in ids])}


def objective(model: RewardModel, batch: Batch, step: int) -> tuple[torch.Tensor, dict[str, Any]]:
    """Bradley-Terry loss and the share of pairs ordered rightly."""
    chosen_n, rejected_n = model(batch["input_ids_bs"], batch["lengths_b"]).chunk(2)
    return bradley_terry_loss(chosen_n, rejected_n), {"accuracy": float((chosen_n > rejected_n).float().mean())}


def run(stage: Stage) -> None:
    """Train from data/sft; write data/reward_model (a checkpoint with a value head)."""
    from model.checkpoint import load_checkpoint
    from model.muon import build_optimizer
    from tasks.rl_eval import load_tokenizer

    config: Config = stage.config
    ranks = current()
    torch.set_num_threads(int(stage.params.get("threads", 1)))
    source = starting_checkpoint(stage)
    tokenizer, families = load_tokenizer(source), build_all(config.families)
    model = RewardModel(load_checkpoint(source))
    optimizer = build_optimizer(model, config.optimizer.to_config(train="backbone"))
    seed = stage.rng_seed("pairs")
    heldout = pair_batch(tokenizer, families, "heldout", 0, config.heldout_pairs, seed)

    def batches(step: int) -> list[Batch]:
        first = step * config.pairs
        return [pair_batch(tokenizer, families, "train", first, config.pairs, seed, ranks.rank, ranks.world)]

    def evaluate(m: torch.nn.Module, step: int) -> dict[str, float]:
        loss, logs = objective(m, heldout, step)
        return {"heldout_loss": float(loss), "heldout_accuracy": logs["accuracy"]}

    trainer = Trainer(
        stage,
        model,
        optimizer,
        objective,
        batches,
        steps=config.steps,
        lr_factor=lambda step: min(1.0, (step + 1) / 5) * (1 - 0.9 * step / max(1, config.steps - 1)),
        settings=config.loop,
        evaluate=evaluate,
        parallel=config.parallel,
    )
    result = trainer.run()
    if not ranks.is_writer:
        return
    with torch.no_grad():
        rewards = model(heldout["input_ids_bs"], heldout["lengths_b"])
    chosen, rejected = rewards.chunk(2)
    stage.metric(**result, chosen_mean=float(chosen.mean()), rejected_mean=float(rejected.mean()))
    model.save(stage.out("data/reward_model"), tokenizer_dir=source)
