"""What a profile costs before anything runs: parameters, memory per GPU, operations, days per stage.

    python -m tasks plan --profile glm5 --cluster gpus=2048,memory_gb=141,tflops=989
    python -m tasks plan --profile node --cluster gpus=8 --layout ep=8

Without `--layout` the layout is searched: the one that fits with the smallest pipeline bubble, then the least tensor and
context parallelism. `--without NAME` drops one of GLM-5's techniques (section 2.4); the last table shows what each changes.
The planner is arithmetic: it has been compared with counted operations and measured memory of small models only, and the
utilization (`mfu`) is the reader's to set.

Check it:  python -m pytest tests/tasks/test_plan.py
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from model.config import ModelConfig
from tasks.costs import BF16, FP32, forward_flops, optimizer_bytes_per_parameter, parameters

TECHNIQUES = {
    "interleaving": "interleaved 1F1B: several virtual stages per rank",
    "deferred_weight_gradient": "weight gradients fill the pipeline's bubble",
    "gradient_shards": "ZeRO-2 gradient shards, two rolling full buffers",
    "activation_offload": "activations of waiting micro-batches on the host",
    "flexible_mtp": "MTP block and embedding one stage before the output layer",
    "chunked_loss": "output projection and cross entropy by sequence chunks",
    "recompute": "activations of a layer made again in backward",
}
STAGES = ("pretrain.general", "pretrain.reasoning", "midtrain.s1", "midtrain.s2", "midtrain.s3")
STAGES += ("dsa_warmup", "dsa_adapt")
LOSS_CHUNK = 1024  # tokens of one chunk of the output projection
VIRTUAL_STAGES = 2


@dataclass(frozen=True)
class Cluster:
    """gpus in all, gpus per_node (fast links), memory_gb and peak bf16 tflops of one, and the share of it reached (mfu)."""

    gpus: int = 8
    per_node: int = 8
    memory_gb: float = 80.0
    tflops: float = 989.0
    mfu: float = 0.35
    reserve_gb: float = 6.0  # context, communication buffers, fragmentation


@dataclass(frozen=True)
class Layout:
    """Ranks of each kind of parallelism. dp = gpus / (tp * pp * cp); experts are spread over ep of the dp * cp * tp ranks."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1

    def dp(self, cluster: Cluster) -> int:
        return cluster.gpus // (self.tp * self.pp * self.cp)

    def problem(self, cluster: Cluster, cfg: ModelConfig, rows: int) -> str | None:
        """Why this layout does not work, naming the keys; None when it does."""
        model_ranks = self.tp * self.pp * self.cp
        if min(self.tp, self.pp, self.cp, self.ep) < 1:
            return "tp, pp, cp and ep must be at least 1"
        if cluster.gpus % model_ranks:
            return f"tp * pp * cp = {model_ranks} does not divide gpus = {cluster.gpus}"
        dp = self.dp(cluster)
        if rows % dp:
            return f"dp = {dp} does not divide the stage's rows = {rows}"
        if (dp * self.cp * self.tp) % self.ep or cfg.n_routed_experts % self.ep:
            return (
                f"ep = {self.ep} must divide both dp * cp * tp = {dp * self.cp * self.tp} and "
                f"model.n_routed_experts = {cfg.n_routed_experts}"
            )
        if cfg.num_attention_heads % self.tp:
            return f"tp = {self.tp} does not divide model.num_attention_heads = {cfg.num_attention_heads}"
        if self.pp > cfg.num_hidden_layers:
            return f"pp = {self.pp} exceeds model.num_hidden_layers = {cfg.num_hidden_layers}"
        return None


def layer_activation_bytes(cfg: ModelConfig) -> float:
    """bf16 bytes per token that one MoE layer keeps for its backward pass when nothing is recomputed."""
    h, heads, m = cfg.hidden_size, cfg.num_attention_heads, cfg.moe_intermediate_size
    attention = 3 * h + 2 * cfg.q_lora_rank + 2 * cfg.kv_lora_rank + 2 * cfg.qk_rope_head_dim
    attention += heads * (2 * cfg.qk_head_dim + 2 * cfg.v_head_dim)
    experts = (cfg.num_experts_per_tok + cfg.n_shared_experts) * (2 * h + 3 * m)
    return float(BF16 * (attention + 2 * h + experts))


