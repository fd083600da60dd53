"""tasks/tracking.py: what is spooled, what survives a kill, what a missing or slow server may cost."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from flows.services import request
from tasks import tracking
from tasks.tracking import flatten, flush, open_record

REPO = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def no_server(monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///not-a-server.db")  # spool only
    monkeypatch.delenv("ARCLINE_PARENT_RUN", raising=False)


def spooled(spool):
    return [json.loads(path.read_text()) for path in sorted(spool.glob("s-*.json"))]


def points(spool):
    lines = [line for path in spool.glob("*.metrics.jsonl") for line in path.read_text().splitlines()]
    return [point for line in lines for point in json.loads(line)]


def test_without_a_server_everything_is_in_the_spool(tmp_path, monkeypatch):
    monkeypatch.setenv("ARCLINE_PARENT_RUN", "s-parent")
    record = open_record(tmp_path / "spool", "sft", {"optim": {"lr": 1e-3}}, {"phase": "posttrain"})
    (start,) = spooled(tmp_path / "spool")
    assert start["status"] == "RUNNING", "a record at the start, so that a killed stage shows"
    record.log(1, {"loss": 2.0})
    record.log(2, {"loss": float("nan"), "note": "text is not a metric"})
    record.metric({"accuracy": {"addition": 0.5}})
    (tmp_path / "table.json").write_text("{}")
    record.artifact(tmp_path / "table.json")
    (tmp_path / "table.json").unlink()
    record.close("FINISHED")
    (end,) = spooled(tmp_path / "spool")
    assert (end["status"], end["name"], end["params"]) == ("FINISHED", "sft", {"optim.lr": 1e-3})
    assert end["tags"]["phase"] == "posttrain" and end["tags"]["mlflow.parentRunId"] == "s-parent"
    found = {(p["key"], p["step"]): p["value"] for p in points(tmp_path / "spool")}
    assert found == {("loss", 1): 2.0, ("loss", 2): "NaN", ("accuracy.addition", 0): 0.5}
    assert (tmp_path / "spool" / f"{end['id']}.files" / "table.json").read_text() == "{}"
    assert flush(tmp_path / "spool") == (0, 1)


def test_a_server_that_does_not_answer_costs_at_most_the_two_waits(tmp_path, monkeypatch):
    with socket.socket() as silent:  # accepts connections and never says a word
        silent.bind(("127.0.0.1", 0))
        silent.listen(50)
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setattr(tracking, "OPEN_WAIT_S", 0.3)
        monkeypatch.setattr(tracking, "CLOSE_WAIT_S", 0.3)
        began = time.monotonic()
        record = open_record(tmp_path, "sft", {}, {})
        record.log(1, {"loss": 1.0})
        record.close("FAILED")
        assert time.monotonic() - began < 4
    assert spooled(tmp_path)[0]["status"] == "FAILED"


def test_a_spool_that_cannot_be_written_does_not_stop_a_stage(tmp_path, capsys):
    (tmp_path / "file").write_text("in the way")
    record = open_record(tmp_path / "file" / "spool", "sft", {}, {})
    record.log(1, {"loss": 1.0})
    record.metric({"x": 1})
    record.artifact(tmp_path / "nothing")
    record.close("FINISHED")
    assert "leaves no record" in capsys.readouterr().out


def test_names_are_made_fit_for_mlflow():
    assert flatten({"a": {"b@c": 1, "d": {"e(f)": 2}}, "g": [1]}) == {"a.b_c": 1, "a.d.e_f_": 2, "g": [1]}


KILLED = """
import os, signal, sys, time
from pathlib import Path
from tasks import tracking
tracking.FLUSH_S = 0
record = tracking.open_record(Path(sys.argv[1]), "killed", {"a": 1}, {})
for step in range(10):
    record.log(step, {"loss": step})
if sys.argv[2] == "uploaded":
    while record.run_id is None: time.sleep(0.05)
    time.sleep(0.5)
print("ready", flush=True)
time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["spooled", "uploaded"])
def test_a_killed_stage_shows_once_and_as_killed(tmp_path, services, monkeypatch, how):
    url = services["MLFLOW_TRACKING_URI"]
    env = {**os.environ, "MLFLOW_TRACKING_URI": url if how == "uploaded" else "sqlite:///none.db"}
    command = [sys.executable, "-c", KILLED, str(tmp_path), how]
    process = subprocess.Popen(command, cwd=REPO, env=env, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", url)
    assert flush(tmp_path) == (0, 1), "a living process keeps its record"
    with open(next(tmp_path.glob("*.metrics.jsonl")), "a") as file:
        file.write('[{"key": "loss", "value": 9')  # the write that the kill cuts short
    process.send_signal(signal.SIGKILL)
    process.wait()
    (record,) = spooled(tmp_path)
    if how == "uploaded":  # as if killed between the server's answer and the note of it
        next(tmp_path.glob("*.sent")).unlink()
    assert flush(tmp_path) == (1, 0) and flush(tmp_path) == (0, 0)
    body = {"experiment_ids": ["1"], "filter": f"tags.`arcline.spool_id` = '{record['id']}'", "max_results": 10}
    runs = json.loads(request("POST", f"{url}/api/2.0/mlflow/runs/search", body)[1])["runs"]
    assert [run["info"]["status"] for run in runs] == ["KILLED"]
    assert {m["key"]: m["value"] for m in runs[0]["data"]["metrics"]} == {"loss": 9}
    path = f"{url}/api/2.0/mlflow/metrics/get-history"
    import urllib.request

    with urllib.request.urlopen(f"{path}?run_id={runs[0]['info']['run_id']}&metric_key=loss") as answer:
        assert sorted(point["step"] for point in json.loads(answer.read())["metrics"]) == list(range(10))


@pytest.mark.slow
def test_what_was_left_goes_up_with_the_next_record(tmp_path, services, monkeypatch):
    open_record(tmp_path, "early", {}, {}).close("FINISHED")
    assert len(spooled(tmp_path)) == 1
    monkeypatch.setenv("MLFLOW_TRACKING_URI", services["MLFLOW_TRACKING_URI"])
    monkeypatch.setattr(tracking, "CLOSE_WAIT_S", 60)
    record = open_record(tmp_path, "late", {}, {})
    record.close("FINISHED")
    assert spooled(tmp_path) == [] and list(tmp_path.iterdir()) == []


def test_an_unreadable_record_does_not_block_the_others(tmp_path, monkeypatch):
    tmp_path.joinpath("s-broken.json").write_text("{")
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{server.getsockname()[1]}")
        thread = threading.Thread(target=flush, args=(tmp_path,))
        thread.start()
        thread.join(10)
    assert not thread.is_alive() and (tmp_path / "s-broken.broken").exists()
