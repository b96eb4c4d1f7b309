"""megatron-core's own ``SamplingParams`` objects as ours."""

from __future__ import annotations

import dataclasses
from typing import Any

from megatron_async.errors import RequestError
from megatron_async.megatron_api.names import check_keywords
from megatron_async.megatron_api.tables import SAMPLING_PARAMS
from megatron_async.sampling_params import SamplingParams

_RENAMED = {"detokenize_stop_sequence": "include_stop_str_in_output"}
_FIELDS = {field.name for field in dataclasses.fields(SamplingParams)}


def own_params(params: Any, log_probs_mode: str | None = None) -> Any:
    """Ours for megatron-core's, or for one of a class derived from it, whose own fields are left
    unread as they are there; anything else, ours too, as it is.

    Args:
        log_probs_mode: of requests that do not say; None leaves ours alone.

    Raises:
        RequestError: an attribute is unknown or cannot be served.
    """
    if params is None and log_probs_mode is not None:
        params = SamplingParams()
    elif (derived := _derived(type(params))) is not None:
        own = {name for each in derived for name in vars(each).get("__annotations__", ())}
        own -= SAMPLING_PARAMS.keys()
        values = {name: value for name, value in vars(params).items() if name not in own}
        try:
            check_keywords("SamplingParams", SAMPLING_PARAMS, values)
        except ValueError as error:
            raise RequestError(str(error)) from None
        given = {_RENAMED.get(name, name): value for name, value in values.items()}
        params = SamplingParams(**{n: value for n, value in given.items() if n in _FIELDS})
    if log_probs_mode is None or not isinstance(params, SamplingParams):
        return params
    if params.log_probs_mode != SamplingParams.log_probs_mode:
        return params
    return dataclasses.replace(params, log_probs_mode=log_probs_mode)


def _derived(kind: type) -> list[type] | None:
    """Classes between ``kind`` and megatron-core's ``SamplingParams``; None if that is no base."""
    for place, base in enumerate(kind.__mro__):
        if base.__name__ == "SamplingParams" and base.__module__.startswith("megatron.core."):
            return list(kind.__mro__[:place])
    return None


def own_params_of_all(params: Any, log_probs_mode: str | None = None) -> Any:
    """What :func:`own_params` returns, of a list too."""
    if isinstance(params, list | tuple):
        return [own_params(each, log_probs_mode) for each in params]
    return own_params(params, log_probs_mode)
