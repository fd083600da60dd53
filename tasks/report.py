"""The report: one self-contained HTML page of the whole run, and results.json with the same numbers.

    dvc repro report      or      python -m tasks report      writes data/report/report.html
    python -m tasks.report --table                            prints the results table of the last run

Built from metrics/, plots/, the export manifests and the web stage's histograms alone; the same run gives the same bytes.
"""

from __future__ import annotations

import argparse
import json
import sys
from html import escape
from pathlib import Path

from tasks.files import atomic_write
from tasks.report_curation import curation_section
from tasks.report_dag import draw, read_graph
from tasks.report_data import TITLES, Collected, captions, collect, columns, summary
from tasks.report_made import rl_section, training_section
from tasks.report_results import evaluation_section, export_section, files_section, quantization_section
from tasks.report_style import card, page, panel, section
from tasks.stage import Stage, StageConfig


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
    links += '<a href="#ablations">ablations</a>'
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


def ablations_section() -> str:
    """Where the ablations' page is: they are a phase of their own, which this stage must not wait for."""
    text = (
        "Attention (MLA, MLA-256, GQA; Muon against Muon Split), multi-token prediction with speculative decoding, and efficient "
        "attention (sliding windows, GDN, SimpleGDN, DSA) at growing lengths are compared by a phase of their own, "
        "<code>prefect deployment run ablate/tiny</code>. Its tables and curves: "
        "<code>data/ablate_report/report.html</code>."
    )
    return section("ablations", "Ablations", text, "")


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
        ablations_section(),
        files_section(graph_file),
    ]
    return page(config.title, "\n".join(parts))


def run(stage: Stage) -> None:
    """Write report.html and results.json. ValueError for a metrics file that is not JSON."""
    out = stage.out("data/report")
    data = collect(stage.dep("metrics"), stage.dep("plots"), stage.dep("data/export"), stage.dep("data/web"))
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
    console.print(shown if rows else "no checkpoint has been evaluated yet")
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
