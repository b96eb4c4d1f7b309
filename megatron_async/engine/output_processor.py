"""Turns commits into what users see: request records, text as it grows, resolved futures."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import InvalidStateError
from typing import Any, NamedTuple

from megatron_async.errors import EngineStoppedError, ModelOutputError
from megatron_async.request import (
    DynamicInferenceEventType,
    DynamicInferenceRequest,
    FinishReason,
    RequestFuture,
    SamplingSpan,
    Status,
    StepReport,
    WeightSpan,
)
from megatron_async.sampling_params import SamplingParams
from megatron_async.scheduler.events import Change, Commit, Event
from megatron_async.step.plan import Plan

logger = logging.getLogger(__name__)

STATUS_OF = {
    FinishReason.STOP: Status.COMPLETED,
    FinishReason.LENGTH: Status.COMPLETED,
    FinishReason.ABORT: Status.FAILED,
    FinishReason.ERROR: Status.FAILED,
}

EVENT_OF = {
    FinishReason.STOP: DynamicInferenceEventType.FINISH,
    FinishReason.LENGTH: DynamicInferenceEventType.FINISH,
    FinishReason.ABORT: DynamicInferenceEventType.FAIL,
    FinishReason.ERROR: DynamicInferenceEventType.FAIL,
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


class Taken(NamedTuple):
    """What steps have brought."""

    outputs: list[TokenOutput]
    finished: list[DynamicInferenceRequest]
    reports: list[StepReport]


class Entry:
    """A live request: its record, its future and its text so far."""

    __slots__ = (
        "detokenizable",
        "future",
        "last_time",
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
        self.detokenizable = tokenizer is not None
        """The tokenizer has made text of all its tokens so far."""
        self.version: int | None = None
        """Of the weights that its newest token is from."""
        self.started = self.last_time = time.perf_counter()


class OutputProcessor:
    """The records of all requests that still have a row in flight or to come, by scheduler key.

    Attributes:
        weight_version: of the tokens committed from now on.
        outputs, finished, reports: what was committed, which requests ended and how the steps were
            committed since :meth:`take`.
        on_finish: called with each request that ends.
        ended: futures to resolve.
        keys: scheduler keys of the requests that have not ended, by request id.
    """

    def __init__(self, tokenizer: Any, *, track_pauses: bool) -> None:
        self.weight_version = 0
        self.outputs: list[TokenOutput] = []
        self.finished: list[DynamicInferenceRequest] = []
        self.reports: list[StepReport] = []
        self.on_finish: Callable[[DynamicInferenceRequest], None] | None = None
        self._tokenizer = tokenizer
        self._track_pauses = track_pauses
        self._entries: dict[int, Entry] = {}
        self.keys: dict[int, int] = {}
        self.ended: deque[tuple[RequestFuture, DynamicInferenceRequest | Exception]] = deque()

    def open(self, key: int, request: DynamicInferenceRequest) -> RequestFuture | None:
        """Start the record of a request; None if its id is in use. From any thread."""
        entry = self._entries[key] = Entry(request, self._tokenizer)
        if self.keys.setdefault(request.request_id, key) != key:
            del self._entries[key]
            return None
        request.add_event(DynamicInferenceEventType.ADD)
        return entry.future

    def drop(self, key: int, request_id: int) -> None:
        """Take back :meth:`open`, however far it came."""
        self._entries.pop(key, None)
        if self.keys.get(request_id) == key:
            del self.keys[request_id]

    def knows(self, key: int) -> bool:
        """There is a record under the scheduler's key."""
        return key in self._entries

    def is_live(self, key: int) -> bool:
        """There is a record under the scheduler's key, of a request that has not ended."""
        entry = self._entries.get(key)
        return entry is not None and entry.request.finish_reason is None

    def key_of(self, request_id: int) -> int | None:
        """The scheduler's key of a request that has not ended."""
        return self.keys.get(request_id)

    def request(self, request_id: int) -> DynamicInferenceRequest | None:
        """The record of a request that has not ended."""
        key = self.keys.get(request_id)
        entry = None if key is None else self._entries.get(key)
        return None if entry is None else entry.request

    def launched(self, plan: Plan) -> None:
        """Count the rows of a launched plan whose logits will be sampled."""
        entries = self._entries
        keys = plan.rows.keys
        for key in keys[: plan.decode_rows]:
            entries[key].request.counters.launched += 1
        for chunk in plan.prefills:
            if chunk.samples:
                entries[keys[chunk.row]].request.counters.launched += 1

    def record_events(self, events: list[Event]) -> None:
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

    def change_sampling(self, key: int, changes: dict[str, Any]) -> tuple[int, SamplingParams]:
        """A request's id, and its sampling parameters with ``changes``."""
        request = self._entries[key].request
        request.sampling_params = dataclasses.replace(request.sampling_params, **changes)
        return request.request_id, request.sampling_params

    def resampled(self, key: int, params: SamplingParams, ticket: int) -> None:
        """Steps from ``ticket`` on sample the request with ``params``."""
        request = self._entries[key].request
        request.sampling_spans.append(SamplingSpan(ticket, params))

    def commit(self, commit: Commit, report: StepReport) -> None:
        """Apply a commit in the order of its rows."""
        now = time.perf_counter()
        self.reports.append(report)
        entries, version, outputs = self._entries, self.weight_version, self.outputs
        keys, rows, reasons, discarded = commit
        for key, tokens in zip(keys, rows, strict=True):
            entry = entries[key]
            request = entry.request
            if key in discarded:
                request.counters.discarded += 1
                continue
            if len(tokens) != 1:
                self._start_window(entry, tokens, report)
                if not tokens:
                    self._end_without_token(entry, reasons[key])
                    continue
            if entry.version != version:
                entry.version = version
                start = len(request.generated_tokens) + 1 - len(tokens)
                request.weight_spans.append(WeightSpan(start, version))
            token = tokens[-1]
            request.generated_tokens.append(token)
            request.steps.append(report)
            request.counters.committed += 1
            request.tpot.append(now - entry.last_time)
            entry.last_time = now
            reason = reasons.get(key)
            text = None
            if entry.stream is not None:
                text = "" if reason is FinishReason.STOP else self._push(entry, token)
            if reason is not None:
                text = self._finish(entry, reason, text, now)
            outputs.append(_new_output((request.request_id, token, text, reason)))

    def abort(self, key: int) -> None:
        """End a request without a token."""
        self._end_without_token(self._entries[key], FinishReason.ABORT)

    def take(self) -> Taken:
        """Outputs, ended requests and step reports since the last call, in order."""
        taken = Taken(self.outputs, self.finished, self.reports)
        self.outputs, self.finished, self.reports = [], [], []
        return taken

    def _start_window(self, entry: Entry, tokens: tuple[int, ...], report: StepReport) -> None:
        """All but the last of several tokens of one row, which come at once; or no token."""
        request = entry.request
        if not tokens:
            request.counters.discarded += 1
            return
        request.counters.accepted += len(tokens) - 1
        request.counters.committed += len(tokens) - 1
        for token in tokens[:-1]:
            request.generated_tokens.append(token)
            request.steps.append(report)
            request.tpot.append(0.0)
            text = self._push(entry, token)
            self.outputs.append(TokenOutput(request.request_id, token, text, None))

    def _push(self, entry: Entry, token: int) -> str | None:
        """Text that a token completes; None without a tokenizer, or when it fails."""
        if entry.stream is None:
            return None
        try:
            text: str = entry.stream.push(token)
        except Exception as error:
            self._go_on_without_text(entry, error)
            return None
        if text:
            entry.pieces.append(text)
        return text

    def _end_without_token(self, entry: Entry, reason: FinishReason) -> None:
        text = self._finish(entry, reason, None, time.perf_counter())
        self.outputs.append(TokenOutput(entry.request.request_id, None, text, reason))

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
            elif entry.detokenizable:
                tokens = request.generated_tokens
                request.generated_text = self._tokenizer.detokenize(
                    tokens[:-1] if reason is FinishReason.STOP else tokens
                )
        except Exception as error:
            self._go_on_without_text(entry, error)
        if reason is FinishReason.ERROR:
            failure = ModelOutputError(
                f"the model gave NaN for the token after {len(request.generated_tokens)} generated "
                "ones; look for overflow in its weights or activations"
            )
            request.add_event(DynamicInferenceEventType.ERROR_NONTRANSIENT, failure)
            logger.warning("request %d has ended: %s", request.request_id, failure)
        request.add_event(EVENT_OF[reason])
        del self.keys[request.request_id]
        self.ended.append((entry.future, request))
        self.finished.append(request)
        if self.on_finish is not None:
            self.on_finish(request)
        return text

    def _go_on_without_text(self, entry: Entry, error: Exception) -> None:
        """A tokenizer's error is the request's alone."""
        entry.detokenizable, entry.stream = False, None
        entry.request.add_event(DynamicInferenceEventType.ERROR_NONTRANSIENT, error)
        logger.warning(
            "request %d goes on without text, since its tokenizer failed (%s: %s)",
            entry.request.request_id,
            type(error).__name__,
            error,
        )

    def fail(self, error: EngineStoppedError) -> None:
        """No request will end any more."""
        self.ended += [(entry.future, error) for entry in self._entries.values()]

    def resolve_futures(self) -> None:
        """Resolve the futures of requests that have ended. Their callbacks may step the engine, so
        this is for when a step is over."""
        while True:
            try:
                ended = self.ended[0]
            except IndexError:
                return
            future, result = ended
            with contextlib.suppress(InvalidStateError):  # cancelled, or another thread was faster
                if isinstance(result, Exception):
                    future.set_exception(result)
                else:
                    future.set_result(result)
            with contextlib.suppress(ValueError):
                self.ended.remove(ended)

    def close(self, keys: list[int]) -> None:
        """Drop the records of requests whose last ticket has retired."""
        for key in keys:
            del self._entries[key]
