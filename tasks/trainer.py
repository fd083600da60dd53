"""One training loop for pre-training, mid-training, the DSA stages, SFT and reward models; objectives plug in.

    objective(model, batch, step) -> (loss, logs)     batch: dict of tensors; logs: numbers, or 'router_counts'
    batches(step) -> [micro-batch, ...]               a pure function of the step

A run is resumed from the newest checkpoint in the stage's scratch directory (weights, optimizer state, counters, all
written whole or not at all) and ends with the weights an uninterrupted run would have: batches and schedules depend on
the step alone and nothing else is random. Loss and gradient norm are checked at every step before the weights change; one
that is not finite, or a spike, has its batch kept, rewinds the run and is skipped on the replay (tasks/guard.py).

Check it:  python -m pytest tests/tasks/test_trainer.py
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kernels import paths
from model.checkpoint import FP32_SUFFIXES
from model.muon import MuonSplit, format_ownership, ownership_table
from model.recompute import saving
from tasks.guard import Guard, NonFiniteError, StepFault
from tasks.model_parallel import Layout
from tasks.parallel import ParallelSettings, Part, current
from tasks.parallel_engine import make_engine, norm_name
from tasks.resume import Found, ResumeStore
from tasks.router_watch import RouterWatch, moe_layers
from tasks.settings import LoopSettings, OptimizerSettings, Section

__all__ = ["Batch", "LoopSettings", "NonFiniteError", "Objective", "OptimizerSettings", "Section", "Trainer"]

Batch = dict[str, Tensor]
Objective = Callable[[nn.Module, Batch, int], tuple[Tensor, dict[str, Any]]]

IGNORE = -100


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


def numbered(batches: Sequence[Batch]) -> list[Batch]:
    """Micro-batches with `first_row`, how many rows of the step came before: what is drawn at random per row (the rows of
    the indexer's loss) is then the same however the step is cut."""
    rows = [next(iter(batch.values())).size(0) for batch in batches]
    return [batch | {"first_row": torch.tensor(sum(rows[:i]))} for i, batch in enumerate(batches)]


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
        describe: Callable[[int], Mapping[str, Any]] = lambda step: {},
        parallel: ParallelSettings | None = None,
        layout: Layout | None = None,
        kind: Callable[[int], str] = lambda step: "",
    ) -> None:
        if steps < 1:
            raise ValueError(f"a training run needs at least one step, got {steps}")
        self.parallel = current()
        self.layout = layout or Layout(self.parallel.rank, self.parallel.world)
        self.engine = make_engine(model, optimizer, self.parallel, parallel, self.layout, settings)
        self.stage, self.model, self.optimizer = stage, model, self.engine or optimizer
        self.objective, self.batches, self.evaluate = objective, batches, evaluate
        self.steps, self.lr_factor, self.settings = steps, lr_factor, settings
        self.device = next(p.device for p in model.parameters() if not p.is_meta)
        self.step = 0
        self.counters: dict[str, float] = {"tokens": 0.0}
        self.last_eval: dict[str, float] = {}
        self.best: dict[str, Any] | None = None
        self.describe, self.kind = describe, kind
        self.store = ResumeStore(stage.scratch, settings.keep_last, stage.print, settings.async_save, self.parallel)
        self.guard = Guard(settings.guard, stage.scratch, stage.evidence, self.parallel.rank)
        self.router = RouterWatch(moe_layers(model), settings.router_window, settings.router_dead_share, stage.print)

    # resume
    def save(self, *, best: bool = False) -> None:
        """Write the resume checkpoint of the current step and drop older ones; `best` replaces the best one instead."""
        state = {
            "step": self.step,
            "counters": self.counters,
            "last_eval": self.last_eval,
            "best": self.best,
            "losses": self.guard.histories,
            "router": self.router.state(),
        }
        files = {"model": self.layout.owned_weights(self.model), "optimizer": self.optimizer.owned_state()}
        self.store.save(self.step, files, state, best=best)

    def _restore(self, found: Found) -> None:
        self.layout.load_weights(self.model, found.files["model"])
        self.optimizer.load_state_tensors(found.files["optimizer"])
        state = found.state
        self.step, self.counters, self.last_eval = state["step"], state["counters"], state["last_eval"]
        self.best, self.guard.histories = state["best"], state["losses"]
        self.router.load_state(state["router"])

    def resume(self) -> bool:
        """Load the newest whole resume checkpoint if there is one."""
        found = self.store.load()
        if found is None:
            return False
        self._restore(found)
        self.stage.print(f"resumed at step {self.step} of {self.steps}")
        return True

    def _rewind(self, fault: StepFault) -> None:
        """Back to the newest checkpoint before what is skipped. Raises NonFiniteError when the guard gives the run up."""
        self.optimizer.zero_grad(set_to_none=True)
        event = self.guard.refuse(self.step, fault, self.describe(self.step))
        found = self.store.load(event.skipped[0])
        if found is None:
            raise NonFiniteError(f"step {self.step}: {fault.reason}; there is no whole checkpoint left to go back to")
        at, best = self.step, self.best
        self._restore(found)
        self.best = best  # of what the best checkpoint on disk holds, also where the replay will not come by it again
        self.store.drop_after(self.step)
        self.stage.log(at + 1, guard_events=len(self.guard.events))
        skipped = ", ".join(map(str, event.skipped))
        self.stage.print(
            f"warning: step {at}: {event.reason}. Back to step {self.step}; skipping step {skipped}; batch kept as "
            f"{event.batch}"
        )

    # the loop
    def run(self) -> dict[str, float]:
        """Train to the last step. Returns the last evaluation's numbers. Raises NonFiniteError (a ValueError)."""
        self.stage.print("optimizer:\n" + format_ownership(ownership_table(self.model, self.optimizer.cfg)))
        self.parallel.check_same(self.model, self.layout.owns_part)
        if not self.resume() and self.settings.guard.on:
            self.save()  # what the guard goes back to before the first regular checkpoint
        began, cpu, first, reported = time.monotonic(), time.process_time(), self.step, time.monotonic()
        tokens_at_start = self.counters["tokens"]
        while self.step < self.steps:
            self.store.check()
            logs: dict[str, float] = {"guard_skipped": 1.0}
            if self.step not in self.guard.skipped:
                try:
                    logs = self._one_step()
                except StepFault as fault:
                    self._rewind(fault)
                    continue
            self.step += 1
            last = self.step == self.steps
            if self.step == first + 1:
                self.stage.print(f"kernels: {paths.report()}")
            if last or self.step % self.settings.log_every == 0 or self.step == 1 or "guard_skipped" in logs:
                self.stage.log(self.step, **logs)
            if "loss" in logs and (last or time.monotonic() - reported >= 5):
                reported = time.monotonic()
                speed = (self.counters["tokens"] - tokens_at_start) / (reported - began)
                left = (reported - began) / max(1, self.step - first) * (self.steps - self.step)
                self.stage.print(
                    f"step {self.step}/{self.steps} loss {logs.get('lm_loss', logs['loss']):.3f} "
                    f"grad {logs.get('grad_norm', logs.get('index_grad_norm', 0.0)):.2f} "
                    f"{speed:.0f} tokens/s, about {left:.0f} s left"
                )
            if self.evaluate and (last or (self.settings.eval_every and self.step % self.settings.eval_every == 0)):
                self._evaluate()
            if last or self.step % self.settings.checkpoint_every == 0:
                self.save()
        self.store.wait()
        if self.step > first:
            wall = time.monotonic() - began
            self.stage.timing(
                train_seconds=wall,
                train_cpu_seconds=time.process_time() - cpu,
                tokens_per_second=(self.counters["tokens"] - tokens_at_start) / wall,
            )
        if self.settings.best_as_output and self.best and self.best["step"] != self.step:
            self.stage.print(f"output: the best checkpoint, of step {self.best['step']}: {self.best}")
            self._restore(self.store.load_best())
        self.stage.metric(guard=self.guard.summary(), dead_expert_alarms=self.router.alarms)
        if self.best:
            self.stage.metric(best=self.best)
        return dict(self.last_eval)

    def _one_step(self) -> dict[str, float]:
        scale = self.lr_factor(self.step)
        self.optimizer.set_lr_scale(scale)
        self.model.train()
        own = self.batches(self.step)
        tokens = sum(batch["input_ids_bs"].numel() for batch in own if "input_ids_bs" in batch) / self.layout.copies
        own = self.layout.even(own, self.parallel)
        micro_batches = numbered([{k: v.to(self.device) for k, v in batch.items()} for batch in own])
        if hasattr(self.engine, "run_step"):  # it drives the forward passes, too
            logs, router_counts = self.engine.run_step(self.objective, micro_batches, self.step)
            tokens = self.parallel.sum_(tokens)
        else:
            logs, router_counts = self._run(micro_batches, tokens)
            tokens = logs.pop("tokens")
        norms = self._clip()
        judged = logs.get("lm_loss", logs["loss"])
        reason = self.guard.judge(judged, {"loss": logs["loss"], **norms}, self.kind(self.step))
        if reason is not None:
            raise StepFault(reason, micro_batches)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if router_counts:
            # The worst layer's fullest expert against an even split: 1 is perfect balance.
            logs["router_max_load"] = max(float(c.max() * c.numel() / c.sum().clamp(min=1)) for c in router_counts)
            logs |= self.router.add(router_counts)
            limit = self.settings.router_bias_tokens
            if self.settings.router_bias_rate and (limit is None or self.counters["tokens"] < limit):
                balanced = self.engine if hasattr(self.engine, "update_router_bias") else self.model
                balanced.update_router_bias(router_counts, self.settings.router_bias_rate)
        self.counters["tokens"] += tokens
        return {**logs, **norms, "lr_factor": scale, "tokens": self.counters["tokens"]}

    def _run(self, micro_batches: Sequence[Batch], tokens: float) -> tuple[dict[str, float], list[Tensor]]:
        """Forward and backward of this rank's micro-batches: logs (`tokens` among them) and router counts of all ranks."""
        counts = [batch_count(batch) for batch in micro_batches]
        terms = [self.objective.terms(b, self.step) if hasattr(self.objective, "terms") else {} for b in micro_batches]
        # Ranks that share sequences hold a part of each; a batch without a target only keeps other ranks company.
        parts = [bool(count) / self.layout.copies for count in counts]
        terms = [{name: n * p for name, n in found.items()} for found, p in zip(terms, parts, strict=True)]
        sums = {name: sum(t[name] for t in terms) for name in (terms[0] if terms else ())}
        sums, _ = self.parallel.sum_step(sums | {"": sum(counts)}, [])
        total = sums[""]
        if total <= 0:
            raise ValueError(f"step {self.step}: the batch has no target to learn from")
        logs: dict[str, float] = {}
        router_counts: list[Tensor] = []
        last = max((i for i, count in enumerate(counts) if count), default=-1)
        for place, (batch, count, own_terms) in enumerate(zip(micro_batches, counts, terms, strict=True)):
            if count == 0 and not self.layout.together:
                continue
            share = count / total
            with (
                computing_in(self.model, getattr(torch, self.settings.precision)),
                saving(self.model, self.settings.recompute, self.settings.offload),
            ):
                network, part = getattr(self.engine, "model", self.model), ()
                if own_terms:
                    weights = {k: n / sums[k] / share for k, n in own_terms.items() if n and share}
                    part = (Part(weights, self.layout.data_rank, self.layout.data_world),)
                loss, extra = self.objective(network, batch, self.step, *part)
                # In here: recomputation needs the weights that the forward had.
                if self.engine:
                    self.engine.backward(loss * share, last=place == last)
                else:
                    (loss * share).backward()
            routed = extra.pop("router_counts", None) or []
            for i, c in enumerate(routed if count else []):
                if i < len(router_counts):
                    router_counts[i] = router_counts[i] + c
                else:
                    router_counts.append(c)
            for key, number in {"loss": loss.detach(), **extra}.items():
                logs[key] = logs.get(key, 0.0) + share * float(number)
        return self.parallel.sum_step({**logs, "tokens": tokens}, router_counts)

    def _clip(self) -> dict[str, float]:
        """Clip gradients; returns their norms before. The indexer's are clipped apart: its loss must not scale the rest."""
        limit = self.settings.grad_clip or float("inf")
        if self.engine:
            return self.engine.clip_groups(limit)
        parts: dict[str, list[Tensor]] = {}
        for group in self.optimizer.param_groups:
            parts.setdefault(norm_name(group["group"]), []).extend(p for p in group["params"] if p.grad is not None)
        return {key: float(nn.utils.clip_grad_norm_(parts[key], limit)) for key in sorted(parts) if parts[key]}

    def _evaluate(self) -> None:
        dtype = getattr(torch, self.settings.precision)
        with torch.no_grad(), self.layout.evaluating(self.model):
            if self.parallel.is_writer or self.layout.together:
                self.model.eval()
                with computing_in(self.model, dtype):
                    self.last_eval = {k: float(v) for k, v in self.evaluate(self.model, self.step).items()}
                self.model.train()
        self.last_eval = self.parallel.first(self.last_eval)
        self.stage.log(self.step, **self.last_eval)
        shown = "  ".join(f"{k} {v:.3f}" for k, v in self.last_eval.items() if "bits_per_byte" in k or "accuracy" in k)
        self.stage.print(f"step {self.step} held out: {shown}")
        self._keep_best()

    def _keep_best(self) -> None:
        name, goal = self.settings.keep_best, self.settings.keep_best_goal
        if name is None:
            return
        if name not in self.last_eval:
            raise ValueError(f"keep_best names {name!r}; the evaluation has {', '.join(sorted(self.last_eval))}")
        value = self.last_eval[name]
        if math.isnan(value):  # nothing is better or worse than it: once kept, it would stay
            self.stage.print(f"warning: step {self.step}: {name} is nan, which is no best")
            return
        if self.best is None or (value < self.best["value"] if goal == "min" else value > self.best["value"]):
            self.best = {"step": self.step, "name": name, "value": value}
            self.save(best=True)
