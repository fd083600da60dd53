"""The engine's request and reply formats: the subset of sglang's native API that rollouts, teachers and routers use.

    python -m pytest tests/tasks/test_engine.py -k request

A request that this engine cannot honour exactly is refused with a message that names the field; nothing is ignored silently
except options of text output (this engine has no tokenizer: token ids in, token ids out).
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field

from model.sampling import Completion, SamplingParams, row_seed

# fields of text handling and transport that change nothing about ids and log-probs
_IGNORED = {
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "no_stop_trim",
    "detokenize",
    "return_text_in_logprobs",
}
_SAMPLING = {"max_new_tokens", "temperature", "top_p", "top_k", "seed", "sampling_seed", "stop_token_ids", "ignore_eos"}
_REQUEST = {"input_ids", "sampling_params", "return_logprob", "logprob_start_len", "rid"}
# what a neutral value of an unsupported field looks like
_NEUTRAL = (None, False, 0, "", 0.0)
_NEUTRAL_BY_NAME = {"n": (1, None), "repetition_penalty": (1, 1.0, None)}


@dataclass
class GenerateRequest:
    """A validated /generate call: rows of token ids with their own settings. start_len -1: no input log-probs."""

    prompts: list[list[int]]
    params: list[SamplingParams]
    seeds: list[int]
    rids: list[str]
    return_logprob: bool
    start_lens: list[int]
    single: bool
    completions: dict[int, Completion] = field(default_factory=dict)
    input_logprobs: dict[int, list[float]] = field(default_factory=dict)


def _unsupported(name: str, value: object) -> bool:
    if name in _IGNORED:
        return False
    neutral = _NEUTRAL_BY_NAME.get(name, _NEUTRAL)
    return not (value in neutral or value == [] or value == {})


def parse_sampling(raw: object, where: str) -> SamplingParams:
    """A sampling_params object -> SamplingParams. ValueError names the field."""
    if raw is None:
        raw = {}
    if not isinstance(raw, dict):
        raise ValueError(f"{where} must be an object, got {type(raw).__name__}")
    for name, value in raw.items():
        if name not in _SAMPLING and _unsupported(name, value):
            raise ValueError(f"{where}.{name} is not supported (supported: {', '.join(sorted(_SAMPLING))})")
    if raw.get("seed") is not None and raw.get("sampling_seed") is not None:
        raise ValueError(f"{where}: give sampling_seed or seed, not both")
    values = {name: raw[name] for name in _SAMPLING if raw.get(name) is not None}
    if "sampling_seed" in values:
        values["seed"] = values.pop("sampling_seed")
    stop = values.get("stop_token_ids", [])
    if not isinstance(stop, list):
        raise ValueError(f"{where}.stop_token_ids must be a list of token ids")
    try:
        return SamplingParams(**values)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def parse_generate(body: object, default_seed: int) -> GenerateRequest:
    """The body of /generate -> GenerateRequest; ids are checked against the model by the engine. ValueError names the field."""
    if not isinstance(body, dict):
        raise ValueError("the request body must be a JSON object")
    for name, value in body.items():
        if name == "text" and value:
            raise ValueError("text is not supported: this engine has no tokenizer; send input_ids")
        if name not in _REQUEST and _unsupported(name, value):
            raise ValueError(f"{name} is not supported (supported: {', '.join(sorted(_REQUEST))})")
    ids = body.get("input_ids")
    if not isinstance(ids, list) or not ids:
        raise ValueError("input_ids must be a non-empty list of token ids, or a list of such lists")
    single = not isinstance(ids[0], list)
    prompts = [ids] if single else ids
    for row, prompt in enumerate(prompts):
        if not isinstance(prompt, list) or not prompt:
            raise ValueError(f"input_ids[{row}] must be a non-empty list of token ids")
        if any(type(token) is not int for token in prompt):
            at = next(i for i, token in enumerate(prompt) if type(token) is not int)
            raise ValueError(f"prompt {row}: token id at position {at} must be an integer, got {prompt[at]!r}")
    rows = len(prompts)
    raw = body.get("sampling_params")
    if isinstance(raw, list):
        if len(raw) != rows:
            raise ValueError(
                f"sampling_params has {len(raw)} entries for {rows} prompts; give one object, or one per prompt"
            )
        params = [parse_sampling(item, f"sampling_params[{row}]") for row, item in enumerate(raw)]
        given = [item or {} for item in raw]
        seeds = [
            row_seed(p.seed, 0) if g.get("seed", g.get("sampling_seed")) is not None else row_seed(default_seed, row)
            for row, (p, g) in enumerate(zip(params, given))
        ]
    else:
        shared = parse_sampling(raw, "sampling_params")
        given = raw or {}
        seed = shared.seed if given.get("seed", given.get("sampling_seed")) is not None else default_seed
        params, seeds = [shared] * rows, [row_seed(seed, row) for row in range(rows)]
    return GenerateRequest(
        prompts=prompts,
        params=params,
        seeds=seeds,
        rids=_parse_rids(body.get("rid"), rows, single),
        return_logprob=_parse_flag(body.get("return_logprob"), rows),
        start_lens=_parse_start_lens(body.get("logprob_start_len"), prompts),
        single=single,
    )


def _parse_flag(value: object, rows: int) -> bool:
    values = value if isinstance(value, list) else [value]
    if any(v not in (None, True, False) or isinstance(v, int) and not isinstance(v, bool) for v in values):
        raise ValueError(f"return_logprob must be true or false, got {value!r}")
    if len(set(map(bool, values))) > 1 or isinstance(value, list) and len(value) != rows:
        raise ValueError("return_logprob must be the same for all prompts of a request")
    return bool(values[0])


def _parse_start_lens(value: object, prompts: list[list[int]]) -> list[int]:
    values = value if isinstance(value, list) else [value] * len(prompts)
    if len(values) != len(prompts):
        raise ValueError(f"logprob_start_len has {len(values)} entries for {len(prompts)} prompts")
    starts = []
    for row, start in enumerate(values):
        start = -1 if start is None else start
        if type(start) is not int or start < -1 or start >= len(prompts[row]):
            raise ValueError(
                f"logprob_start_len {start!r} of prompt {row} must be -1 (none) or a position in [0, {len(prompts[row])})"
            )
        starts.append(start)
    return starts


def _parse_rids(value: object, rows: int, single: bool) -> list[str]:
    if value is None:
        return [uuid.uuid4().hex for _ in range(rows)]
    if isinstance(value, str):
        return [value] if single else [f"{value}_{row}" for row in range(rows)]
    if isinstance(value, list) and len(value) == rows and all(isinstance(v, str) for v in value):
        return value
    raise ValueError("rid must be a string, or a list with one string per prompt")


def reply(request: GenerateRequest, weight_version: int) -> dict | list[dict]:
    """The JSON reply: one object per prompt, a bare object for a bare prompt. Token entries are [log-prob, id, null]."""
    rows = [_row_reply(request, row, weight_version) for row in range(len(request.prompts))]
    return rows[0] if request.single else rows


def _row_reply(request: GenerateRequest, row: int, weight_version: int) -> dict:
    out, prompt = request.completions[row], request.prompts[row]
    if out.finish_reason == "stop":
        finish = {"type": "stop", "matched": out.matched}
    elif out.finish_reason == "length":
        finish = {"type": "length", "length": len(out.output_ids)}
    else:
        finish = {"type": "abort", "message": "the request was aborted"}
    meta = {
        "id": request.rids[row],
        "finish_reason": finish,
        "prompt_tokens": len(prompt),
        "completion_tokens": len(out.output_ids),
        "cached_tokens": 0,
        "weight_version": str(out.weight_runs[-1][0] if out.weight_runs else weight_version),
        "weight_runs": [[str(version), tokens] for version, tokens in out.weight_runs],
    }
    if request.return_logprob:
        meta["output_token_logprobs"] = [[lp, t, None] for lp, t in zip(out.output_logprobs, out.output_ids)]
        meta["input_token_logprobs"] = []
        start = request.start_lens[row]
        if start >= 0:
            # entry i holds log p(prompt[i] | prompt[:i]); the first one asked for has none, as in sglang
            scored = [None, *request.input_logprobs.get(row, [])[start:]]
            meta["input_token_logprobs"] = [[lp, t, None] for lp, t in zip(scored, prompt[start:])]
    return {"text": "", "output_ids": out.output_ids, "meta_info": meta}
