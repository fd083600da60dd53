"""Newton-Schulz against the SVD and against the one-matrix form."""

import pytest
import torch

from kernels.newton_schulz import newton_schulz, newton_schulz_groups, newton_schulz_reference


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(3, 24, 64), (3, 64, 24), (2, 32, 32), (1, 1, 16), (5, 128, 96)])
def test_singular_values_are_near_one_and_directions_are_kept(shape):
    x = random(*shape)
    y = newton_schulz(x)
    assert y.shape == x.shape
    s = torch.linalg.svdvals(y)
    assert s.min() > 0.3 and s.max() < 1.25
    # Every singular pair is scaled, none is rotated: U^T y V is diagonal.
    u, _, vh = torch.linalg.svd(x, full_matrices=False)
    core = u.transpose(1, 2) @ y @ vh.transpose(1, 2)
    off = core - torch.diag_embed(torch.diagonal(core, dim1=1, dim2=2))
    assert off.abs().max() < 1e-3


def test_batched_equals_one_at_a_time():
    for shape in [(6, 24, 64), (6, 64, 24), (6, 40, 40)]:
        x = random(*shape, seed=1)
        one = torch.stack([newton_schulz_reference(m) for m in x])
        torch.testing.assert_close(newton_schulz(x), one, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("max_elements", [1, 5000, 1 << 26])
def test_groups_keep_order_shape_and_value(max_elements):
    shapes = [(4, 24, 64), (1, 64, 24), (8, 32, 64), (2, 24, 64), (1, 128, 96), (1, 96, 128), (3, 64, 32)]
    blocks = [random(*s, seed=i) for i, s in enumerate(shapes)]
    for block, result in zip(blocks, newton_schulz_groups(blocks, max_elements=max_elements), strict=True):
        assert result.shape == block.shape
        torch.testing.assert_close(result, newton_schulz(block), atol=2e-5, rtol=1e-4)


def test_scale_of_the_gradient_does_not_matter_and_zero_stays_zero():
    x = random(2, 16, 48)
    torch.testing.assert_close(newton_schulz(x * 1e-3), newton_schulz(x), atol=1e-3, rtol=1e-2)
    assert newton_schulz(torch.zeros(1, 8, 8)).abs().max() == 0


def test_bfloat16_arithmetic_stays_close():
    x = random(4, 32, 96)
    y = newton_schulz(x, dtype=torch.bfloat16)
    assert y.dtype == torch.float32
    assert torch.nn.functional.cosine_similarity(y.flatten(1), newton_schulz(x).flatten(1)).min() > 0.99


def test_errors_name_the_shape():
    with pytest.raises(ValueError, match=r"\[3, 3\]"):
        newton_schulz(torch.zeros(3, 3))
