"""Pre-training (GLM-5 §2.2, App. A): next-token and multi-token prediction on windows cut at random places, dense attention.

    python -m tasks pretrain-general       mainly general text
    python -m tasks pretrain-reasoning     code, mathematics and science up-sampled; continues the same cosine

The indexer is part of the model but not trained here; its own stages follow mid-training.
"""

from __future__ import annotations

from tasks.lm_run import LmConfig, language_modeling, run_lm, start_model, token_dep
from tasks.stage import Stage


class Config(LmConfig):
    """See tasks/lm_run.py."""


def run(stage: Stage) -> None:
    config: Config = stage.config
    model = start_model(stage, token_dep(stage))
    counts = model.cfg.count_parameters()
    stage.print("parameters: " + ", ".join(f"{k} {v['total']:,} ({v['active']:,} active)" for k, v in counts.items()))
    objective = language_modeling(config, attention="dense")
    run_lm(stage, model, objective, packing="window", attention="dense")
    stage.metric(parameters=counts)
