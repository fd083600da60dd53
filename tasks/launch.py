"""Starts a stage as one process or as several ranks; `python -m tasks STAGE` comes through here.

    parallel: {processes: 2}                                   in the stage's parameters: ranks on this machine
    deepspeed --num_gpus 8 --module tasks pretrain-general     an outer launcher; torchrun likewise; any number of machines

    fork        ranks are forked from this process once it has imported what the stage needs, which costs nothing; where an
                accelerator or other threads forbid that, they are spawned
    spawn       every rank is a process of its own
    torchrun    this process becomes torch's elastic launcher, or
    deepspeed   DeepSpeed's launcher for one machine

This process is rank 0 under fork and spawn. The ranks meet over loopback and die with it, however it dies; the output is
rank 0's alone, and an error of any rank is shown and ends all.

Check it:  python -m pytest tests/tasks/test_parallel.py
"""

from __future__ import annotations

import base64
import ctypes
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from tasks.files import remove
from tasks.params import ROOT, load_params
from tasks.spec import StageSpec, stage_module, validate_config
from tasks.stage import Stage
from tasks.stage_run import run_stage

GRACE = 20.0  # seconds in which rank 0 notices by itself that another rank is gone
ROWS = ("rows", "batch_samples", "pairs")  # what a stage calls the rows of a step
ERROR_FD = "ARCLINE_ERROR_FD"


def settings_of(name: str, root: Path = ROOT) -> dict[str, Any]:
    """A stage's `parallel` section as it stands in params.yaml, unchecked; {} when there is none."""
    base, _, variant = re.sub("@", "-", name, count=1).partition("-")
    section = load_params(root).get(base)
    if isinstance(section, dict) and variant in section:
        section = section[variant]
    found = section.get("parallel") if isinstance(section, dict) else None
    if not isinstance(found, dict):
        return {}
    wanted, sharing = found.get("processes", 1), [found.get(key, 1) for key in ("context", "pipeline")]
    copies = math.prod(n for n in sharing if isinstance(n, int))  # so many ranks are given the same rows
    rows = [section[key] * copies for key in ROWS if isinstance(section.get(key), int)]
    return found | {"processes": min([wanted, *rows]) if isinstance(wanted, int) else 1, "wanted": wanted}


def run(name: str, root: Path = ROOT) -> None:
    """Run one stage under the contract, on as many ranks as its parameters or the outer launcher say."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        _be_rank(name, root)
        return
    settings = settings_of(name, root)
    count = settings.get("processes", 1)
    if settings and count < settings["wanted"]:
        print(f"[{name}] {settings['wanted']} processes wanted, but a step has {count} rows: as many start", flush=True)
    if count < 2:
        run_stage(name, root)
    elif settings.get("launcher") in ("torchrun", "deepspeed"):
        _become(settings["launcher"], name, count)
    else:
        _lead(name, root, count, spawn=settings.get("launcher") == "spawn")


class WorkerStage(Stage):
    """The stage as ranks other than the first have it: the same paths and seeds, nothing printed, recorded or published."""

    def __init__(self, found: dict[str, Any], root: Path, rank: int) -> None:
        spec = StageSpec(**{k: tuple(v) if isinstance(v, list) else v for k, v in found["spec"].items()})
        config = validate_config(spec, found["params"], stage_module(spec.base).Config)
        super().__init__(spec, found["params"], config, root)
        self.dep_hashes, self.fingerprint = found["dep_hashes"], found["fingerprint"]  # rank 0 has read the files
        self._own = root / "work" / f"{spec.name}.rank-{rank}"

    def out(self, path: str) -> Path:
        """A directory of this rank's own; it goes when the rank ends."""
        folder = self._own / path
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def log(self, step: int, **values: float) -> None: ...

    def metric(self, **values: Any) -> None: ...

    def timing(self, **seconds: float) -> None: ...

    def artifact(self, path: Path) -> None: ...

    def print(self, message: str) -> None: ...

    def reject(self, record_id: str, reason: str, detail: str = "") -> None: ...

    def clear(self) -> None:
        remove(self._own)


def announce(stage: Stage) -> None:
    """Rank 0 tells the others what the stage is, so that they need not ask DVC or hash the dependencies again."""
    from tasks import parallel

    if not hasattr(stage.config, "parallel"):
        raise ValueError(f"stage {stage.name} runs in one process, but {parallel.launched()} ranks were started")
    spec = {k: list(v) if isinstance(v, tuple) else v for k, v in stage.spec.__dict__.items()}
    parallel.current().first(
        {"spec": spec, "params": stage.params, "fingerprint": stage.fingerprint, "dep_hashes": stage.dep_hashes}
    )


def _be_rank(name: str, root: Path) -> None:
    """This process as the rank that its environment names."""
    from tasks import parallel

    ranks = parallel.start()
    if ranks.is_writer:
        run_stage(name, root, announce)
        return
    stage = WorkerStage(ranks.first(None), root, ranks.rank)
    try:
        stage_module(stage.base).run(stage)
    finally:
        stage.clear()


