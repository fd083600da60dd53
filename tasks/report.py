"""The report: one self-contained HTML page of the whole run, and results.json with the same numbers.

    dvc repro report      or      python -m tasks report      writes data/report/report.html
    python -m tasks.report --table                            prints the results table of the last run

Built from metrics/, plots/ and the export manifests alone; the same run gives the same bytes.
"""

from __future__ import annotations

import argparse
import json
import sys
from html import escape
from pathlib import Path

from tasks.files import atomic_write
from tasks.report_dag import draw, read_graph
from tasks.report_data import Collected, captions, collect, columns, differences, evaluation, series, summary
from tasks.report_style import card, delta, page, panel, section, table
from tasks.report_svg import Bar, LineChart, Series, bar_chart, line_chart, log_dots
from tasks.stage import Stage, StageConfig

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
LM_STAGES = ("pretrain_general", "pretrain_reasoning", "midtrain_s1", "midtrain_s2", "midtrain_s3", "dsa_adapt")
RL_STAGES = ("reasoning_rl", "agentic_rl", "general_rl", "distill")


class Config(StageConfig):
    """Parameters of the report."""

    title: str = "Arcline: one run of the line"


def head(data: Collected, config: Config) -> str:
    """Title, headline numbers, and links to the sections that exist."""
    result = summary(data)
    rows, cards = result["evaluation"], []
    kept = [step for step in result["funnel"] if step["stage"] == "decontaminate"]
    if kept:
        cards.append(card(f"{kept[0]['kept']:,}", "documents after curation"))
    if result["training_tokens"]:
        cards.append(card(f"{result['training_tokens'] / 1e6:.2f} M", "training tokens, language modelling"))
    scored = [v for v in rows if "bpb" in rows[v] and v != "quantized"]
    if "base" in scored and "dsa" in scored:
        cards.append(card(f"{rows['base']['bpb']:.2f} → {rows['dsa']['bpb']:.2f}", "bits per byte, base to sparse"))
    solved = [v for v in rows if "tasks" in rows[v] and v != "quantized"]
    if len(solved) > 1:
        first, last = rows[solved[0]]["tasks"], rows[solved[-1]]["tasks"]
        cards.append(card(f"{first:.2f} → {last:.2f}", f"tasks solved, {TITLES[solved[0]]} to {TITLES[solved[-1]]}"))
    quality = result["quantization"].get("quality", {}).get("weights_and_activations")
    if quality:
        cards.append(card(f"{quality['kl']:.4f}", "KL of W4A8 to float, nats per token"))
    if result["export"]:
        good = sum(1 for e in result["export"].values() if e["verified"]["format"])
        cards.append(card(f"{good} / {len(result['export'])}", "exports read back equal"))
    anchors = ("line", "curation", "training", "rl", "evaluation", "quantization", "export", "files")
    links = "".join(f'<a href="#{a}">{a if a != "rl" else "reinforcement learning"}</a>' for a in anchors)
    return (
        f"<h1>{escape(config.title)}</h1>"
        '<p class="lead">From raw documents to a quantized, exported and evaluated GLM-5-style model: what each stage '
        "did, in numbers from the run itself.</p>"
        f'<div class="cards">{"".join(cards)}</div><nav>{links}</nav>'
    )


def line_section(data: Collected, graph_file: Path) -> str:
    """The picture of the line."""
    picture = draw(read_graph(graph_file), captions(data.metrics))
    text = (
        "Every stage of <code>dvc.yaml</code> with its main result: bits per byte (bpb) on held-out text, accuracy before → "
        "after, documents, tokens. Edges implied by others are left out. Hover for what a stage reads and writes."
    )
    return section("line", "The line", text, panel(picture))


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
    return section("curation", "Curation funnel", text, panel(bar_chart("Documents", bars, ("kept", "removed"))))


