"""What a model thinks ahead of its answer, parsed from a stream of text."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from megatron_async.serving.chat.answers.partial import begun

OPENING, CLOSING = "<think>", "</think>"


class ReasoningFormat(str, Enum):
    """How a model writes its thought; the values are vLLM's ``--reasoning-parser``."""

    QWEN3 = "qwen3"
    """``<think>thought</think>answer``; the chat template may have written the first tag."""
    DEEPSEEK_R1 = "deepseek_r1"
    """The same, and a text without the first tag begins inside of the thought."""
    GLM45 = "glm45"
    """As :data:`QWEN3`."""
    GPT_OSS = "openai_gptoss"
    """Channels of the harmony format: see :mod:`megatron_async.serving.chat.answers.harmony`."""


@dataclass(frozen=True, slots=True)
class Tags:
    """What stands around a thought, in the text behind a prompt.

    Args:
        opening: begins it; None where the text begins inside of it.
        closing: ends it.
        forced: ends it in the midst of it.
        may_end: the text may end in it, with a call of a tool.
    """

    opening: str | None
    closing: str
    forced: str
    may_end: bool = False


@dataclass(frozen=True, slots=True)
class ThoughtText:
    """More of the text of a thought."""

    text: str


def begins_inside(format: ReasoningFormat, prompt: str) -> bool:
    """Whether the text behind ``prompt`` begins inside of a thought."""
    end = prompt.rstrip()
    if end.endswith(OPENING):
        return True
    return format is ReasoningFormat.DEEPSEEK_R1 and not end.endswith(CLOSING)


def tags_behind(format: ReasoningFormat, prompt: str) -> Tags | None:
    """The tags of a thought that may come behind ``prompt``; None where none does."""
    if format is ReasoningFormat.GPT_OSS:
        final = "<|channel|>final<|message|>"
        return Tags(None, final, f"<|end|><|start|>assistant{final}", may_end=True)
    if prompt.rstrip().endswith(CLOSING):
        return None
    return Tags(None if begins_inside(format, prompt) else OPENING, CLOSING, CLOSING)


class ThoughtParser:
    """Divides a text that comes in parts into a thought, if it begins with one, and the rest.

    How the text is divided changes nothing but where the parts end. Whitespace around the thought,
    and line breaks in front of the answer, belong to neither.

    Args:
        inside: the text begins inside of the thought, and may open it once more.
    """

    def __init__(self, *, inside: bool) -> None:
        self._inside = self._may_open = inside
        self._has_begun = inside
        self._is_over = False
        self._has_said = False
        self._held = ""

    def push(self, text: str) -> tuple[str, str]:
        """What ``text`` adds to the thought, and to the rest."""
        text, self._held = self._held + text, ""
        if not self._has_begun:
            begin = text.lstrip()
            if not begin.startswith(OPENING):
                if OPENING.startswith(begin):
                    self._held = text
                    return "", ""
                return "", self._answer(text, is_first=False)
            self._has_begun = self._inside = True
            text = begin[len(OPENING) :]
        elif self._may_open:
            begin = text.lstrip()
            if begin != OPENING and OPENING.startswith(begin):
                self._held = text
                return "", ""
            self._may_open = False
            text = begin.removeprefix(OPENING)
        if self._inside:
            return self._thought(text)
        return "", self._answer(text, is_first=not self._is_over)

    def finish(self) -> tuple[str, str]:
        """What is left when no more text comes."""
        held, self._held = self._held, ""
        if self._inside:
            return held.rstrip() if self._has_said else held.strip(), ""
        return "", held if not self._has_begun else ""

    def _thought(self, text: str) -> tuple[str, str]:
        text = text if self._has_said else text.lstrip()
        at = text.find(CLOSING)
        if at >= 0:
            self._inside = False
            return text[:at].rstrip(), self._answer(text[at + len(CLOSING) :], is_first=True)
        shown = text[: len(text) - begun(text, CLOSING)].rstrip()
        self._held = text[len(shown) :]
        self._has_said = self._has_said or bool(shown)
        return shown, ""

    def _answer(self, text: str, *, is_first: bool) -> str:
        self._has_begun, self._inside = True, False
        text = text.lstrip("\r\n") if is_first else text
        self._is_over = self._is_over or bool(text) or not is_first
        return text
