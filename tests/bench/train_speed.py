"""Training speed against transformers' GlmMoeDsaForCausalLM: same shapes and topk, one thread, one process.

    python -m tests.bench.train_speed                     # lengths 256 512 1024 2048, 8 interleaved steps each
    python -m tests.bench.train_speed --lengths 1024 --repeats 12 --profile
    python -m tests.bench.train_speed --keep-memory       # glibc gives no freed memory back, for both sides

A step is forward, backward and optimizer on 2048 tokens; the unit is tokens per CPU second of the process, so another job on the
machine matters little. The median step counts: transformers' step is bimodal under glibc's default allocator, because whether its
large temporaries are given back to the system and faulted in again (up to 300 MB a step) depends on the heap's state; the ratio
of best steps stands beside it, and `--keep-memory` removes the effect.

What each side does: embedding, MLA, the indexer's projections, scores and top-64 selection (no gradient), experts, head, mean
cross entropy over the same tokens, backward to every weight but the indexer's, and torch's fused AdamW with the same settings.
Neither trains MTP or the indexer, neither clips. Ours also counts each expert's load and computes the balance loss's value.
transformers runs dense attention under the selection's mask. Muon Split's cost stands beside the comparison, and so does a step
that also trains the indexer (KL loss on 64 query rows per sequence).
"""

import argparse
import ctypes
import time
from collections.abc import Callable
from statistics import median

import torch
import yaml

from kernels.cross_entropy import linear_cross_entropy
from model.config import ModelConfig
from model.muon import OptimConfig, build_optimizer
from model.transformer import GlmMoeDsa
from tasks.params import ROOT

TOKENS = 2048
LENGTHS = (256, 512, 1024, 2048)
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h
REQUIRED = {256: 1.8, 512: 1.8, 1024: 3.0, 2048: 3.0}  # median steps, each side as its user gets it
REQUIRED_BEST = {
    256: 1.4,
    512: 1.6,
    1024: 3.0,
    2048: 3.0,
}  # best steps: without the page faults of transformers' temporaries


def tiny() -> ModelConfig:
    params = yaml.safe_load((ROOT / "conf/tiny.yaml").read_text())["model"]
    return ModelConfig.from_params({**params, "index_topk": 64, "num_nextn_predict_layers": 0})


def our_step(cfg: ModelConfig, length: int, muon: bool = False, index_rows: int | None = None) -> Callable[[], None]:
    model = GlmMoeDsa(cfg).init_weights(0)
    if muon:
        optimizer = build_optimizer(model, OptimConfig(lr_matrix=1e-3, indexer_optimizer="adamw"))
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, fused=True)
    ids = torch.randint(0, cfg.vocab_size, (TOKENS // length, length), generator=torch.Generator().manual_seed(0))
    targets = torch.cat([ids[:, 1:], torch.full((ids.shape[0], 1), -100)], dim=1).flatten()

    def step():
        out = model(ids, attention="sparse", index_loss_rows=index_rows)
        loss = linear_cross_entropy(out.hidden_bsh.flatten(0, 1), model.lm_head.weight, targets)
        if index_rows:
            loss = loss + out.index_loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def their_step(cfg: ModelConfig, length: int, attention: str) -> Callable[[], None]:
    from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM

    torch.manual_seed(0)
    model = GlmMoeDsaForCausalLM(GlmMoeDsaConfig(**cfg.to_hf(), attn_implementation=attention)).float().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, fused=True)
    ids = torch.randint(0, cfg.vocab_size, (TOKENS // length, length), generator=torch.Generator().manual_seed(0))

    def step():
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def keep_memory() -> None:
    """Tell glibc to take every block from the heap and to keep what is freed (mallopt; nothing happens on other C libraries)."""
    if hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(M_MMAP_THRESHOLD, 1 << 30)
        libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def measure(lengths=LENGTHS, repeats: int = 8) -> list[dict[str, float]]:
    """One row per length: tokens per CPU second of each contestant (median step), `ratio` = ours / the better of theirs, and
    `ratio_best`, the same of the best steps.

    Contestants take turns, so that a busy moment of the machine does not fall on one of them alone; the first round is warm-up.
    """
    torch.set_num_threads(1)
    cfg, rows = tiny(), []
    for length in lengths:
        steps = {
            "ours": our_step(cfg, length),
            "hf_eager": their_step(cfg, length, "eager"),
            "hf_sdpa": their_step(cfg, length, "sdpa"),
            "ours_muon_split": our_step(cfg, length, muon=True),
            "ours_muon_split_kl64": our_step(cfg, length, muon=True, index_rows=64),
        }
        seconds: dict[str, list[float]] = {name: [] for name in steps}
        for turn in range(repeats + 1):
            for name, step in steps.items():
                start = time.process_time()
                step()
                if turn:
                    seconds[name].append(time.process_time() - start)
        row: dict[str, float] = {"length": length}
        row |= {name: TOKENS / median(s) for name, s in seconds.items()}
        for key, of in ("ratio", median), ("ratio_best", min):
            row[key] = min(of(seconds["hf_eager"]), of(seconds["hf_sdpa"])) / of(seconds["ours"])
        rows.append(row)
        print("  ".join(f"{k} {v:.2f}" if "ratio" in k else f"{k} {v:.0f}" for k, v in row.items()), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--keep-memory", action="store_true", help="glibc gives no freed memory back, for both sides")
    parser.add_argument("--profile", action="store_true", help="also print where our step's time goes")
    args = parser.parse_args()
    if args.keep_memory:
        keep_memory()
    measure(args.lengths, args.repeats)
    if args.profile:
        from torch.profiler import ProfilerActivity, profile

        for length in args.lengths:
            step = our_step(tiny(), length)
            step()
            with profile(activities=[ProfilerActivity.CPU]) as prof:
                step()
            print(f"length {length}\n{prof.key_averages().table(sort_by='self_cpu_time_total', row_limit=30)}")


if __name__ == "__main__":
    main()
