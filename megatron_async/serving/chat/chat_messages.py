"""Messages of a chat, checked, and put into the form that chat templates want."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_async.errors import RequestError, shown
from megatron_async.serving.chat.template_wants import Wants

MAX_DEPTH = 64
"""The depth of lists and objects in each other, in messages and all else that a template gets."""
TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Types of content parts that are text, and where they have it."""

_REASONING = ("reasoning_content", "thinking", "reasoning")

_PLAIN_KEY = re.compile("[A-Za-z0-9_]{1,64}")


class _Path:
    """Where a value is; made into text for an error alone, since keys may be long and many."""

    __slots__ = ("_parent", "_part")

    def __init__(self, part: str | int, parent: _Path | None = None) -> None:
        self._part = part
        self._parent = parent

    @property
    def root(self) -> _Path:
        """Where it begins."""
        return self if self._parent is None else self._parent.root

    def __str__(self) -> str:
        if self._parent is None:
            return str(self._part)
        before, part = str(self._parent), self._part
        if isinstance(part, int):
            return f"{before}[{part}]"
        return f"{before}.{part}" if _PLAIN_KEY.fullmatch(part) else before


_SCALARS = (int, float, bool, type(None))


def plain(name: str, value: Any) -> Any:
    """An own copy of ``value`` in JSON's types.

    Raises:
        RequestError: it has other types, lists or objects too deep in each other, or text that is
            no valid Unicode. Names the place, which begins with ``name``.
    """
    return _plain(_Path(name), value, 0)


def _plain(path: _Path, value: Any, depth: int) -> Any:
    if isinstance(value, str):
        return _unicode(path, str(value))
    if type(value) in _SCALARS:
        return value
    if depth == MAX_DEPTH:
        raise RequestError(f"{path.root}: more than {MAX_DEPTH} lists or objects in each other")
    if isinstance(value, Mapping):
        return {
            _unicode(path, str(key)): each
            if _is_plain(each)
            else _plain(_Path(str(key), path), each, depth + 1)
            for key, each in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [
            each if _is_plain(each) else _plain(_Path(n, path), each, depth + 1)
            for n, each in enumerate(value)
        ]
    for kind in (int, float):
        if isinstance(value, kind):
            return kind(value)
    raise RequestError(f"{path}: {type(value).__name__} is no type of JSON")


def _is_plain(value: Any) -> bool:
    """True for most of what a body of a million values has: it needs no copy, and no name."""
    kind = type(value)
    return kind in _SCALARS or (kind is str and value.isascii())


def _unicode(path: _Path, text: str) -> str:
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RequestError(f"{path} has a lone surrogate; send valid Unicode") from None
    return text


def checked_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Own copies without None values and empty lists of calls; arguments of tool calls are JSON
    text, as they came if they came as text.

    Raises:
        RequestError: names the message and field.
    """
    if isinstance(messages, str) or not isinstance(messages, Sequence):
        raise RequestError(f"messages={shown(messages)} must be a list of messages")
    if not messages:
        raise RequestError("messages must have at least one message")
    return [_checked(f"messages[{n}]", message) for n, message in enumerate(messages)]


def fitted_messages(
    messages: list[dict[str, Any]], wants: Wants, *, knows_developer: bool, silent: str | None
) -> list[dict[str, Any]]:
    """The same messages in the form that a template takes.

    Args:
        wants: where it takes no parts, their texts are joined by newlines, and wherever it takes
            texts for all but users; where it takes no texts, each becomes a part.
            Arguments become objects unless it takes text. Longer ids of calls keep their end.
        knows_developer: else developers' messages are the system's.
        silent: what a message without content has, and calls with an empty one if it is None.
    """
    for message in messages:
        _fit_content(message, wants, silent)
        for call in message.get("tool_calls", ()):
            if not wants.arguments_text:
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
            _fit_id(call, "id", wants.id_length)
        _fit_id(message, "tool_call_id", wants.id_length)
        if message["role"] == "developer" and not knows_developer:
            message["role"] = "system"
    return messages


def _fit_content(message: dict[str, Any], wants: Wants, silent: str | None) -> None:
    content = message.get("content")
    if content is None or (silent is None and not content and "tool_calls" in message):
        message["content"] = silent if wants.text or silent is None else []
    elif isinstance(content, list):
        if not wants.parts or (wants.text and message["role"] != "user"):
            # Templates look into the parts of users, and show others' as Python shows a list.
            message["content"] = "\n".join(part["text"] for part in content)
    elif not wants.text:
        message["content"] = [{"type": "text", "text": content}]


def _fit_id(holder: dict[str, Any], name: str, length: int | None) -> None:
    """Cut an id, as vLLM does: this server's are longer than some templates take."""
    text = holder.get(name)
    if length and isinstance(text, str):
        holder[name] = text[-length:]


def _checked(name: str, message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f"{name}={shown(message)} must be an object")
    made = {key: value for key, value in plain(name, message).items() if value is not None}
    role = made.get("role")
    if not isinstance(role, str) or not role:
        raise RequestError(f"{name}.role={shown(role)} must be a text such as 'user'")
    content = made.get("content")
    if isinstance(content, list):
        made["content"] = [_part(f"{name}.content[{n}]", part) for n, part in enumerate(content)]
    elif content is not None and not isinstance(content, str):
        raise RequestError(f"{name}.content={shown(content)} must be a text or a list of parts")
    calls = made.get("tool_calls")
    if calls is not None:
        if not isinstance(calls, list):
            raise RequestError(f"{name}.tool_calls={shown(calls)} must be a list")
        for n, call in enumerate(calls):
            _check_call(f"{name}.tool_calls[{n}]", call)
        if not calls:  # templates ask whether there is a list
            del made["tool_calls"]
    return _with_reasoning(made)


def _part(name: str, part: Any) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, dict):
        raise RequestError(f"{name}={shown(part)} must be an object such as {{'type': 'text'}}")
    kind = part.get("type")
    if not isinstance(kind, str) or kind not in TEXT_PARTS:
        raise RequestError(f"{name}.type={shown(kind)} is not supported; this model takes text")
    text = part.get(TEXT_PARTS[kind])
    if not isinstance(text, str):
        raise RequestError(f"{name}.{TEXT_PARTS[kind]}={shown(text)} must be a text")
    return {"type": "text", "text": text}


def _check_call(name: str, call: Any) -> None:
    """Makes JSON text of the arguments in place."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestError(f"{name}.function must be an object with a name")
    given = arguments = function.get("arguments") or "{}"
    if isinstance(given, str):
        try:
            arguments = json.loads(given)
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, dict):
        said = shown(given)
        raise RequestError(f"{name}.function.arguments={said} must be a JSON object")
    arguments = plain(f"{name}.function.arguments", arguments)
    as_text = isinstance(given, str)
    function["arguments"] = given if as_text else json.dumps(arguments, ensure_ascii=False)


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Reasoning under the name that templates read, and under an older one of some."""
    given = [message[name] for name in _REASONING if name in message]
    if not given:
        return message
    return {"thinking": given[0], **message, "reasoning_content": given[0]}
