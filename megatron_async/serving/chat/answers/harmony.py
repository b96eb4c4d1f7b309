"""Messages in the harmony format of GPT-OSS: channels of thought, of calls and of the answer.

Behind a prompt that ends with ``<|start|>assistant`` come messages, each with a header:
``<|channel|>analysis<|message|>thought<|end|><|start|>assistant<|channel|>final<|message|>answer``.
``to=functions.NAME`` in a header calls a function, whose arguments are the message.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection

from megatron_async.serving.chat.answers.partial import begun
from megatron_async.serving.chat.answers.reasoning import ThoughtText
from megatron_async.serving.chat.answers.tool_calls import ToolCallDelta, new_call_id

START, CHANNEL, MESSAGE, END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
CONSTRAIN, CALL, RETURN = "<|constrain|>", "<|call|>", "<|return|>"
MARKERS = (START, CHANNEL, MESSAGE, END, CONSTRAIN, CALL, RETURN)
_ENDS = (END, CALL, RETURN, START)
_MOST_HEADER = 512
"""Characters of a header; what is longer is text."""
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_FUNCTIONS = "functions."

Part = ThoughtText | ToolCallDelta | str


class HarmonyParser:
    """Divides a text that comes in parts into thought, calls and content.

    The channel ``analysis`` is thought, a message to a function a call, and all else content. A
    text without a header is content.

    Args:
        names: of the tools that may be called; a message to another one is content.
        new_id: makes the ids of calls.
    """

    def __init__(
        self, names: Collection[str] = (), *, new_id: Callable[[], str] = new_call_id
    ) -> None:
        self.call_count = 0
        self._names = names
        self._new_id = new_id
        self._held = ""
        self._header: str | None = ""
        """What of a header has come; None inside of a message."""
        self._into: Callable[[str], Part] = str
        self._out: list[Part] = []

    def push(self, text: str) -> list[Part]:
        """What is known after ``text``, in order."""
        text, self._held = self._held + text, ""
        while text:
            text = self._take_message(text) if self._header is None else self._take_header(text)
        return self._taken()

    def finish(self) -> list[Part]:
        """What is left when no more text comes."""
        if self._header is None:
            self._add(self._held)
        elif "<|" not in self._header + self._held:  # it was no header
            self._add(self._header + self._held)
        self._header, self._held = "", ""
        return self._taken()

    def _take_header(self, text: str) -> str:
        assert self._header is not None
        text = self._header + text
        at = text.find(MESSAGE)
        if not _is_header(text) or (at if at >= 0 else len(text)) > _MOST_HEADER:
            self._header, self._into = None, str  # it has none
            return text
        if at < 0:
            self._header = text
            return ""
        self._begin(text[:at])
        self._header = None
        return text[at + len(MESSAGE) :]

    def _begin(self, header: str) -> None:
        header = header.rpartition(START)[2]  # a budget may cut another one short
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        name = "" if recipient is None else recipient[1].removeprefix(_FUNCTIONS)
        if name in self._names:
            index, self.call_count = self.call_count, self.call_count + 1
            self._out.append(ToolCallDelta(index, self._new_id(), name))
            self._into = lambda text: ToolCallDelta(index, arguments=text)
        elif channel is not None and channel[1] == "analysis":
            self._into = ThoughtText
        else:
            self._into = str

    def _take_message(self, text: str) -> str:
        found = [(text.find(end), end) for end in _ENDS if end in text]
        if found:
            at, end = min(found)
            self._add(text[:at])
            self._header = ""
            return text[at:] if end == START else text[at + len(end) :]
        kept = max(begun(text, end) for end in _ENDS)
        self._add(text[: len(text) - kept])
        self._held = text[len(text) - kept :]
        return ""

    def _add(self, text: str) -> None:
        if text:
            self._out.append(self._into(text))

    def _taken(self) -> list[Part]:
        out, self._out = self._out, []
        return out


class HarmonyThought:
    """Divides a text into thought and the rest, where the rest is calls in another format; as
    :class:`~megatron_async.serving.chat.answers.reasoning.ThoughtParser`."""

    def __init__(self) -> None:
        self._parser = HarmonyParser()

    def push(self, text: str) -> tuple[str, str]:
        """What ``text`` adds to the thought, and to the rest."""
        return _apart(self._parser.push(text))

    def finish(self) -> tuple[str, str]:
        """What is left when no more text comes."""
        return _apart(self._parser.finish())


def _apart(parts: list[Part]) -> tuple[str, str]:
    thought = "".join(part.text for part in parts if isinstance(part, ThoughtText))
    return thought, "".join(part for part in parts if isinstance(part, str))


def _is_header(text: str) -> bool:
    """Whether a header begins with ``text``, or may."""
    begin = text.lstrip()
    openings = (START, CHANNEL, MESSAGE, "to=")
    return any(begin.startswith(each) or each.startswith(begin) for each in openings)
