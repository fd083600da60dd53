"""What the language-model stages share: their settings, and one run from token shards and a checkpoint to a checkpoint.

Used by tasks/pretrain.py, midtrain.py, dsa_warmup.py and dsa_adapt.py. The inputs are the stage's declared dependencies:
`data/pack/*` holds the tokens, `data/tokenizer` the tokenizer; any other is the checkpoint to start from.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field, model_validator
from torch import nn

from model.checkpoint import load_checkpoint, load_config
from model.config import ModelConfig
from model.muon import build_optimizer
from model.transformer import GlmMoeDsa
from tasks.fits import refuse
from tasks.heldout import flat_heldout, heldout_loss, max_attention_logits
from tasks.init_from import starting_checkpoint
from tasks.model_parallel import apply_parallelism
from tasks.objectives import LanguageModeling
from tasks.parallel import ParallelSettings, current
from tasks.samplers import BatchSampler, validation_windows
from tasks.schedules import BatchSize, LearningRate
from tasks.spread_output import save_output, saved_optimizer
from tasks.stage import FromCheckpoint, Stage, StageSpec
from tasks.tokens import TokenSet
from tasks.trainer import LoopSettings, Objective, OptimizerSettings, Section, Trainer, pick_device, split_batch

LOGIT_WINDOW = 512  # the largest attention logit is sought in one window of at most this length


class ScheduleSettings(Section):
    """The learning-rate curve, in tokens; null total_tokens takes the stage's own budget."""

    kind: str = Field("cosine", pattern="^(cosine|linear|constant)$")
    warmup_tokens: int = Field(0, ge=0)
    start: float = Field(1.0, gt=0, description="factor after warm-up")
    end: float = Field(0.1, ge=0, description="factor at the end of the curve")
    total_tokens: int | None = Field(None, gt=0, description="length of the curve when it spans several stages")
    offset_tokens: int = Field(0, ge=0, description="tokens of the curve that earlier stages used")

    @model_validator(mode="after")
    def _starts_on_the_curve(self) -> ScheduleSettings:
        if self.total_tokens is not None and self.offset_tokens >= self.total_tokens:
            raise ValueError(
                f"schedule.offset_tokens ({self.offset_tokens}) leaves nothing of schedule.total_tokens ({self.total_tokens})"
            )
        if self.offset_tokens and self.total_tokens is None:
            raise ValueError(
                "schedule.offset_tokens needs schedule.total_tokens, the length of the curve over all stages"
            )
        return self


class MtpSettings(Section):
    """Multi-token prediction (GLM-5 §2.1): one parameter set, unrolled `depth` times."""

    depth: int = Field(3, ge=0)
    weight: float = Field(0.3, ge=0, description="lambda in L = L_main + lambda * mean_k CE_k")
    late_weight: float | None = Field(None, ge=0, description="lambda from late_tokens on; null: always `weight`")
    late_tokens: int = Field(0, ge=0, description="tokens of this stage after which late_weight holds")
    every: int = Field(1, ge=1, description="only at every n-th step; 1 is the paper's way")

    @model_validator(mode="after")
    def _late_is_later(self) -> MtpSettings:
        if (self.late_weight is None) != (self.late_tokens == 0):
            raise ValueError(
                f"mtp.late_weight ({self.late_weight}) holds from mtp.late_tokens ({self.late_tokens}) on: set both or neither"
            )
        return self


class HeldoutSettings(Section):
    """Held-out loss: windows per domain and their length (null: the stage's own)."""

    windows: int = Field(8, ge=1)
    seq_len: int | None = Field(None, ge=2)


