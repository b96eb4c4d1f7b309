"""The tools of a request, and which of them it lets or makes a model call."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_async.errors import RequestError, shown
from megatron_async.grammar.calls import Calls
from megatron_async.grammar.spec import StructuredOutputs
from megatron_async.serving.chat.answers.tool_format import BETWEEN, CLOSING, OPENING, ToolFormat
from megatron_async.serving.chat.chat_messages import plain
from megatron_async.serving.chat.tool_schemas import schema_of_call, schema_of_calls

MAX_TOOLS = 128
NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
MODES = ("none", "auto", "required")


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


def calls_beside_format(
    tools: Sequence[Mapping[str, Any]],
    format: ToolFormat,
    *,
    parallel: bool,
    places: Mapping[str, str],
) -> str:
    """The calls that a message may be instead of what its format says, as ``Calls.to_json``.

    Args:
        tools: that have been checked.
        format: how the model writes calls.
        parallel: there may be more calls than one.
        places: see :func:`structured_outputs_for`.
    """
    is_hermes = format is ToolFormat.HERMES
    arguments = "arguments" if is_hermes else "parameters"
    schema = schema_of_call([tool["function"] for tool in tools], places, arguments=arguments)
    return Calls(
        schema=schema,
        begin=OPENING[format] if is_hermes else "",
        end=CLOSING if is_hermes else "",
        between="" if is_hermes else BETWEEN,
        several=parallel,
    ).to_json()


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
