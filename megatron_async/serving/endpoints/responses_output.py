"""Output items of ``/v1/responses``, made of a text as it comes, and their events."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from megatron_async.serving.chat.answers.message import MessageParser

Event = dict[str, Any]
"""Without its number."""


@dataclass(slots=True)
class _Text(ABC):
    """An item of one part that has begun."""

    item_id: str
    place: int
    text: list[str] = field(default_factory=list)

    @property
    @abstractmethod
    def part(self) -> dict[str, Any]:
        """Its one part, with what it has so far."""

    @abstractmethod
    def item(self, status: str) -> dict[str, Any]:
        """The item as it is by now, empty at first."""

    @property
    def where(self) -> dict[str, Any]:
        """Its place in the response."""
        return {"item_id": self.item_id, "output_index": self.place, "content_index": 0}

    def begin(self) -> Iterator[Event]:
        """Events of its beginning."""
        item = self.item("in_progress")
        yield {"type": "response.output_item.added", "output_index": self.place, "item": item}
        yield {"type": "response.content_part.added", **self.where, "part": self.part}


@dataclass(slots=True)
class _Message(_Text):
    """An assistant's message that has begun."""

    log_probs: list[dict[str, Any]] = field(default_factory=list)

    @property
    def part(self) -> dict[str, Any]:
        """Its one part, with what it has so far."""
        return {
            "type": "output_text",
            "text": "".join(self.text),
            "annotations": [],
            "logprobs": list(self.log_probs),
        }

    def item(self, status: str) -> dict[str, Any]:
        """The item as it is by now, empty at first."""
        content = [] if status == "in_progress" else [self.part]
        role = {"role": "assistant", "content": content}
        return {"id": self.item_id, "type": "message", "status": status, **role}

    def add(self, text: str, log_probs: list[dict[str, Any]]) -> Event:
        """More of it."""
        self.text.append(text)
        self.log_probs += log_probs
        said = {"delta": text, "logprobs": log_probs}
        return {"type": "response.output_text.delta", **self.where, **said}

    def end(self, status: str) -> Iterator[Event]:
        """Events of its end."""
        part = self.part
        said = {"text": part["text"], "logprobs": part["logprobs"]}
        yield {"type": "response.output_text.done", **self.where, **said}
        yield {"type": "response.content_part.done", **self.where, "part": part}
        item = self.item(status)
        yield {"type": "response.output_item.done", "output_index": self.place, "item": item}


@dataclass(slots=True)
class _Call:
    """A call of a function that has begun."""

    item_id: str
    place: int
    call_id: str
    name: str
    arguments: list[str] = field(default_factory=list)

    def item(self, status: str) -> dict[str, Any]:
        """The item with the arguments that it has by now."""
        return {
            "id": self.item_id,
            "type": "function_call",
            "status": status,
            "call_id": self.call_id,
            "name": self.name,
            "arguments": "".join(self.arguments),
        }

    @property
    def where(self) -> dict[str, Any]:
        """Its place in the response."""
        return {"item_id": self.item_id, "output_index": self.place}

    def begin(self) -> Iterator[Event]:
        """Events of its beginning."""
        item = self.item("in_progress")
        yield {"type": "response.output_item.added", "output_index": self.place, "item": item}

    def add(self, arguments: str) -> Event:
        """More of its arguments."""
        self.arguments.append(arguments)
        return {"type": "response.function_call_arguments.delta", **self.where, "delta": arguments}

    def end(self, status: str) -> Iterator[Event]:
        """Events of its end."""
        item = self.item(status)
        said = {"name": self.name, "arguments": item["arguments"]}
        yield {"type": "response.function_call_arguments.done", **self.where, **said}
        yield {"type": "response.output_item.done", "output_index": self.place, "item": item}


