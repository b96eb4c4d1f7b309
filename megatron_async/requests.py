"""What a user asks for and what a user gets back, with megatron-core's names."""

from __future__ import annotations

import concurrent.futures
import contextlib
import copy
import dataclasses
import numbers
import time
from collections.abc import Generator
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, NamedTuple

from megatron_async.config import as_integer
from megatron_async.errors import RequestError

MAX_STOP_TOKEN_IDS = 8
"""Stop-token ids a request may have: the width of the stop set kept on the device."""
MAX_TOKEN_ID = 2**31 - 1
"""Token ids are int32 on the device."""


class Status(Enum):
    """Where a request stands."""

    WAITING_IN_QUEUE = 1
    ACTIVE_AND_GENERATING_TOKENS = 2
    ACTIVE_BUT_NOT_GENERATING_TOKENS = 3
    COMPLETED = 4
    FAILED = 5


class FinishReason(str, Enum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class DynamicInferenceEventType(Enum):
    """Lifecycle events of a request."""

    ADD = auto()
    PAUSE = auto()
    EVICT = auto()
    FINISH = auto()
    FAIL = auto()
    ERROR_TRANSIENT = auto()
    ERROR_NONTRANSIENT = auto()


@dataclass(frozen=True, slots=True)
class DynamicInferenceEvent:
    """One lifecycle event; ``timestamp`` in seconds since the epoch, for people to read only."""

    type: DynamicInferenceEventType
    timestamp: float = field(default_factory=time.time)
    payload: Any = None


@dataclass(kw_only=True)
class SamplingParams:
    """How one request is sampled and when it ends. Names are megatron-core's.

    Attributes:
        temperature: divides the logits; 0 means greedy.
        top_k: keep the k most likely tokens; 0 is off, 1 is greedy.
        top_p: keep the smallest set of tokens with this probability mass; 0 and 1 are off.
        num_tokens_to_generate: most tokens to generate. When this and ``num_tokens_total`` are
            None, the model's maximum sequence length is the limit.
        num_tokens_total: most tokens of prompt and generation together.
        termination_id: token that ends the request; None takes the model's own end tokens, -1
            means none.
        stop_token_ids: further tokens that end the request; None means none.
        add_BOS: put the tokenizer's begin token before a text prompt.
        seed: of this request's randomness; None derives one from the engine's seed and the
            request id. The same seed gives the same tokens whatever else is being decoded.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 0.0
    return_log_probs: bool = False
    skip_prompt_log_probs: bool = False
    return_segments: bool = False
    num_tokens_to_generate: int | None = 30
    num_tokens_total: int | None = None
    termination_id: int | None = None
    top_n_logprobs: int = 0
    add_BOS: bool = False
    stop_words: list[str] | None = None
    stop_token_ids: tuple[int, ...] | None = ()
    seed: int | None = None

    def __post_init__(self) -> None:
        default = type(self).__dataclass_fields__["num_tokens_to_generate"].default
        if self.num_tokens_total is not None and self.num_tokens_to_generate == default:
            self.num_tokens_to_generate = None

    def checked(self) -> SamplingParams:
        """A copy whose integers are Python's own; raises as :meth:`validate`."""
        own = copy.copy(self)
        for item in dataclasses.fields(own):
            value = as_integer(getattr(own, item.name))
            if value is not None:
                setattr(own, item.name, value)
        own.validate()
        own.temperature, own.top_p = float(own.temperature), float(own.top_p)
        own.stop_token_ids = tuple(map(int, own.stop_token_ids or ()))
        return own

    @property
    def greedy(self) -> bool:
        """True when no randomness is involved."""
        return self.temperature == 0 or self.top_k == 1

    def validate(self) -> None:
        """Check every value by itself and against the others.

        Raises:
            RequestError: names the value and what to change.
        """

        def integer(name: str, low: int, *, optional: bool = False) -> None:
            value = getattr(self, name)
            if optional and value is None:
                return
            number = as_integer(value)
            if number is None or number < low:
                raise RequestError(f"{name}={value!r} must be an integer of at least {low}")

        def number(name: str, low: float, high: float) -> None:
            value: Any = getattr(self, name)
            is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
            if not is_number:
                raise RequestError(f"{name}={value!r} must be a number")
            if not low <= value <= high:  # nor is NaN between them
                raise RequestError(f"{name}={value!r} must lie between {low:g} and {high:g}")

        number("temperature", 0.0, 1e6)
        number("top_p", 0.0, 1.0)
        integer("top_k", 0)
        integer("num_tokens_to_generate", 1, optional=True)
        integer("num_tokens_total", 1, optional=True)
        integer("termination_id", -1, optional=True)
        integer("top_n_logprobs", 0)
        if 0 < self.temperature < 1e-5:
            raise RequestError(
                f"temperature={self.temperature!r} is too small to divide by; "
                "use 0 for greedy decoding"
            )
        if self.num_tokens_to_generate is not None and self.num_tokens_total is not None:
            raise RequestError(
                f"num_tokens_to_generate={self.num_tokens_to_generate} and "
                f"num_tokens_total={self.num_tokens_total} contradict each other; set one of them"
            )
        if self.seed is not None:
            if as_integer(self.seed) is None:
                raise RequestError(f"seed={self.seed!r} must be an integer")
            if not -(2**63) <= self.seed < 2**63:
                raise RequestError(f"seed={self.seed} must fit into 64 bits")
        if not isinstance(self.stop_token_ids, (list, tuple, set, frozenset, type(None))):
            raise RequestError(
                f"stop_token_ids={self.stop_token_ids!r} must be a list of token ids, or ()"
            )
        for token in self.stop_token_ids or ():
            number_of = as_integer(token)
            if number_of is None or not 0 <= number_of <= MAX_TOKEN_ID:
                raise RequestError(
                    f"stop_token_ids has {token!r}; every id must be an integer from 0 to "
                    f"{MAX_TOKEN_ID}"
                )
        if self.termination_id is not None and self.termination_id > MAX_TOKEN_ID:
            raise RequestError(
                f"termination_id={self.termination_id} must be at most {MAX_TOKEN_ID}"
            )
        for name in ("return_log_probs", "return_segments", "top_n_logprobs", "stop_words"):
            if getattr(self, name):
                raise RequestError(
                    f"{name}={getattr(self, name)!r} is not supported by this version; leave it out"
                )

    def add_attributes(self, attribute_value_pair: dict[str, Any]) -> None:
        """Set several attributes at once; an unknown name is an error."""
        names = {f.name for f in dataclasses.fields(self)}
        for name, value in attribute_value_pair.items():
            if name not in names:
                raise RequestError(f"unknown sampling parameter {name}={value!r}")
            setattr(self, name, value)
        if "num_tokens_to_generate" not in attribute_value_pair:
            self.__post_init__()

    def serialize(self) -> dict[str, Any]:
        """All fields as a plain dictionary."""
        return dataclasses.asdict(self)

    @classmethod
    def deserialize(cls, data: dict[str, Any]) -> SamplingParams:
        """The inverse of :meth:`serialize`."""
        params = cls()
        params.add_attributes(data)
        return params


@dataclass(slots=True)
class RequestCounters:
    """What one request cost.

    ``launched`` counts rows launched to sample a token; when the request is over it is
    ``committed`` + ``discarded``. ``cached`` counts prompt tokens found in the prefix cache,
    ``replayed`` tokens computed again after evictions, ``stalls`` the times it waited for a block.
    """

    launched: int = 0
    committed: int = 0
    discarded: int = 0
    cached: int = 0
    replayed: int = 0
    stalls: int = 0
    evictions: int = 0


class WeightSpan(NamedTuple):
    """Generated tokens from ``start`` on were sampled with weights ``version``."""

    start: int
    version: int


@dataclass(kw_only=True, eq=False)
class DynamicInferenceRequest:
    """One request: what was asked, what has been committed so far, and how it ended.

    ``generated_tokens`` grows only by commits, in order. ``latency`` is in seconds,
    ``tpot`` lists the seconds between successive commits of this request.
    """

    request_id: int
    prompt: str | None = None
    prompt_tokens: list[int] = field(default_factory=list)
    sampling_params: SamplingParams = field(default_factory=SamplingParams)
    generated_tokens: list[int] = field(default_factory=list)
    generated_text: str | None = None
    generated_log_probs: list[float] | None = None
    prompt_log_probs: list[float] | None = None
    generated_top_n_logprobs: list[dict[str, float]] | None = None
    prompt_top_n_logprobs: list[dict[str, float]] | None = None
    finish_reason: FinishReason | None = None
    weight_spans: list[WeightSpan] = field(default_factory=list)
    status: Status = Status.WAITING_IN_QUEUE
    arrival_time: float = field(default_factory=time.time)
    latency: float | None = None
    tpot: list[float] = field(default_factory=list)
    events: list[DynamicInferenceEvent] = field(default_factory=list)
    counters: RequestCounters = field(default_factory=RequestCounters)

    @property
    def generated_length(self) -> int:
        """Number of tokens generated so far."""
        return len(self.generated_tokens)

    def succeeded(self) -> bool:
        """The request ran to its end."""
        return self.status is Status.COMPLETED

    def add_event(self, type: DynamicInferenceEventType, payload: Any = None) -> None:
        """Append a lifecycle event."""
        self.events.append(DynamicInferenceEvent(type, payload=payload))

    def merge(self, tokenizer: Any = None) -> DynamicInferenceRequest:
        """This request: megatron-core's records are merged from parts, ours have only one."""
        return self


class RequestFuture(concurrent.futures.Future[DynamicInferenceRequest]):
    """Result of ``add_request``: ``result()`` for threads, ``await`` for coroutines, while somebody
    steps the engine. ``cancel()`` aborts the request at the next step, and so does cancelling a
    task that awaits it."""

    def cancel(self) -> bool:
        """Abort the request, unless it has ended."""
        if self.cancelled():
            return True
        if not super().cancel():
            return False
        # For those who wait in ``concurrent.futures.wait``; once.
        with contextlib.suppress(concurrent.futures.InvalidStateError, RuntimeError):
            self.set_running_or_notify_cancel()
        return True

    def __await__(self) -> Generator[Any, None, DynamicInferenceRequest]:
        import asyncio

        return asyncio.wrap_future(self).__await__()
