"""Newton-Schulz orthogonalisation of a batch of matrices: the inner step of Muon (Jordan et al. 2024; GLM-4.5 §2.4).

The quintic iteration X <- a X + (b A + c A A) X with A = X X^T pushes every singular value of X towards one. Its
coefficients trade exactness for speed: five steps leave singular values between about 0.7 and 1.2, which is what Muon wants.

Check it:  python -m pytest tests/kernels/test_newton_schulz.py
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.paths import choose

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5
EPS = 1e-7


def newton_schulz_reference(x_mn: Tensor, steps: int = STEPS) -> Tensor:
    """Orthogonalise one matrix [M, N], written as the papers write it. The oracle of the batched version.

    Returns a tensor of the same shape and dtype whose singular values are near one.
    """
    a, b, c = COEFFICIENTS
    x = x_mn / (x_mn.norm() + EPS)
    tall = x.size(0) > x.size(1)
    if tall:
        x = x.T
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if tall else x


def newton_schulz(x_bmn: Tensor, steps: int = STEPS, dtype: torch.dtype | None = None) -> Tensor:
    """Orthogonalise each matrix of a batch [B, M, N]; returns [B, M, N] in the input's dtype.

    Each matrix is treated alone: results do not depend on what else is in the batch beyond rounding. `dtype` is the
    arithmetic type (bfloat16 is enough on accelerators; None keeps the input's). A zero matrix stays zero. The path is
    kernels.paths' choice for "newton_schulz".
    Raises ValueError when the input is not three-dimensional or not floating point.
    """
    if x_bmn.dim() != 3 or not x_bmn.is_floating_point():
        raise ValueError(
            f"newton_schulz wants a floating-point batch [B, M, N], got {list(x_bmn.shape)} of {x_bmn.dtype}"
        )
    path = choose("newton_schulz", x_bmn.device, dtype or x_bmn.dtype)
    if path == "reference":
        found = [newton_schulz_reference(x.to(dtype or x.dtype), steps).to(x.dtype) for x in x_bmn]
        return torch.stack(found) if found else x_bmn.clone()
    a, b, c = COEFFICIENTS
    tall = x_bmn.size(1) > x_bmn.size(2)
    x = x_bmn.transpose(1, 2) if tall else x_bmn
    # The norm is taken before the cast: squares of small gradients vanish in half precision.
    norm_b11 = torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True, dtype=torch.promote_types(x.dtype, torch.float32))
    x = (x / (norm_b11 + EPS)).to(dtype or x_bmn.dtype)
    if path == "triton":
        from kernels.triton_newton_schulz import iterate

        x = iterate(x, steps, COEFFICIENTS)
    else:
        for _ in range(steps):
            gram = torch.bmm(x, x.transpose(1, 2))
            gram = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
            x = torch.baddbmm(x, gram, x, beta=a)
    x = x.to(x_bmn.dtype)
    return x.transpose(1, 2) if tall else x


def newton_schulz_groups(
    blocks: Sequence[Tensor], steps: int = STEPS, dtype: torch.dtype | None = None, max_elements: int = 1 << 26
) -> list[Tensor]:
    """Orthogonalise many batches [B_i, M_i, N_i] at once; returns one tensor per input, same shapes and order.

    Batches whose matrices have the same (short side, long side) share one batched multiplication, tall ones transposed.
    `max_elements` bounds the transient buffer of one multiplication (elements, not bytes).
    """
    groups: dict[tuple[int, int, torch.device, torch.dtype], list[int]] = {}
    for index, block in enumerate(blocks):
        short, long = sorted(block.shape[-2:])
        groups.setdefault((short, long, block.device, block.dtype), []).append(index)
    results: list[Tensor | None] = [None] * len(blocks)
    for (short, long, _, _), members in groups.items():
        budget = max(1, max_elements // (short * long))
        chunk: list[int] = []
        count = 0
        for index in members + [-1]:
            size = blocks[index].size(0) if index >= 0 else 0
            if chunk and (index < 0 or count + size > budget):
                wide = [
                    blocks[i].transpose(1, 2) if blocks[i].size(1) > blocks[i].size(2) else blocks[i] for i in chunk
                ]
                stacked = wide[0] if len(wide) == 1 else torch.cat(wide)
                for i, part in zip(chunk, newton_schulz(stacked, steps, dtype).split([w.size(0) for w in wide])):
                    results[i] = part.transpose(1, 2) if blocks[i].size(1) > blocks[i].size(2) else part
                chunk, count = [], 0
            if index >= 0:
                chunk.append(index)
                count += size
    return results  # type: ignore[return-value]
