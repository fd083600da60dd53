"""RMSNorm with a hand-written backward: three passes over the activations where autograd's composite form takes nine.

Run its tests: `python -m pytest tests/kernels/test_norms.py`
"""

import torch


def rms_norm_reference(x_bsh: torch.Tensor, weight_h: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight, statistics in fp32; the formula transformers uses (GlmMoeDsaRMSNorm)."""
    x_f = x_bsh if x_bsh.dtype == torch.float64 else x_bsh.float()
    return weight_h * (x_f * torch.rsqrt(x_f.pow(2).mean(-1, keepdim=True) + eps)).to(x_bsh.dtype)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_bsh, weight_h, eps):
        width = x_bsh.shape[-1]
        # vector_norm reads x once and writes one number per row; x.pow(2).mean() would write a whole tensor first.
        inv_bs1 = torch.linalg.vector_norm(x_bsh, dim=-1, keepdim=True).square_().div_(width).add_(eps).rsqrt_()
        xhat_bsh = x_bsh * inv_bs1
        ctx.save_for_backward(xhat_bsh, weight_h, inv_bs1)
        return xhat_bsh * weight_h

    @staticmethod
    def backward(ctx, dy_bsh):
        xhat_bsh, weight_h, inv_bs1 = ctx.saved_tensors
        dxhat_bsh = dy_bsh * weight_h
        prod_bsh = dy_bsh * xhat_bsh
        dweight_h = prod_bsh.flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        if not ctx.needs_input_grad[0]:
            return None, dweight_h, None
        # d/dx of x*inv: inv * (dxhat - xhat * mean(dxhat * xhat)); sum(dxhat * xhat) = prod @ weight is one matvec.
        mean_bs1 = (prod_bsh @ weight_h).div_(xhat_bsh.shape[-1]).unsqueeze(-1)
        dx_bsh = dxhat_bsh.addcmul_(xhat_bsh, mean_bs1, value=-1.0).mul_(inv_bs1)
        return dx_bsh, dweight_h, None


def rms_norm(x_bsh: torch.Tensor, weight_h: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm over the last dimension (notes A.2). Any leading shape; output in x's dtype.

    fp32 and fp64 inputs take the hand-written backward; lower precisions take the reference, whose statistics are fp32.
    """
    if x_bsh.dtype not in (torch.float32, torch.float64) or weight_h.dtype != x_bsh.dtype:
        return rms_norm_reference(x_bsh, weight_h, eps)
    if not torch.is_grad_enabled():
        width = x_bsh.shape[-1]
        inv_bs1 = torch.linalg.vector_norm(x_bsh, dim=-1, keepdim=True).square_().div_(width).add_(eps).rsqrt_()
        return (x_bsh * inv_bs1).mul_(weight_h)
    return _RmsNorm.apply(x_bsh, weight_h, eps)
