"""Calls of tools, parsed from a stream of text, in the formats of Hermes/Qwen and of Llama 3."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import Enum, auto

from megatron_async.serving.chat.answers.call_object import CallObject
from megatron_async.serving.chat.answers.partial import begun
from megatron_async.serving.chat.answers.tool_format import BETWEEN, CLOSING, OPENING, ToolFormat


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
        self._opening = OPENING.get(self.format, "")
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
            if rest.startswith(CLOSING):
                self._mode = _Mode.TEXT
                return rest[len(CLOSING) :]
            if CLOSING.startswith(rest):
                self._held = text
                return ""
        elif not rest:
            self._held = text
            return ""
        elif rest[0] == (BETWEEN if self.format is ToolFormat.LLAMA3 else ","):
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
    return len(text) - len(text[: len(text) - begun(text, opening)].rstrip())
