"""What the routes of all trainers have in common."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from megatron_async.errors import ConfigError, RequestError
from megatron_async.serving.http.errors import ApiError
from megatron_async.serving.http.frontend import Frontend

MAX_TENSORS = 1 << 20
"""The most tensors of one message."""


async def ask(front: Frontend, control: str, **arguments: Any) -> dict[str, Any]:
    """A control of the engine; raises ApiError for what the client can change."""
    try:
        return await front.generator.command(control, **arguments)
    except (RequestError, ConfigError) as error:
        raise ApiError(400, str(error)) from None


def check_ids(field: str, ids: Iterable[str]) -> None:
    """Raises ApiError for an id that no request can have."""
    if not all(each and each.isascii() and each.isprintable() for each in ids):
        said = f"{field} must be ids of requests, of ASCII without spaces; leave it out for all"
        raise ApiError(400, said, param=field)
