"""Metrics, curves and export manifests of an imagined whole run, in the shapes the stages write."""

from __future__ import annotations

import json
import math
from pathlib import Path

TASKS = ("addition", "calculator", "chain_sum", "quantities", "rules")
RL = {"reasoning_rl": ("addition", "chain_sum", "quantities"), "agentic_rl": ("calculator",), "general_rl": ("rules",)}


def _text(bpb: float) -> dict:
    parts = {"code": bpb - 0.2, "encyclopedia": bpb + 0.15, "math": bpb - 0.1, "web": bpb + 0.1, "all": bpb}
    return {d: {"loss": v * 2, "bits_per_byte": v, "tokens": 4096, "bytes": 12000} for d, v in parts.items()}


def _evaluate(index: int, tasks: bool, bpb: float) -> dict:
    found = {"text": _text(bpb)}
    if tasks:
        found["tasks"] = {
            t: {"sampled": 0.2 + 0.07 * index + 0.03 * i, "greedy": 0.3 + 0.07 * index} for i, t in enumerate(TASKS)
        }
    found["needle"] = {
        str(n): {"found": max(0.0, 0.6 - 0.1 * j), "logprob": -1.2, "control_logprob": -2.4, "found_at": {"0.5": 0.5}}
        for j, n in enumerate((256, 512, 1024, 2048))
    }
    return found


def _curve(steps: int, first: float, last: float, **extra) -> list[dict]:
    points = []
    for step in range(1, steps + 1, 4):
        share = step / steps
        loss = last + (first - last) * math.exp(-5 * share) + 0.03 * math.sin(step * 1.7)
        points.append({"step": step, "loss": loss, "lm_loss": loss, "tokens": step * 2048, "grad_norm": 1.0})
    points.append(
        {"step": steps, "val/all/bits_per_byte": last * 0.7, "loss": last, "lm_loss": last, "tokens": steps * 2048}
    )
    return [p | {k: f(p["step"] / steps) for k, f in extra.items()} for p in points]


