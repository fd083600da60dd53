"""What the Triton kernels share. Import it only where a Triton path was chosen: it imports triton.

Checked by `python -m pytest tests/kernels -k triton`
"""

import triton
import triton.language as tl

# The interpreter's tl.dot of bf16 operands is silently wrong (errors of 1e11): operands are widened to fp32 there, only there.
INTERPRETED: bool = triton.knobs.runtime.interpret


@triton.jit
def dot(a, b, WIDEN: tl.constexpr):
    """a @ b with fp32 accumulation: the native product on a GPU (no TF32), fp32 operands in the interpreter."""
    if WIDEN:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


def block(size: int, least: int = 16, most: int = 1 << 30) -> int:
    """The power of two that covers `size`, within [least, most]; tl.dot takes no side below 16."""
    return max(least, min(most, triton.next_power_of_2(size)))
