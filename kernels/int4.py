"""INT4 weights: symmetric per-output-channel codes, the named scale rules, SSZ, and every nibble layout the exports use.

Checked by `python -m pytest tests/kernels/test_int4.py`; compressed-tensors is the oracle there.

All arithmetic is fp32 and rounding is half-to-even. A scale is rounded to bf16 BEFORE the codes are computed, so a code
means the same number whether its scale is stored as bf16 or fp32. The rule that produced a scale is kept by name,
because the field uses several and they give different codes:

    absmax/7      max|w| / 7      msmodelslim, slime
    absmax/7.5    max|w| / 7.5    compressed-tensors
    ssz           alternating least squares from absmax/7, the row's best (GLM-5's deployment recipe, §5)
"""

from __future__ import annotations

import torch

from kernels.paths import choose

INT4_MIN, INT4_MAX = -8, 7
ABSMAX_DIVISOR = {"absmax/7": 7.0, "absmax/7.5": 7.5}
SCALE_RULES = (*ABSMAX_DIVISOR, "ssz")


def round_to_bf16(scale: torch.Tensor) -> torch.Tensor:
    """fp32 values rounded to the nearest bf16 (ties to even), still fp32."""
    return scale.to(torch.bfloat16).to(torch.float32)


def _usable(scale_n1: torch.Tensor) -> torch.Tensor:
    """bf16-rounded scales, with 1 where a row is all zeros (its codes are zeros, so any scale is exact)."""
    rounded = round_to_bf16(scale_n1)
    return torch.where(rounded > 0, rounded, torch.ones_like(rounded))


def encode_int4(weight_nk: torch.Tensor, scale_n1: torch.Tensor) -> torch.Tensor:
    """Codes of a weight under a scale: int8 [N, K] in -8..7 = clamp(rint(w / s)); w fp32 [N, K], s fp32 [N, 1]."""
    return torch.round(weight_nk.float() / scale_n1).clamp_(INT4_MIN, INT4_MAX).to(torch.int8)


def decode_int4(codes_nk: torch.Tensor, scale_n1: torch.Tensor) -> torch.Tensor:
    """The fp32 weight [N, K] that codes (int8 [N, K]) and scales (fp32 [N, 1]) stand for."""
    return codes_nk.to(torch.float32) * scale_n1.to(torch.float32)


def _row_error(weight_nk: torch.Tensor, codes_nk: torch.Tensor, scale_n1: torch.Tensor) -> torch.Tensor:
    return (weight_nk - decode_int4(codes_nk, scale_n1)).square_().mean(dim=1, keepdim=True)


def quantize_int4(weight_nk: torch.Tensor, rule: str = "ssz", *, steps: int = 50, tolerance: float = 1e-10):
    """Quantize a weight matrix per output row.

    Arguments: weight [N, K] of any float dtype; `rule` one of SCALE_RULES; `steps` and `tolerance` (on the change of
    every row's scale) bound the SSZ iteration s <- <w, q> / <q, q>. Returns (codes int8 [N, K], scale fp32 [N, 1],
    bf16-representable). The SSZ result is never worse than absmax/7 in any row, because each row keeps its best scale.
    Raises ValueError for an unknown rule, a matrix that is not 2-D, or values that are not finite.
    """
    if weight_nk.dim() != 2:
        raise ValueError(f"int4 quantization takes a matrix [out, in], got shape {tuple(weight_nk.shape)}")
    if rule not in SCALE_RULES:
        raise ValueError(f"unknown int4 scale rule {rule!r}; known rules: {', '.join(SCALE_RULES)}")
    weight_nk = weight_nk.float()
    absmax_n1 = weight_nk.abs().amax(dim=1, keepdim=True)
    if not torch.isfinite(absmax_n1).all():
        raise ValueError("int4 quantization needs finite weights; a row holds inf or nan")
    scale_n1 = _usable(absmax_n1 / ABSMAX_DIVISOR.get(rule, 7.0))
    codes_nk = encode_int4(weight_nk, scale_n1)
    if rule != "ssz":
        return codes_nk, scale_n1

    best_codes, best_scale, best_error = codes_nk, scale_n1, _row_error(weight_nk, codes_nk, scale_n1)
    running_n1 = scale_n1
    for _ in range(steps):
        q_nk = codes_nk.to(torch.float32)
        norm_n1 = q_nk.square().sum(dim=1, keepdim=True)
        fitted_n1 = (weight_nk * q_nk).sum(dim=1, keepdim=True) / norm_n1.clamp_min(1.0)
        fitted_n1 = torch.where((norm_n1 > 0) & (fitted_n1 > 0), fitted_n1, running_n1)
        moved = (fitted_n1 - running_n1).abs().max()
        running_n1, scale_n1 = fitted_n1, _usable(fitted_n1)
        codes_nk = encode_int4(weight_nk, scale_n1)
        error_n1 = _row_error(weight_nk, codes_nk, scale_n1)
        better_n1 = error_n1 < best_error
        best_codes = torch.where(better_n1, codes_nk, best_codes)
        best_scale = torch.where(better_n1, scale_n1, best_scale)
        best_error = torch.where(better_n1, error_n1, best_error)
        if moved <= tolerance:
            break
    return best_codes, best_scale


