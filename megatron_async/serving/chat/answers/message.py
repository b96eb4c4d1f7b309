"""An assistant's message, made of its text as it comes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from megatron_async.serving.chat.answers.reasoning import ThoughtText


class Divides(Protocol):
    """Divides a text into a thought and the rest, as it comes."""

    def push(self, text: str, /) -> tuple[str, str]: ...

    def finish(self) -> tuple[str, str]: ...


@dataclass(slots=True)
class Message:
    """A whole message, from its deltas."""

    content: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    thought: list[str] = field(default_factory=list)

    def add(self, deltas: Sequence[dict[str, Any]]) -> None:
        """The next deltas, in order."""
        for delta in deltas:
            if "content" in delta:
                self.content.append(delta["content"])
            if "reasoning_content" in delta:
                self.thought.append(delta["reasoning_content"])
            for call in delta.get("tool_calls", ()):
                if call["index"] == len(self.calls):
                    function = {"name": call["function"]["name"], "arguments": ""}
                    self.calls.append({"id": call["id"], "type": "function", "function": function})
                self.calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]

    def to_dict(self) -> dict[str, Any]:
        """Return it as OpenAI's API has it: without content where there are calls alone."""
        text = "".join(self.content)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if self.thought:
            message["reasoning_content"] = "".join(self.thought)
        if self.calls or (self.thought and not text):
            message["content"] = text or None
        if self.calls:
            message["tool_calls"] = self.calls
        return message


class MessageParser:
    """Makes deltas of a message of its text, as it comes.

    Args:
        parser: finds tool calls; None leaves all as content.
        parallel: False keeps the first call alone.
        hidden: special tokens that are no content, where no call comes of them.
        named: the request has chosen the function, and its call is no reason to end.
        thought: parts the thought from the rest; None where there is none, or ``parser`` does.
        shows_thought: it is in the message.
    """

    def __init__(
        self,
        parser: Any = None,
        *,
        parallel: bool = True,
        hidden: Collection[str] = (),
        named: bool = False,
        thought: Divides | None = None,
        shows_thought: bool = True,
    ) -> None:
        self._parser = parser
        self._thought = thought
        self._shows_thought = shows_thought
        self._named = named
        self._hidden = hidden
        self._parallel = parallel

    def push(self, text: str) -> list[dict[str, Any]]:
        """Deltas that ``text`` completes."""
        if self._thought is None:
            return self._rest(text)
        thought, rest = self._thought.push(text)
        return [*self._deltas([ThoughtText(thought)]), *self._rest(rest)]

    def finish(self) -> list[dict[str, Any]]:
        """Deltas of what is left."""
        deltas: list[dict[str, Any]] = []
        if self._thought is not None:
            thought, rest = self._thought.finish()
            deltas = [*self._deltas([ThoughtText(thought)]), *self._rest(rest)]
        return deltas if self._parser is None else deltas + self._deltas(self._parser.finish())

    def _rest(self, text: str) -> list[dict[str, Any]]:
        """Deltas of what is no thought."""
        return self._deltas([text] if self._parser is None else self._parser.push(text))

    def _deltas(self, parts: Sequence[Any]) -> list[dict[str, Any]]:
        shown = []
        for part in parts:
            if isinstance(part, ThoughtText):
                if part.text and self._shows_thought:
                    shown.append({"reasoning_content": part.text})
                continue
            if isinstance(part, str):
                for marker in self._hidden:
                    part = part.replace(marker, "")
            elif not self._parallel and part.index:
                continue
            if part:
                shown.append(_delta(part))
        return shown

    def finish_reason(self, reason: str | None) -> str | None:
        """``tool_calls`` where the model has chosen to call and its message has come to its end."""
        called = self._parser is not None and self._parser.call_count > 0
        return "tool_calls" if called and reason == "stop" and not self._named else reason


def _delta(part: Any) -> dict[str, Any]:
    if isinstance(part, str):
        return {"content": part}
    call: dict[str, Any] = {"index": part.index, "function": {"arguments": part.arguments}}
    if part.id is not None:
        call |= {"id": part.id, "type": "function"}
        call["function"] = {"name": part.name, **call["function"]}
    return {"tool_calls": [call]}