@dataclass(slots=True)
class _Thought(_Text):
    """A thought that has begun; its part is ``reasoning_text``, as OpenAI's open models have it."""

    @property
    def part(self) -> dict[str, Any]:
        """Its one part, with what it has so far."""
        return {"type": "reasoning_text", "text": "".join(self.text)}

    def item(self, status: str) -> dict[str, Any]:
        """The item as it is by now, empty at first."""
        content = [] if status == "in_progress" else [self.part]
        said = {"summary": [], "content": content, "status": status}
        return {"id": self.item_id, "type": "reasoning", **said}

    def add(self, text: str) -> Event:
        """More of it."""
        self.text.append(text)
        return {"type": "response.reasoning_text.delta", **self.where, "delta": text}

    def end(self, status: str) -> Iterator[Event]:
        """Events of its end."""
        part = self.part
        yield {"type": "response.reasoning_text.done", **self.where, "text": part["text"]}
        yield {"type": "response.content_part.done", **self.where, "part": part}
        item = self.item(status)
        yield {"type": "response.output_item.done", "output_index": self.place, "item": item}


class OutputItems:
    """Thoughts, messages and calls of functions, of one text.

    Log-probabilities are those of a message's tokens. Tokens whose text is held back are shown with
    the next text, and not at all if a call comes of them.

    Args:
        request_id: from which the items' ids are made.
        parser: divides the text.
    """

    def __init__(self, request_id: str, parser: MessageParser) -> None:
        self._request_id = request_id
        self._parser = parser
        self._ended: list[dict[str, Any]] = []
        self._open: _Message | _Call | _Thought | None = None
        self._held: list[dict[str, Any]] = []

    def push(self, text: str, log_probs: list[dict[str, Any]]) -> list[Event]:
        """Events of a further piece of text, with the log-probabilities of its tokens."""
        self._held += log_probs
        return self._events(self._parser.push(text))

    def finish(self, status: str) -> list[Event]:
        """Events of the end. The last item has ``status``; there is at least one."""
        events = self._events(self._parser.finish())
        if not self._ended and self._open is None:
            events += self._begin_message()
        if self._held and isinstance(self._open, _Message):
            events.append(self._open.add("", self._take_held()))
        return events + self._end(status)

    def items(self) -> list[dict[str, Any]]:
        """All that there is; an item in the middle is incomplete."""
        return self._ended + ([] if self._open is None else [self._open.item("incomplete")])

    def _events(self, deltas: list[dict[str, Any]]) -> list[Event]:
        events: list[Event] = []
        for delta in deltas:
            if "reasoning_content" in delta:
                events += self._of_thought(delta["reasoning_content"])
            if "content" in delta:
                if not isinstance(self._open, _Message):
                    events += self._begin_message()
                assert isinstance(self._open, _Message)
                events.append(self._open.add(delta["content"], self._take_held()))
            for call in delta.get("tool_calls", ()):
                events += self._of_call(call)
        return events

    def _of_call(self, delta: dict[str, Any]) -> Iterator[Event]:
        self._held = []
        function = delta["function"]
        if "id" in delta:
            yield from self._end("completed")
            place, call_id = len(self._ended), delta["id"]
            item_id = f"fc_{call_id.removeprefix('call_')}"
            self._open = _Call(item_id, place, call_id, function["name"])
            yield from self._open.begin()
        assert isinstance(self._open, _Call)
        if function["arguments"]:
            yield self._open.add(function["arguments"])

    def _of_thought(self, text: str) -> Iterator[Event]:
        self._held = []
        if not isinstance(self._open, _Thought):
            yield from self._end("completed")
            place = len(self._ended)
            self._open = _Thought(f"rs_{self._request_id}" + (f"_{place}" if place else ""), place)
            yield from self._open.begin()
        yield self._open.add(text)

    def _begin_message(self) -> list[Event]:
        events = self._end("completed")
        place = len(self._ended)
        item_id = f"msg_{self._request_id}" + (f"_{place}" if place else "")
        self._open = message = _Message(item_id, place)
        return [*events, *message.begin()]

    def _end(self, status: str) -> list[Event]:
        if self._open is None:
            return []
        events = list(self._open.end(status))
        self._ended.append(self._open.item(status))
        self._open = None
        return events

    def _take_held(self) -> list[dict[str, Any]]:
        held, self._held = self._held, []
        return held
