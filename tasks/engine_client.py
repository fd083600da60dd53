"""Client of a rollout engine (ours or sglang), the process that serves it, and the parity gate in front of training.

    with EngineProcess("data/sft", threads=1) as engine:
        client = engine.client
        client.parity_gate(model, sequences)
        rollouts = client.generate(prompts, {"max_new_tokens": 64, "temperature": 1.0, "sampling_seed": 7})
        client.update_weights_from_disk("work/checkpoint", weight_version=1)

    python -m pytest tests/tasks/test_engine.py

An engine whose log-probs differ from the training forward trains on a policy that nobody has: `parity_gate` raises before that.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path

import httpx
import orjson

ROOT = Path(__file__).resolve().parent.parent


class EngineError(RuntimeError):
    """The engine refused a call, failed in it, or cannot be reached. `status` is the HTTP status, None without an answer."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class ParityError(EngineError):
    """Engine and training forward disagree."""


@dataclass(frozen=True)
class Generation:
    """One rollout, exactly as the engine sampled it.

    output_logprobs: one float per output id. weight_version: of the last token; weight_runs: [(version, tokens)] in order.
    finish_reason: "stop" | "length" | "abort"; matched: the stop token's id.
    """

    output_ids: list[int]
    output_logprobs: list[float]
    finish_reason: str
    weight_version: int
    prompt_tokens: int
    matched: int | None = None
    weight_runs: list[tuple[int, int]] = field(default_factory=list)
    input_logprobs: list[float] = field(default_factory=list)


