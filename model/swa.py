"""Sliding-window layers (notes A.6): MLA's or GQA's own weights, attending to the last `sliding_window` keys only.

No parameter is added, so a full layer's weights fit as they are; an MLA layer loses its indexer. DSA does not apply: the window
is the selection, whatever `attention` says.

Run its tests: `python -m pytest tests/model/test_swa.py`
"""

from contextlib import nullcontext

import torch

from kernels.window_attention import window_attention
from model.attention import MLAProjections
from model.config import ModelConfig
from model.gqa import GQAProjections


class _Sliding:
    """The forward pass over a base's projections. Interface: model/attention.py."""

    def __init__(self, cfg: ModelConfig):
        super().__init__(cfg)
        self.window = cfg.sliding_window

    def forward(self, x_bsh, cis_bsr, *, index_only: bool = False, **_) -> tuple[torch.Tensor, None, None]:
        with torch.no_grad() if index_only else nullcontext():
            q, k, v = (t.transpose(1, 2) for t in self.project_qkv(x_bsh, cis_bsr))
            o_bhsv = window_attention(q, k, v, self.window, self.softmax_scale)
            return self.output(o_bhsv.transpose(1, 2)), None, None


class SlidingMLA(_Sliding, MLAProjections):
    """MLA over a window."""


class SlidingGQA(_Sliding, GQAProjections):
    """GQA over a window."""
