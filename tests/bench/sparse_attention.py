"""Sparse attention (indexer, top-k, gather, attention) against dense attention; its memory; a roofline of its time.

    python -m tests.bench.sparse_attention                                  # tiny heads, 2k to 8k, forward and backward
    python -m tests.bench.sparse_attention --lengths 16384 32768 --once     # minutes
    python -m tests.bench.sparse_attention --shape large --forward          # 8 heads, latent 512 + 64
    python -m tests.bench.sparse_attention --only memory roofline

CPU seconds of one thread, random inputs (selections then overlap least: the worst case for caches). Dense attention is torch's
flash kernel, expanded (a key and a value per head) and absorbed (all heads over the one latent); sparse selects topk latents
with the indexer and attends in absorbed form. The indexer takes no gradient, as in training without its loss.

"flop" is the arithmetic of the forward: what the time ratio would be if every product ran at the same speed. The roofline takes
each part's operations and bytes (what it must read and write once), and this machine's speed measured in the same run: sgemm,
and copies of a buffer of the part's working set. attainable = max(flop / peak, bytes / bandwidth).
"""

import argparse
import ctypes
import math
import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from kernels import sparse_attention as kernel
from kernels.indexer import CHUNK_SCORES, index_scores, select_index
from kernels.topk import topk_lower_index


@dataclass(frozen=True)
class Shape:
    heads: int
    nope: int
    rope: int
    v: int
    latent: int
    index_heads: int
    index_dim: int

    @property
    def c(self) -> int:
        return self.latent + self.rope

    def flops(self, size: int, topk: int) -> dict[str, float]:
        """Of one forward: products only. A causal query at t sees t + 1 keys."""
        pairs = size * (size + 1) / 2
        chosen = sum(min(t + 1, topk) for t in range(size))
        return {
            "expanded": 2 * self.heads * (self.nope + self.rope + self.v) * pairs,
            "absorbed": 2 * self.heads * (self.c + self.latent) * pairs,
            "sparse": 2 * self.heads * (self.c + self.latent) * chosen + 2 * self.index_heads * self.index_dim * pairs,
        }


SHAPES = {
    "tiny": Shape(heads=4, nope=24, rope=8, v=32, latent=64, index_heads=4, index_dim=32),
    "large": Shape(heads=8, nope=192, rope=64, v=256, latent=512, index_heads=4, index_dim=64),
}


def cpu_seconds(call, repeats: int = 3) -> float:
    best = math.inf
    for _ in range(repeats):
        start = time.process_time()
        call()
        best = min(best, time.process_time() - start)
    return best


def _normal(*sizes: int, seed: int = 0, grad: bool = False) -> torch.Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed)).requires_grad_(grad)


def contestants(shape: Shape, size: int, topks, backward: bool) -> dict:
    """name -> a call that runs forward (and backward)."""
    s = shape

    def sdpa(width_k: int, width_v: int, shared: bool):
        q = _normal(1, s.heads, size, width_k, seed=1, grad=backward)
        k = _normal(1, 1 if shared else s.heads, size, width_k, seed=2, grad=backward)
        v = None if shared else _normal(1, s.heads, size, width_v, seed=3, grad=backward)

        def run():
            # absorbed: the flash kernel wants values as wide as keys; the rope columns of the result are not used
            keys = k.expand(-1, s.heads, -1, -1)
            out = F.scaled_dot_product_attention(q, keys, keys if shared else v, is_causal=True)
            if backward:
                out[..., :width_v].sum().backward()

        return run

    def sparse(topk: int):
        q = _normal(1, size, s.heads, s.c, seed=1, grad=backward)
        kv = _normal(1, size, s.c, seed=2, grad=backward)
        iq, ik = _normal(1, size, s.index_heads, s.index_dim, seed=4), _normal(1, size, s.index_dim, seed=5)
        iw = _normal(1, size, s.index_heads, seed=6)

        def run():
            index, valid = select_index(iq, ik, iw, topk)
            out = kernel.gathered_attention(q, kv, index, valid, s.latent, s.c**-0.5)
            if backward:
                out.sum().backward()

        return run

    return {
        "expanded": sdpa(s.nope + s.rope, s.v, False),
        "absorbed": sdpa(s.c, s.latent, True),
        **{f"sparse{k}": sparse(k) for k in topks},
    }


