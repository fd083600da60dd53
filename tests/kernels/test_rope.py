"""Interleaved RoPE: by hand, relative, and with transformers' dot products."""

import math

import pytest
import torch

from kernels.rope import apply_rope, rope_cis


def test_by_hand():
    cis = rope_cis(torch.tensor([[3]]), 4, 100.0)  # frequencies 1 and 100^-0.5 = 0.1
    x = torch.tensor([[[[1.0, 0.0, 0.0, 2.0]]]])
    expected = [math.cos(3), math.sin(3), -2 * math.sin(0.3), 2 * math.cos(0.3)]
    assert apply_rope(x, cis).flatten().tolist() == pytest.approx(expected, abs=1e-6)


def test_scores_equal_transformers():
    hf = pytest.importorskip("transformers.models.glm_moe_dsa.modeling_glm_moe_dsa")
    q, k = torch.randn(2, 9, 3, 8), torch.randn(2, 9, 1, 8)
    positions = torch.arange(9)[None] + 4000
    cis = rope_cis(positions, 8, 1e6)
    angle = torch.cat([cis.angle(), cis.angle()], -1)
    theirs_q, theirs_k = hf.apply_rotary_pos_emb_interleave(q, k, angle.cos(), angle.sin(), unsqueeze_dim=2)
    ours = torch.einsum("bshd,btxd->bhst", apply_rope(q, cis), apply_rope(k, cis))
    torch.testing.assert_close(ours, torch.einsum("bshd,btxd->bhst", theirs_q, theirs_k), atol=1e-5, rtol=1e-5)


def test_gradient_and_layouts():
    cis = rope_cis(torch.arange(5)[None], 6, 1e4)
    x = torch.randn(2, 5, 3, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: apply_rope(t, cis), (x,))
    sliced = torch.randn(2, 5, 3, 10)[..., 3:9]  # odd offset, not contiguous
    torch.testing.assert_close(apply_rope(sliced, cis), apply_rope(sliced.clone(), cis))
    flat = torch.randn(2, 5, 6)
    torch.testing.assert_close(apply_rope(flat, cis), apply_rope(flat[:, :, None], cis)[:, :, 0])
    with pytest.raises(ValueError, match="even"):
        rope_cis(torch.arange(3), 5, 1e4)
