"""Patterns of schemas: what is written for them conforms as ECMAScript reads them, and what is of
whitespace as Python does too."""

from __future__ import annotations

import json
import re

import jsonschema_rs
import pytest

from megatron_async.errors import RequestError
from megatron_async.grammar.patterns import of_all_readers
from megatron_async.grammar.spec import StructuredOutputs
from tests.unit.grammar.test_grammar import COMPILERS

CHARACTERS = [chr(code) for code in (*range(0x20, 0x110), 9, 10, 11, 12, 13, 0x1680, 0x2007)]
CHARACTERS += ["\u2028", "\u3000", "\ufeff", "\u180e", "\u200b", "字", "\U0001f600"]
PATTERNS = (
    r"\s", r"\S", r"[\s]", r"[\S]", r"[^\s]", r"[^\S]", r"[\S\n]", r"[\sx]", r"[^\sx]", r"a|\s",
    r"\\s", r"\[\s", r"[\]\s]", r"[\\\s]", r".", r"\d", r"\w", r"\W", r"\D", r"[^\w]",
)  # fmt: skip


def taken(schema: dict[str, object], texts: list[str]) -> list[str]:
    """The texts that a schema lets a model write."""
    compiled = COMPILERS["byte_level"].compile(StructuredOutputs(json=schema))
    found = []
    for text in texts:
        matcher = compiled.matcher()
        written = json.dumps(text, ensure_ascii=False).encode()
        if all(matcher.accept(byte) for byte in written) and matcher.is_complete:
            found.append(text)
    return found


@pytest.mark.parametrize("pattern", PATTERNS)
def test_what_a_pattern_lets_a_model_write_conforms(pattern: str) -> None:
    schema: dict[str, object] = {"type": "string", "pattern": f"^(?:{pattern})$"}
    texts = [*CHARACTERS, r"\s", "[ ", "[a"]
    found = taken(schema, texts)
    assert found, "something is"
    for text in found:
        assert jsonschema_rs.is_valid(schema, text), repr(text)
        if r"\s" in pattern.lower():
            assert re.search(str(schema["pattern"]), text), repr(text)


@pytest.mark.parametrize("pattern", ["", "a", r"\d\\s", "[a-z]+", r"[^\]]", r"\\", "[", "]"])
def test_patterns_without_whitespace_stay_as_they_are(pattern: str) -> None:
    assert of_all_readers(pattern) == pattern


@pytest.mark.parametrize("pattern", [r"[\s-a]", r"[\s-\uffff]", r"[+-\S]", r"[\x00-\s]", r"[\S-a]"])
def test_a_range_that_ends_with_a_class_is_refused(pattern: str) -> None:
    with pytest.raises(RequestError, match="invalid range boundary"):
        taken({"type": "string", "pattern": pattern}, [])


@pytest.mark.parametrize("pattern", ["a\\", "\\s\\", "\\\\\\"])
def test_a_backslash_at_the_end_is_refused(pattern: str) -> None:
    with pytest.raises(RequestError, match="single backslash; write two"):
        taken({"type": "string", "pattern": pattern}, [])


@pytest.mark.parametrize(
    ("pattern", "characters"),
    [
        (r"[]\s]", "] \u3000"),  # a bracket that comes first is a character
        (r"[^]\s]", "ab-"),
        (r"[[a]\s-]", "a- \u3000"),
        (r"[^[a]\S]", " \u3000"),
        (r"(?x:[a\s])", "a \u3000"),  # blanks of the expression are left out
    ],
)
def test_classes_are_those_of_the_library(pattern: str, characters: str) -> None:
    schema: dict[str, object] = {"type": "string", "pattern": f"^(?:{pattern})$"}
    assert "".join(taken(schema, list("ab-] \x85\u3000\ufeff"))) == characters


def test_names_of_properties_have_patterns_too() -> None:
    schema = {
        "type": "object", "patternProperties": {r"^a\s$": {"type": "null"}},
        "additionalProperties": False,
    }  # fmt: skip
    matcher = COMPILERS["byte_level"].compile(StructuredOutputs(json=schema)).matcher()
    assert all(matcher.accept(byte) for byte in '{"a\u00a0":null}'.encode())
    matcher = COMPILERS["byte_level"].compile(StructuredOutputs(json=schema)).matcher()
    assert not all(matcher.accept(byte) for byte in '{"a\u0085"'.encode())
