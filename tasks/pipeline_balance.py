"""Operations of a pipeline stage's passes, and layers per stage balanced by them: for training and for the plan alike.

    stage_placement(cfg, {"name": "pretrain.general", "seq_len": 4096, "mtp": {"depth": 3}}, stages=4, techniques)

Check it:  python -m pytest tests/tasks/test_plan.py
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from model.config import ModelConfig
from model.pipeline_place import StageSpec, allowed_cuts, place
from tasks.costs import attention_flops, mlp_flops


def is_sparse(stage: Mapping[str, Any]) -> bool:
    return bool(stage.get("sparse", stage["name"] == "dsa_adapt"))


@functools.lru_cache(maxsize=256)
def _layer_flops(cfg: ModelConfig, layer: int, length: int, sparse: bool) -> tuple[float, float]:
    """(products with weights, the rest) of one layer's forward pass, per token."""
    projections, core, indexer = attention_flops(cfg, layer, length, sparse=sparse)
    return projections + indexer + mlp_flops(cfg, layer), core


def stage_flops(
    cfg: ModelConfig, spec: StageSpec, stage: Mapping[str, Any], techniques: frozenset[str]
) -> tuple[float, float, float]:
    """Operations per token of F, B and W; B without, but with recomputation. Their sum over stages is `train_flops`."""
    length, sparse, depth = stage["seq_len"], is_sparse(stage), stage.get("mtp", {}).get("depth", 0)
    runs = [(layer, 1) for layer in spec.layers]
    matrices = core = 0.0
    if spec.mtp and depth and stage["name"] != "dsa_warmup":
        runs.append((cfg.num_hidden_layers, depth))
        matrices += depth * 4.0 * cfg.hidden_size**2
    for layer, times in runs:
        products, rest = _layer_flops(cfg, layer, length, sparse)
        matrices, core = matrices + times * products, core + times * rest
    head = 2.0 * cfg.vocab_size * cfg.hidden_size * spec.head
    if stage["name"] == "dsa_warmup":  # the frozen model's forward pass, and the indexer both ways
        index = sum(attention_flops(cfg, layer, length, sparse=True)[2] for layer in spec.layers)
        rows = min(1.0, (stage.get("index_rows") or length) / length)
        return matrices + core + head + index * rows, 2 * index * rows, 0.0
    head *= 1 + (depth if cfg.num_nextn_predict_layers else 0)
    again = matrices + core if "recompute" in techniques else 0.0
    f, b, w = matrices + core, matrices + 2 * core + again, matrices
    # Chunked cross entropy has its backward pass, and with recomputation nothing to compute again, inside its forward pass.
    return (f + 3 * head, b, w) if "chunked_loss" in techniques else (f + head, b + head, w + head)


def train_flops(cfg: ModelConfig, stage: Mapping[str, Any], techniques: frozenset[str]) -> float:
    """Operations per token of one training step of a stage."""
    whole = StageSpec(0, tuple(range(cfg.num_hidden_layers)), True, True, cfg.num_nextn_predict_layers > 0, True)
    return sum(stage_flops(cfg, whole, stage, techniques))


def stage_placement(
    cfg: ModelConfig, stage: Mapping[str, Any], stages: int, techniques: frozenset[str]
) -> list[StageSpec]:
    """Layers per stage, balanced by the time of all three passes. ValueError when there are too few layers."""
    plain = techniques - {"recompute"}
    one = lambda **kind: sum(stage_flops(cfg, StageSpec(0, **{"layers": (), **kind}), stage, plain))  # noqa: E731
    costs = tuple(one(layers=(layer,)) for layer in range(cfg.num_hidden_layers))
    mtp = cfg.num_nextn_predict_layers > 0
    flexible = "flexible_mtp" in techniques and stages > 2
    return list(_place(costs, stages, mtp, flexible, one(mtp=True), one(head=True), tuple(allowed_cuts(cfg))))


@functools.lru_cache(maxsize=512)
def _place(costs, stages, mtp, flexible, mtp_cost, head_cost, cuts) -> tuple[StageSpec, ...]:
    return tuple(
        place(
            len(costs),
            stages,
            mtp=mtp,
            flexible=flexible,
            layer_costs=costs,
            mtp_cost=mtp_cost,
            head_cost=head_cost,
            cuts=cuts,
        )
    )
