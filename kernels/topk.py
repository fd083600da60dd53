"""Deterministic top-k: the k largest, and among equal values the lowest indices first (notes B.5).

torch.topk leaves ties unspecified, and DSA scores tie often: ReLU gives exact zeros. Non-deterministic selection degrades RL
within a few steps, so training, prefill and decode all select through this module.

Run its tests: `python -m pytest tests/kernels/test_topk.py`
"""

import numpy as np
import torch


def _on_numpy(scores_ns: torch.Tensor) -> bool:
    return scores_ns.device.type == "cpu" and scores_ns.dtype in (torch.float32, torch.float64)


def _kth_largest(scores_ns: torch.Tensor, k: int) -> torch.Tensor:
    """The k-th largest value of each row, [..., 1]."""
    if _on_numpy(scores_ns):
        # numpy's vectorised quick-select takes a seventh of torch.topk's time at 256 columns, half at 2048.
        place = scores_ns.shape[-1] - k
        return torch.from_numpy(np.partition(scores_ns.detach().numpy(), place, axis=-1)[..., place : place + 1])
    return scores_ns.topk(k, dim=-1, sorted=False).values.amin(-1, keepdim=True)


def _fold(size: int, k: int) -> int:
    """Columns per group of _flat_index's first cut: 2 k to 4 k groups, no cut where a plain quick-select is as fast."""
    return 1 << (size // (2 * k)).bit_length() - 1 if size >= max(4 * k, 768) else 1


def _flat_index(scores_ns: torch.Tensor, k: int) -> np.ndarray:
    """Positions int64 [N, k] of each row's top-k set in the flattened CPU matrix [N, S], ascending; k < S.

    The k-th largest of the maxima of groups of columns is a lower bound of the k-th largest score, and few scores reach it: the
    exact selection runs on those alone (a fifth of the time of a quick-select over 2048 columns for k = 64).
    """
    rows, size = scores_ns.shape
    scores = scores_ns.detach().contiguous()
    fold = _fold(size, k)
    if fold > 1:
        groups = size // fold
        firsts = scores[:, : groups * fold].unflatten(1, (fold, groups)).amax(1)
    else:
        groups, firsts = size, scores
    scores = scores.numpy()
    least = np.partition(firsts.numpy(), groups - k, axis=1)[:, groups - k, None]
    found = np.flatnonzero(scores >= least)
    counts = np.diff(np.searchsorted(found, np.arange(rows + 1) * size))
    width = counts.max(initial=k)
    if width == k:
        return found.reshape(rows, k)
    inside = np.arange(width) < counts[:, None]
    few = np.full((rows, width), -np.inf, scores.dtype)
    few[inside] = scores.reshape(-1)[found]
    kth = np.partition(few, width - k, axis=1)[:, width - k, None]
    keep = inside & (few >= kth)
    tied = keep.sum(1) > k
    if tied.any():
        above, equal = few[tied] > kth[tied], inside[tied] & (few[tied] == kth[tied])
        keep[tied] = above | (equal & (equal.cumsum(1) <= k - above.sum(1, keepdims=True)))
    return found[keep[inside]].reshape(rows, k)


def topk_mask(scores_ns: torch.Tensor, k: int) -> torch.Tensor:
    """Boolean [..., S] with exactly min(k, S) True per row: the top-k set with lower-index tie-break. NaN is not allowed.

    -inf entries are ordinary smallest values: a row with fewer than k finite scores is filled up by its lowest -inf indices.
    """
    size = scores_ns.shape[-1]
    if k >= size:
        return torch.ones_like(scores_ns, dtype=torch.bool)
    if k <= 0:
        raise ValueError(f"k must be positive, got {k}")
    if _on_numpy(scores_ns) and _fold(size, k) > 1:
        mask_ns = torch.zeros(scores_ns.shape, dtype=torch.bool)
        mask_ns.view(-1).numpy()[_flat_index(scores_ns.reshape(-1, size), k).reshape(-1)] = True
        return mask_ns
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
    size = scores_ns.shape[-1]
    if 0 < k < size and _on_numpy(scores_ns):
        flat_nk = _flat_index(scores_ns.reshape(-1, size), k)
        return torch.from_numpy(flat_nk - np.arange(len(flat_nk))[:, None] * size).view(*scores_ns.shape[:-1], k)
    k = min(k, size)
    mask_ns = topk_mask(scores_ns, k)
    return mask_ns.nonzero()[:, -1].view(*scores_ns.shape[:-1], k)
