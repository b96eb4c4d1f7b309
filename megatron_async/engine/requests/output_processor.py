"""Turns commits into what users see: request records, text as it grows, resolved futures."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import InvalidStateError
from typing import Any, NamedTuple

from megatron_async.engine.api_style import OUR_STYLE, ApiStyle
from megatron_async.engine.requests.host_ends import HostEnds
from megatron_async.engine.requests.live_request import LiveRequest
from megatron_async.engine.requests.log_probs import (
    TokenName,
    add_forced,
    add_generated,
    add_of_prompt,
    names_of,
    of_forced,
    start_log_probs,
)
from megatron_async.engine.requests.request_text import RequestText, prompt_text
from megatron_async.errors import EngineStoppedError
from megatron_async.request.request import (
    DynamicInferenceEventType,
    DynamicInferenceRequest,
    FinishReason,
    RequestFuture,
    SamplingSpan,
    Status,
    StepReport,
    TokenLogProbs,
    WeightSpan,
)
from megatron_async.sampling_params import SamplingParams
from megatron_async.scheduler.events import Commit, Event
from megatron_async.step.plan import Plan
from megatron_async.step.records import HiddenStates, Routes


class TokenOutput(NamedTuple):
    """One committed token, or the end of a request, or both.

    ``text`` is what became readable with this token (None without a tokenizer); a stop token adds
    no text, and what may still become part of a stop word is held back. ``token_id`` is None when
    the request ended without a token, ``log_probs`` unless the request asked for them.
    """

    request_id: int
    token_id: int | None
    text: str | None
    finish_reason: FinishReason | None
    log_probs: TokenLogProbs | None = None


# From all fields in half the time: every row of every step needs one.
_new_output: Callable[
    [tuple[int, int | None, str | None, FinishReason | None, TokenLogProbs | None]], TokenOutput
]
_new_output = functools.partial(tuple.__new__, TokenOutput)


class Taken(NamedTuple):
    """What steps have brought."""

    outputs: list[TokenOutput]
    finished: list[DynamicInferenceRequest]
    reports: list[StepReport]


class OutputProcessor:
    """The records of all requests that still have a row in flight or to come, by scheduler key.

    Args:
        eos_token_ids: the model's own end tokens.
        style: of the ``top_n`` lists of requests, and of their prompts.

    Attributes:
        ends: what ends requests before their tokens are committed: stop words, and what others
            watch for.
        weight_version: of the tokens committed from now on.
        outputs, finished, reports: what was committed, which requests ended and how the steps were
            committed since :meth:`take`.
        on_finish: called with each request that ends.
        ended: futures to resolve.
        keys: scheduler keys of the requests that have not ended, by request id.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        track_pauses: bool,
        eos_token_ids: Iterable[int] = (),
        style: ApiStyle = OUR_STYLE,
    ) -> None:
        self.ends = HostEnds()
        self.weight_version = 0
        self.outputs: list[TokenOutput] = []
        self.finished: list[DynamicInferenceRequest] = []
        self.reports: list[StepReport] = []
        self.on_finish: Callable[[DynamicInferenceRequest], None] | None = None
        self._tokenizer = tokenizer
        self._token_name: TokenName | None = None
        if style.top_by_text and tokenizer is not None:
            self._token_name = names_of(tokenizer)
        self._shows_prompts = style.shows_prompts
        self._track_pauses = track_pauses
        self._eos_token_ids = frozenset(eos_token_ids)
        self._entries: dict[int, LiveRequest] = {}
        self.keys: dict[int, int] = {}
        self.ended: deque[tuple[RequestFuture, DynamicInferenceRequest | Exception]] = deque()

    def open(
        self, key: int, request: DynamicInferenceRequest, stop_ids: Iterable[int]
    ) -> RequestFuture | None:
        """Start the record of a request, which ``stop_ids`` end; None if its id is in use. From
        any thread."""
        entry = self._entries[key] = LiveRequest(request, self._tokenizer, frozenset(stop_ids))
        if self.keys.setdefault(request.request_id, key) != key:
            del self._entries[key]
            return None
        if request.sampling_params.stop_words and entry.text.stopping is not None:
            self.ends.watch(key, entry.text.stopping)
        if request.sampling_params.wants_log_probs:
            start_log_probs(request)
        request.add_event(DynamicInferenceEventType.ADD)
        return entry.future

    def stream(self, key: int) -> None:
        """Make text of a request token by token, before it is admitted. From any thread."""
        self._entries[key].is_streamed = True

    def refuse(self, request: DynamicInferenceRequest, error: Exception) -> RequestFuture:
        """Hand out a request that has failed before any step saw it. From any thread."""
        request.add_event(DynamicInferenceEventType.ERROR_NONTRANSIENT, error)
        request.add_event(DynamicInferenceEventType.FAIL)
        request.status, request.finish_reason = Status.FAILED, FinishReason.ERROR
        request.latency = 0.0
        future = RequestFuture()
        future.set_result(request)
        self.finished.append(request)
        return future

    def restart(self, key: int) -> frozenset[int]:
        """Forget what a request has generated, and what of it nobody has taken; it begins again.
        Returns its stop ids. Its watchers are forgotten but for stop words."""
        entry = self._entries[key]
        request = entry.request
        entry.restart()
        self.outputs = [o for o in self.outputs if o.request_id != request.request_id]
        self.ends.forget(key)
        if entry.text.stopping is not None:
            self.ends.watch(key, entry.text.stopping)
        return entry.stop_ids

    def begin_prompt_anew(self, key: int) -> None:
        """Forget what has come of a prompt, whose request has generated nothing yet."""
        self._entries[key].forget_prompt()

    def drop(self, key: int, request_id: int) -> None:
        """Take back :meth:`open`, however far it came."""
        self._entries.pop(key, None)
        self.ends.forget(key)
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
            self._entries[key].change(change, cached, replayed, track_pauses=self._track_pauses)

    def change_sampling(
        self, key: int, changes: dict[str, Any], seed_of: Callable[[int, int | None], int]
    ) -> tuple[int, SamplingParams]:
        """A request's id, and its sampling parameters with ``changes``. ``seed_of`` its id and the
        seed among them, or None, is the seed that it has from here on."""
        request = self._entries[key].request
        params = dataclasses.replace(request.sampling_params, **changes)
        request.sampling_params = params
        request.seed = seed_of(request.request_id, params.seed)
        return request.request_id, params

    def resampled(self, key: int, params: SamplingParams, ticket: int) -> None:
        """Steps from ``ticket`` on sample the request with ``params``."""
        request = self._entries[key].request
        request.sampling_spans.append(SamplingSpan(ticket, params))

    def commit(self, commit: Commit, report: StepReport) -> None:
        """Apply a commit in the order of its rows."""
        now = time.perf_counter()
        self.reports.append(report)
        entries, version, outputs = self._entries, self.weight_version, self.outputs
        name = self._token_name
        keys, rows, reasons, discarded, log_probs, prompt_log_probs = commit
        if prompt_log_probs is not None:
            self._add_of_prompts(prompt_log_probs)
        of_rows: Iterable[Any] = (None,) * len(keys) if log_probs is None else log_probs
        for key, tokens, words in zip(keys, rows, of_rows, strict=True):
            entry = entries[key]
            request = entry.request
            if key in discarded:
                request.counters.discarded += 1
                continue
            if entry.forced:
                self._hand_out_forced(entry, report, now)
            each = () if words is None else add_generated(request, words[: len(tokens)], name)
            if len(tokens) != 1:
                self._start_window(entry, tokens, report, each)
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
            reason, text = reasons.get(key), None
            if reason is not None:
                text = self._end_with_token(key, entry, token, reason, now)
                reason = request.finish_reason
            elif entry.text.stream is not None:
                text = self._push(entry.text, token)
            own = each[-1] if each else None
            outputs.append(_new_output((request.request_id, token, text, reason, own)))

    def take_routes(self, plan: Plan, commit: Commit, routes: Routes) -> None:
        """Keep the experts of the tokens of a step, ahead of :meth:`commit`. A decode row has its
        newest token and the drafts that were accepted behind it, a chunk all of its tokens."""
        entries, ids = self._entries, routes.ids
        keys = commit.keys[: plan.decode_rows]
        for key, tokens, first in zip(keys, commit.tokens, routes.firsts, strict=False):
            entry = entries[key]
            if entry.routes is not None and tokens and key not in commit.discarded:
                request = entry.request
                newest = len(request.prompt_tokens) + len(request.generated_tokens) - 1
                entry.routes.put(newest, ids[first : first + len(tokens)])
        for chunk in plan.prefills:
            key, first = plan.rows.keys[chunk.row], routes.firsts[chunk.row]
            of_chunk = entries[key].routes if self.is_live(key) else None
            if of_chunk is None:
                continue
            if chunk.row in routes.prefixes:
                of_chunk.put(0, routes.prefixes[chunk.row])
            of_chunk.put(chunk.start, ids[first : first + len(chunk.tokens)])

    def take_hidden_states(self, plan: Plan, found: HiddenStates) -> None:
        """Keep the hidden states of a step's chunks, ahead of :meth:`commit`."""
        from megatron_async.request.hidden_states import rows_of_chunks

        for key, start, rows in rows_of_chunks(plan, found):
            entry = self._entries[key] if self.is_live(key) else None
            if entry is not None and entry.hidden is not None:
                entry.hidden.put(start, rows)

    def verified(
        self, keys: Sequence[int], rows: Sequence[tuple[int, ...]], windows: Sequence[int]
    ) -> None:
        """Count the drafts of decode rows whose tokens are taken, each with its window."""
        for key, tokens, window in zip(keys, rows, windows, strict=False):
            if tokens:
                request, accepted = self._entries[key].request, len(tokens) - 1
                counters = request.counters
                counters.drafted += window - 1
                by_position = counters.accepted_by_position
                if accepted > len(by_position):
                    by_position += [0] * (accepted - len(by_position))
                for place in range(accepted):
                    by_position[place] += 1
                if window > 1:
                    rows_of_request = request.drafted_rows
                    if rows_of_request is None:
                        rows_of_request = request.start_drafted_rows()
                    rows_of_request.add(len(request.generated_tokens), window - 1, accepted)

    def abort(self, key: int) -> None:
        """End a request without a token."""
        self._end_without_token(self._entries[key], FinishReason.ABORT)

    def take(self) -> Taken:
        """Outputs, ended requests and step reports since the last call, in order."""
        taken = Taken(self.outputs, self.finished, self.reports)
        self.outputs, self.finished, self.reports = [], [], []
        return taken

    def _add_of_prompts(self, prompt_log_probs: Mapping[int, tuple[int, Any]]) -> None:
        for key, (first, words) in prompt_log_probs.items():
            if self.is_live(key):
                entry = self._entries[key]
                add_of_prompt(entry.request, first, words, self._token_name)
                if entry.forced:
                    known = entry.forced_log_probs
                    new = of_forced(entry.request, len(known), first, words)
                    known += [(each, self.weight_version) for each in new]

    def _hand_out_forced(self, entry: LiveRequest, report: StepReport, now: float) -> None:
        """The tokens that are forced, with the first that is not."""
        request, forced, entry.forced = entry.request, entry.forced, ()
        log_probs: Sequence[tuple[TokenLogProbs | None, int]] = entry.forced_log_probs
        log_probs = log_probs or [(None, self.weight_version)] * len(forced)
        add_forced(request, [each for each, _ in entry.forced_log_probs], self._token_name)
        for index, (token, (own, version)) in enumerate(zip(forced, log_probs, strict=True)):
            if entry.version != version:
                entry.version = version
                request.weight_spans.append(WeightSpan(index, version))
            request.generated_tokens.append(token)
            request.steps.append(report)
            request.tpot.append(now - entry.last_time)
            entry.last_time = now
            text = self._push(entry.text, token)
            self.outputs.append(TokenOutput(request.request_id, token, text, None, own))

    def _start_window(
        self,
        entry: LiveRequest,
        tokens: tuple[int, ...],
        report: StepReport,
        log_probs: Sequence[TokenLogProbs],
    ) -> None:
        """All but the last of several tokens of one row, which come at once; or no token."""
        request = entry.request
        if not tokens:
            request.counters.discarded += 1
            return
        request.counters.accepted += len(tokens) - 1
        request.counters.committed += len(tokens) - 1
        for index, token in enumerate(tokens[:-1]):
            request.generated_tokens.append(token)
            request.steps.append(report)
            request.tpot.append(0.0)
            text = self._push(entry.text, token)
            own = log_probs[index] if log_probs else None
            self.outputs.append(TokenOutput(request.request_id, token, text, None, own))

    @staticmethod
    def _push(text: RequestText, token: int) -> str | None:
        """Text that a token completes; None without a stream, or when it fails."""
        if text.stream is None:
            return None
        try:
            piece = text.stream.push(token)
        except Exception as error:
            text.go_on_without(error)
            return None
        if piece:
            text.pieces.append(piece)
        return piece

    def _end_with_token(
        self, key: int, entry: LiveRequest, token: int, reason: FinishReason, now: float
    ) -> str | None:
        """End a request with its last token; returns the text of the token's output."""
        stop_token = None
        # What a watcher ends ends with a token like any other.
        if reason is FinishReason.STOP and (
            key not in self.ends.watchers or token in entry.stop_ids
        ):
            stop_token = token
        text = None
        if entry.text.stream is not None:
            is_text = stop_token is None or entry.text.includes_stop
            text = self._push(entry.text, token) if is_text else ""
        return self._finish(entry, reason, text, now, stop_token)

    def _end_without_token(self, entry: LiveRequest, reason: FinishReason) -> None:
        text = self._finish(entry, reason, None, time.perf_counter(), None)
        self.outputs.append(TokenOutput(entry.request.request_id, None, text, reason))

    def _finish(
        self,
        entry: LiveRequest,
        reason: FinishReason,
        text: str | None,
        now: float,
        stop_token: int | None,
    ) -> str | None:
        """Hand out a request that ends; returns the text of its last output."""
        request = entry.request
        text = entry.end(reason, text, now, stop_token, self._eos_token_ids)
        if self._shows_prompts and request.prompt is None:
            request.prompt = prompt_text(request, self._tokenizer)
        del self.keys[request.request_id]
        self.ended.append((entry.future, request))
        self.finished.append(request)
        if self.on_finish is not None:
            self.on_finish(request)
        return text

    def fail(self, error: EngineStoppedError) -> None:
        """Fail all: no request will end any more. Other threads may add some meanwhile."""
        self.ended += [(entry.future, error) for entry in list(self._entries.values())]

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
            if key in self.ends.watchers:
                self.ends.forget(key)