class EngineClient:
    """Blocking calls to one engine. Thread-safe; every failure is an EngineError that names the call.

    timeout: seconds for one call (a batch of long rollouts is one call). process: when given, its death is reported as such.
    """

    def __init__(self, url: str, timeout: float = 1800.0, process: EngineProcess | None = None) -> None:
        self.url, self.process = url.rstrip("/"), process
        self._http = httpx.Client(base_url=self.url, timeout=httpx.Timeout(timeout, connect=10.0), trust_env=False)

    def close(self) -> None:
        self._http.close()

    def _call(self, path: str, body: object = None, timeout: float | None = None) -> object:
        options = {} if timeout is None else {"timeout": timeout}
        try:
            if body is None:
                response = self._http.get(path, **options)
            else:
                headers = {"content-type": "application/json"}
                response = self._http.post(path, content=orjson.dumps(body), headers=headers, **options)
        except httpx.TimeoutException as error:
            raise EngineError(f"{path}: no answer from {self.url} in time ({type(error).__name__})") from error
        except httpx.HTTPError as error:
            raise EngineError(f"{path}: {self._death() or f'{self.url} cannot be reached: {error}'}") from error
        try:
            value = orjson.loads(response.content) if response.content else None
        except orjson.JSONDecodeError:
            value = None
        if response.status_code != 200:
            message = response.text[:500]
            if isinstance(value, dict):
                inner = value.get("error", value)
                message = inner.get("message", message) if isinstance(inner, dict) else str(inner)
            raise EngineError(f"{path}: HTTP {response.status_code}: {message}", response.status_code)
        return value

    def _death(self) -> str | None:
        if self.process is None:
            return None
        # the connection breaks a moment before the exit status is there to collect
        code = self.process.exit_code(wait=2.0)
        return None if code is None else f"the engine process {_exit_text(code)}. {self.process.tail()}".strip()

    # ---- generation -------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: Mapping | Sequence[Mapping] | object,
        return_input_logprobs: bool = False,
    ) -> list[Generation]:
        """Continue each prompt: one request, one batch. params: one mapping (sglang names) or SamplingParams, or one per row."""
        many = isinstance(params, Sequence) and not isinstance(params, Mapping)
        sampling = [_sampling(p) for p in params] if many else _sampling(params)
        body = {
            "input_ids": [list(ids) for ids in prompts],
            "sampling_params": sampling,
            "return_logprob": True,
            "logprob_start_len": 0 if return_input_logprobs else -1,
        }
        return [_generation(row) for row in self._rows(body, len(prompts))]

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probs of ids[1:], each given what precedes it (temperature 1): len(ids) - 1 floats per sequence."""
        body = {
            "input_ids": [list(ids) for ids in sequences],
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        scored = []
        for ids, row in zip(sequences, self._rows(body, len(sequences))):
            entries = row["meta_info"]["input_token_logprobs"]
            if [entry[1] for entry in entries] != list(ids):
                raise EngineError("/generate: the engine scored other ids than it was sent")
            scored.append([entry[0] for entry in entries[1:]])
        return scored

    def _rows(self, body: dict, rows: int) -> list[dict]:
        if not rows:
            return []
        value = self._call("/generate", body)
        if not isinstance(value, list) or len(value) != rows:
            raise EngineError(f"/generate: expected a list of {rows} results, got {type(value).__name__}")
        return value

    def abort(self, rid: str | None = None) -> None:
        """End the request `rid`, or all."""
        self._call("/abort_request", {"rid": rid} if rid else {"abort_all": True})

    # ---- weights and state ------------------------------------------------------------------------------------------

    def update_weights_from_disk(self, path: Path | str, weight_version: int, abort_all_requests: bool = False) -> None:
        """Serve another checkpoint of the same shape. weight_version must grow; the path is absolute for the engine's sake."""
        present = self.weight_version()
        if weight_version <= present:
            raise EngineError(f"weight_version must grow: {weight_version} is not above the engine's {present}")
        body = {
            "model_path": str(Path(path).resolve()),
            "weight_version": str(weight_version),
            "flush_cache": True,
            "abort_all_requests": abort_all_requests,
        }
        value = self._call("/update_weights_from_disk", body)
        if not isinstance(value, dict) or not value.get("success"):
            raise EngineError(f"/update_weights_from_disk: {value}")

    def weight_version(self) -> int:
        """The engine's weight version; engines that call it otherwise ("default") count as 0."""
        value = self.model_info().get("weight_version")
        return int(value) if str(value).isdecimal() else 0

    def model_info(self) -> dict:
        return self._call("/model_info")

    def server_info(self) -> dict:
        return self._call("/get_server_info")

    def flush_cache(self) -> None:
        self._call("/flush_cache", {})

    def pause(self, mode: str = "abort") -> None:
        """Stop generation: "abort" ends requests, "in_place" keeps their caches, "retract" recomputes caches on resume."""
        self._call("/pause_generation", {"mode": mode})

    def resume(self) -> None:
        self._call("/continue_generation", {})

    def healthy(self, generate: bool = False, timeout: float = 40.0) -> bool:
        """Whether the engine answers; with generate, whether it makes tokens."""
        try:
            self._call("/health_generate" if generate else "/health", timeout=timeout)
            return True
        except EngineError:
            return False

    def wait_healthy(self, timeout: float = 300.0) -> None:
        """Return once /health answers; EngineError after `timeout` seconds or when the process has died."""
        deadline = time.monotonic() + timeout
        while not self.healthy(timeout=5.0):
            if self.process is not None and (death := self._death()):
                raise EngineError(death)
            if time.monotonic() > deadline:
                raise EngineError(f"{self.url} was not healthy within {timeout:.0f} s")
            time.sleep(0.1)

    # ---- parity -----------------------------------------------------------------------------------------------------

    def parity_gate(self, model, sequences: Sequence[Sequence[int]], tol: float = 1e-4, new_tokens: int = 24) -> dict:
        """tasks.parity.parity_gate for this engine."""
        from tasks.parity import parity_gate

        return parity_gate(self, model, sequences, tol=tol, new_tokens=new_tokens)


def _sampling(params: object) -> dict:
    """sglang's sampling_params from a mapping or a SamplingParams-like dataclass."""
    values = asdict(params) if is_dataclass(params) else dict(params)
    if "seed" in values:
        values["sampling_seed"] = values.pop("seed")
    if isinstance(values.get("stop_token_ids"), tuple):
        values["stop_token_ids"] = list(values["stop_token_ids"])
    return values