def training_section(data: Collected) -> str:
    """Loss over all language-model stages end to end, held-out bits per byte, indexer KL, SFT."""
    loss, marks, offset = [], [], 0.0
    held: dict[str, list[tuple[float, float]]] = {}
    for stem in LM_STAGES:
        points = data.plots.get(stem, [])
        if not points:
            continue
        name = stem.removeprefix("midtrain_").removeprefix("pretrain_").replace("dsa_adapt", "sparse")
        marks.append((offset, name))
        key = "lm_loss" if any("lm_loss" in p for p in points) else "loss"
        loss += series(points, key, offset, "tokens")
        by_step = {p["step"]: p["tokens"] for p in points if isinstance(p.get("tokens"), int | float)}
        tokens = max(by_step.values(), default=0)
        for point in points:
            for key in point:
                if key.startswith("val/") and key.endswith("/bits_per_byte"):
                    at = offset + by_step.get(point["step"], tokens if point["step"] else 0)
                    held.setdefault(key.split("/")[1], []).append((at, point[key]))
        offset += tokens
    charts = []
    if loss:
        chart = LineChart("Training loss", [Series("loss", loss)], "tokens", "nats per token", marks, 1080, 280)
        charts.append(panel(line_chart(chart)))
    if held:
        lines = [Series(d, held[d], dots=True) for d in sorted(held, key=lambda d: (d != "all", d))]
        chart = LineChart("Held-out bits per byte by domain", lines, "tokens", "bits per byte", marks, 1080, 300)
        charts.append(panel(line_chart(chart)))
    small = []
    for stem, title in (("dsa_warmup", "Indexer KL, warm-up"), ("dsa_adapt", "Indexer KL, sparse adaptation")):
        values = series(data.plots.get(stem, []), "index_kl")
        if values:
            small.append(LineChart(title, [Series("KL", values)], "step", "nats, summed over layers"))
    for stem, title in (("sft", "SFT loss"), ("reward_model", "Reward model loss")):
        values = series(data.plots.get(stem, []), "loss")
        if values:
            small.append(LineChart(title, [Series("loss", values)], "step", "nats per token" if stem == "sft" else ""))
    if not charts and not small:
        return ""
    charts.append('<div class="grid">' + "".join(panel(line_chart(c)) for c in small) + "</div>")
    text = "Language-model stages end to end; dotted lines mark where a stage begins."
    return section("training", "Training", text, "".join(charts))


def rl_section(data: Collected) -> str:
    """Reward curves of each stage, and accuracy on held-out problems before and after."""
    panels = []
    for stem in RL_STAGES:
        points = data.plots.get(stem, [])
        keys = sorted({k for p in points for k in p if k == "reward" or k.startswith("reward/")})
        if not keys:
            continue
        if len(keys) == 2 and "reward" in keys:
            keys = ["reward"]  # one family: the mean is its reward
        lines = [Series("mean" if k == "reward" else k.partition("/")[2], series(points, k)) for k in keys]
        chart = LineChart(TITLES[stem], lines, "step", "reward of rollouts", y_range=(0.0, 1.0))
        panels.append(panel(line_chart(chart)))
    measured = {
        s: (m["accuracy_before"], m["accuracy_after"])
        for s, m in ((s, data.metrics.get(s, {})) for s in RL_STAGES)
        if isinstance(m.get("accuracy_before"), dict) and isinstance(m.get("accuracy_after"), dict)
    }
    rows = []
    for family in sorted({f for before, _ in measured.values() for f in before}):
        cells = [escape(family.replace("_", " "))]
        for before, after in measured.values():
            if family not in before or family not in after:
                cells.append('<span class="no">–</span>')
                continue
            change = delta(after[family] - before[family], lower_is_better=False, digits=2, inline=True)
            cells.append(f"{before[family]:.2f} → {after[family]:.2f}{change}")
        rows.append(cells)
    if not panels and not rows:
        return ""
    content = '<div class="grid">' + "".join(panels) + "</div>"
    if rows:
        content += panel(table(["held-out problems", *(TITLES[s] for s in measured)], rows))
    text = "Rewards of the rollouts trained on, and the share of held-out problems solved before and after (T&nbsp;=&nbsp;1)."
    return section("rl", "Reinforcement learning", text, content)


