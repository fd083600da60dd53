"""The services around the line, on loopback: Prefect server, MLflow server, work pool and worker.

    python -m flows.services up        start what is not running; prints the two addresses
    python -m flows.services status    what runs, since when it answers, where its log is
    python -m flows.services down      end what `up` started: the worker first, then the servers

State lives in work/services/ (databases, logs) and work/services.json (addresses, ports, process ids). `up` also writes
prefect.toml, so that plain `prefect ...` commands typed in the repository talk to this server. A server of your own is
used instead when PREFECT_API_URL or MLFLOW_TRACKING_URI is set and answers; `down` leaves it alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import http.client
import json
import os
import socket
import subprocess
import sys
import time
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path

from flows import QUIET, ROOT

HOST = "127.0.0.1"
POOL = "local"
SETTINGS_HEAD = "# Written by `python -m flows.services up`"
PORTS = {"prefect": 4200, "mlflow": 5000}
HEALTH = {"prefect": "/api/health", "mlflow": "/health"}
START_S = 180.0  # a first start on a busy two-core machine migrates two databases
STOP_S = 10.0


class ServiceError(RuntimeError):
    """A service did not start; the message carries the end of its log."""


class Services:
    """The services of one workspace."""

    def __init__(self, root: Path = ROOT) -> None:
        self.root = root
        self.state_path = root / "work" / "services.json"
        self.home = root / "work" / "services"

    # ---- state
    def load(self) -> dict:
        """Contents of work/services.json; {} when there is none or it is unreadable."""
        try:
            state = json.loads(self.state_path.read_text())
            return state if isinstance(state, dict) else {}
        except (OSError, ValueError):
            return {}

    def _save(self, state: dict) -> None:
        part = self.state_path.with_suffix(".part")
        part.write_text(json.dumps(state, indent=1) + "\n")
        os.replace(part, self.state_path)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        self.home.mkdir(parents=True, exist_ok=True)
        with open(self.home / "lock", "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def env(self, state: dict | None = None) -> dict[str, str]:
        """The environment in which Prefect's and MLflow's clients find these services."""
        state = self.load() if state is None else state
        env = {**os.environ, **QUIET, "PREFECT_HOME": str(self.home / "prefect")}
        if state.get("prefect"):
            env["PREFECT_API_URL"] = state["prefect"] + "/api"
        if state.get("mlflow"):
            env["MLFLOW_TRACKING_URI"] = state["mlflow"]
        return env

    # ---- up
    def up(self, say: Callable[[str], None] = print) -> dict:
        """Starts what does not answer and returns the state. Raises ServiceError."""
        with self._locked():
            state = self.load()
            state.setdefault("processes", {})
            waiting = {}
            for name in ("prefect", "mlflow"):
                if not self._reuse(name, state):
                    waiting[name] = self._start_server(name, state)
                    self._save(state)
            for name, process in waiting.items():
                self._wait(name, state, process)
                say(f"{name}: started on {state[name]}")
            (self.root / "prefect.toml").write_text(
                f"{SETTINGS_HEAD}: prefect commands typed here talk to this workspace's server.\n"
                f'[api]\nurl = "{state["prefect"]}/api"\n'
            )
            if not self._alive(state, "worker"):
                self._pool(state)
                self._start_worker(state)
                say(f"worker: started for work pool {POOL}")
            self._save(state)
            return state

    def prefect_address(self) -> str | None:
        """The Prefect server's address while it answers or its process lives; forgets prefect.toml when it is gone."""
        state = self.load()
        address = state.get("prefect")
        if address and (healthy(address + HEALTH["prefect"]) or self._alive(state, "prefect")):
            return address
        settings = self.root / "prefect.toml"
        if settings.is_file() and settings.read_text().startswith(SETTINGS_HEAD):
            settings.unlink(missing_ok=True)
        return None

    def _reuse(self, name: str, state: dict) -> bool:
        outside = os.environ.get({"prefect": "PREFECT_API_URL", "mlflow": "MLFLOW_TRACKING_URI"}[name], "")
        outside = outside.rstrip("/").removesuffix("/api") if name == "prefect" else outside.rstrip("/")
        if outside.startswith("http") and outside != state.get(name) and healthy(outside + HEALTH[name]):
            self._end(state, "worker")  # a worker of the old server must not serve the new one's pool
            state[name] = outside
            state["processes"].pop(name, None)
            return True
        if state.get(name) and self._ours_or_outside(state, name) and healthy(state[name] + HEALTH[name], tries=3):
            return True
        self._end(state, name)  # half dead: holds its port or database but does not answer
        return False

    def _ours_or_outside(self, state: dict, name: str) -> bool:
        return name not in state["processes"] or self._alive(state, name)

    def _start_server(self, name: str, state: dict) -> subprocess.Popen:
        port = free_port(PORTS[name], avoid={p.get("port") for p in state["processes"].values()})
        folder = self.home / name
        folder.mkdir(parents=True, exist_ok=True)
        if name == "prefect":
            command = [
                "-m",
                "prefect",
                "server",
                "start",
                "--host",
                HOST,
                "--port",
                str(port),
                "--log-level",
                "WARNING",
            ]
            database = f"sqlite+aiosqlite:///{folder / 'prefect.db'}"
            extra = {
                "PREFECT_API_URL": f"http://{HOST}:{port}/api",
                "PREFECT_API_DATABASE_CONNECTION_URL": database,
                "PREFECT_SERVER_UI_STATIC_DIRECTORY": str(folder / "ui"),
            }
        else:
            command = ["-m", "mlflow", "server", "--host", HOST, "--port", str(port), "--workers", "1"]
            # An absolute URI: a relative one would follow the working directory of whoever starts the server.
            command += ["--backend-store-uri", f"sqlite:///{folder / 'mlflow.db'}"]
            command += ["--artifacts-destination", str(folder / "artifacts"), "--serve-artifacts"]
            extra = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        state[name] = f"http://{HOST}:{port}"
        env = {**self.env({}), **extra}
        if name == "mlflow":
            env.pop("MLFLOW_TRACKING_URI", None)
        return self._spawn(name, command, env, state, port)

    def _start_worker(self, state: dict) -> None:
        env = self.env(state)
        # The default of ten seconds between two looks at the queue is most of the time of a run with nothing to do.
        env["PREFECT_WORKER_QUERY_SECONDS"] = "1"
        command = ["-m", "prefect", "worker", "start", "--pool", POOL, "--name", f"arcline-{os.getpid()}"]
        self._spawn("worker", [*command, "--type", "process", "--limit", "4"], env, state)

    def _spawn(self, name: str, command: list[str], env: dict, state: dict, port: int | None = None):
        log = self.home / f"{name}.log"
        with open(log, "ab") as file:
            process = subprocess.Popen(
                [sys.executable, *command],
                cwd=self.root,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        entry = {"pid": process.pid, "started": _started(process.pid), "log": str(log.relative_to(self.root))}
        state["processes"][name] = entry | ({"port": port} if port else {})
        return process

    def _wait(self, name: str, state: dict, process: subprocess.Popen) -> None:
        end = time.monotonic() + START_S
        while not healthy(state[name] + HEALTH[name]):
            if process.poll() is not None or time.monotonic() > end:
                log = self.home / f"{name}.log"
                self._end(state, name)
                self._save(state)
                last = "\n  ".join(log.read_text(errors="replace").splitlines()[-15:])
                raise ServiceError(f"{name} did not start; the end of {log.relative_to(self.root)}:\n  {last}")
            time.sleep(0.2)

    def _pool(self, state: dict) -> None:
        """Creates the work pool. Over REST: the command line takes seconds to import for this one request."""
        body = {"name": POOL, "type": "process", "base_job_template": self._job_template()}
        status, answer = request("POST", state["prefect"] + "/api/work_pools/", body)
        if status not in (201, 409):  # 409: it is there
            raise ServiceError(f"work pool {POOL}: the Prefect server answered {status}: {answer[:300]}")

    def _job_template(self) -> dict:
        from prefect.workers.process import ProcessWorker

        return ProcessWorker.get_default_base_job_template()

    # ---- down and status
    def down(self, say: Callable[[str], None] = print) -> None:
        """Ends what `up` started. The worker first: one that loses its server lingers."""
        with self._locked():
            state = self.load()
            state.setdefault("processes", {})
            for names in (("worker",), ("prefect", "mlflow")):
                for name in self._end(state, *names):
                    say(f"{name}: stopped")
                if names == ("worker",) and self._alive(state, "prefect"):
                    self._close_runs(state)
            self.state_path.unlink(missing_ok=True)
            (self.root / "prefect.toml").unlink(missing_ok=True)

    def _close_runs(self, state: dict) -> None:
        """Runs that the worker was at have ended with it; without this they would show as running for ever."""
        url = state["prefect"] + "/api/flow_runs"
        wanted = {
            "flow_runs": {"state": {"type": {"any_": ["RUNNING", "PENDING"]}}},
            "work_pools": {"name": {"any_": [POOL]}},
        }
        status, answer = request("POST", url + "/filter", wanted)
        for run in json.loads(answer) if status == 200 else []:
            crashed = {"type": "CRASHED", "message": "the services were stopped during the run"}
            request("POST", f"{url}/{run['id']}/set_state", {"state": crashed, "force": True})

    def status(self) -> dict[str, dict]:
        """For each service: address, process id, whether it answers."""
        state = self.load()
        state.setdefault("processes", {})
        report = {}
        for name in ("prefect", "mlflow", "worker"):
            entry = dict(state["processes"].get(name, {}))
            entry["address"] = state.get(name, "")
            entry["running"] = (
                self._alive(state, name)
                if name == "worker"
                else bool(entry["address"]) and healthy(entry["address"] + HEALTH[name])
            )
            report[name] = entry
        return report

    def _alive(self, state: dict, name: str) -> bool:
        entry = state["processes"].get(name)
        return bool(entry) and _started(entry["pid"]) == entry["started"]

    def _end(self, state: dict, *names: str) -> list[str]:
        """Ends services with everything they started: SIGTERM, then SIGKILL. Returns which of them were running."""
        import psutil

        leaders, below, ended = [], [], []
        for name in names:
            if self._alive(state, name):
                with contextlib.suppress(psutil.Error):
                    leader = psutil.Process(state["processes"][name]["pid"])
                    # Listed before the signal: what outlives its parent cannot be found through it any more.
                    below += leader.children(recursive=True)
                    leader.terminate()
                    leaders.append(leader)
                    ended.append(name)
            state["processes"].pop(name, None)
        left = psutil.wait_procs(leaders, STOP_S)[1] + psutil.wait_procs(below, 2)[1]
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, 5)
        return ended


