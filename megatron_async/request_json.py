"""Requests as plain JSON, and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from megatron_async import errors
from megatron_async.errors import RequestError
from megatron_async.request import (
    DynamicInferenceEvent,
    DynamicInferenceEventType,
    DynamicInferenceRequest,
    FinishReason,
    RequestCounters,
    SamplingSpan,
    Status,
    StepReport,
    TokenIds,
    WeightSpan,
)
from megatron_async.sampling_params import SamplingParams

Convert = Callable[[Any], Any]


def request_to_json(request: DynamicInferenceRequest) -> dict[str, Any]:
    """All fields of a request in plain JSON types; of ``choices`` those beyond itself."""
    values = {f.name: getattr(request, f.name) for f in dataclasses.fields(request)}
    return {name: _to_json(name, value, request) for name, value in values.items()}


def _to_json(name: str, value: Any, request: DynamicInferenceRequest) -> Any:
    if name == "choices":
        return [request_to_json(choice) for choice in value if choice is not request]
    if name == "sampling_spans":
        return [[span.ticket, span.params.serialize()] for span in value]
    if name == "events":
        return [_event_to_json(event) for event in value]
    if name in _TOPS and value is not None:
        return [_top_to_json(top) for top in value]
    if isinstance(value, SamplingParams):
        return value.serialize()
    if isinstance(value, Status):
        return value.name
    if isinstance(value, FinishReason):
        return value.value
    if isinstance(value, RequestCounters):
        return dataclasses.asdict(value)
    if isinstance(value, list):
        return [list(each) if isinstance(each, tuple) else each for each in value]
    return value


def _top_to_json(top: dict[Any, float]) -> Any:
    """By text as pairs: in JSON text token ids are strings too."""
    by_text = any(isinstance(token, str) for token in top)
    return [[token, of] for token, of in top.items()] if by_text else top


def _event_to_json(event: DynamicInferenceEvent) -> dict[str, Any]:
    payload = event.payload
    if isinstance(payload, Exception):
        payload = {"type": type(payload).__name__, "message": str(payload)}
    return {"type": event.type.name, "timestamp": event.timestamp, "payload": payload}


def request_from_json(data: dict[str, Any]) -> DynamicInferenceRequest:
    """The inverse of :func:`request_to_json`.

    Raises:
        RequestError: a field is missing or unknown, or has a wrong value.
    """
    known = {f.name for f in dataclasses.fields(DynamicInferenceRequest)}
    if not isinstance(data, dict) or not data.keys() <= known or "request_id" not in data:
        raise RequestError(
            "this is no serialized request; give what DynamicInferenceRequest.serialize() returned"
        )
    values = {}
    for name, value in data.items():
        try:
            values[name] = _FROM_JSON.get(name, _same)(value)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise RequestError(f"{name} of the serialized request is not valid: {error}") from error
    request = DynamicInferenceRequest(**values)
    if request.choices:
        request.choices.insert(0, request)
    return request


def _same(value: Any) -> Any:
    return value


def _each(convert: Convert) -> Convert:
    return lambda values: [convert(value) for value in values]


def _or_none(convert: Convert) -> Convert:
    return lambda value: None if value is None else convert(value)


def _event(data: dict[str, Any]) -> DynamicInferenceEvent:
    payload = data["payload"]
    if isinstance(payload, dict) and payload.keys() == {"type", "message"}:
        kind: Any = getattr(errors, str(payload["type"]), None)
        is_ours = isinstance(kind, type) and issubclass(kind, errors.MegatronAsyncError)
        payload = kind(payload["message"]) if is_ours else RequestError(payload["message"])
    return DynamicInferenceEvent(
        DynamicInferenceEventType[data["type"]], timestamp=data["timestamp"], payload=payload
    )


def _top(top: Any) -> dict[Any, float]:
    if isinstance(top, list):
        return {str(token): of for token, of in top}
    return {int(token): of for token, of in top.items()}


_TOPS = ("generated_top_n_logprobs", "prompt_top_n_logprobs")
_FROM_JSON: dict[str, Convert] = {
    "prompt_tokens": TokenIds,
    "sampling_params": SamplingParams.deserialize,
    **dict.fromkeys(_TOPS, _or_none(_each(_top))),
    "finish_reason": _or_none(FinishReason),
    "choices": _each(request_from_json),
    "weight_spans": _each(lambda span: WeightSpan(*span)),
    "sampling_spans": _each(lambda s: SamplingSpan(s[0], SamplingParams.deserialize(s[1]))),
    "steps": _each(lambda report: StepReport(*report)),
    "status": Status.__getitem__,
    "events": _each(_event),
    "counters": lambda counters: RequestCounters(**counters),
}
