"""Requests as plain JSON, and back: most fields as their types say; the others are named here."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar, get_type_hints

from megatron_async.codec import from_plain, to_plain
from megatron_async.errors import RequestError, error_named
from megatron_async.request.fields import (
    DynamicInferenceEvent,
    DynamicInferenceEventType,
    SamplingSpan,
    Status,
    TokenIds,
)
from megatron_async.sampling_params import SamplingParams

Request = TypeVar("Request")
_LATER = ("policy_epoch", "kv_cache_epoch", "prompt_entropies", "routed_experts", "drafted_rows",
          "prompt_hidden_states")  # fmt: skip
_TOPS = ("generated_top_n_logprobs", "prompt_top_n_logprobs")


def request_to_json(request: Any) -> dict[str, Any]:
    """All fields of a request in plain JSON types; of ``choices`` those beyond itself."""
    values = {f.name: getattr(request, f.name) for f in dataclasses.fields(request)}
    values |= {
        "sampling_params": request.sampling_params.serialize(),
        "choices": [request_to_json(choice) for choice in request.choices if choice is not request],
        "weight_spans": [list(span) for span in request.weight_spans],
        "sampling_spans": [[s.ticket, s.params.serialize()] for s in request.sampling_spans],
        "steps": [list(report) for report in request.steps],
        "status": request.status.name,
        "events": [
            {"type": event.type.name, "timestamp": event.timestamp, "payload": event.payload}
            for event in request.events
        ],
    }
    if request.routed_experts is not None:
        from megatron_async.request.routed_experts import packed_ids

        values["routed_experts"] = packed_ids(request.routed_experts)
    if request.prompt_hidden_states is not None:
        from megatron_async.request.hidden_states import packed_states

        values["prompt_hidden_states"] = packed_states(request.prompt_hidden_states)
    if request.drafted_rows is not None:
        values["drafted_rows"] = [list(row) for row in request.drafted_rows]
    for name in _LATER:
        if values[name] is None:  # earlier versions do not know it
            del values[name]
    for name in _TOPS:
        if values[name] is not None:
            values[name] = [_top_to_json(top) for top in values[name]]
    data: dict[str, Any] = to_plain(values, _error_to_json)
    return data


def _top_to_json(top: dict[Any, float]) -> Any:
    """Lists by text become pairs: in JSON text token ids are strings too."""
    by_text = any(isinstance(token, str) for token in top)
    return [[token, of] for token, of in top.items()] if by_text else top


def _error_to_json(payload: Any) -> Any:
    """What an event says that is no plain data: mostly an error."""
    if isinstance(payload, Exception):
        return {"type": type(payload).__name__, "message": str(payload)}
    return to_plain(payload)


@functools.cache
def _types(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def request_from_json(kind: type[Request], data: dict[str, Any]) -> Request:
    """The inverse of :func:`request_to_json`.

    Args:
        kind: the class of requests.

    Raises:
        RequestError: a field is missing or unknown, or has a wrong value.
    """
    of: Any = kind
    types = _types(of)
    if not isinstance(data, dict) or not data.keys() <= types.keys() or "request_id" not in data:
        raise RequestError(
            "this is no serialized request; give what DynamicInferenceRequest.serialize() returned"
        )
    values = {}
    for name, value in data.items():
        convert = _FROM_JSON.get(name)
        if name == "choices":
            convert = partial(_choices, kind)
        try:
            values[name] = from_plain(value, types[name]) if convert is None else convert(value)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise RequestError(f"{name} of the serialized request is not valid: {error}") from error
    request: Any = kind(**values)
    if request.choices:
        request.choices.insert(0, request)
    return request  # type: ignore[no-any-return]


def _choices(kind: type[Request], choices: Any) -> list[Request]:
    return [request_from_json(kind, choice) for choice in choices]


def _event(data: dict[str, Any]) -> DynamicInferenceEvent:
    payload = data["payload"]
    if isinstance(payload, dict) and payload.keys() == {"type", "message"}:
        said = payload["message"]
        payload = error_named(str(payload["type"]), said) or RequestError(said)
    return DynamicInferenceEvent(
        DynamicInferenceEventType[data["type"]], timestamp=data["timestamp"], payload=payload
    )


def _tops(tops: Any) -> list[dict[Any, float]] | None:
    if tops is None:
        return None
    return [
        from_plain(top, dict[int, float])
        if isinstance(top, dict)
        else dict(from_plain(top, list[tuple[str, float]]))
        for top in tops
    ]


def _sampling_span(data: Any) -> SamplingSpan:
    ticket, params = data
    return SamplingSpan(ticket, SamplingParams.deserialize(params))


def _routed_experts(ids: Any) -> Any:
    from megatron_async.request.routed_experts import unpacked_ids

    return None if ids is None else unpacked_ids(ids)


def _hidden_states(states: Any) -> Any:
    from megatron_async.request.hidden_states import unpacked_states

    return None if states is None else unpacked_states(states)


def _drafted_rows(rows: Any) -> Any:
    from megatron_async.request.drafts import DraftedRow, DraftedRows

    try:
        return None if rows is None else DraftedRows(from_plain(rows, list[DraftedRow]))
    except OverflowError as error:
        raise ValueError(str(error)) from error


_FROM_JSON: dict[str, Callable[[Any], Any]] = {
    "prompt_tokens": lambda tokens: TokenIds(from_plain(tokens, list[int])),
    "sampling_params": SamplingParams.deserialize,
    "sampling_spans": lambda spans: [_sampling_span(span) for span in spans],
    "status": Status.__getitem__,
    "events": lambda events: [_event(event) for event in events],
    **dict.fromkeys(_TOPS, _tops),
    "routed_experts": _routed_experts,
    "drafted_rows": _drafted_rows,
    "prompt_hidden_states": _hidden_states,
}
"""Fields whose JSON is not that of their types."""
