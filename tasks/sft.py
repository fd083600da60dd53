"""Supervised fine-tuning: the loss falls on what the assistant would sample, all families mixed in every batch (§3.1).

`replay` adds windows of mid-training text: without them a model this small forgets the language it read
(held-out text goes from 2.6 to 4.7 bits per byte).

dvc repro sft          python -m tasks sft
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import Field

from tasks.init_from import starting_checkpoint
from tasks.model_parallel import apply_parallelism
from tasks.parallel import WHOLE, ParallelSettings, Part, current
from tasks.samplers import BatchSampler
from tasks.sequence_balance import sequence_cost
from tasks.sft_set import SftSet
from tasks.stage import FromCheckpoint, Stage
from tasks.tokens import TokenSet
from tasks.trainer import IGNORE, Batch, LoopSettings, OptimizerSettings, Section, Trainer, pick_device


class Replay(Section):
    """Mid-training text among the conversations, all its tokens trained."""

    rows: int = Field(0, ge=0, description="windows of a step; 0 for none")
    every: int = Field(1, ge=1, description="only at every n-th step")
    seq_len: int = Field(256, ge=2)
    mixture: dict[str, float] = Field({}, description="share of tokens per domain; empty: as the corpus has them")


class Config(FromCheckpoint):
    STARTS_FROM = "data/dsa_adapt"

    batch_samples: int = Field(ge=1, description="conversations of one optimizer step")
    epochs: float = Field(1.0, gt=0, description="passes over the train split; each in its own order")
    micro_tokens: int = Field(4096, ge=64, description="padded tokens of one forward")
    warmup_share: float = Field(0.05, ge=0, le=1, description="of the steps, learning rate rising from 0")
    final_lr_share: float = Field(0.1, ge=0, le=1, description="of the peak, reached linearly at the last step")
    optimizer: OptimizerSettings
    replay: Replay = Replay()
    loop: LoopSettings = LoopSettings()
    parallel: ParallelSettings = ParallelSettings()
    eval_problems: int = Field(64, ge=0, description="held-out problems of each family solved at the end, 0 for none")


def sft_batches(
    data: SftSet,
    batch_samples: int,
    micro_tokens: int,
    seed: int,
    step: int,
    deal: Callable[[list[int]], Sequence[int]] | None = None,
) -> list[Batch]:
    """Micro-batches of one step, samples of similar length together: input_ids_bs and targets_bs (IGNORE off the mask).

    Samples come in a fresh order every epoch; the function depends on its arguments only. deal(lengths) -> which of the
    step's samples, in order of length, this rank takes (tasks.model_parallel.Layout.deal); None: all.
    """
    places = range(step * batch_samples, (step + 1) * batch_samples)
    orders = {place // len(data) for place in places}
    permutations = {epoch: np.random.default_rng([seed, epoch]).permutation(len(data)) for epoch in orders}
    rows = [data[permutations[place // len(data)][place % len(data)]][1:] for place in places]
    rows.sort(key=lambda row: len(row[0]))
    if deal is not None:
        rows = [rows[i] for i in deal([len(ids) - 1 for ids, _ in rows])]
    return [padded(group) for group in length_groups(rows, micro_tokens)]


def length_groups(rows: list[tuple[np.ndarray, np.ndarray]], micro_tokens: int) -> list[list]:
    """Cut rows sorted by length into groups of at most micro_tokens when padded."""
    groups: list[list] = []
    for row in rows:
        if groups and (len(groups[-1]) + 1) * len(row[0]) <= micro_tokens:
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups


def padded(rows: list[tuple[np.ndarray, np.ndarray]]) -> Batch:
    """Right-padded int64 [B, S] inputs and shifted targets of (ids, mask) rows."""
    width = max(len(ids) for ids, _ in rows) - 1
    inputs = np.zeros((len(rows), width), dtype=np.int64)
    targets = np.full((len(rows), width), IGNORE, dtype=np.int64)
    real = np.zeros((len(rows), width), dtype=bool)
    for i, (ids, mask) in enumerate(rows):
        n = len(ids) - 1
        inputs[i, :n] = ids[:-1]
        real[i, :n] = True
        targets[i, :n] = np.where(mask[1:] == 1, ids[1:].astype(np.int64), IGNORE)
    return {
        "input_ids_bs": torch.from_numpy(inputs),
        "targets_bs": torch.from_numpy(targets),
        "token_mask_bs": torch.from_numpy(real),
    }


class FineTuning:
    """Mean cross entropy (nats) over trained tokens, with the sparse attention the model is served with."""

    def __call__(self, model: torch.nn.Module, batch: Batch, step: int) -> tuple[torch.Tensor, dict[str, Any]]:
        out = model(batch["input_ids_bs"], attention="sparse", token_mask_bs=batch.get("token_mask_bs"))
        if model.context is not None:  # sequences spread over ranks
            loss = model.context.cross_entropy(out.hidden_bsh, model.lm_head.weight, batch["targets_bs"])
        else:
            loss, _ = self.head_loss(model, out.hidden_bsh, (), batch["targets_bs"], step)
        return loss, {"router_counts": out.router_counts}

    def stage_work(self, step: int) -> dict[str, Any]:
        """What a pipeline's stages compute, as tasks.objectives.LanguageModeling's."""
        return {"attention": "sparse"}

    def head_loss(
        self,
        model: torch.nn.Module,
        hidden_bsh: torch.Tensor,
        mtp_hidden: Sequence[torch.Tensor],
        targets_bs: torch.Tensor,
        step: int,
        part: Part = WHOLE,
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """The loss of hidden states [B,S,H]; only trained tokens pass through the output head."""
        from kernels.cross_entropy import linear_cross_entropy

        hidden_nh, targets_n = hidden_bsh.flatten(0, 1), targets_bs.flatten()
        trained = targets_n != IGNORE
        return linear_cross_entropy(hidden_nh[trained], model.lm_head.weight, targets_n[trained]), {}


objective = FineTuning()


def heldout_losses(model: torch.nn.Module, data: SftSet, micro_tokens: int) -> dict[str, float]:
    """Mean loss per trained token of each family's held-out samples; families without one are left out."""
    sums: dict[str, list[float]] = {}
    for name in sorted({data[i][0] for i in range(len(data))}):
        rows = sorted((data[i][1:] for i in range(len(data)) if data[i][0] == name), key=lambda row: len(row[0]))
        for group in length_groups(rows, micro_tokens):
            batch = padded(group)
            count = int((batch["targets_bs"] != IGNORE).sum())
            total = sums.setdefault(name, [0.0, 0.0])
            total[0] += float(objective(model, batch, 0)[0].detach()) * count
            total[1] += count
    return {f"loss/{name}": total / count for name, (total, count) in sums.items() if count}