class LmConfig(FromCheckpoint):
    """Settings that every language-model stage has."""

    tokens: int = Field(gt=0, description="training tokens of this stage")
    seq_len: int = Field(ge=2, description="context length")
    rows: int = Field(ge=1, description="sequences per step")
    micro_rows: int | None = Field(
        None, ge=1, description="sequences per forward pass of a process (gradient accumulation)"
    )
    start_rows: int | None = Field(None, ge=1, description="sequences per step at the start of the batch warm-up")
    ramp_tokens: int = Field(0, ge=0, description="length of the batch warm-up")
    mixture: dict[str, Annotated[float, Field(ge=0)]] = Field(
        {}, description="share of tokens per domain; empty: as the corpus has them"
    )
    max_epochs: Annotated[float, Field(gt=0)] | dict[str, Annotated[float, Field(gt=0)]] = Field(
        4.0, description="passes over a domain at most, for all or by domain; the rest goes to the others"
    )
    optimizer: OptimizerSettings
    schedule: ScheduleSettings = ScheduleSettings()
    loop: LoopSettings = LoopSettings()
    mtp: MtpSettings = MtpSettings()
    balance_coef: float = Field(0.0, ge=0, description="coefficient of the sequence-level balance loss")
    heldout: HeldoutSettings = HeldoutSettings()
    parallel: ParallelSettings = ParallelSettings()
    save_optimizer: bool = Field(
        False, description="keep the optimizer's state beside the checkpoint for the next stage"
    )
    load_optimizer: bool = Field(False, description="start from the optimizer state of the previous checkpoint")

    @model_validator(mode="after")
    def _rows_and_shares(self) -> LmConfig:
        start, ramp = self.start_rows, self.ramp_tokens
        if start is not None and start > self.rows:
            raise ValueError(f"start_rows ({start}) exceeds rows ({self.rows}), to which the batch warm-up grows")
        if (start is None or start == self.rows) != (ramp == 0):
            raise ValueError(
                f"a batch warm-up needs both start_rows ({start}) below rows ({self.rows}) and ramp_tokens ({ramp})"
            )
        if self.mixture and not sum(self.mixture.values()):
            raise ValueError(f"mixture gives no domain a share: {self.mixture}")
        if self.mtp.depth >= self.seq_len:
            raise ValueError(
                f"mtp.depth ({self.mtp.depth}) looks beyond seq_len ({self.seq_len}): there would be no targets"
            )
        return self

    def declared(self, spec: StageSpec) -> str | None:
        """The one dependency below data/ that is neither packed tokens nor the tokenizer."""
        found = [
            d for d in spec.deps if d.startswith("data/") and not d.startswith("data/pack") and d != "data/tokenizer"
        ]
        if len(found) > 1:
            raise ValueError(f"stage {spec.name} has several checkpoints among its deps: {', '.join(found)}")
        return found[0] if found else None


def token_dep(stage: Stage) -> TokenSet:
    """The stage's token shards."""
    return TokenSet(stage.dep(next(d for d in stage.spec.deps if d.startswith("data/pack"))))


checkpoint_dep = starting_checkpoint


def start_model(stage: Stage, tokens: TokenSet, train: str = "all") -> GlmMoeDsa:
    """The model of the previous stage, or a new one from the `model` section, seeded by the line's seed.

    ValueError, before anything is allocated, when it cannot be trained here (memory, context, vocabulary). `train` as in
    `run_lm`.
    """
    source = starting_checkpoint(stage)
    if source is not None:
        cfg = load_config(source)
        check_vocabulary(cfg.vocab_size, tokens.vocab_size, padded=True)
    else:
        section = dict(stage.params["model"])
        check_vocabulary(section.get("vocab_size"), tokens.vocab_size)
        section.setdefault("pad_token_id", tokens.eot_id)
        section.setdefault("eos_token_id", stop_ids(stage) or tokens.eot_id)
        cfg = ModelConfig.from_params(section)
    key = stage.name.replace("-", ".")
    for name, length in (("seq_len", stage.config.seq_len), ("heldout.seq_len", stage.config.heldout.seq_len or 0)):
        if length > cfg.max_position_embeddings:
            raise ValueError(
                f"{key}.{name} is {length}, above the model's max_position_embeddings of {cfg.max_position_embeddings}"
            )
    depth = stage.config.mtp.depth
    if depth and not cfg.num_nextn_predict_layers and train != "indexer":
        raise ValueError(f"{key}.mtp.depth is {depth}, but the model has no MTP layer (num_nextn_predict_layers is 0)")
    refuse(stage, cfg, stage.config.optimizer.model_dump(), train)
    if source is not None:
        model = load_checkpoint(source)
    else:
        model = GlmMoeDsa(cfg).init_weights(stage.rng_seed("weights"))
    return model.to(pick_device())


