"""How models write their tool calls."""

from __future__ import annotations

from enum import Enum


class ToolFormat(str, Enum):
    """How a model writes its calls. Arguments may be called parameters in all of them."""

    HERMES = "hermes"
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, any number of them in a text.
    """
    LLAMA3 = "llama3"
    """``{"name": ..., "parameters": {...}}``, several with ``;`` between them: at the start of the
    text, or behind ``<|python_tag|>``."""
    JSON = "json"
    """A JSON list of calls and nothing else: what ``structured_outputs_for`` makes a text be."""


OPENING = {ToolFormat.HERMES: "<tool_call>", ToolFormat.LLAMA3: "<|python_tag|>"}
CLOSING = "</tool_call>"
BETWEEN = ";"
"""Two calls of Llama 3's format."""
MARKERS = {
    ToolFormat.HERMES: ("<tool_call>", CLOSING),
    ToolFormat.LLAMA3: ("<|python_tag|>",),
    ToolFormat.JSON: (),
}
"""What marks calls in a text. Tokenizers may have them as special tokens."""


def tool_format_of(template: str) -> ToolFormat | None:
    """The format that a chat template's text teaches its model; None if it is none of ours."""
    if "<tool_call>" in template:
        # XML inside of the same tags: Qwen3-Coder's and GLM's.
        return None if "<function=" in template or "<arg_key>" in template else ToolFormat.HERMES
    of_llama = "<|start_header_id|>" in template and '"parameters"' in template
    return ToolFormat.LLAMA3 if "<|python_tag|>" in template or of_llama else None