def write_run(root: Path) -> Path:
    """metrics/, plots/ and data/export under `root`."""
    metrics = {
        "acquire": {"megabytes": {"web": 20.5, "code": 12.0}, "files": {"html": 900}},
        "web": {
            "documents": {"web": 2000, "encyclopedia": 6200},
            "funnel": {"pages": 2900, "too_short": 2500, "kept": 2000, "low_quality": 2000, "idle": 2500},
            "removed": {"too_short": 900, "repetition": 300, "low_quality": 1200},
        },
        "code": {
            "documents": 4100,
            "removed": {"generated": 210},
            "languages": {"count": 40, "largest": {"kotlin": 248, "c++": 53}},
            "licences": {"MIT": 597, "BSD-3-Clause": 41},
        },
        "math": {"documents": 800, "removed": {}},
        "dedup": {
            "documents_in": 13100,
            "documents_out": 11300,
            "removed": {"exact": 700, "near_duplicate": 1100},
            "funnel": {"math": {"in": 900, "exact_duplicate": 40, "near_duplicate": 60, "kept": 800}},
        },
        "decontaminate": {
            "documents_out": 11250,
            "removed": {"overlap": 50},
            "sets": {"gsm8k": {"searched": 1319, "found": 2}},
        },
        "decontaminate_swe": {"documents_out": 106, "removed": {"evaluation_overlap": 3}},
        "ingest": {"records": 282, "kinds": {"code": 219}},
        "tokenizer": {"vocab_size": 2048},
        "pack_pretrain": {"tokens": 11_000_000},
    }
    histograms = {"quality": [[0.9, 12], [0.95, 30]], "words": [[64.0, 5], [128.0, 9]]}
    (root / "data/web/audit").mkdir(parents=True)
    (root / "data/web/audit/histograms.json").write_text(json.dumps(histograms))
    plots = {}
    for i, stem in enumerate(
        ("pretrain_general", "pretrain_reasoning", "midtrain_s1", "midtrain_s2", "midtrain_s3", "dsa_adapt")
    ):
        start = 7.6 if i == 0 else 3.7 - 0.1 * i
        extra = {"index_kl": lambda s: 1.2 - 0.8 * s} if stem == "dsa_adapt" else {}
        plots[stem] = _curve(290 if i == 0 else 60, start, 3.4 - 0.1 * i, **extra)
        metrics[stem] = {"tokens": (290 if i == 0 else 60) * 2048, "heldout": _text(2.3 - 0.04 * i)}
    plots["dsa_warmup"] = [{"step": s, "index_kl": 4 * math.exp(-s / 12) + 0.6} for s in range(1, 51)]
    recall = [
        {f"layer_{i}": {"64": {"oracle": 0.8, "recent": 0.4, "ratio": r + 0.01 * i}} for i in range(2)}
        for r in (0.5, 0.9)
    ]
    metrics["dsa_warmup"] = {"recall_ratio": 0.92, "recall_before": recall[0], "recall": recall[1]}
    plots["sft"] = _curve(210, 4.0, 0.35)
    metrics["sft"] = {"steps": 210, "heldout": {"addition": 0.3}}
    plots["reward_model"] = [{"step": s, "loss": 0.7 * math.exp(-s / 20)} for s in range(1, 41)]
    for stem, families in RL.items():
        metrics[stem] = {
            "accuracy_before": {f: 0.4 for f in TASKS},
            "accuracy_after": {f: 0.4 + (0.3 if f in families else -0.02) for f in TASKS},
            "own_before": 0.4,
            "own_after": 0.7,
            "own_gain": 0.3,
        }
        plots[stem] = [
            {
                "step": s,
                "reward": 0.4 + 0.01 * s,
                **{f"reward/{f}": 0.38 + 0.011 * s + 0.02 * i for i, f in enumerate(families)},
            }
            for s in range(1, 31)
        ]
    plots["distill"] = [{"step": s, "reward": 0.65 + 0.002 * s} for s in range(1, 17)]
    for i, variant in enumerate(("base", "mid", "dsa", "sft", "reasoning_rl", "agentic_rl", "general_rl", "distill")):
        metrics[f"evaluate_{variant}"] = _evaluate(i, i >= 3, 2.3 - 0.05 * i if i < 3 else 2.25 + 0.02 * i)
    metrics["evaluate_quantized"] = _evaluate(6, True, 2.42)
    kinds = {"attention": 8, "dense MLP": 8, "indexer": 8, "routed experts": 4, "shared experts": 8}
    metrics["quantize"] = {
        "error": {
            k: {"bits": b, "tensors": 10, "relative_mse": 5e-5 if b == 8 else 0.012,
                "relative_mse_rtn": 5e-5 if b == 8 else 0.0155, "gain": 0.0 if b == 8 else 0.22}
            for k, b in kinds.items()
        },
        "quality": {
            "float": {"loss": 3.2, "tokens": 6144},
            "weights": {"loss": 3.21, "loss_delta": 0.01, "kl": 0.008, "logits_relative_error": 0.05},
            "weights_rtn": {"loss": 3.215, "loss_delta": 0.015, "kl": 0.011, "logits_relative_error": 0.06},
            "weights_and_activations": {"loss": 3.22, "loss_delta": 0.02, "kl": 0.012, "logits_relative_error": 0.07},
        },
        "size": {"bf16_mib": 3.6, "w4a8_mib": 1.9, "ratio": 1.9},
    }  # fmt: skip
    from tasks.export import PLATFORMS

    for name, platform in PLATFORMS.items():
        manifest = {
            "platform": name, "maker": platform.maker, "experts": platform.experts, "others": platform.others,
            "loader": {"source": platform.loader, "version": platform.version}, "bytes": 2_000_000,
            "verified": {"format": True, "numerics": name != "cambricon", "device": False},
            "experimental": name == "cambricon", "checks": {}, "notes": "",
        }  # fmt: skip
        _write(root / "data/export" / name / "export_manifest.json", manifest)
        metrics.setdefault("export", {})[name] = {"format": 1, "numerics": 1, "device": 0, "mib": 1.9}
    for stem, value in metrics.items():
        _write(root / "metrics" / f"{stem}.json", value)
    for stem, value in plots.items():
        _write(root / "plots" / f"{stem}.json", value)
    return root


def _write(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))
