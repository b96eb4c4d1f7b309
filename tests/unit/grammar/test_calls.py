"""A text that is a message of some format, or calls of tools."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from megatron_async.errors import RequestError
from megatron_async.grammar.calls import Calls
from megatron_async.grammar.compiler import GrammarCompiler
from megatron_async.grammar.matcher import Matcher
from megatron_async.grammar.spec import StructuredOutputs
from megatron_async.serving.chat.answers.tool_calls import ToolCallParser
from megatron_async.serving.chat.answers.tool_format import ToolFormat
from megatron_async.serving.chat.tool_choice import calls_beside_format, checked_tools
from tests.unit.grammar.test_grammar import COMPILERS, walk

HERMES, LLAMA3 = ToolFormat.HERMES, ToolFormat.LLAMA3
CITY = {"type": "object", "properties": {"city": {"enum": ["Rom"]}}, "required": ["city"]}
TOOLS = checked_tools(
    [
        {"type": "function", "function": {"name": "weather", "parameters": CITY}},
        {"type": "function", "function": {"name": "stop"}},
    ]
)
MESSAGES: dict[str, dict[str, Any]] = {
    "schema": {"json": {"type": "object", "properties": {"n": {"type": "integer"}},
                        "required": ["n"], "additionalProperties": False}},
    "object": {"json_object": True},
    "regex": {"regex": "yes|no"},
    "choice": {"choice": ["yes", "no"]},
    "grammar": {"grammar": 'root ::= "(" root ")" | "x"'},
}  # fmt: skip
TEXTS = {"schema": '{"n": 3}', "object": "{}", "regex": "yes", "choice": "no", "grammar": "((x))"}
HERMES_CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rom"}}\n</tool_call>'
LLAMA_CALL = '{"name": "weather", "parameters": {"city": "Rom"}}'


def compiled_with(
    format: ToolFormat, message: dict[str, Any], tools: Sequence[Any] = TOOLS, parallel: bool = True
) -> Any:
    places = {tool["function"]["name"]: f"tools[{n}].place" for n, tool in enumerate(tools)}
    calls = calls_beside_format(tools, format, parallel=parallel, places=places)
    return compiler().compile(StructuredOutputs(**message, calls=calls))


def compiler() -> GrammarCompiler:
    return COMPILERS["byte_level"]


def takes(matcher: Matcher, text: str) -> bool:
    return all(map(matcher.accept, text.encode())) and matcher.is_complete


@pytest.mark.parametrize("kind", MESSAGES)
@pytest.mark.parametrize(("format", "call"), [(HERMES, HERMES_CALL), (LLAMA3, LLAMA_CALL)])
def test_a_text_is_a_message_of_its_format_or_calls(
    kind: str, format: ToolFormat, call: str
) -> None:
    compiled = compiled_with(format, MESSAGES[kind])
    between = ";" if format is LLAMA3 else "\n"
    for text in (TEXTS[kind], call, call + between + call):
        assert takes(compiled.matcher(), text), text
    wrong = [TEXTS[kind] + call, "some text", "", call.replace("Rom", "Ulm")]
    if kind == "object" and format is LLAMA3:
        wrong = [TEXTS[kind] + call, "some text", ""]
    for text in wrong:
        assert not takes(compiled.matcher(), text), text


@pytest.mark.parametrize(("format", "call"), [(HERMES, HERMES_CALL), (LLAMA3, LLAMA_CALL)])
def test_one_call_comes_where_calls_are_not_parallel(format: ToolFormat, call: str) -> None:
    compiled = compiled_with(format, MESSAGES["regex"], parallel=False)
    assert takes(compiled.matcher(), call)
    assert not takes(compiled.matcher(), call + ";" + call)
    assert not takes(compiled.matcher(), call + "\n" + call)


@pytest.mark.parametrize("format", [HERMES, LLAMA3])
def test_what_may_come_is_parsed_as_what_it_is(format: ToolFormat) -> None:
    """Random texts: a call of a known tool, or the message as it was."""
    compiled = compiled_with(format, MESSAGES["schema"])
    calls = messages = 0
    for seed in range(40):
        text = walk(compiled, "byte_level", seed, most=20_000)
        parser = ToolCallParser(format, names=("weather", "stop"))
        deltas = parser.push(text) + parser.finish()
        if parser.call_count:
            calls += 1
            assert not any(isinstance(delta, str) for delta in deltas)
        else:
            messages += 1
            assert set(json.loads(text)) == {"n"} and deltas == [text]
    assert calls and messages


def test_a_tool_whose_schema_is_at_fault_is_named() -> None:
    bad = checked_tools([{"function": {"name": "f", "parameters": {"not": {}}}}])
    with pytest.raises(RequestError, match=r"^tools\[0\]\.place: not is not supported"):
        compiled_with(HERMES, MESSAGES["schema"], bad)


def test_a_format_that_is_at_fault_is_named_though_there_are_tools() -> None:
    with pytest.raises(RequestError, match=r"^structured_outputs\.json: not is not supported"):
        compiled_with(HERMES, {"json": {"not": {}}})


@pytest.mark.parametrize("calls", ["", "{", "[]", "3", "{}", '{"schema": 3}', '{"a": 1}'])
def test_calls_of_another_form_are_refused(calls: str) -> None:
    with pytest.raises(RequestError, match=r"structured_outputs\.calls"):
        StructuredOutputs(regex="a", calls=calls)


def test_calls_come_back_from_their_text() -> None:
    calls = Calls(schema={"type": "object"}, begin="<", end=">", several=False)
    assert Calls.from_json(calls.to_json()) == calls
