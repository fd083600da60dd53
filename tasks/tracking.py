"""Experiment records: a spool on disk first, MLflow second.

Used by tasks/stage.py (one record per stage) and by the flow (the parent record of a run). A record is written
atomically to a spool directory when a stage starts, grows while it runs and is uploaded over MLflow's REST API by a
background thread. A server that is missing, slow or restarted never blocks a stage and never loses a record: what was
not uploaded stays in the spool and goes up with the next record that finds a server. To flush by hand:

    python -m tasks.tracking work/spool

Layout of a spool: `<id>.json` (the record), `<id>.metrics.jsonl` (append-only points), `<id>.files/` (copies of small
artifacts), `<id>.lock` (held by the process that owns the record). The id goes to MLflow as the tag `arcline.spool_id`,
so a record that was half uploaded when its process died is found again instead of being created twice.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import shutil
import threading
import time
import uuid
from pathlib import Path
from typing import Any

from tasks.tracking_client import Client, TrackingError

OPEN_WAIT_S = 2.0  # the longest a stage waits for a server when it starts
CLOSE_WAIT_S = 10.0  # the longest it waits for its last upload; the rest stays in the spool
FLUSH_S = 10.0
MAX_PARAMS, MAX_METRICS, MAX_VALUE = 100, 1000, 6000  # MLflow's limits per request and per value


def tracking_uri() -> str | None:
    """Address of the MLflow server: MLFLOW_TRACKING_URI, else work/services.json of the workspace, else None."""
    uri = os.environ.get("MLFLOW_TRACKING_URI")
    if not uri:
        try:
            path = Path(__file__).resolve().parent.parent / "work" / "services.json"
            uri = json.loads(path.read_text()).get("mlflow")
        except (OSError, ValueError, AttributeError):
            return None
    return uri.rstrip("/") if isinstance(uri, str) and uri.startswith(("http://", "https://")) else None


def flatten(tree: dict, prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}; keys keep only the characters MLflow accepts."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        name = prefix + "".join(c if c.isalnum() or c in "_-. /" else "_" for c in str(key))
        if isinstance(value, dict) and value:
            flat.update(flatten(value, name + "."))
        else:
            flat[name] = value
    return flat


def _write(path: Path, record: dict) -> None:
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    with open(part, "w") as file:
        json.dump(record, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)


def _lock(path: Path) -> Any | None:
    """An exclusive lock on the record, or None while a living process holds it."""
    file = open(path, "w")  # noqa: SIM115 - lives as long as the lock
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return file
    except OSError:
        file.close()
        return None


def _number(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


class _Upload:
    """Brings the MLflow run of one spooled record up to date. Idempotent: each call continues where the last ended."""

    def __init__(self, spool: Path, spool_id: str) -> None:
        self.path = spool / f"{spool_id}.json"
        self.points = spool / f"{spool_id}.metrics.jsonl"
        self.files = spool / f"{spool_id}.files"
        self.state = spool / f"{spool_id}.sent"
        self.lock = spool / f"{spool_id}.lock"
        try:
            self.sent = json.loads(self.state.read_text())
        except (OSError, ValueError):
            self.sent = {"run_id": None, "artifact_uri": None, "params": 0, "bytes": 0, "files": []}

    def _create(self, client: Client, record: dict) -> None:
        run = client.find(record["id"])
        if run is None:
            tags = dict(record["tags"])
            parent = tags.get("mlflow.parentRunId", "")
            if parent.startswith("s-"):  # the parent is itself a spooled record: look up the run it became
                known = client.find(parent)
                tags["arcline.parent_spool_id"] = tags.pop("mlflow.parentRunId")
                if known:
                    tags["mlflow.parentRunId"] = known["info"]["run_id"]
            run = client.post(
                "/runs/create",
                experiment_id=client.experiment(),
                run_name=record["name"],
                start_time=record["start_ms"],
                tags=[{"key": key, "value": str(value)[:MAX_VALUE]} for key, value in tags.items()],
            )["run"]
        self.sent.update(run_id=run["info"]["run_id"], artifact_uri=run["info"]["artifact_uri"])
        _write(self.state, self.sent)

    def __call__(self, client: Client) -> bool:
        """Sends what the server has not seen; True when the record is complete and has left the spool."""
        record = json.loads(self.path.read_text())
        if self.sent["run_id"] is None:
            self._create(client, record)
        run_id = self.sent["run_id"]
        params = [{"key": k[:250], "value": str(v)[:MAX_VALUE]} for k, v in record["params"].items()]
        while self.sent["params"] < len(params):
            batch = params[self.sent["params"] :][:MAX_PARAMS]
            client.post("/runs/log-batch", run_id=run_id, params=batch)
            self.sent["params"] += len(batch)
        self._send_points(client, run_id)
        for name in sorted(os.listdir(self.files)) if self.files.is_dir() else []:
            if name not in self.sent["files"] and not name.endswith(".part"):
                client.put_artifact(self.sent["artifact_uri"], name, self.files / name)
                self.sent["files"].append(name)
        _write(self.state, self.sent)
        if record["status"] == "RUNNING":
            return False
        client.post("/runs/update", run_id=run_id, status=record["status"], end_time=record["end_ms"])
        self.remove()
        return True

    def _send_points(self, client: Client, run_id: str) -> None:
        if not self.points.exists():
            return
        with open(self.points, "rb") as file:
            file.seek(self.sent["bytes"])
            batch: list[dict] = []
            size = 0
            for line in file:
                if not line.endswith(b"\n"):  # a write cut short by a kill; the owner, if alive, will finish it
                    break
                size += len(line)
                batch.extend(json.loads(line))
                if len(batch) >= MAX_METRICS - 200:
                    self._send_batch(client, run_id, batch, size)
                    batch, size = [], 0
            self._send_batch(client, run_id, batch, size)

    def _send_batch(self, client: Client, run_id: str, batch: list[dict], size: int) -> None:
        # A batch that is sent twice (killed between the answer and the write below) adds nothing: MLflow's key of a
        # point is (run, key, step, timestamp, value).
        for first in range(0, len(batch), MAX_METRICS):
            client.post("/runs/log-batch", run_id=run_id, metrics=batch[first : first + MAX_METRICS])
        if size:
            self.sent["bytes"] += size
            _write(self.state, self.sent)

    def remove(self) -> None:
        shutil.rmtree(self.files, ignore_errors=True)
        for path in (self.path, self.points, self.state, self.lock):
            path.unlink(missing_ok=True)


def flush(spool: Path, deadline: float | None = None, timeout: float = 5.0) -> tuple[int, int]:
    """Uploads the records whose process is gone. Returns (sent, left). A record still RUNNING was killed: it says so."""
    ids = sorted(path.stem for path in spool.glob("s-*.json"))
    uri = tracking_uri()
    sent = 0
    if uri is None:
        return 0, len(ids)
    client = Client(uri, timeout)
    for spool_id in ids:
        if deadline is not None and time.monotonic() > deadline:
            break
        upload = _Upload(spool, spool_id)
        lock = _lock(upload.lock)
        if lock is None:
            continue
        try:
            if not upload.path.exists():  # another process sent it between the listing and the lock
                upload.lock.unlink(missing_ok=True)
                continue
            upload = _Upload(spool, spool_id)
            record = json.loads(upload.path.read_text())
            if record["status"] == "RUNNING":
                record.update(status="KILLED", end_ms=int(upload.path.stat().st_mtime * 1000))
                if upload.points.exists():
                    record["end_ms"] = max(record["end_ms"], int(upload.points.stat().st_mtime * 1000))
                _write(upload.path, record)
            sent += upload(client)
        except ValueError as error:  # an unreadable record: keep it aside, it must not block the others
            upload.path.replace(upload.path.with_suffix(".broken"))
            print(f"tracking: {spool_id}: {error}; kept as {spool_id}.broken", flush=True)
        except (OSError, KeyError, TrackingError):
            break
        finally:
            lock.close()
    return sent, len(list(spool.glob("s-*.json")))


class Record:
    """One MLflow run in the making. No method raises for the server's sake, and none waits for it except close."""

    def __init__(self, spool: Path, name: str, params: dict, tags: dict) -> None:
        self.id = "s-" + uuid.uuid4().hex
        self.spool = spool
        spool.mkdir(parents=True, exist_ok=True)
        tags = {
            "mlflow.runName": name,
            "mlflow.source.name": name,
            "mlflow.source.type": "LOCAL",
            "mlflow.user": os.environ.get("USER") or "unknown",
            **tags,
            "arcline.spool_id": self.id,
        }
        if parent := os.environ.get("ARCLINE_PARENT_RUN"):
            tags.setdefault("mlflow.parentRunId", parent)
        self._record = {
            "id": self.id,
            "name": name,
            "status": "RUNNING",
            "start_ms": int(time.time() * 1000),
            "end_ms": None,
            "params": flatten(params),
            "tags": tags,
        }
        self._upload = _Upload(spool, self.id)
        self._lock = _lock(self._upload.lock)
        _write(self._upload.path, self._record)
        self._buffer: list[str] = []
        self._flushed = time.monotonic()
        self._wake = threading.Event()
        self._first = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._work, name="tracking", daemon=True)
        self._thread.start()
        self._first.wait(OPEN_WAIT_S)

    @property
    def run_id(self) -> str | None:
        """The MLflow run id, once a server has given one."""
        return self._upload.sent["run_id"]

    def _work(self) -> None:
        client: Client | None = None
        while True:
            closing = self._closing
            self._wake.clear()
            try:
                uri = tracking_uri()
                if uri is not None:
                    if client is None or client.url.geturl() != uri:
                        client = Client(uri)
                    self._upload(client)
            except (TrackingError, OSError, ValueError, KeyError):
                pass  # the spool has it
            self._first.set()
            if closing:
                return
            self._wake.wait()

    def _points(self, step: int, values: dict[str, float]) -> None:
        now = int(time.time() * 1000)
        points = []
        for key, value in values.items():
            try:
                points.append({"key": key[:250], "value": _number(float(value)), "timestamp": now, "step": int(step)})
            except (TypeError, ValueError, OverflowError):
                continue  # strings and None are for the metrics file; MLflow holds numbers only
        if points:
            self._buffer.append(json.dumps(points) + "\n")
        if time.monotonic() - self._flushed >= FLUSH_S:
            self._spill()
            self._wake.set()

    def _spill(self) -> None:
        self._flushed = time.monotonic()
        if self._buffer:
            with open(self._upload.points, "a") as file:
                file.write("".join(self._buffer))
            self._buffer.clear()

    def log(self, step: int, values: dict[str, float]) -> None:
        """Points of time series at `step`; written and sent at most every ten seconds."""
        self._points(step, flatten(values))

    def metric(self, values: dict) -> None:
        """Final numbers, possibly nested."""
        self._points(0, flatten(values))

    def artifact(self, path: str | Path) -> None:
        """A small file. Copied now, so that it may be replaced or removed afterwards."""
        path = Path(path)
        self._upload.files.mkdir(exist_ok=True)
        part = self._upload.files / (path.name + ".part")
        shutil.copyfile(path, part)
        part.replace(self._upload.files / path.name)

    def close(self, status: str = "FINISHED") -> None:
        """Writes the end of the record (FINISHED or FAILED) to the spool, then uploads it and what others left."""
        if self._closing:
            return
        self._spill()
        self._record.update(status=status, end_ms=int(time.time() * 1000))
        _write(self._upload.path, self._record)
        self._closing = True
        self._wake.set()
        deadline = time.monotonic() + CLOSE_WAIT_S
        self._thread.join(CLOSE_WAIT_S)
        if self._lock is not None and not self._thread.is_alive():
            self._lock.close()
            if not self._upload.path.exists():  # the server answers: send what earlier processes could not
                flush(self.spool, deadline, timeout=2.0)


class _Silent:
    """Stands in when even the spool cannot be written (a full or read-only disk): a stage goes on without a record."""

    id = ""
    run_id = None

    def log(self, step: int, values: dict) -> None: ...
    def metric(self, values: dict) -> None: ...
    def artifact(self, path: str | Path) -> None: ...
    def close(self, status: str = "FINISHED") -> None: ...


def open_record(spool_dir: Path, name: str, params: dict, tags: dict) -> Record | _Silent:
    """Starts the record of a stage.

    Args: spool_dir is created when missing; params and tags are dicts of scalars (params may be nested).
    Returns a record whose methods never raise for the server's sake. Waits at most two seconds for a server.
    """
    try:
        return Record(Path(spool_dir), name, params, tags)
    except OSError as error:
        print(f"tracking: cannot write {spool_dir}: {error}; this stage leaves no record", flush=True)
        return _Silent()


if __name__ == "__main__":
    import sys

    done, left = flush(Path(sys.argv[1] if len(sys.argv) > 1 else "work/spool"))
    print(f"sent {done} records to {tracking_uri() or 'no server'}; {left} left in the spool")
