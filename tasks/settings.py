"""Nested parts of the stages' configurations that the training loop reads (tasks/trainer.py).

Check it:  python -m pytest tests/tasks/test_trainer.py
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from model.muon import OptimConfig


class Section(BaseModel):
    """Base of nested parts of a stage's configuration: strict, frozen, no unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class OptimizerSettings(Section):
    """Peak learning rates and rules of Muon Split and AdamW (model/muon.py)."""

    lr_matrix: float = Field(gt=0, description="Muon: every matrix")
    lr_embed: float | None = Field(None, description="AdamW: embedding; null takes lr_matrix")
    lr_head: float | None = Field(None, description="output head; null takes lr_matrix")
    lr_norm: float | None = Field(None, description="AdamW: norms and biases; null takes lr_matrix")
    lr_indexer: float | None = Field(None, description="the DSA indexer; null takes lr_matrix")
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


class LoopSettings(Section):
    """What the loop itself needs."""

    grad_clip: float = Field(1.0, ge=0, description="maximum global gradient norm; 0 turns clipping off")
    checkpoint_every: int = Field(50, ge=1, description="steps between resume checkpoints in scratch")
    log_every: int = Field(10, ge=1, description="steps between points of the curves")
    eval_every: int = Field(0, ge=0, description="steps between held-out evaluations; 0: only at the end")
    router_bias_rate: float = Field(1e-3, ge=0, description="step of the router's balancing bias (0: frozen)")
    router_bias_tokens: int | None = Field(
        None, ge=0, description="the bias is frozen after this many tokens of the stage"
    )
    precision: str = Field(
        "float32", pattern="^(float32|bfloat16)$", description="of the arithmetic; weights stay fp32"
    )
