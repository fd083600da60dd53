"""`python -m flows run`, the heart of `make run`: services, deployment, one watched run, results or the reason of failure."""

import json

import pytest

from flows.services import request
from tests.flows.toy import Toy, wait_until


@pytest.mark.slow
def test_run_watch_results_then_cached_then_failure(tmp_path, services):
    toy = Toy(tmp_path, {"raw": [], "next": ["raw"]})
    (toy.root / "tasks" / "report.py").write_text("raise SystemExit(1)\n")  # no report yet: the plain metrics are shown
    try:
        status, output = toy.run("-m", "flows", "run", **services)
        assert status == 0, output
        assert "deployed lifecycle/tiny and the phases" in output
        assert toy.stages() == {"raw": "Completed", "next": "Completed"}
        for name in ("lifecycle", "curate", "pretrain", "midtrain", "posttrain", "deploy", "evaluate", "ablate"):
            found = json.loads(request("GET", f"{services['PREFECT_API_URL']}/deployments/name/{name}/tiny")[1])
            fields = found["parameter_openapi_schema"]["properties"]
            assert set(fields) == {"targets", "force", "profile"} and all(f["description"] for f in fields.values())
            assert found["parameters"]["targets"] == (None if name == "lifecycle" else [name])
        value = json.loads((toy.root / "metrics" / "next.json").read_text())["value"]
        assert any(line.split() == ["next", "value", str(value)] for line in output.splitlines())
        prefect, mlflow, report = output.rstrip().splitlines()[-3:]
        assert prefect == "Prefect  " + services["PREFECT_API_URL"].removesuffix("/api")
        assert mlflow == "MLflow   " + services["MLFLOW_TRACKING_URI"]
        assert report.startswith("Report   not made yet")

        status, output = toy.run("-m", "flows", "run", **services)
        assert status == 0 and "deployed" not in output
        assert toy.stages() == {"raw": "Cached", "next": "Cached"}

        toy.set(next={"fail": True})
        status, output = toy.run("-m", "flows", "run", **services)
        assert status == 1
        assert "2 stages: 1 cached, 1 failed. Failed: next" in output
        assert "error: this stage was told to fail" in output.split("end of work/logs/next.log")[1]
    finally:
        status, output = toy.run("-m", "flows.services", "down")
    assert "worker: stopped" in output and "prefect" not in output, "servers that it found running are left running"


def test_results_without_any_run(tmp_path):
    toy = Toy(tmp_path, {"raw": []})
    (toy.root / "tasks" / "report.py").write_text("raise SystemExit(1)\n")
    status, output = toy.run("-m", "flows", "results")
    assert status == 0
    assert "no metrics yet" in output and "Prefect  not running" in output


@pytest.mark.slow
def test_stopping_the_services_during_a_run_ends_its_stage_and_the_run_says_so(tmp_path):
    toy = Toy(tmp_path, {"raw": []})
    toy.set(raw={"seconds": 300.0, "child": True})
    try:
        process = toy.start("-m", "flows", "run")
        wait_until(lambda: toy.trace("raw"), 240, "the run's first stage")
        status, output = toy.run("-m", "flows.services", "down")
        assert status == 0, output
        assert not toy.processes(), "stages and what they started"
        assert process.wait(60) != 0, "whoever watched it is told"
        assert toy.run("-m", "flows.services", "up")[0] == 0
        url = json.loads((toy.root / "work" / "services.json").read_text())["prefect"]
        (run,) = json.loads(request("POST", url + "/api/flow_runs/filter", {})[1])
        assert run["state"]["type"] in ("CRASHED", "CANCELLED", "FAILED")
    finally:
        toy.run("-m", "flows.services", "down")
