"""What a user gets back for a request, with megatron-core's names."""

from __future__ import annotations

import concurrent.futures
import contextlib
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

from megatron_async.errors import IntegrityError, RequestError
from megatron_async.request.fields import (
    DEVICE_ENDS as DEVICE_ENDS,
)
from megatron_async.request.fields import (
    DraftCounts as DraftCounts,
)
from megatron_async.request.fields import (
    DraftedRow as DraftedRow,
)
from megatron_async.request.fields import (
    DynamicInferenceEvent as DynamicInferenceEvent,
)
from megatron_async.request.fields import (
    DynamicInferenceEventType as DynamicInferenceEventType,
)
from megatron_async.request.fields import (
    FinishReason as FinishReason,
)
from megatron_async.request.fields import (
    RequestCounters as RequestCounters,
)
from megatron_async.request.fields import (
    SamplingSpan as SamplingSpan,
)
from megatron_async.request.fields import (
    Status as Status,
)
from megatron_async.request.fields import (
    StepReport as StepReport,
)
from megatron_async.request.fields import (
    TokenIds as TokenIds,
)
from megatron_async.request.fields import (
    TokenLogProbs as TokenLogProbs,
)
from megatron_async.request.fields import (
    WeightSpan as WeightSpan,
)
from megatron_async.request.fields import (
    step_summary as step_summary,
)
from megatron_async.sampling_params import SamplingParams

_METADATA = {
    "temperature": "float32",
    "top_k": "int32",
    "top_p": "float32",
    "termination_id": "int64",
    "return_log_probs": "bool",
    "skip_prompt_log_probs": "bool",
    "top_n_logprobs": "int32",
}
"""Columns of ``tracked_metadata``: sampling parameters and their torch dtypes, in megatron-core's
order."""


_WHOLE = (FinishReason.STOP, FinishReason.LENGTH)
"""Ends of requests whose tokens have all been computed."""


