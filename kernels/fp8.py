"""FP8 (e4m3): weights in 128 x 128 blocks with fp32 scales, the format of `quant_method: fp8` checkpoints and loaders;
activations per token in groups of 128; the linear layer that multiplies them (FP8 rollouts, GLM-5 §4.1).

Checked by `python -m pytest tests/kernels/test_fp8.py`; the Triton form is kernels/triton_quant.py.
"""

from __future__ import annotations

import torch

from kernels.paths import choose

BLOCK = 128
E4M3_MAX = 448.0


def _expand(scale: torch.Tensor, rows: int, columns: int, block: int) -> torch.Tensor:
    return scale.repeat_interleave(block, 0)[:rows].repeat_interleave(block, 1)[:, :columns]


def _scale(absmax: torch.Tensor, power_of_two: bool) -> torch.Tensor:
    """absmax / 448, 1 where that is 0; with `power_of_two` rounded up to 2^n (ue8m0), which keeps every value in range."""
    scale = absmax / E4M3_MAX
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    return torch.exp2(torch.ceil(torch.log2(scale))) if power_of_two else scale


def quantize_fp8_blocks(
    weight_nk: torch.Tensor, block: int = BLOCK, power_of_two: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """(float8_e4m3fn [N, K], scale fp32 [ceil(N/block), ceil(K/block)]), scale = the block's max|w| / 448; 1 if all zero.

    power_of_two: ue8m0 scales. Raises ValueError when the weight is not a matrix or holds inf or nan.
    """
    if weight_nk.dim() != 2:
        raise ValueError(f"block quantization takes a matrix [out, in], got shape {tuple(weight_nk.shape)}")
    weight_nk = weight_nk.float()
    if not torch.isfinite(weight_nk).all():
        raise ValueError("fp8 quantization needs finite weights")
    rows, columns = weight_nk.shape
    padded = torch.nn.functional.pad(weight_nk, (0, -columns % block, 0, -rows % block))
    grid = padded.reshape(padded.shape[0] // block, block, padded.shape[1] // block, block)
    scale = _scale(grid.abs().amax(dim=(1, 3)), power_of_two)
    values = weight_nk / _expand(scale, rows, columns, block)
    return values.clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), scale


def dequantize_fp8_blocks(values_nk: torch.Tensor, scale: torch.Tensor, block: int = BLOCK) -> torch.Tensor:
    """The fp32 weight [N, K] that block-scaled fp8 values stand for."""
    return values_nk.float() * _expand(scale, *values_nk.shape, block)


def quantize_fp8_tokens(
    x_tk: torch.Tensor, block: int = BLOCK, power_of_two: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Dynamic activations: (float8_e4m3fn [T, K], scale fp32 [T, ceil(K/block)]), one scale per token and group of columns."""
    x_tk = x_tk.float()
    tokens, columns = x_tk.shape
    grouped = torch.nn.functional.pad(x_tk, (0, -columns % block)).unflatten(1, (-1, block))
    scale_tg = _scale(grouped.abs().amax(dim=2), power_of_two)
    values = x_tk / scale_tg.repeat_interleave(block, 1)[:, :columns]
    return values.clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), scale_tg


def fp8_linear(x_tk: torch.Tensor, values_nk: torch.Tensor, scale: torch.Tensor, block: int = BLOCK) -> torch.Tensor:
    """x @ w.T with both sides in fp8: fp32 [T, N] from x float [T, K] and block-scaled weights.

    Products within a group of `block` columns are summed in fp32 and then scaled, group after group, as fp8 matrix units do.
    The path is kernels.paths' choice for "fp8".
    """
    if choose("fp8", x_tk.device, x_tk.dtype) == "triton":
        from kernels.triton_quant import fp8_linear as triton_linear

        return triton_linear(x_tk, values_nk, scale, block)
    q_tk, scale_tg = quantize_fp8_tokens(x_tk, block)
    rows = values_nk.shape[0]
    out_tn = x_tk.new_zeros(x_tk.shape[0], rows, dtype=torch.float32)
    for group, start in enumerate(range(0, x_tk.shape[1], block)):
        columns = slice(start, start + block)
        product_tn = q_tk[:, columns].float() @ values_nk[:, columns].float().T
        out_tn += product_tn * scale_tg[:, group, None] * scale[:, group].repeat_interleave(block)[:rows]
    return out_tn


def round_to_fp8(weight: torch.Tensor, block: int = BLOCK) -> torch.Tensor:
    """A weight [..., N, K] rounded to block-scaled fp8 and back, in its own dtype: what an fp8 rollout multiplies with."""
    flat = weight.reshape(-1, *weight.shape[-2:])
    rounded = [dequantize_fp8_blocks(*quantize_fp8_blocks(w, block), block) for w in flat]
    return torch.stack(rounded).view(weight.shape).to(weight.dtype)
