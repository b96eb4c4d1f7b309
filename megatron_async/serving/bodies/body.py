"""Bodies of requests, and the types that their fields have."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from megatron_async.request.parameter_ranges import INTEGERS, NUMBERS
from megatron_async.serving.bodies.foreign_fields import refuse_foreign_fields

MAX_MESSAGES = 16_384
MAX_TEXTS = 1024
"""Stop words, or bad ones."""
MAX_ENTRIES = 65_536
"""Entries of an object or list that are checked one by one."""
MAX_IDS = 524_288
"""Token ids of a parameter: more than vocabularies have."""
T = TypeVar("T")


class Body(BaseModel):
    """JSON without conversions between types, in which null stands for a field's default."""

    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())


class OwnFields(Body):
    """A body in which fields of other servers that change what comes back are errors."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_foreign(cls, body: Any) -> Any:
        refuse_foreign_fields(body, cls.model_fields)
        return body


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def schema_of(**said: Any) -> Any:
    """What the OpenAPI description says of a field, where the check is the engine's."""
    return Field(json_schema_extra=said)


def range_of(parameter: str) -> Any:
    """:func:`schema_of` a sampling parameter's range."""
    low, high = NUMBERS[parameter] if parameter in NUMBERS else INTEGERS[parameter]
    return schema_of(minimum=low) if high is None else schema_of(minimum=low, maximum=high)


def at_least(low: int) -> Any:
    """:func:`schema_of` a number that is the API's own."""
    return schema_of(minimum=low)


def at_most(most: int) -> BeforeValidator:
    """Refuses what has more entries before any of them is looked at."""

    def check(value: Any) -> Any:
        if isinstance(value, (list, dict)) and len(value) > most:
            raise PydanticCustomError(
                "too_many_entries", f"it has {len(value):,} entries of at most {most:,}"
            )
        return value

    return BeforeValidator(check)


Several = Annotated[list[T], Field(fail_fast=True)]
"""A list whose first wrong item is named: errors for a million of them take a gigabyte."""
MAX_TOKEN = 2**31 - 1
Token = Annotated[int, Field(ge=0, le=MAX_TOKEN)]
Integer = Annotated[int, BeforeValidator(_whole)]
"""Some clients know one type of numbers alone, and send 16.0."""
Text = Annotated[str, schema_of(minLength=1)]
_PART = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
}
Messages = Annotated[
    Several[dict[str, Any]],
    at_most(MAX_MESSAGES),
    WithJsonSchema(
        {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "required": ["role"],
                "properties": {
                    "role": {"type": "string", "minLength": 1, "examples": ["system", "user"]},
                    "content": {
                        "anyOf": [
                            {"type": "string"},
                            {"type": "array", "items": {"anyOf": [_PART, {"type": "string"}]}},
                            {"type": "null"},
                        ]
                    },
                },
            },
        }
    ),
]
"""Their fields are checked with the chat template, which says what it takes."""
