"""Latent key-value cache of MLA plus the indexer's key cache (GLM-5 paper §2.1, DSA; notes A.2 and B.2).

One token costs kv_lora_rank + qk_rope_head_dim numbers per layer for attention, shared by all heads, and index_head_dim for the
indexer: nothing per head is stored. Rows are left-aligned: row b holds positions 0..length_b-1.

    python -m pytest tests/model/test_decode.py -k cache
"""

from __future__ import annotations

import torch

BLOCK = 64


class LatentCache:
    """Growing cache for B rows and L layers.

    kv: [L, B, capacity, kv_lora_rank + qk_rope_head_dim] (normalised latent, then the rotated shared key);
    index: [layers with an indexer, B, capacity, index_head_dim] (indexer keys after LayerNorm and RoPE). Entries at or past a
    row's length are zero or stale and must be masked by the reader.
    """

    def __init__(self, kv: torch.Tensor, index: torch.Tensor) -> None:
        self.kv, self.index = kv, index

    @classmethod
    def empty(
        cls,
        layers: int,
        rows: int,
        capacity: int,
        kv_dim: int,
        index_dim: int,
        like: torch.Tensor,
        index_layers: int | None = None,
    ) -> LatentCache:
        """Zeroed cache with `like`'s dtype and device; capacity is rounded up to a block. index_layers: all when None."""
        capacity = _round_up(capacity)
        index = like.new_zeros(layers if index_layers is None else index_layers, rows, capacity, index_dim)
        return cls(like.new_zeros(layers, rows, capacity, kv_dim), index)

    @property
    def rows(self) -> int:
        return self.kv.shape[1]

    @property
    def capacity(self) -> int:
        return self.kv.shape[2]

    @property
    def nbytes(self) -> int:
        return self.kv.numel() * self.kv.element_size() + self.index.numel() * self.index.element_size()

    def reserve(self, length: int) -> None:
        """Make room for `length` positions in every row (block-wise growth, contents kept)."""
        if length <= self.capacity:
            return
        # a quarter more than asked for: growth copies stay a small share of a long generation
        capacity = _round_up(max(length, self.capacity + self.capacity // 4))
        self.kv, self.index = _widen(self.kv, capacity), _widen(self.index, capacity)

    def select(self, rows: torch.Tensor) -> None:
        """Keep (or repeat) rows by int64 index: finished rows are dropped, a prefilled prompt is repeated for its group."""
        self.kv, self.index = self.kv.index_select(1, rows), self.index.index_select(1, rows)

    def extend(self, other: LatentCache) -> None:
        """Append another cache's rows."""
        capacity = max(self.capacity, other.capacity)
        self.kv = torch.cat([_widen(self.kv, capacity), _widen(other.kv, capacity)], dim=1)
        self.index = torch.cat([_widen(self.index, capacity), _widen(other.index, capacity)], dim=1)


def _round_up(length: int) -> int:
    return max(BLOCK, -(-length // BLOCK) * BLOCK)


def _widen(x_lbtd: torch.Tensor, capacity: int) -> torch.Tensor:
    if x_lbtd.shape[2] == capacity:
        return x_lbtd
    wide = x_lbtd.new_zeros(*x_lbtd.shape[:2], capacity, x_lbtd.shape[3])
    wide[:, :, : x_lbtd.shape[2]] = x_lbtd
    return wide
