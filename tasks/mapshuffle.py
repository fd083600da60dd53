"""Map and shuffle over shards, on the processes of one machine (`engine: local`) or on a Ray cluster (`engine: ray`).

    with mapshuffle.open_engine(config) as engine:
        results = engine.map(function, {"part-00000": argument, ...}, scratch / "sketch")
        results = engine.shuffle(function, shards, partitions, scratch / "bands")
        records = mapshuffle.read_partition(scratch / "bands", "bands", shards, 3)

A function is a module's own (workers import it), takes one argument and writes its files itself, whole or not at all; what
it returns must be JSON and is kept in `folder` beside the results of the other shards, so that a driver that was killed and
runs again with the same folder does not redo finished shards. Results come in the order of the shards. Whatever the engine
and the number of workers, the bytes written are the same. All workers, of Ray too, must see the same file system. A worker
that dies is replaced and its shard tried once more; if that dies too, `ShardError` names the shard.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import json
import multiprocessing
import os
import shutil
import signal
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from pydantic import Field

from tasks.files import atomic_write
from tasks.params import ROOT
from tasks.stage import StageConfig

TRIES = 2  # of a shard whose worker died


class EngineConfig(StageConfig):
    """Parameters of every stage that runs on an engine."""

    engine: Literal["local", "ray"] = Field("local", description="processes of this machine, or a Ray cluster")
    workers: int = Field(2, ge=1, description="shards worked on at once; the result does not depend on it")
    address: str = Field("", description="of the Ray cluster, host:port or ray://host:port; empty starts one here")


class ShardError(ValueError):
    """A shard that could not be done; the message names it and says why."""


# ---- in a worker -------------------------------------------------------------------------------------------------


def run_shard(function: Callable, argument: Any, journal: str) -> Any:
    """Do one shard and write down its result."""
    text = json.dumps(function(argument))
    atomic_write(Path(journal), text)
    return json.loads(text)


def save_array(path: Path, array: np.ndarray) -> None:
    """A .npy file, whole or not at all; nothing that needs pickle."""
    with staged(path) as staging, open(staging, "wb") as handle:
        try:
            np.save(handle, array, allow_pickle=False)
        except OSError as error:
            if error.errno is None:  # numpy's own: "8009 requested and 845 written"
                raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {path.name}: {error}") from None
            raise


@contextlib.contextmanager
def staged(path: Path) -> Iterator[Path]:
    """A name beside `path` to write to; it becomes `path` at the end, or is removed when that is not reached."""
    path.parent.mkdir(parents=True, exist_ok=True)
    staging = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield staging
        os.replace(staging, path)
    except BaseException:
        staging.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def mapped_array(path: Path, dtype: Any, count: int) -> Iterator[np.ndarray]:
    """A .npy file of `count` zeros to be filled through a memory map; it has its name, whole, at the end.

    Its room on disk is claimed first: a full disk is an OSError here, and no bus error at a later assignment.
    """
    with staged(path) as staging:
        with open(staging, "wb") as handle:
            np.lib.format.write_array_header_1_0(
                handle, {"descr": np.dtype(dtype).str, "fortran_order": False, "shape": (count,)}
            )
            os.posix_fallocate(handle.fileno(), 0, handle.tell() + count * np.dtype(dtype).itemsize)
        array = np.load(staging, mmap_mode="r+")
        yield array.view(np.ndarray)
        array.flush()


def link_file(made: Path, final: Path) -> None:
    """Give a finished file a second name where the file system can, else copy it: a resumed run finds the first again."""
    final.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(made, final)
    except OSError:
        shutil.copyfile(made, final)


def partition_of(keys: np.ndarray, partitions: int) -> np.ndarray:
    """The partition of a shuffle that each uint64 key falls into, uint64 too."""
    return (keys >> np.uint64(32)) % np.uint64(partitions)


def _spill(function: Callable, partitions: int, folder: str, named: tuple[str, Any]) -> Any:
    name, argument = named
    channels, result = function(argument)
    for channel, records in channels.items():
        part = partition_of(records["key"], partitions)
        order = np.argsort(part, kind="stable")
        bounds = np.searchsorted(part[order], np.arange(partitions + 1, dtype=np.uint64))
        save_array(Path(folder) / channel / f"{name}.npy", records[order])
        save_array(Path(folder) / channel / f"{name}.bounds.npy", bounds.astype(np.int64))
    return result


def read_partition(folder: Path, channel: str, shards: Sequence[str], partition: int) -> np.ndarray:
    """All records of one partition of a shuffle's channel, by shard and within a shard in the order they were given."""
    parts = []
    for name in shards:
        first, last = np.load(Path(folder) / channel / f"{name}.bounds.npy")[partition : partition + 2]
        parts.append(np.load(Path(folder) / channel / f"{name}.npy", mmap_mode="r")[first:last])
    return np.concatenate(parts)


# ---- engines -----------------------------------------------------------------------------------------------------


