"""The ablations' report: one self-contained HTML page of what the ablate stages measured.

    python -m tasks ablate_report      writes data/ablate_report/report.html

Not part of the line, so the line's own report does not wait for it. Shows the ablations that have been run, whichever they are.
"""

from __future__ import annotations

from html import escape

from tasks.files import atomic_write
from tasks.report_ablate import attention_section, efficient_section, mtp_section
from tasks.report_data import collect
from tasks.report_style import page
from tasks.stage import Stage, StageConfig

SECTIONS = {"ablate_mtp": mtp_section, "ablate_attention": attention_section, "ablate_efficient": efficient_section}


class Config(StageConfig):
    """Parameters of the report."""

    title: str = "Arcline: ablations"


def run(stage: Stage) -> None:
    """Write report.html. ValueError when no ablation has been run."""
    out = stage.out("data/ablate_report")
    data = collect(stage.dep("data/ablate_metrics"), stage.dep("data/ablate_plots"), stage.root / "none")
    parts = [
        make(data.metrics[name], data.plots.get(name, [])) for name, make in SECTIONS.items() if name in data.metrics
    ]
    if not parts:
        raise ValueError("no ablation has been run: data/ablate_metrics holds none of " + ", ".join(SECTIONS))
    lead = (
        "Controlled comparisons on small models: equal tokens, several seeds, means and sample standard deviations. What they "
        "show at this size need not hold at another."
    )
    head = f'<h1>{escape(stage.config.title)}</h1><p class="lead">{lead}</p>'
    atomic_write(out / "report.html", page(stage.config.title, "\n".join([head, *parts])))
    stage.print(f"report of {len(parts)} ablations")
    stage.artifact(out / "report.html")
