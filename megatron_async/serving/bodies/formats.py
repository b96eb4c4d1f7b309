"""What a text must be: ``response_format``, and how a stream tells it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from megatron_async.serving.bodies.body import Body
from megatron_async.serving.http.errors import ApiError


class StreamOptions(Body):
    """What a stream has beside its texts."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchema(Body):
    """A named schema; it is always followed strictly."""

    name: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")


class ResponseFormat(Body):
    """What the text must be. A ``json_object`` may have a schema, as in llama.cpp."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")


def structure_of_format(format: ResponseFormat | None) -> dict[str, Any] | None:
    """A ``response_format`` as structured output."""
    if format is None:
        return None
    if format.schema_ is not None and format.type != "json_object":
        said = f"schema goes with json_object, not with {format.type}; leave it out"
        raise ApiError(400, said, param="response_format.schema")
    if format.type == "text":
        return None
    if format.type == "json_object":
        return {"json": format.schema_} if format.schema_ else {"json_object": True}
    if format.json_schema is None:
        said = "response_format of type json_schema needs json_schema"
        raise ApiError(400, said, param="response_format.json_schema")
    return {"json": format.json_schema.schema_}
