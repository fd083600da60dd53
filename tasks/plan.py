"""What a profile costs before anything runs: parameters, memory per GPU, operations, days per stage.

    python -m tasks plan --profile glm5 --cluster gpus=2048,memory_gb=141,tflops=989
    python -m tasks plan --profile node --cluster gpus=8 --layout ep=8

Without `--layout` the layout is searched: of those that fit, the one with the smallest pipeline bubble, then the least tensor
and context parallelism. `--without NAME` drops one of GLM-5's techniques (section 2.4); a table shows what each changes.
Memory and idle time come from the pipeline simulator (tasks/plan_pipeline.py), which small real runs agree with to the byte
and to the percent; operations were compared with counted ones. `mfu` and the cluster's bandwidths are the reader's to set.

Check it:  python -m pytest tests/tasks/test_plan.py
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from model.config import ModelConfig
from tasks.costs import BF16, FP32, parameters
from tasks.parallel import ParallelSettings
from tasks.pipeline_balance import train_flops
from tasks.plan_layout import Cluster, Layout, bubble, micro_batches, virtual_stages
from tasks.plan_pipeline import TECHNIQUES, estimate_step, least_bytes

STAGES = ("pretrain.general", "pretrain.reasoning", "midtrain.s1", "midtrain.s2", "midtrain.s3")
STAGES += ("dsa_warmup", "dsa_adapt")
POST_TRAINING = ("sft", "reasoning_rl", "agentic_rl", "general_rl", "distill")


def stage_sections(params: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The language-model stages of a profile whose tokens it states, each with its `name`."""
    found = []
    for name in STAGES:
        section: Any = params
        for key in name.split("."):
            section = section.get(key, {})
        if section:
            found.append({**section, "name": name})
    return found


