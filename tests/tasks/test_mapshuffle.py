"""Engines: order, resuming by shard, killed workers and drivers, and the same bytes from local processes and from Ray."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tasks import mapshuffle
from tasks.mapshuffle import EngineConfig, LocalEngine, ShardError, open_engine
from tasks.params import ROOT
from tests.tasks import shard_functions

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="the optional package ray is missing")
ENGINES = [
    pytest.param("local", 1, id="local-1"),
    pytest.param("local", 2, id="local-2"),
    pytest.param("local", 3, id="local-3"),
    pytest.param("ray", 2, id="ray-2", marks=[needs_ray, pytest.mark.slow]),
]


def shards(tmp_path: Path, number_of: int = 6, /, **more) -> dict[str, dict]:
    """Arguments for `shard_functions`; `more` maps a key to {shard number: value}."""
    out = {}
    for number in range(number_of):
        extra = {key: values[number] for key, values in more.items() if number in values}
        out[f"s{number}"] = {"name": f"s{number}", "value": number, "calls": str(tmp_path / "calls"), **extra}
    return out


@pytest.fixture(scope="module")
def engines():
    """(engine, workers) -> an engine that lasts for this module: Ray takes seconds to start."""
    opened: dict[tuple, mapshuffle.Engine] = {}

    def get(*key) -> mapshuffle.Engine:
        if key not in opened:
            opened[key] = start(*key)
        return opened[key]

    yield get
    for engine in opened.values():
        engine.close()


def start(engine: str, workers: int) -> mapshuffle.Engine:
    return open_engine(EngineConfig(engine=engine, workers=workers))


@pytest.mark.parametrize("engine,workers", ENGINES)
def test_results_come_in_order_and_finished_shards_are_not_redone(tmp_path, engines, engine, workers):
    todo = shards(tmp_path, seconds={0: 0.3})
    running = engines(engine, workers)
    first = list(running.map(shard_functions.square, dict(list(todo.items())[:4]), tmp_path / "done"))
    again = list(running.map(shard_functions.square, todo, tmp_path / "done"))
    assert [r["square"] for r in again] == [0, 1, 4, 9, 16, 25]
    assert again[:4] == first
    assert shard_functions.calls(tmp_path / "calls") == {name: 1 for name in todo}


@pytest.mark.parametrize("engine,workers", ENGINES[1:])
def test_a_killed_worker_loses_nothing(tmp_path, engines, engine, workers):
    todo = shards(tmp_path, die={1: 1, 4: 1})
    running = engines(engine, workers)
    assert list(running.map(shard_functions.die_once, todo, tmp_path / "done")) == [0, 1, 4, 9, 16, 25]
    assert shard_functions.calls(tmp_path / "calls") == {name: 2 if name in ("s1", "s4") else 1 for name in todo}


@pytest.mark.parametrize("engine,workers", ENGINES[1:])
def test_a_shard_that_kills_every_worker_is_named(tmp_path, engines, engine, workers):
    running = engines(engine, workers)
    with pytest.raises(ShardError, match="shard s3: its worker died 2"):
        list(running.map(shard_functions.die_once, shards(tmp_path, die={3: 9}), tmp_path / "done"))
    assert shard_functions.calls(tmp_path / "calls")["s3"] == 2


@pytest.mark.parametrize("engine,workers", ENGINES)
def test_an_error_names_the_shard_and_keeps_its_message(tmp_path, engines, engine, workers):
    running = engines(engine, workers)
    with pytest.raises(ShardError, match=r"shard s2: .*record 7") as error:
        list(running.map(shard_functions.refuse, shards(tmp_path), tmp_path / "done"))
    assert isinstance(error.value, ValueError)
    assert shard_functions.calls(tmp_path / "calls")["s2"] == 1, "an error is not tried again"


@pytest.mark.parametrize("engine,workers", ENGINES)
def test_shuffle_gives_every_record_once_and_equal_keys_together(tmp_path, engines, engine, workers):
    todo = shards(tmp_path, 4, count={0: 500, 1: 0, 2: 100, 3: 333})
    running = engines(engine, workers)
    assert list(running.shuffle(shard_functions.scatter, todo, 5, tmp_path / "shuffle")) == [500, 0, 100, 333]
    given = np.concatenate([shard_functions.scatter(argument)[0]["records"] for argument in todo.values()])
    parts = [mapshuffle.read_partition(tmp_path / "shuffle", "records", list(todo), p) for p in range(5)]
    assert sorted(np.concatenate(parts).tolist()) == sorted(given.tolist())
    for number, part in enumerate(parts):
        assert set((part["key"] >> np.uint64(32)) % np.uint64(5)) <= {number}
        assert len(part) > 100 and part["doc"].tolist() == sorted(part["doc"].tolist())
    expected = {p.name: p.read_bytes() for p in (tmp_path / "shuffle" / "records").iterdir()}
    with LocalEngine(1) as alone:
        list(alone.shuffle(shard_functions.scatter, todo, 5, tmp_path / "alone"))
    assert {p.name: p.read_bytes() for p in (tmp_path / "alone" / "records").iterdir()} == expected


DRIVER = """
import json, sys
from pathlib import Path
from tasks.mapshuffle import EngineConfig, open_engine
from tests.tasks import shard_functions
if __name__ == "__main__":
    engine, todo, folder = sys.argv[1], json.loads(sys.argv[2]), Path(sys.argv[3])
    with open_engine(EngineConfig(engine=engine, workers=2)) as running:
        for result in running.map(shard_functions.square, todo, folder):
            print(result["square"], flush=True)
