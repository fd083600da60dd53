"""What resume checkpoints cost: CPU and wall time of writing, hashing and checking, in the loop and beside it.

    python -m tests.bench.checkpointing              # the tiny model with optimizer state
    python -m tests.bench.checkpointing --mib 256    # as if the model were that large

"bare" writes the same files without manifest and hashes. "blocked" is how long the training loop waits (wall time).
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from model.muon import OptimConfig, build_optimizer
from model.transformer import GlmMoeDsa
from tasks.files import atomic_dir
from tasks.resume import ResumeStore, check_checkpoint
from tests.bench.train_speed import tiny


def tiny_files() -> dict[str, dict[str, torch.Tensor]]:
    model = GlmMoeDsa(tiny()).init_weights(0)
    optimizer = build_optimizer(model, OptimConfig())
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_tensors()}


def measure(files: dict[str, dict[str, torch.Tensor]], repeats: int = 5) -> dict[str, dict[str, float]]:
    """{way: {cpu_ms, blocked_ms}} per checkpoint, the best of interleaved repeats; ways: bare, checked, background, verify."""
    best: dict[str, dict[str, float]] = {}

    def note(way: str, cpu: float, wall: float) -> None:
        row = best.setdefault(way, {"cpu_ms": float("inf"), "blocked_ms": float("inf")})
        row["cpu_ms"], row["blocked_ms"] = min(row["cpu_ms"], 1e3 * cpu), min(row["blocked_ms"], 1e3 * wall)

    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        stores = {name: ResumeStore(root / name, 1, print, name == "background") for name in ("checked", "background")}
        for store in stores.values():
            store.folder.mkdir()
        for step in range(repeats):
            cpu, wall = time.process_time(), time.monotonic()
            with atomic_dir(root / "bare" / f"step-{step:08d}") as out:
                for name, tensors in files.items():
                    save_file({k: v.contiguous() for k, v in tensors.items()}, out / f"{name}.safetensors")
                (out / "trainer.json").write_text(json.dumps({"step": step}))
            note("bare", time.process_time() - cpu, time.monotonic() - wall)
            for name, store in stores.items():
                cpu, wall = time.process_time(), time.monotonic()
                store.save(step, files, {"step": step})
                blocked = time.monotonic() - wall
                store.wait()
                note(name, time.process_time() - cpu, blocked)
            cpu, wall = time.process_time(), time.monotonic()
            check_checkpoint(root / "checked" / f"step-{step:08d}")
            note("verify", time.process_time() - cpu, time.monotonic() - wall)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, help="instead of the tiny model: tensors of this size together")
    args = parser.parse_args()
    torch.set_num_threads(1)
    files = {"model": {"w": torch.randn(args.mib << 18)}, "optimizer": {}} if args.mib else tiny_files()
    size = sum(t.nbytes for tensors in files.values() for t in tensors.values()) / 2**20
    print(f"{size:.1f} MiB per checkpoint")
    for way, row in measure(files).items():
        print(f"{way:<11} CPU {row['cpu_ms']:8.1f} ms   blocked {row['blocked_ms']:8.1f} ms")


if __name__ == "__main__":
    main()