def stage_parameters(cfg: ModelConfig, layout: Layout, techniques: frozenset[str]) -> list[dict[str, float]]:
    """Parameters by kind of the first, the last-but-one and the last pipeline stage (whole, before tp and ep)."""
    counts, layers = parameters(cfg), cfg.num_hidden_layers
    blocks = layers + cfg.num_nextn_predict_layers
    per_layer = {k: counts[k] / blocks for k in ("attention", "indexer", "norms")}
    moe_layers = blocks - cfg.first_k_dense_replace
    per_moe = {k: counts[k] / moe_layers for k in ("routed_experts", "shared_experts", "router")}
    here = math.ceil(layers / layout.pp)
    dense = min(cfg.first_k_dense_replace, here)
    body = {k: v * here for k, v in per_layer.items()} | {k: v * here for k, v in per_moe.items()}
    first = {k: v * here for k, v in per_layer.items()} | {k: v * (here - dense) for k, v in per_moe.items()}
    first |= {"dense_mlp": float(counts["dense_mlp"]), "embedding": float(counts["embedding"])}
    mtp = {k: v for k, v in (per_layer | per_moe).items()} | {"mtp_projection": float(counts["mtp_projection"])}
    if not cfg.num_nextn_predict_layers:
        mtp = {}
    tied = {"embedding": float(counts["embedding"])} if mtp and layout.pp > 1 else {}
    add = lambda *parts: {k: sum(p.get(k, 0.0) for p in parts) for k in {k for p in parts for k in p}}  # noqa: E731
    head = {"head": float(counts["head"] or counts["embedding"])}
    if layout.pp == 1:
        return [add(first, mtp, head)]
    if "flexible_mtp" in techniques and layout.pp > 2:
        return [first, add(body, mtp, tied), add(body, head)]
    return [first, body, add(body, mtp, tied, head)]


def memory(
    cfg: ModelConfig,
    cluster: Cluster,
    layout: Layout,
    stage: Mapping[str, Any],
    techniques: frozenset[str],
) -> dict[str, float]:
    """Bytes by kind on the fullest GPU: weights, gradients, optimizer, activations, logits."""
    dp = layout.dp(cluster)
    expert_dp = dp * layout.cp * layout.tp // layout.ep
    optimizer = stage.get("optimizer", {})
    indexer_only = stage["name"] == "dsa_warmup"
    micro = stage.get("micro_rows") or stage["rows"] // dp
    tokens = stage["seq_len"] * micro / (layout.cp * layout.tp)  # sequence-parallel inside tensor parallelism
    virtual = VIRTUAL_STAGES if "interleaving" in techniques and layout.pp > 1 else 1
    parts = stage_parameters(cfg, layout, techniques)
    results = []
    for position, counts in enumerate(parts):
        place = [0, layout.pp - 2, layout.pp - 1][position] if len(parts) > 1 else 0
        weights = gradients = states = 0.0
        for kind, count in counts.items():
            expert = kind == "routed_experts"
            local, copies = count / (layout.ep if expert else layout.tp), expert_dp if expert else dp * layout.cp
            weights += BF16 * local
            if indexer_only and kind != "indexer":
                continue
            states += (FP32 + optimizer_bytes_per_parameter(kind, optimizer)) * local / copies  # with fp32 masters
            if "gradient_shards" in techniques:
                buffers = min(1.0, 2 / (virtual * max(1, math.ceil(cfg.num_hidden_layers / layout.pp / virtual))))
                gradients += FP32 * local * max(1 / copies, min(1.0, buffers + 1 / copies))
            else:
                gradients += FP32 * local
        layers = math.ceil(cfg.num_hidden_layers / layout.pp)
        ahead = layout.pp - 1 - place
        waiting = (2 * ahead + (virtual - 1) * layout.pp + 1) / virtual if virtual > 1 else ahead + 1
        kept = BF16 * cfg.hidden_size if "recompute" in techniques else layer_activation_bytes(cfg)
        working = layer_activation_bytes(cfg) * tokens  # the layer that is in backward right now
        stored = layers * kept * tokens * waiting
        if "activation_offload" in techniques:
            stored = min(stored, 2 * kept * tokens)
        logits = 0.0
        if "head" in counts:
            rows = min(tokens * layout.tp, LOSS_CHUNK) if "chunked_loss" in techniques else tokens * layout.tp
            logits = rows * cfg.vocab_size / layout.tp * (BF16 + FP32)
        results.append(
            {
                "weights": weights,
                "gradients": gradients,
                "optimizer": states,
                "activations": stored + working,
                "logits": logits,
            }
        )
    return max(results, key=lambda r: sum(r.values()))


def bubble(layout: Layout, micro_batches: int, techniques: frozenset[str]) -> float:
    """Idle time of a pipeline rank relative to its busy time: (p - 1) / (v m), a third of it with deferred dW."""
    virtual = VIRTUAL_STAGES if "interleaving" in techniques else 1
    idle = (layout.pp - 1) / (virtual * max(1, micro_batches))
    return idle / 3 if "deferred_weight_gradient" in techniques else idle


