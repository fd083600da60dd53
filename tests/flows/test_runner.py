"""flows/runner.py without Prefect: one stage through DVC, its log, its failure, and the queue of a workspace."""

import time

import pytest

from flows.runner import tail
from tests.flows.toy import Toy, wait_until

RUN = """
import sys, threading
from flows import ROOT
from flows.graph import read
from flows.runner import Runner
nodes = read(ROOT)
runner = Runner(ROOT, slots=2)
for name in sys.argv[1:]:
    try:
        print(name, runner.run(nodes[name], say=lambda line: print("LOG", line, flush=True)), flush=True)
    except Exception as error:
        print(name, type(error).__name__, error, flush=True)
"""


@pytest.fixture
def toy(tmp_path):
    return Toy(tmp_path, {"raw": [], "next": ["raw"]})


def test_runs_then_is_cached_then_restored(toy):
    toy.set(raw={"text": "one"})
    _, output = toy.run("-c", RUN, "raw", "raw")
    assert "LOG [raw] step 3" in output
    assert "raw Completed" in output and "raw Cached" in output
    first = toy.result("raw")
    toy.set(raw={"text": "other"})
    _, output = toy.run("-c", RUN, "raw")
    assert "raw Completed" in output and toy.result("raw") != first
    toy.set(raw={"text": "one"})
    _, output = toy.run("-c", RUN, "raw")
    assert "raw Restored" in output and toy.result("raw") == first


def test_a_failure_carries_the_end_of_the_log_and_spoils_nothing(toy):
    toy.set(raw={"fail": True})
    _, output = toy.run("-c", RUN, "raw")
    assert "raw StageFailed stage raw:" in output and "this stage was told to fail" in output.split("StageFailed")[1]
    assert not (toy.root / "data" / "raw").exists() and not (toy.root / "dvc.lock").exists()


def test_the_interpreter_of_the_run_is_the_interpreter_of_its_stages(toy):
    _, output = toy.run("-c", RUN, "raw", PATH="/usr/bin:/bin")
    assert "raw Completed" in output


def test_kill_minus_nine_of_the_runner_leaves_no_stage(toy):
    toy.set(raw={"seconds": 60.0})
    process = toy.start("-c", RUN, "raw")
    wait_until(lambda: toy.trace("raw"), what="the stage to start")
    process.kill()
    process.wait()
    wait_until(lambda: not toy.processes(), 10, "the stage to go")


def test_tail_of_a_log(tmp_path):
    assert tail(tmp_path / "none") == []
    (tmp_path / "log").write_text("\n".join(map(str, range(100_000))))
    assert tail(tmp_path / "log", 2) == ["99998", "99999"]


def test_a_time_limit_that_the_stage_does_not_keep_is_kept_for_it(toy):
    """A stage stuck outside Python does not see its own alarm."""
    (toy.root / "tasks" / "raw.py").write_text(
        "import signal, time\nfrom tasks.stage import StageConfig\nclass Config(StageConfig): pass\n"
        "def run(stage):\n    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})\n    time.sleep(600)\n"
    )
    code = RUN.replace("runner = ", "import dataclasses, flows.runner\nflows.runner.MARGIN_S = 0\nrunner = ").replace(
        "nodes[name]", "dataclasses.replace(nodes[name], timeout_minutes=0.1)"
    )
    began = time.monotonic()
    _, output = toy.run("-c", code, "raw")
    assert "time limit of 0.1 minutes" in output and time.monotonic() - began > 6
    wait_until(lambda: not toy.processes(), 10)


def test_waits_while_another_dvc_process_works_on_the_stage(toy):
    toy.set(raw={"seconds": 3.0})
    other = toy.start("-m", "dvc", "repro", "-s", "raw")
    wait_until(lambda: toy.trace("raw"), what="dvc repro to start the stage")
    _, output = toy.run("-c", RUN, "raw")
    assert other.wait() == 0
    assert "LOG waiting for another DVC process" in output and "raw Cached" in output
    assert len(toy.trace("raw")) == 3


def test_the_longest_chain_goes_first():
    """Three stages wait for one slot; a side branch also lets the successor of the stage that just ended come first."""
    import threading

    from flows.graph import Node
    from flows.runner import Runner

    runner = Runner(slots=1)
    order = []
    running = threading.Event()
    go = threading.Event()

    def stage(node, force, say):
        order.append(node.name)
        if node.name == "first":
            running.set()
            go.wait(10)
        time.sleep(0.05)

    runner._reproduce = stage
    start = {"first": 9, "side": 0, "chain": 5}
    threads = [threading.Thread(target=runner.run, args=(Node(n, (), ahead=a),)) for n, a in start.items()]
    threads[0].start()
    running.wait(10)
    for thread in threads[1:]:
        thread.start()
    time.sleep(0.3)
    late = threading.Thread(target=lambda: (time.sleep(0.3), runner.run(Node("successor", (), ahead=8))))
    late.start()
    go.set()
    for thread in [*threads, late]:
        thread.join(20)
    assert order == ["first", "successor", "chain", "side"]
