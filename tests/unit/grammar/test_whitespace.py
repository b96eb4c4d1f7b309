"""Blanks between JSON's tokens are bounded, unless a request says otherwise."""

from __future__ import annotations

import json
from typing import Any

import pytest

from megatron_async.grammar.spec import StructuredOutputs
from megatron_async.serving.endpoints.request_shapes import CompletionRequest
from tests.unit.grammar.test_grammar import COMPILERS, TOKENIZERS, allowed, of_bytes

VALUE = {"a": [1, {"b": None}], "c": {}}
ANY: list[dict[str, Any]] = [{"json_object": True}, {"json": {"type": "object"}}]


def longest(blanks: str, name: str, **fields: Any) -> int:
    """Blanks, one of ``blanks`` after the other, that may come behind an opening brace."""
    matcher = COMPILERS[name].compile(StructuredOutputs(**fields)).matcher()
    tokens = {TOKENIZERS[name].token_bytes(n): n for n in range(TOKENIZERS[name].vocab_size)}
    assert matcher.accept(tokens[b"{"])
    count = 0
    while count < 200 and matcher.accept(tokens[blanks[count % len(blanks)].encode()]):
        count += 1
    return count


@pytest.mark.parametrize("fields", ANY)
@pytest.mark.parametrize("blanks", [" ", "\n", "\t", "\n ", " \n", "\r\n", "  \n\t"])
def test_a_length_cannot_be_filled_with_blanks(fields: dict[str, Any], blanks: str) -> None:
    assert longest(blanks, "byte_level", **fields) < 50


def test_blanks_that_are_asked_for_have_no_bound() -> None:
    assert longest(" \n", "byte_level", json_object=True, whitespace_pattern=r"\s*") == 200


def test_after_the_last_blank_the_text_goes_on() -> None:
    compiler = COMPILERS["byte_level"]
    matcher = compiler.compile(StructuredOutputs(json_object=True)).matcher()
    for byte in b"{ ":
        assert matcher.accept(byte)
    while matcher.accept(ord(" ")):
        pass
    assert {ord('"'), ord("}")} <= allowed(matcher, compiler.vocab_size)


@of_bytes
@pytest.mark.parametrize("indent", [None, 0, 1, 2, 4, 8, "\t"])
def test_json_as_people_write_it_may_come(name: str, indent: Any) -> None:
    matcher = COMPILERS[name].compile(StructuredOutputs(json_object=True)).matcher()
    tokens = {TOKENIZERS[name].token_bytes(n): n for n in range(TOKENIZERS[name].vocab_size)}
    text = json.dumps(VALUE, indent=indent).encode()
    assert all(matcher.accept(tokens[text[n : n + 1]]) for n in range(len(text)))
    assert matcher.is_complete


@pytest.mark.parametrize("format", ["json_object", "json_schema"])
def test_the_blanks_of_a_response_format_can_be_changed(format: str) -> None:
    asked = {
        "prompt": "a",
        "response_format": {"type": format, "json_schema": {"schema": {"type": "object"}}},
        "guided_whitespace_pattern": " *",
    }
    structure = CompletionRequest.model_validate(asked).params(1).structured_outputs
    assert structure["whitespace_pattern"] == " *"
