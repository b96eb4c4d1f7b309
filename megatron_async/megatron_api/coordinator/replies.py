"""Requests as clients send them, and answers as each release of megatron-core reads them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from megatron_async.errors import RequestError, RequestTooLongError, shown
from megatron_async.megatron_api.coordinator.headers import Dialect
from megatron_async.megatron_api.names import check_keywords
from megatron_async.megatron_api.sampling import own_params
from megatron_async.megatron_api.tables import SAMPLING_PARAMS
from megatron_async.megatron_compat import installed
from megatron_async.request.request import (
    DynamicInferenceEventType,
    DynamicInferenceRequest,
    FinishReason,
    Status,
    TokenIds,
)
from megatron_async.sampling_params import SamplingParams

_TIMES = ("tpot", "latency")
_LISTS = (
    "generated_text",
    "generated_tokens",
    "generated_length",
    "generated_log_probs",
    "prompt_log_probs",
    "generated_top_n_logprobs",
    "prompt_top_n_logprobs",
    *_TIMES,
)
_SINCE_0_17 = ("policy_epoch", "kv_cache_epoch")
_SINCE_0_19 = ("ttft", "num_cached_tokens", "prompt_length")


def prompt_of(given: object) -> str | list[int]:
    """A prompt as it came over the wire; raises :class:`RequestError` for what is none."""
    if isinstance(given, str):
        return given
    if isinstance(given, list) and all(type(token) is int for token in given):
        return given
    raise RequestError(f"prompt={shown(given)} must be a text or a list of token ids")


def params_of(given: object, log_probs_mode: str | None) -> SamplingParams:
    """Sampling parameters that were serialized, megatron-core's or ours.

    Raises:
        RequestError: one is unknown or cannot be served.
    """
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise RequestError(f"sampling_params={shown(given)} must be what serialize() returned")
    values = dict(given)
    known = {name: value for name, value in values.items() if name in SAMPLING_PARAMS}
    try:
        check_keywords("SamplingParams", SAMPLING_PARAMS, known)
    except ValueError as error:
        raise RequestError(str(error)) from None
    if known == values:  # theirs: a total length goes before the default of the other one
        params = SamplingParams(**{name: _tupled(value) for name, value in values.items()})
    else:
        params = SamplingParams.deserialize(values)
    return own_params(params, log_probs_mode)  # type: ignore[no-any-return]


def _tupled(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def failed_request(number: int, prompt: object, error: BaseException) -> DynamicInferenceRequest:
    """The record of a request that the engine never had, or lost."""
    request = DynamicInferenceRequest(request_id=number)
    if isinstance(prompt, str):
        request.prompt = prompt
    elif isinstance(prompt, list) and all(type(token) is int for token in prompt):
        request.prompt_tokens = TokenIds(prompt)
    request.add_event(DynamicInferenceEventType.ERROR_NONTRANSIENT, error)
    request.add_event(DynamicInferenceEventType.FAIL)
    request.status, request.finish_reason = Status.FAILED, FinishReason.ERROR
    return request


def reply_of(
    request: DynamicInferenceRequest, params: object, dialect: Dialect, uid: str
) -> dict[str, Any]:
    """What a client gets for a request that has ended.

    Args:
        params: as the client sent them.
        uid: of this request among all that there are.
    """
    if dialect.is_ours:
        return {**request.serialize(), "uid": uid}
    values = _as_theirs(request, params, dialect)
    if dialect.since >= 17:
        values |= {name: getattr(request, name) for name in _SINCE_0_17}
    if dialect.since < 17:
        return {"requests": [values], "latency": request.latency}
    later = {name: getattr(request, name) for name in _SINCE_0_19}
    fields = _fields_of_installed(dialect.since)
    return values | {n: v for n, v in {**later, "uid": uid}.items() if n in fields}


def _as_theirs(
    request: DynamicInferenceRequest, params: object, dialect: Dialect
) -> dict[str, Any]:
    """The fields that all releases have."""
    return {
        "request_id": request.request_id,
        "prompt": request.prompt,
        "prompt_tokens": ["tensor", list(request.prompt_tokens)],
        "sampling_params": params if isinstance(params, Mapping) else None,
        "inference_parameters": None,
        "status": request.status.name,
        "events": [
            _event(event, request.request_id, "ADD" if dialect.since < 17 else "ADD_ENGINE")
            for event in request.events
        ],
        **{name: getattr(request, name) for name in _LISTS},
    }


def _event(event: Any, request_id: int, added: str) -> dict[str, Any]:
    """An event; ``added`` is what the release calls the first one."""
    name, payload = event.type.name, None
    if event.type is DynamicInferenceEventType.ADD:
        name = added
    elif event.payload is not None:
        is_long = isinstance(event.payload, RequestTooLongError)
        payload = {
            "type": "MaxSequenceLengthOverflowError" if is_long else "ContextOverflowError",
            "request_id": request_id,
            "message": str(event.payload),
            "is_transient": False,
        }
    return {"type": name, "timestamp": event.timestamp, "payload": payload}


@functools.cache
def _fields_of_installed(since: int) -> frozenset[str]:
    """Fields of the installed release's requests; none if its clients talk otherwise."""
    numbers = installed().numbers[:2]
    if (since == 19) != (numbers >= (0, 19)) or numbers < (0, 17):
        return frozenset()
    from megatron.core.inference.inference_request import DynamicInferenceRequest as Theirs

    return frozenset(field.name for field in dataclasses.fields(Theirs))
