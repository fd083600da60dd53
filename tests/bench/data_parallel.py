"""Does a second process pay at the tiny profile? Wall clock and CPU seconds of a step, one process against two gloo ranks.

    python -m tests.bench.data_parallel                        # every stage of conf/tiny.yaml that has two rows or more
    python -m tests.bench.data_parallel --stages pretrain sft --steps 24 --rounds 3 --ranks 2

The real trainer on the profile's model, rows, lengths and MTP pattern, with random tokens; one thread a process. Rounds of one
process and of several alternate. `speed-up` is wall clock against wall clock and means something on a machine with as many
free cores as ranks; `CPU` is the CPU time of all ranks over that of one process, and holds on a busy machine, too.
"""

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import yaml

from model.config import ModelConfig
from model.muon import build_optimizer
from model.transformer import GlmMoeDsa
from tasks import sft
from tasks.objectives import LanguageModeling
from tasks.parallel import current
from tasks.params import ROOT
from tasks.settings import LoopSettings, OptimizerSettings
from tasks.trainer import Trainer, split_batch
from tests.model.ranks import run_ranks

STAGES = ("pretrain", "midtrain-s1", "midtrain-s2", "sft")


class _Stage:
    def __init__(self) -> None:
        self.scratch = Path(tempfile.mkdtemp(prefix="bench-"))
        self.evidence = self.scratch

    def print(self, message: str) -> None: ...


class _Samples:
    """2,000 conversations of 20 to 90 tokens, the length of the tiny profile's problems."""

    def __len__(self) -> int:
        return 2000

    def __getitem__(self, i: int):
        rng = np.random.default_rng(i)
        ids = rng.integers(0, 2000, int(rng.integers(20, 90)))
        return "x", ids, (np.arange(len(ids)) >= len(ids) // 2).astype(int)


def make_trainer(name: str) -> Trainer:
    """The trainer of a stage of conf/tiny.yaml on this rank."""
    profile = yaml.safe_load((ROOT / "conf/tiny.yaml").read_text())
    base, _, variant = name.partition("-")
    section = profile[base].get(variant) or profile[base].get("general") or profile[base]
    model = GlmMoeDsa(ModelConfig.from_params(profile["model"])).init_weights(0)
    settings, ranks = OptimizerSettings(**section["optimizer"]), current()
    if base == "sft":
        data = _Samples()
        objective, train = sft.objective, "backbone"

        def batches(step):
            every = lambda lengths: range(ranks.rank, len(lengths), ranks.world)  # noqa: E731
            return sft.sft_batches(data, section["batch_samples"], 4096, 1, step, every)
    else:
        mtp, train = section["mtp"], "all"
        objective = LanguageModeling(mtp_depth=mtp["depth"], mtp_lambda=mtp["weight"], mtp_every=mtp["every"])

        def batches(step):
            rows, size = section["rows"], section["seq_len"]
            ids = torch.randint(0, 2000, (rows, size + 1), generator=torch.Generator().manual_seed(step))
            share = {
                "input_ids_bs": ids[ranks.rank :: ranks.world, :-1],
                "targets_bs": ids[ranks.rank :: ranks.world, 1:],
            }
            return split_batch(share, rows)

    return Trainer(
        _Stage(), model, build_optimizer(model, settings.to_config(train)), objective, batches,
        steps=10**6, lr_factor=lambda step: 0.1, settings=LoopSettings(),
    )  # fmt: skip


def timed(rank: int, world: int, name: str, steps: int) -> tuple[float, float]:
    """(wall, CPU) seconds of a step on this rank."""
    trainer = make_trainer(name)
    for _ in range(2):
        trainer._one_step()
        trainer.step += 1
    current().sum_(0.0)
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(steps):
        trainer._one_step()
        trainer.step += 1
    return (time.perf_counter() - wall) / steps, (time.process_time() - cpu) / steps


def measure(stages=STAGES, steps: int = 16, rounds: int = 2, ranks: int = 2) -> list[dict]:
    """One row per stage: medians over rounds of seconds per step, speed-up, and CPU of all ranks over one process's."""
    rows = []
    for name in stages:
        one, many = [], []
        for _ in range(rounds):
            one.append(run_ranks(1, timed, name, steps, limit=600)[0])
            many.append(run_ranks(ranks, timed, name, steps, limit=600))
        wall_one, cpu_one = (statistics.median(r[i] for r in one) for i in (0, 1))
        wall_many = statistics.median(max(r[0] for r in run) for run in many)
        cpu_many = statistics.median(sum(r[1] for r in run) for run in many)
        rows.append(
            {
                "stage": name, "wall_one": wall_one, "wall_many": wall_many, "speed_up": wall_one / wall_many,
                "cpu_one": cpu_one, "cpu_many": cpu_many, "cpu_ratio": cpu_many / cpu_one,
            }
        )  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", nargs="+", default=list(STAGES))
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2)
    args = parser.parse_args()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; milliseconds of a step")
    print(
        f"{'stage':<12} {'1 process':>10} {f'{args.ranks} ranks':>10} {'speed-up':>9} {'CPU of one':>11} {'CPU of all':>11}"
    )
    for row in measure(args.stages, args.steps, args.rounds, args.ranks):
        print(
            f"{row['stage']:<12} {1e3 * row['wall_one']:10.1f} {1e3 * row['wall_many']:10.1f} {row['speed_up']:8.2f}x "
            f"{1e3 * row['cpu_one']:11.1f} {1e3 * row['cpu_many']:11.1f} {row['cpu_ratio']:7.3f}x"
        )


if __name__ == "__main__":
    main()
