"""The report's sections on how the model was made: training curves, reinforcement learning.

python -m pytest tests/tasks/test_report.py
"""

from __future__ import annotations

from html import escape

from tasks.report_data import TITLES, Collected, series
from tasks.report_style import delta, panel, section, table
from tasks.report_svg import LineChart, Series, line_chart

LM_STAGES = ("pretrain_general", "pretrain_reasoning", "midtrain_s1", "midtrain_s2", "midtrain_s3", "dsa_adapt")
RL_STAGES = ("reasoning_rl", "agentic_rl", "general_rl", "distill")


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
    charts.append(recall_table(data))
    charts.append(watch_note(data))
    text = "Language-model stages end to end; dotted lines mark where a stage begins."
    return section("training", "Training", text, "".join(charts))


def watch_note(data: Collected) -> str:
    """What watched over training refused or warned of, stage by stage; "" where no stage says."""
    told, watched = [], 0
    for stem, found in sorted(data.metrics.items()):
        if not isinstance(guard := found.get("guard"), dict):
            continue
        watched += 1
        if guard["events"]:
            steps = ", ".join(map(str, guard["skipped_steps"]))
            told.append(f"{escape(stem)}: the guard refused {guard['events']} times and skipped steps {steps}")
        if found.get("dead_expert_alarms"):
            told.append(f"{escape(stem)}: {found['dead_expert_alarms']} alarms of dead experts")
    if not watched:
        return ""
    return f'<p class="note">Guard and router, {watched} stages: {"; ".join(told) or "nothing refused, no expert dead"}.</p>'


def recall_table(data: Collected) -> str:
    """What the indexer's selection holds of the best possible one's attention, per layer, along the DSA stages."""
    steps: list[tuple[str, dict]] = []
    for stem, title in (("dsa_warmup", "after warm-up"), ("dsa_adapt", "after sparse adaptation")):
        found = data.metrics.get(stem, {})
        if not steps and found.get("recall_before"):
            steps.append(("before", found["recall_before"]))
        if found.get("recall"):
            steps.append((title, found["recall"]))
    if not steps:
        return ""
    topk = min(steps[-1][1]["layer_0"], key=int)
    layers = sorted(steps[-1][1], key=lambda name: int(name.rpartition("_")[2]))
    rows = [
        [
            layer.replace("_", " "),
            *(f"{recall[layer][topk]['ratio']:.1%}" if topk in recall.get(layer, {}) else "–" for _, recall in steps),
            f"{steps[-1][1][layer][topk]['recent'] / steps[-1][1][layer][topk]['oracle']:.1%}",
        ]
        for layer in layers
    ]
    note = (
        f'<p class="note">Indexer: attention mass on its top {topk} keys as a share of what the best possible {topk} keys '
        f"hold, under dense attention on held-out text; last column: the {topk} most recent keys instead.</p>"
    )
    return panel(table(["indexer recall", *(title for title, _ in steps), "most recent keys"], rows)) + note


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
    distance = series(data.plots.get("distill", []), "reverse_kl")
    if distance:
        chart = LineChart(
            "Distillation: distance to the teachers", [Series("KL", distance)], "step", "reverse KL, nats per token"
        )
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