def times(shape: Shape, lengths, topks=(256, 512), backward: bool = True, repeats: int = 2) -> list[dict]:
    rows = []
    for size in lengths:
        calls = contestants(shape, size, topks, backward)
        best = dict.fromkeys(calls, math.inf)
        for _ in range(repeats):
            for name, call in calls.items():
                best[name] = min(best[name], cpu_seconds(call, 1))
        row = {"length": size, **best}
        for k in topks:
            flops = shape.flops(size, k)
            for dense in ("expanded", "absorbed"):
                row[f"{dense}/sparse{k}"] = best[dense] / best[f"sparse{k}"]
                row[f"flop_{dense}/sparse{k}"] = flops[dense] / flops["sparse"]
        rows.append(row)
        seconds = "  ".join(f"{name} {best[name]:.2f} s" for name in calls)
        ratios = "  ".join(
            f"{d}/sparse{k} {row[f'{d}/sparse{k}']:.2f} (flop {row[f'flop_{d}/sparse{k}']:.2f})"
            for k in topks
            for d in ("expanded", "absorbed")
        )
        print(f"{size:6d}  {seconds}  {ratios}", flush=True)
    return rows


# ---- memory


def _status(field: str) -> int:
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def peak_extra_bytes(call) -> int:
    """Peak resident memory during the call above what was resident before it. Linux."""
    call()  # libraries' own buffers
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/clear_refs", "w") as reset:
        reset.write("5")
    before = _status("VmRSS")
    call()
    return _status("VmHWM") - before


def memory(shape: Shape, lengths=(2048, 4096, 8192, 16384), topk: int = 256, backward: bool = False) -> dict:
    """Peak extra bytes per length, and the exponent of their growth (1 = linear) over the longest doubling."""
    extra = {}
    for size in lengths:
        call = contestants(shape, size, (topk,), backward)[f"sparse{topk}"]
        extra[size] = peak_extra_bytes(call)
        full = size * size * 4
        print(
            f"memory {size:6d}  extra {extra[size] / 2**20:.1f} MB  {extra[size] / size:.0f} bytes/token  "
            f"one head's [S,S] in fp32 {full / 2**20:.0f} MB",
            flush=True,
        )
    a, b = lengths[-2:]
    exponent = math.log(extra[b] / extra[a]) / math.log(b / a)
    print(f"memory grows with length^{exponent:.2f}", flush=True)
    return {"extra": extra, "exponent": exponent}


# ---- roofline


