"""Functions that tests give to an engine; workers import them from here."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import numpy as np

RECORD = np.dtype([("key", np.uint64), ("doc", np.int64)])


def _count(argument: dict) -> int:
    """Leave a mark of this call; how many there are for the shard by now."""
    folder = Path(argument["calls"])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{argument['name']}.{os.getpid()}.{time.monotonic_ns()}").touch()
    return len(list(folder.glob(f"{argument['name']}.*")))


def calls(folder: Path) -> dict[str, int]:
    """Calls per shard name."""
    found: dict[str, int] = {}
    for path in Path(folder).iterdir():
        name = path.name.partition(".")[0]
        found[name] = found.get(name, 0) + 1
    return found


def square(argument: dict) -> dict:
    """The square of `value`; slow when `seconds` says so."""
    _count(argument)
    time.sleep(argument.get("seconds", 0))
    return {"square": argument["value"] ** 2, "pid": os.getpid()}


def die_once(argument: dict) -> int:
    """As `square`, but the first call for a shard that says `die` is killed."""
    if _count(argument) <= argument.get("die", 0):
        os.kill(os.getpid(), signal.SIGKILL)
    return argument["value"] ** 2


def refuse(argument: dict) -> int:
    _count(argument)
    if argument["value"] == 2:
        raise ValueError("record 7: expected a number, found 'x'")
    return 0


def scatter(argument: dict) -> tuple[dict[str, np.ndarray], int]:
    """`count` records with pseudo-random keys."""
    rng = np.random.default_rng(argument["value"])
    records = np.empty(argument["count"], dtype=RECORD)
    records["key"] = rng.integers(0, 1 << 64, argument["count"], dtype=np.uint64)
    records["doc"] = np.arange(argument["count"]) + 1000 * argument["value"]
    return {"records": records}, len(records)