"""


@pytest.mark.parametrize(
    "engine", ["local", pytest.param("ray", marks=[needs_ray, pytest.mark.slow])], ids=["local", "ray"]
)
def test_a_killed_driver_goes_on_with_the_shards_that_are_not_done(tmp_path, engine):
    (tmp_path / "driver.py").write_text(DRIVER)
    todo = shards(tmp_path, 8, seconds=dict.fromkeys(range(8), 0.4))
    command = [sys.executable, str(tmp_path / "driver.py"), engine, json.dumps(todo), str(tmp_path / "done")]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    driver = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True)
    assert driver.stdout.readline().strip() == "0" and driver.stdout.readline().strip() == "1"
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    settle = time.monotonic() + 20  # its workers end by themselves; what they still finish is kept
    before = None
    while time.monotonic() < settle and before != (now := sorted(p.name for p in (tmp_path / "done").iterdir())):
        before = now
        time.sleep(2)
    done = {name.partition(".")[0] for name in before}
    assert 2 <= len(done) < 8
    out = subprocess.run(command, capture_output=True, text=True, env=environment, check=True).stdout
    assert out.split() == [str(n * n) for n in range(8)]
    counts = shard_functions.calls(tmp_path / "calls")
    assert {name for name, n in counts.items() if n > 1} <= set(todo) - done, "a finished shard was done again"
    assert set(counts) == set(todo)


def test_workers_end_with_their_driver(tmp_path):
    """A SIGKILLed driver leaves no process behind."""
    psutil = pytest.importorskip("psutil")
    (tmp_path / "driver.py").write_text(DRIVER)
    todo = shards(tmp_path, 4, seconds=dict.fromkeys(range(4), 0.5))
    command = [sys.executable, str(tmp_path / "driver.py"), "local", json.dumps(todo), str(tmp_path / "done")]
    driver = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    driver.stdout.readline()
    children = psutil.Process(driver.pid).children(recursive=True)
    assert children
    driver.kill()
    driver.wait()
    _, alive = psutil.wait_procs(children, timeout=15)
    assert not alive


def test_ray_that_is_not_installed_is_an_error_that_says_what_to_do(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"arcline\[ray\]"):
        start("ray", 2)
