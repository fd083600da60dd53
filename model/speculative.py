"""Speculative decoding with the model's own MTP layer: draft several tokens, verify them in one forward (notes A.5).

    decoder = SpeculativeDecoder(model, draft_tokens=4)
    completions, stats = decoder.generate(prompts, SamplingParams(max_new_tokens=64, temperature=0.0))
    stats.acceptance_length      # tokens emitted per verification: accepted drafts + 1

    python -m pytest tests/model/test_speculative.py

One round: depth k = 1..n of the MTP recurrence drafts token k from the one before; one cached forward of the backbone over
[newest token, drafts] gives the model's own distribution at each of them; drafts are accepted from the left by rejection
sampling (Leviathan et al., arXiv 2211.17192; Chen et al., 2302.01318), and the first rejected place, or the place after the
last draft, is drawn from what is left of the model's distribution. The output's distribution is the plain decoder's; greedy
rows give the same tokens as plain greedy decoding, up to ties within rounding. Rejected tokens are rolled back by length.

Drafting "depth_caches" keeps one cache per depth and is exactly the recurrence of training (keys of depth k come from depth
k). "one_cache" is what serving engines do with a single MTP layer: later drafts extend the first depth's cache; it costs one
pass over the newly accepted tokens instead of n. Separate layers per depth need "depth_caches".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from model.sampling import Completion, RowSampler, SamplingParams, draw, row_params, uniforms
from model.window_forward import backbone_window, cached_block, check_windows, empty_cache

CHUNK = 128  # prompt positions per forward


@dataclass
class SpeculativeStats:
    """Counts over all rows and rounds. accepted[k]: how often draft k + 1 was accepted (and so all before it)."""

    rounds: int = 0
    accepted: list[int] = field(default_factory=list)

    @property
    def acceptance_length(self) -> float:
        """Tokens per verification; what a limit or a stop token cuts off afterwards counts, for it was verified."""
        return 1.0 + sum(self.accepted) / self.rounds if self.rounds else 0.0

    @property
    def acceptance_rates(self) -> list[float]:
        """Share of accepted drafts at each depth, among the rounds whose earlier drafts were all accepted."""
        offered = [self.rounds, *self.accepted[:-1]]
        return [a / o if o else 0.0 for a, o in zip(self.accepted, offered, strict=True)]


@dataclass
class _Rows:
    """Tensors of the running rows. known_b: tokens known; the newest is not in the backbone's cache yet."""

    tags: list[int]
    sampler: RowSampler
    known_b: torch.Tensor
    tokens_bt: torch.Tensor
    hidden_bth: torch.Tensor  # the backbone's output at positions below known - 1
    cache: object
    mtp_cache: object

    def select(self, keep: torch.Tensor) -> None:
        self.tags = [self.tags[i] for i in keep.tolist()]
        self.known_b, self.tokens_bt, self.hidden_bth = (
            t[keep] for t in (self.known_b, self.tokens_bt, self.hidden_bth)
        )
        for part in (self.sampler, self.cache, self.mtp_cache):
            part.select(keep)