def evaluation_section(data: Collected) -> str:
    """The table of checkpoints, and the needle results as curves."""
    rows = evaluation(data.metrics)
    if not rows:
        return ""
    changes = differences(rows)

    def comparison(title: str, keys: list[str], lower_is_better: bool, digits: int) -> str:
        lines = []
        for variant, row in rows.items():
            if not any(key in row for key in keys):
                continue
            cells = [escape(TITLES.get(variant, variant))]
            for key in keys:
                change = delta(changes[variant].get(key), lower_is_better=lower_is_better, digits=digits, inline=True)
                cells.append(f"{row[key]:.{digits}f}{change}" if key in row else '<span class="no">–</span>')
            lines.append(cells)
        heads = [k.partition("/")[2].replace("_", " ") or {"bpb": "all", "tasks": "mean"}.get(k, k) for k in keys]
        return panel(table([title, *heads], lines)) if lines else ""

    keys = columns(rows)
    content = comparison("bits per byte", [k for k in keys if k == "bpb" or k.startswith("bpb/")], True, 3)
    content += comparison("problems solved", [k for k in keys if k == "tasks" or k.startswith("task/")], False, 2)
    lengths = sorted({int(k.partition("/")[2]) for row in rows.values() for k in row if k.startswith("needle/")})
    if lengths:
        heads = ["needle in a haystack", *(f"{n} tokens" for n in lengths)]
        lines = []
        for variant, row in rows.items():
            cells = [escape(TITLES.get(variant, variant))]
            for n in lengths:
                if f"needle/{n}" not in row:
                    cells.append("–")
                    continue
                gain = f"{row[f'needle gain/{n}']:+.2f} nats"
                cells.append(f"{row[f'needle/{n}']:.0%}" + f"<small class='in'>{gain}</small>")
            lines.append(cells)
        content += panel(table(heads, lines))
        content += (
            '<p class="note">Needle: share of cases whose hidden number is the model\'s first choice throughout; beside it, how '
            "much more likely the number is with the needle in the text than without, nats per token.</p>"
        )
    text = (
        "The same held-out text, problems and needles for every checkpoint. Small figures are the difference to the checkpoint "
        "above; green is better. Problems are solved by sampling at T&nbsp;=&nbsp;1."
    )
    return section("evaluation", "Evaluation", text, content)


def quantization_section(data: Collected) -> str:
    """Error by kind of tensor, and what it costs in loss and KL."""
    found = data.metrics.get("quantize")
    if not found:
        return ""
    dots = []
    for kind, row in found["error"].items():
        values = [(row["relative_mse"], f"{kind}: {row['relative_mse']:.3e}")]
        if row["gain"]:
            values.append((row["relative_mse_rtn"], f"{kind}, round to nearest: {row['relative_mse_rtn']:.3e}"))
        dots.append((f"{kind} (int{row['bits']})", values))
    chart = log_dots("Relative squared error of the weights", dots, ("stored", "round to nearest"))
    names = {
        "weights": "weights int4/int8 (SSZ)",
        "weights_rtn": "weights, experts rounded to nearest",
        "weights_and_activations": "weights and activations, integer arithmetic",
    }
    quality = found["quality"]
    rows = [["float", f"{quality['float']['loss']:.4f}", "–", "–", "–"]]
    for key, title in names.items():
        row = quality[key]
        rows.append([
            title, f"{row['loss']:.4f}", f"{row['loss_delta']:+.4f}", f"{row['kl']:.5f}", f"{row['logits_relative_error']:.4f}"
        ])  # fmt: skip
    content = panel(chart) + panel(table(["model", "held-out loss", "difference", "KL", "logits error"], rows))
    size = found["size"]
    text = (
        f"Routed experts int4, attention and other MLPs int8, per output channel; {size['bf16_mib']:.2f} MiB in bf16 become "
        f"{size['w4a8_mib']:.2f} MiB. Loss and KL in nats per token on {quality['float']['tokens']:,} held-out tokens."
    )
    return section("quantization", "Quantization", text, content)


