"""Tool calls in a stream of text, and what a request may ask for."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_async.checkpoint.path import model_directory
from megatron_async.errors import RequestError
from megatron_async.grammar.compiler import GrammarCompiler
from megatron_async.grammar.spec import StructuredOutputs
from megatron_async.serving.chat.answers.json_scanner import JsonScanner, State
from megatron_async.serving.chat.answers.tool_calls import (
    Delta,
    ToolCallDelta,
    ToolCallParser,
    new_call_id,
)
from megatron_async.serving.chat.answers.tool_format import ToolFormat, tool_format_of
from megatron_async.serving.chat.chat_template import ChatTemplates
from megatron_async.serving.chat.tool_choice import (
    MAX_TOOLS,
    checked_tool_choice,
    checked_tools,
    structured_outputs_for,
)
from megatron_async.serving.http.errors import param_of
from megatron_async.tokenizer.tokenizer import Tokenizer

HERMES, LLAMA3, JSON = ToolFormat.HERMES, ToolFormat.LLAMA3, ToolFormat.JSON
Calls = list[tuple[str, str]]


def parse(format: ToolFormat, parts: Iterable[str], **options: Any) -> tuple[str, Calls]:
    """Content, and name and arguments of each call, as a client joins them from the deltas."""
    parser = ToolCallParser(format, **options)
    deltas: list[Delta] = []
    for part in parts:
        deltas += parser.push(part)
    deltas += parser.finish()
    content, calls = "", []
    for delta in deltas:
        assert delta != ""
        if isinstance(delta, str):
            content += delta
        elif delta.index == len(calls):
            assert delta.id is not None and delta.name
            calls.append([delta.name, delta.arguments])
        else:
            assert delta.index == len(calls) - 1 and delta.id is delta.name is None
            calls[-1][1] += delta.arguments
    assert parser.call_count == len(calls)
    return content, [(name, arguments) for name, arguments in calls]


F, G = ("f", '{"a": 1}'), ("g", '{"s": "x</tool_call>\\"}"}')


def hermes(name: str, arguments: str, space: str = "\n") -> str:
    call = f'{{"name": "{name}", "arguments": {arguments}}}'
    return f"<tool_call>{space}{call}{space}</tool_call>"


def llama3(name: str, arguments: str) -> str:
    return f'{{"name": "{name}", "parameters": {arguments}}}'


CASES: dict[str, tuple[ToolFormat, str, str, Calls]] = {
    "text": (HERMES, " just <b>text</b> ", " just <b>text</b> ", []),
    "one": (HERMES, hermes(*F), "", [F]),
    "no space": (HERMES, hermes(*F, ""), "", [F]),
    "text before": (HERMES, "Let me see.\n\n" + hermes(*F), "Let me see.", [F]),
    "several": (HERMES, hermes(*F) + "\n" + hermes(*G) + "\n", "", [F, G]),
    "text between": (HERMES, hermes(*F) + " and " + hermes(*G), " and", [F, G]),
    "text after": (HERMES, hermes(*F) + "\nDone.", "\nDone.", [F]),
    "no closing": (HERMES, hermes(*F).removesuffix("</tool_call>"), "", [F]),
    "other order": (HERMES, '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', "", [F]),
    "parameters": (HERMES, f"<tool_call>{llama3(*F)}</tool_call>", "", [F]),
    "more keys": (
        HERMES,
        '<tool_call>{"id": [1, {"name": 2}], "name": "f", "x": -1.5e3, "arguments": {"a": 1}}',
        "",
        [F],
    ),
    "no arguments": (HERMES, '<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    "null": (HERMES, '<tool_call>{"arguments": null,"name": "f"}', "", [("f", "{}")]),
    "arguments as text": (
        HERMES,
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
        "",
        [F],
    ),
    "raw newline": (HERMES, hermes("f", '{"s": "a\nb"}'), "", [("f", '{"s": "a\\nb"}')]),
    "marker twice": (HERMES, "<tool_call>" + hermes(*F), "<tool_call>", [F]),
    "started anew": (
        HERMES,
        '<tool_call>{"name": ' + hermes(*F),
        '<tool_call>{"name": ',
        [F],
    ),
    "almost a marker": (HERMES, "a <tool_cal <tool_call", "a <tool_cal <tool_call", []),
    "no json": (HERMES, "<tool_call>f(1)</tool_call>", "<tool_call>f(1)</tool_call>", []),
    "bad json": (HERMES, hermes("f", "{a: 1}"), hermes("f", "{a: 1}"), []),
    "no name": (HERMES, '<tool_call>{"arguments": {}}', '<tool_call>{"arguments": {}}', []),
    "name no text": (HERMES, '<tool_call>{"name": 3}', '<tool_call>{"name": 3}', []),
    "bad arguments": (HERMES, hermes("f", "[1]"), hermes("f", "[1]"), []),
    "cut off before": (HERMES, 'a <tool_call>{"name": "f"', 'a <tool_call>{"name": "f"', []),
    "cut off": (HERMES, hermes("f", '{"a": 12')[:46], "", [("f", '{"a": 1')]),
    "brace missing": (HERMES, hermes(*F).replace("}}", "}"), "", [F]),
    "broken within": (HERMES, hermes("f", '{"a": x}'), "x}}\n</tool_call>", [("f", '{"a": ')]),
    "llama": (LLAMA3, llama3(*F), "", [F]),
    "llama several": (LLAMA3, f"\n{llama3(*F)}; {llama3(*G)}\n", "", [F, G]),
    "llama tag": (LLAMA3, f"<|python_tag|>{llama3(*F)};{llama3(*G)}", "", [F, G]),
    "llama text and tag": (LLAMA3, f"I call <|python_tag|>{llama3(*F)}", "I call", [F]),
    "llama type": (LLAMA3, '{"type": "function", ' + llama3(*F)[1:], "", [F]),
    "llama json": (LLAMA3, '{"name": "John", "age": 3}', '{"name": "John", "age": 3}', []),
    "llama json in text": (LLAMA3, f"So: {llama3(*F)}", f"So: {llama3(*F)}", []),
    "llama code": (LLAMA3, "<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
    "llama then text": (LLAMA3, f"{llama3(*F)}; or not", "; or not", [F]),
    "list": (JSON, f"[{llama3(*F)},\n {llama3(*G)}]\n", "", [F, G]),
    "list of none": (JSON, "[]", "[]", []),
    "list and more": (JSON, f"[{llama3(*F)}] x", " x", [F]),
    "no list": (JSON, "null", "null", []),
}


@pytest.mark.parametrize(("format", "text", "content", "calls"), CASES.values(), ids=CASES)
def test_calls_and_content(format: ToolFormat, text: str, content: str, calls: Calls) -> None:
    assert parse(format, [text]) == (content, calls)


@pytest.mark.parametrize(("format", "text", "content", "calls"), CASES.values(), ids=CASES)
def test_each_way_to_divide_a_text_in_two_gives_the_same(
    format: ToolFormat, text: str, content: str, calls: Calls
) -> None:
    for at in range(len(text) + 1):
        assert parse(format, [text[:at], text[at:]]) == (content, calls), at
    assert parse(format, list(text)) == (content, calls)


PIECES = st.sampled_from(
    [
        *'{}[]"\\:,; \nax1<',
        *("<tool_call>", "</tool_call>", "<|python_tag|>", '"name"', '"f"', '"arguments"'),
        *('{"name": "f", "parameters": {', hermes(*F), llama3(*G), "text "),
    ]
)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(ToolFormat), st.lists(PIECES, max_size=20), st.data())
def test_any_way_to_divide_a_text_gives_the_same(
    format: ToolFormat, pieces: list[str], data: st.DataObject
) -> None:
    text = "".join(pieces)
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8).map(sorted))
    parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = parse(format, [text])
    assert parse(format, parts) == whole
    # What was written is content, in a call, or of the frame around calls.
    if not whole[1]:
        assert whole[0] == text


def test_content_and_arguments_come_as_early_as_they_can() -> None:
    parser = ToolCallParser("hermes", new_id=lambda: "call_1")
    assert parser.push("Let me <") == ["Let me"]
    assert parser.push("b>see. <tool") == [" <b>see."]
    assert parser.push('_call>{"name": "f", ') == []
    assert parser.push('"arguments": {') == []
    first = ToolCallDelta(0, "call_1", "f", '{"a"')
    assert parser.push('"a"') == [first]
    assert parser.push(': "x') == [ToolCallDelta(0, arguments=': "x')]
    assert parser.push('"}}') == [ToolCallDelta(0, arguments='"}')]
    assert parser.push("</tool") == []
    assert parser.push("_call> ok") == [" ok"]
    assert parser.finish() == []
    assert parser.call_count == 1


def test_bare_json_is_a_call_of_a_known_tool_alone() -> None:
    text = llama3(*F)
    assert parse(LLAMA3, [text], names=["f"]) == ("", [F])
    assert parse(LLAMA3, [text], names=["g"]) == (text, [])
    assert parse(LLAMA3, ["<|python_tag|>" + text], names=["g"]) == ("", [F])
    assert parse(LLAMA3, ['{"name": "f"}'], names=["f"]) == ("", [("f", "{}")])
    assert parse(LLAMA3, ['{"name": "f"}']) == ('{"name": "f"}', [])
    assert parse(HERMES, [hermes(*F)], names=["g"]) == ("", [F])


@pytest.mark.parametrize("key", ["name", "arguments"])
def test_numbers_too_large_for_python_are_content(key: str) -> None:
    text = f'<tool_call>{{"name": "f", "{key}": {"1" * 5000}}}'
    assert parse(HERMES, [text]) == (text, [])


def test_ids_are_new() -> None:
    ids = {new_call_id() for _ in range(100)}
    assert len(ids) == 100
    assert all(re.fullmatch("call_[0-9a-f]{24}", each) for each in ids)


# --- the scanner --------------------------------------------------------------------------------


def scan(text: str) -> bool:
    """The text is one JSON value; a number at the end needs something behind it."""
    scanner = JsonScanner()
    return all(map(scanner.feed, text + " ")) and scanner.state is State.DONE


VALUES = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda each: st.lists(each, max_size=3) | st.dictionaries(st.text(), each, max_size=3),
)


@settings(max_examples=150, deadline=None)
@given(VALUES, st.booleans(), st.data())
def test_scanner_takes_json_and_nothing_else(
    value: Any, escaped: bool, data: st.DataObject
) -> None:
    text = json.dumps(value, ensure_ascii=escaped, indent=data.draw(st.sampled_from([None, 1])))
    assert scan(text)
    at = data.draw(st.integers(0, len(text) - 1))
    changed = text[:at] + data.draw(st.sampled_from(["", *'{}[]",:\\x01-.e'])) + text[at + 1 :]
    try:
        json.loads(changed, strict=False)
    except ValueError:
        assert not scan(changed)
    else:
        assert scan(changed)


@pytest.mark.parametrize("text", ["01", "1.", "-", "+1", "tru", "NaN", "Infinity", "\\", '"\\x"'])
def test_scanner_refuses(text: str) -> None:
    assert not scan(text) and not scan(f"[{text}]")


def test_scanner_bounds_the_depth() -> None:
    assert scan("[" * 128 + "]" * 128)
    assert not scan("[" * 129 + "]" * 129)


# --- formats and choices ------------------------------------------------------------------------

LLAMA_HEAD = "<|start_header_id|>{{ role }}<|end_header_id|>"


@pytest.mark.parametrize(
    ("template", "format"),
    [
        ("{{ messages }}", None),
        ("within <tool_call></tool_call>", HERMES),
        ("<tool_call>\n<function=name>", None),
        ("<tool_call>name\n<arg_key>", None),
        (LLAMA_HEAD, None),
        (LLAMA_HEAD + '{"name": "f", "parameters": {}}', LLAMA3),
        ("<|python_tag|>", LLAMA3),
        ("[TOOL_CALLS]", None),
    ],
)
def test_format_follows_from_the_template(template: str, format: ToolFormat | None) -> None:
    assert tool_format_of(template) is format


def test_format_of_the_embedded_model() -> None:
    assert tool_format_of(ChatTemplates.from_directory("tiny").source(tools=True)) is HERMES


def function(name: Any, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


NODE = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}
TREE = {"type": "object", "properties": {"root": {"$ref": "#/$defs/node"}}, "$defs": {"node": NODE}}
NUMBER = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
TOOLS = [function("grow", parameters=TREE), function("square", parameters=NUMBER), function("now")]


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(Tokenizer.from_directory(model_directory("tiny")), 264, [256])


def accepts(compiler: GrammarCompiler, structure: dict[str, Any], text: str) -> bool:
    """The whole text conforms."""
    matcher = compiler.compile(StructuredOutputs(**structure)).matcher()
    return all(matcher.accept(byte) for byte in text.encode()) and matcher.accept(256)


SQUARE = '{"name": "square", "arguments": {"x": 3}}'
GROW = '{"name": "grow", "arguments": {"root": {"next": {"next": {}}}}}'
NOW = '{"name": "now", "arguments": {}}'


@pytest.mark.parametrize(
    ("choice", "text", "conforms"),
    [
        ("required", f"[{SQUARE}]", True),
        ("required", f"[{GROW}, {NOW}, {SQUARE}]", True),
        ("required", "[]", False),
        ("required", SQUARE, False),
        ("required", "[" + SQUARE.replace("3", '"3"') + "]", False),
        ("required", "[" + GROW.replace("{}", "3") + "]", False),
        ("required", '[{"name": "other", "arguments": {}}]', False),
        (function("square"), f"[{SQUARE}]", True),
        (function("square"), f"[{SQUARE}, {SQUARE}]", False),
        (function("square"), f"[{NOW}]", False),
        ({"type": "function", "name": "now"}, f"[{NOW}]", True),
    ],
)
def test_required_calls_conform_to_their_schemas(
    compiler: GrammarCompiler, choice: Any, text: str, conforms: bool
) -> None:
    structure = structured_outputs_for(TOOLS, choice)
    assert structure is not None
    assert accepts(compiler, structure, text) == conforms
    if conforms:
        content, calls = parse(JSON, [text])
        assert content == "" and len(calls) == len(json.loads(text))


def test_one_call_at_a_time(compiler: GrammarCompiler) -> None:
    structure = structured_outputs_for(TOOLS, "required", parallel=False)
    assert structure is not None
    assert accepts(compiler, structure, f"[{NOW}]")
    assert not accepts(compiler, structure, f"[{NOW}, {NOW}]")


X = {"type": "integer"}
OF_X = {"$ref": "#/$defs/x"}
REFERRING: dict[str, dict[str, Any]] = {
    "id": {"$id": "https://a.b/s", "properties": {"x": OF_X}, "$defs": {"x": X}},
    "absolute": {
        **{"$id": "https://a.b/s", "properties": {"x": {"$ref": "https://a.b/s#/$defs/x"}}},
        "$defs": {"x": X},
    },
    "relative": {
        **{"$id": "https://a.b/s", "properties": {"x": {"$ref": "x"}}},
        "$defs": {"y": {"$id": "x", **X}},
    },
    "anchor": {"properties": {"x": {"$ref": "#it"}}, "$defs": {"y": {"$anchor": "it", **X}}},
    "nested": {
        "properties": {
            "x": {"definitions": {"y": X}, "$ref": "#/properties/x/definitions/y"},
        }
    },
    "resource within": {"properties": {"x": {"$id": "urn:z", **OF_X, "$defs": {"x": X}}}},
    "generated": {
        **{"$schema": "http://json-schema.org/draft-07/schema#", "$ref": "#/definitions/A"},
        "definitions": {"A": {"type": "object", "properties": {"x": X}}},
    },
    "const": {"properties": {"x": X, "y": {"const": {"$ref": "#/y"}}}},
    "enum": {"properties": {"x": X, "y": {"enum": [1, {"$ref": "#", "$id": "https://a.b/s"}]}}},
}


@pytest.mark.parametrize("schema", REFERRING.values(), ids=REFERRING)
def test_references_within_a_tools_schema_stay_its_own(
    compiler: GrammarCompiler, schema: dict[str, Any]
) -> None:
    """Beside another tool that has the same ids for something else."""
    other = {"$id": "https://a.b/s", "properties": {"x": OF_X}, "$defs": {"x": {"type": "null"}}}
    for tools in (
        [function("f", parameters=schema), function("g", parameters=other)],
        [function("g", parameters=other), function("f", parameters=schema)],
    ):
        structure = structured_outputs_for(tools, "required")
        assert structure is not None

        def takes(name: str, arguments: Any, made: dict[str, Any] = structure) -> bool:
            call = {"name": name, "arguments": arguments}
            return accepts(compiler, made, json.dumps([call]))

        assert takes("f", {"x": 3}) and not takes("f", {"x": "3"}) and not takes("f", {"x": None})
        assert takes("g", {"x": None}) and not takes("g", {"x": 3})
        said = schema.get("properties", {}).get("y")
        if said is not None:
            assert takes("f", {"x": 1, "y": said.get("const", said.get("enum", [0])[-1])})
            assert not takes("f", {"x": 1, "y": {"$ref": "#/$defs/0"}})


def test_errors_of_a_schema_name_its_tool(compiler: GrammarCompiler) -> None:
    bad = {"type": "object", "properties": {"x": {"$ref": "#/$defs/none"}}}
    structure = structured_outputs_for([*TOOLS, function("bad", parameters=bad)], "required")
    assert structure is not None
    with pytest.raises(RequestError, match=r"^tools\[3\]\.function\.parameters: ") as raised:
        compiler.compile(StructuredOutputs(**structure))
    assert "structured_outputs" not in str(raised.value)
    assert param_of(str(raised.value)) == "tools[3].function.parameters"


@pytest.mark.parametrize("choice", [None, "auto", "none"])
def test_free_answers_have_no_structure(choice: str | None) -> None:
    assert structured_outputs_for(TOOLS, choice) is None
    assert structured_outputs_for(None, choice) is None
    assert checked_tool_choice(TOOLS, choice).mode == (choice or "auto")
    assert checked_tool_choice([], choice).mode == "none"


def test_flat_functions_are_brought_into_one_form() -> None:
    flat = [{"type": "function", "name": "f", "parameters": NUMBER, "strict": True}]
    assert checked_tools(flat) == [function("f", parameters=NUMBER, strict=True)]


@pytest.mark.parametrize(
    ("tools", "choice", "name"),
    [
        ([3], None, "tools[0]="),
        ("f", None, "tools="),
        ([function("f"), {"type": "browser"}], None, "tools[1].type='browser'"),
        ([{"type": "function", "function": 3}], None, "tools[0].function="),
        ([function(3)], None, "tools[0].function.name="),
        ([function("a b")], None, "tools[0].function.name='a b'"),
        ([function("f", parameters=[1])], None, "tools[0].function.parameters="),
        ([function("f"), function("f")], None, "tools[1].function.name='f' is there twice"),
        ([function(f"f{n}") for n in range(MAX_TOOLS + 1)], None, "tools: "),
        ([], "required", "tool_choice='required' needs tools"),
        (TOOLS, "always", "tool_choice='always'"),
        (TOOLS, 3, "tool_choice=3"),
        (TOOLS, {"type": "function"}, "tool_choice="),
        (TOOLS, {"type": "function", "function": 3}, "tool_choice="),
        (TOOLS, function(["f"]), "tool_choice="),
        (TOOLS, function("f"), "tool_choice='f' names no tool; there are grow, square, now"),
    ],
)
def test_errors_name_the_field(tools: Any, choice: Any, name: str) -> None:
    with pytest.raises(RequestError, match=re.escape(name)):
        structured_outputs_for(tools, choice)
