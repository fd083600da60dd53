"""One process of the DSA life-cycle test: runs stages under ROOT and records every step, digest by digest.

    python -m tests.tasks.dsa_child ROOT RECORDS [--keep-in-memory] [--die STAGE:STEP] STAGE ...

A record is one JSON line per optimizer step: loss and logs, batch, gradients as the optimizer gets them, then weights,
optimizer state and counters after it. --keep-in-memory hands the model from stage to stage as it is, so that nothing passes
through a file: what the runs with exits in between are compared with. --die ends the process by SIGKILL between a step's
backward and its update.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
from pathlib import Path

import torch
import xxhash

from model.muon import MuonSplit
from tasks import dsa_adapt, dsa_warmup, lm_run, reasoning_rl, rl_run, spread_output, trainer
from tasks.problems import Problem
from tasks.stage import run_stage_for_test
from tests.tasks.lm_case import stage_config
from tests.tasks.post_training import RUN, LocalEngine

LM = {
    "tokens": 6 * 2 * 64,
    "seq_len": 64,
    "rows": 2,
    "mtp": {"depth": 2},
    "recall_rows": 8,
    "recall_windows": 2,
    "index_rows": 16,
}
LOOP = {"checkpoint_every": 2, "log_every": 1, "router_bias_rate": 0.01}
STAGES = {
    "dsa_warmup": (
        dsa_warmup,
        stage_config(**LM, loop=LOOP, optimizer={"lr_matrix": 1e-2, "indexer_optimizer": "adamw", "weight_decay": 0.0}),
        {"data/midtrain/s3": "data/midtrain/s3", "data/pack/midtrain": "data/pack/midtrain"},
    ),
    "dsa_adapt": (
        dsa_adapt,
        stage_config(**LM, loop=LOOP, optimizer={"lr_matrix": 1e-3, "lr_indexer": 1e-3, "indexer_optimizer": "adamw"}),
        {"data/dsa_warmup": "data/dsa_warmup", "data/pack/midtrain": "data/pack/midtrain"},
    ),
    "reasoning_rl": (
        reasoning_rl,
        {**RUN, "families": {"addition": {}, "quantities": {}}},
        {"data/sft": "data/dsa_adapt"},
    ),
}


def digest(tensors) -> str:
    value = xxhash.xxh3_128()
    for name, tensor in sorted(tensors.items()):
        value.update(name.encode())
        value.update(
            tensor.detach().contiguous().view(torch.uint8).numpy().tobytes() if tensor.dim() else str(tensor).encode()
        )
    return value.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("root", type=Path)
    parser.add_argument("records", type=Path)
    parser.add_argument("--keep-in-memory", action="store_true")
    parser.add_argument("--die", default="")
    parser.add_argument("stages", nargs="+")
    args = parser.parse_args()
    torch.set_num_threads(1)
    now: dict = {}
    die_stage, _, die_step = args.die.partition(":")

    # a policy of random weights solves nothing: it is paid for an even number of characters
    Problem.verify = lambda self, text: float(len(text) % 2 == 0)
    rl_run.EngineProcess = LocalEngine

    real_step = MuonSplit.step

    def step(self, closure=None):
        params = {self.names[p]: p for group in self.param_groups for p in group["params"]}
        now["gradients"] = {n: digest({n: p.grad}) for n, p in params.items() if p.grad is not None}
        if now["stage"] == die_stage and now["step"] == int(die_step):
            os.kill(os.getpid(), signal.SIGKILL)
        real_step(self, closure)
        now["state"], now["owned"] = digest(self.state_tensors()), digest(params)

    MuonSplit.step = step

    def record(model, **more):
        row = {**now, **more, "weights": digest(model.state_dict())}
        with open(args.records, "a") as file:
            file.write(json.dumps(row, sort_keys=True) + "\n")

    real_one = trainer.Trainer._one_step

    def one_step(self):
        batches = self.batches(self.step)
        now.update(step=self.step, batch=digest({f"{i}.{k}": v for i, b in enumerate(batches) for k, v in b.items()}))
        logs = real_one(self)
        trained = sorted(n for n, p in self.model.named_parameters() if p.requires_grad)
        record(self.model, logs=logs, counters=dict(self.counters), trained=trained)
        return logs

    trainer.Trainer._one_step = one_step

    real_steps, real_end = rl_run.PolicyRun.steps, rl_run.PolicyRun.end_step

    def steps(self):
        for number in real_steps(self):
            stage = now["stage"]
            now.clear()
            now.update(stage=stage, step=number, gradients={})
            yield number

    def end_step(self, number, logs):
        record(self.model, logs=logs, state_now=digest(self.optimizer.state_tensors()))
        real_end(self, number, logs)

    real_update = reasoning_rl.update

    def update(model, optimizer, samples, *rest):
        now["batch"] = xxhash.xxh3_128(
            json.dumps([[s.ids, s.loss_mask, s.reward] for s in samples]).encode()
        ).hexdigest()
        return real_update(model, optimizer, samples, *rest)

    reasoning_rl.update = update
    rl_run.PolicyRun.steps, rl_run.PolicyRun.end_step = steps, end_step

    if args.keep_in_memory:
        kept: dict = {}

        def keep(real):
            def save(model, directory, *rest, **options):
                kept["model"] = model
                real(model, directory, *rest, **options)

            return save

        def take(real):
            def load(source, *rest):
                if "model" not in kept:
                    return real(source, *rest)
                for p in kept["model"].parameters():  # each stage freezes for itself
                    p.requires_grad_(True)
                    p.grad = None
                return kept["model"]

            return load

        spread_output.save_checkpoint = keep(spread_output.save_checkpoint)
        lm_run.load_checkpoint = take(lm_run.load_checkpoint)
        rl_run.load_checkpoint = take(rl_run.load_checkpoint)

    for name in args.stages:
        now["stage"] = name
        module, config, deps = STAGES[name]
        found = {declared: args.root / path for declared, path in deps.items()}
        model = {"model": {}, "threads": 1}
        run_stage_for_test(module, config, model, found, [f"data/{name}"], name=name, seed=3, tmp=args.root)


if __name__ == "__main__":
    main()
