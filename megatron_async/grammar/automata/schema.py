"""JSON schemas as trees: what is certain to be read as the library reads it.

The library's texts are tokens of JSON, between which whitespace may stand once; properties come in
the order of the schema.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from megatron_async.grammar.automata.expressions import (
    ANY,
    EMPTY,
    Both,
    Characters,
    Choice,
    Node,
    NotCoveredError,
    Ordered,
    Quoted,
    Repeat,
    Sequence,
    Text,
    choice,
    sequence,
)
from megatron_async.grammar.automata.formats import FORMATS
from megatron_async.grammar.automata.numbers import integers, numbers
from megatron_async.grammar.automata.regex import found_in, parsed
from megatron_async.grammar.bounds import LARGEST_BOUND, with_bounds_of_doubles
from megatron_async.grammar.rules import WHITESPACE
from megatron_async.grammar.spec import StructuredOutputs

MOST_DEPTH = 32
"""Schemas inside each other."""
_KEYWORDS = {
    "anyOf", "oneOf", "allOf", "$ref", "const", "enum", "type", "items", "additionalItems",
    "prefixItems", "minItems", "maxItems", "properties", "additionalProperties", "required",
    "patternProperties", "minProperties", "maxProperties", "minLength", "maxLength", "pattern",
    "format", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf",
}  # fmt: skip
"""What the library knows. It refuses all others that the standard has, and ignores the rest."""
_OF_TYPE = {
    "null": set(), "boolean": set(),
    "integer": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"},
    "number": {"minimum", "maximum"},
    "string": {"minLength", "maxLength", "pattern", "format"},
    "array": {"items", "minItems", "maxItems"},
    "object": {"properties", "required", "additionalProperties"},
}  # fmt: skip
"""Keywords by type. Of numbers exclusive bounds have been made others."""
_BLANKS = {9, 10, 13, 32}
_PYTHON_TYPES = {"string": str, "boolean": bool, "array": list, "object": dict}


def whitespace_of(spec: StructuredOutputs) -> Node:
    """What may stand between JSON's tokens.

    Raises:
        NotCoveredError: it may be more than blanks and line breaks.
    """
    if spec.disable_any_whitespace:
        return EMPTY
    node = parsed(spec.whitespace_pattern or WHITESPACE)
    if not _is_blank(node):
        raise NotCoveredError("whitespace_pattern")
    return Repeat(node, 0, 1)


def _is_blank(node: Node) -> bool:
    match node:
        case Text(data):
            return set(data) <= _BLANKS
        case Characters(ranges):
            return all(set(range(a, b + 1)) <= _BLANKS for a, b in ranges if b < 128 or a > 32)
        case Sequence(items) | Choice(items):
            return all(map(_is_blank, items))
        case Repeat(item, _, _):
            return _is_blank(item)
        case _:
            return False


def of_schema(text: str, whitespace: Node) -> Node:
    """The instances of a schema, as the library writes them.

    Raises:
        NotCoveredError: names the keyword that is in the way.
    """
    schema = json.loads(text)
    if not isinstance(schema, dict):
        raise NotCoveredError("schema: any value")
    return _Writer(whitespace).value(with_bounds_of_doubles(schema))


class _Writer:
    def __init__(self, blank: Node) -> None:
        self._blank = blank
        self._resource: dict[str, Any] = {}
        """The schema within which references are."""
        self._depth = 0
        self._references: dict[tuple[int, str], Node | None] = {}
        """By resource and reference; None for one that is being made."""

    def value(self, schema: Any) -> Node:
        if not isinstance(schema, dict):
            raise NotCoveredError("schema: any value" if schema is True else "schema: false")
        self._depth += 1
        if self._depth > MOST_DEPTH:
            raise NotCoveredError("schema: depth")
        outer = self._resource
        if not outer or "$id" in schema:
            self._resource = schema
        node = self._of_keywords({k: v for k, v in schema.items() if k in _KEYWORDS})
        self._resource = outer
        self._depth -= 1
        return node

    def _of_keywords(self, schema: dict[str, Any]) -> Node:
        if not schema:
            raise NotCoveredError("schema: any value")
        for name in ("$ref", "allOf", "anyOf", "oneOf"):
            if name in schema:
                if len(schema) > 1:
                    raise NotCoveredError(f"schema: {name} beside others")
                return self._combined(name, schema[name])
        for name in ("const", "enum"):
            if name in schema:
                return self._enumerated(name, schema)
        kinds = schema.get("type")
        if kinds is None:
            raise NotCoveredError("schema: no type")
        kinds = [kinds] if isinstance(kinds, str) else kinds
        known = set().union(*(_OF_TYPE.get(kind, set()) for kind in kinds)) | {"type"}
        for name in schema:
            if name not in known:
                raise NotCoveredError(f"schema: {name}")
        return choice(self._of_type(kind, schema) for kind in dict.fromkeys(kinds))

    def _combined(self, name: str, value: Any) -> Node:
        if name == "$ref":
            return self._reference(value)
        if name == "allOf" and len(value) != 1:
            raise NotCoveredError("schema: allOf")
        return choice(self.value(part) for part in value)

    def _reference(self, reference: str) -> Node:
        key = id(self._resource), reference
        if key in self._references or reference == "#":
            known = self._references.get(key)
            if known is None:
                raise NotCoveredError("schema: recursion")
            return known
        self._references[key] = None
        node = self.value(self._referred(reference))
        self._references[key] = node
        return node

    def _referred(self, reference: str) -> Any:
        if not reference.startswith("#/") or "%" in reference:
            raise NotCoveredError("schema: $ref")
        at: Any = self._resource
        for part in reference[2:].split("/"):
            part = part.replace("~1", "/").replace("~0", "~")
            if not isinstance(at, dict) or part not in at:
                raise NotCoveredError("schema: $ref")
            if "$id" in at and at is not self._resource:
                raise NotCoveredError("schema: $ref")  # it is within another resource
            at = at[part]
        return at

    def _of_type(self, kind: str, schema: Mapping[str, Any]) -> Node:
        match kind:
            case "null":
                return Text(b"null")
            case "boolean":
                return Choice((Text(b"true"), Text(b"false")))
            case "integer":
                return parsed(integers(*_whole_bounds(schema)))
            case "number":
                return parsed(numbers(schema.get("minimum"), schema.get("maximum")))
            case "string":
                return _string(schema)
            case "array":
                return self._array(schema)
            case "object":
                return self._object(schema)
        raise NotCoveredError("schema: type")

    def _array(self, schema: Mapping[str, Any]) -> Node:
        low, high = int(schema.get("minItems", 0)), schema.get("maxItems")
        if high == 0 and low == 0:
            return self._tokens(b"[", b"]")
        if high is not None and low > high:
            raise NotCoveredError("nothing can come")
        if "items" not in schema:
            raise NotCoveredError("schema: any value")
        item = sequence(self._blank, self.value(schema["items"]))
        more = sequence(self._blank, Text(b","), item)
        most = None if high is None else int(high) - 1
        items = sequence(item, Repeat(more, max(low - 1, 0), most))
        if low == 0:
            items = Repeat(items, 0, 1)
        return sequence(Text(b"["), items, self._blank, Text(b"]"))

    def _object(self, schema: Mapping[str, Any]) -> Node:
        if schema.get("additionalProperties") is not False:
            raise NotCoveredError("schema: additionalProperties")
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not set(required) <= set(properties):
            raise NotCoveredError("schema: required")
        return self._fields(
            [(name, self.value(part), name in required) for name, part in properties.items()]
        )

    def _fields(self, fields: list[tuple[str, Node, bool]]) -> Node:
        items = tuple(
            (sequence(self._blank, self._tokens(_dumped(name), b":"), self._blank, node), is_needed)
            for name, node, is_needed in fields
        )
        between = sequence(self._blank, Text(b","))
        return sequence(Text(b"{"), Ordered(items, between), self._blank, Text(b"}"))

    def _tokens(self, *tokens: bytes) -> Node:
        parts: list[Node] = []
        for token in tokens:
            parts += [self._blank, Text(token)]
        return sequence(*parts[1:])

    def _enumerated(self, name: str, schema: Mapping[str, Any]) -> Node:
        for other in schema:
            if other not in (name, "type"):
                raise NotCoveredError(f"schema: {name} beside others")
        kinds = schema.get("type")
        kinds = [kinds] if isinstance(kinds, str) else kinds
        values = schema["enum"] if name == "enum" else [schema["const"]]
        return choice(self._constant(value, kinds) for value in values if _has_type(value, kinds))

    def _constant(self, value: Any, kinds: list[str] | None = None) -> Node:
        match value:
            case None | bool():
                return Text(json.dumps(value).encode())
            case str():
                return sequence(Text(b'"'), Quoted(Text(value.encode())), Text(b'"'))
            case int() | float():
                if abs(value) > LARGEST_BOUND or (value == 0 and math.copysign(1, value) < 0):
                    raise NotCoveredError("schema: a number")
                is_whole = isinstance(value, int) or (kinds is not None and "number" not in kinds)
                whole = int(value) if is_whole else None
                return parsed(integers(whole, whole) if is_whole else numbers(value, value))
            case list():
                return self._list([self._constant(part) for part in value])
            case dict():
                fields = [(key, self._constant(part), True) for key, part in value.items()]
                return self._fields(fields)
        raise NotCoveredError("schema: a constant")

    def _list(self, values: list[Node]) -> Node:
        parts: list[Node] = [Text(b"[")]
        for place, node in enumerate(values):
            parts += [self._blank, Text(b","), self._blank, node] if place else [self._blank, node]
        return sequence(*parts, self._blank, Text(b"]"))


def _dumped(name: str) -> bytes:
    return json.dumps(name, ensure_ascii=False).encode()


def _string(schema: Mapping[str, Any]) -> Node:
    rules: list[Node] = []
    if "pattern" in schema:
        rules.append(found_in(schema["pattern"]))
    if "format" in schema:
        if schema["format"] not in FORMATS:
            raise NotCoveredError(f"schema: format {schema['format']}")
        rules.append(parsed(FORMATS[schema["format"]]))
    low, high = int(schema.get("minLength", 0)), schema.get("maxLength")
    if high is not None and low > high:
        raise NotCoveredError("nothing can come")
    if low or high is not None or not rules:
        rules.append(Repeat(Characters(ANY), low, None if high is None else int(high)))
    node = rules[0]
    for rule in rules[1:]:
        node = Both(node, rule)
    return sequence(Text(b'"'), Quoted(node), Text(b'"'))


def _whole_bounds(schema: Mapping[str, Any]) -> tuple[int | None, int | None]:
    low, high = schema.get("minimum"), schema.get("maximum")
    low, above = (None if low is None else math.ceil(low)), schema.get("exclusiveMinimum")
    high, below = (None if high is None else math.floor(high)), schema.get("exclusiveMaximum")
    if isinstance(above, bool) or isinstance(below, bool):
        raise NotCoveredError("schema: exclusive bounds")
    if above is not None:
        low = max(filter(lambda n: n is not None, (low, math.floor(above) + 1)))
    if below is not None:
        high = min(filter(lambda n: n is not None, (high, math.ceil(below) - 1)))
    return low, high


def _has_type(value: Any, kinds: list[str] | None) -> bool:
    def has(kind: str) -> bool:
        if kind == "null":
            return value is None
        if kind in ("integer", "number"):
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            return is_number and (kind == "number" or float(value).is_integer())
        return isinstance(value, _PYTHON_TYPES.get(kind, ()))

    return kinds is None or any(map(has, kinds))