class _FakeQuant(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight_nk, rule, steps):
        if rule in ABSMAX_DIVISOR and choose("quantize_int4", weight_nk.device, weight_nk.dtype) == "triton":
            from kernels.triton_quant import quantize_int4 as triton_int4

            codes_nk, scale_n1, _ = triton_int4(weight_nk, ABSMAX_DIVISOR[rule])
        else:
            codes_nk, scale_n1 = quantize_int4(weight_nk, rule, steps=steps)
        return decode_int4(codes_nk, scale_n1).to(weight_nk.dtype)

    @staticmethod
    def backward(ctx, dout_nk):
        return dout_nk, None, None


def fake_quant_int4(weight_nk: torch.Tensor, rule: str = "absmax/7", steps: int = 50) -> torch.Tensor:
    """A weight [N, K] as its INT4 codes and scales will give it back, in its own dtype; the gradient passes straight through.

    The codes are those of `quantize_int4`, so what training sees is what the packers write. The path is kernels.paths' choice
    for "quantize_int4" (the SSZ rule has none but torch's).
    """
    return _FakeQuant.apply(weight_nk, rule, steps)


def _nibbles(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """int8 with `low` in bits 0-3 and `high` in bits 4-7, both two's complement codes."""
    return ((low & 0xF) | (high << 4)).to(torch.int8)


def _split(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sign-extended (low, high) nibbles of an int8 tensor."""
    return ((packed << 4) >> 4), (packed >> 4)


def _even(size: int, what: str) -> None:
    if size % 2:
        raise ValueError(f"packing pairs of int4 needs an even number of {what}, got {size}")


def pack_rows(codes_nk: torch.Tensor) -> torch.Tensor:
    """int8 [N/2, K]: low nibble = even output row, high nibble = odd (Ascend ModelSlim)."""
    _even(codes_nk.shape[0], "output rows")
    return _nibbles(codes_nk[0::2], codes_nk[1::2])


def unpack_rows(packed: torch.Tensor) -> torch.Tensor:
    """Inverse of pack_rows: int8 [N, K]."""
    low, high = _split(packed)
    return torch.stack((low, high), dim=1).reshape(2 * packed.shape[0], packed.shape[1])


def pack_columns(codes_nk: torch.Tensor, *, high_first: bool = False) -> torch.Tensor:
    """int8 [N, K/2]: the even input column in the low nibble (our canonical layout) or, `high_first`, in the high one."""
    _even(codes_nk.shape[1], "input columns")
    even, odd = codes_nk[:, 0::2], codes_nk[:, 1::2]
    return _nibbles(odd, even) if high_first else _nibbles(even, odd)


def unpack_columns(packed: torch.Tensor, *, high_first: bool = False) -> torch.Tensor:
    """Inverse of pack_columns: int8 [N, K]."""
    low, high = _split(packed)
    pair = (high, low) if high_first else (low, high)
    return torch.stack(pair, dim=2).reshape(packed.shape[0], 2 * packed.shape[1])


def pack_int32(codes_nk: torch.Tensor) -> torch.Tensor:
    """int32 [N, K/8]: code + 8 as unsigned nibbles, column 8j in the lowest bits (compressed-tensors pack-quantized)."""
    if codes_nk.shape[1] % 8:
        raise ValueError(f"packing int4 into int32 needs input columns divisible by 8, got {codes_nk.shape[1]}")
    unsigned = (codes_nk.to(torch.int64) + 8).reshape(codes_nk.shape[0], -1, 8)
    word = (unsigned << torch.arange(0, 32, 4)).sum(dim=2)
    return torch.where(word >= 1 << 31, word - (1 << 32), word).to(torch.int32)
