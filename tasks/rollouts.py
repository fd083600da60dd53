"""Rollouts: problems in, scored samples of exact token ids out (single turn, or turns with tool calls).

A sample holds the ids and log-probs that the engine returned, never text tokenized again; what the environment says is
tokenized once, appended, and masked. `generator` is anything with `generate(prompts, params) -> [Completion]`: the HTTP
client of an engine process, or an in-process Decoder.

    python -m pytest tests/tasks/test_rollouts.py
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tasks import chat
from tasks.calculator import calculate
from tasks.problems import Problem, mix

_CALL = re.compile(r"<tool_call>([A-Za-z_]\w*)((?:<arg_key>[^<]*</arg_key><arg_value>[^<]*</arg_value>)*)</tool_call>")
_ARGUMENT = re.compile(r"<arg_key>([^<]*)</arg_key><arg_value>([^<]*)</arg_value>")

Tool = Callable[[str, Mapping[str, str]], str]


@dataclass
class Sample:
    """One trajectory. ids = prompt + sampled + environment tokens; loss_mask is 1 on sampled ones (0 elsewhere).

    logprobs: log-probability of each id under the policy that sampled it, 0.0 where loss_mask is 0. versions: weight
    versions that made tokens of it, in order. status: completed | truncated (length or turn limit) | failed (the
    environment's fault: carries no signal about the policy).
    """

    family: str
    key: str
    ids: list[int]
    prompt_len: int
    loss_mask: list[int]
    logprobs: list[float]
    versions: list[int] = field(default_factory=list)
    status: str = "running"
    text: str = ""
    turns: int = 0
    reward: float = 0.0

    def to_json(self) -> str:
        """One line of a rollout file; floats survive exactly."""
        return json.dumps(self.__dict__, ensure_ascii=False, sort_keys=True)

    @classmethod
    def from_json(cls, line: str) -> Sample:
        return cls(**json.loads(line))


def parse_tool_calls(text: str) -> list[tuple[str, dict[str, str]]]:
    """Tool calls of an assistant turn that consists of nothing else (thinking aside).

    Raises ValueError when the turn holds anything that is not a well-formed call: the process-format rule, reward 0.
    """
    body = text.rpartition("</think>")[2].strip()
    calls = [(name, dict(_ARGUMENT.findall(arguments))) for name, arguments in _CALL.findall(body)]
    if not calls or _CALL.sub("", body).strip():
        raise ValueError(f"not a well-formed tool call: {body[:80]!r}")
    return calls


def calculator_tool(name: str, arguments: Mapping[str, str]) -> str:
    """The one tool of the built-in problems. Errors the caller made come back as text, as tools answer."""
    if name != "calc" or set(arguments) != {"expr"}:
        return "error: no such tool"
    try:
        return calculate(arguments["expr"])
    except ValueError as error:
        return f"error: {error}"


class Roller:
    """Samples trajectories for problems with one tokenizer; knows the ids that end turns."""

    def __init__(self, tokenizer: Any, tool: Tool = calculator_tool) -> None:
        self.tokenizer, self.tool = tokenizer, tool
        self.stop_ids = chat.stop_ids(tokenizer)
        self.observation = tokenizer.token_to_id("<|observation|>")

    def roll(
        self,
        generator: Any,
        problems: Sequence[Problem],
        group_size: int,
        seed: int,
        temperature: float = 1.0,
    ) -> list[list[Sample]]:
        """`group_size` scored trajectories for each problem. The same weights, problems and seed give the same samples.

        All running trajectories advance turn by turn in one batch. Each row has its own random stream, from
        (seed, problem's place, member, turn).
        """
        from model.sampling import SamplingParams

        groups: list[list[Sample]] = []
        for problem in problems:
            ids = problem.prompt_ids(self.tokenizer)
            groups.append(
                [
                    Sample(problem.family, problem.key, list(ids), len(ids), [0] * len(ids), [0.0] * len(ids))
                    for _ in range(group_size)
                ]
            )
        rows = [(g, m, problems[g], sample) for g, group in enumerate(groups) for m, sample in enumerate(group)]
        turn = 0
        while running := [row for row in rows if row[3].status == "running"]:
            params = [
                SamplingParams(
                    max_new_tokens=problem.max_new_tokens,
                    temperature=temperature,
                    seed=mix(seed, g, m, turn) >> 1,
                    stop_token_ids=tuple(self.stop_ids),
                )
                for g, m, problem, _ in running
            ]
            completions = generator.generate([sample.ids for *_, sample in running], params)
            for (_, _, problem, sample), completion in zip(running, completions, strict=True):
                self._advance(problem, sample, completion)
            turn += 1
        return groups

    def _advance(self, problem: Problem, sample: Sample, completion: Any) -> None:
        """Append one sampled turn; then score the sample, or run its tools and leave it running."""
        out = list(completion.output_ids)
        sample.ids += out
        sample.loss_mask += [1] * len(out)
        sample.logprobs += completion.output_logprobs
        sample.versions += [v for v, _ in completion.weight_runs if v not in sample.versions]
        sample.turns += 1
        if completion.finish_reason != "stop":
            sample.status = "truncated"
            return
        sample.text = self.tokenizer.decode(out[:-1], skip_special_tokens=False)
        if out[-1] != self.observation:
            sample.status = "completed"
            sample.reward = problem.verify(sample.text)
            return
        if problem.max_turns == 1:
            sample.status = "completed"  # asked for a tool where there is none: wrong, and the model's own doing
            return
        try:
            calls = parse_tool_calls(sample.text)
        except ValueError:
            sample.status = "completed"
            return
        if sample.turns >= problem.max_turns:
            sample.status = "truncated"
            return
        try:
            results = [self.tool(name, arguments) for name, arguments in calls]
        except Exception as error:  # whatever breaks in an environment must not count against the policy
            sample.status, sample.text = "failed", f"{type(error).__name__}: {error}"
            return
        follow = chat.tool_response_text(results) + chat.generation_prompt(problem.thinking)
        ids = chat.encode(self.tokenizer, follow)
        sample.ids += ids
        sample.loss_mask += [0] * len(ids)
        sample.logprobs += [0.0] * len(ids)


def repair_groups(groups: Sequence[Sequence[Sample]], group_size: int) -> tuple[list[list[Sample]], dict[str, int]]:
    """Take environment failures out of groups (§4.1): a group with more than half its samples valid is filled up by
    repeating valid ones in order, any other is dropped. Returns the kept groups and counts.

    Advantages are to be computed on the repaired groups.
    """
    kept: list[list[Sample]] = []
    counts = {"failed": 0, "repaired": 0, "dropped": 0}
    for group in groups:
        valid = [sample for sample in group if sample.status != "failed"]
        counts["failed"] += len(group) - len(valid)
        if 2 * len(valid) <= group_size:
            counts["dropped"] += 1
            continue
        counts["repaired"] += len(valid) < group_size
        kept.append([valid[i % len(valid)] for i in range(group_size)])
    return kept, counts


def statistics(groups: Sequence[Sequence[Sample]], topk: int = 0) -> dict[str, float]:
    """What a training log shows of a batch: mean reward, per family too, entropy, lengths, shares of endings.

    sparse_share: samples longer than topk, for which the indexer had to select.

    entropy is the mean of -log pi over sampled tokens: at temperature 1 an unbiased estimate of the policy's own.
    """
    samples = [sample for group in groups for sample in group]
    if not samples:
        raise ValueError("no samples")
    sampled = [logp for s in samples for logp, m in zip(s.logprobs, s.loss_mask) if m]
    out = {
        "reward": sum(s.reward for s in samples) / len(samples),
        "entropy": -sum(sampled) / max(1, len(sampled)),
        "response_tokens": len(sampled) / len(samples),
        "sequence_tokens": sum(len(s.ids) for s in samples) / len(samples),
        "turns": sum(s.turns for s in samples) / len(samples),
        "sparse_share": sum(len(s.ids) > topk for s in samples) / len(samples),
        "truncated": sum(s.status == "truncated" for s in samples) / len(samples),
    }
    for family in sorted({s.family for s in samples}):
        rewards = [s.reward for s in samples if s.family == family]
        out[f"reward/{family}"] = sum(rewards) / len(rewards)
    return out
