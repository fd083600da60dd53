"""Does each RL stage raise held-out accuracy, over seeds, and does a control with permuted advantages not?

Starts from the checkpoints that the line left in data/ and from params.yaml; every run is the stage itself in a scratch
directory, with its own seed for problems, sampling and evaluation. Writes one JSON file and prints a table.

    python -m tests.bench.rl_seeds                                    # three seeds and one control of each stage
    python -m tests.bench.rl_seeds --stages general_rl --seeds 0 1 2 --controls 0 --out work/rl_seeds.json
"""

from __future__ import annotations

import argparse
import importlib
import json
import resource
import sys
import tempfile
from pathlib import Path

from tasks.files import atomic_write
from tasks.params import ROOT, load_params
from tasks.stage import run_stage_for_test

STARTS = {
    "reasoning_rl": ["data/sft"],
    "agentic_rl": ["data/reasoning_rl"],
    "general_rl": ["data/agentic_rl", "data/reward_model"],
}


def cpu_seconds() -> float:
    """CPU time of this process and of the engines it has ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


def run_once(name: str, section: dict, seed: int, permute: bool, data: Path, threads: int) -> dict:
    """One run of a stage; returns accuracies before and after, and the CPU seconds it took."""
    module = importlib.import_module(f"tasks.{name}")
    config = {**section, "permute_advantages": permute, "eval_families": {}}
    began = cpu_seconds()
    with tempfile.TemporaryDirectory() as folder:
        tmp = Path(folder)
        deps = {path: data / path.removeprefix("data/") for path in STARTS[name]}
        run_stage_for_test(module, config, {"threads": threads}, deps, [f"data/{name}"], seed=seed, tmp=tmp)
        metrics = json.loads((tmp / f"metrics/{name}.json").read_text())
    return {
        "stage": name,
        "seed": seed,
        "control": permute,
        "before": metrics["own_before"],
        "after": metrics["own_after"],
        "families_before": metrics["accuracy_before"],
        "families_after": metrics["accuracy_after"],
        "cpu_seconds": round(cpu_seconds() - began, 1),
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stages", nargs="+", default=list(STARTS), choices=list(STARTS))
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--controls", nargs="*", type=int, default=[0], help="seeds of the control runs")
    parser.add_argument("--data", type=Path, default=ROOT / "data", help="directory with the stages' outputs")
    parser.add_argument("--out", type=Path, default=ROOT / "work/rl_seeds.json")
    options = parser.parse_args(arguments)
    params = load_params()
    runs = []
    for name in options.stages:
        if name not in params:
            parser.error(f"params.yaml has no section {name}")
        for permute, seeds in ((False, options.seeds), (True, options.controls)):
            for seed in seeds:
                runs.append(run_once(name, params[name], seed, permute, options.data, int(params.get("threads", 1))))
                atomic_write(options.out, json.dumps(runs, indent=2) + "\n")
    print(f"{'stage':<14} {'run':<10} {'before':>7} {'after':>7} {'gain':>7} {'cpu s':>7}")
    for run in runs:
        label = ("control " if run["control"] else "seed ") + str(run["seed"])
        gain = run["after"] - run["before"]
        print(
            f"{run['stage']:<14} {label:<10} {run['before']:7.3f} {run['after']:7.3f} {gain:+7.3f} {run['cpu_seconds']:7.1f}"
        )
    failed = []
    for name in options.stages:
        for permute in (False, True):
            gains = [r["after"] - r["before"] for r in runs if r["stage"] == name and r["control"] == permute]
            if gains:
                mean = sum(gains) / len(gains)
                good = mean < 0.05 if permute else mean >= 0.15
                print(
                    f"{name:<14} {'control' if permute else 'mean gain'} {mean:+.3f} over {len(gains)} {'' if good else 'MISSED'}"
                )
                failed += [] if good else [name]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
