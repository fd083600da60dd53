"""Sampling parameters, counter-based random numbers and token sampling for the decoder (GLM-5 paper §3.2: rollouts).

Every row of a batch owns a random stream: token number c of a row with stream seed s uses uniform(s, c), a pure function.
What a row draws therefore does not depend on the rows beside it, on the order of requests, or on rows that finish early.

    python -m pytest tests/model/test_decode.py -k sampling
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

MAX_NEW_TOKENS = 1 << 20
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class SamplingParams:
    """How to continue one prompt.

    max_new_tokens: 0 scores the prompt only. temperature: 0 is greedy. top_p in (0, 1]; top_k: -1 or 0 is off.
    seed: an int; inside a list of prompts that share one SamplingParams, row r uses stream `row_seed(seed, r)`.
    stop_token_ids are added to the model's eos ids; ignore_eos drops the model's eos ids (stop_token_ids still stop).
    """

    max_new_tokens: int = 128
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        for name in ("max_new_tokens", "top_k", "seed"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise ValueError(f"{name} must be an integer, got {value!r}")
        for name in ("temperature", "top_p"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise ValueError(f"{name} must be a finite number, got {value!r}")
        if not isinstance(self.ignore_eos, bool):
            raise ValueError(f"ignore_eos must be true or false, got {self.ignore_eos!r}")
        if not 0 <= self.max_new_tokens <= MAX_NEW_TOKENS:
            raise ValueError(f"max_new_tokens must be in [0, {MAX_NEW_TOKENS}], got {self.max_new_tokens}")
        if self.temperature < 0 or 0 < self.temperature < 1e-4:
            raise ValueError(f"temperature must be 0 (greedy) or at least 1e-4, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if self.top_k < -1:
            raise ValueError(f"top_k must be -1 (off), 0 (off) or positive, got {self.top_k}")
        for token in self.stop_token_ids:
            if isinstance(token, bool) or not isinstance(token, int) or token < 0:
                raise ValueError(f"stop_token_ids must be non-negative integers, got {token!r}")


@dataclass
class Completion:
    """One finished row. output_ids include the stop token when one was hit; output_logprobs has one float per output id.

    Log-probs are log softmax(logits / T), before top-p and top-k; greedy rows report T = 1. At T = 1 and top_p = 1 they are the
    log-probs of the sampling distribution and of the model. finish_reason: "stop" | "length" | "abort"; matched: the stop token.
    weight_runs: [(weight version, number of output tokens made with it)], in order.
    """

    output_ids: list[int] = field(default_factory=list)
    output_logprobs: list[float] = field(default_factory=list)
    finish_reason: str = "length"
    matched: int | None = None
    weight_runs: list[tuple[int, int]] = field(default_factory=list)


def _mix64(x: np.ndarray) -> np.ndarray:
    """splitmix64's finaliser: a bijection of uint64 with good avalanche."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def row_seed(seed: int, row: int) -> int:
    """Stream seed of row `row` of a request with integer `seed`: a 63-bit int, a pure function of both."""
    with np.errstate(over="ignore"):
        base = _mix64(np.array([seed & (2**64 - 1)], dtype=np.uint64) + _GOLDEN)
        mixed = _mix64(base + np.array([row + 1], dtype=np.uint64) * _GOLDEN)
    return int(mixed[0] >> np.uint64(1))


def row_params(params: SamplingParams | Sequence[SamplingParams], rows: int) -> tuple[list[SamplingParams], list[int]]:
    """Per-row parameters and stream seeds: one shared SamplingParams gives row_seed(seed, r), a list row_seed(its seed, 0)."""
    if isinstance(params, SamplingParams):
        return [params] * rows, [row_seed(params.seed, row) for row in range(rows)]
    params = list(params)
    if len(params) != rows:
        raise ValueError(f"{rows} prompts but {len(params)} sampling parameter sets; give one set, or one per prompt")
    return params, [row_seed(item.seed, 0) for item in params]