class SpeculativeDecoder:
    """Decoding of a GlmMoeDsa with MTP layers; ValueError for a model or a combination that cannot draft."""

    def __init__(self, model: torch.nn.Module, draft_tokens: int = 4, drafting: str = "depth_caches") -> None:
        check_windows(model)
        if not model.mtp_layers:
            raise ValueError("speculative decoding drafts with the MTP layer; num_nextn_predict_layers is 0")
        if drafting not in ("depth_caches", "one_cache"):
            raise ValueError(f"drafting must be 'depth_caches' or 'one_cache', got {drafting!r}")
        if drafting == "one_cache" and len(model.mtp_layers) > 1:
            raise ValueError("drafting 'one_cache' needs a single MTP layer; separate layers have a cache each")
        if draft_tokens < 1:
            raise ValueError(f"draft_tokens must be at least 1, got {draft_tokens}")
        self.model, self.drafts, self.drafting = model, draft_tokens, drafting

    @torch.inference_mode()
    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams]
    ) -> tuple[list[Completion], SpeculativeStats]:
        """Continue each prompt; params as in model.decode.Decoder. Returns completions in order and the counts."""
        per_row, seeds = row_params(params, len(prompts))
        for row, (ids, one) in enumerate(zip(prompts, per_row, strict=True)):
            self._check(row, ids, one.max_new_tokens)
        done = [Completion() for _ in prompts]
        stats = SpeculativeStats(accepted=[0] * self.drafts)
        live = [i for i, p in enumerate(per_row) if p.max_new_tokens > 0]
        if not live:
            return done, stats
        state = self._prefill([list(prompts[i]) for i in live], [per_row[i] for i in live], [seeds[i] for i in live])
        state.tags = live
        stops = [
            frozenset(p.stop_token_ids) | (frozenset() if p.ignore_eos else frozenset(self.model.cfg.eos_token_ids))
            for p in per_row
        ]
        first_bv = self.model.logits(self._newest_hidden(state)).float()
        ids_b, logp_b = state.sampler.sample(first_bv, np.zeros(len(live), dtype=np.int64))
        state.tokens_bt.scatter_(1, state.known_b[:, None], ids_b[:, None])
        state.known_b = state.known_b + 1
        emitted = [([t], [p]) for t, p in zip(ids_b.tolist(), logp_b.tolist(), strict=True)]
        number = 0
        while True:
            keep = []
            for place, (tag, (ids, logps)) in enumerate(zip(state.tags, emitted, strict=True)):
                if not _record(done[tag], ids, logps, per_row[tag].max_new_tokens, stops[tag]):
                    keep.append(place)
            if not keep:
                return done, stats
            if len(keep) < len(state.tags):
                state.select(torch.tensor(keep, device=state.known_b.device))
            emitted = self._round(state, number, stats, first=number == 0)
            number += 1

    def _check(self, row: int, ids: Sequence[int], new_tokens: int) -> None:
        cfg = self.model.cfg
        if not len(ids):
            raise ValueError(f"prompt {row} is empty; a prompt needs at least one token")
        if len(ids) + new_tokens > cfg.max_position_embeddings:
            raise ValueError(
                f"prompt {row}: {len(ids)} prompt tokens + {new_tokens} new tokens exceed max_position_embeddings "
                f"{cfg.max_position_embeddings}"
            )
        if min(ids) < 0 or max(ids) >= cfg.vocab_size:
            raise ValueError(f"prompt {row}: a token id is outside [0, {cfg.vocab_size})")

    def _prefill(self, prompts: list[list[int]], params: list[SamplingParams], seeds: list[int]) -> _Rows:
        """The backbone over whole prompts, in chunks of positions; shorter rows run on padding past their end."""
        model, device = self.model, self.model.model.embed_tokens.weight.device
        rows, longest = len(prompts), max(map(len, prompts))
        capacity = longest + max(p.max_new_tokens for p in params) + 2 * self.drafts + 2 * CHUNK
        tokens_bt = torch.zeros(rows, capacity, dtype=torch.int64, device=device)
        for row, ids in enumerate(prompts):
            tokens_bt[row, : len(ids)] = torch.tensor(ids)
        layers = self.drafts if self.drafting == "depth_caches" else 1
        state = _Rows(
            [],
            RowSampler(params, seeds, device),
            torch.tensor([len(ids) for ids in prompts], device=device),
            tokens_bt,
            model.model.embed_tokens.weight.new_zeros(rows, capacity, model.cfg.hidden_size),
            empty_cache(model, model.cfg.num_hidden_layers, rows, capacity),
            empty_cache(model, layers, rows, capacity),
        )
        for start in range(0, longest, CHUNK):
            end = min(start + CHUNK, longest)
            positions_bw = torch.arange(start, end, device=device).expand(rows, -1)
            hidden = backbone_window(model, tokens_bt[:, start:end], positions_bw, state.cache)
            state.hidden_bth[:, start:end] = hidden
        return state

    def _newest_hidden(self, state: _Rows) -> torch.Tensor:
        """[B,H]: the backbone's output at the last token of each prompt."""
        return state.hidden_bth[torch.arange(len(state.known_b), device=state.known_b.device), state.known_b - 1]

    # ---- drafting

    def _draft(self, state: _Rows, first: bool, uniform_bk: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Drafts int64 [B,n] and the distributions they were drawn from, float64 [B,n,V].

        Recomputes the window of positions whose MTP entries used tokens that were still drafts: the last 2n, or in the first
        round the whole prompt. Drafts are written behind the known tokens.
        """
        last_b = state.known_b - 2  # the position whose depth 1 predicts the first unknown token
        if first:
            start_b, width = torch.zeros_like(last_b), int(last_b.max()) + 1
        else:
            width = 2 * self.drafts
            start_b = (last_b + 1 - width).clamp_(min=0)
        drafts: list[torch.Tensor] = [torch.zeros_like(last_b) for _ in range(self.drafts)]
        probs: list[torch.Tensor | None] = [None] * self.drafts
        newest_bh = state.hidden_bth.new_zeros(len(last_b), state.hidden_bth.shape[-1])
        depths = self.drafts if self.drafting == "depth_caches" else 1
        for offset in range(0, width, CHUNK):
            positions_bw = start_b[:, None] + torch.arange(offset, min(offset + CHUNK, width), device=start_b.device)
            here_bw = positions_bw == last_b[:, None]
            here_b = here_bw.any(1)
            h_bwh = state.hidden_bth.gather(1, positions_bw[..., None].expand(-1, -1, state.hidden_bth.shape[-1]))
            for k in range(depths):
                h_bwh = self._mtp(k, state, h_bwh, positions_bw, state.tokens_bt.gather(1, positions_bw + 1 + k), k)
                if here_b.any():
                    picked_bh = h_bwh[torch.arange(len(h_bwh)), here_bw.int().argmax(1)]
                    newest_bh = torch.where(here_b[:, None], picked_bh, newest_bh)
                    self._propose(k, state, newest_bh, here_b, drafts, probs, uniform_bk)
        every_b = torch.ones_like(last_b, dtype=torch.bool)
        for k in range(depths, self.drafts):  # one_cache: the chain goes on behind the known tokens
            position_b1 = (last_b + k)[:, None]
            token_b1 = drafts[k - 1][:, None]
            newest_bh = self._mtp(k, state, newest_bh[:, None], position_b1, token_b1, 0)[:, 0]
            self._propose(k, state, newest_bh, every_b, drafts, probs, uniform_bk)
        return torch.stack(drafts, 1), torch.stack(probs, 1)

    def _mtp(self, k: int, state: _Rows, h_bwh, positions_bw, ids_bw, slot: int) -> torch.Tensor:
        """Depth k + 1 at the given positions: [B,W,H], the block's output."""
        layers = self.model.mtp_layers
        layer = layers[min(k, len(layers) - 1)]
        z_bwh = layer.merge(self.model.model.embed_tokens(ids_bw), h_bwh)
        return cached_block(layer, z_bwh, self.model.rope(positions_bw), positions_bw, state.mtp_cache, slot)

    def _propose(self, k: int, state: _Rows, h_bh, rows_b, drafts, probs, uniform_bk) -> None:
        """Draw draft k + 1 of the rows in `rows_b` and write it behind their known tokens."""
        layers = self.model.mtp_layers
        norm = layers[min(k, len(layers) - 1)].shared_head.norm
        probs_bv = state.sampler.probs(self.model.logits(norm(h_bh)).float())
        ids_b = torch.where(rows_b, draw(probs_bv, uniform_bk[:, k]), drafts[k])
        drafts[k] = ids_b
        probs[k] = probs_bv if probs[k] is None else torch.where(rows_b[:, None], probs_bv, probs[k])
        place_b1 = (state.known_b + k)[:, None]
        state.tokens_bt.scatter_(
            1, place_b1, torch.where(rows_b[:, None], ids_b[:, None], state.tokens_bt.gather(1, place_b1))
        )

    # ---- verification

    def _round(self, state: _Rows, number: int, stats: SpeculativeStats, first: bool):
        """Draft, verify, accept: the emitted (ids, log-probs) of each row."""
        n, seeds_b = self.drafts, state.sampler.seeds_b
        # each row's stream: counter 0 drew the first token, then 2n + 1 numbers per round
        counters = 1 + number * (2 * n + 1) + np.arange(2 * n + 1)
        uniform = np.stack([uniforms(seeds_b, np.full(len(seeds_b), c)) for c in counters], 1)
        drafts_bk, q_bkv = self._draft(state, first, uniform[:, :n])
        rows_b = torch.arange(len(seeds_b), device=drafts_bk.device)
        positions_bw = (state.known_b - 1)[:, None] + torch.arange(n + 1, device=drafts_bk.device)
        hidden_bwh = backbone_window(self.model, state.tokens_bt.gather(1, positions_bw), positions_bw, state.cache)
        state.hidden_bth.scatter_(1, positions_bw[..., None].expand(-1, -1, hidden_bwh.shape[-1]), hidden_bwh)
        logits_bwv = self.model.logits(hidden_bwh).float()
        p_bwv = torch.stack([state.sampler.probs(logits_bwv[:, w]) for w in range(n + 1)], 1)
        accepted_b, final_b = accept(drafts_bk, q_bkv, p_bwv, uniform[:, n:])
        state.tokens_bt.scatter_(1, (state.known_b + accepted_b)[:, None], final_b[:, None])
        logp_bwv = torch.log_softmax(logits_bwv / state.sampler.temperature_b[:, None, None], -1)
        if not logp_bwv.isfinite().all():
            raise FloatingPointError("the model's logits are not finite: its weights have diverged or are damaged")
        out_bw = torch.cat([drafts_bk, final_b[:, None]], 1)
        out_bw[rows_b, accepted_b] = final_b
        logp_bw = logp_bwv.gather(2, out_bw[..., None])[..., 0]
        state.known_b = state.known_b + accepted_b + 1
        counts = accepted_b.tolist()
        stats.rounds += len(counts)
        for k in range(n):
            stats.accepted[k] += sum(c > k for c in counts)
        return [
            (ids[: c + 1], logps[: c + 1])
            for ids, logps, c in zip(out_bw.tolist(), logp_bw.tolist(), counts, strict=True)
        ]


def accept(
    drafts_bk: torch.Tensor, q_bkv: torch.Tensor, p_bwv: torch.Tensor, uniform_bw: np.ndarray
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rejection sampling: (accepted drafts int64 [B], the token that follows them int64 [B]).

    drafts int64 [B,n] drawn from q float64 [B,n,V]; p float64 [B,n+1,V] is the model's distribution at each place; uniform
    [B,n+1]. Draft k is accepted with probability min(1, p / q); the token after the accepted ones is drawn from
    max(p - q, 0), renormalised, or from p itself after the last draft. The emitted tokens are distributed as p, whatever q.
    """
    batch, n = drafts_bk.shape
    u_bw = torch.from_numpy(np.ascontiguousarray(uniform_bw)).to(drafts_bk.device)
    alive_b = torch.ones(batch, dtype=torch.bool, device=drafts_bk.device)
    accepted_b = torch.zeros(batch, dtype=torch.int64, device=drafts_bk.device)
    for k in range(n):
        at = drafts_bk[:, k : k + 1]
        p_b, q_b = p_bwv[:, k].gather(1, at)[:, 0], q_bkv[:, k].gather(1, at)[:, 0]
        alive_b = alive_b & (u_bw[:, k] * q_b < p_b)
        accepted_b = accepted_b + alive_b
    rows_b = torch.arange(batch, device=drafts_bk.device)
    p_bv = p_bwv[rows_b, accepted_b]
    q_bv = torch.where((accepted_b < n)[:, None], q_bkv[rows_b, accepted_b.clamp(max=n - 1)], 0.0)
    left_bv = (p_bv - q_bv).clamp_(min=0)
    # where rounding leaves nothing, p and q are equal and p itself is right
    left_bv = torch.where(left_bv.sum(-1, keepdim=True) > 0, left_bv, p_bv)
    return accepted_b, draw(left_bv, uniform_bw[:, n])


def _record(out: Completion, ids: list[int], logps: list[float], limit: int, stops: frozenset[int]) -> bool:
    """Append what a round emitted, cut at a stop token or the limit; True when the row is finished."""
    for token, logp in zip(ids, logps, strict=True):
        out.output_ids.append(token)
        out.output_logprobs.append(logp)
        if token in stops:
            out.finish_reason, out.matched = "stop", token
        if token in stops or len(out.output_ids) >= limit:
            out.weight_runs = [(0, len(out.output_ids))]
            return True
    return False
