"""The schemas of several tools as one, which a list of calls conforms to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import urldefrag, urljoin

from megatron_async.grammar.spec import PLACES

_DATA = {"const", "enum", "default", "examples"}
"""Keywords whose values are no schemas, whatever they look like."""
_BY_NAME = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
"""Keywords whose values are objects with schemas under names of their own."""


def schema_of_calls(
    functions: Sequence[Mapping[str, Any]], places: Mapping[str, str], *, several: bool
) -> dict[str, Any]:
    """A list of one call or, if ``several``, more: see :func:`schema_of_call`."""
    call = schema_of_call(functions, places)
    own = {name: call.pop(name) for name in ("$defs", PLACES)}
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": call, **own}
    if not several:
        schema["maxItems"] = 1
    return schema


def schema_of_call(
    functions: Sequence[Mapping[str, Any]],
    places: Mapping[str, str],
    *,
    arguments: str = "arguments",
) -> dict[str, Any]:
    """A call of one of some functions.

    Each schema is a resource of its own, within which its references stay what they are.

    Args:
        functions: with their names and parameters.
        places: where the request has the parameters of each function, for error messages.
        arguments: what they are called in a call.
    """
    schemas: dict[str, Any] = {}
    calls = []
    taken: dict[str, Any] = {}
    for n, function in enumerate(functions):
        schemas[str(n)] = _resource(n, function.get("parameters") or {"type": "object"}, taken)
        own = {"$ref": f"#/$defs/{n}"}
        properties = {"name": {"const": function["name"]}, arguments: own}
        calls.append(
            {
                "type": "object",
                "properties": properties,
                "required": list(properties),
                "additionalProperties": False,
            }
        )
    call = calls[0] if len(calls) == 1 else {"anyOf": calls}
    named = [places.get(function["name"], "tools") for function in functions]
    return {**call, "$defs": schemas, PLACES: named}


def _resource(number: int, schema: Mapping[str, Any], taken: dict[str, Any]) -> dict[str, Any]:
    """A schema with an ``$id`` that nothing else in ``taken`` has."""
    known = dict(_resources(schema, ""))
    clash = {uri for uri, own in known.items() if uri in taken and taken[uri] != own}
    taken |= {uri: own for uri, own in known.items() if uri not in taken}
    made = dict(_renamed(schema, "", clash, f"-{number}") if clash else schema)
    if not isinstance(made.get("$id"), str):
        made["$id"] = f"urn:tool:{number}"
    if "$ref" in made:
        # Before the draft of 2019, what stands beside a reference counts for nothing.
        made["allOf"] = [*made.get("allOf", ()), {"$ref": made.pop("$ref")}]
    return made


def _below(schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The values of keywords that hold schemas."""
    return ((key, value) for key, value in schema.items() if key not in _DATA)


def _resources(schema: Any, base: str) -> Iterator[tuple[str, Any]]:
    """Schemas with an ``$id``, by it."""
    if isinstance(schema, list):
        for each in schema:
            yield from _resources(each, base)
    if not isinstance(schema, dict):
        return
    if isinstance(schema.get("$id"), str):
        base = urldefrag(urljoin(base, schema["$id"]))[0]
        yield base, schema
    for key, value in _below(schema):
        if key in _BY_NAME and isinstance(value, dict):
            value = list(value.values())
        yield from _resources(value, base)


def _renamed(schema: Any, base: str, clash: set[str], suffix: str) -> Any:
    """The same with ``suffix`` behind each id of ``clash``, and in references to them."""
    if isinstance(schema, list):
        return [_renamed(each, base, clash, suffix) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = dict(schema)
    own = schema.get("$id")
    if isinstance(own, str):
        base = urldefrag(urljoin(base, own))[0]
        if base in clash:
            made["$id"] = base + suffix
    reference = schema.get("$ref")
    if isinstance(reference, str) and not reference.startswith("#"):
        uri, fragment = urldefrag(urljoin(base, reference))
        if uri in clash:
            made["$ref"] = f"{uri}{suffix}#{fragment}" if fragment else uri + suffix
    for key, value in _below(schema):
        if key in _BY_NAME and isinstance(value, dict):
            made[key] = {k: _renamed(each, base, clash, suffix) for k, each in value.items()}
        elif key not in ("$id", "$ref"):
            made[key] = _renamed(value, base, clash, suffix)
    return made
