"""Grammars as tables over bytes: what they allow is what the library does."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from megatron_async.grammar.automata.build import automaton_of
from megatron_async.grammar.automata.table import FORCED, TokenAutomaton, byte_size_of
from megatron_async.grammar.matcher import Matcher
from megatron_async.grammar.spec import StructuredOutputs
from tests.unit.grammar.test_grammar import COMPILERS

BYTE_LEVEL = ("byte_level", "tiny")
BUDGET = 1 << 24

REGEXES = [
    "", "a|ab", "(|a|ab)c?", "[ab]x{3}[cd]", "(a|b)*abb", "(a|aa)*(b|bb)*", "a{0}b*?c??",
    "[a-zäöü]{2,5}?", ".{0,9}", "(?s:.)*", "[^\\x00-\\x7f]+", "^(yes|no)$|^n$", "(?P<x>ab)+",
    "[\\u{10000}-\\u{10ffff}日]{1,3}", "[]a]+[^]a-]?", "[a\\]^-]+", "\\/\\-\\$\\.\\x41\\u0042\\n",
    "[0-9]{4}-(0[1-9]|1[0-2])", "(a?){4}a{4}", "[[a-c]x]{2}", "true|name|\\{\"name\": [1-9]",
    "(日本|日曜)(ä|a)", "x(yz){2,}", "[\\t-\\r ]a", "(xa|ya)(b|c)*|z(b|c)*",
]  # fmt: skip
CHOICES = [
    ("yes", "no"), ("a", "ab", "abc"), ("", "x"), ("ä", "ö", "日本"), ("name", "nameless", "true"),
    ('{"name": 1}', '{"name": 2}'), ("yes, sir", "yes, ma'am"),
]  # fmt: skip
SPECS = [*({"regex": regex} for regex in REGEXES), *({"choice": texts} for texts in CHOICES)]


def made(name: str, budget: int = BUDGET, **spec: Any) -> TokenAutomaton | str:
    given = StructuredOutputs(**spec)
    return automaton_of(given, COMPILERS[name].compile(given), budget_bytes=budget)


def table_of(name: str, **spec: Any) -> TokenAutomaton:
    table = made(name, **spec)
    assert isinstance(table, TokenAutomaton), (table, spec)
    return table


def walk(name: str, table: TokenAutomaton, rng: random.Random, **spec: Any) -> int:
    """Go on by random tokens, long ones more often than not; how many states are seen."""
    masks = COMPILERS[name].masks(None)
    matcher = COMPILERS[name].compile(StructuredOutputs(**spec)).matcher()
    assert isinstance(matcher, Matcher)
    row, state, seen = np.empty_like(masks.text), 0, set()
    for _ in range(60):
        seen.add(state)
        matcher.fill_mask(row)
        expected = table.text[state] | (masks.stops if table.accepting[state] else 0)
        np.testing.assert_array_equal(row, expected)
        forced = tuple(token for token in table.forced[state].tolist() if token >= 0)
        assert forced == matcher.forced_tokens()[:FORCED]
        bits = np.unpackbits(table.text[state].view(np.uint8), bitorder="little")
        tokens = np.flatnonzero(bits).tolist()
        if not tokens:
            break
        few = rng.sample(tokens, min(3, len(tokens)))
        token_id = max(few, key=lambda token: len(masks.later_bytes[token]))
        assert matcher.accept(token_id)
        state = table.after(state, masks.later_bytes[token_id])
        assert state >= 0
    return len(seen)


@pytest.mark.parametrize("name", BYTE_LEVEL)
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_walks_are_those_of_the_library(name: str, spec: dict[str, Any]) -> None:
    table, rng = table_of(name, **spec), random.Random(str(spec))
    for _ in range(6):
        walk(name, table, rng, **spec)


def test_a_table_has_its_documented_form() -> None:
    table = table_of("tiny", regex="a[bc]")
    words = -(-COMPILERS["tiny"].vocab_size // 32)
    assert table.transitions.shape == (3, 256) and table.transitions.dtype == np.int16
    assert table.accepting.tolist() == [False, False, True]
    assert table.text.shape == (3, words) and table.text.dtype == np.int32
    assert table.forced.shape == (3, FORCED) and table.forced.dtype == np.int32
    assert table.byte_size == byte_size_of(3, words)
    assert [table.after(0, data) for data in (b"", b"a", b"ac", b"acc", b"b")] == [0, 1, 2, -1, -1]
