"""The sections of the ablation report: tables in the shape of the paper's Tables 1, 2 and 4 to 6, and curves of the runs.

python -m pytest tests/tasks/test_ablate_report.py
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from tasks.report_style import panel, section, table
from tasks.report_svg import LineChart, Series, line_chart

NAMES = {
    "gqa": "GQA",
    "mla": "MLA, plain Muon",
    "mla_split": "MLA + Muon Split",
    "mla256_split": "MLA-256 + Muon Split",
    "shared": "one layer, shared by three depths (GLM-5)",
    "one_layer": "one layer trained at depth 1",
    "separate": "three separate layers",
    "full": "full attention",
    "swa_interleave": "SWA interleave",
    "swa_pattern": "SWA pattern (beam search)",
    "gdn": "GDN",
    "simple_gdn": "SimpleGDN",
    "base": "base",
    "base_continued": "base, continued on the same tokens",
    "warmup_only": "indexer warm-up only",
    "full_dsa": "warm-up and sparse adaptation",
}
TASK_NAMES = {"needle": "needle", "multi_key": "multi-key", "icl": "in-context labels"}


def name_of(key: str) -> str:
    """A variant's title; unknown ones keep their key."""
    return NAMES.get(key, key.replace("_", " "))


def cell(value: Mapping[str, Any], digits: int) -> str:
    """mean ± sd of a number over seeds; one seed has no sd."""
    if len(value["seeds"]) < 2:
        return f"{value['mean']:.{digits}f}"
    return f"{value['mean']:.{digits}f}<small class='in'>± {value['sd']:.{digits}f}</small>"


def curves(plots: Sequence[Mapping[str, float]], variants: Sequence[str], name: str, title: str, y: str) -> str:
    """One line per variant: the mean over its seeds at every step that all of them have."""
    series = []
    for variant in variants:
        points = []
        for row in plots:
            values = [v for k, v in row.items() if re.fullmatch(rf"{re.escape(variant)}/s\d+/{name}", k)]
            if values:
                points.append((float(row["step"]), sum(values) / len(values)))
        if points:
            series.append(Series(name_of(variant), points))
    return panel(line_chart(LineChart(title, series, y_label=y))) if series else ""


def mtp_section(found: Mapping[str, Any], plots: Sequence[Mapping[str, float]]) -> str:
    """Table 2: acceptance length per variant, and the share of accepted drafts per depth."""
    depths = found["draft_tokens"]
    rows = []
    for key, result in found["variants"].items():
        for drafting, modes in result["acceptance"].items():
            for mode, numbers in modes.items():
                rows.append(
                    [
                        f"{escape(name_of(key))}<small>{drafting.replace('_', ' ')}, {mode}</small>",
                        f"{result['draft_parameters']:,}",
                        cell(numbers["length"], 3),
                        *(f"{numbers[f'rate_{k}']['mean']:.2f}" for k in range(1, depths + 1)),
                    ]
                )
    heads = ["MTP", "draft parameters", "acceptance length", *(f"draft {k}" for k in range(1, depths + 1))]
    text = (
        f"Real speculative decoding on held-out text: {depths} drafts per verification, tokens emitted per verification, and how "
        "often each draft is accepted when those before it were. The paper: 2.76 for shared parameters, 2.55 for one layer."
    )
    variants = list(found["variants"])
    chart = curves(plots, variants, "lm_loss", "Language-model loss in training", "nats per token")
    return section("mtp", "Multi-token prediction", text, panel(table(heads, rows)) + chart)


