"""The text of requests: token by token, up to a stop word where there is one."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection
from typing import Any, Protocol

from megatron_async.engine.requests.stop_words import StopWords
from megatron_async.request.request import DynamicInferenceEventType, DynamicInferenceRequest

logger = logging.getLogger(__name__)


class TextStream(Protocol):
    """What a tokenizer's ``stream()`` gives."""

    def push(self, token_id: int, /) -> str:
        """Text that a token completes."""

    def flush(self) -> str:
        """Text held back; no token comes after it."""


class StoppingText:
    """Text of a request that has stop words.

    It is a watcher of the request's tokens: :meth:`take` detokenises a token before it is
    committed, so that the end is exact. At the commit it stands in for the tokenizer's stream:
    :meth:`push` hands out what :meth:`take` has released for the same token.

    Args:
        stream: the tokenizer's, which no one else pushes.
        words: the request's.
        stop_ids: tokens that end the request; ``words`` say whether they add text.
        min_tokens: a stop word counts when a later token than these completes it, wherever it
            begins, as in vLLM; what these have completed is never searched.
    """

    def __init__(
        self,
        stream: TextStream,
        words: StopWords,
        *,
        stop_ids: Collection[int] = (),
        min_tokens: int = 0,
    ) -> None:
        self._stream = stream
        self._words = words
        self._stop_ids = stop_ids
        self._min_tokens = min_tokens
        self._taken = 0
        self._released: deque[str] = deque()
        """Text of tokens that were taken and are not committed."""
        self._error: Exception | None = None
        """Why there is no text any more."""

    @property
    def matched(self) -> str | None:
        """The stop word that ended the text."""
        return self._words.matched

    def take(self, token: int) -> bool:
        """Detokenise a token; True when it is the last."""
        if self._error is not None:
            return False
        is_stop = token in self._stop_ids
        if is_stop and not self._words.include:
            return True
        self._taken += 1
        try:
            text = self._stream.push(token)
        except Exception as error:
            self._error = error
            return is_stop
        self._released.append(self._words.push(text, searched=self._counts() and not is_stop))
        return is_stop or self.matched is not None

    def push(self, token: int) -> str:
        """What became final with a token that was taken; nothing with a stop token.

        Raises:
            Exception: the tokenizer's, when it failed with this token.
        """
        if self._released:
            return self._released.popleft()
        if self._error is not None:
            raise self._error
        return ""

    def flush(self) -> str:
        """What is held back, up to a stop word that is found only now that the end is known."""
        if self._error is not None:
            raise self._error
        return self._words.push(self._stream.flush(), searched=self._counts()) + self._words.flush()

    def _counts(self) -> bool:
        return self._taken > self._min_tokens


class WholeTextStream:
    """The stream of a tokenizer that only decodes whole sequences: a token costs a decoding of all
    tokens before it.

    Right for tokenizers whose text only grows with further tokens, but for U+FFFD at its end,
    which may stand for an incomplete character and is held back.
    """

    def __init__(self, detokenize: Callable[[list[int]], str]) -> None:
        self._detokenize = detokenize
        self._ids: list[int] = []
        self._shown = 0

    def push(self, token: int) -> str:
        """Text that ``token`` completes."""
        self._ids.append(token)
        return self._show(self._detokenize(self._ids).rstrip("\ufffd"))

    def flush(self) -> str:
        """Text held back."""
        return self._show(self._detokenize(self._ids))

    def _show(self, text: str) -> str:
        new = text[self._shown :]
        self._shown += len(new)
        return new


class RequestText:
    """The text of one request so far. A tokenizer's error is its request's alone, which goes on
    without text.

    Args:
        tokenizer: None for none.
        stop_ids: tokens that end the request.
        is_streamed: make text as tokens come, whatever the tokenizer.

    Attributes:
        includes_stop: text ends behind what ended it, a stop word or the text of a stop token.
        stream: makes text of tokens as they come; None when text is made at the end, or never.
        pieces: the text that ``stream`` has made.
        stopping: ``stream`` of a request with stop words, a watcher of its tokens; None for others.
    """

    __slots__ = ("_detokenize", "_request", "includes_stop", "pieces", "stopping", "stream")

    def __init__(
        self,
        request: DynamicInferenceRequest,
        tokenizer: Any,
        stop_ids: Collection[int],
        *,
        is_streamed: bool = False,
    ) -> None:
        self._request = request
        self.pieces: list[str] = []
        params = request.sampling_params
        self.includes_stop = params.include_stop_str_in_output
        if not (params.detokenize or params.stop_words):
            tokenizer = None
        self._detokenize: Callable[[list[int]], str] | None
        self._detokenize = None if tokenizer is None else tokenizer.detokenize
        self.stream: TextStream | None = None
        try:
            if (stream_after := getattr(tokenizer, "stream_after", None)) is not None:
                self.stream = stream_after(request.prompt_tokens)
            elif (make_stream := getattr(tokenizer, "stream", None)) is not None:
                self.stream = make_stream()
        except Exception as error:  # in the midst of a step
            self.go_on_without(error)
        self.stopping: StoppingText | None = None
        wants_stream = is_streamed or bool(params.stop_words)
        if self.stream is None and wants_stream and self._detokenize is not None:
            self.stream = WholeTextStream(self._detokenize)
        if self.stream is not None and params.stop_words:
            self.stream = self.stopping = StoppingText(
                self.stream,
                StopWords(params.stop_words, include=self.includes_stop),
                stop_ids=stop_ids,
                min_tokens=params.min_tokens,
            )

    @property
    def stop_word(self) -> str | None:
        """The stop word that has ended the text."""
        return None if self.stopping is None else self.stopping.matched

    def finish(self, tokens: list[int]) -> str | None:
        """Write the request's ``generated_text``, that of ``tokens``; returns what was held back,
        None without a stream."""
        try:
            if self.stream is not None:
                rest = self.stream.flush()
                self._request.generated_text = "".join(self.pieces) + rest
                return rest
            if self._detokenize is not None:
                self._request.generated_text = self._detokenize(tokens)
        except Exception as error:
            self.go_on_without(error)
        return None

    def go_on_without(self, error: Exception) -> None:
        """The tokenizer has failed."""
        self._detokenize = self.stream = None
        self._request.add_event(DynamicInferenceEventType.ERROR_NONTRANSIENT, error)
        logger.warning(
            "request %d goes on without text, since its tokenizer failed (%s: %s)",
            self._request.request_id,
            type(error).__name__,
            error,
        )


def prompt_text(request: DynamicInferenceRequest, tokenizer: Any) -> str | None:
    """The text of a prompt of token ids; None where the tokenizer cannot show them."""
    if tokenizer is None or not request.sampling_params.detokenize:
        return None
    try:
        return str(tokenizer.detokenize(list(request.prompt_tokens)))
    except Exception as error:
        logger.warning(
            "request %d has no text of its prompt, since its tokenizer failed (%s: %s)",
            request.request_id,
            type(error).__name__,
            error,
        )
        return None
