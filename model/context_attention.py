"""MLA with DSA when a sequence is spread over ranks (model/context_parallel.py): the same numbers as model.attention.MLA.

x and cis are those of this rank's tokens; rows and row weights of the indexer's loss are those of the whole sequence; masks
cover this rank's rows over the keys of the whole sequence: chunk by chunk, or as indices on the gathered path.

Run its tests: `python -m pytest tests/model/test_context_parallel.py`
"""

from collections.abc import Iterable, Iterator
from contextlib import nullcontext

import torch
import torch.nn.functional as F

from kernels.indexer import ROW_CHUNK, SelectedKeys, attention_mass, causal_mask, index_kl, index_scores
from kernels.sparse_attention import (
    attention_path,
    dense_attention,
    gathered_attention,
    masked_attention,
    masks_to_index,
)
from kernels.topk import topk_mask
from model.attention import MLA
from model.context_parallel import Context

DENSE_CHUNK = 256  # query rows whose causal mask is written out at a time


@torch.no_grad()
def select_local(q_bqnd, keys_btd, w_bqn, topk: int, pieces: list[tuple[int, int]]) -> Iterator[torch.Tensor]:
    """DSA selection of the query rows in `pieces` ([first, last) in the sequence, rows in that order) over all keys.

    bool [B, rows, stop] per chunk of rows; the keys are those of kernels.indexer.select_keys.
    """
    row = 0
    for first, last in pieces:
        for start in range(first, last, ROW_CHUNK):
            stop = min(start + ROW_CHUNK, last)
            rows = slice(row, row + stop - start)
            row = rows.stop
            causal = causal_mask(start, stop, stop, q_bqnd.device)
            if stop <= topk:
                yield causal.expand(q_bqnd.shape[0], -1, -1)
                continue
            scores = index_scores(q_bqnd[:, rows], keys_btd[:, :stop], w_bqn[:, rows])
            yield topk_mask(scores.masked_fill_(~causal, float("-inf")), topk) & causal


def as_index(masks: Iterable[torch.Tensor], topk: int) -> SelectedKeys:
    """The chunks of a selection as indices [B,Q,topk], one chunk's mask at a time: memory linear in the length."""
    index, valid = [], []
    for mask in masks:
        index_brk, valid_brk = masks_to_index([mask], topk)
        room = topk - index_brk.shape[-1]  # chunks at the sequence's start have fewer keys
        index.append(F.pad(index_brk, (0, room)))
        valid.append(F.pad(valid_brk, (0, room)))
    return SelectedKeys(torch.cat(index, dim=1), torch.cat(valid, dim=1))