def _generation(row: dict) -> Generation:
    meta = row["meta_info"]
    entries = meta["output_token_logprobs"]
    if [entry[1] for entry in entries] != row["output_ids"]:
        raise EngineError("/generate: output_ids and output_token_logprobs name different tokens")
    version = str(meta.get("weight_version"))
    return Generation(
        output_ids=row["output_ids"],
        output_logprobs=[entry[0] for entry in entries],
        finish_reason=meta["finish_reason"]["type"],
        matched=meta["finish_reason"].get("matched"),
        weight_version=int(version) if version.isdecimal() else 0,
        weight_runs=[(int(v), n) for v, n in meta.get("weight_runs", [])],
        prompt_tokens=meta["prompt_tokens"],
        input_logprobs=[entry[0] for entry in meta.get("input_token_logprobs", [])[1:]],
    )


def _exit_text(code: int) -> str:
    if code < 0:
        return f"was killed by signal {-code} ({signal.Signals(-code).name})"
    return f"ended with exit status {code}"


class EngineProcess:
    """`python -m tasks.engine` as a child on loopback: a context manager that ends it, and that it cannot outlive.

    `client` talks to it. Its output goes to a temporary file, whose end is quoted when it dies. extra: further options, e.g.
    ["--dtype", "int8"] or ["--max-rows", "64"].
    """

    def __init__(
        self,
        checkpoint: Path | str,
        threads: int = 1,
        extra: Sequence[str] = (),
        weight_version: int = 0,
        start_timeout: float = 300.0,
        timeout: float = 1800.0,
    ) -> None:
        self.checkpoint, self.threads, self.extra = Path(checkpoint).resolve(), threads, list(extra)
        self.weight_version, self.start_timeout, self.timeout = weight_version, start_timeout, timeout
        self.process: subprocess.Popen | None = None
        self.client: EngineClient | None = None

    def __enter__(self) -> EngineProcess:
        self.start()
        return self

    def __exit__(self, *exc) -> None:
        self.stop()

    def start(self) -> None:
        """Spawn and wait until healthy. EngineError with the engine's last words when it does not come up."""
        self._scratch = tempfile.TemporaryDirectory(prefix="engine-")
        self._log = Path(self._scratch.name) / "log"
        port_file = Path(self._scratch.name) / "port"
        command = [sys.executable, "-m", "tasks.engine", "--port", "0", "--exit-with-stdin"]
        command += ["--model", str(self.checkpoint), "--threads", str(self.threads), "--port-file", str(port_file)]
        command += ["--weight-version", str(self.weight_version), *self.extra]
        if threading.current_thread() is threading.main_thread():
            # the kernel ties the signal to the spawning thread, so only a thread that lives as long as the process may use it
            command += ["--parent", str(os.getpid())]
        threads = {name: str(self.threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
        with open(self._log, "wb") as log:
            self.process = subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.PIPE, stdout=log, stderr=log, env={**os.environ, **threads}
            )
        try:
            deadline = time.monotonic() + self.start_timeout
            while not port_file.exists():
                if (code := self.exit_code()) is not None:
                    raise EngineError(f"the engine process {_exit_text(code)} while starting. {self.tail()}")
                if time.monotonic() > deadline:
                    raise EngineError(f"the engine did not start within {self.start_timeout:.0f} s. {self.tail()}")
                time.sleep(0.05)
            self.client = EngineClient(f"http://127.0.0.1:{int(port_file.read_text())}", self.timeout, self)
            self.client.wait_healthy(self.start_timeout)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End the engine: closing its stdin is enough, a signal follows if it is not."""
        if self.client is not None:
            self.client.close()
        if self.process is not None:
            self.process.stdin.close()
            try:
                self.process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._scratch.cleanup()

    def exit_code(self, wait: float = 0.0) -> int | None:
        """The exit status (negative: signal), or None while it runs."""
        if self.process is None:
            return None
        try:
            return self.process.wait(timeout=wait) if wait else self.process.poll()
        except subprocess.TimeoutExpired:
            return None

    def tail(self, size: int = 2000) -> str:
        """The end of what the engine printed."""
        try:
            text = self._log.read_bytes()[-size:].decode("utf-8", "replace").strip()
        except OSError:
            return ""
        return f"Its last output:\n{text}" if text else ""
