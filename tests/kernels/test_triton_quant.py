"""Triton quantizers: INT4 codes, scales and nibbles, and FP8 values and scales, bit for bit; the FP8 product against float64."""

import torch

from tests.kernels.triton_case import triton_checks


def _weight(device, dtype=torch.float32, rows=9, columns=70):
    w = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))
    w[2] = 0
    w[3] *= 1e-6
    w[4, :8] = torch.tensor([3.5, 0.25, -0.75, 1.25, 0.5, -0.5, 1.5, 2.5])  # ties once divided by a scale of 0.5
    w[4, 8:] = 0
    return w.to(device, dtype)


def _int4(device, dtype, rule, divisor):
    from kernels.int4 import pack_columns, quantize_int4
    from kernels.triton_quant import quantize_int4 as triton_int4

    w = _weight(device, dtype)
    codes, scale = quantize_int4(w, rule)
    got_codes, got_scale, packed = triton_int4(w, divisor, pack=True)
    assert torch.equal(got_scale, scale) and torch.equal(got_codes, codes)
    assert torch.equal(packed, pack_columns(codes))


def check_int4_fp32_is_bit_identical(device):
    _int4(device, torch.float32, "absmax/7", 7.0)


def check_int4_bf16_is_bit_identical(device):
    _int4(device, torch.bfloat16, "absmax/7.5", 7.5)


def check_int4_rows_of_several_blocks_and_refusals(device):
    from kernels.int4 import quantize_int4
    from kernels.triton_quant import quantize_int4 as triton_int4

    w = _weight(device, rows=5, columns=2500)
    assert torch.equal(triton_int4(w, 7.0)[0], quantize_int4(w, "absmax/7")[0])
    try:
        triton_int4(w[:, :3], 7.0, pack=True)
    except ValueError as error:
        assert "even number of input columns, got 3" in str(error)
    else:
        raise AssertionError("an odd number of columns was packed")


def check_fake_quantization_takes_the_triton_path_and_passes_the_gradient(device):
    from kernels import paths
    from kernels.int4 import decode_int4, fake_quant_int4, quantize_int4

    w = _weight(device).requires_grad_()
    with paths.force(quantize_int4="triton"):
        out = fake_quant_int4(w, "absmax/7")
    assert torch.equal(out, decode_int4(*quantize_int4(w.detach(), "absmax/7")))
    up = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(device)
    out.backward(up)
    assert torch.equal(w.grad, up)


def check_fp8_blocks_and_tokens_are_bit_identical(device):
    from kernels.fp8 import quantize_fp8_blocks, quantize_fp8_tokens
    from kernels.triton_quant import quantize_fp8

    w = _weight(device, rows=150, columns=140)
    for power in (False, True):
        for rows, reference in ((128, quantize_fp8_blocks), (1, quantize_fp8_tokens)):
            values, scale = reference(w, power_of_two=power)
            got, got_scale = quantize_fp8(w, rows, power_of_two=power)
            assert torch.equal(got_scale, scale) and torch.equal(got.float(), values.float()), (power, rows)


def check_fp8_product(device):
    from kernels import paths
    from kernels.fp8 import dequantize_fp8_blocks, fp8_linear, quantize_fp8_blocks, quantize_fp8_tokens

    weight, x = _weight(device, rows=150, columns=300), _weight(device, rows=70, columns=300)
    values, scale = quantize_fp8_blocks(weight)
    with paths.force(fp8="triton"):
        got = fp8_linear(x, values, scale)
    codes, scale_tg = quantize_fp8_tokens(x)
    stored = codes.double() * scale_tg.double().repeat_interleave(128, 1)[:, :300]
    exact = stored @ dequantize_fp8_blocks(values, scale).double().T
    torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=1e-4)


def launches(dtype):
    import kernels.triton_quant as triton_quant

    w = torch.zeros(128, 256, dtype=dtype)
    triton_quant.quantize_int4(w, 7.0, pack=True)
    triton_quant.INTERPRETED = False
    values, scale = triton_quant.quantize_fp8(w, 128, power_of_two=True)
    triton_quant.fp8_linear(w, values, scale)


test_triton = triton_checks(__name__)
