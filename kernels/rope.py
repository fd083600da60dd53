"""Rotary position embedding in interleaved pairs (0,1),(2,3),..., as GLM-5 uses it in attention AND indexer (notes A.1, B.2).

Run its tests: `python -m pytest tests/kernels/test_rope.py`
"""

import torch


def rope_cis(positions_bs: torch.Tensor, dim: int, theta: float) -> torch.Tensor:
    """cos + i sin of position * theta^(-2j/dim), complex64 [..., dim/2] for integer positions [...].

    Angles are computed in fp32 exactly as transformers does: at position 4096 a double-precision angle would differ by 1e-4.
    """
    if dim % 2:
        raise ValueError(f"rope dimension must be even, got {dim}")
    inv_freq_r = 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.float32, device=positions_bs.device) / dim))
    angle_bsr = positions_bs[..., None].float() * inv_freq_r
    return torch.complex(angle_bsr.cos(), angle_bsr.sin())


def _pairs(x: torch.Tensor) -> torch.Tensor:
    x = x.contiguous()
    if x.storage_offset() % 2:  # one row of a wider tensor is contiguous wherever it begins, pairs begin at even places
        x = x.clone()
    return torch.view_as_complex(x.view(*x.shape[:-1], -1, 2))


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_bshr, cis_bs1r):
        ctx.save_for_backward(cis_bs1r)
        return torch.view_as_real(_pairs(x_bshr) * cis_bs1r).flatten(-2)

    @staticmethod
    def backward(ctx, dy_bshr):
        (cis_bs1r,) = ctx.saved_tensors
        return torch.view_as_real(_pairs(dy_bshr) * cis_bs1r.conj()).flatten(-2), None


def apply_rope(x_bshr: torch.Tensor, cis_bsr: torch.Tensor) -> torch.Tensor:
    """Rotate x [B,S,heads,dim] (or [B,S,dim]) by cis [B,S,dim/2]; pair layout and dtype kept, arithmetic fp32 or more."""
    cis = cis_bsr if x_bshr.dim() == cis_bsr.dim() else cis_bsr.unsqueeze(-2)
    if x_bshr.dtype == torch.float64:
        return _Rotate.apply(x_bshr, cis.to(torch.complex128))
    return _Rotate.apply(x_bshr.float(), cis).to(x_bshr.dtype)
