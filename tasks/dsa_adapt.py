"""Sparse attention adaptation (GLM-5 §2.1.1, App. A): the whole model trains with DSA on mid-training data.

    python -m tasks dsa_adapt

The backbone learns from the language-model loss, the indexer from its KL loss over the selected keys; neither gradient
reaches the other. The indexer is optimised by AdamW with a learning rate of its own.
"""

from __future__ import annotations

from pydantic import Field

from tasks.dsa_warmup import recall_windows, report_recall
from tasks.heldout import heldout_loss, indexer_recall
from tasks.lm_run import LmConfig, language_modeling, run_lm, start_model, token_dep
from tasks.model_parallel import measuring
from tasks.stage import Stage


class Config(LmConfig):
    """See tasks/lm_run.py."""

    index_rows: int | None = Field(None, ge=1, description="query rows per sequence in the indexer's loss; null: all")
    index_coef: float = Field(1.0, gt=0, description="scales the indexer's loss, that is its learning rate only")
    recall_windows: int = Field(4, ge=1, description="held-out windows for the recall")
    recall_rows: int = Field(64, ge=1, description="query rows per window for the recall")


def run(stage: Stage) -> None:
    config: Config = stage.config
    tokens = token_dep(stage)
    model = start_model(stage, tokens)
    objective = language_modeling(
        config,
        attention="sparse",
        index_rows=config.index_rows or "all",
        index_coef=config.index_coef,
        row_seed=stage.rng_seed("rows"),
    )
    seq_len = config.heldout.seq_len or config.seq_len
    ids = recall_windows(tokens, seq_len, config.recall_windows).to(next(model.parameters()).device)
    topk = model.cfg.index_topk
    measure = lambda: indexer_recall(model, ids, [topk], config.recall_rows, stage.rng_seed("recall"))  # noqa: E731
    recall_before = measure()
    before = heldout_loss(model.eval(), tokens, seq_len, config.heldout.windows, "sparse")
    sparse = run_lm(stage, model, objective, packing="best_fit", attention="sparse")
    with measuring(model) as here:
        if not here:
            return
        dense = heldout_loss(model.eval(), tokens, seq_len, config.heldout.windows, "dense")
        recall = measure()
    report_recall(stage, recall_before, recall, topk)
    stage.print(
        f"bits per byte: sparse {before['all']['bits_per_byte']:.4f} -> {sparse['all']['bits_per_byte']:.4f}, "
        f"dense {dense['all']['bits_per_byte']:.4f}"
    )
    stage.metric(heldout_before=before, heldout_dense=dense)
