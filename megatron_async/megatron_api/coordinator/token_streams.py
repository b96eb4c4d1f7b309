"""Tokens of requests whose clients want them as they come."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from megatron_async.request.request import DynamicInferenceRequest

Key = tuple[bytes, int]


class Observed(Protocol):
    """An engine whose commits are told."""

    def observe(self, observer: Any) -> Callable[[], None]: ...


class _Stream:
    def __init__(self, request: DynamicInferenceRequest, interval: int) -> None:
        self.request = request
        self.interval = interval
        self.sent = 0


class TokenStreams:
    """Sends the tokens of some requests after the steps that brought them. While there are none, a
    step pays nothing.

    Args:
        call: does something in the thread that :meth:`add` and :meth:`remove` are called in.
        send: called there with a request's key and its new tokens.
    """

    def __init__(
        self,
        engine: Observed,
        call: Callable[[Callable[[], object]], None],
        send: Callable[[Key, dict[str, Any]], None],
    ) -> None:
        self._engine = engine
        self._call = call
        self._send = send
        self._streams: dict[Key, _Stream] = {}
        self._forget: Callable[[], None] | None = None

    def add(self, key: Key, request: DynamicInferenceRequest, interval: int) -> None:
        """Send the request's tokens, at least ``interval`` at once."""
        self._streams[key] = _Stream(request, interval)
        if self._forget is None:
            self._forget = self._engine.observe(self)

    def remove(self, key: Key) -> None:
        """The request has ended, or nobody wants its tokens."""
        self._streams.pop(key, None)
        if not self._streams and self._forget is not None:
            self._forget()
            self._forget = None

    def on_commit(self, report: Any) -> None:
        """The engine has committed a step."""
        self._call(self._send_new)

    def _send_new(self) -> None:
        for key, stream in self._streams.items():
            request = stream.request
            end = len(request.generated_tokens)
            if end - stream.sent < stream.interval:
                continue
            partial: dict[str, Any] = {
                "request_id": request.request_id,
                "new_tokens": request.generated_tokens[stream.sent : end],
            }
            if request.generated_log_probs is not None:
                partial["new_log_probs"] = request.generated_log_probs[stream.sent : end]
                partial["new_top_n_logprobs"] = (request.generated_top_n_logprobs or [])[
                    stream.sent : end
                ]
                if not stream.sent:
                    partial["prompt_log_probs"] = request.prompt_log_probs or []
                    partial["prompt_top_n_logprobs"] = request.prompt_top_n_logprobs or []
            stream.sent = end
            self._send(key, partial)
