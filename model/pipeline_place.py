"""Which part of the model each pipeline stage holds. Pure Python, no torch.

    stages = place(layers=78, stages=16, mtp=True, flexible=True, mtp_cost=3.0, head_cost=7.6)

GLM-5 (section 2.4) places the MTP module flexibly: its output layer stays with the main output layer on the last stage, whose
weights it shares, and its embedding and decoder block go one stage earlier. That stage then needs the backbone's last hidden
state, so the last stage holds output layers only; the hidden states of every depth travel together, [1 + depth, B, S, H].

Check it:  python -m pytest tests/model/test_pipeline_schedule.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from model.config import ModelConfig


@dataclass(frozen=True)
class StageSpec:
    """One virtual stage: its backbone layers, and whether it embeds, norms, runs the MTP block, and has the output layers."""

    index: int
    layers: tuple[int, ...]
    embed: bool = False
    norm: bool = False
    mtp: bool = False
    head: bool = False

    def __str__(self) -> str:
        parts = ["embed"] * self.embed
        if self.layers:
            parts.append(f"{self.layers[0]}" + (f"-{self.layers[-1]}" if len(self.layers) > 1 else ""))
        return "+".join(parts + ["mtp"] * self.mtp + ["head"] * self.head)


def allowed_cuts(cfg: ModelConfig) -> list[int]:
    """Layers that may begin a stage: not those that reuse the selection of a layer before (IndexShare)."""
    shared = getattr(cfg, "indexer_types", None) or ("full",) * cfg.num_hidden_layers
    return [i for i in range(1, cfg.num_hidden_layers + 1) if i == cfg.num_hidden_layers or shared[i] == "full"]


def place(
    layers: int,
    stages: int,
    *,
    mtp: bool,
    flexible: bool = True,
    layer_costs: Sequence[float] | None = None,
    embed_cost: float = 0.0,
    mtp_cost: float = 1.0,
    head_cost: float = 1.0,
    cuts: Sequence[int] | None = None,
) -> list[StageSpec]:
    """Contiguous layers per stage such that the dearest stage costs least. `cuts`: layers that may begin a stage (None: any).

    Every stage has a layer except one that holds the output layers. ValueError when there are too few layers.
    """
    costs = [1.0] * layers if layer_costs is None else list(layer_costs)
    assert len(costs) == layers
    split_mtp = mtp and flexible and stages > 1
    carriers = stages - 1 if split_mtp else stages  # the stages that may hold layers
    extra = [0.0] * stages
    extra[0] += embed_cost
    extra[-1] += head_cost
    if mtp:
        extra[carriers - 1] += mtp_cost
    may_begin = set(range(1, layers + 1) if cuts is None else cuts) | {layers}
    prefix = [0.0]
    for cost in costs:
        prefix.append(prefix[-1] + cost)
    # An even cut with everything as late as possible is no dearer than this; looking no further keeps the search short.
    fair = (prefix[-1] + sum(extra)) / carriers + max(costs) + max(extra)
    for limit in (fair, float("inf")):
        best = _cut(layers, carriers, prefix, extra, may_begin, limit, empty_last=not split_mtp and stages > 1)
        if layers in best:
            break
    if layers not in best:
        raise ValueError(
            f"{layers} layers (model.num_hidden_layers) cannot be cut into {stages} pipeline stages"
            + (", of which the last has the output layers only" if split_mtp else "")
            + ("" if cuts is None else f"; a stage may begin at {', '.join(map(str, sorted(may_begin)))}")
        )
    bounds = best[layers][2]
    specs = []
    for stage in range(stages):
        inside = tuple(range(bounds[stage], bounds[stage + 1])) if stage < carriers else ()
        end = stage == carriers - 1
        specs.append(StageSpec(stage, inside, stage == 0, end, mtp and end, stage == stages - 1))
    return specs


def _cut(layers, carriers, prefix, extra, may_begin, limit, empty_last):
    """{layers: (dearest stage, sum of squares, bounds)} of the best cut in which no stage costs more than `limit`."""
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, (0,))}  # of the first i layers
    for stage in range(carriers):
        found: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        last = stage == carriers - 1
        for begin, (dearest, squares, bounds) in best.items():
            for end in [layers] if last else range(begin + 1, layers + 1):
                if end < begin + (not (last and empty_last)) or end not in may_begin:
                    continue
                cost = prefix[end] - prefix[begin] + extra[stage]
                if cost > limit:
                    break
                new = (max(dearest, cost), squares + cost * cost, (*bounds, end))
                if end not in found or new < found[end]:
                    found[end] = new
        best = found
    return best


def stage_names(cfg: ModelConfig, spec: StageSpec, name: str) -> bool:
    """Whether a stage uses the parameter or buffer of this name (as in the whole model)."""
    if name.startswith("model.embed_tokens."):
        return spec.embed or (spec.mtp and cfg.num_nextn_predict_layers > 0) or (spec.head and cfg.tie_word_embeddings)
    if name.startswith("model.norm."):
        return spec.norm
    if name.startswith("lm_head."):
        return spec.head
    layer = int(name.split(".")[2])
    if layer < cfg.num_hidden_layers:
        return layer in spec.layers
    return spec.head if ".shared_head." in name else spec.mtp
