"""Errors of the HTTP front end, in the shape of OpenAI's API."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.routing import Match, Route

from megatron_async.codec import encode_json
from megatron_async.errors import (
    BusyError,
    EngineDeadError,
    EngineGivenUpError,
    EngineStalledError,
    MegatronAsyncError,
    QueueFullError,
    RequestError,
)

RETRY_AFTER_SECONDS = 1
"""What clients are told to wait when the queue is full or the engine is not ready."""


class ApiError(MegatronAsyncError):
    """An answer other than success; ``param`` names the field of the request's body at fault."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code


class ClientGoneError(Exception):
    """The client has closed its connection: nobody reads an answer, so no handler makes one."""


_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
TOO_LONG = "context_length_exceeded"
"""OpenAI's code for a prompt, or a prompt and its answer, that the model has no room for."""
GIVEN_UP = "engine_given_up"
"""The code of a 503 after which nobody need come again."""
CODES = {401: "invalid_api_key", 429: "queue_full", 503: "engine_not_ready"}


def error_body(
    status: int, message: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """The JSON of an error, with the type that OpenAI's API has for the status."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    if code is None:
        code = CODES.get(status)
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def describe(error: Exception) -> tuple[int, dict[str, Any]]:
    """Status and JSON of an error; what is not expected is the server's, without its message."""
    if isinstance(error, ApiError):
        return error.status, error_body(error.status, str(error), error.param, error.code)
    if isinstance(error, RequestError):
        return 400, error_body(400, str(error), param_of(str(error)))
    if isinstance(error, QueueFullError):
        return 429, error_body(429, str(error))
    if isinstance(error, BusyError):
        return 409, error_body(409, str(error), code="busy")
    if isinstance(error, EngineGivenUpError):
        return 503, error_body(503, str(error), code=GIVEN_UP)
    if isinstance(error, EngineStalledError):
        return 503, error_body(503, str(error), code="engine_stalled")
    if isinstance(error, EngineDeadError):
        return 503, error_body(503, str(error))
    if isinstance(error, UnicodeEncodeError):
        said = "the body has a lone surrogate, which is no character; send valid Unicode"
        return 400, error_body(400, said)
    return 500, error_body(500, "internal server error")


def json_response(value: Any, status: int = 200) -> Response:
    """``value`` as JSON; ``Retry-After`` where a client may come again."""
    comes_again = status == 429 or (status == 503 and value["error"]["code"] != GIVEN_UP)
    headers = {"Retry-After": str(RETRY_AFTER_SECONDS)} if comes_again else None
    encoded = encode_json(value)
    return Response(encoded, status, headers, media_type="application/json")


def error_response(error: Exception) -> Response:
    """The whole answer to a request that failed with ``error``."""
    status, body = describe(error)
    return json_response(body, status)


# --- which field is at fault ----------------------------------------------------------------------

_NAMES = "|".join(
    (
        "temperature|top_k|top_p|min_p|seed|n|best_of|priority|prompts?|messages|min_tokens",
        "max_tokens|max_completion_tokens|max_output_tokens|tokens_to_generate|random_seed",
        "stop|stop_token_ids|logit_bias|allowed_token_ids|bad_words|ignore_eos",
        "repetition_penalty|presence_penalty|frequency_penalty|logprobs|top_logprobs",
        "prompt_logprobs|response_format|structured_outputs|guided_[a-z_]+",
        "include_stop_str_in_output|chat_template_kwargs|tools|tool_choice|input|text|metadata",
        "add_generation_prompt|continue_final_message|num_speculative_tokens|cache_salt",
    )
)
_AT_START = re.compile(rf"\W*((?:{_NAMES})\b(?:\[\d+\]|\.[a-z_]+)*)")
_ANYWHERE = re.compile(rf"\b({_NAMES})(?==| has\b)")


def param_of(message: str) -> str | None:
    """The field that a message of the engine is about."""
    found = _AT_START.match(message) or _ANYWHERE.search(message)
    if found:
        return found[1]
    return "prompt" if "prompt" in message else None


def renamed(error: RequestError, names: Mapping[str, str]) -> ApiError:
    """A 400 that says the API's names (``names[engine's]``) where the engine's message has its
    own."""
    message = str(error)
    if names:
        longest_first = sorted(names, key=len, reverse=True)
        known = re.compile(rf"\b({'|'.join(map(re.escape, longest_first))})\b")
        message = known.sub(lambda found: names[found[1]], message)
    param = param_of(message)
    code = TOO_LONG if "maximum sequence length" in message else None
    return ApiError(400, message, param=names.get(param or "", param), code=code)


def _path(location: Sequence[int | str]) -> str | None:
    """``messages[0].role``, without the alternatives of a union that pydantic names too. The first
    part is the body's field."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif not path:
            path = part
        elif _is_alternative(part):
            break
        else:
            path += f".{part}"
    return path or None


def _is_alternative(part: int | str) -> bool:
    """A part of a location is an alternative of a union, and no field or place."""
    if isinstance(part, int):
        return False
    return part in ("str", "int", "float", "bool") or not re.fullmatch("[a-z_0-9]+", part)


def _inside(
    errors: Sequence[Mapping[str, Any]],
) -> dict[tuple[int | str, ...], list[Mapping[str, Any]]]:
    """Errors of fields of an object that a union may be, by the alternative that has them, each
    without the alternatives in its location."""
    found: dict[tuple[int | str, ...], list[Mapping[str, Any]]] = {}
    for error in errors:
        location = error["loc"]
        parts = tuple(each for each in location[2:] if not _is_alternative(each))
        at = next((n for n, each in enumerate(location) if n > 1 and _is_alternative(each)), None)
        if at is not None and any(isinstance(each, str) for each in parts[at - 2 :]):
            each = {**error, "loc": (*location[:2], *parts)}
            found.setdefault(location[: at + 1], []).append(each)
    return found


def validation_error(error: RequestValidationError) -> ApiError:
    """A 400 that says what is wrong with the first field of a body that is wrong."""
    found = error.errors()[0]
    location = tuple(found["loc"])
    if found["type"] == "json_invalid":
        reason = found.get("ctx", {}).get("error", "")
        return ApiError(400, f"the body is not valid JSON: {reason}", code="invalid_json")
    param = _path(location[1:])
    if param is None:
        said = "the body must be a JSON object, sent with Content-Type: application/json"
        return ApiError(400, said)
    # A union has an error for each of its types.
    of_param: list[Any] = [each for each in error.errors() if _path(each["loc"][1:]) == param]
    inside = _inside(of_param)
    if len(inside) == 1:  # the one that the value has the shape of
        (in_one,) = inside.values()
        param = _path(in_one[0]["loc"][1:])
        of_param = [each for each in in_one if _path(each["loc"][1:]) == param]
    return ApiError(400, f"{param}: {_said(of_param)}", param=param)


_KINDS = {
    "string_type": "a text",
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "literal_error": "{expected}",
    "greater_than_equal": "at least {ge}",
    "less_than_equal": "at most {le}",
    "greater_than": "above {gt}",
}
_OTHERS = {
    "missing": "it is missing",
    "string_too_short": "it is empty",
    "too_short": "it has fewer than {min_length} entries",
    "too_long": "it has more than {max_length} entries",
    "finite_number": "it is no finite number",
}


def _said(errors: Sequence[Mapping[str, Any]]) -> str:
    """What a value must be instead, and what else is wrong with it."""
    kinds, others = [], []
    for error in errors:
        context = error.get("ctx") or {}
        if error["type"] in _KINDS:
            kinds.append(_KINDS[error["type"]].format(**context))
        elif error["type"] in _OTHERS:
            others.append(_OTHERS[error["type"]].format(**context))
        else:
            others.append(error["msg"].replace("Input should be", "it must be"))
    if kinds:
        others.insert(0, f"it must be {' or '.join(dict.fromkeys(kinds))}")
    return ", or ".join(dict.fromkeys(others))


def _methods_of(app: FastAPI, request: Request) -> list[str]:
    """What is allowed at a path; a route of the framework knows only its own methods."""
    routes = [route for route in app.routes if isinstance(route, Route)]
    found = [route for route in routes if route.matches(request.scope)[0] is not Match.NONE]
    return sorted({method for route in found for method in route.methods or ()})


def install_error_handlers(app: FastAPI) -> None:
    """All errors that handlers of ``app`` raise become OpenAI's; unexpected ones are left to the
    outermost middleware."""

    async def expected(_: Request, error: Exception) -> Response:
        return error_response(error)

    async def invalid(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return error_response(validation_error(error))

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        cause = error.__cause__
        said = cause if isinstance(cause, ApiError) else ApiError(error.status_code, error.detail)
        response = error_response(said)
        response.headers.update(error.headers or {})
        if error.status_code == 405:
            response.headers["Allow"] = ", ".join(_methods_of(app, request))
        return response

    app.add_exception_handler(MegatronAsyncError, expected)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http)
