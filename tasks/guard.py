"""The guard of a training run: a loss that is not finite, or a spike, is refused before it touches the weights.

The offending batch is kept with the history of losses, weights and optimizer state go back to the newest checkpoint, and
the replay skips the step. A step that follows a recent fault widens what is skipped backwards (the step itself, then 1, 3,
7 steps before it): a spike may show only after the step that did the harm, and replaying that step would do it again
(PaLM, arXiv 2204.02311 §5.1, skips batches before and after the spike). What is skipped is written down at once, so that a
run killed at any moment skips the same steps.

Check it:  python -m pytest tests/tasks/test_guard.py
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from tasks.files import atomic_write
from tasks.settings import GuardSettings


class NonFiniteError(ValueError):
    """The run was given up: a loss or gradient was refused; the message names the step and the saved batch."""


class StepFault(Exception):
    """A step was refused; the loop rewinds. `reason` says what was found."""

    def __init__(self, reason: str, batches: Sequence[Mapping[str, Tensor]]) -> None:
        super().__init__(reason)
        self.reason, self.batches = reason, batches


@dataclass(frozen=True)
class Event:
    """One refused step: what was found, which steps are skipped for it, and where its batch is kept."""

    step: int
    reason: str
    skipped: tuple[int, ...]
    batch: str


class Guard:
    """Judges every step's loss; remembers accepted losses (`histories`, part of the checkpoint) and events (a file of their own).

    Steps of different kinds (an SFT step with replayed text in it, and one without) are compared with their own kind only.

    Args: settings; folder: the run's scratch, where `guard.json` lives; evidence: where refused batches are kept; rank: of
    several, each keeps its share of the batch and the first alone writes the rest.
    """

    def __init__(self, settings: GuardSettings, folder: Path, evidence: Path, rank: int = 0) -> None:
        self.settings, self.evidence, self.rank = settings, Path(evidence), rank
        self._file = Path(folder) / "guard.json"
        self.histories: dict[str, list[float]] = {}
        self._kind = ""  # of the step judged last
        self.events: list[Event] = []
        if self._file.is_file():
            found = json.loads(self._file.read_text(encoding="utf-8"))
            self.events = [Event(e["step"], e["reason"], tuple(e["skipped"]), e["batch"]) for e in found]

    @property
    def history(self) -> list[float]:
        """Accepted losses of the kind judged last."""
        return self.histories.get(self._kind, [])

    @property
    def skipped(self) -> set[int]:
        """Steps that are taken without an update."""
        return {step for event in self.events for step in event.skipped}

    def judge(self, loss: float, norms: Mapping[str, float], kind: str = "") -> str | None:
        """Why a step is refused, or None; an accepted loss joins its kind's history. Call before the weights change."""
        self._kind = kind
        if not math.isfinite(loss):
            return f"loss is {loss}"
        for name, norm in norms.items():
            if not math.isfinite(norm):
                return f"{name.replace('grad_norm', 'gradient norm')} is {norm}"
        reason = self._spike(loss) if self.settings.on else None
        if reason is None:
            self.histories[kind] = [*self.history[-self.settings.window + 1 :], loss]
        return reason

    def _spike(self, loss: float) -> str | None:
        if len(self.history) < self.settings.history:
            return None
        median = statistics.median(self.history)
        # 1.4826 * MAD estimates a normal distribution's standard deviation and ignores outliers.
        deviation = 1.4826 * statistics.median(abs(x - median) for x in self.history)
        highest = max(self.history)
        if loss <= median + self.settings.mads * deviation or loss <= highest + self.settings.rise:
            return None
        return (
            f"loss is {loss:.4f}, a spike: the last {len(self.history)} had median {median:.4f}, robust deviation "
            f"{deviation:.4f} and maximum {highest:.4f}"
        )

    def refuse(self, step: int, fault: StepFault, describe: Mapping[str, Any]) -> Event:
        """Keep the batch and write the event down. Raises NonFiniteError when the run is to be given up."""
        name = f"bad-batch-step-{step:08d}" + (f"-rank-{self.rank}" if self.rank else "")
        path = self.evidence / f"{name}.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        tensors = {f"{i}.{k}": v.cpu().contiguous() for i, batch in enumerate(fault.batches) for k, v in batch.items()}
        save_file(tensors, path)
        near = sum(1 for event in self.events if abs(step - event.step) <= self.settings.window)
        first = max(0, step - (2**near - 1))
        event = Event(step, fault.reason, tuple(range(first, step + 1)), path.name)
        story = {**asdict(event), "history": self.history, **describe}
        atomic_write(path.with_suffix(".json"), json.dumps(story, indent=1, sort_keys=True) + "\n")
        if not self.settings.on or len(self.events) >= self.settings.max_rewinds:
            before = f" after {len(self.events)} rewinds" if self.events else ""
            raise NonFiniteError(
                f"step {step}: {fault.reason}; given up{before}; the batch is kept in {path}. Lower the learning rate, "
                "clip harder, or look at the batch"
            )
        self.events.append(event)
        if self.rank == 0:
            atomic_write(self._file, json.dumps([asdict(e) for e in self.events], sort_keys=True) + "\n")
        return event

    def summary(self) -> dict[str, Any]:
        """For the stage's metrics."""
        return {"events": len(self.events), "skipped_steps": sorted(self.skipped)}
