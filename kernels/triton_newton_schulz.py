"""Triton products for Newton-Schulz: both inner products of a step are symmetric, so half of their tiles are mirrored.

    gram = X X^T;  B = b gram + c gram gram^T;  X <- a X + B X      (gram = gram^T)

The last product is a plain batched multiplication. Per step and matrix [M, N] the two take half of the M^2 N + M^3 multiply-adds.

Run its tests: `python -m pytest tests/kernels/test_triton_newton_schulz.py`
"""

import torch
import triton
import triton.language as tl

from kernels.triton_common import INTERPRETED, dot

TILE, DEPTH = 64, 32


@triton.jit
def _symmetric_kernel(
    x, add, out, M, N, alpha, beta, ADD: tl.constexpr, T: tl.constexpr, D: tl.constexpr, WIDEN: tl.constexpr
):
    """out[b] = alpha x x^T (+ beta add[b]) for x [M, N]; program (pair, b) makes one tile on or below the diagonal."""
    pair, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    # pair = i (i + 1) / 2 + j with j <= i; the root is corrected, since fp32 has 24 bits
    i = (tl.sqrt(8.0 * pair + 1.0) * 0.5 - 0.5).to(tl.int32)
    i = tl.where((i + 1) * (i + 2) // 2 <= pair, i + 1, i)
    i = tl.where(i * (i + 1) // 2 > pair, i - 1, i)
    j = pair - i * (i + 1) // 2
    rows, cols, deep = i * T + tl.arange(0, T), j * T + tl.arange(0, T), tl.arange(0, D)
    x += batch * M * N
    total = tl.zeros([T, T], tl.float32)
    for start in range(0, N, D):
        n = start + deep
        left = tl.load(x + rows[:, None] * N + n[None, :], mask=(rows < M)[:, None] & (n < N)[None, :], other=0.0)
        right = tl.load(x + cols[None, :] * N + n[:, None], mask=(cols < M)[None, :] & (n < N)[:, None], other=0.0)
        total += dot(left, right, WIDEN)
    inside = (rows < M)[:, None] & (cols < M)[None, :]
    at = batch * M * M + rows[:, None] * M + cols[None, :]
    total *= alpha
    if ADD:
        total += beta * tl.load(add + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, total, inside)
    if i != j:
        mirrored = (cols < M)[:, None] & (rows < M)[None, :]
        tl.store(out + batch * M * M + cols[:, None] * M + rows[None, :], tl.trans(total), mirrored)


def symmetric(x_bmn: torch.Tensor, alpha: float = 1.0, add_bmm: torch.Tensor | None = None, beta: float = 0.0):
    """alpha x x^T + beta add for a batch [B, M, N] and a symmetric add [B, M, M]; exactly symmetric, in x's dtype."""
    x = x_bmn.contiguous()
    batch, m, n = x.shape
    out = torch.empty(batch, m, m, dtype=x.dtype, device=x.device)
    tiles = triton.cdiv(m, TILE)
    _symmetric_kernel[(tiles * (tiles + 1) // 2, batch)](
        x, x if add_bmm is None else add_bmm, out, m, n, alpha, beta,
        ADD=add_bmm is not None, T=TILE, D=DEPTH, WIDEN=INTERPRETED,
    )  # fmt: skip
    return out


def iterate(x_bmn: torch.Tensor, steps: int, coefficients: tuple[float, float, float]) -> torch.Tensor:
    """`steps` Newton-Schulz steps of wide or square matrices [B, M, N], M <= N, already divided by their norms."""
    a, b, c = coefficients
    for _ in range(steps):
        gram = symmetric(x_bmn)
        x_bmn = torch.baddbmm(x_bmn, symmetric(gram, c, gram, b), x_bmn, beta=a)
    return x_bmn