def check_vocabulary(model: int | None, tokens: int, padded: bool = False) -> None:
    """ValueError when a model of `model` rows cannot read the tokens; padded: it may have more (released models do)."""
    if model != tokens and not (padded and model > tokens):
        raise ValueError(
            f"the model's vocabulary is {model} (params.yaml: model.vocab_size), the tokens' is {tokens}: make "
            "model.vocab_size and tokenizer.vocab_size agree"
        )


def check_keep_best(name: str | None, domains: list[str], stage: str) -> None:
    """ValueError when loop.keep_best is none of the held-out numbers of the stage: found before training, not at its end."""
    known = [f"val/{d}/{what}" for d in (*domains, "all") for what in ("bits_per_byte", "loss")]
    if name is not None and name not in [*known, "val/max_attention_logit"]:
        raise ValueError(
            f"stage {stage}: loop.keep_best is {name!r}; the evaluation has {', '.join(known)}, val/max_attention_logit"
        )


def stop_ids(stage: Stage) -> list[int]:
    """Ids of the tokens that end a generation, from the stage's tokenizer."""
    from tasks.special_tokens import STOP_TOKENS

    added = json.loads((stage.dep("data/tokenizer") / "tokenizer.json").read_text(encoding="utf-8"))["added_tokens"]
    ids = {token["content"]: token["id"] for token in added}
    return [ids[t] for t in STOP_TOKENS if t in ids]


def previous_optimizer(stage: Stage) -> Mapping[str, torch.Tensor]:
    """The state that the previous stage's optimizer left, read when asked for; {} unless `load_optimizer` is set."""
    if not stage.config.load_optimizer:
        return {}
    source = starting_checkpoint(stage)
    state = saved_optimizer(source) if source is not None else None
    if state is None:
        raise ValueError(
            f"stage {stage.name}: load_optimizer is set, but the previous checkpoint has no "
            "optimizer/optimizer.safetensors; set save_optimizer on the stage before"
        )
    return state


def batch_sizes(config: LmConfig) -> BatchSize:
    """Rows of every step of the stage."""
    return BatchSize(
        config.seq_len,
        config.rows,
        config.tokens,
        start_rows=config.start_rows,
        ramp_tokens=config.ramp_tokens,
        offset_tokens=config.schedule.offset_tokens,
    )


def learning_rate(config: LmConfig, sizes: BatchSize) -> LearningRate:
    """The stage's learning-rate curve over its tokens."""
    schedule = config.schedule
    total = schedule.total_tokens or sizes.tokens_before(sizes.steps)
    return LearningRate(
        schedule.kind, total, schedule.warmup_tokens, schedule.start, schedule.end, schedule.offset_tokens
    )


def row_sampler(config: LmConfig, tokens: TokenSet, sizes: BatchSize, seed: int, packing: str) -> BatchSampler:
    """All rows of the stage, by its mixture and caps."""
    rows = sizes.first_row(sizes.steps)
    return BatchSampler(tokens, config.seq_len, rows, seed, config.mixture, config.max_epochs, packing)


def language_modeling(config: LmConfig, **options: Any) -> LanguageModeling:
    """Next-token and multi-token prediction as the stage's settings have it; `options` go to the objective."""
    sizes, mtp = batch_sizes(config), config.mtp
    late_step = None
    if mtp.late_weight is not None:
        late_step = next((s for s in range(sizes.steps) if sizes.tokens_before(s) >= mtp.late_tokens), sizes.steps)
    return LanguageModeling(
        mtp_depth=mtp.depth,
        mtp_lambda=mtp.weight,
        mtp_late_lambda=mtp.weight if mtp.late_weight is None else mtp.late_weight,
        mtp_late_step=late_step,
        mtp_every=mtp.every,
        balance_coef=config.balance_coef,
        **options,
    )


