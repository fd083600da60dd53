"""What resume checkpoints cost: CPU and wall time of writing, hashing and checking, in the loop and beside it.

    python -m tests.bench.checkpointing                        # the tiny model with optimizer state, one process
    python -m tests.bench.checkpointing --mib 256              # as if the model were that large
    python -m tests.bench.checkpointing --ranks 2 --hidden 512 # ranks write what they own, against gathering on rank 0
    python -m tests.bench.checkpointing --profile glm5         # what each of many ranks would write of the optimizer state

"bare" writes the same files without manifest and hashes. "blocked" is how long the training loop waits (wall time). With
--ranks, experts are spread over all of them; "gathered" is what was done before: weights and state joined on rank 0, which
writes them. received: bytes that came to a rank from others; peak: growth of its resident memory (Linux) while saving.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml
from safetensors.torch import save_file

from model.config import ModelConfig
from model.muon import OptimConfig, build_optimizer
from model.muon_plan import plan_units
from model.state_parts import Piece, gather_pieces
from model.transformer import GlmMoeDsa
from tasks.files import atomic_dir
from tasks.parallel import ParallelSettings
from tasks.params import ROOT
from tasks.resume import ResumeStore, check_checkpoint
from tasks.resume_files import write_end, write_part
from tests.bench.train_speed import tiny
from tests.model.ranks import run_ranks
from tests.tasks import lm_case
from tests.tasks.resume_case import Spread, reference

RECEIVING = ("recv", "all_gather", "broadcast", "gather", "all_reduce", "reduce")


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


# ---- several ranks


def _memory(key: str) -> int:
    """Bytes of /proc/self/status; 0 where there is none."""
    try:
        text = Path("/proc/self/status").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in text.splitlines() if line.startswith(key)), 0)


def _watched(act: Callable[[], None]) -> dict[str, float]:
    """CPU and wall seconds of an action, bytes received by collectives, growth of resident memory."""
    real, got = {name: getattr(dist, name) for name in RECEIVING}, [0]

    def note(function: Any) -> Any:
        def call(first: Any, *rest: Any, **options: Any) -> Any:
            got[0] += sum(t.nbytes for t in (first if isinstance(first, list) else [first]))
            return function(first, *rest, **options)

        return call

    for name, function in real.items():
        setattr(dist, name, note(function))
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    except OSError:
        pass
    before, cpu, wall = _memory("VmRSS"), time.process_time(), time.monotonic()
    act()
    row = {"cpu": time.process_time() - cpu, "wall": time.monotonic() - wall, "received": float(got[0])}
    for name, function in real.items():
        setattr(dist, name, function)
    return row | {"peak": float(max(0, _memory("VmHWM") - before))}


def _on_rank(rank: int, world: int, folder: Path, hidden: int, repeats: int) -> dict[str, Any]:
    lm_case.MODEL.update(hidden_size=hidden, moe_intermediate_size=hidden, n_routed_experts=8)
    spread = Spread(folder / "owned", ParallelSettings(expert=world)).fill(*reference())

    def gathered(step: int) -> None:
        parts = {
            "model": spread.layout.whole(spread.model.state_dict()),
            "optimizer": gather_pieces(spread.optimizer.owned_state(), spread.ranks.control),
        }
        if rank == 0:
            with atomic_dir(folder / "gathered" / f"step-{step:08d}") as out:
                rows = {
                    f"{stem}.safetensors": write_part(
                        out / f"{stem}.safetensors", [Piece.whole(*item) for item in tensors.items()]
                    )
                    for stem, tensors in parts.items()
                }
                write_end(out, rows, {"step": step})
        spread.ranks.first(None)  # nobody trains on while the others write

    found: dict[str, list[dict[str, float]]] = {"gathered": [], "owned": []}
    for step in range(repeats):
        found["gathered"].append(_watched(lambda step=step: gathered(step)))
        found["owned"].append(_watched(lambda step=step: spread.save(step)))
    best = {
        way: {key: (max if key == "peak" else min)(row[key] for row in rows) for key in rows[0]}
        for way, rows in found.items()
    }
    return best | {"owns": sum(p.nbytes for pieces in spread.files().values() for p in pieces)}


def compare_ranks(world: int, hidden: int, repeats: int = 3) -> list[dict[str, Any]]:
    """Per rank: {gathered, owned: {cpu, wall [s], received, peak [bytes]}, owns [bytes]}; the best repeat (peak: the worst)."""
    with tempfile.TemporaryDirectory() as folder:
        return run_ranks(world, _on_rank, Path(folder), hidden, repeats, limit=300)


def planned(profile: str, worlds: tuple[int, ...]) -> list[tuple[int, int, float, float]]:
    """(ranks, parts, bytes of all fp32 optimizer state, bytes of the rank that owns most) for a profile's model."""
    model_config = ModelConfig.from_params(yaml.safe_load((ROOT / f"conf/{profile}.yaml").read_text())["model"])
    with torch.device("meta"):
        optimizer = build_optimizer(GlmMoeDsa(model_config), OptimConfig())
    groups = optimizer.param_groups
    trained = [(n, p, g["kind"]) for g in groups for n, p in zip(g["names"], g["params"], strict=True)]
    rows = []
    for world in worlds:
        own, parts = [0.0] * world, 0
        for unit in plan_units(trained, model_config, "split", world):
            slots = 1 if trained[unit.param][2] == "muon" else 2  # momentum, or two moments
            own[unit.owner] += 4 * slots * unit.numel
            parts += slots
        rows.append((world, parts, sum(own), max(own)))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, help="instead of the tiny model: tensors of this size together")
    parser.add_argument("--ranks", type=int, help="compare the ways of several ranks")
    parser.add_argument("--hidden", type=int, default=512, help="with --ranks: width of the model")
    parser.add_argument("--profile", help="of conf/: plan only")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.profile:
        for world, parts, total, most in planned(args.profile, (64, 256, 1024)):
            print(f"{world:5} ranks: {total / 1e9:.0f} GB in {parts} parts; the largest owner {most / 1e9:.1f} GB")
        return
    if args.ranks:
        found = compare_ranks(args.ranks, args.hidden)
        print(f"{sum(row['owns'] for row in found) / 2**20:.1f} MiB per checkpoint; MiB")
        for rank, row in enumerate(found):
            for way in ("gathered", "owned"):
                one = row[way]
                print(
                    f"rank {rank}  {way:<9} CPU {one['cpu']:6.2f} s  wall {one['wall']:6.2f} s  received "
                    f"{one['received'] / 2**20:8.2f}  peak {one['peak'] / 2**20:8.1f}  owns {row['owns'] / 2**20:8.1f}"
                )
        cpu = {way: sum(row[way]["cpu"] for row in found) for way in ("gathered", "owned")}
        print(f"CPU of all ranks, owned to gathered: {cpu['owned'] / cpu['gathered']:.2f}")
        return
    files = {"model": {"w": torch.randn(args.mib << 18)}, "optimizer": {}} if args.mib else tiny_files()
    size = sum(t.nbytes for tensors in files.values() for t in tensors.values()) / 2**20
    print(f"{size:.1f} MiB per checkpoint")
    for way, row in measure(files).items():
        print(f"{way:<11} CPU {row['cpu_ms']:8.1f} ms   blocked {row['blocked_ms']:8.1f} ms")


if __name__ == "__main__":
    main()