class Engine:
    """What stages use; `LocalEngine` and `RayEngine` differ in `_run` alone."""

    def map(self, function: Callable, shards: Mapping[str, Any], folder: Path) -> Iterator[Any]:
        """`function(argument)` of every shard (name -> argument), in order; results already in `folder` are not redone."""
        folder = Path(folder)
        journals = {name: folder / f"{name}.result.json" for name in shards}
        todo = [name for name in shards if not journals[name].is_file()]
        tasks = [(name, (function, shards[name], str(journals[name]))) for name in todo]
        waiting = self._run(tasks)
        pending = set(todo)
        for name, journal in journals.items():
            while name in pending:
                pending.discard(next(waiting))
            yield json.loads(journal.read_text(encoding="utf-8"))

    def shuffle(self, function: Callable, shards: Mapping[str, Any], partitions: int, folder: Path) -> Iterator[Any]:
        """As `map`, for a function that returns ({channel: records}, result).

        `records` is a structured array with a uint64 field `key`, evenly spread in its high half; `read_partition` gives the
        records of all shards whose key falls into one of the `partitions`.
        """
        spill = partial(_spill, function, partitions, str(folder))
        return self.map(spill, {name: (name, argument) for name, argument in shards.items()}, folder)

    def _run(self, tasks: Sequence[tuple[str, tuple]]) -> Iterator[str]:
        """Do the tasks (shard name, arguments of `run_shard`); yield each name when it is done, in any order."""
        raise NotImplementedError

    def close(self) -> None:
        """Stop the workers."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _serve(pipe: Connection) -> None:
    """A local worker: tasks come through the pipe until it closes, as it does when the driver dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the driver's to handle
    while True:
        try:
            task = pipe.recv()
        except EOFError:
            return
        try:
            run_shard(*task)
            answer = None
        except Exception as error:  # noqa: BLE001 - whatever the function raises is the driver's to report
            answer = (f"{type(error).__name__}: {error}", traceback.format_exc())
        try:
            pipe.send(answer)
        except BrokenPipeError:
            return


class LocalEngine(Engine):
    """Processes of this machine, started afresh (spawn); with one worker, this process."""

    def __init__(self, workers: int):
        self._workers = workers
        self._context = multiprocessing.get_context("spawn")
        self._running: dict[Connection, multiprocessing.process.BaseProcess] = {}

    def _start(self) -> Connection:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        self._running[ours] = process
        return ours

    def _run(self, tasks: Sequence[tuple[str, tuple]]) -> Iterator[str]:
        if self._workers == 1:
            for name, task in tasks:
                try:
                    run_shard(*task)
                except ValueError as error:
                    raise ShardError(f"shard {name}: {error}") from error
                except OSError as error:  # a full disk, say
                    raise ShardError(f"shard {name}: {type(error).__name__}: {error}") from error
                yield name
            return
        todo, deaths = list(reversed(tasks)), dict.fromkeys((name for name, _ in tasks), 0)
        busy: dict[Connection, tuple[str, tuple]] = {}
        try:
            while todo or busy:
                self._give(todo, busy)
                for pipe in wait(list(busy)):
                    name, task = busy.pop(pipe)
                    try:
                        failure = pipe.recv()
                    except (EOFError, ConnectionResetError):
                        status = self._stop(pipe)
                        deaths[name] += 1
                        if deaths[name] == TRIES:
                            raise ShardError(
                                f"shard {name}: its worker died {TRIES} times, last with exit status {status} "
                                f"(negative: signal); out of memory is the usual cause"
                            ) from None
                        todo.append((name, task))
                        continue
                    if failure:
                        raise ShardError(f"shard {name}: {failure[0]}\n{failure[1]}")
                    yield name
        finally:
            for pipe in busy:  # whoever stopped listening will not read their answers
                self._stop(pipe)

    def _give(self, todo: list[tuple[str, tuple]], busy: dict[Connection, tuple[str, tuple]]) -> None:
        """Hand tasks to idle workers, new ones while there are fewer than there may be."""
        idle = [pipe for pipe in self._running if pipe not in busy]
        while todo and len(busy) < self._workers:
            pipe = idle.pop() if idle else self._start()
            busy[pipe] = todo.pop()
            with contextlib.suppress(BrokenPipeError):  # died while idle: the pipe's end shows when it is read
                pipe.send(busy[pipe][1])

    def _stop(self, pipe: Connection) -> int | None:
        """End one worker; its exit status."""
        process = self._running.pop(pipe)
        pipe.close()
        process.join(0.1)
        if process.is_alive():
            process.kill()
            process.join()
        return process.exitcode

    def close(self) -> None:
        for pipe in list(self._running):
            self._stop(pipe)


class RayEngine(Engine):
    """Tasks of a Ray cluster; Ray itself is the optional extra `ray`."""

    def __init__(self, workers: int, address: str = ""):
        if importlib.util.find_spec("ray") is None:
            raise ValueError("engine: ray needs Ray: pip install 'arcline[ray]', or set engine: local")
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        import ray

        # A cluster started here serves this machine only.
        here = {"num_cpus": workers, "include_dashboard": False, "_node_ip_address": "127.0.0.1"}
        here["object_store_memory"] = 128 << 20  # results are small: data goes through files
        environment = {"env_vars": {"PYTHONPATH": str(ROOT)}}
        ray.init(**({"address": address} if address else here), runtime_env=environment, log_to_driver=False)
        self._ray, self._workers = ray, workers
        self._task = ray.remote(num_cpus=1, max_retries=TRIES - 1)(run_shard)

    def _run(self, tasks: Sequence[tuple[str, tuple]]) -> Iterator[str]:
        todo, running = list(reversed(tasks)), {}
        while todo or running:
            while todo and len(running) < self._workers:
                name, task = todo.pop()
                running[self._task.remote(*task)] = name
            (done, *_), _ = self._ray.wait(list(running))
            name = running.pop(done)
            try:
                self._ray.get(done)
            except self._ray.exceptions.WorkerCrashedError as error:
                raise ShardError(f"shard {name}: its worker died {TRIES} times ({error})") from None
            except self._ray.exceptions.RayTaskError as error:
                raise ShardError(f"shard {name}: {type(error.cause).__name__}: {error.cause}\n{error}") from None
            yield name

    def close(self) -> None:
        self._ray.shutdown()


def open_engine(config: EngineConfig) -> Engine:
    """The engine that a stage's parameters name."""
    return RayEngine(config.workers, config.address) if config.engine == "ray" else LocalEngine(config.workers)
