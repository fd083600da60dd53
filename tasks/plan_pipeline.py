"""One training step of a stage on a cluster, through the pipeline simulator: seconds, idle time, bytes of the fullest GPU.

Operations per stage come from tasks/costs.py and last as long as they do at the cluster's rate times `mfu`; what is kept
between forward and backward is what our kernels save, in bf16. Not counted: kernels' working memory, the gradient of the
output head that chunked cross entropy holds until backward (taken to be accumulated in place), communication that is not
hidden (tasks/plan.py prints its bytes), and an uneven load of experts.

Check it:  python -m pytest tests/tasks/test_plan.py
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from model.config import ModelConfig
from model.pipeline_place import StageSpec
from model.pipeline_schedule import Schedule, build, with_offload, with_reductions
from tasks.costs import BF16, FP32, kept_numbers, optimizer_bytes_per_parameter
from tasks.pipeline_balance import is_sparse, stage_flops, stage_placement
from tasks.pipeline_sim import Simulated, StageCost, simulate
from tasks.plan_layout import Cluster, Layout, micro_batches, virtual_stages

TECHNIQUES = {
    "interleaving": "interleaved 1F1B: several virtual stages per rank",
    "deferred_weight_gradient": "weight gradients fill the pipeline's bubble",
    "gradient_shards": "ZeRO-2 gradient shards, two rolling full buffers",
    "activation_offload": "activations of waiting micro-batches on the host",
    "flexible_mtp": "MTP block and embedding one stage before the output layer",
    "chunked_loss": "output projection and cross entropy by sequence chunks",
    "recompute": "activations of a layer made again in backward",
}
PENDING = (1, 2, 4)  # how many micro-batches' weight gradients may wait on a rank: what is tried
LOSS_CHUNK = 1024  # tokens of one chunk of the output projection


# ---- what a stage holds and does ---------------------------------------------------------------------------------


def stage_parameters(cfg: ModelConfig, spec: StageSpec) -> Counter[str]:
    """Parameters by kind that a stage uses, whole (before tp and ep); an embedding that two stages use is in both."""
    return Counter(_stage_parameters(cfg, spec))


@functools.lru_cache(maxsize=4096)
def _stage_parameters(cfg: ModelConfig, spec: StageSpec) -> Counter[str]:
    h, counts = cfg.hidden_size, Counter()
    expert = 3 * h * cfg.moe_intermediate_size
    blocks = list(spec.layers)
    if spec.mtp:
        blocks += [cfg.num_hidden_layers] * cfg.num_nextn_predict_layers
        counts["mtp_projection"] += cfg.num_nextn_predict_layers * 2 * h * h
        counts["norms"] += cfg.num_nextn_predict_layers * 2 * h
    for layer in blocks:
        counts.update(cfg.attention_parameters(layer))
        counts["norms"] += 2 * h
        if layer < cfg.first_k_dense_replace:
            counts["dense_mlp"] += 3 * h * cfg.intermediate_size
        else:
            counts["routed_experts"] += cfg.n_routed_experts * expert
            counts["shared_experts"] += cfg.n_shared_experts * expert
            counts["router"] += cfg.n_routed_experts * h
    if spec.embed or spec.mtp or (spec.head and cfg.tie_word_embeddings):
        counts["embedding"] += cfg.vocab_size * h
    if spec.head:
        counts["head"] += 0 if cfg.tie_word_embeddings else cfg.vocab_size * h
        counts["norms"] += cfg.num_nextn_predict_layers * h
    counts["norms"] += h * spec.norm
    return counts


def _local(counts: Mapping[str, float], layout: Layout, trained: str) -> dict[str, float]:
    """Parameters on one GPU of its tp and ep group; trained: 'all', or the one kind that is."""
    kinds = {k: n / (layout.ep if k == "routed_experts" else layout.tp) for k, n in counts.items()}
    return kinds if trained == "all" else {k: n for k, n in kinds.items() if k == trained}


def _copies(kind: str, cluster: Cluster, layout: Layout) -> int:
    """GPUs that hold the same part of a parameter of this kind."""
    dp = layout.dp(cluster)
    return max(1, dp * layout.cp * layout.tp // layout.ep if kind == "routed_experts" else dp * layout.cp)


def stage_cost(
    cfg: ModelConfig,
    cluster: Cluster,
    layout: Layout,
    stage: Mapping[str, Any],
    techniques: frozenset[str],
    spec: StageSpec,
) -> StageCost:
    """Seconds and bytes of one micro-batch on one stage."""
    _, rows = micro_batches(stage, cluster, layout)
    tokens = stage["seq_len"] * rows / (layout.cp * layout.tp)  # sequence-parallel inside tensor parallelism
    f, b, w = (tokens * x / cluster.flops for x in stage_flops(cfg, spec, stage, techniques))
    sparse, depth = is_sparse(stage), stage.get("mtp", {}).get("depth", 0)
    layers = list(spec.layers) + ([cfg.num_hidden_layers] * depth if spec.mtp else [])
    kept = [kept_numbers(cfg, layer, stage["seq_len"], sparse=sparse) for layer in layers]
    warmup = stage["name"] == "dsa_warmup"  # nothing of the frozen backbone waits for a backward pass
    per = BF16 * tokens * (0 if warmup else 1)
    full = per * sum(k.activations for k in kept)
    deferred, new = per * sum(k.deferred for k in kept), per * sum(k.deferred_new for k in kept)
    inputs = per * cfg.hidden_size * len(layers)
    head = per * cfg.hidden_size * (1 + depth) if spec.head else 0.0
    message = BF16 * tokens * cfg.hidden_size * (1 + depth if spec.norm and not spec.head else 1)
    trained = _local(stage_parameters(cfg, spec), layout, "indexer" if warmup else "all")
    gradient = FP32 * sum(trained.values())
    shard = sum(FP32 * n / _copies(k, cluster, layout) for k, n in trained.items())
    again = "recompute" in techniques
    return StageCost(
        f,
        b,
        w,
        activations=per * max((k.activations for k in kept), default=0.0) if again else full + head,
        entry=inputs + head if again else 0.0,
        deferred=deferred + head,
        deferred_new=new,
        gradient=gradient,
        shard=shard,
        message=message / cluster.link,
        copy=(inputs + head if again else full + head) / (cluster.host_gbs * 1e9),
        reduction=gradient / cluster.link,
    )


# ---- a step ------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=256)
def _schedule(
    ranks: int, micros: int, virtual: int, deferral: tuple[tuple, int] | None, shards: bool, offload: bool
) -> Schedule:
    """deferral: (F, B and W of every stage, or of all alike; micro-batches whose weight gradients may wait), or None."""
    if deferral is None:
        schedule = build("interleaved" if virtual > 1 else "1f1b", ranks=ranks, micros=micros, virtual=virtual)
    else:
        times, pending = deferral
        schedule = build(
            "zero_bubble",
            ranks=ranks,
            micros=micros,
            virtual=virtual,
            durations=lambda op: times[op.stage % len(times)]["FBW".index(op.kind)],
            pending=pending,
        )
    schedule = with_reductions(schedule) if shards else schedule
    return with_offload(schedule) if offload else schedule


@dataclass(frozen=True)
class Step:
    """seconds of one optimizer step without the optimizer; idle relative to busy time; bytes by kind of the fullest GPU."""

    seconds: float
    bubble: float
    bytes: dict[str, float]
    host: float
    virtual: int
    placement: list[StageSpec]
    bytes_of_ranks: list[float]


def estimate_step(
    cfg: ModelConfig, cluster: Cluster, layout: Layout, stage: Mapping[str, Any], techniques: frozenset[str]
) -> Step:
    """A step under a layout. Long steps are simulated for 3 and 4 groups of pp micro-batches and continued along the line."""
    micros, _ = micro_batches(stage, cluster, layout)
    virtual = virtual_stages(cfg, layout, micros, techniques)
    specs = None
    while specs is None:
        try:
            specs = stage_placement(cfg, stage, layout.pp * virtual, techniques)
        except ValueError:
            if virtual == 1:
                raise
            virtual -= 1
    costs = [stage_cost(cfg, cluster, layout, stage, techniques, spec) for spec in specs]
    choices: list[tuple[tuple, int] | None] = [None]
    if "deferred_weight_gradient" in techniques and layout.pp > 1 and stage["name"] != "dsa_warmup":
        own = tuple((c.forward, c.backward, c.weight) for c in costs)
        mean = (tuple(round(sum(t) / max(map(sum, zip(*own))), 2) for t in zip(*own)),)
        choices += [(times, pending) for times in (mean, own) for pending in PENDING]
    longest = 4 * layout.pp

    def run(count: int, deferral: tuple[tuple, int] | None) -> Simulated:
        shards, offload = "gradient_shards" in techniques, "activation_offload" in techniques and layout.pp > 1
        schedule = _schedule(layout.pp, count, virtual, deferral, shards, offload)
        return simulate(schedule, costs, recompute="recompute" in techniques)

    tried = [(run(min(micros, longest), deferral), deferral) for deferral in choices]
    # Deferral is used where it helps; the fewer gradients wait, the better, for a thousandth of the time.
    fastest = min(found.span for found, _ in tried)
    found, deferral = next(pair for pair in tried if pair[0].span <= 1.001 * fastest)
    span, busy = found.span, sum(found.busy)
    if micros > longest:
        span += (span - run(longest - layout.pp, deferral).span) / layout.pp * (micros - longest)
        busy *= micros / longest
    ranks = [_rank_bytes(cfg, cluster, layout, stage, techniques, specs, found, r) for r in range(layout.pp)]
    totals = [sum(r.values()) for r in ranks]
    return Step(
        span,
        layout.pp * span / busy - 1,
        ranks[totals.index(max(totals))],
        max(found.host),
        virtual,
        specs,
        totals,
    )


def _rank_bytes(cfg, cluster, layout, stage, techniques, specs, found: Simulated, rank: int) -> dict[str, float]:
    """Bytes by kind of one GPU of a pipeline rank: weights, gradients, optimizer, activations, logits."""
    optimizer, warmup = stage.get("optimizer", {}), stage["name"] == "dsa_warmup"
    own = specs[rank :: layout.pp]
    counts: Counter[str] = Counter()
    for spec in own:
        counts.update(stage_parameters(cfg, spec))
    if counts["embedding"]:
        counts["embedding"] = cfg.vocab_size * cfg.hidden_size  # one copy, whichever of its stages use it
    weights = BF16 * sum(_local(counts, layout, "all").values())
    states = sum(
        (FP32 + optimizer_bytes_per_parameter(kind, optimizer)) * n / _copies(kind, cluster, layout)
        for kind, n in _local(counts, layout, "indexer" if warmup else "all").items()
    )  # with fp32 masters
    peak = found.peaks[rank]
    logits = 0.0
    if any(spec.head for spec in own):
        _, rows = micro_batches(stage, cluster, layout)
        tokens = stage["seq_len"] * rows / layout.cp
        tokens = min(tokens, LOSS_CHUNK) if "chunked_loss" in techniques else tokens
        logits = tokens * cfg.vocab_size / layout.tp * (BF16 + FP32)
    return {
        "weights": weights,
        "gradients": peak.get("gradients", 0.0),
        "optimizer": states,
        "activations": peak.get("activations", 0.0) + peak.get("deferred", 0.0),
        "logits": logits,
    }


def least_bytes(
    cfg: ModelConfig, cluster: Cluster, layout: Layout, stage: Mapping[str, Any], techniques: frozenset[str]
) -> float:
    """A bound from below on the fullest GPU's bytes, without a simulation: weights, optimizer, shards, one layer's work."""
    whole = StageSpec(0, tuple(range(cfg.num_hidden_layers)), True, True, cfg.num_nextn_predict_layers > 0, True)
    optimizer, warmup = stage.get("optimizer", {}), stage["name"] == "dsa_warmup"
    counts = stage_parameters(cfg, whole)
    held = BF16 * sum(_local(counts, layout, "all").values())
    for kind, n in _local(counts, layout, "indexer" if warmup else "all").items():
        gradient = FP32 / (_copies(kind, cluster, layout) if "gradient_shards" in techniques else 1)
        held += n * (
            gradient + (FP32 + optimizer_bytes_per_parameter(kind, optimizer)) / _copies(kind, cluster, layout)
        )
    _, rows = micro_batches(stage, cluster, layout)
    tokens = stage["seq_len"] * rows / (layout.cp * layout.tp)
    layer = cfg.num_hidden_layers - 1
    one = kept_numbers(cfg, layer, stage["seq_len"], sparse=is_sparse(stage)).activations
    return held / layout.pp + (0 if warmup else BF16 * tokens * one)