def export_section(data: Collected) -> str:
    """What was written for each platform and how far it is verified."""
    if not data.exports:
        return ""

    def mark(flag: bool) -> str:
        return '<span class="yes">yes</span>' if flag else '<span class="no">no</span>'

    rows = []
    for name, m in data.exports.items():
        verified = m["verified"]
        rows.append([
            f"{escape(m['maker'])}<small>{escape(name)}{', experimental' if m['experimental'] else ''}</small>",
            f"{escape(m['experts'])}<small>others: {escape(m['others'])}</small>",
            *(mark(verified[k]) for k in ("format", "numerics", "device")),
            f"{m['bytes'] / 2**20:.2f}",
            f"{escape(m['loader']['source'])}<small>{escape(m['loader']['version'])}</small>",
        ])  # fmt: skip
    heads = ["platform", "routed experts", "format", "numerics", "device", "MiB", "checked against the loader"]
    text = (
        "Seven platforms from one canonical artifact. Each directory was read back by an independent reader whose codes and "
        "scales equal the canonical ones. No chip has run them: <em>device</em> stays no until one has."
    )
    return section("export", "Export", text, panel(table(heads, rows, left=(0, 1, 6))))


def files_section(graph_file: Path) -> str:
    """Where each result is, and the command that makes it again."""
    rows = [
        [
            escape(n.name),
            " ".join(f"<code>{escape(o)}</code>" for o in n.outs),
            f"<code>dvc repro {escape(n.name)}</code>",
        ]
        for n in read_graph(graph_file).values()
    ]
    text = (
        "Outputs of every stage; each directory holds a <code>manifest.json</code> with sizes, hashes and row counts."
    )
    return section("files", "Where things are", text, panel(table(["stage", "writes", "again"], rows, left=(0, 1, 2))))


def build(data: Collected, config: Config, graph_file: Path) -> str:
    """The whole page."""
    parts = [
        head(data, config),
        line_section(data, graph_file),
        curation_section(data),
        training_section(data),
        rl_section(data),
        evaluation_section(data),
        quantization_section(data),
        export_section(data),
        files_section(graph_file),
    ]
    return page(config.title, "\n".join(parts))


def run(stage: Stage) -> None:
    """Write report.html and results.json. ValueError for a metrics file that is not JSON."""
    out = stage.out("data/report")
    data = collect(stage.dep("metrics"), stage.dep("plots"), stage.dep("data/export"))
    atomic_write(out / "report.html", build(data, stage.config, stage.root / "dvc.yaml"))
    atomic_write(out / "results.json", json.dumps(summary(data), indent=1, sort_keys=False) + "\n")
    stage.print(f"report of {len(data.metrics)} metrics files, {len(data.plots)} curves, {len(data.exports)} exports")
    stage.artifact(out / "report.html")


def print_table(results: Path) -> None:
    """The evaluation part of results.json as a table on the terminal. ValueError when there is no report yet."""
    from rich.console import Console
    from rich.table import Table

    if not results.is_file():
        raise ValueError(f"{results} does not exist: run `dvc repro report` first")
    found = json.loads(results.read_text())
    rows = found["evaluation"]
    keys = [k for k in columns(rows) if not k.startswith(("bpb/", "needle gain/", "tasks greedy"))]
    shown = Table(title="Results of the line", title_justify="left")
    shown.add_column("checkpoint", no_wrap=True)
    for key in keys:
        shown.add_column(key.replace("task/", "").replace("needle/", "needle ").replace("_", " "), justify="right")
    for variant, row in rows.items():
        cells = [f"{row[k]:.{3 if k == 'bpb' else 2}f}" if k in row else "-" for k in keys]
        shown.add_row(TITLES.get(variant, variant), *cells)
    console = Console(width=None if sys.stdout.isatty() else 130)
    console.print(shown)
    quality = found["quantization"].get("quality", {}).get("weights_and_activations")
    if quality:
        console.print(f"W4A8 against float: loss {quality['loss_delta']:+.4f} nats per token, KL {quality['kl']:.4f}")
    if found["export"]:
        good = sum(e["verified"]["format"] for e in found["export"].values())
        console.print(f"Exports read back equal: {good} of {len(found['export'])} ({', '.join(found['export'])})")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="The results of the last run.")
    parser.add_argument("--table", action="store_true", required=True, help="print the results table")
    parser.add_argument("--results", type=Path, default=Path("data/report/results.json"))
    args = parser.parse_args(argv)
    try:
        print_table(args.results)
    except ValueError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
