"""Turns commits into what users see: request records, text as it grows, resolved futures."""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import InvalidStateError
from typing import Any, NamedTuple

from megatron_async.errors import EngineStoppedError
from megatron_async.request import (
    DynamicInferenceEventType,
    DynamicInferenceRequest,
    FinishReason,
    RequestFuture,
    Status,
    WeightSpan,
)
from megatron_async.scheduler.events import Change, Commit, Event
from megatron_async.step.plan import Plan

logger = logging.getLogger(__name__)

STATUS_OF = {
    FinishReason.STOP: Status.COMPLETED,
    FinishReason.LENGTH: Status.COMPLETED,
    FinishReason.ABORT: Status.FAILED,
}

STATUS_AFTER = {
    Change.ADMIT: Status.ACTIVE_AND_GENERATING_TOKENS,
    Change.PAUSE: Status.ACTIVE_BUT_NOT_GENERATING_TOKENS,
    Change.STALL: Status.ACTIVE_BUT_NOT_GENERATING_TOKENS,
    Change.RESUME: Status.ACTIVE_AND_GENERATING_TOKENS,
    Change.EVICT: Status.WAITING_IN_QUEUE,
}


class TokenOutput(NamedTuple):
    """One committed token, or the end of a request, or both.

    ``text`` is what became readable with this token (None without a tokenizer); a stop token adds
    no text. ``token_id`` is None when the request ended without a token.
    """

    request_id: int
    token_id: int | None
    text: str | None
    finish_reason: FinishReason | None


# From all fields in half the time: every row of every step needs one.
_new_output: Callable[[tuple[int, int | None, str | None, FinishReason | None]], TokenOutput]
_new_output = functools.partial(tuple.__new__, TokenOutput)


class Entry:
    """A live request: its record, its future and its text so far."""

    __slots__ = (
        "future",
        "last_time",
        "legible",
        "pieces",
        "request",
        "started",
        "stream",
        "version",
    )

    def __init__(self, request: DynamicInferenceRequest, tokenizer: Any) -> None:
        self.request = request
        self.future = RequestFuture()
        make_stream = getattr(tokenizer, "stream", None)
        self.stream = make_stream() if make_stream is not None else None
        self.pieces: list[str] = []
        self.legible = tokenizer is not None
        """The tokenizer has made text of all its tokens so far."""
        self.version: int | None = None
        """Of the weights that its newest token is from."""
        self.started = self.last_time = time.perf_counter()


