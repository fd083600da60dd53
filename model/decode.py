"""Batched cached decoding of the project's model (notes A.2, B, G.1): rollouts, greedy evaluation and teacher log-probs.

    decoder = Decoder(model)
    decoder.generate([[1, 2, 3]] * 8, SamplingParams(max_new_tokens=32, seed=7))  # one prefill, eight continuations
    decoder.score([[1, 2, 3, 4]])  # log-probs of ids[1:]

    python -m pytest tests/model/test_decode.py

Prompts that occur more than once are prefilled once and repeated in the cache. Finished rows leave the batch. The random stream
of a row is its own (model/sampling.py), so batching changes a result by rounding only. Key selection: model/decode_forward.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from model.decode_forward import CachedForward
from model.decode_weights import DecoderWeights
from model.kv_cache import LatentCache
from model.sampling import Completion, RowSampler, SamplingParams, row_params

PREFILL_TOKENS = 8192  # padded tokens per prefill chunk
DROP_SHARE = 8  # finished rows are dropped once they are 1/8 of the batch: dropping copies the cache


@dataclass
class _Row:
    """A row of the running batch: what it produces, when it stops, and the caller's handle."""

    tag: object
    params: SamplingParams
    stop_ids: frozenset[int]
    prompt: list[int]
    completion: Completion = field(default_factory=Completion)
    done: bool = False


