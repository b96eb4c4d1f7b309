"""Structured outputs over real vocabularies: whatever the masks allow conforms."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import jsonschema_rs
import numpy as np
import pytest

from megatron_async.grammar.compiler import GrammarCompiler
from megatron_async.grammar.matcher import Matcher
from megatron_async.grammar.spec import StructuredOutputs
from tests.tokenizers.conftest import Real

WALKS, STEPS = 12, 160
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "role": {"enum": ["admin", "guest", "日本 é 😀"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 4}, "maxItems": 3},
        "rate": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
        "more": {"type": ["boolean", "null"]},
    },
    "required": ["name", "age", "role"],
    "additionalProperties": False,
}
TREE = {
    "$defs": {
        "tree": {
            "type": "object",
            "properties": {
                "v": {"type": "integer", "minimum": -9, "maximum": 999},
                "next": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2},
            },
            "required": ["v", "next"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/tree",
}
ANY_OF = {"anyOf": [{"type": "string", "maxLength": 9}, {"const": 7}, {"type": "null"}]}
SCHEMAS = {"person": PERSON, "tree": TREE, "any of": ANY_OF}
REGEX = r"[a-zé]{2,5}( [0-9]+|[日本😀]{1,3})\n?"


@pytest.fixture(scope="module")
def compiler(real: Real) -> GrammarCompiler:
    return GrammarCompiler(real.ours, real.ours.vocab_size, real.ours.eos_ids)


class Walk:
    """Random tokens of the masks, up to an end: the longer it is, the more it tends to close."""

    def __init__(self, real: Real, matcher: Matcher, draw: random.Random) -> None:
        self._real, self._matcher, self._draw = real, matcher, draw
        self._row = np.zeros((real.ours.vocab_size + 31) // 32, np.int32)
        closing = ['"', "}", "]", '"}', "]}", '"]']
        self._closing = {ids[-1] for text in closing if (ids := real.ours.tokenize(text))}
        self.ids: list[int] = []
        self.ended = False

    def allowed(self) -> list[int]:
        self._matcher.fill_mask(self._row)
        bits = np.unpackbits(self._row.view(np.uint8), bitorder="little")
        return [int(n) for n in np.flatnonzero(bits)]

    def run(self) -> None:
        for step in range(STEPS):
            allowed = self.allowed()
            assert allowed, self.text()
            if (end := self._real.ours.eos_ids[0]) in allowed and self._draw.random() < 0.5:
                assert self._matcher.accept(end)
                self.ended = True
                return
            closing = [token for token in allowed if token in self._closing]
            narrow = closing and self._draw.random() * STEPS / 4 < step
            token = self._draw.choice(closing if narrow else allowed)
            assert self._matcher.copy().accept(token), (self.ids, token)
            if token == end:
                continue
            self._matcher.accept(token)
            self.ids.append(token)

    def text(self) -> str:
        return str(self._real.theirs.decode(self.ids, skip_special_tokens=True))


def ended_texts(real: Real, compiler: GrammarCompiler, spec: StructuredOutputs) -> list[str]:
    compiled, draw, made = compiler.compile(spec), random.Random(5), []
    for _ in range(WALKS):
        walk = Walk(real, compiled.matcher(), draw)
        walk.run()
        assert not real.ours.special_ids.intersection(walk.ids)
        if walk.ended:
            made.append(walk.text())
    assert len(made) > WALKS / 2
    return made


@pytest.mark.parametrize("name", SCHEMAS)
def test_what_masks_allow_conforms_to_the_schema(
    real: Real, compiler: GrammarCompiler, name: str
) -> None:
    validator: Any = jsonschema_rs.validator_for(SCHEMAS[name])
    for text in ended_texts(
        real, compiler, StructuredOutputs(json=SCHEMAS[name], whitespace_pattern=" ?")
    ):
        assert validator.is_valid(json.loads(text)), text


def test_what_masks_allow_matches_the_expression(real: Real, compiler: GrammarCompiler) -> None:
    for text in ended_texts(real, compiler, StructuredOutputs(regex=REGEX)):
        assert re.fullmatch(REGEX, text), text


def test_texts_that_conform_are_allowed(real: Real, compiler: GrammarCompiler) -> None:
    instance = {
        "name": "Ö é 日本 😀",
        "age": 44,
        "role": "日本 é 😀",
        "tags": ["a", " b"],
        "rate": 0.5,
    }
    for text in [json.dumps(instance, ensure_ascii=False, indent=n) for n in (None, 2)]:
        matcher = compiler.compile(StructuredOutputs(json=PERSON)).matcher()
        for token in real.ours.tokenize(text):
            assert matcher.accept(token), (text, token)
        assert matcher.accept(real.ours.eos_ids[0])


def test_a_mask_allows_all_that_is_a_prefix(real: Real, compiler: GrammarCompiler) -> None:
    """The choice's first mask, beside a look at each token of the vocabulary."""
    choice = ("true", "trust 日本", "no")
    walk = Walk(
        real, compiler.compile(StructuredOutputs(choice=choice)).matcher(), random.Random(6)
    )
    begins = {text.encode()[:n] for text in choice for n in range(1, len(text.encode()) + 1)}
    first = [real.ours.token_bytes(token, first=True) for token in range(real.ours.vocab_size)]
    expected = {token for token, raw in enumerate(first) if raw in begins}
    blank = {token for token in walk.allowed() if not first[token]}
    assert {*walk.allowed()} - blank == expected
    assert all(not real.theirs.decode([token]).strip() for token in blank)
