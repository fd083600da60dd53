"""The two renderers agree with each other and with the template's rules, and the loss mask covers what is sampled."""

import json

import jinja2
import pytest

from tasks.chat import CHAT_TEMPLATE, encode, render, render_tokens, segments, stop_ids

CALL = {"type": "function", "function": {"name": "calc", "arguments": {"expr": "2*3", "n": [1, "é"]}}}
TOOL = {"type": "function", "function": {"name": "calc", "description": "évaluer", "parameters": {"type": "object"}}}
MULTI = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "reasoning_content": " greet \n", "content": " Hello! "},
    {"role": "user", "content": [{"type": "text", "text": "2*3"}, "?"]},
    {"role": "assistant", "reasoning_content": "use calc", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "6"},
    {"role": "tool", "content": "six"},
    {"role": "assistant", "content": "<think>\nit is 6\n</think>\n\n6"},
]
CASES = {
    "plain": ([{"role": "user", "content": "Hi"}], None),
    "multi": (MULTI, [TOOL]),
    "no reasoning": ([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], None),
    "none content": (MULTI[:4] + [{"role": "assistant", "content": None, "tool_calls": [CALL["function"]]}], None),
    "quotes": ([{"role": "user", "content": "it's {{ x }} \\ <b>\n"}], [TOOL, TOOL]),
}
OPTIONS = [
    {},
    {"add_generation_prompt": True},
    {"add_generation_prompt": True, "enable_thinking": False},
    {"clear_thinking": False},
    {"clear_thinking": True, "add_generation_prompt": True},
]


def jinja(messages, tools, **options):
    env = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    env.filters["tojson"] = lambda x, ensure_ascii=False: json.dumps(x, ensure_ascii=ensure_ascii)
    return env.from_string(CHAT_TEMPLATE).render(messages=messages, tools=tools, **options)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_python_and_jinja_render_the_same(case, options):
    messages, tools = CASES[case]
    assert render(messages, tools, **options) == jinja(messages, tools, **options)


def test_rules_of_the_template():
    assert render([{"role": "user", "content": "Hi"}], add_generation_prompt=True) == (
        "[gMASK]<sop><|user|>Hi<|assistant|><think>"
    )
    text = render(MULTI)
    # reasoning before the last user message is gone, after it stays; one <|observation|> opens the run of tool results
    assert text == (
        "[gMASK]<sop><|system|>Be brief.<|user|>Hi<|assistant|></think>Hello!<|user|>2*3?<|assistant|>"
        "<think>use calc</think><tool_call>calc<arg_key>expr</arg_key><arg_value>2*3</arg_value><arg_key>n</arg_key>"
        '<arg_value>[1, "é"]</arg_value></tool_call><|observation|><tool_response>6</tool_response>'
        "<tool_response>six</tool_response><|assistant|><think>it is 6</think>6"
    )
    assert "<think>greet</think>Hello!" in render(MULTI, clear_thinking=False)
    assert render(MULTI, [TOOL]).startswith("[gMASK]<sop><|system|>\n# Tools\n\nYou may call")
    with pytest.raises(ValueError, match="role"):
        render([{"role": "robot", "content": ""}])


def trained(messages, **options):
    return "|".join(s.text for s in segments(messages, **options) if s.train and s.text)


def test_loss_covers_sampled_text_and_the_closing_role_token():
    assert trained(MULTI, close=True) == (
        "Hello!|<|user|>|use calc</think><tool_call>calc<arg_key>expr</arg_key><arg_value>2*3</arg_value>"
        '<arg_key>n</arg_key><arg_value>[1, "é"]</arg_value></tool_call>|<|observation|>|it is 6</think>6|<|user|>'
    )
    wrong = [dict(m, loss=False) if i == 2 else m for i, m in enumerate(MULTI)]
    assert "Hello!" in render(wrong) and trained(wrong, close=True).startswith("use calc</think>")


@pytest.fixture(scope="module")
def tokenizer():
    from tests.tasks.tiny_tokenizer import build

    return build()


def test_token_rendering_equals_tokenizing_the_text(tokenizer):
    for messages, tools in CASES.values():
        ids, mask = render_tokens(tokenizer, messages, tools, close=True)
        assert ids == encode(tokenizer, render(messages, tools, close=True))
        assert len(ids) == len(mask)
    ids, mask = render_tokens(tokenizer, MULTI, close=True)
    think = tokenizer.token_to_id("<think>")
    assert all(m == 0 for i, m in zip(ids, mask) if i == think)
    assert mask[-1] == 1 and ids[-1] == tokenizer.token_to_id("<|user|>")
    assert tokenizer.decode([i for i, m in zip(ids, mask) if m], skip_special_tokens=False).startswith("Hello!<|user|>")


def test_stop_ids(tokenizer):
    assert [tokenizer.id_to_token(i) for i in stop_ids(tokenizer)] == ["<|endoftext|>", "<|user|>", "<|observation|>"]