def post_training_sections(params: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The stages after it, as far as the profile says: every sample at its full length, and SFT for one step (the size of
    its data is not in the profile). Rollouts are not in it. Stages without `micro_tokens` are left out."""
    found = []
    for name in POST_TRAINING:
        section = params.get(name) or {}
        policy = section.get("policy", section)
        length = policy.get("micro_tokens")
        rows = section.get("batch_samples") or section.get("prompts", 0) * section.get("group_size", 1)
        if not length or not rows:
            continue
        optimizer = section.get("optimizer") or {"muon": policy.get("muon", "split")}
        tokens = rows * length * (section.get("steps") or 1)
        found.append(
            dict(name=name, tokens=tokens, seq_len=length, rows=rows, micro_rows=1, optimizer=optimizer, sparse=True)
        )
    return found


def memory(
    cfg: ModelConfig, cluster: Cluster, layout: Layout, stage: Mapping[str, Any], techniques: frozenset[str]
) -> dict[str, float]:
    """Bytes by kind on the fullest GPU: weights, gradients, optimizer, activations, logits."""
    return estimate_step(cfg, cluster, layout, stage, techniques).bytes


def step_estimate(
    cfg: ModelConfig, cluster: Cluster, layout: Layout, stage: Mapping[str, Any], techniques: frozenset[str]
) -> dict[str, Any]:
    """bytes (dict), bytes_total, host bytes, flops (of the whole stage), bubble, days, step of one stage under a layout."""
    step = estimate_step(cfg, cluster, layout, stage, techniques)
    steps = stage["tokens"] / (stage["rows"] * stage["seq_len"])
    return {
        "bytes": step.bytes,
        "bytes_total": sum(step.bytes.values()),
        "host": step.host,
        "flops": train_flops(cfg, stage, techniques) * stage["tokens"],
        "bubble": step.bubble,
        "days": steps * step.seconds / 86400,
        "step": step,
    }


def consistent_layouts(cfg: ModelConfig, cluster: Cluster, stage: Mapping[str, Any]) -> Iterator[Layout]:
    """Layouts that divide the cluster, the model and the stage's rows, whether they fit or not."""
    powers = [2**i for i in range(12)]
    for sizes in itertools.product(
        [p for p in powers if p <= cluster.per_node], powers[:6], powers[:7], powers[:9], (1, 2, 4)
    ):
        layout = Layout(*sizes)
        if cluster.gpus >= layout.tp * layout.pp * layout.cp and not layout.problem(cluster, cfg, stage["rows"]):
            yield layout


def why_none(cfg: ModelConfig, cluster: Cluster, stage: Mapping[str, Any], techniques: frozenset[str]) -> str:
    """What keeps every layout from holding a stage, with the keys that could change it."""
    needed = [least_bytes(cfg, cluster, x, stage, techniques) for x in consistent_layouts(cfg, cluster, stage)]
    name, keys = stage["name"], f".rows ({stage['rows']})"
    if not needed:
        return (
            f"{name}: no layout of {cluster.gpus} GPUs divides it: {Layout().problem(cluster, cfg, stage['rows'])}; change "
            f"{name}{keys} or gpus ({cluster.gpus})"
        )
    return (
        f"{name}: no layout of {cluster.gpus} GPUs with {cluster.memory_gb:g} GB holds this: the smallest needs at least "
        f"{gigabytes(min(needed))} GB beside {cluster.reserve_gb:g} of reserve; change model.*, {name}.seq_len "
        f"({stage['seq_len']}), {keys} or .micro_rows, or the cluster"
    )


def search_layout(
    cfg: ModelConfig, cluster: Cluster, stage: Mapping[str, Any], techniques: frozenset[str], pipelined: bool = False
) -> tuple[Layout, dict[str, Any]] | None:
    """The fitting layout with the smallest bubble (in steps of 1 %), then least cp, tp, pp and ep; None when none fits.

    pipelined: only with at least four pipeline ranks of several virtual stages, where all techniques can act.
    """
    room = (cluster.memory_gb - cluster.reserve_gb) * 1e9
    candidates = []
    for layout in consistent_layouts(cfg, cluster, stage):
        tp, pp, cp, ep, vp = layout.tp, layout.pp, layout.cp, layout.ep, layout.vp
        if pipelined and (pp < 4 or vp < 2):
            continue
        micros, _ = micro_batches(stage, cluster, layout)
        virtual = virtual_stages(cfg, layout, micros, techniques)
        if virtual != vp or least_bytes(cfg, cluster, layout, stage, techniques) > room:
            continue
        use = techniques if virtual > 1 else techniques - {"interleaving"}
        candidates.append(((round(bubble(layout, micros, use), 2), cp, tp, pp, ep, vp), layout))
    for _, layout in sorted(candidates, key=lambda pair: pair[0]):
        try:
            found = step_estimate(cfg, cluster, layout, stage, techniques)
        except ValueError:  # fewer layers than stages
            continue
        if found["bytes_total"] <= room:
            return layout, found
    return None


def traffic(cfg: ModelConfig, cluster: Cluster, layout: Layout, stage: Mapping[str, Any]) -> dict[str, float]:
    """Bytes that a GPU sends in a step, by kind, in bf16; nothing is taken to be saved by sending once per node.

    experts: k rows out and k back per token and MoE layer, forward and backward (model/expert_parallel.py). context: a token's
    keys to every other rank, latents and the indexer's, and the latents' gradients back (model/context_parallel.py, "gather").
    pipeline: hidden states and their gradients between stages.
    """
    micros, rows = micro_batches(stage, cluster, layout)
    h, depth = cfg.hidden_size, stage.get("mtp", {}).get("depth", 0)
    backward = 1 if stage["name"] == "dsa_warmup" else 2
    tokens = stage["seq_len"] * rows * micros / (layout.cp * layout.tp)
    layers = (cfg.num_hidden_layers + depth) / layout.pp
    moe_layers = (cfg.num_hidden_layers - cfg.first_k_dense_replace + depth) / layout.pp
    away = (layout.ep - 1) / layout.ep
    keys = cfg.kv_lora_rank + cfg.qk_rope_head_dim
    if cfg.attention != "mla":
        keys = cfg.kv_heads * (cfg.qk_head_dim + cfg.value_head_dim)
    index = cfg.index_head_dim if cfg.attention == "mla" else 0
    virtual = virtual_stages(cfg, layout, micros, frozenset({"interleaving"}))
    return {
        "experts": BF16 * tokens * moe_layers * cfg.num_experts_per_tok * (2 * h + 1) * backward * away,
        "context": BF16 * tokens * layers * (keys * backward + index) * (layout.cp - 1),
        "pipeline": BF16 * tokens * h * backward * virtual * (layout.pp > 1),
    }


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
        if key in values:
            raise ValueError(f"{key} is given twice: {values[key]} and {value}")
        try:
            values[key] = known[key](value)
        except ValueError:
            raise ValueError(f"{key}={value!r}: expected {known[key].__name__}") from None
        if not 0 < values[key] < math.inf:
            raise ValueError(f"{key}={value}: must be positive and finite")
    return kind(**values)


def as_settings(
    cluster: Cluster, layout: Layout, virtual: int, techniques: frozenset[str]
) -> tuple[dict[str, Any], dict[str, Any], str]:
    """(`parallel`, `loop`, what keeps it from being trained or ''): a layout as the section of a training stage has it.

    Ranks of several nodes come from an outer launcher; `processes` is then not among the keys.
    """
    parallel: dict[str, Any] = {} if cluster.gpus > cluster.per_node else {"processes": cluster.gpus}
    parallel |= {key: n for key, n in (("context", layout.cp), ("expert", layout.ep)) if n > 1}
    if layout.pp > 1:
        parallel |= {"pipeline": layout.pp, "virtual": virtual}
        switches = ("deferred_weight_gradient", "gradient_shards", "activation_offload")
        parallel |= {key: True for key in switches if key in techniques}
        parallel |= {} if "flexible_mtp" in techniques else {"flexible_mtp": False}
    problem = f"tp = {layout.tp}: tensor parallelism has no key" if layout.tp > 1 else ""
    try:
        ParallelSettings(**parallel)
    except ValidationError as error:
        problem = problem or error.errors()[0]["msg"].removeprefix("Value error, ")
    return parallel, {"recompute": "block"} if "recompute" in techniques else {}, problem


def flow_style(settings: Mapping[str, Any]) -> str:
    """One line of YAML."""
    return "{" + ", ".join(f"{k}: {str(v).lower()}" for k, v in settings.items()) + "}"


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
    for stage in [*stage_sections(params), *post_training_sections(params)]:
        if layout is None:
            found = search_layout(cfg, cluster, stage, techniques)
            if found is None:
                message = why_none(cfg, cluster, stage, techniques)
                if stage["name"] in POST_TRAINING:
                    lines.append(message)
                    continue
                raise ValueError(message)
            use, cost = found
        else:
            problem = layout.problem(cluster, cfg, stage["rows"])
            if problem and stage["name"] in POST_TRAINING:
                lines.append(f"{stage['name']}: {problem}")
                continue
            if problem:
                raise ValueError(f"{stage['name']}: {problem}")
            use, cost = layout, step_estimate(cfg, cluster, layout, stage, techniques)
        if stage["name"] in STAGES:
            chosen[stage["name"]] = (stage, use, cost)
        name = f"tp{use.tp} pp{use.pp}x{cost['step'].virtual} cp{use.cp} ep{use.ep} dp{use.dp(cluster)}"
        over = "  DOES NOT FIT" if cost["bytes_total"] > (cluster.memory_gb - cluster.reserve_gb) * 1e9 else ""
        lines.append(
            f"{stage['name']:<20} {stage['tokens']:>9.2e} {stage['seq_len']:>7} "
            f"{train_flops(cfg, stage, techniques) / 1e9:>11,.0f} {cost['flops']:>9.2e} {name:<24} {cost['bubble']:>6.1%} "
            f"{cost['days']:>8.2f}   {gigabytes(cost['bytes_total']):>7} "
            f"({', '.join(gigabytes(v) for v in cost['bytes'].values())}){over}"
        )
    lines.append(
        "after dsa_adapt: tokens are a bound, every sample at micro_tokens; sft is one step, its data's size is no parameter; "
        "without rollouts"
    )
    lines += ["", "as the stages' sections of a profile say it"]
    for name, (_, use, cost) in chosen.items():
        parallel, loop, problem = as_settings(cluster, use, cost["step"].virtual, techniques)
        if name == "dsa_warmup" and use.pp > 1:
            problem = problem or "parallel.pipeline: the indexer's warm-up sends no gradients between stages"
        text = f"parallel: {flow_style(parallel)}" + (f", loop: {flow_style(loop)}" if loop else "")
        lines.append(f"{name:<20} {text}" + (f"   NOT TRAINED HERE: {problem}" if problem else ""))
    lines.append(
        "keys of the techniques below: interleaving is parallel.virtual, recompute is loop.recompute: block, chunked_loss is "
        "always on, the others are parallel.<name>"
    )
    lines += ["", "what each technique changes in GB on the fullest GPU, bubble and days, all others on"]
    if layout is None:
        lines[-1] += "; in a pipeline where the stage's layout has none (or no virtual stages)"
    tables = {}
    for name, (stage, use, cost) in chosen.items():
        found = (use, cost)
        if layout is None and (use.pp < 4 or cost["step"].virtual < 2):
            found = search_layout(cfg, cluster, stage, frozenset(TECHNIQUES), pipelined=True) or found
        tables[name] = (stage, *found)
    lines.append(f"{'technique':<26} " + " ".join(f"{_short(name):>22}" for name in tables))
    layouts = [f"tp{u.tp} pp{u.pp}x{c['step'].virtual} cp{u.cp} ep{u.ep}" for _, u, c in tables.values()]
    lines.append(f"{'':<26} " + " ".join(f"{text:>22}" for text in layouts))
    every = frozenset(TECHNIQUES)
    whole = {name: step_estimate(cfg, cluster, use, stage, every) for name, (stage, use, _) in tables.items()}
    rows = {technique: (every, every - {technique}) for technique in TECHNIQUES}
    kept = every - {"recompute"}
    rows["offload, no recompute"] = (kept, kept - {"activation_offload"})
    for technique, (with_it, without) in rows.items():
        cells = []
        for name, (stage, use, _) in tables.items():
            one = whole[name] if with_it == every else step_estimate(cfg, cluster, use, stage, with_it)
            other = step_estimate(cfg, cluster, use, stage, without)
            gb, idle, days = (one[k] - other[k] for k in ("bytes_total", "bubble", "days"))
            cells.append(f"{gb / 1e9:>+8,.1f} {100 * idle:>+5.1f}% {days:>+7.2f}")
        lines.append(f"{technique:<26} " + " ".join(f"{c:>22}" for c in cells))
    cells = [f"{gigabytes(w['bytes_total']):>8} {w['bubble']:>6.1%} {w['days']:>7.2f}" for w in whole.values()]
    lines.append(f"{'all on':<26} " + " ".join(f"{c:>22}" for c in cells))
    lines += ["", "GB that a GPU sends in a step, and the time it takes alone against the step's"]
    for stage, use, cost in chosen.values():
        sent = traffic(cfg, cluster, use, stage)
        shares = [f"{k} {gigabytes(v)} ({v / cluster.link / cost['step'].seconds:.0%})" for k, v in sent.items()]
        lines.append(
            f"{stage['name']:<20} {', '.join(shares)}; {gigabytes(cost['host'])} GB of activations on the host"
        )
    if chosen:
        naive, owner = muon_traffic(cfg, next(iter(chosen.values()))[1], cluster)
        lines += [
            "",
            f"Muon's traffic per rank and step, {next(iter(chosen))}: gathering everywhere {gigabytes(naive)} GB, ",
        ]
        lines[-1] += f"owner computes {gigabytes(owner)} GB"
    return "\n".join(lines)


def _short(name: str) -> str:
    return name.replace("pretrain.", "p.").replace("midtrain.", "m.")


def main(argv: list[str] | None = None) -> int:
    from tasks.params import compose

    parser = argparse.ArgumentParser(prog="python -m tasks plan", description=__doc__.splitlines()[0])
    parser.add_argument("--profile", default="glm5")
    parser.add_argument(
        "--cluster", default="", help="gpus=,per_node=,memory_gb=,tflops=,mfu=,reserve_gb=,net_gbs=,fast_gbs=,host_gbs="
    )
    parser.add_argument("--layout", default=None, help="tp=,pp=,cp=,ep=,vp= for every stage; searched when absent")
    parser.add_argument("--without", action="append", default=[], choices=list(TECHNIQUES), help="drop a technique")
    args = parser.parse_args(argv)
    layout = None if args.layout is None else parse_settings(args.layout, Layout)
    cluster = parse_settings(args.cluster, Cluster)
    cluster = replace(cluster, per_node=min(cluster.per_node, cluster.gpus))
    print(render(compose(args.profile), cluster, layout, frozenset(TECHNIQUES) - set(args.without)))
    return 0
