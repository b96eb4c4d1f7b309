"""Grammars as tables over bytes: what they allow is what the library does."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from megatron_async.grammar.automata import build, dfa, nfa, proof
from megatron_async.grammar.automata.build import automaton_of
from megatron_async.grammar.automata.table import TokenAutomaton, byte_size_of
from megatron_async.grammar.matcher import Matcher
from megatron_async.grammar.spec import StructuredOutputs
from megatron_async.serving.chat.tool_choice import structured_outputs_for
from megatron_async.step.extras import MOST_FORCED, TABLE_TOO_LARGE
from tests.support.guided_tokens import SCHEMAS as FUNCTIONS
from tests.unit.grammar.test_grammar import COMPILERS

BYTE_LEVEL = ("byte_level", "tiny")
BUDGET = 1 << 24

REGEXES = [
    "", "a|ab", "(|a|ab)c?", "[ab]x{3}[cd]", "(a|b)*abb", "(a|aa)*(b|bb)*", "a{0}b*?c??",
    "[a-zäöü]{2,5}?", ".{0,9}", "(?s:.)*", "[^\\x00-\\x7f]+", "^(yes|no)$|^n$", "(?P<x>ab)+",
    "[\\u{10000}-\\u{10ffff}日]{1,3}", "[]a]+[^]a-]?", "[a\\]^-]+", "\\/\\-\\$\\.\\x41\\u0042\\n",
    "[0-9]{4}-(0[1-9]|1[0-2])", "(a?){4}a{4}", "[[a-c]x]{2}", "true|name|\\{\"name\": [1-9]",
    "(日本|日曜)(ä|a)", r"\s[^\s]\S", "x(yz){2,}", "[\\t-\\r ]a", "(xa|ya)(b|c)*|z(b|c)*",
]  # fmt: skip
CHOICES = [
    ("yes", "no"), ("a", "ab", "abc"), ("", "x"), ("ä", "ö", "日本"), ("name", "nameless", "true"),
    ('{"name": 1}', '{"name": 2}'), ("yes, sir", "yes, ma'am"),
]  # fmt: skip


def object_of(required: str = "", **properties: Any) -> dict[str, Any]:
    return {
        "type": "object", "properties": properties, "required": required.split(),
        "additionalProperties": False,
    }  # fmt: skip


WORD, WHOLE = {"type": "string", "pattern": "^[a-z]{1,3}$"}, {"type": "integer"}
SCHEMAS = [
    object_of(), object_of(a=WHOLE, b=WHOLE), object_of("b", a=WORD, b=WHOLE, c={"type": "null"}),
    object_of("a c", a=WHOLE, b={"type": "boolean"}, c=object_of(a=WORD)),
    object_of("n", **{"n": WHOLE, 'q"\n日': WORD}), {"type": "string"},
    {"type": "string", "minLength": 1, "maxLength": 3}, {"type": "string", "minLength": 2},
    {"type": "string", "pattern": "^\\d+\\s?[^\\s]$"}, {"type": "string", "pattern": "ab|^c$"},
    {"type": "string", "pattern": '["\\\\\n\u007f]+', "maxLength": 3},
    {"type": "string", "pattern": "^(a|b)*$", "maxLength": 4, "minLength": 2},
    {"type": "string", "format": "date"}, {"type": "string", "format": "date-time"},
    {"type": "string", "format": "time"}, {"type": "string", "format": "duration"},
    {"type": "string", "format": "email"}, {"type": "string", "format": "hostname"},
    {"type": "string", "format": "ipv4"}, {"type": "string", "format": "uuid"},
    WHOLE, {"type": "number"}, {"type": "boolean"}, {"type": "null"},
    {"type": ["string", "null"], "maxLength": 2}, {"type": "array", "items": WHOLE},
    {"type": "array", "items": WORD, "minItems": 1, "maxItems": 3},
    {"type": "array", "items": WORD, "maxItems": 2}, {"type": "array", "maxItems": 0},
    {"type": "array", "items": {"type": "array", "items": WHOLE, "minItems": 2}, "maxItems": 2},
    {"enum": [True, [1, []], {"k": 2, "l": {}}, None, {}]},
    {"enum": ["a", "ab", 'x"y\\z', "\n", "日", 1, 10, -1.5]},
    {"type": "string", "enum": ["a", 1]}, {"type": "integer", "enum": [1, 2.0, "b"]},
    {"const": "é"}, {"const": 0.25}, {"anyOf": [WHOLE, {"type": "number"}, WORD]},
    {"oneOf": [object_of("k", k={"const": "a"}), object_of("k x", k={"const": "b"}, x=WHOLE)]},
    {"anyOf": [object_of("a", a=WHOLE), object_of("a b", a=WHOLE, b=WORD)]},
    {"$ref": "#/$defs/x", "$defs": {"x": {"type": "array", "items": {"$ref": "#/$defs/y"}},
                                    "y": {"title": "y", "allOf": [WORD]}}},
    *({"type": "integer", "minimum": low, "maximum": high}
      for low, high in [(0, 999), (3, 3), (-17, 205), (-90, -7), (99, 1000), (5, 27)]),
    *({"type": "integer"} | bounds for bounds in [
        {"minimum": 12}, {"minimum": -12}, {"maximum": 105}, {"maximum": -3}, {"maximum": 0},
        {"exclusiveMinimum": 3, "exclusiveMaximum": 10}, {"minimum": 0.5, "maximum": 7.5}]),
    *({"type": "number", "minimum": low, "maximum": high}
      for low, high in [(-90, 90), (0, 1), (2, 2), (1.25, 2), (-3, -1), (0, 20), (8, 103)]),
    *({"type": "number"} | bounds for bounds in [
        {"minimum": 0}, {"minimum": -5}, {"maximum": 0}, {"maximum": 7}, {"maximum": -2},
        {"minimum": 11}]),
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
        assert (row == expected).all()
        forced = tuple(token for token in table.forced[state].tolist() if token >= 0)
        assert forced == matcher.forced_tokens()[:MOST_FORCED]
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
    for _ in range(2):
        walk(name, table, rng, **spec)


@pytest.mark.parametrize("schema", SCHEMAS, ids=str)
def test_walks_of_schemas_are_those_of_the_library(schema: dict[str, Any]) -> None:
    ways = ({"whitespace_pattern": "[ \n]?"}, {"disable_any_whitespace": True})
    for name, blanks in zip(BYTE_LEVEL, ways, strict=True):
        table, rng = table_of(name, json=schema, **blanks), random.Random(str(schema))
        for _ in range(2):
            walk(name, table, rng, json=schema, **blanks)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_functions_have_tables(function: str) -> None:
    spec = {"json": FUNCTIONS[function], "disable_any_whitespace": True}
    table, rng = table_of("tiny", **spec), random.Random(function)
    seen = sum(walk("tiny", table, rng, **spec) for _ in range(2))
    assert seen > 30


@pytest.mark.parametrize("function", ["update_ticket_status", "convert_currency"])
def test_functions_have_tables_with_room_to_indent(function: str) -> None:
    spec = {"json": FUNCTIONS[function]}
    assert walk("tiny", table_of("tiny", **spec), random.Random(2), **spec) > 10


@pytest.mark.parametrize("choice", ["required", "convert_currency"])
def test_calls_that_must_come_have_tables(choice: str) -> None:
    """Each function's schema is a resource of its own, and they refer to parts of theirs."""
    functions = {name: FUNCTIONS[name] for name in ("update_ticket_status", "convert_currency")}
    unit = {"$defs": {"u": {"enum": ["m", "km"]}}} | object_of("u", u={"$ref": "#/$defs/u"})
    tools = [
        {"type": "function", "function": {"name": name, "parameters": schema}}
        for name, schema in (functions | {"in_unit": unit}).items()
    ]
    named = {"type": "function", "function": {"name": choice}}
    spec = structured_outputs_for(tools, choice if choice == "required" else named)
    assert spec is not None
    table, rng = table_of("tiny", **spec), random.Random(choice)
    assert max(walk("tiny", table, rng, **spec) for _ in range(4)) > 30


