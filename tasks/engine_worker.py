"""The engine's one decode thread: a queue of requests, a running batch, commands between steps, weight versions that only grow.

    python -m pytest tests/tasks/test_engine.py

By default a request is a batch of its own, so its numbers depend on nothing but the request and the weights: the same call
gives the same bytes. With max_rows > 0, requests share batches (rows join between steps): more tokens per second for many small
callers, equal up to rounding. Pausing, aborting and weight updates act between two steps.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

from model.checkpoint import load_checkpoint, load_config
from model.decode import DecodeBatch, Decoder
from model.sampling import Completion
from tasks.engine_api import GenerateRequest, reply


class EngineClosed(RuntimeError):
    """The worker thread has ended."""


@dataclass
class _Job:
    request: GenerateRequest
    future: Future = field(default_factory=lambda: _future())
    cancelled: bool = False


class EngineWorker(threading.Thread):
    """Owns the model. Other threads call submit, command, pause, resume and abort; results come as futures."""

    def __init__(self, model_path: Path, dtype: str, max_rows: int, seed: int, weight_version: int) -> None:
        super().__init__(name="decode", daemon=True)
        self.model_path, self.max_rows, self.seed = Path(model_path), max_rows, seed
        self.weight_version = weight_version
        self.model = load_checkpoint(self.model_path).requires_grad_(False)
        self.decoder = Decoder(self.model, dtype=dtype, auto_refresh=False)
        self.batch = DecodeBatch(self.decoder, weight_version)
        self.waiting: deque[_Job] = deque()
        self.running: dict[int, _Job] = {}  # by id of the job
        self.commands: deque[tuple[Callable[[], object], Future]] = deque()
        self.paused: str | None = None
        self.steps = 0  # grows whenever the thread makes progress: the heartbeat of /health_generate
        self.requests = 0
        self._wake = threading.Condition()
        self._closing = False

    # ---- called from other threads

    def next_seed(self) -> int:
        """Seed for a request that names none: a function of the engine's seed and how many came before."""
        with self._wake:
            self.requests += 1
            return self.seed * 1_000_003 + self.requests

    def check(self, request: GenerateRequest) -> None:
        """ValueError naming the prompt and the id or length this model cannot take."""
        for row, (prompt, params) in enumerate(zip(request.prompts, request.params)):
            self.decoder.check(prompt, params.max_new_tokens, row)

    def submit(self, request: GenerateRequest) -> _Job:
        """Queue a request; job.future gives the reply."""
        self.check(request)
        job = _Job(request)
        with self._wake:
            if self._closing:
                raise EngineClosed("the engine is shutting down")
            self.waiting.append(job)
            self._wake.notify()
        return job

    def command(self, function: Callable[[], object]) -> Future:
        """Run a function in the decode thread, between batches (between steps while paused)."""
        future = _future()
        with self._wake:
            self.commands.append((function, future))
            self._wake.notify()
        return future

    def pause(self, mode: str) -> Future:
        """Stop stepping. "abort" ends every request as it is; "in_place" keeps caches; "retract" recomputes them on resume."""
        if mode not in ("abort", "in_place", "retract"):
            raise ValueError(f"mode must be abort, in_place or retract, got {mode!r}")
        with self._wake:
            self.paused = mode
            self._wake.notify()
        return self.command(self._abort_all if mode == "abort" else lambda: None)

    def resume(self) -> Future:
        """Continue after a pause."""

        def go() -> None:
            if self.paused == "retract":
                self.batch.rebuild()
            self.paused = None

        return self.command(go)

    def abort(self, rid: str | None = None, all_requests: bool = False) -> None:
        """End requests by id (a request's id, or one of its rows'), or all of them."""
        with self._wake:
            for job in [*self.waiting, *self.running.values()]:
                rids = job.request.rids
                if all_requests or rid in rids or any(r.rpartition("_")[0] == rid for r in rids):
                    job.cancelled = True
            self._wake.notify()

    def cancel(self, job: _Job) -> None:
        """The caller has gone: stop working for it."""
        with self._wake:
            job.cancelled = True
            self._wake.notify()

    def close(self) -> None:
        with self._wake:
            self._closing = True
            self._wake.notify()

    def load(self) -> dict:
        """Numbers for a router."""
        with self._wake:
            waiting = sum(len(job.request.prompts) for job in self.waiting)
            return {"num_running_reqs": len(self.batch.rows), "num_waiting_reqs": waiting, "steps": self.steps}

    # ---- the thread

    def run(self) -> None:
        while True:
            with self._wake:
                while not (self._closing or self.commands or self._can_work()):
                    self._wake.wait()
                if self._closing:
                    break
                # a command waits for the running batch, unless the engine is paused in the middle of it
                run_command = self.commands and (self.paused is not None or not self.batch.rows)
                todo = self.commands.popleft() if run_command else None
            if todo is not None:
                _settle(todo[1], todo[0])
            elif self._can_work():
                self._work()
        for job in [*self.waiting, *self.running.values()]:
            job.future.set_exception(EngineClosed("the engine is shutting down"))

    def _can_work(self) -> bool:
        if any(job.cancelled for job in [*self.waiting, *self.running.values()]):
            return True
        return self.paused is None and bool(self.batch.rows or self.waiting)

    def _work(self) -> None:
        """Drop what was cancelled, admit what fits, one step."""
        try:
            self._sweep()
            if self.paused is not None:
                return
            while (job := self._admissible()) is not None:
                self._admit(job)
            if self.batch.rows:
                self._deliver(self.batch.step())
        except Exception as error:  # a failure must reach every caller it concerns, and must not end the thread
            self.batch = DecodeBatch(self.decoder, self.weight_version)
            for job in list(self.running.values()):
                self._finish(job, error=error)
        self.steps += 1

    def _admissible(self) -> _Job | None:
        with self._wake:
            if not self.waiting or self.commands:
                return None
            size = len(self.waiting[0].request.prompts)
            if self.batch.rows and len(self.batch.rows) + size > self.max_rows:
                return None
            job = self.waiting.popleft()
            self.running[id(job)] = job
            return job

    def _admit(self, job: _Job) -> None:
        request = job.request
        scored = [row for row, start in enumerate(request.start_lens) if start >= 0 and request.return_logprob]
        if scored:
            logprobs = self.decoder.score([request.prompts[row] for row in scored])
            request.input_logprobs = dict(zip(scored, logprobs))
        tags = [(id(job), row) for row in range(len(request.prompts))]
        self._deliver(self.batch.add(request.prompts, request.params, request.seeds, tags))

    def _deliver(self, finished: list[tuple[tuple[int, int], Completion]]) -> None:
        for (key, row), completion in finished:
            job = self.running[key]
            job.request.completions[row] = completion
            if len(job.request.completions) == len(job.request.prompts):
                self._finish(job)

    def _finish(self, job: _Job, error: Exception | None = None) -> None:
        with self._wake:
            self.running.pop(id(job), None)
        if error is not None:
            job.future.set_exception(error)
        else:
            job.future.set_result(reply(job.request, self.weight_version))

    def _sweep(self) -> None:
        with self._wake:
            gone = [job for job in self.waiting if job.cancelled]
            self.waiting = deque(job for job in self.waiting if not job.cancelled)
            keys = {key for key, job in self.running.items() if job.cancelled}
        for job in gone:
            job.request.completions = {
                row: Completion(finish_reason="abort") for row in range(len(job.request.prompts))
            }
            self._finish(job)
        if keys:
            self._deliver(self.batch.abort(lambda tag: tag[0] in keys))

    def _abort_all(self) -> None:
        self.abort(all_requests=True)
        self._sweep()

    # ---- weights

    def update_weights(self, path: str, version: int | None, abort_all: bool) -> Future:
        """Load a checkpoint of the same shape under a larger version (default: one more); on any error the old weights stay."""

        def load() -> int:
            new = self.weight_version + 1 if version is None else version
            if new <= self.weight_version:
                raise ValueError(f"weight_version must grow: {new} is not above the present {self.weight_version}")
            directory = Path(path)
            cfg = load_config(directory)
            if cfg != self.model.cfg:
                raise ValueError(
                    f"{path}: its config differs from the served model's; start a new engine for another model"
                )
            fresh = load_checkpoint(directory).requires_grad_(False)
            self.model, self.decoder.model, self.model_path = fresh, fresh, directory
            self.decoder.refresh()
            self.weight_version = self.batch.weight_version = new
            return new

        if abort_all:
            self.abort(all_requests=True)
        return self.command(load)


def _future() -> Future:
    """A future that callers cannot cancel: a vanished caller must not make set_result fail in the decode thread."""
    future: Future = Future()
    future.set_running_or_notify_cancel()
    return future


def _settle(future: Future, function: Callable[[], object]) -> None:
    try:
        future.set_result(function())
    except Exception as error:
        future.set_exception(error)
