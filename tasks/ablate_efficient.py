"""Ablation of efficient attention (GLM-5 §2.1.2, Tables 4 to 6): a trained model converted, trained on, probed at length.

    python -m tasks ablate_efficient

The base is the line's mid-trained checkpoint, or a model of its own when `model` changes the architecture, trained on text with
facts to recall (tasks/probes.py): without that a model of this size recalls nothing and every variant would score alike.
Variants, half of the layers each: sliding windows at every other layer (`swa_interleave`) and where a beam search puts them
(`swa_pattern`), Gated DeltaNet (`gdn`) and SimpleGDN (`simple_gdn`) at every other layer, and DSA (`dsa`, all layers).

    untrained   windows without any training, beside full attention                            (Table 4)
    trained     every variant after the same tokens of continued training, `full` among them    (Table 5)
    dsa         full attention; indexer warmed up only; warm-up and sparse adaptation           (Table 6)
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import torch
from pydantic import Field

from model.checkpoint import load_checkpoint
from model.convert import convert
from model.transformer import GlmMoeDsa
from tasks import ablate_probes as probing
from tasks.ablate_run import (
    AblateConfig,
    Variant,
    new_model,
    over_seeds,
    train_variant,
    variant_config,
    write_results,
)
from tasks.beam_search import beam_search, interleaved
from tasks.heldout import heldout_loss
from tasks.lm_run import checkpoint_dep, language_modeling, token_dep
from tasks.objectives import IndexerWarmup
from tasks.probes import mean_score
from tasks.settings import Section
from tasks.stage import Stage
from tasks.tokens import TokenSet
from tasks.trainer import pick_device

Recipe = dict[str, Any]


class BeamSettings(Section):
    """The search of A.6 and its bounds."""

    beam: int = Field(8, ge=1)
    step: int = Field(2, ge=1, description="layers converted per step")
    budget: int | None = Field(None, ge=1, description="new patterns scored per step; null: all")
    length: int = Field(ge=1, description="probe length of the score (the paper: RULER at 16K)")
    measure: str = Field("exact", pattern="^(exact|choice|gain)$")


class Config(AblateConfig):
    """The recipe is the variants' continued training; `base`, `warmup` and `adapt` change it for their part."""

    model: dict[str, Any] = Field({}, description="changes to the model section; then the base is trained from scratch")
    base: Recipe = Field({}, description="the base's training: changes to the recipe")
    warmup: Recipe = Field({}, description="DSA warm-up: changes to the recipe")
    adapt: Recipe = Field({}, description="DSA sparse adaptation: changes to the recipe")
    index_topk: int = Field(ge=1, description="keys that DSA selects")
    sliding_window: int = Field(ge=1)
    simple_gdn_decay: str = Field("none", pattern="^(none|fixed)$")
    index_rows: int = Field(64, ge=1, description="query rows of the indexer's loss")
    recall: probing.RecallSettings = probing.RecallSettings()
    probes: probing.ProbeSettings
    beam: BeamSettings


class Ablation:
    """One seed's run: the base, and what every variant shares."""

    def __init__(self, stage: Stage, tokens: TokenSet, seed: int) -> None:
        self.stage, self.tokens, self.seed = stage, tokens, seed
        self.config: Config = stage.config
        self.symbols, self.cases = probing.prepare(tokens, self.config.probes, stage.seed)

    def score(self, model: GlmMoeDsa, attention: str = "dense") -> dict[str, Any]:
        """Probes by task and length, and held-out bits per byte."""
        config = self.config
        found = probing.score(model, self.cases, attention)
        length = config.heldout.seq_len or config.seq_len
        held = heldout_loss(model, self.tokens, length, config.heldout.windows, attention)
        return {"probes": found, "bits_per_byte": held["all"]["bits_per_byte"]}

    def recipe(self, changes: Recipe) -> Config:
        from tasks.params import merge

        bare = {"mtp": {"depth": 0}}  # converted layers are compared without MTP
        return Config.model_validate_json(json.dumps(merge(merge(self.config.model_dump(), changes), bare)))

    def train(
        self, name: str, model: GlmMoeDsa, changes: Recipe, objective: Callable | None = None, train: str = "all",
        measure: str = "dense",
    ) -> dict[str, Any]:  # fmt: skip
        """Train `model` in place as one variant; its score."""
        config = self.recipe(changes)
        objective = objective or language_modeling(config, attention="dense")
        rows = probing.recall_rows(self.tokens, self.symbols, config, self.stage.rng_seed("recall", self.seed))
        with Variant(self.stage, f"{name}/s{self.seed}", {"seed": self.seed}) as variant:
            train_variant(
                variant, config, model, self.tokens, self.seed, objective, packing="window", extra=rows, train=train
            )
            result = variant.once(lambda: self.score(model, measure))
        shown = ", ".join(f"{t} {v:.2f}" for t, v in probing.by_task(result["probes"], "exact").items())
        self.stage.print(f"{name}/s{self.seed}: exact {shown}; {result['bits_per_byte']:.4f} bits per byte")
        return result

    def base(self) -> tuple[GlmMoeDsa, dict[str, Any]]:
        """The model that variants convert, and its score. Attention is dense: DSA selects only once it is trained."""
        config, stage = self.config, self.stage
        if config.model:
            changes = {"num_nextn_predict_layers": 0, "index_topk": config.index_topk} | config.model
            model = new_model(variant_config(stage, self.tokens, changes), stage, self.seed)
        else:
            model = without_mtp(load_checkpoint(checkpoint_dep(stage)), config.index_topk)
        return model, self.train("base", model, config.base)


