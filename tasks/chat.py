"""The GLM-5 chat template: as text, as token ids with a loss mask, and as the Jinja file that ships with a tokenizer.

Role tokens are followed by no newline and there is no end-of-turn token: a turn ends where the model emits the next role
token (`<|user|>` after an answer, `<|observation|>` after a tool call), which is therefore part of what it is trained on.

    python -m tasks.chat            # prints the Jinja template
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

PREFIX = "[gMASK]<sop>"
STOP_TOKENS = ("<|endoftext|>", "<|user|>", "<|observation|>")

_TOOLS_HEAD = (
    "\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
)
_TOOLS_TAIL = (
    "</tools>\n\nFor each function call, output the function name and arguments within the following XML format:\n"
    "<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key><arg_value>{arg-value-1}</arg_value>"
    "<arg_key>{arg-key-2}</arg_key><arg_value>{arg-value-2}</arg_value>...</tool_call>"
)

Message = Mapping[str, Any]


@dataclass(frozen=True)
class Segment:
    """A piece of the rendered text. Borders always lie at a special token, so pieces may be tokenized one by one."""

    text: str
    train: bool = False


def visible_text(content: Any) -> str:
    """Text of a message's content: a string, None, or a list of parts {"type": "text", "text": ...} or strings."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise ValueError(f"message content must be a string or a list of parts, got {type(content).__name__}")
    parts = []
    for part in content:
        if isinstance(part, str):
            parts.append(part)
        elif isinstance(part, Mapping) and part.get("type") == "text":
            parts.append(str(part["text"]))
        else:
            raise ValueError(f"only text parts can be rendered, got {part!r}")
    return "".join(parts)


def _split_reasoning(message: Message) -> tuple[str, str]:
    content = visible_text(message.get("content"))
    reasoning = message.get("reasoning_content")
    if isinstance(reasoning, str):
        return reasoning, content
    if "</think>" in content:
        head, content = content.split("</think>")[0], content.split("</think>")[-1]
        return head.rstrip("\n").split("<think>")[-1].lstrip("\n"), content.lstrip("\n")
    return "", content


def tool_call_text(name: str, arguments: Mapping[str, Any]) -> str:
    """`<tool_call>name<arg_key>k</arg_key><arg_value>v</arg_value>...</tool_call>`; strings verbatim, the rest JSON."""
    pairs = "".join(
        f"<arg_key>{key}</arg_key><arg_value>"
        f"{value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}</arg_value>"
        for key, value in arguments.items()
    )
    return f"<tool_call>{name}{pairs}</tool_call>"


def tool_response_text(results: Iterable[str]) -> str:
    """What follows the `<|observation|>` token: one `<tool_response>` per result."""
    return "".join(f"<tool_response>{result}</tool_response>" for result in results)


def generation_prompt(enable_thinking: bool = True) -> str:
    """What opens an assistant turn that is to be sampled."""
    return "<|assistant|>" + ("<think>" if enable_thinking else "</think>")


def _assistant(message: Message, keep_reasoning: bool) -> Iterator[Segment]:
    reasoning, content = _split_reasoning(message)
    train = message.get("loss", True)
    body = content.strip()
    for call in message.get("tool_calls") or ():
        function = call.get("function", call)
        arguments = function["arguments"]
        body += tool_call_text(function["name"], json.loads(arguments) if isinstance(arguments, str) else arguments)
    if keep_reasoning and reasoning:
        yield Segment("<|assistant|><think>")
        yield Segment(reasoning.strip() + "</think>" + body, train)
    else:
        # the bare </think> is given by the prompt (thinking off), never sampled
        yield Segment("<|assistant|></think>")
        yield Segment(body, train)


def segments(
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None = None,
    *,
    add_generation_prompt: bool = False,
    enable_thinking: bool = True,
    clear_thinking: bool | None = None,
    close: bool = False,
) -> list[Segment]:
    """The conversation as pieces of text that say whether the model is trained on them.

    Reasoning stays for turns after the last user message, and for all turns when `clear_thinking` is False. A message
    with `"loss": False` stays in the context untrained. `close` appends the `<|user|>` that ends a final assistant turn.
    """
    out = [Segment(PREFIX)]
    if tools:
        lines = "".join(json.dumps(tool, ensure_ascii=False) + "\n" for tool in tools)
        out.append(Segment("<|system|>" + _TOOLS_HEAD + lines + _TOOLS_TAIL))
    last_user = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=-1)
    for i, message in enumerate(messages):
        role = message["role"]
        # the role token after an assistant turn is that turn's stop signal: trained with it
        closes = i > 0 and messages[i - 1]["role"] == "assistant" and messages[i - 1].get("loss", True)
        if role == "user":
            out += [Segment("<|user|>", closes), Segment(visible_text(message["content"]))]
        elif role == "assistant":
            out += _assistant(message, clear_thinking is False or i > last_user)
        elif role == "tool":
            if i == 0 or messages[i - 1]["role"] != "tool":
                out.append(Segment("<|observation|>", closes))
            out.append(Segment(tool_response_text([visible_text(message["content"])])))
        elif role == "system":
            out.append(Segment("<|system|>" + visible_text(message["content"])))
        else:
            raise ValueError(f"message {i}: unknown role {role!r}")
    if close and messages and messages[-1]["role"] == "assistant":
        out.append(Segment("<|user|>", messages[-1].get("loss", True)))
    if add_generation_prompt:
        out.append(Segment(generation_prompt(enable_thinking)))
    return out