def run_lm(
    stage: Stage, model: GlmMoeDsa, objective: Objective, *, packing: str, attention: str, train: str = "all"
) -> dict[str, Any]:
    """Train `model` on the stage's tokens and write the checkpoint; returns the held-out results per domain.

    packing: 'window' or 'best_fit'. attention: how the held-out loss is measured. train: see model.muon.OptimConfig.
    """
    config: LmConfig = stage.config
    ranks = current()
    section = {"name": stage.name, "seq_len": config.seq_len, "mtp": {"depth": config.mtp.depth}}
    layout = apply_parallelism(model, config.parallel, ranks, section | {"sparse": attention == "sparse"})
    if layout.parts is not None:
        rows = -(-config.rows // layout.data_world)
        keys = f"{stage.name}: rows {config.rows}, micro_rows {config.micro_rows}"
        config.parallel.check_micro_batches(-(-rows // (config.micro_rows or rows)), keys)
        stage.print(f"pipeline stages: {' | '.join(map(str, layout.parts.specs))}")
    if layout.pool is not None:
        raise ValueError(
            "parallel.context_groups: variable is for samples of unequal length (sft); rows here are all as long"
        )
    tokens = token_dep(stage)
    batch_size = batch_sizes(config)
    rate = learning_rate(config, batch_size)
    sampler = row_sampler(config, tokens, batch_size, stage.rng_seed("batches"), packing)
    shares = ", ".join(f"{d} {w:.1%} ({sampler.epochs[d]:.2f} epochs)" for d, w in sampler.weights.items())
    stage.print(f"{batch_size.steps} steps of {config.rows} x {config.seq_len} tokens: {shares}")

    def batches(step: int) -> list[dict[str, torch.Tensor]]:
        rows = batch_size.rows_at(step)
        if layout.data_rank >= rows:  # the start of a batch warm-up may have fewer rows than there are ranks
            return []
        share = sampler.batch(batch_size.first_row(step), rows, layout.data_rank, layout.data_world)
        return split_batch(share, config.micro_rows or rows)

    seq_len = config.heldout.seq_len or config.seq_len
    results: dict[str, Any] = {}
    check_keep_best(config.loop.keep_best, [d for d in tokens.domains if tokens.tokens(d, "val") > 1], stage.name)
    if not any(tokens.tokens(d, "val") > 1 for d in tokens.domains):
        raise ValueError(f"{tokens.directory}: no validation text; raise pack.val_fraction or add documents")

    def evaluate(model: nn.Module, step: int) -> dict[str, float]:
        found = heldout_loss(model, tokens, seq_len, config.heldout.windows, attention)
        results.clear()
        results.update(found)
        domain = max((d for d in found if d != "all"), key=lambda d: found[d]["tokens"])
        window = torch.as_tensor(validation_windows(tokens.shard(domain, "val"), min(seq_len, LOGIT_WINDOW), 1)[0])
        logits = max_attention_logits(model, window.to(next(model.parameters()).device))
        return flat_heldout(found) | {"val/max_attention_logit": max(logits)}

    def describe(step: int) -> dict[str, Any]:
        """Which data a step sees, for the story of a refused batch."""
        first, rows = batch_size.first_row(step), batch_size.rows_at(step)
        return {"first_row": first, "rows": [list(sampler.mixture.row(r)) for r in range(first, first + rows)]}

    trainer = Trainer(
        stage,
        model,
        build_optimizer(model, config.optimizer.to_config(train)),
        objective,
        batches,
        steps=batch_size.steps,
        # A step is taken at the factor of its middle token: the first is not lost to a factor of zero.
        lr_factor=lambda step: rate.factor((batch_size.tokens_before(step) + batch_size.tokens_before(step + 1)) // 2),
        settings=config.loop,
        evaluate=evaluate,
        describe=describe,
        parallel=config.parallel,
        layout=layout,
    )
    if previous := previous_optimizer(stage):
        trainer.optimizer.load_state_tensors(previous)
    trainer.run()
    if ranks.first(not results or trainer.step != batch_size.steps):
        # Resumed after the last step, or an earlier checkpoint was the best: measure the weights that are written.
        with torch.no_grad(), layout.evaluating(model):
            if ranks.is_writer or layout.together:
                evaluate(model.eval(), trainer.step)
    results.update(ranks.first(results))
    tokenizer = stage.dep("data/tokenizer") if "data/tokenizer" in stage.spec.deps else starting_checkpoint(stage)
    optimizer = trainer.optimizer if config.save_optimizer else None
    out = stage.out(stage.spec.outs[0]) if ranks.is_writer else Path()
    save_output(layout, model, ranks, out, tokenizer, optimizer)
    if not ranks.is_writer:
        return results
    stage.metric(
        steps=trainer.step,
        tokens=int(trainer.counters["tokens"]),
        heldout=results,
        mixture=sampler.weights,
        epochs=sampler.epochs,
    )
    return results