def attention_section(found: Mapping[str, Any], plots: Sequence[Mapping[str, float]]) -> str:
    """Table 1: variants of attention and optimizer; curves of loss and of the largest logit; the regime search."""
    rows = [
        [
            escape(name_of(key)),
            f"{result['parameters']['mean']:,.0f}",
            f"{result['cache_per_token']['mean']:.0f}",
            cell(result["bits_per_byte"]["all"], 4),
            cell(result["choice"], 3) if "choice" in result else "–",
            cell(result["max_attention_logit"], 1),
        ]
        for key, result in found["variants"].items()
    ]
    heads = ["attention", "parameters", "cache per token", "bits per byte", "multiple choice", "largest logit"]
    content = panel(table(heads, rows))
    variants = list(found["variants"])
    charts = curves(plots, variants, "lm_loss", "Training loss", "nats per token")
    charts += curves(plots, variants, "max_attention_logit", "Largest attention logit", "held-out windows")
    content += f'<div class="grid">{charts}</div>'
    if found.get("regime"):
        lines = []
        for key, result in found["regime"].items():
            logits = {
                m: ", ".join(f"{v:.1f}" for v in result[m]["max_attention_logit"]["seeds"]) for m in ("whole", "split")
            }
            bpb = {m: cell(result[m]["bits_per_byte"]["all"], 3) for m in ("whole", "split")}
            seeds = zip(*(result[m]["max_attention_logit"]["seeds"] for m in ("whole", "split")), strict=True)
            least = min(whole / split for whole, split in seeds)
            verdict = '<span class="yes">yes</span>' if result["is_regime"] else '<span class="no">no</span>'
            lines.append(
                [escape(key), logits["whole"], logits["split"], bpb["whole"], bpb["split"], f"{least:.2f}", verdict]
            )
        heads = [
            "setting",
            "plain Muon, each seed",
            "Muon Split",
            "bits per byte",
            "Muon Split",
            "least ratio",
            "past the bounds",
        ]
        content += panel(table(heads, lines))
        for key in found["regime"]:
            pair = [f"regime/{key}/{m}" for m in ("whole", "split")]
            content += curves(plots, pair, "max_attention_logit", f"Largest logit: {key}", "held-out windows")
    text = (
        "The same tokens for every variant and seed. Multiple choice: which of four passages continues a text, by likelihood. "
        "The largest attention logit is what Muon Split keeps bounded without clipping."
    )
    return section("attention", "Attention and Muon Split", text, content)


def probe_rows(results: Mapping[str, Any], lengths: Sequence[int], measure: str, digits: int) -> list[list[str]]:
    """A row per variant: a measure per task and length, mean over seeds."""
    rows = []
    for key, result in results.items():
        cells = [escape(name_of(key))]
        for task in TASK_NAMES:
            cells.append(" / ".join(f"{result['probes'][task][str(n)][measure]['mean']:.{digits}f}" for n in lengths))
        rows.append([*cells, cell(result["bits_per_byte"], 3)])
    return rows


def efficient_section(found: Mapping[str, Any], plots: Sequence[Mapping[str, float]]) -> str:
    """Tables 4, 5 and 6: exact answers and nats gained, at growing lengths."""
    lengths = found["lengths"]
    at = " / ".join(str(n) for n in lengths)
    content = ""
    titles = {
        "untrained": "Converted, not trained (Table 4)",
        "trained": "After continued training on the same tokens (Table 5)",
        "dsa": "DSA (Table 6)",
    }
    for part, title in titles.items():
        content += f"<h3>{title}</h3>"
        for measure, shown, digits in (("exact", "exact answers", 2), ("gain", "nats that the fact brings", 2)):
            heads = [shown, *(f"{t} at {at}" for t in TASK_NAMES.values()), "bits per byte"]
            content += panel(table(heads, probe_rows(found[part], lengths, measure, digits)))
    patterns = ", ".join(f"<code>{b['pattern']}</code> ({b['scored']} patterns scored)" for b in found["beam"])
    text = (
        f"One trained model, half of its layers converted. Window of {found['sliding_window']} tokens; DSA reads "
        f"{found['index_topk']} keys. Pattern by beam search, S a window, F full attention: {patterns}; interleaved "
        f"<code>{found['beam'][0]['interleaved']}</code>."
    )
    variants = [f"trained/{k}" for k in found["trained"]]
    content += curves(plots, variants, "lm_loss", "Loss in continued training", "nats per token")
    return section("efficient", "Efficient attention", text, content)