def uniforms(seeds_b: np.ndarray, counters_b: np.ndarray) -> np.ndarray:
    """float64 [B] in [0, 1) with 52 random bits: a pure function of (stream seed, counter), both int64 [B]."""
    with np.errstate(over="ignore"):
        base = _mix64(seeds_b.astype(np.uint64) + _GOLDEN)
        bits = _mix64(base + (counters_b.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    return (bits >> np.uint64(12)).astype(np.float64) * 2.0**-52


class RowSampler:
    """Vectors of sampling settings for a batch; rows can be dropped and added. All tensors on one device.

    temperature_b float32 [B]; greedy_b bool [B]; top_p_b, top_k_b; seeds_b int64 numpy [B].
    """

    def __init__(self, params: Sequence[SamplingParams], seeds: Sequence[int], device: torch.device) -> None:
        self.device = device
        self.greedy_b = torch.tensor([p.temperature == 0 for p in params], dtype=torch.bool, device=device)
        scale = [1.0 if p.temperature == 0 else p.temperature for p in params]
        self.temperature_b = torch.tensor(scale, dtype=torch.float32, device=device)
        # top_p = 1 keeps everything: an infinite bound, so that rounding of the running sum cannot drop the tail
        top_p = [p.top_p if p.top_p < 1 else math.inf for p in params]
        self.top_p_b = torch.tensor(top_p, dtype=torch.float64, device=device)
        self.top_k_b = torch.tensor([p.top_k if p.top_k > 0 else 2**31 for p in params], device=device)
        self.seeds_b = np.asarray(seeds, dtype=np.int64)
        self._plan()

    def _plan(self) -> None:
        self.all_greedy = bool(self.greedy_b.all())
        self.any_greedy = bool(self.greedy_b.any())
        self.scaled = bool((self.temperature_b != 1.0).any())
        self.truncated = bool(((self.top_p_b < 1.0) | (self.top_k_b < 2**31)).any())

    def select(self, keep: torch.Tensor) -> None:
        """Keep rows `keep` (int64 indices), in that order."""
        self.greedy_b, self.temperature_b = self.greedy_b[keep], self.temperature_b[keep]
        self.top_p_b, self.top_k_b = self.top_p_b[keep], self.top_k_b[keep]
        self.seeds_b = self.seeds_b[keep.cpu().numpy()]
        self._plan()

    def extend(self, other: RowSampler) -> None:
        """Append another batch's rows."""
        for name in ("greedy_b", "temperature_b", "top_p_b", "top_k_b"):
            setattr(self, name, torch.cat([getattr(self, name), getattr(other, name)]))
        self.seeds_b = np.concatenate([self.seeds_b, other.seeds_b])
        self._plan()

    def probs(self, logits_bv: torch.Tensor) -> torch.Tensor:
        """float64 [B, V]: what `sample` draws from, after temperature and truncation; greedy rows are one-hot."""
        logp_bv = torch.log_softmax((logits_bv / self.temperature_b[:, None]).float(), dim=-1)
        probs_bv = logp_bv.exp().double()
        if self.truncated:
            probs_bv = _truncate(probs_bv, self.top_p_b, self.top_k_b)
        if self.any_greedy:
            best_bv = torch.zeros_like(probs_bv).scatter_(1, logp_bv.argmax(-1, keepdim=True), 1.0)
            probs_bv = torch.where(self.greedy_b[:, None], best_bv, probs_bv)
        return probs_bv / probs_bv.sum(-1, keepdim=True)

    def sample(self, logits_bv: torch.Tensor, counters_b: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """logits float32 [B, V], counters int64 [B] -> (ids int64 [B], log-probs float32 [B]).

        Inverse-CDF sampling in float64, so a token of probability zero is never drawn; greedy ties go to the lower id.
        FloatingPointError when logits are NaN or infinite.
        """
        if self.scaled:
            logits_bv = logits_bv / self.temperature_b[:, None]
        logp_bv = torch.log_softmax(logits_bv.float(), dim=-1)
        ids_b = logp_bv.argmax(dim=-1) if self.any_greedy else None
        if not self.all_greedy:
            probs_bv = logp_bv.exp().double()
            if self.truncated:
                probs_bv = _truncate(probs_bv, self.top_p_b, self.top_k_b)
            drawn_b = draw(probs_bv, uniforms(self.seeds_b, counters_b))
            ids_b = drawn_b if ids_b is None else torch.where(self.greedy_b, ids_b, drawn_b)
        logp_b = logp_bv.gather(1, ids_b[:, None]).squeeze(1)
        if not logp_b.isfinite().all():
            raise FloatingPointError("the model's logits are not finite: its weights have diverged or are damaged")
        return ids_b, logp_b


def draw(probs_bv: torch.Tensor, uniform_b: np.ndarray) -> torch.Tensor:
    """Inverse-CDF draw: float64 weights [B, V] (any positive sum), numbers in [0, 1) [B] -> ids int64 [B]."""
    cdf_bv = probs_bv.cumsum(dim=-1)
    u_b = torch.from_numpy(np.ascontiguousarray(uniform_b)).to(probs_bv.device)
    threshold_b1 = (u_b * cdf_bv[:, -1])[:, None]
    return torch.searchsorted(cdf_bv, threshold_b1, right=True).squeeze(1).clamp_(max=cdf_bv.shape[1] - 1)


def _truncate(probs_bv: torch.Tensor, top_p_b: torch.Tensor, top_k_b: torch.Tensor) -> torch.Tensor:
    """Zero what top-k then top-p exclude (float64 [B, V]). Ties go to the lower id; the most likely token always stays."""
    sorted_bv, order_bv = probs_bv.sort(dim=-1, descending=True, stable=True)
    rank_v = torch.arange(sorted_bv.shape[1], device=probs_bv.device)
    sorted_bv = sorted_bv.masked_fill(rank_v[None, :] >= top_k_b[:, None], 0.0)
    before_bv = sorted_bv.cumsum(dim=-1) - sorted_bv
    total_b1 = sorted_bv.sum(dim=-1, keepdim=True)
    # a token stays when the mass ranked above it has not yet reached top_p
    sorted_bv = sorted_bv.masked_fill((before_bv >= top_p_b[:, None] * total_b1) & (rank_v > 0)[None, :], 0.0)
    return torch.zeros_like(probs_bv).scatter_(1, order_bv, sorted_bv)
