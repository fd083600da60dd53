"""Nested parts of the stages' configurations that the training loop reads (tasks/trainer.py).

Check it:  python -m pytest tests/tasks/test_trainer.py
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, model_validator

from model.muon import OptimConfig


class Section(BaseModel):
    """Base of nested parts of a stage's configuration: strict, frozen, no unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class OptimizerSettings(Section):
    """Peak learning rates and rules of Muon Split and AdamW (model/muon.py)."""

    lr_matrix: float = Field(gt=0, description="Muon: every matrix")
    lr_embed: float | None = Field(None, ge=0, description="AdamW: embedding; null takes lr_matrix")
    lr_head: float | None = Field(None, ge=0, description="output head; null takes lr_matrix")
    lr_norm: float | None = Field(None, ge=0, description="AdamW: norms and biases; null takes lr_matrix")
    lr_indexer: float | None = Field(None, ge=0, description="the DSA indexer; null takes lr_matrix")
    lm_head_optimizer: str = Field("adamw", description="muon (the literal GLM-4.5 rule) or adamw")
    indexer_optimizer: str = Field("muon", description="muon or adamw (the DSA stages)")
    muon: str = Field("split", description="split (GLM-5), whole (no head blocks) or off (AdamW everywhere)")
    momentum: float = Field(0.95, ge=0, lt=1)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.95, ge=0, lt=1)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.1, ge=0, description="decoupled, on matrices and embeddings only")
    ns_dtype: str = Field("float32", description="arithmetic of Newton-Schulz: float32 or bfloat16")

    def to_config(self, train: str = "all") -> OptimConfig:
        """For model.muon.build_optimizer; `train` is 'all', 'indexer' or 'backbone'."""
        return OptimConfig(**self.model_dump(), train=train)


class GuardSettings(Section):
    """When a step's loss is refused (tasks/guard.py). A loss is a spike when all three bounds are passed."""

    on: bool = Field(True, description="false: the first loss or gradient that is not finite stops the run")
    window: int = Field(64, ge=2, description="accepted losses that say what is normal")
    history: int = Field(
        32, ge=1, description="accepted losses before spikes are looked for (losses fall fast at first)"
    )
    mads: float = Field(12.0, gt=0, description="bound 1: robust deviations above the window's median")
    rise: float = Field(0.5, ge=0, description="bound 2: above the window's largest loss by this (nats)")
    max_rewinds: int = Field(3, ge=0, description="faults of one run after which it gives up")

    @model_validator(mode="after")
    def _history_fits(self) -> GuardSettings:
        if self.history > self.window:
            raise ValueError(
                f"guard.history is {self.history} and guard.window {self.window}: no more losses than the window are kept, "
                "so spikes would never be looked for"
            )
        return self


class LoopSettings(Section):
    """What the loop itself needs."""

    grad_clip: float = Field(1.0, ge=0, description="maximum global gradient norm; 0 turns clipping off")
    checkpoint_every: int = Field(50, ge=1, description="steps between resume checkpoints in scratch")
    keep_last: int = Field(
        2, ge=1, description="resume checkpoints kept; a damaged newest falls back to the one before"
    )
    async_save: bool = Field(False, description="write checkpoints in a thread, from a copy in host memory")
    keep_best: str | None = Field(None, description="held-out number whose best checkpoint is kept, as val/all/loss")
    keep_best_goal: str = Field("min", pattern="^(min|max)$", description="which keep_best value is best")
    best_as_output: bool = Field(False, description="the stage's output is the best checkpoint, not the last")
    log_every: int = Field(10, ge=1, description="steps between points of the curves")
    eval_every: int = Field(0, ge=0, description="steps between held-out evaluations; 0: only at the end")
    router_bias_rate: float = Field(1e-3, ge=0, description="step of the router's balancing bias (0: frozen)")
    router_bias_tokens: int | None = Field(
        None, ge=0, description="the bias is frozen after this many tokens of the stage"
    )
    precision: str = Field(
        "float32", pattern="^(float32|bfloat16)$", description="of the arithmetic; weights stay fp32"
    )
    router_window: int = Field(50, ge=1, description="steps over which an expert's share of the load is judged")
    router_dead_share: float = Field(
        0.05, ge=0, lt=1, description="an expert below this part of its fair share over the window is called dead"
    )
    recompute: str = Field(
        "none", pattern="^(none|selective|block)$", description="activations computed again in the backward"
    )
    offload: bool = Field(False, description="activations wait for the backward in host memory")
    balance: str = Field(
        "none",
        pattern="^(none|tokens|cost)$",
        description="how a step's samples of unequal length are dealt to ranks: in turn, or evened out by tokens or by work",
    )
    guard: GuardSettings = GuardSettings()

    @model_validator(mode="after")
    def _best_is_named(self) -> LoopSettings:
        if self.best_as_output and self.keep_best is None:
            raise ValueError("best_as_output needs keep_best, the name of the held-out number that decides")
        return self