def stage_sections(params: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The language-model stages of a profile, each with its `name`."""
    found = []
    for name in STAGES:
        section: Any = params
        for key in name.split("."):
            section = section.get(key, {})
        if section:
            found.append({**section, "name": name})
    return found


def train_flops(cfg: ModelConfig, stage: Mapping[str, Any], techniques: frozenset[str]) -> float:
    """Operations per token of one training step of a stage."""
    sparse = stage["name"] == "dsa_adapt"
    depth = stage.get("mtp", {}).get("depth", 0)
    if stage["name"] == "dsa_warmup":  # the frozen model's forward pass, and the indexer both ways
        cost = forward_flops(cfg, stage["seq_len"], sparse=False)
        index = forward_flops(cfg, stage["seq_len"], sparse=True).indexer
        rows = min(1.0, (stage.get("index_rows") or stage["seq_len"]) / stage["seq_len"])
        return cost.total + 3 * index * rows
    forward = forward_flops(cfg, stage["seq_len"], sparse=sparse, mtp_depth=depth).total
    return forward * (4 if "recompute" in techniques else 3)


def step_estimate(
    cfg: ModelConfig, cluster: Cluster, layout: Layout, stage: Mapping[str, Any], techniques: frozenset[str]
) -> dict[str, float]:
    """bytes (dict), bytes_total, flops (of the whole stage), bubble, days of one stage under a layout."""
    dp = layout.dp(cluster)
    micro = stage.get("micro_rows") or stage["rows"] // dp
    used = memory(cfg, cluster, layout, stage, techniques)
    idle = bubble(layout, stage["rows"] // dp // max(1, micro), techniques)
    flops = train_flops(cfg, stage, techniques) * stage["tokens"]
    seconds = flops / (cluster.gpus * cluster.tflops * 1e12 * cluster.mfu) * (1 + idle)
    return {"bytes": used, "bytes_total": sum(used.values()), "flops": flops, "bubble": idle, "days": seconds / 86400}


def search_layout(
    cfg: ModelConfig, cluster: Cluster, stage: Mapping[str, Any], techniques: frozenset[str]
) -> tuple[Layout, dict[str, float]] | None:
    """The fitting layout with the smallest bubble (in steps of 1 %), then least cp, tp, pp and ep; None when none fits."""
    powers = [2**i for i in range(12)]
    best = None
    for tp, pp, cp, ep in itertools.product(
        [p for p in powers if p <= cluster.per_node], [*powers[:6]], [*powers[:7]], [*powers[:9]]
    ):
        layout = Layout(tp, pp, cp, ep)
        if cluster.gpus < tp * pp * cp or layout.problem(cluster, cfg, stage["rows"]):
            continue
        found = step_estimate(cfg, cluster, layout, stage, techniques)
        if found["bytes_total"] > (cluster.memory_gb - cluster.reserve_gb) * 1e9:
            continue
        rank = (round(found["bubble"], 2), cp, tp, pp, ep)
        if best is None or rank < best[0]:
            best = (rank, layout, found)
    return None if best is None else best[1:]


def muon_traffic(cfg: ModelConfig, layout: Layout, cluster: Cluster) -> tuple[float, float]:
    """Bytes a rank receives per step for Muon: (naive: every rank gathers every whole gradient, owner-computes).

    Naive: reduced fp32 gradients of all matrices gathered on all dp ranks, every rank orthogonalises all. Owner-computes:
    a matrix's gradient is reduced to its owner alone and its bf16 weights are gathered once.
    """
    counts = parameters(cfg)
    matrices = sum(n for k, n in counts.items() if k not in ("embedding", "head", "norms", "routed_experts"))
    local = matrices / (layout.tp * layout.pp)
    copies = max(1, layout.dp(cluster) * layout.cp)
    share = (copies - 1) / copies
    return (FP32 + FP32) * local * share, (FP32 / copies + BF16) * local * share


# ---- the command line --------------------------------------------------------------------------------------------


def parse_settings(text: str, kind: type) -> Any:
    """`gpus=8,mfu=0.4` -> Cluster or Layout. ValueError names the key that is unknown or malformed."""
    known = {f: type(getattr(kind(), f)) for f in kind.__dataclass_fields__}
    values = {}
    for part in filter(None, text.split(",")):
        key, eq, value = part.partition("=")
        if key not in known or not eq:
            raise ValueError(f"{part!r}: expected KEY=NUMBER with a key of {', '.join(known)}")
        try:
            values[key] = known[key](value)
        except ValueError:
            raise ValueError(f"{key}={value!r}: expected {known[key].__name__}") from None
        if values[key] <= 0:
            raise ValueError(f"{key}={value}: must be positive")
    return kind(**values)


def gigabytes(value: float) -> str:
    return f"{value / 1e9:,.1f}"


def render(params: Mapping[str, Any], cluster: Cluster, layout: Layout | None, techniques: frozenset[str]) -> str:
    """The plan as text. ValueError names the keys when a stage fits under no layout."""
    cfg = ModelConfig.from_params(dict(params["model"]))
    lines = [
        f"profile {params['profile']} on {cluster.gpus} GPUs of {cluster.memory_gb:g} GB, {cluster.tflops:g} Tflop/s"
    ]
    lines[0] += f" at {cluster.mfu:.0%}"
    counts, totals = parameters(cfg), cfg.count_parameters()
    lines += ["", f"{'parameters':<18} {'count':>18}  share"]
    lines += [f"{k:<18} {n:>18,}  {n / sum(counts.values()):.1%}" for k, n in counts.items() if n]
    lines.append(
        f"{'all':<18} {sum(counts.values()):>18,}  of which active per token {totals['everything']['active']:,}"
    )
    lines.append(f"{'by the HF rule':<18} {totals['hf']['total']:>18,}  (without the MTP layer)")
    lines += [
        "",
        f"{'stage':<20} {'tokens':>9} {'length':>7} {'Gflop/token':>11} {'flop':>9} {'layout':<24} {'bubble':>6} {'days':>8}",
    ]
    lines[-1] += f"   {'GB/GPU':>7} (weights, gradients, optimizer, activations, logits)"
    chosen = {}
    for stage in stage_sections(params):
        if layout is None:
            found = search_layout(cfg, cluster, stage, techniques)
            if found is None:
                raise ValueError(
                    f"{stage['name']}: no layout of {cluster.gpus} GPUs with {cluster.memory_gb:g} GB holds this; "
                    f"change model.*, {stage['name']}.seq_len ({stage['seq_len']}), .rows ({stage['rows']}) or .micro_rows, "
                    "or the cluster"
                )
            use, cost = found
        else:
            problem = layout.problem(cluster, cfg, stage["rows"])
            if problem:
                raise ValueError(f"{stage['name']}: {problem}")
            use, cost = layout, step_estimate(cfg, cluster, layout, stage, techniques)
        chosen[stage["name"]] = (stage, use)
        name = f"tp{use.tp} pp{use.pp} cp{use.cp} ep{use.ep} dp{use.dp(cluster)}"
        over = "  DOES NOT FIT" if cost["bytes_total"] > (cluster.memory_gb - cluster.reserve_gb) * 1e9 else ""
        lines.append(
            f"{stage['name']:<20} {stage['tokens']:>9.2e} {stage['seq_len']:>7} "
            f"{train_flops(cfg, stage, techniques) / 1e9:>11,.0f} {cost['flops']:>9.2e} {name:<24} {cost['bubble']:>6.1%} "
            f"{cost['days']:>8.2f}   {gigabytes(cost['bytes_total']):>7} "
            f"({', '.join(gigabytes(v) for v in cost['bytes'].values())}){over}"
        )
    lines += ["", "what each technique changes, same layouts: GB on the fullest GPU, days"]
    lines.append(
        f"{'technique':<26} "
        + " ".join(f"{name.replace('pretrain.', 'p.').replace('midtrain.', 'm.'):>18}" for name in chosen)
    )
    for technique in TECHNIQUES:
        cells = []
        for stage, use in chosen.values():
            with_it = step_estimate(cfg, cluster, use, stage, techniques | {technique})
            without = step_estimate(cfg, cluster, use, stage, techniques - {technique})
            gb = (with_it["bytes_total"] - without["bytes_total"]) / 1e9
            cells.append(f"{gb:>+9,.1f} {with_it['days'] - without['days']:>+8.2f}")
        lines.append(f"{technique:<26} " + " ".join(f"{c:>18}" for c in cells))
    if chosen:
        naive, owner = muon_traffic(cfg, next(iter(chosen.values()))[1], cluster)
        lines += [
            "",
            f"Muon's traffic per rank and step, {next(iter(chosen))}: gathering everywhere {gigabytes(naive)} GB, ",
        ]
        lines[-1] += f"owner computes {gigabytes(owner)} GB"
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    from tasks.params import compose

    parser = argparse.ArgumentParser(prog="python -m tasks plan", description=__doc__.splitlines()[0])
    parser.add_argument("--profile", default="glm5")
    parser.add_argument("--cluster", default="", help="gpus=,per_node=,memory_gb=,tflops=,mfu=,reserve_gb=")
    parser.add_argument("--layout", default=None, help="tp=,pp=,cp=,ep= for every stage; searched when absent")
    parser.add_argument("--without", action="append", default=[], choices=list(TECHNIQUES), help="drop a technique")
    args = parser.parse_args(argv)
    layout = None if args.layout is None else parse_settings(args.layout, Layout)
    cluster = parse_settings(args.cluster, Cluster)
    cluster = replace(cluster, per_node=min(cluster.per_node, cluster.gpus))
    print(render(compose(args.profile), cluster, layout, frozenset(TECHNIQUES) - set(args.without)))
    return 0
