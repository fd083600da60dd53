"""Integer weight kernels: exact codes, scale rules, SSZ, nibble layouts, int32 accumulation."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels.int4 import (
    decode_int4,
    encode_int4,
    fake_quant_int4,
    pack_columns,
    pack_int32,
    pack_rows,
    quantize_int4,
    round_to_bf16,
    unpack_columns,
    unpack_rows,
)
from kernels.int8 import int_matmul, quantize_int8, quantize_tokens, quantized_linear


def gaussian(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def test_codes_round_half_to_even_and_clamp():
    weight = torch.tensor([[0.5, 1.5, 2.5, -0.5, -1.5, 7.4, 9.0, -8.6]])
    codes = encode_int4(weight, torch.ones(1, 1))
    assert codes.tolist() == [[0, 2, 2, 0, -2, 7, 7, -8]]


@pytest.mark.parametrize("rule,divisor", [("absmax/7", 7.0), ("absmax/7.5", 7.5)])
def test_scale_is_bf16_before_the_codes(rule, divisor):
    weight = gaussian(64, 96)
    codes, scale = quantize_int4(weight, rule)
    expected = round_to_bf16(weight.abs().amax(1, keepdim=True) / divisor)
    assert torch.equal(scale, expected)
    assert torch.equal(codes.double(), torch.round(weight / expected).clamp(-8, 7).double())


@pytest.mark.parametrize("rule,divisor", [("absmax/7", None), ("absmax/7.5", 7.5)])
def test_compressed_tensors_gives_the_same_numbers(rule, divisor):
    ct = pytest.importorskip("compressed_tensors.quantization")
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.utils import calculate_qparams

    args = ct.QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="channel")
    weight = gaussian(48, 80, seed=3)
    codes, scale = quantize_int4(weight, rule)
    zero = torch.zeros_like(scale, dtype=torch.int8)
    assert torch.equal(fake_quantize(weight, scale, zero, args), decode_int4(codes, scale))
    if divisor:
        low, high = weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
        assert torch.equal(round_to_bf16(calculate_qparams(low, high, args)[0]), scale)


def test_ssz_on_gaussian_rows_matches_the_measured_gain():
    weight = gaussian(512, 256, seed=1)
    codes, scale = quantize_int4(weight, "absmax/7")
    base = (weight - decode_int4(codes, scale)).square().mean(1)
    codes_z, scale_z = quantize_int4(weight, "ssz")
    best = (weight - decode_int4(codes_z, scale_z)).square().mean(1)
    assert (best <= base).all()
    assert 0.75 < (best.mean() / base.mean()).item() < 0.82  # the design notes measured 0.01216 / 0.01566 = 0.78
    assert 0.85 < (scale_z / scale).mean().item() < 0.92
    assert codes_z.min() == -8  # the fitted scale reaches the code absmax/7 never uses
    assert torch.equal(round_to_bf16(scale_z), scale_z)


def test_rows_of_zeros_and_bad_weights():
    weight = torch.zeros(2, 8)
    for rule in ("absmax/7", "absmax/7.5", "ssz"):
        codes, scale = quantize_int4(weight, rule)
        assert torch.equal(decode_int4(codes, scale), weight) and (scale > 0).all()
    with pytest.raises(ValueError, match="finite"):
        quantize_int4(torch.tensor([[float("nan"), 1.0]]))
    with pytest.raises(ValueError, match="unknown int4 scale rule"):
        quantize_int4(weight, "max")
    with pytest.raises(ValueError, match="matrix"):
        quantize_int8(torch.zeros(3))


def test_nibble_layouts_by_hand():
    codes = torch.tensor([[-8, 7, 1, -1], [2, -3, 0, 5]], dtype=torch.int8)
    assert pack_rows(codes).view(torch.uint8).tolist() == [[0x28, 0xD7, 0x01, 0x5F]]
    assert pack_columns(codes).view(torch.uint8).tolist() == [[0x78, 0xF1], [0xD2, 0x50]]
    assert pack_columns(codes, high_first=True).view(torch.uint8).tolist() == [[0x87, 0x1F], [0x2D, 0x05]]


def test_layouts_invert():
    codes = torch.randint(-8, 8, (10, 48), dtype=torch.int8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(unpack_rows(pack_rows(codes)), codes)
    for high_first in (False, True):
        assert torch.equal(unpack_columns(pack_columns(codes, high_first=high_first), high_first=high_first), codes)
    with pytest.raises(ValueError, match="even number of output rows"):
        pack_rows(codes[:3])
    with pytest.raises(ValueError, match="divisible by 8"):
        pack_int32(codes[:, :12])


def test_int32_words_are_compressed_tensors():
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    codes = torch.randint(-8, 8, (6, 40), dtype=torch.int8, generator=torch.Generator().manual_seed(1))
    assert torch.equal(pack_int32(codes), helpers.pack_to_int32(codes, 4))
    assert torch.equal(helpers.unpack_from_int32(pack_int32(codes), 4, torch.Size(codes.shape)), codes)


def test_int_matmul_is_exact_beyond_fp32():
    a = torch.full((2, 3000), -128, dtype=torch.int8)
    w = torch.full((3, 3000), -128, dtype=torch.int8)
    w[1] = 127
    w[2, ::2] = 3
    expected = a.numpy().astype(np.int64) @ w.numpy().astype(np.int64).T
    assert int_matmul(a, w).dtype == torch.int32
    assert np.array_equal(int_matmul(a, w).numpy(), expected)


def test_quantized_linear_is_the_integer_formula():
    x, weight = gaussian(5, 64, seed=4), gaussian(12, 64, seed=5)
    codes, scale = quantize_int4(weight)
    q, s = quantize_tokens(x)
    expected = (q.long() @ codes.long().T).double() * s.double() * scale.double().T
    got = quantized_linear(x, codes, scale)
    assert torch.allclose(got.double(), expected, rtol=1e-6, atol=0)
    assert q.abs().amax(1).tolist() == [127] * 5
    assert torch.equal(quantized_linear(torch.zeros(2, 64), codes, scale), torch.zeros(2, 12))
    reference = x @ decode_int4(codes, scale).T
    assert ((got - reference).norm() / reference.norm()).item() < 0.02


@pytest.mark.parametrize("rule", ["absmax/7", "absmax/7.5", "ssz"])
def test_fake_quantization_is_what_the_packers_write(rule):
    weight = gaussian(6, 40, seed=7).requires_grad_()
    out = fake_quant_int4(weight, rule)
    codes, scale = quantize_int4(weight.detach(), rule)
    stored = unpack_columns(pack_columns(codes))
    assert torch.equal(out, decode_int4(stored, scale))
    (out * torch.arange(40.0)).sum().backward()
    assert torch.equal(weight.grad, torch.arange(40.0).expand(6, 40))
