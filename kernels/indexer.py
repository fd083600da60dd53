"""The lightning indexer's arithmetic: scores, causal top-k selection in row chunks, and its KL training loss (notes B.1-B.3).

Run its tests: `python -m pytest tests/kernels/test_indexer.py`
"""

from typing import NamedTuple

import torch

from kernels import paths
from kernels.topk import topk_lower_index, topk_mask

ROW_CHUNK = 64  # small chunks waste fewer keys above the diagonal; 64 measured best at lengths 256 to 1024
CHUNK_SCORES = 1 << 18  # scores of select_index's chunk, 1 MB: at 8192 keys 32 rows take 3/4 of the time of 128


def _at_least_fp32(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()


def index_scores_reference(q_bqnd: torch.Tensor, k_btd: torch.Tensor, w_bqn: torch.Tensor) -> torch.Tensor:
    """The formula of index_scores over all heads at once, [B,Q,n_I,T] included."""
    dots_bqnt = torch.einsum("bqnd,btd->bqnt", _at_least_fp32(q_bqnd), _at_least_fp32(k_btd))
    return (torch.relu(dots_bqnt) * _at_least_fp32(w_bqn).unsqueeze(-1)).sum(2)


def index_scores(q_bqnd: torch.Tensor, k_btd: torch.Tensor, w_bqn: torch.Tensor) -> torch.Tensor:
    """I_ts = sum_j w_tj * ReLU(q_tj . k_s), without a causal mask; fp32 (fp64 for fp64 input) [B,Q,T].

    q [B,Q,n_I,d_I], k [B,T,d_I] (one shared key head), w [B,Q,n_I] already times n_I^-0.5 * d_I^-0.5. Differentiable.
    """
    path = paths.choose("index_scores", q_bqnd.device, q_bqnd.dtype)
    if path == "reference":
        return index_scores_reference(q_bqnd, k_btd, w_bqn)
    if path == "triton":
        from kernels import triton_indexer

        return triton_indexer.index_scores(q_bqnd, k_btd, w_bqn)
    q, kt, w = _at_least_fp32(q_bqnd), _at_least_fp32(k_btd).transpose(1, 2), _at_least_fp32(w_bqn)
    heads = q.shape[2]
    if torch.is_grad_enabled() and (q.requires_grad or kt.requires_grad or w.requires_grad):
        b, rows, _, d = q.shape
        dots = (q.reshape(b, rows * heads, d) @ kt).view(b, rows, heads, -1)
        return (torch.relu(dots) * w.unsqueeze(-1)).sum(2)
    total_bqt = None
    for j in range(heads):  # one head at a time keeps the working set in cache
        part = torch.bmm(q[:, :, j], kt).relu_()
        if total_bqt is None:
            total_bqt = part.mul_(w[:, :, j, None])
        else:
            total_bqt.addcmul_(part, w[:, :, j, None])
    return total_bqt


def causal_mask(start: int, stop: int, size: int, device=None) -> torch.Tensor:
    """True where key s <= query t, for query rows [start, stop) and keys [0, size)."""
    rows = torch.arange(start, stop, device=device)
    return torch.arange(size, device=device) <= rows[:, None]


@torch.no_grad()
def select_keys(q_bsnd, k_bsd, w_bsn, topk: int, row_chunk: int = ROW_CHUNK) -> list[torch.Tensor]:
    """DSA selection for every query of a sequence, in chunks of rows: list of bool [B, rows, stop].

    Chunk c covers query rows [c*row_chunk, stop) and keys [0, stop). Row t has min(topk, t+1) True entries: the
    largest scores among s <= t, ties to the lower index. Peak extra memory is one chunk's scores, never [S, n_I, S]; the masks
    themselves take S^2 / 2 bytes per sequence, so long sequences go through select_index.
    """
    path = paths.choose("select_keys", q_bsnd.device, q_bsnd.dtype)
    if path == "reference":
        whole = _select_reference(q_bsnd, k_bsd, w_bsn, topk)
        starts = range(0, whole.shape[1], row_chunk)
        return [whole[:, a : a + row_chunk, : a + row_chunk] for a in starts]
    if path == "triton":
        from kernels import triton_indexer

        return _index_to_masks(triton_indexer.select_index(q_bsnd, k_bsd, w_bsn, topk), row_chunk)
    return _mask_chunks(q_bsnd, k_bsd, w_bsn, topk, row_chunk)


def _causal_scores(q_bsnd, k_bsd, w_bsn, first: int, stop: int) -> torch.Tensor:
    """Scores of query rows [first, stop) over keys [0, stop), -inf where a key comes after its query."""
    scores = index_scores(q_bsnd[:, first:stop], k_bsd[:, :stop], w_bsn[:, first:stop])
    late = ~causal_mask(0, stop - first, stop - first, q_bsnd.device)
    scores[..., first:].masked_fill_(late, float("-inf"))
    return scores


def _mask_chunks(q_bsnd, k_bsd, w_bsn, topk: int, row_chunk: int) -> list[torch.Tensor]:
    size = q_bsnd.shape[1]
    masks = []
    for start in range(0, size, row_chunk):
        stop = min(start + row_chunk, size)
        first = min(max(start, topk), stop)  # rows before it have at most topk keys: nothing to choose
        parts = []
        if first > start:
            parts.append(causal_mask(start, first, stop, q_bsnd.device).expand(q_bsnd.shape[0], -1, -1))
        if stop > first:
            parts.append(topk_mask(_causal_scores(q_bsnd, k_bsd, w_bsn, first, stop), topk))
        masks.append(parts[0] if len(parts) == 1 else torch.cat(parts, dim=1))
    return masks


def _select_reference(q_bsnd, k_bsd, w_bsn, topk: int) -> torch.Tensor:
    """The whole selection [B,S,S] by a stable sort."""
    size = q_bsnd.shape[1]
    causal = causal_mask(0, size, size, q_bsnd.device)
    scores = index_scores_reference(q_bsnd, k_bsd, w_bsn).masked_fill(~causal, float("-inf"))
    order = scores.sort(dim=-1, descending=True, stable=True).indices[..., :topk]
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, order, True) & causal