class OutputBook:
    """The records of all requests that still have a row in flight or to come, by scheduler key."""

    def __init__(self, tokenizer: Any, *, track_pauses: bool) -> None:
        self.weight_version = 0
        """Of the tokens committed from now on."""
        self._tokenizer = tokenizer
        self._track_pauses = track_pauses
        self._entries: dict[int, Entry] = {}
        self._keys: dict[int, int] = {}
        self._ended: deque[tuple[RequestFuture, DynamicInferenceRequest | Exception]] = deque()

    def open(self, key: int, request: DynamicInferenceRequest) -> RequestFuture:
        """Start the record of a request."""
        entry = Entry(request, self._tokenizer)
        self._entries[key] = entry
        self._keys[request.request_id] = key
        request.add_event(DynamicInferenceEventType.ADD)
        return entry.future

    def forget(self, key: int, request_id: int) -> None:
        """Take back :meth:`open`, however far it came."""
        self._entries.pop(key, None)
        if self._keys.get(request_id) == key:
            del self._keys[request_id]

    def knows(self, key: int) -> bool:
        """There is a record under the scheduler's key."""
        return key in self._entries

    def key_of(self, request_id: int) -> int | None:
        """The scheduler's key of a request that has not ended."""
        return self._keys.get(request_id)

    def request(self, request_id: int) -> DynamicInferenceRequest | None:
        """The record of a request that has not ended."""
        key = self._keys.get(request_id)
        entry = None if key is None else self._entries.get(key)
        return None if entry is None else entry.request

    @property
    def active_request_ids(self) -> list[int]:
        """Ids of the requests that have not ended."""
        return list(self._keys)

    @property
    def active_keys(self) -> list[int]:
        """The scheduler's keys of the same."""
        return list(self._keys.values())

    def launched(self, plan: Plan) -> None:
        """Count the rows of a launched plan whose logits will be sampled."""
        entries = self._entries
        keys = plan.rows.keys
        for key in keys[: plan.decode_rows]:
            entries[key].request.counters.launched += 1
        for chunk in plan.prefills:
            if chunk.samples:
                entries[keys[chunk.row]].request.counters.launched += 1

    def happened(self, events: list[Event]) -> None:
        """Record what the scheduler did to requests."""
        for key, change, cached, replayed in events:
            request = self._entries[key].request
            counters = request.counters
            counters.cached += cached
            counters.replayed += replayed
            counters.stalls += change is Change.STALL
            counters.evictions += change is Change.EVICT
            if change is Change.EVICT:
                request.add_event(DynamicInferenceEventType.EVICT)
            elif self._track_pauses and change in (Change.PAUSE, Change.STALL):
                request.add_event(DynamicInferenceEventType.PAUSE)
            if request.finish_reason is None:
                request.status = STATUS_AFTER[change]

    def commit(self, commit: Commit) -> tuple[list[TokenOutput], list[DynamicInferenceRequest]]:
        """Apply a commit in the order of its rows; returns the outputs and the requests that
        ended."""
        outputs: list[TokenOutput] = []
        finished: list[DynamicInferenceRequest] = []
        now = time.perf_counter()
        entries, version = self._entries, self.weight_version
        keys, tokens, reasons, discarded = commit
        for key, token in zip(keys, tokens, strict=True):
            entry = entries[key]
            request = entry.request
            if key in discarded:
                request.counters.discarded += 1
                continue
            if entry.version != version:
                entry.version = version
                request.weight_spans.append(WeightSpan(len(request.generated_tokens), version))
            request.generated_tokens.append(token)
            request.counters.committed += 1
            request.tpot.append(now - entry.last_time)
            entry.last_time = now
            reason = reasons.get(key)
            text = None
            stream = entry.stream
            if stream is not None:
                try:
                    text = "" if reason is FinishReason.STOP else stream.push(token)
                except Exception as error:
                    self._illegible(entry, error)
                if text:
                    entry.pieces.append(text)
            if reason is not None:
                text = self._finish(entry, reason, text, now)
                finished.append(request)
            outputs.append(_new_output((request.request_id, token, text, reason)))
        return outputs, finished

    def abort(self, key: int) -> tuple[list[TokenOutput], list[DynamicInferenceRequest]]:
        """End a request without a token; returns what :meth:`commit` does."""
        entry, reason = self._entries[key], FinishReason.ABORT
        text = self._finish(entry, reason, None, time.perf_counter())
        return [TokenOutput(entry.request.request_id, None, text, reason)], [entry.request]

    def _finish(
        self, entry: Entry, reason: FinishReason, text: str | None, now: float
    ) -> str | None:
        """End a request; returns ``text`` of its last output with what was held back until now."""
        request = entry.request
        request.finish_reason = reason
        request.status = STATUS_OF[reason]
        request.latency = now - entry.started
        try:
            if entry.stream is not None:
                rest = entry.stream.flush()
                request.generated_text = "".join(entry.pieces) + rest
                text = (text or "") + rest
            elif entry.legible:
                tokens = request.generated_tokens
                request.generated_text = self._tokenizer.detokenize(
                    tokens[:-1] if reason is FinishReason.STOP else tokens
                )
        except Exception as error:
            self._illegible(entry, error)
        aborted = reason is FinishReason.ABORT
        request.add_event(
            DynamicInferenceEventType.FAIL if aborted else DynamicInferenceEventType.FINISH
        )
        del self._keys[request.request_id]
        self._ended.append((entry.future, request))
        return text

    def _illegible(self, entry: Entry, error: Exception) -> None:
        """Go on without text: a tokenizer's error is the request's alone."""
        entry.legible, entry.stream = False, None
        entry.request.add_event(DynamicInferenceEventType.ERROR_NONTRANSIENT, error)
        logger.warning(
            "request %d goes on without text, since its tokenizer failed (%s: %s)",
            entry.request.request_id,
            type(error).__name__,
            error,
        )

    def fail(self, error: EngineStoppedError) -> None:
        """No request will end any more."""
        self._ended += [(entry.future, error) for entry in self._entries.values()]

    def tell(self) -> None:
        """Resolve the futures of requests that have ended. Their callbacks may step the engine, so
        this is for when a commit is over."""
        while True:
            try:
                ended = self._ended[0]
            except IndexError:
                return
            future, result = ended
            with contextlib.suppress(InvalidStateError):  # cancelled, or another thread was faster
                if isinstance(result, Exception):
                    future.set_exception(result)
                else:
                    future.set_result(result)
            with contextlib.suppress(ValueError):
                self._ended.remove(ended)

    def close(self, keys: list[int]) -> None:
        """Drop the records of requests whose last ticket has retired."""
        for key in keys:
            del self._entries[key]
