"""The report: its graph, its charts, its numbers, and that the page needs nothing but itself."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tasks import report
from tasks.report_dag import draw, edges, layout, read_graph, reduced
from tasks.report_data import (
    Collected,
    captions,
    collect,
    columns,
    differences,
    evaluation,
    funnel,
    summary,
    web_filters,
)
from tasks.report_made import recall_table
from tasks.report_svg import Bar, LineChart, Series, bar_chart, label, line_chart, log_dots, ticks
from tasks.stage import run_stage_for_test
from tests.tasks.report_fixtures import write_run

ROOT = Path(__file__).resolve().parents[2]

GRAPH = """
stages:
  a: {cmd: x, outs: [data/a], meta: {phase: curate}}
  b:
    cmd: x
    deps: [data/a]
    outs: [data/b]
    metrics:
      - metrics/b.json:
          cache: false
    meta: {phase: curate}
  c: {cmd: x, deps: [data/a, data/b/part], outs: [data/c], meta: {phase: pretrain}}
  e:
    foreach: {one: data/b, two: data/c}
    do: {cmd: "x ${key}", deps: ["${item}"], outs: ["data/e/${key}"], meta: {phase: evaluate}}
  r: {cmd: x, deps: [metrics, data/e], outs: [data/r], meta: {phase: evaluate}}
