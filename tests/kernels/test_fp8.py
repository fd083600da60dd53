"""Block-scaled fp8: each block's own scale, power-of-two scales, per-token activations, and the linear layer against float64."""

import pytest
import torch

from kernels.fp8 import (
    dequantize_fp8_blocks,
    fp8_linear,
    quantize_fp8_blocks,
    quantize_fp8_tokens,
    round_to_fp8,
)


def gaussian(rows, columns, seed=0):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def test_fp8_blocks_keep_each_block_at_its_own_scale():
    weight = gaussian(200, 300, seed=6)
    weight[:128, :128] *= 1e-4
    values, scale = quantize_fp8_blocks(weight)
    assert values.dtype == torch.float8_e4m3fn and scale.shape == (2, 3)
    back = dequantize_fp8_blocks(values, scale)
    for rows, columns in ((slice(0, 128), slice(0, 128)), (slice(128, 200), slice(256, 300))):
        error = (back - weight)[rows, columns].norm() / weight[rows, columns].norm()
        assert error < 0.04  # e4m3 keeps 3 mantissa bits; one scale for the matrix would lose the small block
    assert torch.equal(scale[1, 2], weight[128:, 256:].abs().max() / 448)


def test_numbers_by_hand():
    weight = torch.zeros(2, 4)
    weight[0] = torch.tensor([448.0, 1.0, -0.5, 17.0])  # 17 lies between 16 and 18: ties go to the even mantissa
    values, scale = quantize_fp8_blocks(weight)
    assert scale.tolist() == [[1.0]]
    assert values.float()[0].tolist() == [448.0, 1.0, -0.5, 16.0]
    values, scale = quantize_fp8_blocks(weight * 3, power_of_two=True)
    assert scale.tolist() == [[4.0]] and values.float()[0, 0] == 336 - 336 % 32  # 1344 / 4, three mantissa bits
    _, scale = quantize_fp8_blocks(torch.zeros(3, 3))
    assert scale.tolist() == [[1.0]]
    with pytest.raises(ValueError, match="finite"):
        quantize_fp8_blocks(torch.full((2, 2), float("nan")))
    with pytest.raises(ValueError, match="matrix"):
        quantize_fp8_blocks(torch.zeros(2, 2, 2))


def test_power_of_two_scales_never_overflow():
    weight = gaussian(256, 256, 1) * torch.logspace(-6, 6, 256)[:, None]
    _, exact = quantize_fp8_blocks(weight)
    values, scale = quantize_fp8_blocks(weight, power_of_two=True)
    assert (torch.frexp(scale).mantissa == 0.5).all() and (scale >= exact).all() and (scale < 2 * exact * 1.0001).all()
    assert values.float().abs().max() <= 448


def test_every_token_has_its_own_scale_per_group():
    x = gaussian(5, 300, 2)
    x[3] *= 1e4
    x[1, 128:256] *= 1e-5
    values, scale = quantize_fp8_tokens(x)
    assert scale.shape == (5, 3)
    assert torch.equal(scale[1, 1], x[1, 128:256].abs().max() / 448) and torch.equal(
        scale[3, 2], x[3, 256:].abs().max() / 448
    )
    back = values.float() * scale.repeat_interleave(128, 1)[:, :300]
    for token in range(5):
        for group in (slice(0, 128), slice(128, 256), slice(256, 300)):
            assert (back - x)[token, group].norm() < 0.04 * x[token, group].norm()


@pytest.mark.parametrize(("tokens", "rows", "columns"), [(7, 200, 300), (1, 128, 128), (3, 5, 1000), (0, 130, 140)])
def test_linear_is_the_product_of_what_was_stored(tokens, rows, columns):
    x, weight = gaussian(tokens, columns, 3), gaussian(rows, columns, 4)
    values, scale = quantize_fp8_blocks(weight)
    out = fp8_linear(x, values, scale)
    codes, scale_tg = quantize_fp8_tokens(x)
    stored_x = codes.double() * scale_tg.double().repeat_interleave(128, 1)[:, :columns]
    exact = stored_x @ dequantize_fp8_blocks(values, scale).double().T
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-4)
    if tokens > 1:
        assert (out - x @ weight.T).norm() < 0.06 * (x @ weight.T).norm()


def test_stacked_experts_are_rounded_one_by_one():
    experts = torch.stack([gaussian(130, 200, 5), gaussian(130, 200, 6) * 1e-3])
    rounded = round_to_fp8(experts)
    for one, all_ in zip(experts, rounded):
        assert torch.equal(all_, dequantize_fp8_blocks(*quantize_fp8_blocks(one)))
