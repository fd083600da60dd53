"""flows/graph.py: the graph as DVC has it, targets, and what has changed."""

import subprocess
import sys

import pytest

from flows import graph
from tests.flows.toy import REPO, Toy

EDGES = {"raw": [], "left": ["raw"], "right": ["raw"], "join": ["left", "right"]}


@pytest.fixture
def toy(tmp_path):
    return Toy(tmp_path, EDGES, meta={"join": {"retries": 2, "tags": ["gpu"], "timeout_minutes": 5}})


def test_nodes_carry_edges_and_meta_in_topological_order(toy):
    nodes = graph.read(toy.root)
    assert list(nodes) == ["raw", "left", "right", "join"]
    assert nodes["join"] == graph.Node("join", ("left", "right"), "later", ("gpu",), 2, 5.0)
    assert nodes["raw"].upstream == ()
    assert [node.ahead for node in nodes.values()] == [2, 1, 1, 0]


def test_targets_are_stages_phases_and_groups(toy):
    nodes = graph.read(toy.root)
    assert graph.match(nodes, None) == set(nodes)
    assert graph.match(nodes, ["left"]) == {"left"}
    assert graph.match(nodes, ["later"]) == {"left", "right", "join"}
    assert graph.closure(nodes, ["left"]) == {"left", "raw"}
    with pytest.raises(ValueError, match=r"unknown target 'nothing'.*first, later.*raw, left"):
        graph.match(nodes, ["nothing"])


def test_a_group_is_all_its_variants():
    nodes = {n: graph.Node(n, ()) for n in ("midtrain-s1", "midtrain-s2", "evaluate@sft", "sft_data", "sft")}
    assert graph.match(nodes, ["midtrain"]) == {"midtrain-s1", "midtrain-s2"}
    assert graph.match(nodes, ["evaluate"]) == {"evaluate@sft"}
    assert graph.match(nodes, ["sft"]) == {"sft"}


def test_what_runs_by_request_is_no_part_of_the_line():
    nodes = {
        "sft": graph.Node("sft", (), "posttrain"),
        "ablate_mtp": graph.Node("ablate_mtp", (), "ablate", by_request=True),
    }
    assert graph.match(nodes, None) == {"sft"}
    assert graph.match(nodes, ["ablate"]) == graph.match(nodes, ["ablate_mtp"]) == {"ablate_mtp"}


def test_a_plan_marks_what_differs_from_the_lock(toy):
    assert graph.plan(None, toy.root).changed == set(EDGES)
    assert toy.run("-m", "dvc", "repro", "-q")[0] == 0
    assert graph.plan(None, toy.root).changed == set()
    toy.set(left={"text": "other"})
    plan = graph.plan(["left"], toy.root)
    assert (set(plan.nodes), plan.selected, plan.changed) == ({"raw", "left"}, {"left"}, {"left"})
    (toy.root / "data" / "right" / "result.txt").write_text("touched by hand")
    assert {"left", "right"} <= graph.plan(None, toy.root).changed


def test_a_broken_dvc_yaml_is_a_clear_error(toy):
    with open(toy.root / "dvc.yaml", "a") as file:
        file.write(
            "  loop: {cmd: x, deps: [data/end], outs: [data/start]}\n  pool: {cmd: x, deps: [data/start], outs: [data/end]}\n"
        )
    with pytest.raises(ValueError, match="dvc.yaml"):
        graph.read(toy.root)


def test_the_real_line_has_every_phase_and_known_retries():
    nodes = graph.read(REPO)
    phases = {node.phase for node in nodes.values()}
    assert phases == {"curate", "pretrain", "midtrain", "posttrain", "deploy", "evaluate", "ablate"}
    assert {node.phase for node in nodes.values() if node.by_request} == {"ablate"}
    line = graph.closure(nodes, graph.match(nodes, None))
    assert not any(nodes[name].by_request for name in line), "the line must not wait for what runs by request"
    for node in nodes.values():
        assert node.timeout_minutes, f"{node.name} has no time limit"


def test_only_flows_import_prefect_and_reading_the_graph_does_not():
    code = "import sys; from flows import graph, runner, services; sys.exit('prefect' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=REPO).returncode == 0
