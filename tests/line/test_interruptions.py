"""What a kill, a cancel or a change at a bad moment may do to a line: nothing that a rerun does not mend."""

import json
import random
import time

import psutil
import pytest

from flows.services import request
from tests.flows.toy import Toy, wait_until

pytestmark = pytest.mark.slow
EDGES = {"raw": [], "left": ["raw"], "right": ["raw"], "join": ["left", "right"]}
FLOW = ("-m", "flows.lifecycle")


def stage_results(toy):
    return {name: toy.result(name) for name in toy.edges}


def test_kill_minus_nine_of_the_flow_leaves_no_stage_and_the_next_run_mends_it(tmp_path, services):
    """A silent stage: it writes nothing, so no broken pipe would ever end it."""
    toy = Toy(tmp_path, {"one": [], "two": []})
    toy.set(one={"seconds": 3.0, "steps": 1}, two={"seconds": 3.0, "steps": 1})
    process = toy.start(*FLOW, **services)
    wait_until(lambda: len(toy.processes()) == 2 and toy.trace("one") and toy.trace("two"), what="two running stages")
    process.kill()
    process.wait()
    wait_until(lambda: not toy.processes(), 10, "the stages to be gone")
    status, output = toy.run(*FLOW, **services)
    assert status == 0, output
    assert toy.stages() == {"one": "Completed", "two": "Completed"}


@pytest.mark.parametrize("signal", ["terminate", "interrupt"])
def test_a_signal_to_the_flow_ends_stages_with_everything_they_started(tmp_path, services, signal):
    import signal as signals

    toy = Toy(tmp_path, {"one": [], "two": ["one"]})
    toy.set(one={"seconds": 300.0, "child": True})
    process = toy.start(*FLOW, **services)
    wait_until(lambda: toy.trace("one") and len(toy.processes()) >= 2, what="a stage with a child")
    began = time.monotonic()
    process.send_signal(signals.SIGTERM if signal == "terminate" else signals.SIGINT)
    process.wait(60)
    wait_until(lambda: not toy.processes(), 5, "stage and child to be gone")
    assert process.returncode != 0 and time.monotonic() - began < 30
    assert not toy.trace("two")


def test_cancelling_a_deployed_run_ends_its_stage(tmp_path, services):
    toy = Toy(tmp_path, {"one": [], "two": ["one"]})
    toy.set(one={"seconds": 300.0, "child": True})
    status, output = toy.run("-m", "prefect", "--no-prompt", "deploy", "--name", "lifecycle/tiny", **services)
    assert status == 0, output
    api = services["PREFECT_API_URL"]
    deployment = json.loads(request("GET", f"{api}/deployments/name/lifecycle/tiny")[1])
    run = json.loads(request("POST", f"{api}/deployments/{deployment['id']}/create_flow_run", {})[1])
    wait_until(lambda: toy.trace("one"), 120, "the worker to start the stage")
    body = {"state": {"type": "CANCELLING", "name": "Cancelling"}}
    assert request("POST", f"{api}/flow_runs/{run['id']}/set_state", body)[0] in (200, 201)
    wait_until(lambda: not toy.processes(), 90, "stage and child to be gone")

    def state():
        return json.loads(request("GET", f"{api}/flow_runs/{run['id']}")[1])["state"]["type"]

    wait_until(lambda: state() in ("CANCELLED", "CRASHED", "FAILED"), 90, "the run to end")
    assert state() == "CANCELLED"
    assert not toy.trace("two")


@pytest.mark.parametrize("change", ["parameter", "dependency"])
def test_a_change_after_a_crash_does_not_resume_stale_work(tmp_path, services, change):
    def changed(toy):
        if change == "parameter":
            toy.set(raw={"text": "new"})
        else:
            (toy.root / "conf" / "input.txt").write_text("new input\n")

    toy = Toy(tmp_path / "killed", {"raw": []})
    toy.set(raw={"steps": 6, "seconds": 6.0, "text": "old"})
    process = toy.start(*FLOW, **services)
    wait_until(lambda: len(toy.trace("raw")) >= 4, what="some checkpoints")
    toy.stage_process("raw").kill()
    assert process.wait(60) == 1
    changed(toy)
    assert toy.run(*FLOW, **services)[0] == 0
    clean = Toy(tmp_path / "clean", {"raw": []})
    clean.set(raw={"steps": 6, "seconds": 6.0, "text": "old"})
    changed(clean)
    assert clean.run("-m", "dvc", "repro", "-q")[0] == 0
    assert toy.result("raw") == clean.result("raw")
    assert toy.lock() == clean.lock()


def test_each_stage_killed_at_a_random_moment_and_rerun_gives_the_same_lock(tmp_path, services):
    settings = {name: {"steps": 8, "seconds": 2.0} for name in EDGES}
    clean = Toy(tmp_path / "clean", EDGES)
    clean.set(**settings)
    assert clean.run(*FLOW, **services)[0] == 0
    again = Toy(tmp_path / "again", EDGES)
    again.set(**settings)
    assert again.run(*FLOW, **services)[0] == 0
    assert again.lock() == clean.lock(), "two clean runs"

    toy = Toy(tmp_path / "killed", EDGES)
    toy.set(**settings)
    moment = random.Random(0)
    killed = set()
    for _ in range(len(EDGES) + 1):
        process = toy.start(*FLOW, **services)
        while process.poll() is None:
            for name in set(EDGES) - killed:
                stage = toy.stage_process(name)
                if stage is not None and toy.trace(name):
                    time.sleep(moment.uniform(0, 1.8))
                    try:
                        stage.kill()
                        killed.add(name)
                    except psutil.NoSuchProcess:  # it was done before its turn came
                        killed.add(name)
            time.sleep(0.05)
        if process.returncode == 0:
            break
    assert process.returncode == 0, process.output()
    assert killed == set(EDGES)
    assert toy.lock() == clean.lock()
    assert stage_results(toy) == stage_results(clean)