def _started(pid: int) -> float | None:
    """When a process started, which with its id names it for good (ids are used again); None when it is gone."""
    import psutil

    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except psutil.Error:
        return None


def request(method: str, url: str, body: dict | None = None, timeout: float = 30.0) -> tuple[int, str]:
    """One HTTP request, never through a proxy. (0, reason) when nobody answers."""
    parts = urllib.parse.urlsplit(url)
    link = http.client.HTTPConnection(parts.hostname or HOST, parts.port or 80, timeout=timeout)
    try:
        data = json.dumps(body).encode() if body is not None else None
        link.request(method, parts.path or "/", data, {"Content-Type": "application/json"})
        answer = link.getresponse()
        return answer.status, answer.read().decode(errors="replace")
    except (OSError, http.client.HTTPException) as error:
        return 0, str(error)
    finally:
        link.close()


def healthy(url: str, tries: int = 1) -> bool:
    """Whether the service answers its health check; `tries` looks for one that may be busy."""
    for attempt in range(tries):
        if attempt:
            time.sleep(1)
        if request("GET", url, timeout=5.0)[0] == 200:
            return True
    return False


def free_port(preferred: int, avoid: set = frozenset()) -> int:
    """`preferred` or one of the twenty above it, else any free port."""
    for port in [*range(preferred, preferred + 20), 0]:
        if port in avoid:
            continue
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
            return probe.getsockname()[1]
    raise ServiceError(f"no free port from {preferred} on")


def main(argv: list[str] | None = None) -> int:
    import argparse

    parser = argparse.ArgumentParser(prog="python -m flows.services", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("command", choices=("up", "status", "down"))
    args = parser.parse_args(argv)
    services = Services()
    if args.command == "up":
        try:
            state = services.up()
        except ServiceError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        print(f"Prefect  {state['prefect']}\nMLflow   {state['mlflow']}")
    elif args.command == "down":
        services.down()
    else:
        report = services.status()
        for name, entry in report.items():
            what = "running" if entry["running"] else "not running"
            process = f"process {entry['pid']}, log {entry['log']}" if entry.get("pid") else ""
            print(f"{name:8} {what:12} {entry['address']:24} {process}".rstrip())
        return 0 if all(entry["running"] for entry in report.values()) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
