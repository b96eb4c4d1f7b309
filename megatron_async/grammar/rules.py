"""What a text must conform to in the library's language."""

from __future__ import annotations

import json
from typing import Any

import llguidance

from megatron_async.grammar import ebnf
from megatron_async.grammar.bounds import check_multiples, with_bounds_of_doubles
from megatron_async.grammar.calls import Calls
from megatron_async.grammar.spec import StructuredOutputs

OPTIONS = '%llguidance {"no_forcing": true}\n'
"""A mask allows every token that the grammar does, not just one spelling of a forced text."""
WHITESPACE = r"[ \t]{0,2}(\r?\n[ \t]{0,40})?"
"""Between JSON's tokens, where nobody asks for another one: room to indent, and not to fill a
length with blanks."""


def rules_of(spec: StructuredOutputs) -> str:
    """The rules of a spec.

    Raises:
        ValueError, RecursionError: it has none; says why.
    """
    message = _message(spec)
    if spec.calls is None:
        return OPTIONS + message
    calls = Calls.from_json(spec.calls)
    own = _json(calls.schema, StructuredOutputs(json_object=True))
    message = message.replace("start:", "message:", 1)
    return f"{OPTIONS}start: message | calls\n{message}\n{calls.rules(own)}"


def _message(spec: StructuredOutputs) -> str:
    if spec.grammar is not None:
        return ebnf.to_lark(spec.grammar)
    if spec.regex is not None or spec.choice is not None:
        regex = spec.regex
        if regex is None:
            regex = "|".join(map(ebnf.escaped, dict.fromkeys(spec.choice or ())))
        grammar = json.loads(llguidance.LLMatcher.grammar_from_regex(regex))
        return str(grammar["grammars"][0]["lark_grammar"])
    schema = {"type": "object"} if spec.json is None else _parsed_schema(str(spec.json))
    return f"start: %json {_json(schema, spec)}"


def _json(schema: dict[str, Any], spec: StructuredOutputs) -> str:
    """A schema with the whitespace of ``spec``, and bounds of what a parser reads."""
    options: dict[str, Any] = {"whitespace_flexible": not spec.disable_any_whitespace}
    if not spec.disable_any_whitespace:
        options["whitespace_pattern"] = spec.whitespace_pattern or WHITESPACE
    check_multiples(schema)
    schema = with_bounds_of_doubles(schema)
    return json.dumps(schema | {"x-guidance": options}, allow_nan=False)


def _parsed_schema(text: str) -> dict[str, Any]:
    try:
        schema = json.loads(text)
    except json.JSONDecodeError as error:
        said = f"the schema is no JSON: line {error.lineno}, column {error.colno}"
        raise ValueError(said) from None
    except RecursionError:
        raise ValueError("its parts lie too deep inside each other") from None
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise ValueError("a schema is a JSON object, or true")
    return schema
