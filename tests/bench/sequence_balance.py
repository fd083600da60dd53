"""How unevenly ranks work on real sequences, before and after balancing: data/ of a finished run of the line, no training.

    python -m tests.bench.sequence_balance                 # 16 ranks, steps of 64 sequences; prints the tables
    python -m tests.bench.sequence_balance --ranks 64 --sequences 256

Work is counted in operations (tasks/costs.py) of the GLM-5 configuration, under dense attention and under DSA, for the lengths
that this line's own data has: conversations, documents, repository-level documents, long documents. Steps are drawn in a fixed
random order; a step lasts as long as its busiest rank.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import yaml

from model.config import ModelConfig
from tasks.params import ROOT
from tasks.sequence_balance import fixed_groups, gather_bytes, imbalance, plan_groups, rank_loads, sequence_cost, share

LONGEST = 202_752  # GLM-5's context
ROOM = 32_768  # tokens of one sequence on one rank


def config(profile: str = "glm5") -> ModelConfig:
    return ModelConfig.from_params(yaml.safe_load((ROOT / f"conf/{profile}.yaml").read_text())["model"])


def real_lengths(data: Path = ROOT / "data") -> dict[str, list[int]]:
    """Tokens per sequence of what is there: {} without data."""
    found = {}
    if (data / "sft_data" / "train" / "offsets.npy").is_file():
        found["conversations"] = np.diff(np.load(data / "sft_data" / "train" / "offsets.npy")).tolist()
    if (data / "pack" / "midtrain" / "meta.json").is_file():
        from tasks.tokens import TokenSet

        tokens = TokenSet(data / "pack" / "midtrain")
        parts = {d: np.diff(tokens.shard(d).offsets).tolist() for d in tokens.domains}
        found["documents"] = [n for d in sorted(parts) if d not in ("swe", "long") for n in parts[d]]
        found |= {name: parts[d] for d, name in (("swe", "repositories"), ("long", "long documents")) if d in parts}
    return {name: [min(int(n), LONGEST) for n in lengths if n >= 2] for name, lengths in found.items()}


def skewed(count: int = 4096, seed: int = 0) -> list[int]:
    """A fixed log-normal with a tail up to the full context, as agent trajectories have."""
    drawn = np.random.default_rng(seed).lognormal(7.5, 1.4, count)
    return np.clip(drawn, 16, LONGEST).astype(int).tolist()


def steps_of(lengths: Sequence[int], size: int, most: int = 40, seed: int = 0) -> list[list[int]]:
    order = np.random.default_rng(seed).permutation(len(lengths))
    return [[lengths[i] for i in order[a : a + size]] for a in range(0, len(order) - size + 1, size)][:most]


def reordering(lengths: Sequence[int], ranks: int, size: int, sparse: bool, cfg: ModelConfig) -> dict[str, dict]:
    """Imbalance of whole sequences on single ranks, by the way they are dealt out."""
    cost = sequence_cost(cfg, sparse=sparse)
    steps = steps_of(lengths, size)
    return {
        how: imbalance([[sum(cost(s[i], 1) for i in part) for part in share(s, cost, ranks, how)] for s in steps])
        for how in ("none", "tokens", "cost")
    }


def grouping(lengths: Sequence[int], ranks: int, size: int, sparse: bool, cfg: ModelConfig) -> dict[str, dict]:
    """Context groups of one size, the least that the longest sequence fits, against groups of several sizes.

    relative_time: of all steps, by their busiest ranks, fixed groups being 1. gigabytes: what ranks receive per step (bf16).
    """
    cost = sequence_cost(cfg, sparse=sparse)
    steps = steps_of(lengths, size, most=20)
    need = next(2**k for k in range(20) if max(lengths) <= ROOM * 2**k)
    need = max(need, 2)
    plans = {
        "fixed": [fixed_groups(s, ranks, cost, need) for s in steps],
        "variable": [plan_groups(s, ranks, cost, max_tokens=ROOM) for s in steps],
    }
    loads = {name: [rank_loads(plan, ranks) for plan in one] for name, one in plans.items()}
    times = {name: sum(max(step) for step in one) for name, one in loads.items()}
    found = {name: imbalance(one) | {"relative_time": times[name] / times["fixed"]} for name, one in loads.items()}
    for name, plan in plans.items():
        sent = sum(gather_bytes(cfg, s[i], g.size) for s, one in zip(steps, plan) for g in one for i in g.sequences)
        found[name]["gigabytes"] = sent / len(steps) / 1e9
    found["fixed"]["groups"] = f"all of {need}"
    counts: dict[int, int] = {}
    for plan in plans["variable"]:
        for group in plan:
            counts[group.size] = counts.get(group.size, 0) + 1
    found["variable"]["groups"] = ", ".join(f"{n} of {s}" for s, n in sorted(counts.items()))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=16)
    parser.add_argument("--sequences", type=int, default=64, help="sequences of a step")
    args = parser.parse_args()
    cfg = config()
    sets = real_lengths() | {"log-normal (fixed)": skewed()}
    print(
        f"work of the busiest rank over the mean, and idle share; {args.ranks} ranks, {args.sequences} sequences a step\n"
    )
    print("whole sequences on single ranks        median    p99  longest | in turn       | by tokens     | by work")
    for name, lengths in sets.items():
        if len(lengths) < args.sequences:
            print(f"{name}: only {len(lengths)} sequences")
            continue
        for sparse in (False, True):
            row = reordering(lengths, args.ranks, args.sequences, sparse, cfg)
            cells = " | ".join(f"{r['max_over_mean']:5.2f}  {r['idle']:5.1%}" for r in row.values())
            kind = f"{name}, {'DSA' if sparse else 'dense'}"
            middle, high = np.percentile(lengths, [50, 99])
            print(f"{kind:38} {middle:7.0f} {high:6.0f} {max(lengths):8d} | {cells}")
    print(f"\ncontext groups (a rank holds {ROOM} tokens of a sequence); time relative to fixed groups")
    for name, lengths in sets.items():
        for sparse in (False, True):
            if len(lengths) < args.sequences:
                continue
            row = grouping(lengths, args.ranks, args.sequences, sparse, cfg)
            for how, r in row.items():
                kind = f"{name}, {'DSA' if sparse else 'dense'}, {how}"
                print(
                    f"{kind:46} {r['max_over_mean']:5.2f} idle {r['idle']:6.1%} time {r['relative_time']:5.3f} "
                    f"{r['gigabytes']:7.1f} GB  groups: {r['groups']}"
                )


if __name__ == "__main__":
    main()
