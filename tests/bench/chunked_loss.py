"""Output projection with cross entropy: memory and time of the chunked form against the plain one and torch's own.

    python -m tests.bench.chunked_loss                    # vocabulary 32768, 4096 tokens, hidden 256, one thread
    python -m tests.bench.chunked_loss --dtype bfloat16 --hidden 512

Forward and backward. Time is the median of interleaved CPU seconds; memory is the highest resident size above what weights,
inputs and their gradients need, each form in a process of its own.
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

from kernels.cross_entropy import linear_cross_entropy
from tasks.params import ROOT

MAX_MEMORY, MAX_TIME = 0.1, 0.8  # of the plain form


def plain(hidden_nh, weight_vh, targets_n):
    return F.cross_entropy((hidden_nh @ weight_vh.T).float(), targets_n)


FORMS: dict[str, Callable[..., torch.Tensor]] = {"plain": plain, "chunked": linear_cross_entropy}
if hasattr(F, "linear_cross_entropy"):
    FORMS["torch"] = F.linear_cross_entropy


def inputs(tokens: int, vocab: int, hidden: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden_nh = torch.randn(tokens, hidden, generator=generator).to(dtype).requires_grad_()
    weight_vh = (torch.randn(vocab, hidden, generator=generator) * 0.05).to(dtype).requires_grad_()
    return hidden_nh, weight_vh, torch.randint(0, vocab, (tokens,), generator=generator)


def step(form: str, data: tuple[torch.Tensor, ...]) -> float:
    """One forward and backward; returns the loss."""
    hidden_nh, weight_vh, targets_n = data
    hidden_nh.grad = weight_vh.grad = None
    loss = FORMS[form](hidden_nh, weight_vh, targets_n)
    loss.backward()
    return float(loss.detach())


def times(data: tuple[torch.Tensor, ...], repeats: int) -> dict[str, float]:
    """Median CPU seconds of each form, all taking turns."""
    seconds: dict[str, list[float]] = {form: [] for form in FORMS}
    for turn in range(repeats + 1):
        for form in FORMS:
            began = time.process_time()
            step(form, data)
            if turn:  # the first warms caches and allocators
                seconds[form].append(time.process_time() - began)
    return {form: statistics.median(values) for form, values in seconds.items()}


def extra_memory(form: str, args: argparse.Namespace) -> float:
    """MB of resident memory at the peak above the base: weights, inputs and gradients of both."""
    options = [
        "--tokens",
        str(args.tokens),
        "--vocab",
        str(args.vocab),
        "--hidden",
        str(args.hidden),
        "--dtype",
        args.dtype,
    ]
    command = [sys.executable, "-m", "tests.bench.chunked_loss", "--measure", form, *options]
    return float(subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout)


def measure(form: str, data: tuple[torch.Tensor, ...]) -> float:
    small = inputs(64, 512, data[0].shape[1], data[0].dtype)
    step(form, small)  # libraries loaded, thread buffers made
    for tensor in data[:2]:
        tensor.grad = torch.zeros_like(tensor)  # the gradients' pages count as base
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again from here
    base = high_water()
    for tensor in data[:2]:
        tensor.grad = None
    step(form, data)
    return (high_water() - base) / 1024


def high_water() -> int:
    """Kilobytes of the highest resident size (VmHWM; ru_maxrss would be the parent's across a fork)."""
    return int(re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())[1])


def main(arguments: list[str] | None = None) -> dict[str, dict[str, float]]:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.chunked_loss")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--vocab", type=int, default=32768)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--measure", choices=list(FORMS), help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    data = inputs(args.tokens, args.vocab, args.hidden, getattr(torch, args.dtype))
    if args.measure:
        print(measure(args.measure, data))
        return {}
    exact = step("plain", tuple(t.detach().double().requires_grad_() if t.is_floating_point() else t for t in data))
    seconds = times(data, args.repeats)
    table = {}
    print(
        f"{args.tokens} tokens, vocabulary {args.vocab}, hidden {args.hidden}, {args.dtype}; loss in float64 {exact:.5f}"
    )
    print(f"{'form':<10}{'CPU s':>8}{'x':>7}{'extra MB':>10}{'x':>7}{'loss':>11}")
    for form in FORMS:
        table[form] = {"seconds": seconds[form], "megabytes": extra_memory(form, args), "loss": step(form, data)}
        row, base = table[form], table["plain"]
        print(
            f"{form:<10}{row['seconds']:>8.2f}{row['seconds'] / base['seconds']:>7.2f}{row['megabytes']:>10.0f}"
            f"{row['megabytes'] / base['megabytes']:>7.3f}{row['loss']:>11.5f}",
            flush=True,
        )
    return table


if __name__ == "__main__":
    main()
