"""Runs a function on several gloo ranks of this machine and returns what each of them returned.

    results = run_ranks(4, my_check, argument)        # my_check(rank, world, argument), importable by name

Ranks are forked from one server process that has imported torch, so that a second call costs milliseconds; their environment
variables are those of the first call. Each has one thread, loopback only, and a time limit of its own; when one fails, the
others are killed and its traceback is raised.
"""

import faulthandler
import multiprocessing
import os
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

GRACE = 2.0  # seconds that the other ranks have to fail by themselves once one has
START = 15.0  # seconds that a rank may need to start, before its own clock runs


class RankError(RuntimeError):
    """A rank raised, died or ran out of time; the message holds the tracebacks."""


def _loopback() -> str:
    names = [name for _, name in socket.if_nameindex()]
    return "lo" if "lo" in names else "lo0"


def _child(rank: int, world: int, folder: str, limit: float, function: Callable, args: tuple) -> None:
    place = Path(folder)
    late = (place / f"late-{rank}").open("w")
    faulthandler.dump_traceback_later(limit, exit=True, file=late)  # also ends a rank whose parent is gone
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
    os.environ |= {"GLOO_SOCKET_IFNAME": _loopback(), "OMP_NUM_THREADS": "1"}
    try:
        store = dist.FileStore(str(place / "store"), world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=limit))
        result = function(rank, world, *args)
        torch.save(result, place / f"partial-{rank}")
        os.replace(place / f"partial-{rank}", place / f"result-{rank}")
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        (place / f"error-{rank}").write_text(traceback.format_exc(), encoding="utf-8")
        os._exit(1)


def run_ranks(world: int, function: Callable, *args: Any, limit: float = 90.0) -> list[Any]:
    """[function(rank, world, *args) for every rank], run at the same time with torch.distributed (gloo) initialised.

    `function` must be importable (defined at the top of a module); arguments and results may hold tensors. limit: seconds
    for all of it. Raises RankError.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed", "model.transformer"])
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        ranks = [
            context.Process(target=_child, args=(rank, world, folder, limit, function, args), daemon=True)
            for rank in range(world)
        ]
        try:
            for process in ranks:
                process.start()
            deadline = time.monotonic() + limit + START  # a late rank says first where it was
            running = {process.sentinel: process for process in ranks}
            while running and (left := deadline - time.monotonic()) > 0:
                for sentinel in wait(list(running), timeout=left):
                    process = running.pop(sentinel)
                    process.join()
                    if process.exitcode:
                        deadline = min(deadline, time.monotonic() + GRACE)
        finally:
            for process in ranks:
                if process.is_alive():
                    process.kill()
                if process.pid is not None:
                    process.join()
        problems = [
            f"rank {rank} (exit code {process.exitcode}):\n{_error(Path(folder), rank)}"
            for rank, process in enumerate(ranks)
            if process.exitcode or not (Path(folder) / f"result-{rank}").exists()
        ]
        if problems:
            raise RankError("\n".join(problems))
        return [torch.load(Path(folder) / f"result-{rank}", weights_only=False) for rank in range(world)]


def _error(folder: Path, rank: int) -> str:
    for name in ("error", "late"):
        path = folder / f"{name}-{rank}"
        if path.exists() and path.stat().st_size:
            return path.read_text(encoding="utf-8")
    return "no traceback: killed because another rank failed"