def test_a_table_has_its_documented_form() -> None:
    table = table_of("tiny", regex="a[bc]")
    words = -(-COMPILERS["tiny"].vocab_size // 32)
    assert table.transitions.shape == (3, 256) and table.transitions.dtype == np.int16
    assert table.accepting.tolist() == [False, False, True]
    assert table.text.shape == (3, words) and table.text.dtype == np.int32
    assert table.forced.shape == (3, MOST_FORCED) and table.forced.dtype == np.int32
    assert table.byte_size == byte_size_of(3, words)
    assert [table.after(0, data) for data in (b"", b"a", b"ac", b"acc", b"b")] == [0, 1, 2, -1, -1]


@pytest.mark.parametrize("name", BYTE_LEVEL)
def test_the_table_of_other_ends_has_no_token_of_them(name: str) -> None:
    spec = StructuredOutputs(regex="[ab]+")
    compiled = COMPILERS[name].compile(spec)
    table = automaton_of(spec, compiled, (97,), budget_bytes=BUDGET)
    assert isinstance(table, TokenAutomaton)
    assert [int(row[3]) for row in table.text] == [1 << 2, 1 << 2]
    assert table.accepting.tolist() == [False, True]


def test_tokens_may_split_characters() -> None:
    """The two bytes that begin one, and a quote with the byte that begins another."""
    table = table_of("byte_level", json={"const": "x日"})
    later = COMPILERS["byte_level"].masks(None).later_bytes
    token = later.index(b'x"' + "日".encode()[:1])
    assert not table.text[1, token // 32] >> token % 32 & 1  # the quote would end it
    token = later.index("日".encode()[:2])
    inside = table.after(0, b'"x')
    assert table.text[inside, token // 32] >> token % 32 & 1
    assert table.after(table.after(inside, later[token]), "日".encode()[2:]) >= 0


STATES = [
    ("a|ab", 3), ("(a|aa)*(b|bb)*", 2), ("(xa|ya)(b|c)*|z(b|c)*", 3), ("(a?){4}a{4}", 9),
    ("xab|yab|zac", 6), ("(|a|ab)c?", 4), ("a+?b??", 3), ("(?s:.){3}", 25),
]  # fmt: skip


@pytest.mark.parametrize(("regex", "states"), STATES)
def test_no_two_states_are_equal(regex: str, states: int) -> None:
    assert len(table_of("tiny", regex=regex).transitions) == states


@pytest.mark.parametrize(
    "regex",
    [
        "a|ab",
        "(a|ab)(c|bcd)",
        "(a*b|c)*?",
        "(|a|b{2})c?",
        "[^a]b[a-c]",
        "a{2,3}b{0,2}",
        "(a?b){2,}",
    ],
)
def test_texts_are_those_of_another_reader(regex: str) -> None:
    table = table_of("tiny", regex=regex)
    texts = ["".join(t) for n in range(7) for t in itertools.product("abc", repeat=n)]
    for text in texts:
        state = table.after(0, text.encode())
        ends = state >= 0 and bool(table.accepting[state])
        assert ends == (re.fullmatch(regex, text) is not None), text


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ({"regex": "(a{0,500}){0,500}"}, "size"),
        ({"regex": "((((((a{1,9}){1,9}){1,9}){1,9}){1,9}){1,9}){1,9}"}, "size"),
        ({"regex": "[ab]*a[ab]{14}"}, "size"),
        ({"regex": "(a?b?c?){0,400}"}, "work"),
        ({"json": {"type": "string", "maxLength": 5000}}, "size"),
        ({"json": {"$ref": "#/$defs/a0", "$defs": {
            f"a{n}": {"anyOf": [{"$ref": f"#/$defs/a{n + 1}"}] * 4} if n < 10 else {"const": 5}
            for n in range(11)}}}, "size"),
    ],
)  # fmt: skip
def test_the_hostile_are_refused_by_count(spec: dict[str, Any], reason: str) -> None:
    with pytest.raises(build.NotCoveredError, match=f"^{reason}$"):
        dfa.minimal(dfa.determinised(nfa.Nfa(build.tree_of(StructuredOutputs(**spec)))))


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ({"regex": r"\w+"}, r"regex: \w"), ({"regex": r"\p{L}"}, r"regex: \p"),
        ({"regex": "(?i)a"}, "regex: (?"), ({"regex": "[a&&b]?"}, "regex: &&"),
        ({"regex": "[[:alpha:]]"}, "regex: [:"), ({"regex": "(?P<stop>a)"}, "regex: (?"),
        ({"grammar": 'root ::= "a"'}, "grammar"), ({"json_object": True}, "json_object"),
        ({"regex": "a", "thought": {"closing": [5]}}, "thought"),
        ({"json": {}}, "schema: any value"), ({"json": {"minimum": 3}}, "schema: no type"),
        ({"json": {"type": "object"}}, "schema: additionalProperties"),
        ({"json": {"type": "array"}}, "schema: any value"),
        ({"json": {"type": "integer", "multipleOf": 3}}, "schema: multipleOf"),
        ({"json": {"type": "string", "format": "ipv6"}}, "schema: format ipv6"),
        ({"json": {"type": "string", "enum": ["a"], "maxLength": 3}}, "schema: enum beside others"),
        ({"json": object_of(a={"anyOf": [WORD, {"$ref": "#"}]})}, "schema: recursion"),
        ({"json": {"$ref": "urn:x"} | {"$defs": {"x": {"$id": "urn:x"} | WORD}}}, "schema: $ref"),
        ({"json": {"$ref": "#/$defs/l", "$defs": {"l": object_of(
            next={"anyOf": [{"type": "null"}, {"$ref": "#/$defs/l"}]})}}}, "schema: recursion"),
        ({"json": WHOLE, "whitespace_pattern": "[ x]"}, "whitespace_pattern"),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_not_covered_has_a_reason(spec: dict[str, Any], reason: str) -> None:
    assert made("tiny", **spec) == reason


def test_tables_have_a_budget_and_a_bound_of_what_is_proven(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    size = table_of("tiny", regex="a{9}").byte_size
    assert isinstance(made("tiny", size, regex="a{9}"), TokenAutomaton)
    assert made("tiny", size - 1, regex="a{9}") == TABLE_TOO_LARGE
    monkeypatch.setattr(build, "MOST_PROVEN_WORDS", 2 * 9 * 10)
    assert made("tiny", regex="a{9}") == "states to prove"


def test_a_tokenizer_whose_first_token_is_other_bytes_has_no_table() -> None:
    assert made("byte_fallback", regex="a") == "tokenizer: its first token is other bytes"


# --- the proof sees what is wrong -----------------------------------------------------------------

PROVEN = [
    {"regex": "(ab|cd)+x{1,3}"}, {"choice": ("name", "nameless", "true")},
    {"json": object_of("a", a=WHOLE, b=WORD), "disable_any_whitespace": True},
]  # fmt: skip
Change = Callable[[random.Random, Any, Any], None]


def lead_elsewhere(rng: random.Random, transitions: Any, accepting: Any) -> None:
    """One byte of one state."""
    state, byte = rng.choice(np.argwhere(transitions >= 0).tolist())
    others = [to for to in range(-1, len(transitions)) if to != transitions[state, byte]]
    transitions[state, byte] = rng.choice(others)


def lead_somewhere(rng: random.Random, transitions: Any, accepting: Any) -> None:
    state, byte = rng.choice(np.argwhere(transitions < 0).tolist())
    transitions[state, byte] = rng.randrange(len(transitions))


def end_elsewhere(rng: random.Random, transitions: Any, accepting: Any) -> None:
    accepting[rng.randrange(len(accepting))] ^= True


@pytest.mark.parametrize("spec", PROVEN, ids=str)
@pytest.mark.parametrize("change", [lead_elsewhere, lead_somewhere, end_elsewhere])
def test_a_table_with_an_error_differs(
    monkeypatch: pytest.MonkeyPatch, spec: dict[str, Any], change: Change
) -> None:
    rng, minimal = random.Random(5), dfa.minimal

    def changed(found: dfa.Dfa) -> Any:
        transitions, accepting = (array.copy() for array in minimal(found))
        change(rng, transitions, accepting)
        return transitions, accepting

    monkeypatch.setattr(build, "minimal", changed)
    assert [made("tiny", **spec) for _ in range(8)] == [build.DIFFERS] * 8


@pytest.mark.parametrize("spec", PROVEN, ids=str)
def test_a_mask_with_an_error_differs(spec: dict[str, Any]) -> None:
    """A bit of one state: all states are compared."""
    given = StructuredOutputs(**spec)
    compiled = COMPILERS["tiny"].compile(given)
    table, over_bytes = table_of("tiny", **spec), COMPILERS["tiny"].over_bytes(given)
    start = compiled.matcher()
    assert isinstance(start, Matcher)
    assert proof.differs(table, start, over_bytes) is None
    for state in range(len(table.text)):
        table.text[state, 3] ^= 1 << 7
        text = proof.differs(table, start, over_bytes)
        assert text is not None and table.after(0, text) == state
        table.text[state, 3] ^= 1 << 7
