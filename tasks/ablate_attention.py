"""Ablation of attention and of Muon Split (GLM-5 §2.1, Table 1; notes A.4, C.2), and the regime where plain Muon's logits grow.

    python -m tasks ablate_attention

Variants are changes to the `model` section and to the optimizer: a GQA baseline, MLA with plain Muon and with Muon Split, and
the MLA-256 trade (a third fewer heads, each larger) with Muon Split. All train on the same tokens over the same seeds. Compared:
loss curves, the largest attention logit over time, held-out bits per byte, and multiple choice by likelihood.

`regime` repeats the search for settings at which plain Muon ("whole") lets attention logits grow and Muon Split does not: each
named setting trains both ways over the seeds. A setting counts as such a regime when the largest logit of plain Muon exceeds
`growth` times Muon Split's in every seed and `floor` as well; the result says so, either way.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from pydantic import Field
from torch import nn

from tasks.ablate_run import (
    AblateConfig,
    Variant,
    new_model,
    over_seeds,
    train_variant,
    variant_config,
    write_results,
)
from tasks.heldout import heldout_loss, max_attention_logits
from tasks.lm_run import language_modeling, token_dep
from tasks.probes import continuation_choice
from tasks.samplers import validation_windows
from tasks.settings import Section
from tasks.stage import Stage
from tasks.tokens import TokenSet


class VariantSettings(Section):
    """One row of the table."""

    model: dict[str, Any] = Field({}, description="changes to the model section; null drops a key")
    optimizer: dict[str, Any] = Field({}, description="changes to the optimizer settings")


class RegimeSettings(Section):
    """The search for the regime of growing logits."""

    settings: dict[str, VariantSettings] = Field({}, description="named settings; each runs with muon whole and split")
    recipe: dict[str, Any] = Field({}, description="changes to the stage's own recipe: tokens, seq_len, rows, schedule")
    growth: float = Field(2.0, gt=1, description="plain Muon's largest logit over Muon Split's, in every seed")
    floor: float = Field(20.0, ge=0, description="and at least this large")


class Config(AblateConfig):
    """See tasks/lm_run.py for the recipe."""

    model: dict[str, Any] = Field({}, description="changes to the model section for all variants")
    variants: dict[str, VariantSettings]
    regime: RegimeSettings = RegimeSettings()
    logit_window: int = Field(256, ge=2, description="tokens of the held-out window for the largest logit")
    choice_questions: int = Field(64, ge=0, description="multiple-choice questions; 0 leaves the evaluation out")


def logit_windows(tokens: TokenSet, size: int) -> torch.Tensor:
    """One held-out window per domain that has one: int64 [n, size]."""
    rows = [
        torch.as_tensor(validation_windows(tokens.shard(d, "val"), size, 1)[0])
        for d in tokens.domains
        if tokens.tokens(d, "val") > size
    ]
    if not rows:
        raise ValueError(f"no domain has {size} held-out tokens; lower logit_window")
    return torch.cat(rows)


def cache_per_token(cfg: Any) -> int:
    """Numbers that one layer keeps per token for decoding: latent and shared key of MLA, or keys and values of GQA."""
    if cfg.attention == "gqa":
        return 2 * cfg.kv_heads * cfg.head_dim
    return cfg.kv_lora_rank + cfg.qk_rope_head_dim


def train_one(
    stage: Stage, config: Config, tokens: TokenSet, name: str, settings: VariantSettings, seed: int, full: bool
) -> dict[str, Any]:
    """One variant and seed: its numbers. `full` adds held-out loss and multiple choice."""
    cfg = variant_config(stage, tokens, {"num_nextn_predict_layers": 0} | config.model | settings.model)
    windows = logit_windows(tokens, config.logit_window)
    params = {**settings.model, **settings.optimizer, "seed": seed}
    with Variant(stage, f"{name}/s{seed}", params) as variant:
        model = new_model(cfg, stage, seed)

        def evaluate(model: nn.Module, step: int) -> dict[str, float]:
            return {
                "max_attention_logit": max(max_attention_logits(model, windows.to(next(model.parameters()).device)))
            }

        objective = language_modeling(config.model_copy(update={"mtp": config.mtp.model_copy(update={"depth": 0})}))
        trainer = train_variant(
            variant, config, model, tokens, seed, objective, optimizer=settings.optimizer, evaluate=evaluate
        )

        def result() -> dict[str, Any]:
            found: dict[str, Any] = {"max_attention_logit": trainer.last_eval["max_attention_logit"]}
            found["parameters"] = sum(p.numel() for p in model.parameters())
            found["cache_per_token"] = cache_per_token(cfg)
            length = config.heldout.seq_len or config.seq_len
            held = heldout_loss(model, tokens, length, config.heldout.windows)
            found["bits_per_byte"] = {d: row["bits_per_byte"] for d, row in held.items()}
            if full and config.choice_questions:
                found["choice"] = continuation_choice(model, tokens, config.choice_questions, stage.seed)["accuracy"]
            return found

        return variant.once(result)


def is_regime(whole: list[float], split: list[float], growth: float, floor: float) -> bool:
    """Whether plain Muon's largest logits grow where Muon Split's do not: in every seed by `growth`, and past `floor`."""
    return all(w >= growth * s and w >= floor for w, s in zip(whole, split, strict=True))


def search_regime(stage: Stage, config: Config, tokens: TokenSet) -> dict[str, Any]:
    """Every named setting with plain Muon and with Muon Split."""
    recipe = config.model_validate(config.model_dump() | _merged(config, config.regime.recipe))
    found: dict[str, Any] = {}
    for name, settings in config.regime.settings.items():
        rows = {}
        for muon in ("whole", "split"):
            own = settings.model_copy(update={"optimizer": settings.optimizer | {"muon": muon}})
            runs = [
                train_one(stage, recipe, tokens, f"regime/{name}/{muon}", own, seed, full=False)
                for seed in range(config.seeds)
            ]
            rows[muon] = over_seeds(runs)
        logits = {m: rows[m]["max_attention_logit"]["seeds"] for m in rows}
        holds = is_regime(logits["whole"], logits["split"], config.regime.growth, config.regime.floor)
        found[name] = {**rows, "is_regime": holds, "settings": settings.model_dump()}
        stage.print(
            f"regime {name}: largest logit plain Muon {', '.join(f'{v:.1f}' for v in logits['whole'])}; Muon Split "
            f"{', '.join(f'{v:.1f}' for v in logits['split'])}: {'past' if holds else 'not past'} the bounds"
        )
    return found


def _merged(config: Config, changes: Mapping[str, Any]) -> dict[str, Any]:
    """`changes` over the config's own sections, mapping by mapping."""
    from tasks.params import merge

    own = config.model_dump()
    return {key: merge(own[key], value) if isinstance(value, dict) else value for key, value in changes.items()}


def run(stage: Stage) -> None:
    """Train and compare every variant. Writes data/ablate_attention/results.json."""
    config: Config = stage.config
    tokens = token_dep(stage)
    results: dict[str, Any] = {}
    for name, settings in config.variants.items():
        runs = [train_one(stage, config, tokens, name, settings, seed, full=True) for seed in range(config.seeds)]
        results[name] = over_seeds(runs) | {"settings": settings.model_dump()}
        bpb, logit = results[name]["bits_per_byte"]["all"], results[name]["max_attention_logit"]
        stage.print(
            f"{name}: {bpb['mean']:.4f} ± {bpb['sd']:.4f} bits per byte, largest logit {logit['mean']:.1f} ± {logit['sd']:.1f}"
        )
    write_results(stage, {"variants": results, "regime": search_regime(stage, config, tokens)})
    stage.rows(variants=len(config.variants), regime=len(config.regime.settings))