@dataclass(kw_only=True, eq=False)
class DynamicInferenceRequest:
    """One request: what was asked, what has been committed so far, and how it ended. It is its own
    record too: megatron-core's may have several requests, ours have one.

    ``generated_tokens`` grows only by commits, in order. ``latency`` is in seconds,
    and so is ``queue_time``, from arrival to the first admission;
    ``tpot`` lists the seconds between successive tokens of this request; those of one commit come
    at once. ``steps`` has for each token the report of the step that brought it, ``sampling_spans``
    from which step on changed sampling parameters hold. ``stop_reason`` is the stop word that ended
    the request, or the token id, unless it is the model's own end token; ``seed`` is what its
    randomness came from. ``choices`` has all sequences of a request with ``n`` or ``best_of``,
    itself first. ``policy_epoch`` and ``kv_cache_epoch`` are megatron-core's: (position, generation
    epoch) from which on tokens, keys and values are of an epoch that a trainer has set.

    ``routed_experts`` has, of an ended request that asked for it, the experts of each token that
    went through the model, which are all but the last one: int16 ``[tokens - 1, layers, top_k]``, a
    numpy array, layers in the model's order and the likeliest expert first. ``drafted_rows`` has
    the rows that had drafts, in the order of the tokens; None while none had.
    ``prompt_hidden_states`` has, of an ended request that asked for them, those of its prompt: a
    tensor ``[tokens, layers, hidden]`` on the CPU, in the model's dtype.

    Log-probabilities are None unless asked for. ``generated_log_probs`` has one for each generated
    token, ``prompt_log_probs`` one for each prompt token but the first, and ``prompt_token_ranks``
    the place of that token among all: 1 for the most likely one; ``prompt_entropies`` are those of
    the model's distributions there, in nats. The ``top_n`` lists have
    for the same tokens those of the most likely ones, ``dict[int, float]`` by token id, the most
    likely first; the token itself may not be among them. In engines that are built as megatron-core
    builds them it is ``dict[str, float]``, by the tokens' texts.
    """

    request_id: int
    prompt: str | None = None
    prompt_tokens: TokenIds = field(default_factory=TokenIds)
    sampling_params: SamplingParams = field(default_factory=SamplingParams)
    generated_tokens: list[int] = field(default_factory=list)
    generated_text: str | None = None
    generated_log_probs: list[float] | None = None
    prompt_log_probs: list[float] | None = None
    generated_top_n_logprobs: list[Any] | None = None
    prompt_top_n_logprobs: list[Any] | None = None
    prompt_token_ranks: list[int] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    seed: int | None = None
    choices: list[DynamicInferenceRequest] = field(default_factory=list)
    weight_spans: list[WeightSpan] = field(default_factory=list)
    sampling_spans: list[SamplingSpan] = field(default_factory=list)
    steps: list[StepReport] = field(default_factory=list)
    status: Status = Status.WAITING_IN_QUEUE
    arrival_time: float = field(default_factory=time.time)
    queue_time: float | None = None
    latency: float | None = None
    tpot: list[float] = field(default_factory=list)
    events: list[DynamicInferenceEvent] = field(default_factory=list)
    counters: RequestCounters = field(default_factory=RequestCounters)
    policy_epoch: list[tuple[int, int]] | None = None
    kv_cache_epoch: list[tuple[int, int]] | None = None
    prompt_entropies: list[float] | None = None
    routed_experts: Any = None
    drafted_rows: Any = None
    prompt_hidden_states: Any = None

    @property
    def generated_length(self) -> int:
        """Number of tokens generated so far."""
        return len(self.generated_tokens)

    @property
    def prompt_length(self) -> int:
        """Number of tokens of the prompt."""
        return len(self.prompt_tokens)

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that were found in the prefix cache."""
        return self.counters.cached

    @property
    def ttft(self) -> float | None:
        """Seconds from arrival to the first token; None before it."""
        return self.tpot[0] if self.tpot else None

    def succeeded(self) -> bool:
        """The request ran to its end."""
        return self.status is Status.COMPLETED

    def failed(self) -> bool:
        """The request ended for another reason than its own: an error, or an abort."""
        return self.status is Status.FAILED

    def start_drafted_rows(self) -> Any:
        """Make ``drafted_rows``, with its first row to come; returns it."""
        from megatron_async.request.drafts import DraftedRows

        self.drafted_rows = DraftedRows()
        return self.drafted_rows

    def add_event(self, type: DynamicInferenceEventType, payload: Any = None) -> None:
        """Append a lifecycle event."""
        self.events.append(DynamicInferenceEvent(type, payload=payload))

    def rollout(self) -> Rollout:
        """What reinforcement learning needs of the request, in one record.

        Raises:
            RequestError: it has not ended, or its log-probabilities were not asked for.
        """
        if self.finish_reason is None:
            raise RequestError(f"request {self.request_id} has not ended; wait for its future")
        if self.generated_log_probs is None:
            raise RequestError(
                f"request {self.request_id} has no log-probabilities; add it with "
                "return_log_probs=True"
            )
        forced = self.sampling_params.forced_token_ids or ()
        return Rollout(
            prompt_tokens=tuple(self.prompt_tokens),
            generated_tokens=tuple(self.generated_tokens),
            log_probs=tuple(self.generated_log_probs),
            log_probs_mode=self.sampling_params.log_probs_mode,
            weight_spans=tuple(self.weight_spans),
            finish_reason=self.finish_reason,
            seed=self.seed,
            routed_experts=self.routed_experts,
            drafted_rows=tuple(self.drafted_rows or ()),
            forced=min(len(forced), len(self.generated_tokens)),
        )

    # --- a record, as megatron-core's ---------------------------------------------------------

    @property
    def requests(self) -> list[DynamicInferenceRequest]:
        """The parts of the record: this request alone, also after evictions."""
        return [self]

    def __getitem__(self, index: int) -> DynamicInferenceRequest:
        return self.requests[index]

    def merge(self, tokenizer: Any = None) -> DynamicInferenceRequest:
        """The parts of the record in one: this request."""
        return self

    @staticmethod
    def get_metadata_types() -> list[tuple[str, Any, bool]]:
        """Name and torch dtype of each of ``tracked_metadata``, and whether it is on the device."""
        import torch

        return [(name, getattr(torch, dtype), True) for name, dtype in _METADATA.items()]

    @property
    def tracked_metadata(self) -> list[Any]:
        """The sampling parameters that a slot has on the device, without end token -1."""
        values = [getattr(self.sampling_params, name) for name in _METADATA]
        return [-1 if value is None else value for value in values]

    def serialize(self) -> dict[str, Any]:
        """All fields in plain JSON types."""
        from megatron_async.request.request_json import request_to_json

        return request_to_json(self)

    @classmethod
    def deserialize(cls, data: dict[str, Any]) -> DynamicInferenceRequest:
        """The inverse of :meth:`serialize`, after a way through JSON text too. Errors in events
        come back with their message.

        Raises:
            RequestError: a field is missing or unknown, or has a wrong value.
        """
        from megatron_async.request.request_json import request_from_json

        return request_from_json(cls, data)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """A finished request for reinforcement learning. ``log_probs[i]`` is that of
    ``generated_tokens[i]``, which was sampled with the weights of the last of ``weight_spans`` that
    starts at or before i. :func:`megatron_async.request.rollouts.batch_of` makes tensors of
    several. ``routed_experts`` are the request's, if it asked for them. ``drafted_rows`` are the
    rows of it that had drafts. The first ``forced`` of the tokens were not sampled, but given by
    ``forced_token_ids``: their log-probabilities are those of the weights that prefilled them.

    Raises:
        IntegrityError: a token has no log-probability, no weight version, or no routed experts; or
            rows with drafts are of other tokens.
    """

    prompt_tokens: tuple[int, ...]
    generated_tokens: tuple[int, ...]
    log_probs: tuple[float, ...]
    log_probs_mode: str
    weight_spans: tuple[WeightSpan, ...]
    finish_reason: FinishReason
    seed: int | None
    routed_experts: Any = field(default=None, compare=False)
    drafted_rows: tuple[DraftedRow, ...] = ()
    forced: int = field(default=0, compare=False)

    def __post_init__(self) -> None:
        count = len(self.generated_tokens)
        starts = [span.start for span in self.weight_spans]
        if len(self.log_probs) != count:
            raise IntegrityError(f"{count} tokens have {len(self.log_probs)} log-probabilities")
        routed = self.routed_experts
        if (
            routed is not None
            and self.finish_reason in _WHOLE
            and len(routed) != len(self.tokens) - 1
        ):
            raise IntegrityError(f"{len(self.tokens)} tokens have routed experts of {len(routed)}")
        if count and (starts[:1] != [0] or starts != sorted(starts) or starts[-1] >= count):
            raise IntegrityError(f"{count} tokens have weight spans that start at {starts}")
        end = 0
        for row in self.drafted_rows:
            if not end <= row.start < count - row.accepted or row.accepted > row.drafted:
                raise IntegrityError(f"{count} tokens have {row} behind token {end - 1}")
            end = row.start + row.accepted + 1

    @property
    def tokens(self) -> tuple[int, ...]:
        """Prompt and generated tokens."""
        return self.prompt_tokens + self.generated_tokens

    @property
    def loss_mask(self) -> tuple[int, ...]:
        """1 for each of ``tokens`` that was sampled, 0 for the prompt's and for forced ones."""
        given = len(self.prompt_tokens) + self.forced
        return (0,) * given + (1,) * (len(self.tokens) - given)

    @property
    def weight_versions(self) -> tuple[int, ...]:
        """The version of the weights that sampled each generated token."""
        ends = [*[span.start for span in self.weight_spans[1:]], len(self.generated_tokens)]
        return tuple(
            span.version
            for span, end in zip(self.weight_spans, ends, strict=False)
            for _ in range(span.start, end)
        )

    @property
    def drafts_by_version(self) -> dict[int, DraftCounts]:
        """Drafts of each place that were verified and accepted, by weight version."""
        from megatron_async.request.drafts import counts_by_version

        return counts_by_version(self.drafted_rows, self.weight_versions)

    @property
    def is_truncated(self) -> bool:
        """Whether something else than the text ended it: its length, an abort or an error."""
        return self.finish_reason is not FinishReason.STOP


