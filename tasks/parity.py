"""Parity gate: token log-probs of a rollout engine against the training forward, before its rollouts train anything (§3.2).

    python -m pytest tests/tasks/test_engine.py -k parity

Both regimes are compared, dense (length <= index_topk) and sparse, and both paths of an engine: scoring a given sequence
(prefill) and generating (decode). A smoke test is not enough: an engine may answer with plausible numbers that are wrong by
0.18 nats.

Where two scores of the indexer differ by less than rounding, two correct programs may select different keys; tokens from such a
place on are excused, up to MAX_EXCUSED of all. Exact ties are not excused: they are broken by the lower index everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.cross_entropy import linear_logprobs
from model.decode_check import selection_margins
from tasks.engine_client import EngineClient, ParityError

NEAR_TIE = 5e-6  # relative to the row's largest score
MAX_EXCUSED = 0.1


@dataclass
class _Case:
    kind: str  # "score" or "generate"
    ids: list[int]
    first: int  # index into ids of the first compared token
    engine_logprobs: list[float]


@torch.no_grad()
def training_logprobs(model: torch.nn.Module, sequences: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """The training forward's log-probs of ids[1:], float32 [len - 1] per sequence; one sequence at a time."""
    scored = []
    for ids in sequences:
        ids_s = torch.tensor(ids)
        hidden_sh = model(ids_s[None]).hidden_bsh[0]
        scored.append(linear_logprobs(hidden_sh[:-1], model.lm_head.weight, ids_s[1:]))
    return scored


def _cases(client: EngineClient, model, sequences: Sequence[Sequence[int]], new_tokens: int) -> list[_Case]:
    cfg = model.cfg
    topk, limit = cfg.index_topk, cfg.max_position_embeddings
    given = [list(ids) for ids in sequences if len(ids) > 1]
    if not given:
        raise ValueError("the parity gate needs at least one sequence of two or more token ids")
    dense = [ids for ids in given if len(ids) <= topk]
    sparse = [ids for ids in given if len(ids) > topk]
    joined = [token for ids in given for token in ids]
    # a regime that the caller's sequences do not reach is made from their tokens
    if not dense and topk > 1:
        dense = [joined[:topk]]
    wanted = min(2 * topk + 1, limit - new_tokens)
    if not sparse and wanted > topk:
        sparse = [(joined * (wanted // len(joined) + 1))[:wanted]]
    scored = [*dense, *sparse]
    cases = [_Case("score", ids, 1, lp) for ids, lp in zip(scored, client.score(scored))]
    # decode within the dense regime, across its edge, and wholly sparse
    starts = [dense[0][: max(1, topk - new_tokens)]] if dense else []
    starts += [sparse[0][: max(1, topk - new_tokens // 2)], sparse[0]] if sparse else []
    starts = [ids for ids in starts if len(ids) + new_tokens <= limit]
    params = {"max_new_tokens": new_tokens, "temperature": 1.0, "sampling_seed": 0, "ignore_eos": True}
    for ids, out in zip(starts, client.generate(starts, params)):
        cases.append(_Case("generate", ids + out.output_ids, len(ids), out.output_logprobs))
    return cases


def parity_gate(
    client: EngineClient, model, sequences: Sequence[Sequence[int]], tol: float = 1e-4, new_tokens: int = 24
) -> dict:
    """Raise ParityError at the first token whose log-prob differs by more than tol; otherwise say what was compared.

    Returns {tokens, dense_tokens, sparse_tokens, max_abs_diff (over tokens that were not excused), excused}. sequences: token ids
    of the kind the rollouts will have, without padding.
    """
    cases = _cases(client, model, sequences, new_tokens)
    expected = training_logprobs(model, [case.ids for case in cases])
    topk = model.cfg.index_topk
    report = {"tokens": 0, "dense_tokens": 0, "sparse_tokens": 0, "max_abs_diff": 0.0, "excused": 0}
    for case, logp_s in zip(cases, expected):
        logp_s = logp_s[case.first - 1 :].cpu()
        # JSON has no infinity: an engine sends null for log 0
        engine_s = torch.tensor([-torch.inf if lp is None else lp for lp in case.engine_logprobs])
        diff_s = (engine_s - logp_s).abs().nan_to_num(nan=torch.inf, posinf=torch.inf)
        report["tokens"] += len(diff_s)
        # the token at index i is predicted by the query at i - 1, which sees i keys
        dense = min(len(diff_s), max(0, topk + 1 - case.first))
        report["dense_tokens"] += dense
        report["sparse_tokens"] += len(diff_s) - dense
        over = (diff_s > tol).nonzero().flatten().tolist()
        if over:
            near = (selection_margins(model, [case.ids])[0] < NEAR_TIE).nonzero().flatten().tolist()
            free_from = near[0] if near else len(case.ids)
            for at in over:
                position = case.first + at
                if position - 1 < free_from:
                    raise ParityError(
                        f"the engine and the training forward disagree ({case.kind}, {len(case.ids)} tokens): token id "
                        f"{case.ids[position]} at position {position} has log-prob {engine_s[at]:.6f} from the engine, "
                        f"{logp_s[at]:.6f} from training (difference {diff_s[at]:.2e}, tolerance {tol:.0e})"
                    )
            report["excused"] += len(over)
            diff_s = diff_s[diff_s <= tol]
        if len(diff_s):
            report["max_abs_diff"] = max(report["max_abs_diff"], float(diff_s.max()))
    if report["excused"] > MAX_EXCUSED * report["tokens"]:
        raise ParityError(
            f"{report['excused']} of {report['tokens']} tokens differ by more than {tol:.0e} after a near-tied selection; "
            f"more than {MAX_EXCUSED:.0%} is not rounding"
        )
    return report
