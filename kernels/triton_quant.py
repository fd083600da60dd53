"""Triton quantizers: INT4 codes with packing, block and token-group FP8, and the block-scaled FP8 product (GLM-5 §5, §4.1).

Codes and scales are bit-identical to kernels/int4.py and kernels/fp8.py: divisions round to nearest (Triton's `/` does not on a
GPU), codes round half to even, scales are rounded to bf16 on their bits.

Run its tests: `python -m pytest tests/kernels/test_triton_quant.py`
"""

import torch
import triton
import triton.language as tl

from kernels.triton_common import INTERPRETED, block, dot

HALF_EVEN = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding and subtracting it rounds |x| < 2^22 half to even
TILE = 64


@triton.jit
def _bf16_round(x):
    """fp32 rounded to the nearest bf16, ties to even, on its bits."""
    bits = x.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _int4_kernel(w, codes, packed, scale, columns, divisor, PACK: tl.constexpr, B: tl.constexpr):
    """One output row: scale = bf16(max|w| / divisor), codes = clamp(rint(w / scale), -8, 7), pairs packed low nibble first."""
    row = tl.program_id(0).to(tl.int64)
    top = tl.full([], 0.0, tl.float32)
    for start in range(0, columns, B):
        at = start + tl.arange(0, B)
        top = tl.maximum(
            top, tl.max(tl.abs(tl.load(w + row * columns + at, mask=at < columns, other=0.0).to(tl.float32)), 0)
        )
    s = _bf16_round(tl.div_rn(top, divisor))
    s = tl.where(s > 0, s, 1.0)
    tl.store(scale + row, s)
    for start in range(0, columns, B):
        at = start + tl.arange(0, B)
        inside = at < columns
        x = tl.load(w + row * columns + at, mask=inside, other=0.0).to(tl.float32)
        q = tl.div_rn(x, tl.zeros([B], tl.float32) + s)
        # clamped first: the rounding trick holds for small numbers only
        q = (tl.minimum(tl.maximum(q, -8.0), 7.0) + HALF_EVEN) - HALF_EVEN
        tl.store(codes + row * columns + at, q.to(tl.int8), inside)
    if PACK:
        tl.debug_barrier()  # the pairs were stored by other threads of this program
        for start in range(0, columns // 2, B):
            at = start + tl.arange(0, B)
            inside = at < columns // 2
            low = tl.load(codes + row * columns + 2 * at, mask=inside, other=0).to(tl.int32)
            high = tl.load(codes + row * columns + 2 * at + 1, mask=inside, other=0).to(tl.int32)
            tl.store(packed + row * (columns // 2) + at, ((low & 15) | (high << 4)).to(tl.int8), inside)


def quantize_int4(weight_nk: torch.Tensor, divisor: float, pack: bool = False):
    """(codes int8 [N, K], scale fp32 [N, 1], packed int8 [N, K/2] or None): kernels.int4's rules absmax/divisor, bit for bit."""
    w = weight_nk.contiguous()
    rows, columns = w.shape
    if pack and columns % 2:
        raise ValueError(f"packing pairs of int4 needs an even number of input columns, got {columns}")
    codes = torch.empty(rows, columns, dtype=torch.int8, device=w.device)
    packed = torch.empty(rows, columns // 2, dtype=torch.int8, device=w.device) if pack else None
    scale = torch.empty(rows, 1, dtype=torch.float32, device=w.device)
    if rows:
        _int4_kernel[(rows,)](
            w, codes, codes if packed is None else packed, scale, columns, float(divisor), PACK=pack,
            B=block(columns, 16, 1024),
        )  # fmt: skip
    return codes, scale, packed


@triton.jit
def _fp8_scale(top, POWER: tl.constexpr):
    s = tl.div_rn(top, tl.zeros_like(top) + 448.0)
    s = tl.where(s > 0, s, 1.0)
    if POWER:
        bits = s.to(
            tl.int32, bitcast=True
        )  # up to the next power of two: the exponent, one more where a mantissa is left
        bits = (bits & 0x7F800000) + tl.where((bits & 0x7FFFFF) != 0, 0x800000, 0)
        s = bits.to(tl.float32, bitcast=True)
    return s


@triton.jit
def _fp8_kernel(
    x, values, scale, rows, columns, scale_columns, POWER: tl.constexpr, R: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    """One block of R rows and C columns with one scale. The quotients are stored as fp32 or fp8, whichever `values` is."""
    row_block, col_block = tl.program_id(0), tl.program_id(1)
    row, col = row_block * R + tl.arange(0, R), col_block * C + tl.arange(0, C)
    inside = (row < rows)[:, None] & (col < columns)[None, :]
    at = row[:, None].to(tl.int64) * columns + col[None, :]
    tile = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    s = _fp8_scale(tl.max(tl.max(tl.abs(tile), 1), 0), POWER)
    q = tl.div_rn(tile, tl.zeros([R, C], tl.float32) + s)
    tl.store(values + at, tl.minimum(tl.maximum(q, -448.0), 448.0).to(values.dtype.element_ty), inside)
    tl.store(scale + row_block * scale_columns + col_block, s)


def quantize_fp8(x_nk: torch.Tensor, row_block: int, block_size: int = 128, power_of_two: bool = False):
    """(float8_e4m3fn [N, K], scale fp32 [ceil(N/row_block), ceil(K/block)]): row_block 128 for weights, 1 for activations.

    In the interpreter, which has no fp8, quotients are made there and rounded by torch: the same numbers.
    """
    x = x_nk.contiguous()
    rows, columns = x.shape
    grid = (triton.cdiv(rows, row_block), triton.cdiv(columns, block_size))
    dtype = torch.float32 if INTERPRETED else torch.float8_e4m3fn
    values = torch.empty(rows, columns, dtype=dtype, device=x.device)
    scale = torch.empty(grid, dtype=torch.float32, device=x.device)
    if rows:
        _fp8_kernel[grid](x, values, scale, rows, columns, grid[1], POWER=power_of_two, R=row_block, C=block_size)
    return values.to(torch.float8_e4m3fn), scale


@triton.jit
def _fp8_linear_kernel(
    x, x_scale, w, w_scale, out, tokens, columns, rows, groups,
    T: tl.constexpr, N: tl.constexpr, G: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """out tile [T, N]: each group of G columns is one fp32 product of fp8 codes, scaled by token and weight block, and added."""
    t, n = tl.program_id(0) * T + tl.arange(0, T), tl.program_id(1) * N + tl.arange(0, N)
    total = tl.zeros([T, N], tl.float32)
    for group in range(0, groups):
        k = group * G + tl.arange(0, G)
        x_tg = tl.load(
            x + t[:, None].to(tl.int64) * columns + k[None, :],
            mask=(t < tokens)[:, None] & (k < columns)[None, :],
            other=0.0,
        )
        w_gn = tl.load(
            w + n[None, :].to(tl.int64) * columns + k[:, None],
            mask=(n < rows)[None, :] & (k < columns)[:, None],
            other=0.0,
        )
        s_t = tl.load(x_scale + t * groups + group, mask=t < tokens, other=0.0)
        s_n = tl.load(w_scale + (n // G) * groups + group, mask=n < rows, other=0.0)
        total += dot(x_tg, w_gn, WIDEN) * s_t[:, None] * s_n[None, :]
    tl.store(out + t[:, None].to(tl.int64) * rows + n[None, :], total, (t < tokens)[:, None] & (n < rows)[None, :])


def fp8_linear(x_tk: torch.Tensor, values_nk: torch.Tensor, scale: torch.Tensor, block_size: int = 128) -> torch.Tensor:
    """kernels.fp8.fp8_linear: fp32 [T, N] from x float [T, K], block-scaled fp8 weights [N, K]; activations quantized here."""
    q_tk, s_tg = quantize_fp8(x_tk, 1, block_size)
    (tokens, columns), rows = x_tk.shape, values_nk.shape[0]
    out_tn = torch.empty(tokens, rows, dtype=torch.float32, device=x_tk.device)
    if INTERPRETED:
        q_tk, values_nk = q_tk.float(), values_nk.float()
    if tokens:
        _fp8_linear_kernel[(triton.cdiv(tokens, TILE), triton.cdiv(rows, TILE))](
            q_tk, s_tg, values_nk.contiguous(), scale.contiguous(), out_tn, tokens, columns, rows, s_tg.shape[1],
            T=TILE, N=TILE, G=block_size, WIDEN=INTERPRETED,
        )  # fmt: skip
    return out_tn
