"""Runs one stage of dvc.yaml under the contract of tasks/stage.py: alone, in time, recorded, whole or not at all.

Run its tests: `python -m pytest tests/tasks/test_stage.py`
"""

from __future__ import annotations

import contextlib
import fcntl
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tasks.files import sha256_file
from tasks.params import ROOT, load_params
from tasks.spec import StageSpec, find_spec, flatten_params, select, stage_module, validate_config
from tasks.stage import Stage


@contextlib.contextmanager
def _only_one(root: Path, name: str) -> Iterator[None]:
    """One process per stage and workspace: a second would delete the first one's staging directory."""
    path = root / "work" / "locks" / f"{name}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"stage {name} is already running in this workspace") from None
        yield


def _limit_time(name: str, minutes: float | None) -> None:
    if minutes:

        def expired(signum: int, frame: object) -> None:
            raise TimeoutError(
                f"stage {name}: over its limit of {minutes:g} minutes (meta.timeout_minutes in dvc.yaml)"
            )

        signal.signal(signal.SIGALRM, expired)
        signal.setitimer(signal.ITIMER_REAL, minutes * 60)


def _tags(spec: StageSpec, params: dict, root: Path, print_: str) -> dict[str, str]:
    """Where a result came from, for MLflow."""
    import subprocess

    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=False)
    lock = root / "dvc.lock"
    return {
        "stage": spec.name,
        "phase": str(spec.meta.get("phase", "")),
        "profile": str(load_params(root).get("profile", "")),
        "git_commit": commit.stdout.strip() or "unknown",
        "dvc_lock": sha256_file(lock) if lock.is_file() else "none",
        "fingerprint": print_,
    }


def run_stage(name: str, root: Path = ROOT, started: Callable[[Stage], None] | None = None) -> None:
    """Run one stage in this process under the contract; `started` is told of the stage before it runs."""
    from tasks import tracking

    spec = find_spec(name, root)
    params = select(load_params(root), spec.params)
    with _only_one(root, name):
        module = stage_module(spec.base)
        stage = Stage(spec, params, validate_config(spec, params, module.Config), root)
        _limit_time(name, spec.meta.get("timeout_minutes"))
        record = tracking.open_record(
            root / "work" / "spool", name, flatten_params(params), _tags(spec, params, root, stage.fingerprint)
        )
        stage._record = record
        began = time.monotonic()
        try:
            if started:
                started(stage)
            module.run(stage)
            stage.check_rejects()
            stage.close_files()
            stage.publish()
            record.metric({"timing/stage_seconds": time.monotonic() - began})
            for path in (*spec.metrics, *spec.plots):
                record.artifact(root / path)
            record.close("FINISHED")
        except BaseException:
            stage.close_files()
            stage.discard()
            record.close("FAILED")
            raise
        stage.print(f"done in {time.monotonic() - began:.1f} s")
