"""Trajectories from a scripted policy: exact ids, masks, tool turns, failures; and the statistics made of them."""

from dataclasses import dataclass, field

import pytest

from tasks import chat
from tasks.problems import build, sample, samples
from tasks.rollouts import Roller, Sample, calculator_tool, parse_tool_calls, repair_groups, statistics
from tests.tasks.tiny_tokenizer import build as build_tokenizer

CALL = "<tool_call>calc<arg_key>expr</arg_key><arg_value>{}</arg_value></tool_call><|observation|>"


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


@dataclass
class Completion:
    output_ids: list[int]
    output_logprobs: list[float]
    finish_reason: str = "stop"
    weight_runs: list = field(default_factory=lambda: [(7, 1)])


class Scripted:
    """A policy that answers by a function of (prompt text, how many turns it has had)."""

    def __init__(self, tokenizer, answer):
        self.tokenizer, self.answer, self.prompts, self.params = tokenizer, answer, [], []

    def generate(self, prompts, params):
        self.prompts.append(prompts)
        self.params.append(params)
        out = []
        for row, ids in enumerate(prompts):
            text = self.tokenizer.decode(ids, skip_special_tokens=False)
            reply = self.answer(row, text)
            new = chat.encode(self.tokenizer, reply)
            stopped = reply.endswith(("<|user|>", "<|observation|>", "<|endoftext|>"))
            out.append(Completion(new, [-0.5 - i for i in range(len(new))], "stop" if stopped else "length"))
        return out


def test_single_turn(tokenizer):
    problems = samples(build("addition"), "train", 0, 2)
    replies = [f"t</think>{problems[0].answer}<|user|>", "t</think>0<|user|>", "no end", "t</think>1<|observation|>"]
    policy = Scripted(tokenizer, lambda row, text: replies[row])
    groups = Roller(tokenizer).roll(policy, problems, 2, seed=3)
    flat = [s for g in groups for s in g]
    assert [s.reward for s in flat] == [1.0, 0.0, 0.0, 0.0]
    assert [s.status for s in flat] == ["completed", "completed", "truncated", "completed"]
    assert [s.key for s in flat] == [problems[0].key] * 2 + [problems[1].key] * 2
    for s, reply in zip(flat, replies):
        assert s.ids[: s.prompt_len] == problems[flat.index(s) // 2].prompt_ids(tokenizer)
        assert s.ids[s.prompt_len :] == chat.encode(tokenizer, reply)
        assert s.loss_mask == [0] * s.prompt_len + [1] * (len(s.ids) - s.prompt_len)
        assert s.logprobs[: s.prompt_len] == [0.0] * s.prompt_len and s.logprobs[s.prompt_len] == -0.5
        assert s.versions == [7]
    assert len({p.seed for p in policy.params[0]}) == 4
    again = Scripted(tokenizer, lambda row, text: replies[row])
    Roller(tokenizer).roll(again, problems, 2, seed=4)
    assert {p.seed for p in policy.params[0]}.isdisjoint(p.seed for p in again.params[0])


def test_tool_turns_follow_the_template(tokenizer):
    problem = next(p for p in samples(build("calculator", two_call_share=1.0), "train", 0, 9))
    first, second = (t["tool_calls"][0]["function"]["arguments"]["expr"] for t in problem.solution[::2][:2])

    def answer(row, text):
        return [CALL.format(first), CALL.format(second), problem.answer + "<|user|>"][text.count("<tool_response>")]

    ((s,),) = Roller(tokenizer).roll(Scripted(tokenizer, answer), [problem], 1, seed=0)
    assert s.reward == 1.0 and s.turns == 3 and s.status == "completed"
    # the trajectory is, id for id, what SFT shows for the same solution
    ids, mask = chat.render_tokens(tokenizer, [*problem.messages, *problem.solution], close=True)
    assert s.ids == ids and s.loss_mask == mask
    assert all((lp != 0.0) == bool(m) for lp, m in zip(s.logprobs, s.loss_mask))


def test_bad_calls_end_with_nothing_and_crashes_are_failures(tokenizer):
    problem = sample(build("calculator"), "train", 0)

    def run(reply, **kw):
        policy = Scripted(tokenizer, lambda row, text: reply)
        ((s,),) = Roller(tokenizer, **kw).roll(policy, [problem], 1, seed=0)
        return s

    assert (run("x<tool_call>calc<|observation|>").status, run("x<tool_call>calc<|observation|>").reward) == (
        "completed",
        0,
    )
    endless = run(CALL.format("1+1"))
    assert endless.status == "truncated" and endless.turns == problem.max_turns
    wrong = run(CALL.format("1+"))
    assert "error" in tokenizer.decode(wrong.ids, skip_special_tokens=False)

    def broken(name, arguments):
        raise ConnectionError("environment is down")

    crashed = run(CALL.format("1+1"), tool=broken)
    assert crashed.status == "failed" and "ConnectionError" in crashed.text


def test_parse_tool_calls():
    call = "<tool_call>calc<arg_key>expr</arg_key><arg_value>1+2</arg_value></tool_call>"
    assert parse_tool_calls(call) == [("calc", {"expr": "1+2"})]
    assert parse_tool_calls("why</think>" + call + call) == [("calc", {"expr": "1+2"})] * 2
    for text in ("", "hello", call + "x", call[:-1], "<tool_call>calc<arg_key>a</arg_key></tool_call>"):
        with pytest.raises(ValueError, match="tool call"):
            parse_tool_calls(text)
    assert calculator_tool("calc", {"expr": "6*7"}) == "42"
    assert calculator_tool("calc", {"expr": "6/0"}).startswith("error")
    assert calculator_tool("sh", {"expr": "ls"}).startswith("error")


def _sample(reward, status="completed", family="f"):
    return Sample(family, "k", [1, 2, 3], 1, [0, 1, 1], [0.0, -1.0, -3.0], [0], status, "", 1, reward)


def test_repair_groups():
    ok, bad = _sample(1.0), _sample(0.0, "failed")
    other = _sample(0.5)
    groups = [[ok, other, bad, ok], [ok, other, bad, bad], [bad] * 4, [ok] * 4]
    kept, counts = repair_groups(groups, 4)
    # 3 of 4 valid: the first is repeated; 2 of 4 is not strictly more than half: dropped
    assert [[s.reward for s in g] for g in kept] == [[1.0, 0.5, 1.0, 1.0], [1.0] * 4]
    assert counts == {"failed": 7, "repaired": 1, "dropped": 2}


def test_statistics_and_json():
    numbers = statistics([[_sample(1.0), _sample(0.0, "truncated")], [_sample(1.0, family="g")]])
    assert numbers["reward"] == pytest.approx(2 / 3) and numbers["entropy"] == pytest.approx(2.0)
    assert numbers["reward/f"] == 0.5 and numbers["reward/g"] == 1.0 and numbers["truncated"] == pytest.approx(1 / 3)
    s = _sample(0.1)
    s.logprobs[1] = -0.1 - 1e-17 + 0.3
    assert Sample.from_json(s.to_json()) == s
