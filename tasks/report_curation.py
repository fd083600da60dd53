"""The report's section on curation: the funnel by stage and domain, filters, score histograms, languages, licences, leaks.

python -m pytest tests/tasks/test_report.py
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from tasks.report_data import Collected, summary, web_filters
from tasks.report_style import panel, section, table
from tasks.report_svg import Bar, bar_chart, histogram

AUDITS = {"web": "data/web/audit/index.html", "math": "data/math/audit/samples.html"}
TABLE_ROWS = 12


def curation_section(data: Collected) -> str:
    """The funnel: what each step kept, and what it removed and why."""
    bars = []
    for step in summary(data)["funnel"]:
        removed = sum(step["removed"].values())
        reasons = ", ".join(f"{r.replace('_', ' ')} {n:,}" for r, n in list(step["removed"].items())[:3])
        parts = [(step["kept"], 0, f"kept {step['kept']:,}"), (removed, 1, f"removed {removed:,}")]
        share = removed / max(1, removed + step["kept"])
        shown = f"{step['kept']:,} kept" + (f", {share:.0%} removed: {reasons}" if removed else "")
        bars.append(Bar(step["stage"], parts, shown if len(shown) < 76 else shown[:74] + "…"))
    if not bars:
        return ""
    text = (
        "Documents that entered each step. Everything removed is kept in an exclusions table with its reason and score."
    )
    content = panel(bar_chart("Documents", bars, ("kept", "removed")))
    filters = web_filters(data.metrics)
    if len(filters) > 1:
        before = [filters[0][1], *(left for _, left in filters)]
        rows = [
            Bar(
                name.replace("_", " "),
                [(left, 2, f"{left:,}")],
                f"{left:,}" + (f" ({left - was:,})" if left != was else "") + _tokens(data.metrics["web"], name),
            )
            for (name, left), was in zip(filters, before)
        ]
        content += panel(bar_chart("Web pages left after each filter", rows))
    content += _domains(data.metrics.get("dedup", {})) + _leaks(data.metrics.get("decontaminate", {}))
    content += _tables(data.metrics) + _histograms(data.histograms)
    audits = ", ".join(f"<code>{path}</code>" for stage, path in AUDITS.items() if stage in data.metrics)
    if audits:
        text += f" Samples of kept and removed text at each threshold: {audits} (artifacts of the run in MLflow, too)."
    return section("curation", "Curation funnel", text, content)


def _tokens(web: Mapping[str, Any], step: str) -> str:
    """What a step of the web funnel leaves, in tokens (an estimate)."""
    left = web.get("funnel_tokens", {}).get(step)
    return "" if left is None else f", ~{left / 1e6:.2f} M tokens" if left >= 1e5 else f", ~{left:,} tokens"


def _domains(dedup: Mapping[str, Any]) -> str:
    """Duplicates by domain."""
    rows = dedup.get("funnel", {})
    if not rows:
        return ""
    reasons = sorted({r for counts in rows.values() for r in counts} - {"in", "kept"})
    cells = [[escape(d), *(f"{c.get(k, 0):,}" for k in ("in", *reasons, "kept"))] for d, c in rows.items()]
    return panel(table(["duplicates by domain", "in", *(r.replace("_", " ") for r in reasons), "kept"], cells))


def _leaks(found: Mapping[str, Any]) -> str:
    """Evaluation sets that were searched for in the corpus, and what was hit."""
    sets = found.get("sets", {})
    if not sets:
        return ""
    cells = [[escape(n), f"{s['searched']:,}", f"{s['found']:,}"] for n, s in sets.items()]
    return panel(table(["evaluation set", "items searched for", "items found in the corpus"], cells))


def _tables(metrics: Mapping[str, dict]) -> str:
    """The largest languages and licences of text and code."""
    web, code = metrics.get("web", {}), metrics.get("code", {})
    kinds = [
        ("language of pages", web.get("languages", {})),
        ("language of source files", _largest(code.get("languages", {}))),
        ("licence of source files", _largest(code.get("licences", {}))),
    ]
    tables = []
    for title, counts in kinds:
        ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:TABLE_ROWS]
        if ordered:
            tables.append(panel(table([title, "documents"], [[escape(k), f"{n:,}"] for k, n in ordered], left=(0,))))
    return '<div class="grid">' + "".join(tables) + "</div>" if tables else ""


def _largest(counts: Mapping[str, Any]) -> dict[str, int]:
    """Plain counts, which some metrics keep under `largest` beside a total."""
    counts = counts.get("largest", counts)
    return {k: v for k, v in counts.items() if isinstance(v, int)}


def _histograms(found: Mapping[str, Sequence[Sequence[float]]]) -> str:
    """How pages score, by measurement."""
    charts = [histogram(name.replace("_", " "), [(low, n) for low, n in bins]) for name, bins in found.items() if bins]
    if not charts:
        return ""
    shown = '<div class="grid">' + "".join(map(panel, charts)) + "</div>"
    return f"<details><summary>Histograms of {len(charts)} measurements and scores of pages</summary>{shown}</details>"
