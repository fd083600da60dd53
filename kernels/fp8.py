"""FP8 (e4m3) weights in 128 x 128 blocks with fp32 scales: the format vLLM-MUSA and other `quant_method: fp8` loaders read.

Checked by `python -m pytest tests/kernels/test_int4.py`.
"""

from __future__ import annotations

import torch

BLOCK = 128
E4M3_MAX = 448.0


def _expand(scale: torch.Tensor, rows: int, columns: int, block: int) -> torch.Tensor:
    return scale.repeat_interleave(block, 0)[:rows].repeat_interleave(block, 1)[:, :columns]


def quantize_fp8_blocks(weight_nk: torch.Tensor, block: int = BLOCK) -> tuple[torch.Tensor, torch.Tensor]:
    """(float8_e4m3fn [N, K], scale fp32 [ceil(N/block), ceil(K/block)]), scale = the block's max|w| / 448; 1 if all zero.

    Raises ValueError when the weight is not a matrix or holds inf or nan.
    """
    if weight_nk.dim() != 2:
        raise ValueError(f"block quantization takes a matrix [out, in], got shape {tuple(weight_nk.shape)}")
    weight_nk = weight_nk.float()
    if not torch.isfinite(weight_nk).all():
        raise ValueError("fp8 quantization needs finite weights")
    rows, columns = weight_nk.shape
    padded = torch.nn.functional.pad(weight_nk, (0, -columns % block, 0, -rows % block))
    grid = padded.reshape(padded.shape[0] // block, block, padded.shape[1] // block, block)
    scale = grid.abs().amax(dim=(1, 3)) / E4M3_MAX
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    values = weight_nk / _expand(scale, rows, columns, block)
    return values.clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), scale


def dequantize_fp8_blocks(values_nk: torch.Tensor, scale: torch.Tensor, block: int = BLOCK) -> torch.Tensor:
    """The fp32 weight [N, K] that block-scaled fp8 values stand for."""
    return values_nk.float() * _expand(scale, *values_nk.shape, block)
