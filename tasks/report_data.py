"""What the report shows, as data: evaluation by checkpoint with differences, the curation funnel, curves, exports.

python -m tasks.report --table      prints the evaluation part
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

VARIANTS = ("base", "mid", "dsa", "sft", "reasoning_rl", "agentic_rl", "general_rl", "distill", "quantized")
TITLES = {
    "base": "pre-trained",
    "mid": "mid-trained",
    "dsa": "sparse attention",
    "sft": "SFT",
    "reasoning_rl": "reasoning RL",
    "agentic_rl": "agentic RL",
    "general_rl": "general RL",
    "distill": "distilled",
    "quantized": "W4A8",
}
CURATION = ("ingest", "web", "code", "math", "dedup", "decontaminate", "decontaminate_swe")


@dataclass
class Collected:
    """Every metrics file, plots file and export manifest of a run, by stem."""

    metrics: dict[str, dict] = field(default_factory=dict)
    plots: dict[str, list[dict]] = field(default_factory=dict)
    exports: dict[str, dict] = field(default_factory=dict)
    histograms: dict[str, list] = field(default_factory=dict)  # of the web stage: [lower end of the bin, pages]


def collect(metrics: Path, plots: Path, exports: Path, web: Path | None = None) -> Collected:
    """Read what is there. ValueError names a file that is not JSON."""

    def read(folder: Path) -> dict[str, Any]:
        out = {}
        for path in sorted(Path(folder).glob("*.json")) if Path(folder).is_dir() else []:
            try:
                out[path.stem] = json.loads(path.read_text())
            except ValueError as error:
                raise ValueError(f"{path} is not JSON: {error}") from error
        return out

    manifests = sorted(Path(exports).glob("*/export_manifest.json")) if Path(exports).is_dir() else []
    histograms = read(Path(web) / "audit").get("histograms", {}) if web else {}
    return Collected(
        read(metrics), read(plots), {p.parent.name: json.loads(p.read_text()) for p in manifests}, histograms
    )


def evaluation(metrics: Mapping[str, dict]) -> dict[str, dict[str, float]]:
    """Flat numbers per checkpoint, in the line's order: `bpb`, `bpb/<domain>`, `task/<family>`, `tasks`, `needle/<length>`,
    `needle gain/<length>` (log-prob of the answer with the needle minus without)."""
    found = [v for v in VARIANTS if f"evaluate_{v}" in metrics]
    found += sorted(n.removeprefix("evaluate_") for n in metrics if n.startswith("evaluate_") and n[9:] not in VARIANTS)
    rows = {}
    for variant in found:
        result, row = metrics[f"evaluate_{variant}"], {}
        for domain, text in result.get("text", {}).items():
            row["bpb" if domain == "all" else f"bpb/{domain}"] = text["bits_per_byte"]
        tasks = result.get("tasks", {})
        for family, scores in tasks.items():
            row[f"task/{family}"] = scores["sampled"]
        if tasks:
            row["tasks"] = sum(s["sampled"] for s in tasks.values()) / len(tasks)
            row["tasks greedy"] = sum(s["greedy"] for s in tasks.values()) / len(tasks)
        for length, needle in sorted(result.get("needle", {}).items(), key=lambda item: int(item[0])):
            row[f"needle/{length}"] = needle["found"]
            row[f"needle gain/{length}"] = needle["logprob"] - needle["control_logprob"]
        rows[variant] = row
    return rows


def differences(rows: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Each checkpoint minus the one before it that has the same number."""
    out: dict[str, dict[str, float]] = {}
    last: dict[str, float] = {}
    for variant, row in rows.items():
        out[variant] = {key: value - last[key] for key, value in row.items() if key in last}
        last |= row
    return out