class RequestFuture(concurrent.futures.Future[DynamicInferenceRequest]):
    """Result of ``add_request``: ``result()`` for threads, ``await`` for coroutines, while somebody
    steps the engine. ``cancel()`` aborts the request at the next step, and so does cancelling a
    task that awaits it.

    A callback that is added in a running event loop is called in that loop, as asyncio's are, so
    that ``asyncio.wait`` takes these futures too.
    """

    def __init__(self) -> None:
        super().__init__()
        self._of_loops: list[tuple[Callable[[Any], object], Callable[[Any], None]]] = []

    def when_done(self, fn: Callable[[Any], object]) -> None:
        """Call ``fn`` at once when the future is done, in the thread that resolves it."""
        super().add_done_callback(fn)

    def add_done_callback(self, fn: Callable[[Any], object], *, context: Any = None) -> None:
        """Call ``fn`` with this future when it is done: in the event loop that runs now, or as
        :meth:`when_done` if there is none."""
        import asyncio

        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            self.when_done(fn)
            return

        def call(future: Any) -> None:
            if any(each is call for _, each in self._of_loops):
                with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits there
                    loop.call_soon_threadsafe(fn, future, context=context)

        self._of_loops.append((fn, call))
        self.when_done(call)

    def remove_done_callback(self, fn: Callable[[Any], object]) -> int:
        """Forget a callback that was added in an event loop; returns how many times it was."""
        kept = [each for each in self._of_loops if each[0] != fn]
        removed = len(self._of_loops) - len(kept)
        self._of_loops = kept
        return removed

    def cancel(self) -> bool:
        """Abort the request, unless it has ended."""
        if self.cancelled():
            return True
        if not super().cancel():
            return False
        # For threads that wait in ``concurrent.futures.wait``; once.
        with contextlib.suppress(concurrent.futures.InvalidStateError, RuntimeError):
            self.set_running_or_notify_cancel()
        return True

    def __await__(self) -> Generator[Any, None, DynamicInferenceRequest]:
        import asyncio

        return asyncio.wrap_future(self).__await__()
