"""The special tokens of the GLM-5 generation's vocabulary, in id order (they are the highest ids; notes section F.2).

Data stages import this module to know the strings without loading a tokenizer.
"""

from __future__ import annotations

END_OF_TEXT = "<|endoftext|>"
ROLE_TOKENS = ("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
FIM_TOKENS = ("<|code_prefix|>", "<|code_middle|>", "<|code_suffix|>")
SPECIAL_TOKENS = (
    END_OF_TEXT,
    "[MASK]",
    "[gMASK]",
    "[sMASK]",
    "<sop>",
    "<eop>",
    *ROLE_TOKENS,
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    *FIM_TOKENS,
)
# Generation stops at the end of a text and at the token that opens another party's turn.
STOP_TOKENS = (END_OF_TEXT, "<|user|>", "<|observation|>")
PAD_TOKEN = END_OF_TEXT