def _become(launcher: str, name: str, count: int) -> None:
    """Replace this process by an outer launcher; it keeps the process id, and with it who kills it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    if launcher == "torchrun":
        command = ["-m", "torch.distributed.run", f"--nproc-per-node={count}", "--master-addr=127.0.0.1"]
        command += [f"--master-port={port}", "-m", "tasks", name]
    else:
        world = base64.urlsafe_b64encode(json.dumps({"localhost": list(range(count))}).encode()).decode()
        command = [
            "-m",
            "deepspeed.launcher.launch",
            f"--world_info={world}",
            "--node_rank=0",
            "--master_addr=127.0.0.1",
        ]
        command += [f"--master_port={port}", "--no_local_rank", "--module", "tasks", name]
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *command])


def _may_fork() -> bool:
    """Forking is safe while this is the only thread and no accelerator's driver has been opened."""
    try:
        alone = len(os.listdir("/proc/self/task")) == 1
    except OSError:
        return False
    return alone and not any(os.path.exists(path) for path in ("/dev/nvidia0", "/dev/kfd", "/dev/davinci0"))


def _quiet_child(error_fd: int) -> None:
    """A rank's output is rank 0's; Ctrl-C is rank 0's business; when rank 0 dies, so does this process."""
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.close(null)
    os.environ[ERROR_FD] = str(error_fd)


def _report(error: BaseException) -> None:
    import traceback

    short = isinstance(error, (ValueError, FileNotFoundError, TimeoutError))
    text = str(error) if short else "".join(traceback.format_exception(error))
    os.write(int(os.environ[ERROR_FD]), text.encode()[-4000:])


def _rank_process(name: str, root: Path) -> None:
    """The whole life of a rank other than the first."""
    code = 1
    try:
        _be_rank(name, root)
        code = 0
    except BaseException as error:  # noqa: BLE001 (reported to rank 0, which shows it)
        _report(error)
    finally:
        sys.stderr.flush()
        os._exit(code)


class _Ranks:
    """The other ranks, seen from rank 0."""

    def __init__(self) -> None:
        self.pids: dict[int, int] = {}  # rank -> process
        self.pipes: dict[int, int] = {}
        self.failed: dict[int, str] = {}
        self.leaving = False

    def start(self, rank: int, world: int, store: str, name: str, root: Path, spawn: bool) -> None:
        read, write = os.pipe()
        mine = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "ARCLINE_STORE": store}
        if spawn:
            os.set_inheritable(write, True)
            code = "import sys; from pathlib import Path; from tasks import launch; launch.spawned(*sys.argv[1:])"
            process = subprocess.Popen(
                [sys.executable, "-c", code, name, str(root), str(write)],
                env=os.environ | mine,
                pass_fds=[write],
                cwd=root,
            )
            self.pids[rank] = process.pid
        else:
            sys.stdout.flush()
            sys.stderr.flush()
            pid = os.fork()
            if pid == 0:
                os.environ.update(mine)
                os.close(read)
                _quiet_child(write)
                _rank_process(name, root)
            self.pids[rank] = pid
        os.close(write)
        self.pipes[rank] = read

    def watch(self) -> None:
        """One thread per rank waits for its end; a rank that fails while rank 0 hangs ends the stage."""
        for rank in self.pids:
            threading.Thread(target=self._watch, args=(rank,), daemon=True).start()

    def _watch(self, rank: int) -> None:
        text = b""
        while block := os.read(self.pipes[rank], 4096):
            text += block
        _, status = os.waitpid(self.pids[rank], 0)
        del self.pids[rank]
        code = os.waitstatus_to_exitcode(status)
        if code == 0 or self.leaving:
            return
        self.failed[rank] = text.decode(errors="replace") or (
            f"killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        )
        time.sleep(GRACE)
        if not self.leaving:
            print(f"error: rank {rank}: {self.failed[rank]}", file=sys.stderr, flush=True)
            self.kill()
            os._exit(1)

    def kill(self) -> None:
        for pid in list(self.pids.values()):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass

    def end(self) -> None:
        self.leaving = True
        self.kill()
        deadline = time.monotonic() + 5
        while self.pids and time.monotonic() < deadline:
            time.sleep(0.01)


def spawned(name: str, root: str, error_fd: str) -> None:
    """Entry of a spawned rank."""
    _quiet_child(int(error_fd))
    _rank_process(name, Path(root))


def _lead(name: str, root: Path, world: int, spawn: bool) -> None:
    """Start the other ranks and be rank 0."""
    from tasks import parallel

    stage_module(re.split("[@-]", name, maxsplit=1)[0])  # what ranks forked from here need not import again
    import model.checkpoint  # noqa: F401
    import model.transformer  # noqa: F401

    spawn = spawn or not _may_fork()
    ranks = _Ranks()
    with tempfile.TemporaryDirectory(prefix="arcline-ranks-") as folder:
        store = str(Path(folder) / "store")
        try:
            for rank in range(1, world):
                ranks.start(rank, world, store, name, root, spawn)
            ranks.watch()
            os.environ.update(
                {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(world), parallel.STORE_VARIABLE: store}
            )
            _be_rank(name, root)
        except (Exception, KeyboardInterrupt) as error:
            if isinstance(error, RuntimeError):  # the connection to a rank broke: say why
                deadline = time.monotonic() + 5
                while not ranks.failed and time.monotonic() < deadline:
                    time.sleep(0.05)
                if ranks.failed:
                    rank, text = sorted(ranks.failed.items())[0]
                    raise ValueError(f"stage {name}: rank {rank} of {world}: {text}") from error
            raise
        finally:
            ranks.end()
