"""Runs single stages through DVC, with live logs, a bounded number at a time, and without leaving orphans.

A stage runs as `reproduce(single_item=True)` in the calling thread with a DVC Repo of its own; sharing one Repo between
threads breaks DVC, and a `dvc repro` process per stage costs twice the CPU. The stage sends its output to a file (named in
ARCLINE_STAGE_LOG) that is tailed here, so a slow reader never blocks it and no pipe breaks when this process dies.
Used by flows/lifecycle.py; imports no Prefect.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from flows import ROOT, lockfile
from flows.graph import Node, causes, when_free

LOG_ENV = "ARCLINE_STAGE_LOG"
MAX_LINES = 3000  # of one stage that are passed on; the file has them all
GRACE_S = 3.0
HANDOVER_S = 0.8
MARGIN_S = 30.0  # after a stage's own time limit


class StageFailed(RuntimeError):
    """A stage ended with an error. The message ends with the last lines of its log."""


class Stopped(RuntimeError):
    """The run was cancelled; a stage that had not started does not start."""


def tail(path: Path, lines: int = 15) -> list[str]:
    """The last lines of a log file, [] when there is none."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 65536))
            return file.read().decode(errors="replace").splitlines()[-lines:]
    except OSError:
        return []


@contextlib.contextmanager
def workspace(root: Path = ROOT, say: Callable[[str], None] = print) -> Iterator[None]:
    """One run per workspace: DVC's own locks do not cover two runs of one graph, so the second waits here."""
    path = root / "work" / "lifecycle.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+") as file:
        told = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if not told:
                    file.seek(0)
                    say(f"another run (process {file.read().strip() or 'unknown'}) has this workspace; waiting for it")
                    told = True
                time.sleep(0.5)
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


