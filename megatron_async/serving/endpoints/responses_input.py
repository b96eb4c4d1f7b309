"""Input items of ``/v1/responses`` as messages of a chat, and errors back in the words of items."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_async.errors import shown
from megatron_async.serving.http.errors import ApiError


class InputMessages:
    """The chat that a response continues.

    Calls of functions become tool calls of the assistant's message before them, or of one of their
    own. Items of reasoning are left out, as chat templates leave out that of earlier turns.

    Args:
        input: a text, or items: messages, calls of functions, and what these gave.
        instructions: a system message before all others.

    Attributes:
        messages: as ``/v1/chat/completions`` has them; their contents are not checked here.

    Raises:
        ApiError: names the item and field.
    """

    def __init__(
        self, input: str | Sequence[Mapping[str, Any]], instructions: str | None = None
    ) -> None:
        self.messages: list[dict[str, Any]] = []
        self._places = {"messages": "input"}
        if instructions is not None:
            self._add({"role": "system", "content": instructions}, content="instructions")
        if isinstance(input, str):
            self._add({"role": "user", "content": input}, content="input")
            return
        for number, item in enumerate(input):
            self._add_item(f"input[{number}]", item)

    def in_items(self, error: ApiError) -> ApiError:
        """The same error with places of the request's body for places of :attr:`messages`."""
        longest_first = sorted(self._places, key=len, reverse=True)
        known = re.compile("|".join(map(re.escape, longest_first)))

        def renamed(text: str) -> str:
            return known.sub(lambda found: self._places[found[0]], text)

        param = None if error.param is None else renamed(error.param)
        return ApiError(error.status, renamed(str(error)), param=param, code=error.code)

    def _add(self, message: dict[str, Any], place: str = "input", *, content: str = "") -> str:
        where = f"messages[{len(self.messages)}]"
        self._places[where] = place
        if content:
            self._places[f"{where}.content"] = content
        self.messages.append(message)
        return where

    def _add_item(self, place: str, item: Mapping[str, Any]) -> None:
        kind = item.get("type", "message")
        if kind == "message":
            self._add({name: item[name] for name in ("role", "content") if name in item}, place)
        elif kind == "function_call":
            self._add_call(place, item)
        elif kind == "function_call_output":
            message = {
                "role": "tool",
                "tool_call_id": _text(place, item, "call_id"),
                "content": _required(place, item, "output"),
            }
            where = self._add(message, place, content=f"{place}.output")
            self._places[f"{where}.tool_call_id"] = f"{place}.call_id"
        elif kind != "reasoning":
            said = (
                f"{place}.type={shown(kind)} is not supported; there are message, reasoning, "
                "function_call and function_call_output"
            )
            raise ApiError(400, said, param=f"{place}.type")

    def _add_call(self, place: str, item: Mapping[str, Any]) -> None:
        call = {
            "id": _text(place, item, "call_id"),
            "type": "function",
            "function": {
                "name": _text(place, item, "name"),
                "arguments": _text(place, item, "arguments"),
            },
        }
        if not self.messages or self.messages[-1].get("role") != "assistant":
            self._add({"role": "assistant", "content": None}, place)
        calls = self.messages[-1].setdefault("tool_calls", [])
        where = f"messages[{len(self.messages) - 1}].tool_calls[{len(calls)}]"
        self._places |= {
            where: place,
            f"{where}.function": place,
            f"{where}.id": f"{place}.call_id",
        }
        calls.append(call)


def _required(place: str, item: Mapping[str, Any], name: str) -> Any:
    value = item.get(name)
    if value is None:
        raise ApiError(400, f"{place}.{name} is missing", param=f"{place}.{name}")
    return value


def _text(place: str, item: Mapping[str, Any], name: str) -> str:
    value = _required(place, item, name)
    if not isinstance(value, str):
        said = f"{place}.{name}={shown(value)} must be a text"
        raise ApiError(400, said, param=f"{place}.{name}")
    return value