class Decoder:
    """Cached decoding for a `GlmMoeDsa` model.

    dtype: "float32" follows training to rounding; "bfloat16" computes in bf16, "int8" rounds every weight matrix to per-row
    int8, "fp8" to e4m3 in blocks of 128 x 128: rollout modes that differ from training on purpose (IcePop's case, §3.2).
    Weights are read from the model at each generate or score call, so an optimizer step needs no message; with
    auto_refresh=False the caller says `refresh()` (the engine does).
    """

    def __init__(self, model: torch.nn.Module, dtype: str = "float32", auto_refresh: bool = True) -> None:
        self.model, self.cfg, self.dtype, self.auto_refresh = model, model.cfg, dtype, auto_refresh
        self.eos_ids = frozenset(self.cfg.eos_token_ids)
        self.refresh()

    def refresh(self) -> None:
        """Read the model's weights again."""
        self.forward = CachedForward(self.cfg, DecoderWeights.read(self.model, self.dtype))

    # ---- public calls -------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
        on_step: Callable[[], bool] | None = None,
    ) -> list[Completion]:
        """Continue each prompt. params: one for all rows, or one per row. on_step() runs between tokens; True aborts all rows.

        Raises ValueError for empty prompts, ids outside the vocabulary and prompts too long for max_position_embeddings.
        """
        if self.auto_refresh:
            self.refresh()
        per_row, seeds = row_params(params, len(prompts))
        completions: list[Completion | None] = [None] * len(prompts)
        batch = DecodeBatch(self)
        finished = batch.add(prompts, per_row, seeds, list(range(len(prompts))))
        while True:
            for tag, completion in finished:
                completions[tag] = completion
            if not batch.rows:
                return completions
            if on_step is not None and on_step():
                finished = batch.abort()
            else:
                finished = batch.step()

    @torch.inference_mode()
    def score(self, sequences: Sequence[Sequence[int]], temperature: float = 1.0) -> list[list[float]]:
        """Log-probs of ids[1:], each given what precedes it: len(ids) - 1 floats per sequence, log softmax(logits / T)."""
        if self.auto_refresh:
            self.refresh()
        unique, index = self._unique(sequences, 0)
        scored: list[list[float]] = [[] for _ in unique]
        for chunk in self._chunks(unique):
            rows = [unique[i] for i in chunk]
            hidden_nh, _ = self.forward.prefill(rows, last_only=False)
            targets_n = torch.tensor([t for ids in rows for t in [*ids[1:], 0]], device=hidden_nh.device)
            logp_n = torch.cat(
                [
                    torch.log_softmax(self.forward.logits(h) / temperature, -1).gather(1, t[:, None]).squeeze(1)
                    for h, t in zip(hidden_nh.split(1024), targets_n.split(1024), strict=True)
                ]
            )
            if logp_n.isnan().any():
                raise FloatingPointError("the model's logits are not finite: its weights have diverged or are damaged")
            logp_n = logp_n.tolist()
            start = 0
            for i, ids in zip(chunk, rows, strict=True):
                scored[i] = logp_n[start : start + len(ids) - 1]
                start += len(ids)
        return [list(scored[i]) for i in index]

    def prefill(self, prompts: Sequence[Sequence[int]]) -> tuple[torch.Tensor, LatentCache]:
        """(hidden [B, H] of every prompt's last token, filled cache), each distinct prompt computed once."""
        unique, index = self._unique(prompts, 0)
        hidden, whole, place = [], None, {}
        for chunk in self._chunks(unique):
            hidden_bh, cache = self.forward.prefill([unique[i] for i in chunk], last_only=True)
            hidden.append(hidden_bh)
            place.update({i: len(place) + at for at, i in enumerate(chunk)})
            if whole is None:
                whole = cache
            else:
                whole.extend(cache)
        order = [place[i] for i in index]
        hidden_bh = torch.cat(hidden)
        if order == list(range(whole.rows)):
            return hidden_bh, whole
        repeat = torch.tensor(order, device=hidden_bh.device)
        whole.select(repeat)
        return hidden_bh[repeat], whole

    # ---- prompts ------------------------------------------------------------------------------------------------------------

    def check(self, ids: Sequence[int], new_tokens: int, row: int = 0) -> None:
        """ValueError that names the row and the offending id or length."""
        if len(ids) == 0:
            raise ValueError(f"prompt {row} is empty; a prompt needs at least one token")
        limit = self.cfg.max_position_embeddings
        if len(ids) + new_tokens > limit:
            raise ValueError(
                f"prompt {row}: {len(ids)} prompt tokens + {new_tokens} new tokens exceed max_position_embeddings {limit}"
            )
        array = np.asarray(ids)
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise ValueError(f"prompt {row} must be a flat list of integer token ids")
        bad = np.flatnonzero((array < 0) | (array >= self.cfg.vocab_size))
        if bad.size:
            at = int(bad[0])
            raise ValueError(
                f"prompt {row}: token id {int(array[at])} at position {at} is outside [0, {self.cfg.vocab_size})"
            )

    def _unique(
        self, prompts: Sequence[Sequence[int]], new_tokens: Sequence[int] | int
    ) -> tuple[list[list[int]], list[int]]:
        """Distinct prompts in order of first appearance, and each prompt's place among them."""
        place: dict[tuple[int, ...], int] = {}
        index = []
        for row, ids in enumerate(prompts):
            self.check(ids, new_tokens if isinstance(new_tokens, int) else new_tokens[row], row)
            index.append(place.setdefault(tuple(ids), len(place)))
        return [list(ids) for ids in place], index

    @staticmethod
    def _chunks(prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        """Indices grouped by similar length, at most PREFILL_TOKENS padded tokens a group (one long prompt stands alone)."""
        order = sorted(range(len(prompts)), key=lambda i: (len(prompts[i]), i))
        chunks: list[list[int]] = []
        for i in order:
            if chunks and (len(chunks[-1]) + 1) * len(prompts[i]) <= PREFILL_TOKENS:
                chunks[-1].append(i)
            else:
                chunks.append([i])
        return chunks


class DecodeBatch:
    """The running batch: rows join with `add`, advance one token with `step`, and leave when they finish.

    Both return [(tag, Completion)] of the rows that finished. weight_version is stamped on the tokens made while it holds.
    """

    def __init__(self, decoder: Decoder, weight_version: int = 0) -> None:
        self.decoder, self.weight_version = decoder, weight_version
        self.rows: list[_Row] = []
        self.cache: LatentCache | None = None
        self.sampler: RowSampler | None = None
        self.ids_b: torch.Tensor | None = None  # each row's newest token, not yet in the cache
        self.lengths_b: torch.Tensor | None = None  # tokens in the cache

    @torch.inference_mode()
    def add(
        self,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        seeds: Sequence[int],
        tags: Sequence[object],
    ) -> list[tuple[object, Completion]]:
        """Prefill prompts and draw their first token. Rows with max_new_tokens 0 finish at once, empty."""
        decoder = self.decoder
        decoder._unique(prompts, [p.max_new_tokens for p in params])
        finished = [(t, Completion()) for t, p in zip(tags, params, strict=True) if p.max_new_tokens == 0]
        live = [i for i, p in enumerate(params) if p.max_new_tokens > 0]
        if not live:
            return finished
        hidden_bh, cache = decoder.prefill([prompts[i] for i in live])
        device = hidden_bh.device
        rows = []
        for i in live:
            stop = set(params[i].stop_token_ids) | (set() if params[i].ignore_eos else decoder.eos_ids)
            rows.append(_Row(tags[i], params[i], frozenset(stop), list(prompts[i])))
        sampler = RowSampler([params[i] for i in live], [seeds[i] for i in live], device)
        lengths_b = torch.tensor([len(prompts[i]) for i in live], device=device)
        ids_b, logp_b = sampler.sample(decoder.forward.logits(hidden_bh), np.zeros(len(live), dtype=np.int64))
        if self.rows:
            self.cache.extend(cache)
            self.sampler.extend(sampler)
            self.ids_b, self.lengths_b = torch.cat([self.ids_b, ids_b]), torch.cat([self.lengths_b, lengths_b])
        else:
            self.cache, self.sampler, self.ids_b, self.lengths_b = cache, sampler, ids_b, lengths_b
        self.rows.extend(rows)
        return finished + self._record(rows, ids_b, logp_b)

    @torch.inference_mode()
    def step(self) -> list[tuple[object, Completion]]:
        """One token for every row."""
        logits_bv = self.decoder.forward.step(self.ids_b, self.lengths_b, self.cache)
        self.lengths_b = self.lengths_b + 1
        counters = np.array([len(row.completion.output_ids) for row in self.rows], dtype=np.int64)
        self.ids_b, logp_b = self.sampler.sample(logits_bv, counters)
        return self._record(self.rows, self.ids_b, logp_b)

    @torch.inference_mode()
    def rebuild(self) -> None:
        """Recompute the running rows' cache with the decoder's present weights (after an update; sglang calls it retract)."""
        self._drop(force=True)
        if self.rows:
            # the newest token of a row is not in its cache yet: it enters with the next step
            _, self.cache = self.decoder.prefill([row.prompt + row.completion.output_ids[:-1] for row in self.rows])

    def abort(self, want: Callable[[object], bool] = lambda tag: True) -> list[tuple[object, Completion]]:
        """End the rows whose tag is wanted, with what they have so far."""
        finished = []
        for row in self.rows:
            if not row.done and want(row.tag):
                row.done, row.completion.finish_reason = True, "abort"
                finished.append((row.tag, row.completion))
        self._drop(force=True)
        return finished

    def _record(self, rows: list[_Row], ids_b: torch.Tensor, logp_b: torch.Tensor) -> list[tuple[object, Completion]]:
        finished = []
        for row, token, logp in zip(rows, ids_b.tolist(), logp_b.tolist(), strict=True):
            if row.done:
                continue
            out = row.completion
            out.output_ids.append(token)
            out.output_logprobs.append(logp)
            if out.weight_runs and out.weight_runs[-1][0] == self.weight_version:
                out.weight_runs[-1] = (self.weight_version, out.weight_runs[-1][1] + 1)
            else:
                out.weight_runs.append((self.weight_version, 1))
            if token in row.stop_ids:
                row.done, out.finish_reason, out.matched = True, "stop", token
            elif len(out.output_ids) >= row.params.max_new_tokens:
                row.done = True
            if row.done:
                finished.append((row.tag, out))
        self._drop()
        return finished

    def _drop(self, force: bool = False) -> None:
        """Remove finished rows, once they are worth the copy."""
        done = sum(row.done for row in self.rows)
        if done == len(self.rows):
            self.rows, self.cache, self.sampler, self.ids_b, self.lengths_b = [], None, None, None, None
        elif done and (force or done * DROP_SHARE >= len(self.rows)):
            keep = [i for i, row in enumerate(self.rows) if not row.done]
            index = torch.tensor(keep, device=self.ids_b.device)
            self.rows = [self.rows[i] for i in keep]
            self.cache.select(index)
            self.sampler.select(index)
            self.ids_b, self.lengths_b = self.ids_b[index], self.lengths_b[index]
