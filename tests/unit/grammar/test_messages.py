"""What is wrong with a schema or an expression is said in the user's terms."""

from __future__ import annotations

import re
from typing import Any

import pytest

from megatron_async.errors import RequestError
from megatron_async.grammar.messages import MAX_MESSAGE, UNKNOWN, explained
from megatron_async.grammar.spec import StructuredOutputs
from tests.unit.grammar.test_grammar import COMPILERS, REFUSED

OF_THE_LIBRARY = re.compile(
    r"coerce|option|unimplemented|unsatisf|f64|lark|llguidance|%json|x-guidance|registry|retriev"
    r"|lexer|whitespace_flexible|json-schema:|Word|parse error|\(in regex\)|backtrace|panic"
    r"|terminal|\n|got ",
    re.I,
)
SCHEMAS: list[tuple[dict[str, Any], str]] = [
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "branches of oneOf may hold at once"),
    ({"properties": {"a": {"oneOf": [{"minimum": 3}, {"maximum": 5}]}}}, "branches of oneOf"),
    ({"not": {}}, "not is not supported"),
    ({"if": {}, "then": {}}, "if, then are not supported"),
    ({"$ref": "http://a/b"}, "http://a/b lies outside of the schema; put what it names into"),
    ({"$schema": "draft"}, "draft lies outside"),
    ({"type": "string", "format": "iri"}, "format iri is not supported"),
    ({"required": "a"}, 'required must be a list, not "a"'),
    ({"minimum": "3"}, 'minimum must be a number, not "3"'),
    ({"minLength": -1}, "minLength must be an integer of at least 0, not -1"),
    ({"type": "string", "pattern": "(?=a)b"}, r"look-around is not supported: \(\?="),
    ({"type": "string", "pattern": r"a\b"}, r"\\b, \\B, and \^ or \$"),
    ({"patternProperties": {"a": {}, "b": {}}}, "patternProperties a and b take the same names"),
    ({"multipleOf": 0, "type": "integer"}, "multipleOf must be above 0"),
    ({"multipleOf": 123456789}, "multipleOf 123456789 is beyond what can be compiled: it has"),
    ({"items": {"multipleOf": 12345.67}}, "multipleOf 12345.67 is beyond"),
    ({"items": {"multipleOf": 7e5}}, "multipleOf 700000.0 is beyond"),
    ({"multipleOf": 10240000}, "multipleOf 10240000 is beyond"),
    ({"multipleOf": 51200000, "type": "integer"}, "multipleOf 51200000 is beyond"),
    ({"allOf": [{"multipleOf": 1e-7}, {"multipleOf": 1e7}]}, "multipleOf 1e-07 is beyond"),
    ({"multipleOf": 997, "allOf": [{"multipleOf": 991}]}, "multipleOf 997 is beyond .* with the"),
    ({"multipleOf": 9973, "anyOf": [{"maximum": at} for at in range(30)]}, "multipleOf 9973 is"),
    ({"prefixItems": [{"multipleOf": 9973}] * 30}, "with the other numbers it has more than"),
    ({"anyOf": [{"multipleOf": 2**50 - at} for at in range(999)]}, "it has more than 100,000 rem"),
    ({"enum": []}, "no value conforms to it"),
]


@pytest.mark.parametrize(("schema", "said"), SCHEMAS)
def test_a_schema_is_refused_in_words_of_schemas(schema: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        COMPILERS["byte_level"].compile(StructuredOutputs(json=schema))


SPECS = [*({"json": schema} for schema, _ in SCHEMAS), *(fields for fields, _ in REFUSED)]


@pytest.mark.parametrize("fields", SPECS)
def test_no_error_names_what_lies_below(fields: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as raised:
        COMPILERS["byte_level"].compile(StructuredOutputs(**fields))
    said = str(raised.value)
    assert not OF_THE_LIBRARY.search(said)
    assert UNKNOWN not in said
    assert "; " in said and len(said) < 2 * MAX_MESSAGE


def test_words_that_nobody_knows_are_not_passed_on() -> None:
    assert explained("set allow_frobnication=true in LLParserOptions") == UNKNOWN
