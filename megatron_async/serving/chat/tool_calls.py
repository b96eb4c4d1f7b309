"""Tools of a request, and calls of them parsed from a stream of text, in the formats of Hermes/Qwen
and of Llama 3."""

from __future__ import annotations

import dataclasses
import re
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from megatron_async.errors import RequestError, shown
from megatron_async.grammar.spec import StructuredOutputs
from megatron_async.serving.chat.call_object import CallObject
from megatron_async.serving.chat.chat_messages import plain
from megatron_async.serving.chat.tool_schemas import schema_of_calls

MAX_TOOLS = 128
NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
MODES = ("none", "auto", "required")


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


_OPENING = {ToolFormat.HERMES: "<tool_call>", ToolFormat.LLAMA3: "<|python_tag|>"}
_CLOSING = "</tool_call>"
MARKERS = {
    ToolFormat.HERMES: ("<tool_call>", _CLOSING),
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


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """More of call number ``index``, as in OpenAI's stream: its ``id`` and ``name`` at first, then
    fragments of the JSON text of its arguments."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


Delta = str | ToolCallDelta
"""A text is content."""


def new_call_id() -> str:
    """An id that looks as OpenAI's do."""
    return f"call_{uuid.uuid4().hex[:24]}"


class _Mode(Enum):
    """Where in the text a parser is."""

    START = auto()
    TEXT = auto()
    BEFORE_CALL = auto()
    """Behind an opening marker or a separator; a call's object should come."""
    CALL = auto()
    AFTER_CALL = auto()


class ToolCallParser:
    """Splits a text that comes in parts into content and tool calls.

    How the text is divided changes nothing but how the deltas are. Nothing is given out as content
    that may still become a call. Whitespace next to a call is no content.

    What is no call is content, broken JSON too. A call is given out as soon as its name is known
    and its arguments have begun: if they break off after that, the call keeps what it has, which
    is no valid JSON then, and the rest is content.

    Args:
        format: of the calls.
        names: of the tools. JSON of Llama 3's format that is not marked as a call is one only if
            it names one of these; None takes any name.
        new_id: makes the ids.
    """

    def __init__(
        self,
        format: ToolFormat | str,
        *,
        names: Collection[str] | None = None,
        new_id: Callable[[], str] = new_call_id,
    ) -> None:
        self.format = ToolFormat(format)
        self.call_count = 0
        """Calls so far; with one, the reason of a finish is ``tool_calls``."""
        self._names = names
        self._new_id = new_id
        self._opening = _OPENING.get(self.format, "")
        self._mode = _Mode.TEXT if self.format is ToolFormat.HERMES else _Mode.START
        self._marked = self.format is not ToolFormat.LLAMA3
        self._call = CallObject()
        self._told = False
        # Taken and not given out: content, if nothing becomes of it.
        self._held = ""
        self._out: list[Delta] = []

    def push(self, text: str) -> list[Delta]:
        """What is known after ``text``, in order."""
        take = {
            _Mode.START: self._take_start,
            _Mode.TEXT: self._take_text,
            _Mode.BEFORE_CALL: self._take_before_call,
            _Mode.CALL: self._take_call,
            _Mode.AFTER_CALL: self._take_after_call,
        }
        while text:
            text = take[self._mode](text)
        return self._taken()

    def finish(self) -> list[Delta]:
        """What is left when no more text comes."""
        if self._mode is not _Mode.AFTER_CALL and not (self.call_count and self._held.isspace()):
            self._content(self._held)
        self._held = ""
        return self._taken()

    # --- modes: each takes a front part of a text, and returns the rest -------------------------

    def _take_start(self, text: str) -> str:
        text = self._held + text
        begin = _begin(text)
        self._held, rest = text[:begin], text[begin:]
        if self.format is ToolFormat.JSON and rest.startswith("["):
            self._held, rest = text[: begin + 1], rest[1:]
            self._mode = _Mode.BEFORE_CALL
        elif rest.startswith("{"):
            self._mode = _Mode.BEFORE_CALL
        elif rest:
            self._mode = _Mode.TEXT
        return rest

    def _take_text(self, text: str) -> str:
        text = self._held + text
        at = text.find(self._opening) if self._opening else -1
        if at >= 0:
            begin, end = len(text[:at].rstrip()), at + len(self._opening)
            self._mode, self._marked = _Mode.BEFORE_CALL, True
        else:
            begin, end = len(text) - _held_back(text, self._opening), len(text)
        self._content(text[:begin])
        self._held = text[begin:end]
        return text[end:]

    def _take_before_call(self, text: str) -> str:
        begin = _begin(text)
        self._held, rest = self._held + text[:begin], text[begin:]
        if rest.startswith("{"):
            self._call = CallObject() if self._marked else CallObject(bare=True, names=self._names)
            self._mode, self._told = _Mode.CALL, False
        elif rest:
            self._back_to_text()
        return rest

    def _take_call(self, text: str) -> str:
        call, end, fits = self._call, 0, True
        while end < len(text) and not call.done and (fits := call.feed(text[end])):
            end += 1
            if call.announced and not self._told:
                self._out.append(ToolCallDelta(self.call_count, self._new_id(), call.name))
                self.call_count += 1
                self._told, self._held = True, ""
        if self._told:
            self._arguments(call.take_arguments())
        else:
            self._held += text[:end]
        if call.done or not fits:
            if self._told:
                self._mode = _Mode.AFTER_CALL
            else:
                self._back_to_text()
        return text[end:]

    def _take_after_call(self, text: str) -> str:
        text = self._held + text
        begin = _begin(text)
        self._held, rest = "", text[begin:]
        if self.format is ToolFormat.HERMES:
            if rest.startswith(_CLOSING):
                self._mode = _Mode.TEXT
                return rest[len(_CLOSING) :]
            if _CLOSING.startswith(rest):
                self._held = text
                return ""
        elif not rest:
            self._held = text
            return ""
        elif rest[0] == (";" if self.format is ToolFormat.LLAMA3 else ","):
            self._held, self._mode = text[: begin + 1], _Mode.BEFORE_CALL
            return rest[1:]
        elif self.format is ToolFormat.JSON and rest[0] == "]":
            self._mode = _Mode.TEXT
            return rest[1:]
        self._mode = _Mode.TEXT
        return text

    # --- what is given out ----------------------------------------------------------------------

    def _back_to_text(self) -> None:
        self._content(self._held)
        self._held, self._mode = "", _Mode.TEXT

    def _content(self, text: str) -> None:
        if not text:
            return
        if self._out and isinstance(self._out[-1], str):
            self._out[-1] += text
        else:
            self._out.append(text)

    def _arguments(self, text: str) -> None:
        if not text:
            return
        last = self._out[-1] if self._out else ""
        if isinstance(last, ToolCallDelta) and last.index == self.call_count - 1:
            self._out[-1] = dataclasses.replace(last, arguments=last.arguments + text)
        else:
            self._out.append(ToolCallDelta(self.call_count - 1, arguments=text))

    def _taken(self) -> list[Delta]:
        out, self._out = self._out, []
        return out


def _begin(text: str) -> int:
    return len(text) - len(text.lstrip())


def _held_back(text: str, opening: str) -> int:
    """Characters at the end that may be whitespace next to a call, and the start of ``opening``."""
    lengths = range(min(len(opening) - 1, len(text)), 0, -1)
    partial = next((n for n in lengths if text.endswith(opening[:n])), 0)
    return len(text) - len(text[: len(text) - partial].rstrip())


# --- what a request asks for ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """A ``tool_choice`` in one form.

    Attributes:
        mode: "none", "auto" or "required".
        name: the one function that must be called, with "required"; None for any.
    """

    mode: str
    name: str | None = None

    @property
    def forced(self) -> bool:
        """The answer is calls and nothing else."""
        return self.mode == "required"


def checked_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]]:
    """Own copies of functions in the form of ``/v1/chat/completions``, which those of
    ``/v1/responses`` are brought into.

    Raises:
        RequestError: names the tool and field.
    """
    made = plain("tools", tools or [])
    if not isinstance(made, list):
        raise RequestError(f"tools={shown(made)} must be a list")
    if len(made) > MAX_TOOLS:
        raise RequestError(f"tools: {len(made)} are too many; send at most {MAX_TOOLS}")
    checked = [_checked_tool(f"tools[{n}]", tool) for n, tool in enumerate(made)]
    names = [tool["function"]["name"] for tool in checked]
    for n, name in enumerate(names):
        if name in names[:n]:
            raise RequestError(f"tools[{n}].function.name={shown(name)} is there twice")
    return checked


def checked_tool_choice(tools: Sequence[Mapping[str, Any]], tool_choice: Any) -> ToolChoice:
    """``tool_choice`` of a request with ``tools``, which have been checked; None means "auto", and
    "none" where there are no tools.

    Raises:
        RequestError: it is of no known form, or names no tool.
    """
    if tool_choice is None:
        return ToolChoice("auto" if tools else "none")
    if isinstance(tool_choice, str) and tool_choice in MODES:
        if tool_choice == "required" and not tools:
            raise RequestError("tool_choice='required' needs tools")
        return ToolChoice(tool_choice if tools else "none")
    name = None
    if isinstance(tool_choice, Mapping) and tool_choice.get("type") == "function":
        function = tool_choice.get("function", tool_choice)
        name = function.get("name") if isinstance(function, Mapping) else None
    if name is None:
        raise RequestError(
            f"tool_choice={shown(tool_choice)} must be one of {', '.join(MODES)}, or a function as "
            "{'type': 'function', 'function': {'name': ...}}"
        )
    names = [tool["function"]["name"] for tool in tools]
    if name not in names:
        known = ", ".join(names) or "none"
        raise RequestError(f"tool_choice={shown(name)} names no tool; there are {known}")
    return ToolChoice("required", name)


def allowed_tools(
    tools: list[dict[str, Any]], tool_choice: Any
) -> tuple[list[dict[str, Any]], Any]:
    """The tools that a ``tool_choice`` of type "allowed_tools" leaves, and its mode; of any other
    choice, the same two.

    Raises:
        RequestError: it is of a wrong form, or names no tool.
    """
    if not isinstance(tool_choice, Mapping) or tool_choice.get("type") != "allowed_tools":
        return tools, tool_choice
    allowed = tool_choice.get("allowed_tools", tool_choice)  # nested in chat, flat in responses
    mode = allowed.get("mode") if isinstance(allowed, Mapping) else None
    named = allowed.get("tools") if isinstance(allowed, Mapping) else None
    if mode not in ("auto", "required") or not isinstance(named, list) or not named:
        raise RequestError(
            "tool_choice of type allowed_tools needs a mode, auto or required, and tools"
        )
    names = []
    for tool in named:
        choice = checked_tool_choice(tools, tool)
        names.append(choice.name)
    return [tool for tool in tools if tool["function"]["name"] in names], mode


def structured_outputs_for(
    tools: Sequence[Mapping[str, Any]] | None,
    tool_choice: Any = None,
    *,
    parallel: bool = True,
    places: Mapping[str, str] | None = None,
) -> dict[str, Any] | None:
    """The structured output that the text is if tools must be called: a JSON list of calls, for
    :attr:`ToolFormat.JSON`. None where it may be anything.

    Args:
        tools, tool_choice: of the request.
        parallel: there may be more calls than one.
        places: where the request has the parameters of each function, by its name; None for
            those of ``tools``.

    Raises:
        RequestError: as :func:`checked_tools` and :func:`checked_tool_choice`.
    """
    checked = checked_tools(tools)
    choice = checked_tool_choice(checked, tool_choice)
    if not choice.forced:
        return None
    functions = [tool["function"] for tool in checked]
    chosen = [f for f in functions if choice.name in (None, f["name"])]
    given = places or {
        tool["function"]["name"]: f"tools[{n}].function.parameters"
        for n, tool in enumerate(checked)
    }
    several = parallel and choice.name is None
    schema = schema_of_calls(chosen, given, several=several)
    # More blanks than that, and a model may fill its length with them.
    return StructuredOutputs(json=schema, whitespace_pattern=" ?").to_dict()


def _checked_tool(name: str, tool: Any) -> dict[str, Any]:
    if not isinstance(tool, dict):
        raise RequestError(f"{name}={shown(tool)} must be an object")
    if tool.get("type", "function") != "function":
        raise RequestError(f"{name}.type={shown(tool['type'])} must be 'function'")
    if "function" not in tool:
        tool = {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}
    function: Any = tool["function"]
    if not isinstance(function, dict):
        raise RequestError(f"{name}.function={shown(function)} must be an object")
    said = function.get("name")
    if not isinstance(said, str) or not NAME.fullmatch(said):
        raise RequestError(f"{name}.function.name={shown(said)} must match {NAME.pattern}")
    if not isinstance(function.get("parameters") or {}, dict):
        said = shown(function["parameters"])
        raise RequestError(f"{name}.function.parameters={said} must be a JSON schema")
    return dict(tool)