def render(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None, **options: Any) -> str:
    """The conversation as one string; options as in `segments`. Equal to CHAT_TEMPLATE's output (without `close`)."""
    return "".join(segment.text for segment in segments(messages, tools, **options))


def encode(tokenizer: Any, text: str) -> list[int]:
    """Token ids of text with no special tokens added; `tokenizer` is a `tokenizers.Tokenizer`."""
    return tokenizer.encode(text, add_special_tokens=False).ids


def render_tokens(
    tokenizer: Any, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None, **options: Any
) -> tuple[list[int], list[int]]:
    """Token ids and loss mask (1 = the model is trained to produce this token) of a conversation, of equal length."""
    ids: list[int] = []
    mask: list[int] = []
    for segment in segments(messages, tools, **options):
        piece = encode(tokenizer, segment.text)
        ids += piece
        mask += [int(segment.train)] * len(piece)
    return ids, mask


def stop_ids(tokenizer: Any) -> list[int]:
    """Ids that end a sampled turn."""
    ids = [tokenizer.token_to_id(token) for token in STOP_TOKENS]
    if None in ids:
        raise ValueError(f"tokenizer lacks one of the stop tokens {STOP_TOKENS}")
    return ids


_MACRO = """\
{%- macro visible_text(content) -%}
{%- if content is string -%}{{- content }}
{%- elif content is iterable and content is not mapping -%}
{%- for part in content -%}{%- if part is string -%}{{- part }}{%- else -%}{{- part.text }}{%- endif -%}{%- endfor -%}
{%- endif -%}
{%- endmacro -%}"""

_BODY = """\
{%- set ns = namespace(last_user=-1) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last_user = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for m in messages -%}
{%- if m.role == 'user' -%}{{- '<|user|>' + visible_text(m.content) }}
{%- elif m.role == 'system' -%}{{- '<|system|>' + visible_text(m.content) }}
{%- elif m.role == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}{{- '<|observation|>' }}{%- endif -%}
{{- '<tool_response>' + visible_text(m.content) + '</tool_response>' }}
{%- elif m.role == 'assistant' -%}
{%- set content = visible_text(m.content) -%}
{%- set reasoning = '' -%}
{%- if m.reasoning_content is string -%}{%- set reasoning = m.reasoning_content -%}
{%- elif '</think>' in content -%}
{%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') -%}
{%- set content = content.split('</think>')[-1].lstrip('\\n') -%}
{%- endif -%}
{{- '<|assistant|>' }}
{%- if reasoning and ((clear_thinking is defined and clear_thinking is sameas false) or loop.index0 > ns.last_user) -%}
{{- '<think>' + reasoning.strip() + '</think>' }}
{%- else -%}{{- '</think>' }}{%- endif -%}
{{- content.strip() }}
{%- for call in m.tool_calls or [] -%}
{%- set f = call.function if call.function else call -%}
{{- '<tool_call>' + f.name }}
{%- for key, value in f.arguments.items() -%}
{{- '<arg_key>' + key + '</arg_key><arg_value>' }}
{%- if value is string -%}{{- value }}{%- else -%}{{- value | tojson(ensure_ascii=False) }}{%- endif -%}
{{- '</arg_value>' }}
{%- endfor -%}
{{- '</tool_call>' }}
{%- endfor -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|assistant|></think>' if (enable_thinking is defined and not enable_thinking) else '<|assistant|><think>' }}
{%- endif -%}"""


def _jinja_string(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n") + "'"


CHAT_TEMPLATE = (
    _MACRO
    + "\n{{- "
    + _jinja_string(PREFIX)
    + " }}\n{%- if tools -%}{{- "
    + _jinja_string("<|system|>" + _TOOLS_HEAD)
    + " }}\n{%- for tool in tools -%}{{- tool | tojson(ensure_ascii=False) }}{{- '\\n' }}{%- endfor -%}{{- "
    + _jinja_string(_TOOLS_TAIL)
    + " }}{%- endif -%}\n"
    + _BODY
    + "\n"
)


if __name__ == "__main__":
    print(CHAT_TEMPLATE, end="")