def columns(rows: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Every key of the rows, in a fixed order: totals first, then domains, tasks, needles."""
    order = ("bpb", "tasks", "tasks greedy", "bpb/", "task/", "needle/", "needle gain/")

    def rank(key: str) -> tuple:
        head, _, tail = key.partition("/")
        group = order.index(key) if key in order else order.index(head + "/")
        return group, int(tail) if tail.isdigit() else 0, tail

    return sorted({key for row in rows.values() for key in row}, key=rank)


def documents_kept(found: Mapping[str, Any]) -> int | None:
    """Documents (of ingest: records) a curation stage wrote: a number, or a number per domain."""
    kept = found.get("documents_out", found.get("documents", found.get("records")))
    return sum(kept.values()) if isinstance(kept, Mapping) else kept if isinstance(kept, int) else None


def web_filters(metrics: Mapping[str, dict]) -> list[tuple[str, int]]:
    """(filter, pages left after it) of the web stage, for the filters that removed something; the first row is the start."""
    found = metrics.get("web", {})
    steps, removed = found.get("funnel", {}), found.get("removed", {})
    if "pages" not in steps:
        return []
    left = sorted((n for n in steps.items() if removed.get(n[0])), key=lambda item: (-item[1], item[0]))
    return [("pages", steps["pages"]), *left]


def funnel(metrics: Mapping[str, dict]) -> list[dict[str, Any]]:
    """Curation steps: {stage, kept, removed: {reason: count}}, largest reasons first."""
    steps = []
    for stage in CURATION:
        found = metrics.get(stage)
        if found is None:
            continue
        kept = documents_kept(found)
        if kept is None:
            continue
        removed = {k: v for k, v in found.get("removed", {}).items() if isinstance(v, int | float)}
        ordered = dict(sorted(removed.items(), key=lambda item: (-item[1], item[0])))
        steps.append({"stage": stage, "kept": kept, "removed": ordered})
    return steps


def series(points: list[dict], key: str, offset: float = 0.0, x: str = "step") -> list[tuple[float, float]]:
    """(x + offset, value) of the points that have both numbers."""
    return [
        (float(p[x]) + offset, float(p[key]))
        for p in points
        if isinstance(p.get(key), int | float) and isinstance(p.get(x), int | float)
    ]


def training_tokens(metrics: Mapping[str, dict]) -> int:
    """Tokens of every training stage that reports them at its top level."""
    return sum(m["tokens"] for n, m in metrics.items() if isinstance(m.get("tokens"), int) and not n.startswith("pack"))


def captions(metrics: Mapping[str, dict]) -> dict[str, str]:
    """One short result per stage for the picture of the line."""
    out: dict[str, str] = {}
    for name, found in metrics.items():
        stage = _stage_name(name)
        text = found.get("heldout") if isinstance(found.get("heldout"), dict) else {}
        if stage.startswith("evaluate@"):
            row = evaluation({name: found}).get(name.removeprefix("evaluate_"), {})
            if "bpb" in row:
                out[stage] = f"{row['bpb']:.3f} bpb"
        elif isinstance(text.get("all"), dict) and "bits_per_byte" in text["all"]:
            out[stage] = f"{text['all']['bits_per_byte']:.3f} bpb"
        elif "own_before" in found:
            out[stage] = f"{found['own_before']:.2f} → {found['own_after']:.2f}"
        elif stage == "quantize":
            out[stage] = f"KL {found['quality']['weights_and_activations']['kl']:.4f}"
        elif stage == "export":
            good = sum(1 for row in found.values() if isinstance(row, dict) and row.get("format"))
            out[stage] = f"{good} platforms"
        elif stage == "tokenizer" and "vocab_size" in found:
            out[stage] = f"{found['vocab_size']} entries"
        elif documents_kept(found) is not None:
            out[stage] = f"{documents_kept(found):,} docs"
        elif isinstance(found.get("tokens"), int):
            out[stage] = f"{found['tokens'] / 1e6:.2f} M tokens"
        elif isinstance(found.get("megabytes"), dict):
            out[stage] = f"{sum(found['megabytes'].values()):.0f} MB"
    return out


def _stage_name(stem: str) -> str:
    """Metrics file stem -> stage name (`evaluate_sft` -> `evaluate@sft`, `pack_pretrain` -> `pack-pretrain`)."""
    for base, mark in (("evaluate", "@"), ("decontaminate", "-"), ("pack", "-"), ("pretrain", "-"), ("midtrain", "-")):
        if stem.startswith(base + "_"):
            return base + mark + stem[len(base) + 1 :]
    return stem


def summary(data: Collected) -> dict[str, Any]:
    """results.json: everything the report's tables show."""
    rows = evaluation(data.metrics)
    return {
        "evaluation": rows,
        "differences": differences(rows),
        "funnel": funnel(data.metrics),
        "training_tokens": training_tokens(data.metrics),
        "quantization": data.metrics.get("quantize", {}),
        "rl": {
            n: {k: m[k] for k in ("own_before", "own_after", "own_gain") if k in m}
            for n, m in data.metrics.items()
            if "own_gain" in m
        },
        "export": {
            n: {
                "verified": m["verified"],
                "loader": m["loader"],
                "bytes": m["bytes"],
                "experimental": m["experimental"],
            }
            for n, m in data.exports.items()
        },
    }