class ContextMLA(MLA):
    """Takes MLA's place by model.context_parallel.set_context."""

    context: Context

    def forward(
        self,
        x_bsh: torch.Tensor,
        cis_bsr: torch.Tensor,
        *,
        attention: str = "sparse",
        rows_br: torch.Tensor | None = None,
        row_weight_br: torch.Tensor | None = None,
        index_only: bool = False,
        shared_masks: list[torch.Tensor] | SelectedKeys | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None, list[torch.Tensor] | SelectedKeys | None]:
        context = self.context
        path = attention_path(context.size, self.topk) if attention == "sparse" else "dense"
        learns = rows_br is not None and self.indexer is not None
        frozen = torch.no_grad if index_only else nullcontext
        with frozen():
            c_q = self.project_q_latent(x_bsh)
            c_kv, k_rope = self.project_kv_latent(x_bsh, cis_bsr)
            q_nope, q_rope = self.project_q(c_q, cis_bsr)
        keys = masks = kv_whole = None
        if context.form == "gather" or path != "dense" or learns:
            with (
                torch.enable_grad() if learns else nullcontext()
            ):  # index_only may hold for the caller, not for this loss
                kv_whole, keys = self._gather_latents(x_bsh, cis_bsr, c_kv, k_rope, learns or path != "dense", learns)
            if index_only:
                kv_whole = kv_whole.detach()
        if path != "dense":
            masks = shared_masks
            if self.indexer is not None:
                q_index, w = self.indexer.queries(c_q.detach(), cis_bsr), self.indexer.weights(x_bsh.detach())
                chunks = select_local(q_index, keys, w, self.topk, context.segments)
                indices = path == "gathered" or context.form == "ulysses"
                masks = as_index(chunks, self.topk) if indices else list(chunks)
            assert masks is not None, "a layer that shares a selection ran without one"
        with frozen():
            if context.form == "ulysses":
                out_bsh = self._ulysses(q_nope, q_rope, c_kv, k_rope, kv_whole, masks)
            elif path == "gathered":
                c_whole, r_whole = kv_whole.split([self.kv_lora, self.rope], dim=-1)
                out_bsh = self.output(self._gathered(q_nope, q_rope, c_whole, r_whole, masks))
            else:
                k, v = self.expand_kv(*kv_whole.split([self.kv_lora, self.rope], dim=-1))
                q = torch.cat([q_nope, q_rope], dim=-1)
                q, k, v = (t.transpose(1, 2) for t in (q, k, v))
                if masks is None:
                    o_bhsv = self._causal(q, k, v)
                else:
                    o_bhsv = masked_attention(q, k, v, masks, self.softmax_scale)
                out_bsh = self.output(o_bhsv.transpose(1, 2))
        loss = None
        if learns:
            q_bshd = torch.cat([q_nope, q_rope], dim=-1).detach()
            with torch.enable_grad():
                loss = self._local_index_loss(
                    x_bsh.detach(),
                    c_q.detach(),
                    cis_bsr,
                    q_bshd,
                    kv_whole.detach(),
                    keys,
                    masks,
                    rows_br,
                    row_weight_br,
                )
        return out_bsh, loss, masks

    def _gather_latents(self, x_bsh, cis_bsr, c_kv, k_rope, with_keys: bool, learns: bool):
        """([c_kv | k_rope] [B,T,kv_lora+rope], indexer keys [B,T,d_I] or None) of the whole sequence, in one message."""
        latents = torch.cat([c_kv, k_rope], dim=-1)
        if not with_keys or self.indexer is None:
            return self.context.gather(latents), None
        with nullcontext() if learns else torch.no_grad():
            keys = self.indexer.keys(x_bsh.detach(), cis_bsr)
        whole = self.context.gather(torch.cat([latents, keys], dim=-1))
        return whole.split([latents.shape[-1], keys.shape[-1]], dim=-1)

    def _causal(self, q_bhsd, k_bhtd, v_bhtv) -> torch.Tensor:
        """Dense attention of the rank's pieces of the sequence, each over all keys up to its end."""
        if q_bhsd.device.type == "cpu":
            parts = [
                (a, min(a + DENSE_CHUNK, b)) for first, b in self.context.segments for a in range(first, b, DENSE_CHUNK)
            ]
            masks = [causal_mask(a, b, b).unsqueeze(0) for a, b in parts]
            return masked_attention(q_bhsd, k_bhtd, v_bhtv, masks, self.softmax_scale)
        from torch.nn.attention.bias import causal_lower_right  # flash attention knows it; importing it takes a second

        outs, row = [], 0
        for first, last in self.context.segments:
            rows = slice(row, row + last - first)
            row = rows.stop
            bias = causal_lower_right(last - first, last)
            k, v = k_bhtd[:, :, :last], v_bhtv[:, :, :last]
            outs.append(
                F.scaled_dot_product_attention(q_bhsd[:, :, rows], k, v, attn_mask=bias, scale=self.softmax_scale)
            )
        return torch.cat(outs, dim=2)

    def _ulysses(self, q_nope, q_rope, c_kv, k_rope, kv_whole, masks) -> torch.Tensor:
        """All tokens of this rank's heads: MHA mode when dense, MQA mode over the gathered latents under a selection."""
        context = self.context
        if masks is None:
            q = torch.cat([q_nope, q_rope], dim=-1)
            k, v = self.expand_kv(c_kv, k_rope)
            qkv = context.to_heads(torch.cat([q, k, v], dim=-1)).transpose(1, 2)  # one message
            q, k, v = qkv.split([q.shape[-1], k.shape[-1], v.shape[-1]], dim=-1)
            o_bshv = dense_attention(q, k, v, self.softmax_scale).transpose(1, 2)
            return self.output(context.to_tokens(o_bshv, self.heads))
        w_uk_hnc, w_uv_hvc = self.absorbed_weights()
        q_bshc = torch.cat([torch.einsum("bshn,hnc->bshc", q_nope, w_uk_hnc), q_rope], dim=-1)
        both = torch.cat([masks.index, masks.valid.long()], dim=-1)
        index_btk, valid_btk = context.gather(both).split(self.topk, dim=-1)
        latent = gathered_attention(
            context.to_heads(q_bshc), kv_whole, index_btk, valid_btk.bool(), self.kv_lora, self.softmax_scale
        )
        return self.output(torch.einsum("bshc,hvc->bshv", context.to_tokens(latent, self.heads), w_uv_hvc))

    def _local_index_loss(self, x_bsh, c_q_bsr, cis_bsr, q_bshd, kv_btc, keys_btd, masks, rows_br, weight_br):
        """As MLA._index_loss over the rows that lie on this rank: its part of the mean, times the number of ranks."""
        batch, size = x_bsh.shape[0], self.context.size
        places_s = self.context.places_s.to(rows_br.device)
        place_t = torch.full((size,), -1, device=rows_br.device)
        place_t[places_s] = torch.arange(len(places_s), device=rows_br.device)
        local_br = place_t[rows_br]
        # Sequences have different numbers of rows here: those first, then others' places, filled with row 0 and weight 0.
        order_br = (local_br < 0).long().argsort(dim=1, stable=True)
        order_br = order_br[:, : max(1, int((local_br >= 0).sum(1).max()))]
        local_br, rows_br = local_br.gather(1, order_br), rows_br.gather(1, order_br)
        mine_br = local_br >= 0
        mine_weight_br = weight_br.gather(1, order_br) * mine_br
        local_br = local_br.clamp(min=0)
        rows_br = places_s[local_br]
        if masks is None:
            allowed_brt = torch.arange(size, device=rows_br.device) <= rows_br[..., None]
        elif isinstance(masks, SelectedKeys):
            allowed_brt = masks.allowed(local_br, size)
        else:
            allowed_brt = torch.zeros(*rows_br.shape, size, dtype=torch.bool, device=rows_br.device)
            start = 0
            for mask in masks:
                b, r = ((local_br >= start) & (local_br < start + mask.shape[1])).nonzero(as_tuple=True)
                allowed_brt[b, r, : mask.shape[2]] = mask[b, local_br[b, r] - start]
                start += mask.shape[1]
        pick = torch.arange(batch, device=rows_br.device)[:, None]
        with torch.no_grad():
            k_bthd = self.expand_kv(*kv_btc.split([self.kv_lora, self.rope], dim=-1))[0]
            mass = attention_mass(q_bshd[pick, local_br], k_bthd, allowed_brt, self.softmax_scale)
        cis_rows = cis_bsr.expand(batch, -1, -1)[pick, local_br]
        scores = self.indexer.scores(c_q_bsr[pick, local_br], x_bsh[pick, local_br], cis_rows, keys_btd)
        kl_br = index_kl(scores, mass, allowed_brt)
        return (kl_br * mine_weight_br).sum() / weight_br.sum().clamp(min=1) * self.context.ranks