"""


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory) -> Path:
    root = write_run(tmp_path_factory.mktemp("run"))
    for name in ("dvc.yaml", "params.yaml"):
        (root / name).write_text((ROOT / name).read_text())
    return root


@pytest.fixture(scope="module")
def collected(run_dir):
    return collect(run_dir / "metrics", run_dir / "plots", run_dir / "data/export")


def test_graph_expands_foreach_and_drops_implied_edges(tmp_path):
    (tmp_path / "dvc.yaml").write_text(GRAPH)
    nodes = read_graph(tmp_path / "dvc.yaml")
    assert list(nodes) == ["a", "b", "c", "e@one", "e@two", "r"]
    full = edges(nodes)
    assert full["c"] == {"a", "b"} and full["e@two"] == {"c"} and full["r"] == {"b", "e@one", "e@two"}
    assert reduced(full)["c"] == {"b"} and reduced(full)["r"] == {"e@one", "e@two"}
    with pytest.raises(ValueError, match="cycle"):
        reduced({"x": {"y"}, "y": {"x"}})
    (tmp_path / "empty.yaml").write_text("{}")
    with pytest.raises(ValueError, match="declares no stages"):
        read_graph(tmp_path / "empty.yaml")


def test_the_line_is_drawn_without_overlaps_and_left_to_right():
    nodes = read_graph(ROOT / "dvc.yaml")
    graph = reduced(edges(nodes))
    place, bands, width, height = layout(nodes, graph)
    assert set(place) == set(nodes)
    corners = sorted(place.values())
    for i, (x, y) in enumerate(corners):
        assert 0 <= x < width and 0 <= y < height
        assert all(abs(x - u) >= 114 or abs(y - v) >= 38 for u, v in corners[i + 1 :])
    for name, parents in graph.items():
        for parent in parents:
            if nodes[parent].phase == nodes[name].phase:
                assert place[parent][0] < place[name][0], (parent, name)
    root = ElementTree.fromstring(draw(nodes, {"sft": "a < b"}))
    assert len(root.findall(".//*[@class='node']")) == len(nodes)
    assert "a < b" in [t.text for t in root.iter() if t.text]


def test_ticks_and_labels():
    assert ticks(0, 10, 5) == [0, 2, 4, 6, 8, 10]
    assert ticks(2.13, 2.41, 4) == [2.2, 2.3, 2.4]
    assert ticks(3, 3) == [3]
    assert [label(v) for v in (0.1 + 0.2, 1500000, 12000, 0.5, 250)] == ["0.3", "1.5M", "12k", "0.5", "250"]


def test_line_chart_scales_its_points():
    chart = line_chart(LineChart("t", [Series("s", [(0, 1.0), (10, 3.0), (5, float("nan"))])], width=500, height=200))
    root = ElementTree.fromstring(chart)
    (line,) = [e for e in root.iter() if e.tag.endswith("polyline")]
    (x0, y0), (x1, y1) = ((float(v) for v in p.split(",")) for p in line.get("points").split())
    assert x0 == 46 and x1 == 500 - 14 and y0 > y1 > 34  # rising values rise; the nan point is left out
    assert "no points yet" in line_chart(LineChart("t", [Series("s", [])]))
    two = line_chart(LineChart("t", [Series("a<b", [(0, 1)]), Series("c", [(0, 2)])]))
    assert "a&lt;b" in two and two.count("<circle") == 2


def test_bars_and_dots_are_proportional():
    root = ElementTree.fromstring(bar_chart("t", [Bar("x", [(30, 0, ""), (10, 1, "")]), Bar("y", [(20, 0, "")])]))
    widths = [float(e.get("width")) for e in root.iter() if e.tag.endswith("rect")]
    assert widths[0] / widths[1] == pytest.approx(3, rel=0.01) and widths[0] / widths[2] == pytest.approx(1.5, rel=0.01)
    with pytest.raises(ValueError, match="negative"):
        bar_chart("t", [Bar("x", [(-1, 0, "")])])
    dots = ElementTree.fromstring(log_dots("t", [("a", [(1e-4, ""), (1e-2, "")]), ("b", [(1e-3, "")])], ["p", "q"]))
    x = sorted(float(e.get("cx")) for e in dots.iter() if e.tag.endswith("circle"))
    assert x[1] - x[0] == pytest.approx(x[2] - x[1], abs=0.2)


def test_evaluation_rows_and_differences(collected):
    rows = evaluation(collected.metrics)
    assert list(rows)[:4] == ["base", "mid", "dsa", "sft"] and list(rows)[-1] == "quantized"
    assert "tasks" not in rows["dsa"] and rows["sft"]["tasks"] == pytest.approx(0.47)
    changes = differences(rows)
    assert changes["base"] == {} and changes["mid"]["bpb"] == pytest.approx(-0.05)
    assert "tasks" not in changes["sft"] and changes["quantized"]["tasks"] == pytest.approx(-0.07)
    keys = columns(rows)
    assert keys[:2] == ["bpb", "tasks"] and keys.index("needle/256") < keys.index("needle/1024") < keys.index(
        "needle/2048"
    )


def test_funnel_and_captions(collected):
    steps = {s["stage"]: s for s in funnel(collected.metrics)}
    assert list(steps) == ["ingest", "web", "code", "math", "dedup", "decontaminate", "decontaminate_swe"]
    assert list(steps["web"]["removed"]) == ["low_quality", "too_short", "repetition"]
    assert steps["dedup"]["kept"] == 11300 and steps["web"]["kept"] == 8200
    assert web_filters(collected.metrics) == [("pages", 2900), ("too_short", 2500), ("low_quality", 2000)]
    shown = captions(collected.metrics)
    assert shown["evaluate@sft"] == "2.310 bpb" and shown["pretrain-general"] == "2.300 bpb"
    assert shown["reasoning_rl"] == "0.40 → 0.70" and shown["export"] == "7 platforms" and shown["pack-pretrain"]


class Links(HTMLParser):
    """Collects what a page would fetch, and its anchors."""

    def __init__(self):
        super().__init__()
        self.fetched, self.ids, self.targets = [], set(), []

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.ids.add(found.get("id"))
        if tag == "a":
            self.targets.append(found["href"])
        if tag in ("script", "link", "img", "iframe", "object", "embed", "source") or "src" in found:
            self.fetched.append((tag, found))


def run_report(run_dir: Path, tmp: Path):
    (tmp / "dvc.yaml").parent.mkdir(parents=True, exist_ok=True)
    for name in ("dvc.yaml", "params.yaml"):
        (tmp / name).write_text((run_dir / name).read_text())
    deps = {p: run_dir / p for p in ("metrics", "plots", "data/export", "data/web")}
    run_stage_for_test(report, {}, deps=deps, outs=["data/report"], tmp=tmp)
    return tmp / "data/report"


def test_page_is_self_contained_deterministic_and_complete(run_dir, tmp_path):
    first, second = (run_report(run_dir, tmp_path / name) for name in "ab")
    assert (first / "report.html").read_bytes() == (second / "report.html").read_bytes()
    html = (first / "report.html").read_text()
    links = Links()
    links.feed(html)
    assert links.fetched == [] and "url(" not in html and "@import" not in html
    assert not re.search(r'(href|src|action)="(?!#)', html.replace('xmlns="http://www.w3.org/2000/svg"', ""))
    assert all(t.startswith("#") and t[1:] in links.ids for t in links.targets) and len(links.targets) == 9
    for text in (
        "near duplicate 1,100",
        "Indexer KL, warm-up",
        "reasoning RL",
        "0.40 → 0.70",
        "Moore Threads",
        "2.420",
        "<td>gsm8k</td><td>1,319</td><td>2</td>",
        "<td>math</td><td>900</td><td>40</td><td>60</td><td>800</td>",
        "<td>kotlin</td><td>248</td>",
        "<title>0.95: 30</title>",
        "Histograms of 2 measurements",
        "282 kept",
        "106 kept, 3% removed: evaluation overlap 3",
    ):
        assert text in html, text
    assert html.count("<svg") >= 12
    for picture in re.findall(r"<svg.*?</svg>", html, re.S):
        ElementTree.fromstring(picture)
    results = json.loads((first / "results.json").read_text())
    assert results["export"]["ascend"]["verified"]["device"] is False
    assert results == json.loads(
        json.dumps(summary(collect(run_dir / "metrics", run_dir / "plots", run_dir / "data/export")))
    )


def test_a_partial_run_still_makes_a_page(run_dir, tmp_path):
    (tmp_path / "in/metrics").mkdir(parents=True)
    (tmp_path / "in/plots").mkdir()
    (tmp_path / "in/data/export").mkdir(parents=True)
    (tmp_path / "in/data/web").mkdir()
    for name in ("dvc.yaml", "params.yaml"):
        (tmp_path / "in" / name).write_text((run_dir / name).read_text())
    (tmp_path / "in/metrics/web.json").write_text('{"documents": 3, "removed": {}}')
    html = (run_report(tmp_path / "in", tmp_path / "out") / "report.html").read_text()
    assert "Curation funnel" in html and "Quantization" not in html
    (tmp_path / "in/metrics/web.json").write_text("{")
    with pytest.raises(ValueError, match="web.json is not JSON"):
        collect(tmp_path / "in/metrics", tmp_path / "in/plots", tmp_path / "in/data/export")


def test_table_on_the_terminal(run_dir, tmp_path):
    out = run_report(run_dir, tmp_path)
    command = [sys.executable, "-m", "tasks.report", "--table", "--results"]
    done = subprocess.run([*command, str(out / "results.json")], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "distilled" in done.stdout and "2.390" in done.stdout and "7 of 7" in done.stdout
    missing = subprocess.run([*command, str(tmp_path / "none.json")], cwd=ROOT, capture_output=True, text=True)
    assert missing.returncode == 1 and "run `dvc repro report` first" in missing.stderr


def test_indexer_recall_is_shown_per_layer_and_stage(collected):
    page = recall_table(collected)
    assert "after warm-up" in page and "after sparse adaptation" not in page, "the fixture has warm-up only"
    rows = re.findall(r"<tr>.*?</tr>", page, re.S)
    assert len(rows) == 3 and all(part in rows[2] for part in ("layer 1", "51.0%", "91.0%", "50.0%"))
    assert recall_table(Collected()) == ""


def test_paths_that_params_give_are_edges_too(tmp_path):
    """`init_from` in a stage's deps: the edge is there when it names an upstream output, and gone when it does not."""
    (tmp_path / "dvc.yaml").write_text(
        "stages:\n  a: {cmd: x, outs: [data/a]}\n  b: {cmd: x, deps: ['${b.x.init_from}'], outs: [data/b]}\n"
    )
    for start, expected in (("data/a", {"a"}), ("/models/GLM-5", set())):
        (tmp_path / "params.yaml").write_text(f"b: {{x: {{init_from: {start}}}}}\n")
        assert edges(read_graph(tmp_path / "dvc.yaml"))["b"] == expected
    (tmp_path / "params.yaml").unlink()
    assert read_graph(tmp_path / "dvc.yaml")["b"].deps == ("${b.x.init_from}",)


def test_what_the_guard_refused_is_on_the_page(collected):
    from tasks.report_made import watch_note

    collected = copy.copy(collected)
    collected.metrics = dict(collected.metrics)
    assert watch_note(collected) == ""
    collected.metrics["midtrain_s1"] = {"guard": {"events": 0, "skipped_steps": []}, "dead_expert_alarms": 0}
    assert "1 stages: nothing refused, no expert dead" in watch_note(collected)
    collected.metrics["sft"] = {"guard": {"events": 2, "skipped_steps": [396, 407, 408]}, "dead_expert_alarms": 1}
    note = watch_note(collected)
    assert "sft: the guard refused 2 times and skipped steps 396, 407, 408; sft: 1 alarms of dead experts" in note
