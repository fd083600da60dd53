"""How close each selection of the indexer is to a tie: where rounding alone may make two correct programs choose different keys.

python -m pytest tests/tasks/test_engine.py -k parity
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.indexer import ROW_CHUNK, causal_mask, index_scores
from model.decode_forward import CachedForward
from model.decode_weights import DecoderWeights


class _Margins(CachedForward):
    def __init__(self, cfg, weights) -> None:
        super().__init__(cfg, weights)
        self.smallest_bs: torch.Tensor | None = None

    def _select(self, idx_q_bsjd, idx_k_bsd, idx_w_bsj):
        batch, size = idx_k_bsd.shape[:2]
        topk = self.cfg.index_topk
        if self.smallest_bs is None:
            self.smallest_bs = torch.full((batch, size), torch.inf)
        for start in range(0, size, ROW_CHUNK):
            stop = min(start + ROW_CHUNK, size)
            if stop <= topk:
                continue
            scores = index_scores(idx_q_bsjd[:, start:stop], idx_k_bsd[:, :stop], idx_w_bsj[:, start:stop])
            scores.masked_fill_(~causal_mask(start, stop, stop), -torch.inf)
            best = scores.topk(topk + 1, dim=-1).values
            scale = scores.masked_fill(scores.isinf(), 0.0).abs().amax(-1).clamp_min(1e-30)
            margin = (best[..., topk - 1] - best[..., topk]) / scale
            # an exact tie is broken by index, equally everywhere: not a source of disagreement
            margin = margin.masked_fill(margin == 0, torch.inf).nan_to_num(nan=torch.inf, posinf=torch.inf)
            self.smallest_bs[:, start:stop] = torch.minimum(self.smallest_bs[:, start:stop], margin)
        return super()._select(idx_q_bsjd, idx_k_bsd, idx_w_bsj)


@torch.no_grad()
def selection_margins(model: torch.nn.Module, sequences: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Per sequence float32 [S]: over layers, the smallest non-zero gap between the last selected and the first rejected score,
    relative to the row's largest |score|. inf where a query selects everything it may see, or the tie is exact."""
    forward = _Margins(model.cfg, DecoderWeights.read(model))
    margins = []
    for ids in sequences:
        forward.smallest_bs = None
        forward.prefill([list(ids)], last_only=False)
        smallest = forward.smallest_bs
        margins.append(torch.full((len(ids),), torch.inf) if smallest is None else smallest[0])
    return margins
