"""flows/services.py: real servers, started, reused, replaced and ended."""

import json
import os
import socket
import subprocess
import sys

import pytest

from flows.services import HEALTH, HOST, Services, free_port, healthy, request
from tests.flows.toy import REPO, wait_until


def test_a_taken_port_is_passed_over():
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert free_port(port) != port


def test_nothing_running_is_reported_as_such(tmp_path):
    services = Services(tmp_path)
    assert not any(entry["running"] for entry in services.status().values())
    services.down()
    (tmp_path / "work" / "services.json").write_text("not json")
    assert services.load() == {}


def test_a_recorded_process_id_that_now_belongs_to_another_process_is_not_ours(tmp_path):
    services = Services(tmp_path)
    sleeper = subprocess.Popen(["sleep", "60"])
    try:
        state = {"processes": {"worker": {"pid": sleeper.pid, "started": 1.0, "log": "x"}}}
        assert not services._alive(state, "worker")
        assert services._end(state, "worker") == []
        assert sleeper.poll() is None
    finally:
        sleeper.kill()
        sleeper.wait()


RECORD = """
import sys
from pathlib import Path
from tasks.tracking import open_record
record = open_record(Path(sys.argv[1]), sys.argv[2], {f"p{i}": i for i in range(150)}, {"who": sys.argv[2]})
for step in range(1200):
    record.log(step, {"loss": 1 / (step + 1)})
record.metric({"final": {"accuracy": 0.5, "nan": float("nan")}})
record.artifact(Path(sys.argv[3]))
record.close("FINISHED")
"""


@pytest.mark.slow
def test_up_parallel_first_use_reuse_repair_and_down(tmp_path, monkeypatch):
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    services = Services(tmp_path)
    said = []
    state = services.up(said.append)
    try:
        assert all(entry["running"] for entry in services.status().values())
        assert f'url = "{state["prefect"]}/api"' in (tmp_path / "prefect.toml").read_text()
        pools = json.loads(request("POST", state["prefect"] + "/api/work_pools/filter", {})[1])
        assert [(pool["name"], pool["type"]) for pool in pools] == [("local", "process")]

        # four stages at once are the first to use a fresh MLflow database
        artifact = tmp_path / "table.json"
        artifact.write_text('{"a": 1}')
        env = {**os.environ, "MLFLOW_TRACKING_URI": state["mlflow"]}
        command = [sys.executable, "-c", RECORD, str(tmp_path / "spool")]
        writers = [subprocess.Popen([*command, f"w{i}", str(artifact)], cwd=REPO, env=env) for i in range(4)]
        assert [writer.wait() for writer in writers] == [0] * 4
        wait_until(lambda: _flushed(tmp_path / "spool", state["mlflow"], monkeypatch), what="an empty spool")
        runs = _runs(state["mlflow"])
        assert sorted(run["info"]["run_name"] for run in runs) == ["w0", "w1", "w2", "w3"]
        for run in runs:
            assert run["info"]["status"] == "FINISHED" and len(run["data"]["params"]) == 150
            history = f"{state['mlflow']}/api/2.0/mlflow/metrics/get-history"
            points = _get(history, run_id=run["info"]["run_id"], metric_key="loss", max_results="5000")["metrics"]
            assert sorted(point["step"] for point in points) == list(range(1200))
            files = _get(f"{state['mlflow']}/api/2.0/mlflow/artifacts/list", run_id=run["info"]["run_id"])["files"]
            assert [file["path"] for file in files] == ["table.json"]

        # up again: nothing is started, the same processes serve
        before = services.load()["processes"]
        said.clear()
        services.up(said.append)
        assert services.load()["processes"] == before and not said

        # a server that died is replaced, and what it knew is still there
        import psutil

        broken = psutil.Process(before["mlflow"]["pid"])
        for process in [*broken.children(recursive=True), broken]:
            process.kill()
        wait_until(lambda: not healthy(state["mlflow"] + HEALTH["mlflow"]), what="the server to be gone")
        state = services.up(said.append)
        assert len(said) == 1 and said[0].startswith("mlflow: started")
        assert services.load()["processes"]["prefect"] == before["prefect"]
        assert len(_runs(state["mlflow"])) == 4
    finally:
        ids = [entry["pid"] for entry in services.load()["processes"].values()]
        services.down(said.append)
    assert {"worker: stopped", "prefect: stopped", "mlflow: stopped"} <= set(said)
    assert not any(psutil.pid_exists(i) and psutil.Process(i).status() != psutil.STATUS_ZOMBIE for i in ids)
    assert not healthy(state["prefect"] + HEALTH["prefect"]) and not healthy(state["mlflow"] + HEALTH["mlflow"])
    assert not services.state_path.exists() and not (tmp_path / "prefect.toml").exists()


def _get(url, **query):
    import urllib.parse
    import urllib.request

    with urllib.request.urlopen(f"{url}?{urllib.parse.urlencode(query)}") as answer:
        return json.loads(answer.read())


def _runs(url):
    body = {"experiment_ids": ["1"], "max_results": 1000}
    return json.loads(request("POST", f"{url}/api/2.0/mlflow/runs/search", body)[1])["runs"]


def _flushed(spool, url, monkeypatch):
    from tasks.tracking import flush

    with monkeypatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", url)
        return flush(spool)[1] == 0