class _Slots:
    """Lets at most `count` stages run; of those that wait, the one with the longest chain behind it goes first."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._waiting: list[int] = []
        self._lock = threading.Lock()
        self._released: tuple[float, int] = (0.0, 0)

    def take(self, ahead: int) -> bool:
        """One try; call again until it succeeds, then `leave` the queue."""
        with self._lock:
            when, chain = self._released
            # A stage that has just ended is about to wake its successors: a side branch lets them come first.
            early = time.monotonic() - when < HANDOVER_S and ahead < chain - 1
            if self._free and not early and ahead >= max(self._waiting, default=0):
                self._free -= 1
                return True
            return False

    def queue(self, ahead: int) -> None:
        with self._lock:
            self._waiting.append(ahead)

    def leave(self, ahead: int) -> None:
        with self._lock:
            self._waiting.remove(ahead)

    def release(self, ahead: int) -> None:
        with self._lock:
            self._free += 1
            self._released = (time.monotonic(), ahead)


class Runner:
    """Runs stages of one workspace, at most `slots` at a time.

    Args: env is added to each stage's environment; on_first is called once, before the first stage that really runs.
    """

    def __init__(
        self,
        root: Path = ROOT,
        slots: int = 2,
        env: dict[str, str] | None = None,
        on_first: Callable[[], dict[str, str]] | None = None,
    ) -> None:
        lockfile.install()
        # DVC starts commands with $SHELL -c. Bash becomes the command; dash stays above it, and a stage whose parent is
        # a shell would not die with this process.
        os.environ["SHELL"] = shutil.which("bash") or os.environ.get("SHELL", "/bin/sh")
        self.root = root
        self.logs = root / "work" / "logs"
        self._slots = _Slots(slots)
        # `python` in a stage's command is the interpreter that runs this, activated environment or not.
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
        self._env = {"PATH": path, **(env or {})}
        self._on_first = on_first
        self._once = threading.Lock()
        self._stopping = threading.Event()
        self._active: set[str] = set()

    def log_path(self, name: str) -> Path:
        return self.logs / f"{name}.log"

    def run(self, node: Node, force: bool = False, say: Callable[[str], None] = print) -> str:
        """Brings one stage up to date.

        Returns "Completed" when its command ran, "Restored" when its outs came from DVC's cache, "Cached" when
        there was nothing to do. Raises StageFailed, or Stopped after `stop`.
        """
        if not self._slots.take(node.ahead):
            self._slots.queue(node.ahead)
            began, told = time.monotonic(), False
            try:
                while not self._slots.take(node.ahead):
                    self._check()
                    if not told and time.monotonic() - began > 2:
                        say("waiting for a free slot")
                        told = True
                    time.sleep(0.1)
            finally:
                self._slots.leave(node.ahead)
        self._active.add(node.name)
        try:
            self._check()
            return self._reproduce(node, force, say)
        finally:
            self._active.discard(node.name)
            self._slots.release(node.ahead)

    def _check(self) -> None:
        if self._stopping.is_set():
            raise Stopped("the run was stopped")

    def _reproduce(self, node: Node, force: bool, say: Callable[[str], None]) -> str:
        from dvc.exceptions import DvcException
        from dvc.repo import Repo

        with self._once:
            if self._on_first:
                self._env.update(self._on_first())
                self._on_first = None
        log = self.log_path(node.name)
        log.parent.mkdir(parents=True, exist_ok=True)
        log.unlink(missing_ok=True)
        pump = _Pump(log, say, node.timeout_minutes)
        try:
            with Repo(str(self.root), _wait_for_lock=True) as repo:
                target = f"{os.path.relpath(self.root / 'dvc.yaml')}:{node.name}"
                run_env = {**self._env, LOG_ENV: str(log)}
                act = partial(repo.reproduce, target, single_item=True, force=force, run_env=run_env)
                done = when_free(act, say, self._check)
        except DvcException as error:
            pump.close()
            self._check()
            raise StageFailed(self._explain(node, error, pump.expired)) from error
        finally:
            pump.close()
        if log.exists():
            return "Completed"
        return "Restored" if done else "Cached"

    def _explain(self, node: Node, error: BaseException, expired: bool) -> str:
        reasons = list(dict.fromkeys(str(cause) for cause in causes(error)))
        if expired:
            reasons.append(f"stopped after its time limit of {node.timeout_minutes:g} minutes")
        lines = tail(self.log_path(node.name))
        text = f"stage {node.name}: " + ": ".join(reasons)
        return text + ("\n  " + "\n  ".join(lines) if lines else "")

    def stop(self, wait_s: float = 15.0) -> None:
        """Ends the running stages with everything they started, and lets no further one start."""
        self._stopping.set()
        began = time.monotonic()
        while time.monotonic() - began < wait_s:
            # Again and again: a stage that is just being forked does not carry its environment yet.
            kill_stages(force=time.monotonic() - began > GRACE_S)
            if not self._active:
                return
            time.sleep(0.1)


def _stages(log: Path | None = None) -> list:
    """Processes that are stages started from this process, with all their descendants."""
    import psutil

    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            marked = child.environ().get(LOG_ENV)
            if marked and (log is None or marked == str(log)):
                found += [*child.children(recursive=True), child]
    return found


def kill_stages(force: bool = False, log: Path | None = None) -> None:
    """SIGTERM (or SIGKILL) to the running stages of this process, or to the one that writes `log`."""
    import psutil

    for process in _stages(log):
        with contextlib.suppress(psutil.Error):
            process.kill() if force else process.terminate()


class _Pump:
    """Passes a growing log file on, line by line, from a thread of its own; also the backstop of the time limit."""

    def __init__(self, path: Path, say: Callable[[str], None], limit_minutes: float | None) -> None:
        self._path, self._say = path, say
        # The stage enforces its limit itself; this one is for a stage that is stuck outside Python.
        self._limit = limit_minutes * 60 + MARGIN_S if limit_minutes else None
        self.expired = False
        self._lines = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._work, name=f"log {path.stem}", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        began, rest, offset, last = time.monotonic(), b"", 0, False
        while True:
            last = self._done.wait(0.25)
            with contextlib.suppress(OSError), open(self._path, "rb") as file:
                file.seek(offset)
                fresh = file.read()
                offset += len(fresh)
                *lines, rest = (rest + fresh).split(b"\n")
                for line in lines:
                    self._pass(line)
            if last:
                if rest:
                    self._pass(rest)
                return
            if self._limit and time.monotonic() - began > self._limit:
                self.expired = True
                kill_stages(force=True, log=self._path)

    def _pass(self, line: bytes) -> None:
        text = line.decode(errors="replace").rsplit("\r", 1)[-1].rstrip()
        self._lines += 1
        if text and self._lines <= MAX_LINES:
            self._say(text)
        elif self._lines == MAX_LINES + 1:
            self._say(f"more than {MAX_LINES} lines; the rest is in {self._path.relative_to(self._path.parents[2])}")

    def close(self) -> None:
        self._done.set()
        if self._thread is not threading.current_thread():
            self._thread.join(10)