def _valid(size: int, width: int, device) -> torch.Tensor:
    """[S, width]: row t has min(width, t + 1) selected keys."""
    return torch.arange(width, device=device) <= torch.arange(size, device=device)[:, None]


def _index_to_masks(index_bsk: torch.Tensor, row_chunk: int) -> list[torch.Tensor]:
    batch, size, width = index_bsk.shape
    valid = _valid(size, width, index_bsk.device)
    selected = SelectedKeys(index_bsk, valid.expand(batch, -1, -1))
    masks = []
    for start in range(0, size, row_chunk):
        stop = min(start + row_chunk, size)
        rows = torch.arange(start, stop, device=index_bsk.device).expand(batch, -1)
        masks.append(selected.allowed(rows, stop))
    return masks


class SelectedKeys(NamedTuple):
    """A selection whose size is linear in S: index int64 [B,S,k] ascending in its valid entries, valid bool [B,S,k]."""

    index: torch.Tensor
    valid: torch.Tensor

    def allowed(self, rows_br: torch.Tensor, size: int) -> torch.Tensor:
        """Which of `size` keys the given query rows may see: bool [B,R,size]."""
        pick = torch.arange(len(rows_br), device=rows_br.device)[:, None]
        index_brk, valid_brk = self.index[pick, rows_br], self.valid[pick, rows_br]
        # unused places hold key 0, which their row may have selected, too: the larger of the two stands
        none = torch.zeros(*rows_br.shape, size, dtype=torch.bool, device=rows_br.device)
        return none.scatter_reduce_(-1, index_brk, valid_brk, "amax")


@torch.no_grad()
def select_index(q_bsnd, k_bsd, w_bsn, topk: int, row_chunk: int | None = None) -> SelectedKeys:
    """DSA selection as indices, k = min(topk, S): memory linear in S.

    The same keys as select_keys. Row t has min(topk, t + 1) valid entries, first in its row; the others hold 0.
    """
    batch, size = q_bsnd.shape[:2]
    width = min(topk, size)
    valid_bsk = _valid(size, width, q_bsnd.device).expand(batch, -1, -1)
    path = paths.choose("select_index", q_bsnd.device, q_bsnd.dtype)
    if path == "triton":
        from kernels import triton_indexer

        return SelectedKeys(triton_indexer.select_index(q_bsnd, k_bsd, w_bsn, topk), valid_bsk)
    index_bsk = torch.zeros(batch, size, width, dtype=torch.long, device=q_bsnd.device)
    if path == "reference":
        index_bsk[valid_bsk] = _select_reference(q_bsnd, k_bsd, w_bsn, topk).nonzero()[:, -1]
        return SelectedKeys(index_bsk, valid_bsk)
    every = torch.arange(width, device=q_bsnd.device)
    index_bsk[:, :width] = torch.where(valid_bsk[0, :width], every, 0)
    row_chunk = row_chunk or max(16, min(128, CHUNK_SCORES // size))
    for start in range(width, size, row_chunk):
        stop = min(start + row_chunk, size)
        index_bsk[:, start:stop] = topk_lower_index(_causal_scores(q_bsnd, k_bsd, w_bsn, start, stop), topk)
    return SelectedKeys(index_bsk, valid_bsk)


def index_kl(scores_brt: torch.Tensor, target_brt: torch.Tensor, allowed_brt: torch.Tensor) -> torch.Tensor:
    """KL(p || softmax(I)) per row over the allowed keys (notes B.3): [B,R] in nats.

    scores: indexer logits with gradient. target: non-negative weights, zero outside `allowed`; L1-normalised here,
    taken as constant.
    """
    p = target_brt.detach()
    p = p / p.sum(-1, keepdim=True).clamp(min=1e-10)
    logq = scores_brt.masked_fill(~allowed_brt, float("-inf")).log_softmax(-1)
    return (p * (p.clamp(min=1e-10).log() - logq.masked_fill(~allowed_brt, 0.0))).sum(-1)


@torch.no_grad()
def attention_mass(q_brhd: torch.Tensor, k_bthd: torch.Tensor, allowed_brt: torch.Tensor, scale: float) -> torch.Tensor:
    """Main attention probabilities of chosen query rows, summed over heads: the indexer's target p before normalisation [B,R,T].

    q [B,R,H,d], k [B,T,H,d]; softmax over the allowed keys only, which renormalises on the selected set in the sparse stage.
    At least fp32: float64 models, which only checks have, get it in float64.
    """
    wide = torch.promote_types(q_brhd.dtype, torch.float32)
    bias = torch.zeros(allowed_brt.shape, dtype=wide, device=q_brhd.device).masked_fill_(~allowed_brt, float("-inf"))
    mass = None
    for h in range(q_brhd.shape[2]):
        keys_bdt = k_bthd[:, :, h].to(wide).transpose(1, 2)
        probs = torch.baddbmm(bias, q_brhd[:, :, h].to(wide), keys_bdt, alpha=scale).softmax(-1)
        mass = probs if mass is None else mass.add_(probs)
    return mass
