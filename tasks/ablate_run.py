"""What the ablation stages share: variants trained on the same tokens over several seeds, each resumable on its own.

Used by tasks/ablate_mtp.py, ablate_attention.py and ablate_efficient.py.   python -m pytest tests/tasks/test_ablate.py

A variant is trained by the line's Trainer in a scratch directory of its own: a killed stage finds finished variants finished
and goes on inside the one it was in. Its curves are points of the stage's series (`<variant>/s<seed>/<name>`) and a nested
MLflow run below the stage's. Batches depend on (seed, step) alone, so all variants of a seed see the same tokens.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import Field
from torch import nn

from model.config import ModelConfig
from model.muon import build_optimizer
from model.transformer import GlmMoeDsa
from tasks.files import atomic_write
from tasks.lm_run import LmConfig, batch_sizes, learning_rate, row_sampler
from tasks.stage import Stage
from tasks.tokens import TokenSet
from tasks.trainer import Objective, Trainer, pick_device, split_batch

KEPT = ("lm_loss", "loss", "val/", "max_attention_logit", "mtp_loss")


class AblateConfig(LmConfig):
    """Settings of one ablation: the training recipe that all variants share, and how many seeds."""

    seeds: int = Field(3, ge=1, description="runs of each variant; weights and order of the data differ")


class Variant:
    """What the Trainer takes for a stage: scratch, curves and prints of one variant and seed. A context manager."""

    def __init__(self, stage: Stage, name: str, params: Mapping[str, Any] | None = None) -> None:
        self.stage, self.name = stage, name
        self.scratch = stage.scratch / name
        self.scratch.mkdir(parents=True, exist_ok=True)
        self.evidence = stage.evidence / name
        self.metrics: dict[str, Any] = {}
        self._record = stage.child(name, dict(params or {}))

    def __enter__(self) -> Variant:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if self._record:
            self._record.close("FINISHED" if kind is None else "FAILED")

    def log(self, step: int, **values: float) -> None:
        kept = {k: v for k, v in values.items() if k.startswith(KEPT)}
        self.stage.log(step, **{f"{self.name}/{k}": v for k, v in kept.items()})
        if self._record:
            self._record.log(step, {k: float(v) for k, v in values.items()})

    def print(self, message: str) -> None:
        if not message.startswith("optimizer:"):  # the same table for every variant
            self.stage.print(f"{self.name}: {message}")

    def metric(self, **values: Any) -> None:
        self.metrics.update(values)

    def timing(self, **seconds: float) -> None:
        if self._record:
            self._record.metric({f"timing/{k}": float(v) for k, v in seconds.items()})

    def once(self, make: Callable[[], dict[str, Any]], name: str = "result") -> dict[str, Any]:
        """make()'s numbers, kept in scratch: a stage that is started again does not measure twice."""
        path = self.scratch / f"{name}.json"
        if not path.is_file():
            atomic_write(path, json.dumps(make(), sort_keys=True))
        found = json.loads(path.read_text())
        if self._record:
            from tasks.stage import flatten

            self._record.metric(flatten(found))
        return found


def variant_config(stage: Stage, tokens: TokenSet, changes: Mapping[str, Any]) -> ModelConfig:
    """The `model` section with a variant's changes; a null value drops the key."""
    section = {"pad_token_id": tokens.eot_id, "eos_token_id": tokens.eot_id} | dict(stage.params["model"])
    section = {k: v for k, v in (section | dict(changes)).items() if v is not None}
    if section.get("vocab_size") != tokens.vocab_size:
        raise ValueError(
            f"model.vocab_size is {section.get('vocab_size')}, the tokens' vocabulary is {tokens.vocab_size}: make them agree"
        )
    return ModelConfig.from_params(section)


def new_model(cfg: ModelConfig, stage: Stage, seed: int) -> GlmMoeDsa:
    """Fresh weights of one seed; tensors that two variants have in common begin equal."""
    return GlmMoeDsa(cfg).init_weights(stage.rng_seed("weights", seed)).to(pick_device())


def train_variant(
    variant: Variant,
    config: LmConfig,
    model: GlmMoeDsa,
    tokens: TokenSet,
    seed: int,
    objective: Objective,
    *,
    optimizer: Mapping[str, Any] | None = None,
    evaluate: Callable[[nn.Module, int], Mapping[str, float]] | None = None,
    packing: str = "window",
    extra: Callable[[int, int], dict[str, torch.Tensor]] | None = None,
    train: str = "all",
) -> Trainer:
    """Train a variant in place by the config's recipe. `optimizer` overrides single settings of it.

    extra(step, row) -> a row of {'input_ids_bs', 'targets_bs'} [S] that takes this row's place, or {} to keep the text row.
    """
    sizes = batch_sizes(config)
    rate = learning_rate(config, sizes)
    sampler = row_sampler(config, tokens, sizes, variant.stage.rng_seed("batches", seed), packing)

    def batches(step: int) -> list[dict[str, torch.Tensor]]:
        rows = sizes.rows_at(step)
        batch = {k: torch.as_tensor(v) for k, v in sampler.batch(sizes.first_row(step), rows).items()}
        for row in range(rows if extra else 0):
            for key, value in extra(step, row).items():
                batch[key][row] = value
        return split_batch(batch, config.micro_rows or rows)

    settings = config.optimizer.model_copy(update=dict(optimizer or {}))
    trainer = Trainer(
        variant,
        model,
        build_optimizer(model, settings.to_config(train)),
        objective,
        batches,
        steps=sizes.steps,
        lr_factor=lambda step: rate.factor((sizes.tokens_before(step) + sizes.tokens_before(step + 1)) // 2),
        settings=config.loop,
        evaluate=evaluate,
    )
    trainer.run()
    model.eval()
    return trainer


def spread_of(values: Sequence[float]) -> dict[str, Any]:
    """{'mean', 'sd', 'seeds'} of one number over seeds; sd is the sample's (0 for one seed)."""
    mean = sum(values) / len(values)
    sd = math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1)) if len(values) > 1 else 0.0
    return {"mean": mean, "sd": sd, "seeds": list(values)}


def over_seeds(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Equal trees of numbers, one per seed -> one tree of `spread_of`; what is not a number is taken from the first."""
    first = results[0]
    out: dict[str, Any] = {}
    for key, value in first.items():
        if isinstance(value, Mapping):
            out[key] = over_seeds([r[key] for r in results])
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            out[key] = spread_of([r[key] for r in results])
        else:
            out[key] = value
    return out


def write_results(stage: Stage, results: Mapping[str, Any]) -> None:
    """The stage's results.json, which is also its metrics."""
    path = Path(stage.out(stage.spec.outs[0])) / "results.json"
    atomic_write(path, json.dumps(results, indent=1, sort_keys=True) + "\n")
    stage.metric(**results)
