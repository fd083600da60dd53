"""INT8: per-output-channel weights, per-token dynamic activations, and linear layers with int32 accumulation.

Checked by `python -m pytest tests/kernels/test_int4.py`. With 4-bit codes as weight the same functions are the W4A8
emulator: what an NPU's integer matrix unit computes, exactly, on a CPU (§5 of the paper: W4A8 experts, W8A8 elsewhere).
"""

from __future__ import annotations

import torch

from kernels.int4 import _usable

INT8_MIN, INT8_MAX = -128, 127
SCALE_RULE = "absmax/127"


def encode_int8(weight_nk: torch.Tensor, scale_n1: torch.Tensor) -> torch.Tensor:
    """int8 [N, K] = clamp(rint(w / s), -128, 127); w fp32 [N, K], s fp32 [N, 1]."""
    return torch.round(weight_nk.float() / scale_n1).clamp_(INT8_MIN, INT8_MAX).to(torch.int8)


def quantize_int8(weight_nk: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Per-output-row symmetric int8 by the rule absmax/127: (codes int8 [N, K], scale fp32 [N, 1], bf16-representable).

    Raises ValueError when the weight is not a matrix or holds inf or nan.
    """
    if weight_nk.dim() != 2:
        raise ValueError(f"int8 quantization takes a matrix [out, in], got shape {tuple(weight_nk.shape)}")
    absmax_n1 = weight_nk.float().abs().amax(dim=1, keepdim=True)
    if not torch.isfinite(absmax_n1).all():
        raise ValueError("int8 quantization needs finite weights; a row holds inf or nan")
    scale_n1 = _usable(absmax_n1 / INT8_MAX)
    return encode_int8(weight_nk, scale_n1), scale_n1


def quantize_tokens(x_tk: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Per-token dynamic activations: (codes int8 [T, K], scale fp32 [T, 1] = max|x| / 127; 1 for a token of zeros)."""
    x_tk = x_tk.float()
    scale_t1 = x_tk.abs().amax(dim=1, keepdim=True) / INT8_MAX
    scale_t1 = torch.where(scale_t1 > 0, scale_t1, torch.ones_like(scale_t1))
    return encode_int8(x_tk, scale_t1), scale_t1


def int_matmul(a_tk: torch.Tensor, w_nk: torch.Tensor) -> torch.Tensor:
    """Exact a @ w.T for int8 operands: int32 [T, N] from int8 [T, K] and int8 [N, K]."""
    if a_tk.shape[0] == 0:
        return torch.zeros(0, w_nk.shape[0], dtype=torch.int32)
    # Products of codes stay below 2^24 in this many columns, where fp32 sums of integers are exact; chunks add in int32.
    columns = (1 << 24) // (128 * 128)
    total = torch.zeros(a_tk.shape[0], w_nk.shape[0], dtype=torch.int32)
    for start in range(0, a_tk.shape[1], columns):
        a, w = a_tk[:, start : start + columns].float(), w_nk[:, start : start + columns].float()
        total += (a @ w.T).to(torch.int32)
    return total


def quantized_linear(x_tk: torch.Tensor, codes_nk: torch.Tensor, scale_n1: torch.Tensor) -> torch.Tensor:
    """W8A8 or W4A8 linear layer: per-token int8 activations, int32 accumulation, fp32 result [T, N].

    x float [T, K]; codes int8 [N, K] (int8 or int4 range); scale fp32 [N, 1].
    """
    q_tk, scale_t1 = quantize_tokens(x_tk)
    return int_matmul(q_tk, codes_nk).to(torch.float32) * (scale_t1 * scale_n1.reshape(1, -1))
