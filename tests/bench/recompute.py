"""What recomputation saves and costs: live bytes at their peak, and CPU time of a step, beside a plain step.

    python -m tests.bench.recompute                       # the tiny model at 2 x 1024 tokens, dense, with MTP of depth 1
    python -m tests.bench.recompute --length 2048 --rows 1

Peak: bytes of all tensors that operations make and that are alive at once, during forward and backward, without weights and
gradients' own storage counted apart (both are in every row). Time: best of the interleaved steps, CPU seconds of the process.
"""

import argparse
import time

import torch

from model.recompute import HostOffload, recomputing
from model.transformer import GlmMoeDsa
from tasks.objectives import LanguageModeling
from tests.bench.train_speed import tiny
from tests.model.peak import Peak

KINDS = ("none", "selective", "block")


def measure(length: int = 1024, rows: int = 2, repeats: int = 4) -> dict[str, dict[str, float]]:
    """{kind: {held_mib, peak_mib, cpu_s, moved_mib}}; held: alive after the forward, moved: what offload would send out."""
    torch.set_num_threads(1)
    model = GlmMoeDsa(tiny_with_mtp()).init_weights(0)
    goal = LanguageModeling(mtp_depth=1, balance_coef=1e-4)
    ids = torch.randint(0, model.cfg.vocab_size, (rows, length + 1), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids_bs": ids[:, :-1], "targets_bs": ids[:, 1:]}
    found = {kind: {"cpu_s": float("inf")} for kind in KINDS}
    for kind in KINDS:
        with recomputing(model, kind), Peak() as peak:
            loss, _ = goal(model, batch, 0)
            found[kind]["held_mib"] = peak.live / 2**20
            loss.backward()
        found[kind]["peak_mib"] = peak.peak / 2**20
        model.zero_grad()
        with recomputing(model, kind), HostOffload(model, copy_on_cpu=True) as moved:
            goal(model, batch, 0)[0].backward()
        found[kind]["moved_mib"] = moved.moved_bytes / 2**20
        model.zero_grad()
    for _ in range(repeats):
        for kind in KINDS:
            start = time.process_time()
            with recomputing(model, kind):
                goal(model, batch, 0)[0].backward()
            found[kind]["cpu_s"] = min(found[kind]["cpu_s"], time.process_time() - start)
            model.zero_grad()
    return found


def tiny_with_mtp():
    import dataclasses

    return dataclasses.replace(tiny(), num_nextn_predict_layers=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=2)
    args = parser.parse_args()
    found = measure(args.length, args.rows)
    plain = found["none"]
    print(
        f"{'recompute':<10} {'held MiB':>9} {'peak MiB':>9} {'of plain':>9} {'CPU s':>7} {'of plain':>9} {'to host MiB':>12}"
    )
    for kind, row in found.items():
        print(
            f"{kind:<10} {row['held_mib']:>9.1f} {row['peak_mib']:>9.1f} {row['peak_mib'] / plain['peak_mib']:>9.2f} "
            f"{row['cpu_s']:>7.2f} {row['cpu_s'] / plain['cpu_s']:>9.2f} {row['moved_mib']:>12.1f}"
        )


if __name__ == "__main__":
    main()
