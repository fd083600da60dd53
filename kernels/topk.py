"""Deterministic top-k: the k largest, and among equal values the lowest indices first (notes B.5).

torch.topk leaves ties unspecified, and DSA scores tie often: ReLU gives exact zeros. Non-deterministic selection degrades RL
within a few steps, so training, prefill and decode all select through this module.

Run its tests: `python -m pytest tests/kernels/test_topk.py`
"""

import numpy as np
import torch


def _kth_largest(scores_ns: torch.Tensor, k: int) -> torch.Tensor:
    """The k-th largest value of each row, [..., 1]."""
    if scores_ns.device.type == "cpu" and scores_ns.dtype in (torch.float32, torch.float64):
        # numpy's vectorised quick-select takes a seventh of torch.topk's time at 256 columns, half at 2048.
        place = scores_ns.shape[-1] - k
        return torch.from_numpy(np.partition(scores_ns.detach().numpy(), place, axis=-1)[..., place : place + 1])
    return scores_ns.topk(k, dim=-1, sorted=False).values.amin(-1, keepdim=True)


def topk_mask(scores_ns: torch.Tensor, k: int) -> torch.Tensor:
    """Boolean [..., S] with exactly min(k, S) True per row: the top-k set with lower-index tie-break. NaN is not allowed.

    -inf entries are ordinary smallest values: a row with fewer than k finite scores is filled up by its lowest -inf indices.
    """
    size = scores_ns.shape[-1]
    if k >= size:
        return torch.ones_like(scores_ns, dtype=torch.bool)
    if k <= 0:
        raise ValueError(f"k must be positive, got {k}")
    kth_n1 = _kth_largest(scores_ns, k)
    mask_ns = scores_ns >= kth_n1
    tied_n = mask_ns.sum(-1) > k
    if tied_n.any():
        rows_ms, kth_m1 = scores_ns[tied_n], kth_n1[tied_n]
        above_ms = rows_ms > kth_m1
        equal_ms = rows_ms == kth_m1
        room_m1 = k - above_ms.sum(-1, keepdim=True)
        mask_ns[tied_n] = above_ms | (equal_ms & (equal_ms.cumsum(-1) <= room_m1))
    return mask_ns


def topk_lower_index(scores_ns: torch.Tensor, k: int) -> torch.Tensor:
    """Indices int64 [..., min(k, S)] of the top-k set with lower-index tie-break, in ascending index order."""
    k = min(k, scores_ns.shape[-1])
    mask_ns = topk_mask(scores_ns, k)
    return mask_ns.nonzero()[:, -1].view(*scores_ns.shape[:-1], k)
