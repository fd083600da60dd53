"""MLA pre-processing of a decoding step: the fused CPU form against the thirteen steps in turn, same process, one thread.

python -m tests.bench.mlapo                 # batches 1 to 512 at the tiny profile's sizes
"""

import argparse
import math
import time

import torch

from kernels import paths
from kernels.mlapo import PreprocessWeights, mla_preprocess
from kernels.rope import rope_cis

HIDDEN, Q, LATENT, NOPE, ROPE, HEADS, EXTRA = 128, 96, 64, 24, 8, 4, 36


def weights() -> PreprocessWeights:
    g = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=g) * 0.1

    return PreprocessWeights(
        1 + normal(HIDDEN), normal(Q + LATENT + ROPE + EXTRA, HIDDEN), 1 + normal(Q), normal(HEADS * (NOPE + ROPE), Q),
        normal(HEADS, NOPE, LATENT), 1 + normal(LATENT), 1e-5, 1e-6,
    )  # fmt: skip


@torch.inference_mode()
def measure(batch: int, turns: int = 30, calls: int = 10) -> dict[str, float]:
    """Microseconds of a call by path (best of turns, in turn), and `ratio` = reference / cpu."""
    torch.set_num_threads(1)
    w, x = weights(), torch.randn(batch, HIDDEN, generator=torch.Generator().manual_seed(1))
    cis, slots = rope_cis(torch.arange(batch), ROPE, 1e6), torch.arange(batch) * 64 + 40
    cache = torch.zeros(batch * 64, LATENT + ROPE)
    best = dict.fromkeys(("reference", "cpu"), math.inf)
    for _ in range(turns):
        for path in best:
            with paths.force(mla_preprocess=path):
                start = time.process_time()
                for _ in range(calls):
                    mla_preprocess(x, w, cis, cache, slots)
                best[path] = min(best[path], (time.process_time() - start) / calls * 1e6)
    row = {"batch": batch, **best, "ratio": best["reference"] / best["cpu"]}
    print("  ".join(f"{k} {v:.2f}" if k == "ratio" else f"{k} {v:.0f}" for k, v in row.items()), flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 128, 512])
    for batch in parser.parse_args().batches:
        measure(batch)


if __name__ == "__main__":
    main()
