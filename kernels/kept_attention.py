"""Softmax attention of row chunks that keeps its probabilities for the backward: for short sequences on a CPU.

torch's flash attention computes scores and exponentials again in its backward, and autograd's backward of a slice per chunk fills
and adds a whole tensor each time. Where the probabilities fit in `KEPT_ELEMENTS` this form takes 0.8 of the time: five products
instead of seven, written straight into their place. Work goes through groups of sequences whose scores fit a core's second cache.

Run its tests: `python -m pytest tests/kernels/test_sparse_attention.py`
"""

import torch

KEPT_ELEMENTS = 1 << 23  # probabilities of one call: 32 MB
GROUP_ELEMENTS = 1 << 18  # scores of one product: 1 MB
# Added to a score whose key is not selected: exp gives exactly 0, as -inf would, and no -inf - -inf can occur.
OUT = -1e38


def fits(batch: int, heads: int, pairs: int) -> bool:
    """Whether the probabilities of so many pairs of query rows and keys, per sequence and head, may be kept."""
    return batch * heads * pairs <= KEPT_ELEMENTS


def keeps(q_bhsd: torch.Tensor, k_bhtd: torch.Tensor, v_bhtv: torch.Tensor, pairs: int) -> bool:
    """Whether `kept_attention` is the faster way: fp32 or fp64 on a CPU, a gradient is wanted, the probabilities fit.

    pairs: of query rows and keys in one sequence and head.
    """
    if q_bhsd.device.type != "cpu" or q_bhsd.dtype not in (torch.float32, torch.float64) or not torch.is_grad_enabled():
        return False
    if not (q_bhsd.requires_grad or k_bhtd.requires_grad or v_bhtv.requires_grad):
        return False
    return q_bhsd.shape[1] == k_bhtd.shape[1] and fits(*q_bhsd.shape[:2], pairs)


class _Kept(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q_bhsd, k_bhtd, v_bhtv, scale, group, *masks):
        batch, heads, size, _ = q_bhsd.shape
        # Products over [B * H] need one stride for both: contiguous by heads, which model/attention.py's tensors already are.
        q_nsd, k_ntd, v_ntv = (t.contiguous().flatten(0, 1) for t in (q_bhsd, k_bhtd, v_bhtv))
        out_bhsv = v_bhtv.new_empty(batch, heads, size, v_bhtv.shape[-1])
        out_nsv, kt_ndt = out_bhsv.flatten(0, 1), k_ntd.transpose(1, 2)
        probs = []
        for first in range(0, batch, group):
            last = min(first + group, batch)
            n, start = slice(first * heads, last * heads), 0
            for mask_brt in masks:
                rows, stop = mask_brt.shape[1:]
                p_bhrt = q_nsd.new_empty(last - first, heads, rows, stop)
                part_brt = mask_brt if len(mask_brt) == 1 else mask_brt[first:last]
                p_bhrt.copy_(part_brt.to(q_nsd.dtype).sub_(1.0).mul_(-OUT).unsqueeze(1))
                p_nrt, here = p_bhrt.flatten(0, 1), slice(start, start + rows)
                torch.baddbmm(p_nrt, q_nsd[n, here], kt_ndt[n, :, :stop], alpha=scale, out=p_nrt)
                torch.softmax(p_nrt, -1, out=p_nrt)
                torch.bmm(p_nrt, v_ntv[n, :stop], out=out_nsv[n, here])
                probs.append(p_nrt)
                start += rows
        ctx.save_for_backward(q_nsd, k_ntd, v_ntv, *probs)
        ctx.rest = batch, heads, scale, group
        return out_bhsv

    @staticmethod
    def backward(ctx, dout_bhsv):
        q_nsd, k_ntd, v_ntv, *probs = ctx.saved_tensors
        batch, heads, scale, group = ctx.rest
        dout_nsv, vt_nvt = dout_bhsv.contiguous().flatten(0, 1), v_ntv.transpose(1, 2)
        dq_nsd, dk_ntd, dv_ntv = (torch.empty_like(t) for t in (q_nsd, k_ntd, v_ntv))
        chunks = len(probs) // -(-batch // group)
        for i, first in enumerate(range(0, batch, group)):
            n, end = slice(first * heads, min(first + group, batch) * heads), q_nsd.shape[1]
            for p_nrt in reversed(probs[i * chunks : (i + 1) * chunks]):
                rows, stop = p_nrt.shape[1:]
                here, new = slice(end - rows, end), end == q_nsd.shape[1]
                q_nrd, dout_nrv, keys = q_nsd[n, here], dout_nsv[n, here], (n, slice(0, stop))
                ds_nrt = torch.bmm(dout_nrv, vt_nvt[n, :, :stop])
                torch.ops.aten._softmax_backward_data.out(ds_nrt, p_nrt, -1, ds_nrt.dtype, grad_input=ds_nrt)
                dq_nrd, dk, dv = dq_nsd[n, here], dk_ntd[keys], dv_ntv[keys]
                torch.baddbmm(dq_nrd, ds_nrt, k_ntd[keys], beta=0, alpha=scale, out=dq_nrd)
                if new and stop < k_ntd.shape[1]:
                    dk_ntd[n, stop:], dv_ntv[n, stop:] = 0.0, 0.0
                # The last chunk comes first: it sees the most keys and writes, the others add.
                torch.baddbmm(dk, ds_nrt.transpose(1, 2), q_nrd, beta=0 if new else 1, alpha=scale, out=dk)
                torch.baddbmm(dv, p_nrt.transpose(1, 2), dout_nrv, beta=0 if new else 1, out=dv)
                end -= rows
        grads = (t.unflatten(0, (batch, heads)) for t in (dq_nsd, dk_ntd, dv_ntv))
        return *grads, None, None, *(None for _ in range(chunks))


def kept_attention(q_bhsd, k_bhtd, v_bhtv, masks: list[torch.Tensor], scale: float) -> torch.Tensor:
    """softmax(scale q k^T over the selected keys) v, [B,H,S,dv]; q [B,H,S,d], k [B,H,T,d], v [B,H,T,dv].

    masks: bool [B or 1, rows, stop] per chunk of rows in order, stop not falling, each row with a key, as
    kernels.indexer.select_keys returns them.
    Differentiable in q, k, v.
    """
    group = max(1, GROUP_ELEMENTS // max(q_bhsd.shape[1] * m.shape[1] * m.shape[2] for m in masks))
    return _Kept.apply(q_bhsd, k_bhtd, v_bhtv, scale, group, *masks)
