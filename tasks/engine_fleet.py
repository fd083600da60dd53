"""Several rollout engines that look like one: each takes a share of every batch, all hold the same weights.

    with ExitStack() as stack:
        engine = fleet(stack, "data/sft", count=2, threads=1)
        rollouts = engine.generate(prompts, params)

Rows carry their own random streams, so a row's tokens do not depend on which engine has it beyond rounding: matrix products of
another batch size may round differently, which is why the number of engines is a parameter of the stage.

Check it:  python -m pytest tests/tasks/test_engine_fleet.py
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tasks.engine_client import EngineProcess, Generation


def shares(rows: int, count: int) -> list[slice]:
    """`rows` rows as at most `count` consecutive runs of nearly equal length: samples of one prompt stay together."""
    ends = [rows * i // count for i in range(count + 1)]
    return [slice(a, b) for a, b in zip(ends, ends[1:]) if b > a]


class FleetClient:
    """The calls of EngineClient that rollouts need, spread over several of them. An error of one is the error of the call."""

    def __init__(self, clients: Sequence[Any]) -> None:
        self.clients = list(clients)
        self._pool = ThreadPoolExecutor(len(self.clients), thread_name_prefix="engine")

    def close(self) -> None:
        self._pool.shutdown()

    def _each(self, call: Callable[..., Any], *columns: Sequence[Any]) -> list[Any]:
        return list(self._pool.map(call, self.clients, *columns))

    def _spread(self, call: Callable[[Any, slice], list], rows: int) -> list:
        parts = shares(rows, len(self.clients))
        return [row for part in self._pool.map(call, self.clients, parts) for row in part]

    def generate(self, prompts: Sequence[Sequence[int]], params: Any, **options: Any) -> list[Generation]:
        """As EngineClient.generate; results in the order of the prompts."""
        many = isinstance(params, Sequence) and not isinstance(params, Mapping)
        return self._spread(
            lambda client, part: client.generate(prompts[part], params[part] if many else params, **options),
            len(prompts),
        )

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """As EngineClient.score; results in the order of the sequences."""
        return self._spread(lambda client, part: client.score(sequences[part]), len(sequences))

    def update_weights_from_disk(self, path: Path | str, weight_version: int) -> None:
        """Every engine has the new weights when this returns."""
        self._each(lambda client: client.update_weights_from_disk(path, weight_version=weight_version))

    def parity_gate(self, model: Any, sequences: Sequence[Sequence[int]], **options: Any) -> dict:
        """Every engine has to pass; returns what the last one compared."""
        return [client.parity_gate(model, sequences, **options) for client in self.clients][-1]


def fleet(
    stack: contextlib.ExitStack,
    checkpoint: Path | str,
    count: int,
    start: Callable[..., Any] = EngineProcess,
    **options: Any,
) -> Any:
    """`count` engine processes on one checkpoint, ended when `stack` closes: an EngineClient, or a FleetClient over several."""
    if count < 1:
        raise ValueError(f"a rollout needs at least one engine, got {count}")
    processes = [stack.enter_context(start(checkpoint, **options)) for _ in range(count)]
    if count == 1:
        return processes[0].client
    client = FleetClient([process.client for process in processes])
    stack.callback(client.close)
    return client
