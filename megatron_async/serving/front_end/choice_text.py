"""The text of a choice, from the outputs of the engine."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from megatron_async.serving.messages import Output

if TYPE_CHECKING:
    from megatron_async.tokenizer.tokenizer import Tokenizer  # which imports torch


class ChoiceText:
    """The text of one choice.

    Args:
        stop_ids: tokens that end it and add no text.
        prompt: what it continues.
        markers: special tokens that are text all the same, by id: what marks tool calls.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop_ids: Collection[int],
        *,
        skip_special_tokens: bool,
        prompt: Sequence[int] = (),
        markers: Mapping[int, str] | None = None,
    ) -> None:
        self._stop_ids = stop_ids
        self._markers = {k: v for k, v in (markers or {}).items() if k not in stop_ids}
        kept = tuple(self._markers)
        if kept:
            self._stream = tokenizer.stream_after(prompt, skip_special_tokens, kept)
        else:
            self._stream = tokenizer.stream_after(prompt, skip_special_tokens)
        self._places = _MarkerPlaces(self._markers) if kept else None

    def push(self, output: Output) -> str:
        """The text that an output adds. What may become another character is held back."""
        ids = output.token_ids
        if output.finish_reason == "stop" and ids and ids[-1] in self._stop_ids:
            ids = ids[:-1]
        push = self._stream.push
        if output.text is not None:
            if self._places is None:
                return output.text
            for token in ids:
                self._places.note(token, push(token))
            return self._places.with_markers(output.text)
        text = push(ids[0]) if len(ids) == 1 else "".join(map(push, ids))
        return text if output.finish_reason is None else text + self._stream.flush()


class _MarkerPlaces:
    """Puts markers into the engine's text, which has no special tokens, may be behind its tokens,
    and ends in front of a stop word."""

    def __init__(self, markers: Mapping[int, str]) -> None:
        self._markers = markers
        self._due: deque[tuple[int, str]] = deque()
        self._known = 0
        self._given = 0

    def note(self, token: int, text: str) -> None:
        """The next token, and what it adds to the text with markers."""
        marker = self._markers.get(token)
        if marker is None:
            self._known += len(text)
            return
        self._known += len(text) - len(marker)
        self._due.append((self._known, marker))

    def with_markers(self, text: str) -> str:
        """More of the engine's text."""
        parts = []
        end = self._given + len(text)
        while self._due and self._due[0][0] <= end:
            place, marker = self._due.popleft()
            cut = max(place - self._given, 0)
            parts += [text[:cut], marker]
            text, self._given = text[cut:], self._given + cut
        self._given = end
        return "".join([*parts, text])
