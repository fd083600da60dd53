"""One training loop for pre-training, mid-training, the DSA stages, SFT and reward models; objectives plug in.

    objective(model, batch, step) -> (loss, logs)     batch: dict of tensors; logs: numbers, or 'router_counts'
    batches(step) -> [micro-batch, ...]               a pure function of the step

A run is resumed from the newest checkpoint in the stage's scratch directory (weights, optimizer state, counters, all
written whole or not at all) and ends with the weights an uninterrupted run would have: batches and schedules depend on
the step alone and nothing else is random. Loss and gradient norm are checked at every step; the first that is not finite
stops the run, names the step and keeps the batch.

Check it:  python -m pytest tests/tasks/test_trainer.py
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from model.checkpoint import FP32_SUFFIXES
from model.muon import MuonSplit, format_ownership, ownership_table
from tasks.files import atomic_dir
from tasks.settings import LoopSettings, OptimizerSettings, Section

__all__ = ["Batch", "LoopSettings", "Objective", "OptimizerSettings", "Section", "Trainer"]

Batch = dict[str, Tensor]
Objective = Callable[[nn.Module, Batch, int], tuple[Tensor, dict[str, Any]]]

IGNORE = -100


class NonFiniteError(ValueError):
    """Loss or gradient was not finite; the message names the step and the saved batch."""


def pick_device() -> torch.device:
    """The accelerator when there is one, else the CPU."""
    return torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")


@contextlib.contextmanager
def computing_in(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """While open, the model computes with copies of its weights in `dtype`; gradients arrive at the weights themselves.

    The router and the indexer's head weights keep their type, as in checkpoints. Autocast would not do: the model's fused
    kernels take operands of one type.
    """
    own: list[tuple[nn.Module, str, nn.Parameter]] = []
    for prefix, module in model.named_modules():
        for name, param in module._parameters.items():
            if param is not None and param.dtype != dtype and not f"{prefix}.{name}".endswith(FP32_SUFFIXES):
                own.append((module, name, param))
    try:
        for module, name, param in own:
            module._parameters[name] = param.to(dtype)
        yield
    finally:
        for module, name, param in own:
            module._parameters[name] = param


def batch_count(batch: Mapping[str, Tensor]) -> float:
    """What a micro-batch weighs in the mean over its step: summed weights, else valid targets, else rows."""
    if "weights" in batch:
        return float(batch["weights"].sum())
    if "targets_bs" in batch:
        return float((batch["targets_bs"] != IGNORE).sum())
    return float(next(iter(batch.values())).size(0))


def split_batch(batch: Mapping[str, Any], micro_rows: int) -> list[Batch]:
    """Cuts a batch of arrays or tensors along its rows into micro-batches of at most `micro_rows`."""
    tensors = {k: torch.as_tensor(v) for k, v in batch.items()}
    rows = next(iter(tensors.values())).size(0)
    return [{k: v[i : i + micro_rows] for k, v in tensors.items()} for i in range(0, rows, micro_rows)]


class Trainer:
    """Runs `steps` optimizer steps of `objective` on `model`; see the module's docstring.

    Args: stage gives scratch, log, print and timing. lr_factor(step) multiplies the peak learning rates.
    evaluate(model, step) -> numbers is called every `eval_every` steps and at the end, under eval mode without gradients.
    """

    def __init__(
        self,
        stage: Any,
        model: nn.Module,
        optimizer: MuonSplit,
        objective: Objective,
        batches: Callable[[int], Sequence[Batch]],
        *,
        steps: int,
        lr_factor: Callable[[int], float],
        settings: LoopSettings,
        evaluate: Callable[[nn.Module, int], Mapping[str, float]] | None = None,
    ) -> None:
        if steps < 1:
            raise ValueError(f"a training run needs at least one step, got {steps}")
        self.stage, self.model, self.optimizer = stage, model, optimizer
        self.objective, self.batches, self.evaluate = objective, batches, evaluate
        self.steps, self.lr_factor, self.settings = steps, lr_factor, settings
        self.device = next(model.parameters()).device
        self.step = 0
        self.counters: dict[str, float] = {"tokens": 0.0}
        self.last_eval: dict[str, float] = {}

    # resume
    def _checkpoints(self) -> list[Path]:
        return sorted(p for p in self.stage.scratch.glob("step-*") if re.fullmatch(r"step-\d{8}", p.name))

    def save(self) -> None:
        """Write the resume checkpoint of the current step and drop older ones."""
        with atomic_dir(self.stage.scratch / f"step-{self.step:08d}") as folder:
            save_file({k: v.contiguous() for k, v in self.model.state_dict().items()}, folder / "model.safetensors")
            save_file(
                {k: v.contiguous() for k, v in self.optimizer.state_tensors().items()}, folder / "optimizer.safetensors"
            )
            state = {"step": self.step, "counters": self.counters, "last_eval": self.last_eval}
            (folder / "trainer.json").write_text(json.dumps(state, sort_keys=True))
        for old in self._checkpoints()[:-1]:
            shutil.rmtree(old)

    def resume(self) -> bool:
        """Load the newest resume checkpoint if there is one."""
        found = self._checkpoints()
        if not found:
            return False
        folder = found[-1]
        self.model.load_state_dict(load_file(folder / "model.safetensors"))
        self.optimizer.load_state_tensors(load_file(folder / "optimizer.safetensors"))
        state = json.loads((folder / "trainer.json").read_text())
        self.step, self.counters, self.last_eval = state["step"], state["counters"], state["last_eval"]
        self.stage.print(f"resumed at step {self.step} of {self.steps}")
        return True

    # the loop
    def run(self) -> dict[str, float]:
        """Train to the last step. Returns the last evaluation's numbers. Raises NonFiniteError (a ValueError)."""
        self.stage.print("optimizer:\n" + format_ownership(ownership_table(self.model, self.optimizer.cfg)))
        self.resume()
        began, cpu, first, reported = time.monotonic(), time.process_time(), self.step, time.monotonic()
        tokens_at_start = self.counters["tokens"]
        while self.step < self.steps:
            logs = self._one_step()
            self.step += 1
            last = self.step == self.steps
            if last or self.step % self.settings.log_every == 0 or self.step == 1:
                self.stage.log(self.step, **logs)
            if last or time.monotonic() - reported >= 5:
                reported = time.monotonic()
                speed = (self.counters["tokens"] - tokens_at_start) / (reported - began)
                left = (reported - began) / (self.step - first) * (self.steps - self.step)
                self.stage.print(
                    f"step {self.step}/{self.steps} loss {logs.get('lm_loss', logs['loss']):.3f} "
                    f"grad {logs.get('grad_norm', logs.get('index_grad_norm', 0.0)):.2f} "
                    f"{speed:.0f} tokens/s, about {left:.0f} s left"
                )
            if self.evaluate and (last or (self.settings.eval_every and self.step % self.settings.eval_every == 0)):
                self._evaluate()
            if last or self.step % self.settings.checkpoint_every == 0:
                self.save()
        if self.step > first:
            wall = time.monotonic() - began
            self.stage.timing(
                train_seconds=wall,
                train_cpu_seconds=time.process_time() - cpu,
                tokens_per_second=(self.counters["tokens"] - tokens_at_start) / wall,
            )
        return dict(self.last_eval)

    def _one_step(self) -> dict[str, float]:
        scale = self.lr_factor(self.step)
        self.optimizer.set_lr_scale(scale)
        self.model.train()
        micro_batches = [{k: v.to(self.device) for k, v in batch.items()} for batch in self.batches(self.step)]
        counts = [batch_count(batch) for batch in micro_batches]
        total = sum(counts)
        if total <= 0:
            raise ValueError(f"step {self.step}: the batch has no target to learn from")
        logs: dict[str, float] = {}
        router_counts: list[Tensor] = []
        for batch, count in zip(micro_batches, counts, strict=True):
            if count == 0:
                continue
            with computing_in(self.model, getattr(torch, self.settings.precision)):
                loss, extra = self.objective(self.model, batch, self.step)
            value = float(loss.detach())
            if value != value or abs(value) == float("inf"):
                raise self._not_finite("loss", value, batch)
            share = count / total
            (loss * share).backward()
            for i, c in enumerate(extra.pop("router_counts", None) or []):
                if i < len(router_counts):
                    router_counts[i] = router_counts[i] + c
                else:
                    router_counts.append(c)
            for key, number in {"loss": value, **extra}.items():
                logs[key] = logs.get(key, 0.0) + share * float(number)
        norms = self._clip()
        for name, norm in norms.items():
            if norm != norm or norm == float("inf"):
                raise self._not_finite(name.replace("grad_norm", "gradient norm"), norm, *micro_batches)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if router_counts:
            # The worst layer's fullest expert against an even split: 1 is perfect balance.
            logs["router_max_load"] = max(float(c.max() * c.numel() / c.sum().clamp(min=1)) for c in router_counts)
            limit = self.settings.router_bias_tokens
            if self.settings.router_bias_rate and (limit is None or self.counters["tokens"] < limit):
                self.model.update_router_bias(router_counts, self.settings.router_bias_rate)
        self.counters["tokens"] += sum(
            batch["input_ids_bs"].numel() for batch in micro_batches if "input_ids_bs" in batch
        )
        return {**logs, **norms, "lr_factor": scale, "tokens": self.counters["tokens"]}

    def _clip(self) -> dict[str, float]:
        """Clip gradients; returns their norms before. The indexer's are clipped apart: its loss must not scale the rest."""
        parts: dict[str, list[Tensor]] = {}
        for group in self.optimizer.param_groups:
            key = "index_grad_norm" if group["group"] == "indexer" else "grad_norm"
            parts.setdefault(key, []).extend(p for p in group["params"] if p.grad is not None)
        limit = self.settings.grad_clip or float("inf")
        return {key: float(nn.utils.clip_grad_norm_(parts[key], limit)) for key in sorted(parts) if parts[key]}

    def _evaluate(self) -> None:
        self.model.eval()
        with torch.no_grad(), computing_in(self.model, getattr(torch, self.settings.precision)):
            self.last_eval = {k: float(v) for k, v in self.evaluate(self.model, self.step).items()}
        self.model.train()
        self.stage.log(self.step, **self.last_eval)
        shown = "  ".join(f"{k} {v:.3f}" for k, v in self.last_eval.items() if "bits_per_byte" in k or "accuracy" in k)
        self.stage.print(f"step {self.step} held out: {shown}")

    def _not_finite(self, what: str, value: float, *batches: Batch) -> NonFiniteError:
        path = self.stage.scratch / f"bad-batch-step-{self.step:08d}.safetensors"
        tensors = {f"{i}.{k}": v.cpu().contiguous() for i, batch in enumerate(batches) for k, v in batch.items()}
        save_file(tensors, path)
        return NonFiniteError(
            f"step {self.step}: {what} is {value}; the batch is kept in {path}. Lower the learning rate, clip harder, or "
            "look at the batch"
        )
