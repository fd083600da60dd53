"""flows/lockfile.py: dvc.lock is written whole and in one order."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from flows.lockfile import write
from tests.flows.toy import REPO, Toy


def test_the_order_of_stages_does_not_depend_on_which_ended_first(tmp_path):
    locks = []
    for name, slow in (("one", "left"), ("two", "right")):
        (tmp_path / name).mkdir()
        toy = Toy(tmp_path / name, {"right": [], "left": []})
        code = (
            "from flows.runner import Runner; from flows.graph import read; import threading, pathlib\n"
            "root = pathlib.Path('.').resolve(); nodes = read(root); runner = Runner(root)\n"
            f"for name in sorted(nodes, key=lambda n: n == {slow!r}): runner.run(nodes[name])\n"
        )
        status, output = toy.run("-c", code)
        assert status == 0, output
        locks.append(toy.lock())
    assert locks[0] == locks[1]
    assert locks[0].index("left:") < locks[0].index("right:")


def test_a_reader_never_sees_half_a_file(tmp_path):
    path = tmp_path / "dvc.lock"
    texts = [letter * 200_000 for letter in "ab"]
    write(path, texts[0])
    stop = threading.Event()

    def rewrite():
        turn = 0
        while not stop.is_set():
            turn = 1 - turn
            write(path, texts[turn])

    writer = threading.Thread(target=rewrite)
    writer.start()
    try:
        for _ in range(200):
            assert path.read_text() in texts
    finally:
        stop.set()
        writer.join()


@pytest.mark.parametrize("delay", [0.01, 0.05, 0.1])
def test_killed_while_writing_leaves_the_old_or_the_new_file(tmp_path, delay):
    path = tmp_path / "dvc.lock"
    path.write_text("a" * 500_000)
    code = f"from pathlib import Path; from flows.lockfile import write\nwhile True: write(Path({str(path)!r}), 'b' * 500_000)"
    process = subprocess.Popen([sys.executable, "-c", code], cwd=REPO)
    try:
        while not any(n.endswith(".part") for n in os.listdir(tmp_path)) and path.read_text()[0] == "a":
            pass
        threading.Event().wait(delay)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert path.read_text() in ("a" * 500_000, "b" * 500_000)
