"""The report's sections on what came out: evaluation, quantization, exports, and where every file is.

python -m pytest tests/tasks/test_report.py
"""

from __future__ import annotations

from html import escape
from pathlib import Path

from tasks.report_dag import read_graph
from tasks.report_data import TITLES, Collected, columns, differences, evaluation
from tasks.report_style import delta, panel, section, table
from tasks.report_svg import log_dots


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
