"""Bounds of numbers hold for the double that a parser makes of a text."""

from __future__ import annotations

import json
from decimal import Decimal, localcontext
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_async.errors import RequestError
from megatron_async.grammar.bounds import SMALLEST_BOUND, check_multiples, with_bounds_of_doubles
from megatron_async.grammar.spec import StructuredOutputs
from tests.unit.grammar.test_grammar import COMPILERS

COMPILER = COMPILERS["byte_level"]
EXCLUSIVE = ("exclusiveMinimum", "exclusiveMaximum")
BOUNDS = ("minimum", "maximum", *EXCLUSIVE)


def allows(schema: dict[str, Any], text: str) -> bool:
    """Whether the grammar of a schema takes a whole text."""
    matcher = COMPILER.compile(StructuredOutputs(json=schema)).matcher()
    return all(matcher.accept(byte) for byte in text.encode()) and matcher.is_complete


def conforms(schema: dict[str, Any], text: str) -> bool:
    """Whether the double that a parser makes of a text does, to an independent validator."""
    return bool(jsonschema_rs.is_valid(schema, json.loads(text, parse_int=float)))


def near(number: float, digits: int, units: int) -> str:
    """A decimal without an exponent, ``units`` of its last place away from a number."""
    with localcontext() as context:
        context.prec = 80
        place = Decimal(1).scaleb(-digits)
        return f"{Decimal(repr(number)) + units * place:f}"


numbers = st.one_of(
    st.sampled_from((0.0, 0.1, 0.5, 1.0, -0.5, -3.0, 1e-7, 0.3, 2.0**53, -(2.0**53), 1e15)),
    st.integers(-1000, 1000).map(float),
    st.floats(-1e6, 1e6).filter(lambda x: x == 0 or abs(x) >= SMALLEST_BOUND),
)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(BOUNDS), numbers, st.integers(0, 30), st.integers(-3, 3))
def test_what_a_bound_lets_pass_conforms_when_it_is_read(
    name: str, bound: float, digits: int, units: int
) -> None:
    for kind in ({"type": "number"}, {}):
        schema = {**kind, name: bound}
        text = near(bound, digits, units)
        assert not allows(schema, text) or conforms(schema, text), text


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from((0.1, 0.3, 0.25, 0.01, 3, 7, 2, 1e-5, 12.5)),
    st.integers(-(10**18), 10**18),
    st.integers(0, 12),
)
def test_multiples_are_multiples_when_they_are_read(
    multiple: float, times: int, digits: int
) -> None:
    schema = {"type": "number", "multipleOf": multiple}
    with localcontext() as context:
        context.prec = 60
        text = f"{Decimal(repr(multiple)) * (times // 10**digits):f}"
    # The library takes a multiple with or without zeros behind it.
    forms = {text, text.rstrip("0").rstrip(".") if "." in text else text}
    taken = [form for form in forms if allows(schema, form)]
    assert all(conforms(schema, form) for form in taken), text
    if len(text) <= 14:
        assert taken, text


@pytest.mark.parametrize(
    ("schema", "text", "passes"),
    (
        ({"exclusiveMinimum": 0.5}, "0.50000000000000002", False),
        ({"exclusiveMinimum": 0.5}, "0.500000000000002", True),
        ({"exclusiveMaximum": 0.3}, "0.29999999999999999", False),
        ({"exclusiveMaximum": 0.3}, "0.2999", True),
        ({"exclusiveMaximum": 1}, "0.9", True),
        ({"exclusiveMaximum": 1, "allOf": [{"minimum": 0.95}]}, "0.99", True),
        ({"exclusiveMaximum": 1, "allOf": [{"minimum": 0.95}]}, "0.9", False),
        ({"minimum": -2.75, "maximum": 12.345}, "-2.7", True),
        ({"minimum": -2.75, "maximum": 12.345}, "12.34", True),
        ({"exclusiveMinimum": 0}, f"0.{'0' * 400}1", False),
        ({"exclusiveMinimum": 0}, "0.000001", True),
        ({"exclusiveMaximum": -3, "minimum": -4}, "-3.0000000000000000001", False),
        ({"exclusiveMaximum": -3, "minimum": -4}, "-4", True),
        ({"minimum": 0.7, "exclusiveMinimum": 0.5}, "0.6", False),
        ({"multipleOf": 3}, "9007199254740993", False),
        ({"multipleOf": 0.1}, "12345678901234567890.1", False),
    ),
)
def test_bounds_hold_for_doubles(schema: dict[str, Any], text: str, passes: bool) -> None:
    assert allows({"type": "number", **schema}, text) == passes
    assert not passes or conforms(schema, text)


def test_multiples_that_are_little_work_stay() -> None:
    """Powers of ten, seconds of a day, and names that are those of keywords."""
    for multiple in (1e6, 2e5, 1e9, 1024e3, 512e4, 125e6, 1e-10, 0.01, 3600, 86400, 9973):
        check_multiples({"items": {"multipleOf": multiple}})
    fields = {str(n): {"multipleOf": n} for n in (7, 11, 13, 3600)}
    check_multiples({"properties": {**fields, "anyOf": {"enum": [{"multipleOf": 123457}]}}})
    check_multiples({"anyOf": [{"multipleOf": 0.01}, {"multipleOf": 0.5}, {"multipleOf": 100}]})
    check_multiples({"anyOf": [{"minimum": 0}] * 100_001})


def test_bounds_hold_wherever_schemas_are_and_data_stay_as_they_are() -> None:
    inner = {"exclusiveMinimum": 1}
    schema = {
        "const": inner,
        "enum": [inner],
        "properties": {"const": inner, "exclusiveMinimum": {"anyOf": [inner]}},
    }
    changed = {"minimum": 1.00000000000001}
    assert with_bounds_of_doubles(schema) == {
        "const": inner,
        "enum": [inner],
        "properties": {"const": changed, "exclusiveMinimum": {"anyOf": [changed]}},
    }
    assert with_bounds_of_doubles({"type": "integer", **inner}) == {"type": "integer", **inner}


@pytest.mark.parametrize("name", BOUNDS)
def test_bounds_too_near_to_0_are_refused_by_name(name: str) -> None:
    with pytest.raises(RequestError, match=f"{name} 1e-300 is beyond"):
        COMPILER.compile(StructuredOutputs(json={"type": "number", name: 1e-300}))