def run(stage: Stage) -> None:
    """Train from the mid-trained sparse checkpoint; report held-out losses and held-out accuracy."""
    from model.checkpoint import load_checkpoint, load_config
    from model.decode import Decoder
    from model.muon import build_optimizer
    from tasks.fits import refuse
    from tasks.problems import build_all
    from tasks.rl_eval import evaluate_families, load_tokenizer, sft_families
    from tasks.spread_output import save_output

    config: Config = stage.config
    ranks = current()
    torch.set_num_threads(int(stage.params.get("threads", 1)))
    source, data_dir = starting_checkpoint(stage), stage.dep("data/sft_data")
    train, heldout = SftSet(data_dir, "train"), SftSet(data_dir, "heldout")
    longest = max(int((data.offsets[1:] - data.offsets[:-1]).max(initial=0)) for data in (train, heldout))
    refuse(stage, load_config(source), config.optimizer.model_dump(), length=longest)
    model = load_checkpoint(source).to(pick_device())
    section = {"name": "sft", "seq_len": config.micro_tokens, "sparse": True}
    layout = apply_parallelism(model, config.parallel, ranks, section)
    if layout.parts is not None:
        samples = -(-config.batch_samples // layout.data_world)
        config.parallel.check_micro_batches(samples, f"at most; sft.batch_samples {config.batch_samples}")
        stage.print(f"pipeline stages: {' | '.join(map(str, layout.parts.specs))}")
    # the indexer keeps what the DSA stages taught it: nothing here trains it
    optimizer = build_optimizer(model, config.optimizer.to_config(train="backbone"))
    steps = max(1, round(config.epochs * len(train) / config.batch_samples))
    warm = max(1, round(config.warmup_share * steps))
    replay, text = config.replay, None
    if replay.rows:
        tokens, total = TokenSet(stage.dep("data/pack/midtrain")), -(-steps // replay.every) * replay.rows
        text = BatchSampler(tokens, replay.seq_len, total, stage.rng_seed("replay"), replay.mixture)

    cost = sequence_cost(model.cfg, sparse=True)

    def batches(step: int) -> list[Batch]:
        order = stage.rng_seed("order")
        deal = lambda lengths: layout.deal(model, lengths, cost, config.loop.balance)  # noqa: E731
        found = sft_batches(train, config.batch_samples, config.micro_tokens, order, step, deal)
        if text is not None and step % replay.every == 0 and layout.data_rank < replay.rows:
            first = step // replay.every * replay.rows
            arrays = text.batch(first, replay.rows, layout.data_rank, layout.data_world)
            found.append({key: torch.from_numpy(value) for key, value in arrays.items()})
        return layout.weighed(found)

    def lr_factor(step: int) -> float:
        return min(1.0, (step + 1) / warm) * (1 - (1 - config.final_lr_share) * step / max(1, steps - 1))

    trainer = Trainer(
        stage,
        model,
        optimizer,
        objective,
        batches,
        steps=steps,
        lr_factor=lr_factor,
        settings=config.loop,
        evaluate=lambda m, step: heldout_losses(m, heldout, config.micro_tokens),
        parallel=config.parallel,
        layout=layout,
        # replayed text costs nats where conversations cost tenths: no spike, a step of another kind
        kind=lambda step: "replay" if text is not None and step % replay.every == 0 else "",
    )
    losses = trainer.run()
    whole = save_output(layout, model, ranks, stage.out("data/sft") if ranks.is_writer else Path(), source)
    if config.eval_problems and whole is None:  # one process generates
        whole = layout.whole_model(model)
    if not ranks.is_writer:
        return
    accuracy = {}
    if config.eval_problems:
        families = build_all(sft_families(data_dir))
        decoder, tokenizer = Decoder(whole), load_tokenizer(source)
        for mode, temperature in (("sampled", 1.0), ("greedy", 0.0)):
            accuracy[mode] = evaluate_families(
                decoder, tokenizer, families, config.eval_problems, stage.rng_seed("eval"), temperature=temperature
            )
        stage.print(f"held-out accuracy: {accuracy}")
    stage.metric(steps=steps, heldout=losses, accuracy=accuracy)
