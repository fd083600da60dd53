"""flows/lifecycle.py: whole runs of a small line under Prefect."""

import pytest

from tests.flows.toy import Toy, wait_until

pytestmark = pytest.mark.slow
EDGES = {"raw": [], "left": ["raw"], "right": ["raw"], "join": ["left", "right"]}
FLOW = ("-m", "flows.lifecycle")


@pytest.fixture
def toy(tmp_path, services):
    toy = Toy(tmp_path, EDGES)
    toy.env = (lambda plain: lambda **extra: plain(**services, **extra))(toy.env)
    return toy


def test_runs_caches_and_reruns_only_what_a_change_reaches(toy):
    status, output = toy.run(*FLOW)
    assert status == 0, output
    assert toy.stages() == dict.fromkeys(EDGES, "Completed")
    assert "left: step 3" in output, "the stage's own lines are in the flow's log"
    first = toy.lock()

    status, output = toy.run(*FLOW)
    assert (status, toy.stages()) == (0, dict.fromkeys(EDGES, "Cached")), output
    assert toy.lock() == first

    toy.set(left={"text": "changed"})
    status, output = toy.run(*FLOW)
    assert status == 0, output
    assert toy.stages() == {"raw": "Cached", "left": "Completed", "right": "Cached", "join": "Completed"}

    toy.set(left={"text": ""})  # a value that equals the default is still another parameter set
    toy.run(*FLOW)
    toy.set(left={"text": "changed"})
    status, output = toy.run(*FLOW)
    assert toy.stages() == {"raw": "Cached", "left": "Restored", "right": "Cached", "join": "Restored"}, output


def test_same_results_as_dvc_repro(toy, tmp_path_factory):
    assert toy.run(*FLOW)[0] == 0
    other = Toy(tmp_path_factory.mktemp("other"), EDGES)
    assert other.run("-m", "dvc", "repro", "-q")[0] == 0
    assert [other.result(name) for name in EDGES] == [toy.result(name) for name in EDGES]
    assert other.run(*FLOW, **{k: v for k, v in toy.env().items() if k.startswith("PREFECT_")})[0] == 0
    assert other.stages() == dict.fromkeys(EDGES, "Cached")


def test_after_a_failure_descendants_do_not_run_and_other_branches_finish(toy):
    toy.set(left={"fail": True})
    status, output = toy.run(*FLOW)
    assert status == 1
    assert toy.stages() == {"raw": "Completed", "left": "Failed", "right": "Completed", "join": "NotReady"}
    assert "Failed: left (see work/logs/left.log)" in output
    assert "this stage was told to fail" in (toy.root / "work" / "logs" / "left.log").read_text()
    toy.set(left={"fail": False})
    assert toy.run(*FLOW)[0] == 0
    assert toy.stages() == {"raw": "Cached", "left": "Completed", "right": "Cached", "join": "Completed"}


def test_targets_force_and_profile(toy):
    assert toy.run(*FLOW, "--targets", "left")[0] == 0
    assert toy.stages() == {"raw": "Completed", "left": "Completed"}
    assert toy.run(*FLOW, "--targets", "left", "--force")[0] == 0
    assert toy.stages() == {"raw": "Cached", "left": "Completed"}
    (toy.root / "conf" / "other.yaml").write_text("extends: tiny\nprofile: other\nright: {text: other}\n")
    status, output = toy.run(*FLOW, "--profile", "other")
    assert status == 0 and "params.yaml now holds profile other" in output
    assert toy.stages() == {"raw": "Cached", "left": "Cached", "right": "Completed", "join": "Completed"}
    status, output = toy.run(*FLOW, "--targets", "nothing")
    assert status == 1 and "unknown target 'nothing'" in output


def test_retries_of_dvc_yaml_resume_from_the_checkpoint(tmp_path, services):
    toy = Toy(tmp_path, {"raw": []}, meta={"raw": {"retries": 1}})
    toy.set(raw={"steps": 5, "die_at": 3})
    status, output = toy.run(*FLOW, **services)
    assert status == 0, output
    assert toy.trace("raw") == [":0", ":1", ":2", ":3", ":3", ":4"], "steps before the checkpoint run once"
    clean = Toy(tmp_path / "clean", {"raw": []})
    (clean.root / "work" / "trace").mkdir(parents=True)
    (clean.root / "work" / "trace" / "raw.died").touch()
    clean.set(raw={"steps": 5, "die_at": 3})
    assert clean.run("-m", "dvc", "repro", "-q")[0] == 0
    assert toy.result("raw") == clean.result("raw")


def test_a_second_run_queues_behind_the_first(toy):
    toy.set(raw={"seconds": 4.0})
    one = toy.start(*FLOW)
    wait_until(lambda: toy.trace("raw"), what="the first run to start its first stage")
    two = toy.start(*FLOW)
    assert one.wait(120) == 0 and two.wait(120) == 0
    assert "has this workspace; waiting for it" in two.output()
    assert "4 stages: 4 cached" in two.output()
    for name in EDGES:
        assert len(toy.trace(name)) == 3, f"{name} ran once"


def test_at_most_two_stages_run_at_a_time(tmp_path, services):
    names = ["one", "two", "three", "four"]
    toy = Toy(tmp_path, {name: [] for name in names})
    toy.set(**{name: {"seconds": 2.0} for name in names})
    process = toy.start(*FLOW, **services)
    most = 0
    while process.poll() is None:
        # Two looks: while one is taken, a stage may end and the next start.
        most = max(most, min(len(toy.processes()), len(toy.processes())))
    assert process.returncode == 0, process.output()
    assert most == 2


def test_the_parent_of_the_stages_records_is_the_runs_record(toy, services):
    import json

    from flows.services import request

    assert toy.run(*FLOW, "--targets", "raw")[0] == 0
    url = services["MLFLOW_TRACKING_URI"] + "/api/2.0/mlflow/"
    _, answer = request("POST", url + "runs/search", {"experiment_ids": ["1"], "max_results": 1000})
    runs = [(run["info"], {t["key"]: t["value"] for t in run["data"]["tags"]}) for run in json.loads(answer)["runs"]]
    print_ = json.loads((toy.root / "data" / "raw" / "manifest.json").read_text())["fingerprint"]
    tags = next(tags for info, tags in runs if tags.get("fingerprint") == print_)
    parent = next(info for info, _ in runs if info["run_id"] == tags["mlflow.parentRunId"])
    assert (parent["run_name"], parent["status"]) == ("lifecycle", "FINISHED")


def test_without_any_server_and_with_the_address_of_one_that_is_gone(tmp_path):
    from flows.services import SETTINGS_HEAD

    toy = Toy(tmp_path, {"raw": []})
    settings = toy.root / "prefect.toml"
    settings.write_text(f'{SETTINGS_HEAD}: an old run\'s.\n[api]\nurl = "http://127.0.0.1:9/api"\n')
    status, output = toy.run(*FLOW)
    assert status == 0 and toy.stages() == {"raw": "Completed"}, output
    assert not settings.exists()
    assert "Traceback" not in output and "EventsWorker' failed" not in output, output
