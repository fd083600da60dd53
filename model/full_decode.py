"""Generation by whole forward passes, for models that the cached decoder refuses: GQA, windows, Gated DeltaNet (notes A.4, A.6).

    completions = generate(model, prompts, SamplingParams(max_new_tokens=32, temperature=0.0))

Each token costs a forward pass over everything before it: meant for short evaluations of ablated models, not for rollouts.
Sampling, random streams and stop rules are the cached decoder's (model/decode.py), so where both apply they agree.

Run its tests: `python -m pytest tests/model/test_full_decode.py`
"""

from collections.abc import Sequence

import numpy as np
import torch

from model.sampling import Completion, RowSampler, SamplingParams, row_params
from model.transformer import GlmMoeDsa


def _check(model: GlmMoeDsa, row: int, ids: Sequence[int], new_tokens: int) -> None:
    if not ids:
        raise ValueError(f"prompt {row} is empty; a prompt needs at least one token")
    if len(ids) + new_tokens > model.cfg.max_position_embeddings:
        raise ValueError(
            f"prompt {row}: {len(ids)} prompt tokens + {new_tokens} new tokens exceed max_position_embeddings "
            f"{model.cfg.max_position_embeddings}"
        )
    bad = [t for t in ids if not 0 <= t < model.cfg.vocab_size]
    if bad:
        raise ValueError(f"prompt {row}: token id {bad[0]} is outside [0, {model.cfg.vocab_size})")


@torch.inference_mode()
def generate(
    model: GlmMoeDsa,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams],
    attention: str | None = None,
) -> list[Completion]:
    """Continue each prompt. params: one for all rows, or one per row; attention: "sparse" (MLA's default) or "dense".

    Raises ValueError for empty prompts, ids outside the vocabulary and prompts too long for max_position_embeddings.
    """
    attention = attention or ("sparse" if model.cfg.attention == "mla" else "dense")
    per_row, seeds = row_params(params, len(prompts))
    for row, (ids, one) in enumerate(zip(prompts, per_row, strict=True)):
        _check(model, row, ids, one.max_new_tokens)
    device = model.model.embed_tokens.weight.device
    eos = set(model.cfg.eos_token_ids)
    stops = [set(p.stop_token_ids) | (set() if p.ignore_eos else eos) for p in per_row]
    completions = [Completion() for _ in prompts]
    live = [row for row, p in enumerate(per_row) if p.max_new_tokens > 0]
    while live:
        texts = [list(prompts[row]) + completions[row].output_ids for row in live]
        longest = max(map(len, texts))
        # right padding: every kind of attention is causal, and what follows a row's last token is not read
        ids_bs = torch.tensor([ids + [0] * (longest - len(ids)) for ids in texts], device=device)
        hidden_bsh = model(ids_bs, attention=attention).hidden_bsh
        last_b = torch.tensor([len(ids) - 1 for ids in texts], device=device)
        logits_bv = model.logits(hidden_bsh[torch.arange(len(live), device=device), last_b]).float()
        sampler = RowSampler([per_row[row] for row in live], [seeds[row] for row in live], device)
        counters_b = np.array([len(completions[row].output_ids) for row in live], dtype=np.int64)
        tokens_b, logp_b = sampler.sample(logits_bv, counters_b)
        going = []
        for row, token, logp in zip(live, tokens_b.tolist(), logp_b.tolist(), strict=True):
            out = completions[row]
            out.output_ids.append(token)
            out.output_logprobs.append(logp)
            if token in stops[row]:
                out.finish_reason, out.matched = "stop", token
            elif len(out.output_ids) < per_row[row].max_new_tokens:
                going.append(row)
        live = going
    for out in completions:
        out.weight_runs = [(0, len(out.output_ids))] if out.output_ids else []
    return completions