def without_mtp(model: GlmMoeDsa, index_topk: int) -> GlmMoeDsa:
    """The same backbone without MTP layers, and with another index_topk (no weight depends on it)."""
    cfg = dataclasses.replace(model.cfg, num_nextn_predict_layers=0, index_topk=index_topk)
    bare = GlmMoeDsa(cfg)
    bare.load_state_dict({n: t for n, t in model.state_dict().items() if n in bare.state_dict()})
    return bare.to(pick_device())


def one_seed(stage: Stage, tokens: TokenSet, seed: int) -> dict[str, Any]:
    """Every table's numbers of one seed."""
    run, config = Ablation(stage, tokens, seed), stage.config
    base, base_score = run.base()
    layers = base.cfg.num_hidden_layers
    fixed = interleaved(layers)

    def windows(pattern: str) -> GlmMoeDsa:
        return convert(base, pattern, "swa", sliding_window=config.sliding_window).eval()

    def search() -> dict[str, Any]:
        # Cases of their own: a pattern chosen on the cases of the tables would be favoured there.
        lengths = config.probes.model_copy(update={"lengths": [config.beam.length]})
        _, ranking = probing.prepare(tokens, lengths, stage.rng_seed("beam"))
        found = beam_search(
            layers,
            fixed.count("S"),
            lambda pattern: mean_score(
                probing.score(windows(pattern), ranking),
                config.beam.measure,
            ),
            config.beam.beam,
            config.beam.step,
            config.beam.budget,
            stage.seed,
        )
        stage.print(f"beam search: {found.pattern} scores {found.score:.3f} ({found.scored} patterns scored)")
        return dataclasses.asdict(found) | {"interleaved": fixed}

    with Variant(stage, f"search/s{seed}") as variant:
        beam = variant.once(search, "beam")
        untrained = {
            "full": base_score,
            "swa_interleave": variant.once(lambda: run.score(windows(fixed)), "interleave"),
            "swa_pattern": variant.once(lambda: run.score(windows(beam["pattern"])), "pattern"),
        }
    calibration = torch.as_tensor(tokens.shard(tokens.domains[0], "train").window(0, config.seq_len))[None]
    makers: dict[str, Callable[[], GlmMoeDsa]] = {
        "full": lambda: convert(base, "F" * layers, "swa"),
        "swa_interleave": lambda: windows(fixed),
        "swa_pattern": lambda: windows(beam["pattern"]),
        "gdn": lambda: convert(base, fixed, "gdn", calibration_ids=calibration),
        "simple_gdn": lambda: convert(base, fixed, "simple_gdn", simple_gdn_decay=config.simple_gdn_decay),
    }
    trained = {}
    for name, make in makers.items():
        model = make()
        trained[name] = run.train(f"trained/{name}", model, {}) | {
            "added_parameters": sum(p.numel() for p in model.parameters()) - sum(p.numel() for p in base.parameters())
        }
    return {
        "beam": beam,
        "untrained": untrained,
        "trained": trained,
        "dsa": dsa(run, base, base_score, trained["full"]),
    }


def dsa(run: Ablation, base: GlmMoeDsa, base_score: dict[str, Any], full: dict[str, Any]) -> dict[str, Any]:
    """Table 6: the indexer alone against dense attention, then the whole model under its selection on the variants' tokens."""
    config, layers = run.config, base.cfg.num_hidden_layers
    row_seed = run.stage.rng_seed("rows", run.seed)
    model = convert(base, "F" * layers, "swa")
    out = {"base": base_score, "base_continued": full}
    warm = IndexerWarmup(config.index_rows, row_seed, mtp_depth=0)
    out["warmup_only"] = run.train("dsa/warmup", model, config.warmup, warm, train="indexer", measure="sparse")
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    adapt = language_modeling(
        run.recipe(config.adapt), attention="sparse", index_rows=config.index_rows, row_seed=row_seed
    )
    out["full_dsa"] = run.train("dsa/adapt", model, config.adapt, adapt, measure="sparse")
    return out


def run(stage: Stage) -> None:
    """Run every variant over the seeds. Writes data/ablate_efficient/results.json."""
    config: Config = stage.config
    tokens = token_dep(stage)
    seeds = [one_seed(stage, tokens, seed) for seed in range(config.seeds)]
    tables = {key: over_seeds([s[key] for s in seeds]) for key in ("untrained", "trained", "dsa")}
    write_results(
        stage,
        {
            "lengths": config.probes.lengths,
            "beam": [s["beam"] for s in seeds],
            "sliding_window": config.sliding_window,
            "index_topk": config.index_topk,
            **tables,
        },
    )
    stage.rows(variants=len(tables["trained"]) + 1, seeds=config.seeds)