def machine() -> tuple[float, dict[int, float]]:
    """(peak flop/s of sgemm, copy bandwidth bytes/s by buffer bytes)."""
    a = _normal(768, 768)
    peak = 2 * 768**3 / cpu_seconds(lambda: a @ a, 8)
    bandwidth = {}
    for size in (1 << 18, 1 << 20, 1 << 23, 1 << 28):
        source = torch.ones(size // 8)  # source and copy together fill `size` bytes
        copy = torch.empty_like(source)
        turns = max(1, (1 << 27) // size)
        bandwidth[size] = size * turns / cpu_seconds(lambda: [copy.copy_(source) for _ in range(turns)], 4)  # noqa: B023
    return peak, bandwidth


def roofline(shape: Shape, size: int = 8192, topk: int = 256, rows_measured: int = 1024) -> list[dict]:
    """Each part of forward and backward on the last `rows_measured` query rows, in microseconds per row."""
    s, first = shape, size - rows_measured
    peak, bandwidth = machine()
    copies = ", ".join(f"{b >> 10} KB {v / 1e9:.0f} GB/s" for b, v in bandwidth.items())
    print(f"sgemm {peak / 1e9:.0f} Gflop/s; copies {copies}")
    row_chunk = max(16, min(128, CHUNK_SCORES // size))
    q, kv, dout = _normal(size, s.heads, s.c), _normal(size, s.c, seed=1), _normal(size, s.heads, s.latent, seed=2)
    iq, ik, iw = (
        _normal(1, size, s.index_heads, s.index_dim),
        _normal(1, size, s.index_dim),
        _normal(1, size, s.index_heads),
    )
    rows = [(a, min(a + row_chunk, size)) for a in range(first, size, row_chunk)]
    with torch.no_grad():
        scores = [index_scores(iq[:, a:b], ik[:, :b], iw[:, a:b]) for a, b in rows]
        index = torch.cat([topk_lower_index(x, topk) for x in scores], 1)[0]
    n = rows_measured
    step = max(4, kernel.GATHER_ELEMENTS // (topk * s.c))
    starts = range(0, n, step)
    chunk = [slice(first + a, first + min(a + step, n)) for a in starts]
    flat = [index[a : a + step].reshape(-1) for a in starts]
    gathered = kv.index_select(0, flat[0]).view(-1, topk, s.c)
    buffer = torch.empty_like(gathered).flatten(0, 1)
    probs = torch.bmm(q[chunk[0]], gathered.transpose(1, 2)).softmax(-1)
    logits = torch.randn_like(probs)
    left, right = torch.cat([logits, probs], 1), torch.cat([q[chunk[0]], F.pad(dout[chunk[0]], (0, s.rope))], 1)
    dbuffer = torch.empty_like(gathered)
    dgathered, dkv = torch.bmm(left.transpose(1, 2), right).flatten(0, 1), torch.zeros_like(kv)
    seen = (first + size) / 2  # keys per query
    pair = 2 * s.heads * topk  # flop per row and column
    moved = 4 * topk * s.c  # bytes of a row's latents
    work = 4 * step * topk * s.c
    small = 4 * s.heads * topk
    per_row = 4 * s.heads * s.c

    def each(call):
        return lambda: [call(i) for i in range(len(chunk) - 1)]  # the last chunk may be short

    def bmm(a, b):
        return lambda i: torch.bmm(a, b)

    parts = {  # name: (call, flop/row, bytes/row, working set)
        "indexer scores": (
            lambda: [index_scores(iq[:, a:b], ik[:, :b], iw[:, a:b]) for a, b in rows],
            2 * s.index_heads * s.index_dim * seen, 4 * seen, 8 * row_chunk * size,
        ),
        "top-k": (lambda: [topk_lower_index(x, topk) for x in scores], 0, 4 * seen + 8 * topk, 4 * row_chunk * size),
        "gather": (each(lambda i: torch.index_select(kv, 0, flat[i], out=buffer)), 0, 2 * moved, 4 * size * s.c + work),
        "q k": (each(lambda i: torch.bmm(q[chunk[i]], gathered.transpose(1, 2))), pair * s.c, moved + per_row + small, work),
        "softmax": (each(lambda i: logits.softmax(-1)), 0, 2 * small, 2 * small * step),
        "p v": (each(bmm(probs, gathered[..., : s.latent])), pair * s.latent, moved + per_row + small, work),
        "back: d p": (
            each(lambda i: torch.bmm(dout[chunk[i]], gathered[..., : s.latent].transpose(1, 2))),
            pair * s.latent, moved + per_row + small, work,
        ),
        "back: softmax": (
            each(lambda i: torch.ops.aten._softmax_backward_data(logits, probs, -1, torch.float32)),
            0, 3 * small, 3 * small * step,
        ),
        "back: d q": (each(bmm(logits, gathered)), pair * s.c, moved + per_row + small, work),
        "back: d kv": (
            each(lambda i: torch.bmm(left.transpose(1, 2), right, out=dbuffer)),
            pair * (s.c + s.latent), moved + 2 * per_row + 2 * small, work,
        ),
        "back: scatter": (each(lambda i: dkv.index_add_(0, flat[i], dgathered)), 0, 3 * moved, 4 * size * s.c + work),
    }  # fmt: skip
    table = []
    for name, (call, flop, byte, working) in parts.items():
        count = n if name in ("indexer scores", "top-k") else step * (len(chunk) - 1)
        with torch.no_grad():
            micros = cpu_seconds(call, 5) / count * 1e6
        speed = next((v for size_, v in bandwidth.items() if working <= size_), bandwidth[1 << 28])
        attainable = max(flop / peak, byte / speed) * 1e6
        table.append({"part": name, "us": micros, "flop": flop, "bytes": byte, "attainable": attainable})
    table.insert(6, {**table[2], "part": "back: gather"})
    print(f"{size} keys, topk {topk}, {s.heads} heads, latent {s.c}; per query row")
    for row in table:
        print(
            f"  {row['part']:<15} {row['us']:8.1f} us  {row['flop'] / 1e3:9.0f} kflop  {row['bytes'] / 1e3:8.0f} kB  "
            f"{row['flop'] / row['us'] / 1e3:5.1f} Gflop/s  {row['bytes'] / row['us'] / 1e3:5.1f} GB/s  "
            f"attainable {row['attainable']:7.1f} us = {100 * row['attainable'] / row['us']:4.0f} %"
        )
    total, floor = sum(r["us"] for r in table), sum(r["attainable"] for r in table)
    print(f"  {'all':<15} {total:8.1f} us, attainable {floor:.1f} us = {100 * floor / total:.0f} %", flush=True)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096, 8192])
    parser.add_argument("--topk", type=int, nargs="+", default=[256, 512])
    parser.add_argument("--forward", action="store_true", help="no backward")
    parser.add_argument("--once", action="store_true", help="one turn instead of the best of two")
    parser.add_argument(
        "--only", nargs="+", choices=("time", "memory", "roofline"), default=["time", "memory", "roofline"]
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    shape = SHAPES[args.shape]
    if "time" in args.only:
        times(shape, args.lengths, args.topk, not args.forward, 1 if args.once else 2)
    if "memory" in args.only:
        memory(shape, topk=args.topk[0], backward=not args.forward)
    if "roofline" in args.only:
        roofline(shape, max(args.lengths), args.topk[0])


if __name__ == "__main__":
    main()
