"""Mid-training (GLM-5 §2.3): longer contexts step by step, whole documents packed by best fit, a linear learning rate.

    python -m tasks midtrain-s1      then -s2 and -s3: 32K, 128K and 200K at the paper's scale

Long documents, repositories with their issues, and interleaved similar texts are in the mixture by domain.
"""

from __future__ import annotations

import dataclasses

from pydantic import Field

from tasks.lm_run import LmConfig, language_modeling, run_lm, start_model, token_dep
from tasks.stage import Stage


class Config(LmConfig):
    """See tasks/lm_run.py."""

    rope_theta: float | None = Field(None, gt=0, description="new RoPE base from this stage on; null keeps the model's")


def run(stage: Stage) -> None:
    config: Config = stage.config
    model = start_model(stage, token_dep(stage))
    if config.rope_theta is not None:
        model.cfg = dataclasses.replace(model.cfg, rope_theta=config.rope_theta)
    objective = language_modeling(config, attention="dense")
    run_lm(stage, model, objective, packing="best_fit", attention="dense")
