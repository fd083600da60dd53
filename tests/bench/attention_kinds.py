"""CPU time of one attention layer by kind and length: forward and backward, one thread, one process, tiny's sizes.

    python -m tests.bench.attention_kinds                       # lengths 512 1024 2048 4096
    python -m tests.bench.attention_kinds --lengths 2048 8192 --repeats 5

Full attention grows with the square of the length; a window of 256 keys, DSA's 64 keys (beside its indexer, which still reads
everything) and the recurrences grow with the length. Milliseconds per 1000 tokens, the best of interleaved turns.
"""

import argparse
import time
from collections.abc import Callable

import torch

from model.block import build_attention
from model.config import ModelConfig
from model.transformer import GlmMoeDsa
from tasks.params import compose

LENGTHS = (512, 1024, 2048, 4096)
KINDS = {
    "mla": {},
    "dsa": {},
    "gqa": {"attention": "gqa", "num_key_value_heads": 2, "head_dim": 32},
    "swa": {"layer_types": ["swa"] * 4, "sliding_window": 256},
    "gdn": {"layer_types": ["gdn"] * 4},
    "simple_gdn": {"layer_types": ["simple_gdn"] * 4},
}


def layer_step(kind: str, length: int) -> Callable[[], None]:
    cfg = ModelConfig.from_params(compose("tiny")["model"] | {"max_position_embeddings": 1 << 17} | KINDS[kind])
    torch.manual_seed(0)
    model = GlmMoeDsa(cfg)
    module = build_attention(cfg, 0)
    for p in module.parameters():
        torch.nn.init.normal_(p, std=0.1)
    x = torch.randn(1, length, cfg.hidden_size, requires_grad=True)
    cis = model.rope(torch.arange(length)[None])
    attention = "sparse" if kind == "dsa" else "dense"

    def step():
        module(x, cis, attention=attention)[0].square().sum().backward()

    return step


def measure(lengths=LENGTHS, repeats: int = 3, kinds=tuple(KINDS)) -> list[dict[str, float]]:
    """One row per length: milliseconds of CPU time per 1000 tokens of each kind."""
    torch.set_num_threads(1)
    rows = []
    for length in lengths:
        steps = {kind: layer_step(kind, length) for kind in kinds}
        best = dict.fromkeys(steps, float("inf"))
        for turn in range(repeats + 1):
            for kind, step in steps.items():
                start = time.process_time()
                step()
                if turn:
                    best[kind] = min(best[kind], time.process_time() - start)
        rows.append({"length": length} | {kind: 1e6 * seconds / length for kind, seconds in best.items()})
        print("  ".join(f"{k} {v:.0f}" if k == "length" else f"{k} {v:.1f}" for k, v in rows[-1].items()), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    measure(args.lengths, args.repeats)


if __name__ == "__main__":
    main()
