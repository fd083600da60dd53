"""What surrounds an RL stage's loop: policy, engine process behind its parity gate, publishing, resume, evaluation.

with PolicyRun(stage, stage.dep("data/sft"), config) as run:
    for step in run.steps():
        ...                          # sample with run.engine, update run.model
        run.end_step(step, logs)     # publish the weights, log, keep the resume state
    run.finish(stage.out("data/reasoning_rl"))
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from pydantic import Field

from model.checkpoint import load_checkpoint, save_checkpoint
from tasks.chat import render_tokens
from tasks.engine_client import EngineProcess
from tasks.engine_fleet import fleet
from tasks.files import atomic_dir
from tasks.problems import build_all, mix, samples
from tasks.rl import PolicyConfig, load_state, save_state
from tasks.rl_eval import evaluate_families, load_tokenizer
from tasks.rollouts import Roller
from tasks.stage import FromCheckpoint, Stage


class RunConfig(FromCheckpoint):
    """Settings that all RL stages have."""

    families: dict[str, dict[str, Any]] = Field(
        min_length=1, description="problem families to train on: name -> its fields"
    )
    eval_families: dict[str, dict[str, Any]] = Field(default_factory=dict, description="families also evaluated")
    eval_problems: int = Field(128, ge=1, description="held-out problems of each family, sampled once each")
    steps: int = Field(ge=1, description="rollout batches")
    prompts: int = Field(32, ge=1, description="problems of one rollout batch")
    group_size: int = Field(8, ge=1, description="trajectories of one problem")
    engines: int = Field(1, ge=1, description="rollout engine processes, each with a share of every batch")
    checkpoint_every: int = Field(5, ge=1, description="steps between resume checkpoints in scratch")
    permute_advantages: bool = Field(False, description="control experiment: advantages shuffled over the batch")
    policy: PolicyConfig = PolicyConfig()


def shuffled(values: Sequence[Any], seed: int) -> list[Any]:
    """The values in an order that depends on the seed alone."""
    return [values[i] for i in sorted(range(len(values)), key=lambda i: mix(seed, i))]


class PolicyRun(contextlib.AbstractContextManager):
    """See the module's docstring. Attributes: model, optimizer, tokenizer, roller, families, engine, extra."""

    def __init__(self, stage: Stage, source: Path, config: RunConfig) -> None:
        threads = int(stage.params.get("threads", 1))
        torch.set_num_threads(threads)
        self.stage, self.source, self.config = stage, Path(source), config
        self.model = load_checkpoint(source)
        self.optimizer = config.policy.optimizer(self.model)
        self.tokenizer = load_tokenizer(source)
        self.roller = Roller(self.tokenizer)
        self.families = build_all(config.families)
        self._evaluated = build_all({**config.families, **config.eval_families})
        self._threads = threads
        state = load_state(stage.scratch, self.model, self.optimizer) or {}
        self.first = int(state.get("step", 0))
        self.before: dict[str, float] | None = state.get("before")
        self.extra: dict[str, Any] = state.get("extra", {})

    def __enter__(self) -> Self:
        """Start the engine on the policy's weights, pass the parity gate, and evaluate what training starts from."""
        start = self.source
        if self.first:
            self.stage.print(f"resumed at step {self.first} of {self.config.steps}")
            start = self._write()
        with contextlib.ExitStack() as stack:
            self.engine = fleet(
                stack, start, self.config.engines, EngineProcess, threads=self._threads, weight_version=self.first
            )
            self.gate()
            if self.before is None:
                self.before = self.evaluate()
            self._exit = stack.pop_all()
        return self

    def __exit__(self, *exc: Any) -> None:
        self._exit.__exit__(*exc)

    def _write(self) -> Path:
        folder = self.stage.scratch / "published"
        with atomic_dir(folder) as tmp:
            save_checkpoint(self.model, tmp)
        return folder

    def publish(self, version: int) -> None:
        """Give the engine the policy's weights, through the disk, as weight version `version`."""
        self.engine.update_weights_from_disk(self._write(), weight_version=version)

    def gate(self) -> None:
        """The parity gate: engine and training log-probs of worked problems agree, or nothing is trained (ValueError)."""
        ids = []
        for family in self.families.values():
            for problem in samples(family, "train", 0, 2):
                ids.append(render_tokens(self.tokenizer, [*problem.messages, *problem.solution], close=True)[0])
        self.engine.parity_gate(self.model, ids)

    def evaluate(self) -> dict[str, float]:
        """Held-out accuracy, sampled at T = 1, of all evaluated families, by the weights the engine has."""
        seed = self.stage.rng_seed("eval")
        return evaluate_families(self.engine, self.tokenizer, self._evaluated, self.config.eval_problems, seed)

    def steps(self) -> Iterator[int]:
        """The steps that are left, with progress."""
        return iter(self.stage.progress(range(self.first, self.config.steps), label="step"))

    def advantages(self, values: Sequence[Any], step: int) -> list[Any]:
        """The values, or shuffled over the batch in the control experiment."""
        return (
            shuffled(values, self.stage.rng_seed("permute", step)) if self.config.permute_advantages else list(values)
        )

    def end_step(self, step: int, logs: dict[str, float]) -> None:
        """Publish, log, and now and then keep the resume state."""
        self.publish(step + 1)
        self.stage.log(step + 1, **logs)
        if (step + 1) % self.config.checkpoint_every == 0 and step + 1 < self.config.steps:
            save_state(self.stage.scratch, self.model, self.optimizer, step + 1, before=self.before, extra=self.extra)

    def finish(self, out: Path, **metrics: Any) -> None:
        """Evaluate, write the checkpoint, report accuracy before and after (and of the trained families together)."""
        after = self.evaluate()
        save_checkpoint(self.model, out, tokenizer_dir=self.source)
        own = list(self.families)
        mean = {name: sum(scores[f] for f in own) / len(own) for name, scores in (("b", self.before), ("a", after))}
        self.stage.print(f"held-out accuracy {mean['b']:.3f} -> {mean['a']:.3f}  before {self.before}  after {after}")
        self.stage.metric(
            accuracy_before=self.before,
            accuracy_after=after,
            own_before=mean["b"],
            own_after=mean["a"],
            own_gain=mean["a"] - mean["b"],
            **metrics,
        )
