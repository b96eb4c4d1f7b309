"""Chat templates: what transformers makes of them, and what a server must be safe from."""

from __future__ import annotations

import copy
import datetime
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from megatron_async.checkpoint.path import model_directory
from megatron_async.errors import CheckpointError, RequestError
from megatron_async.serving.chat import template_sandbox
from megatron_async.serving.chat.chat_messages import MAX_DEPTH
from megatron_async.serving.chat.chat_template import ChatTemplates
from megatron_async.serving.http.errors import param_of
from megatron_async.tokenizer.tokenizer import Tokenizer

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}

HEADERS = """\
{{ bos_token }}
{%- for message in messages %}
    {%- if message.role not in ("system", "user", "assistant", "tool") %}
        {{- raise_exception("no role " ~ message.role) }}
    {%- endif %}
    {{- "<|" ~ message.role ~ "|>\n" ~ message.content | trim ~ eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}{{ "<|assistant|>\n" }}{% endif %}
"""

FEATURES = """\
{% macro shown(value) %}[{{ value | tojson }}|{{ value | tojson(indent=2) }}]{% endmacro %}
{% set ns = namespace(seen=0) %}
{{ strftime_now("%Y") }}{{ undefined_name }}{{ date_string | default("no date") }}
{% if tools is not none %}{% for tool in tools %}{{ shown(tool) }}{% endfor %}{% endif %}
{% for document in documents or [] %}{{ document.title }}: {{ document["text"] }}
{% endfor %}
{% if messages[0]["role"] == "system" %}
    {% set rest = messages[1:] %}
{% else %}
    {% set rest = messages %}
{% endif %}
{% for message in rest %}
    {% if message.role == "tool" %}{% continue %}{% endif %}
    {% set ns.seen = ns.seen + 1 %}
    {% if ns.seen > 5 %}{% break %}{% endif %}
    {% if message.role == "assistant" %}
{% generation %}{{ message.content }}{% set inner = 1 %}{% endgeneration %}{{ inner }}
        {% for call in message.tool_calls %}
{{ loop.index }}/{{ loop.length }} {{ call.function.name }} {{ call.function.arguments | tojson }}
        {% endfor %}
    {% else %}
{{ message["content"].split("</think>")[-1].strip() }} {{ message.get("name", "?") }} {{- 2 * "-" }}
    {% endif %}
    {{- "(" ~ message.reasoning_content ~ message.thinking ~ ")" if message.reasoning_content }}
{% endfor %}
{% if add_generation_prompt -%}
answer{% if enable_thinking is defined and enable_thinking is false %} at once{% endif %}
{%- endif %}
"""

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Of a <place> & 'its' \"surroundings\", é",
            "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
        },
    }
]
CALLS = [
    {"id": "1", "type": "function", "function": {"name": "weather", "arguments": {"a": "<é>"}}}
]


def user(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **more}


def assistant(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def system(content: Any) -> dict[str, Any]:
    return {"role": "system", "content": content}


CHATS: dict[str, list[dict[str, Any]]] = {
    "one": [user("Hello <b>'é\"</b> ")],
    "system": [system("Be\nbrief."), user("Hello", name="Ann")],
    "turns": [user("a"), assistant("b\n"), user(" c "), assistant("d"), user("e"), assistant("f ")],
    "calls": [
        user("?"),
        assistant("", tool_calls=CALLS * 2),
        {"role": "tool", "content": "3"},
        user("!"),
    ],
    "reasoning": [user("?"), assistant("5", reasoning="because"), user("x</think>\ny")],
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "closed": {"add_generation_prompt": False},
    "tools": {"tools": TOOLS},
    "documents": {"documents": [{"title": "t", "text": "x"}]},
    "variables": {"chat_template_kwargs": {"enable_thinking": False, "date_string": "today"}},
}


def by_transformers(template: str, messages: list[dict[str, Any]], **options: Any) -> str:
    options.setdefault("add_generation_prompt", not options.get("continue_final_message"))
    options |= options.pop("chat_template_kwargs", {})
    chats = [copy.deepcopy(messages)]
    text: str
    (text,), _ = render_jinja_template(chats, chat_template=template, **options, **TOKENS)
    return text


def templates(source: str) -> ChatTemplates:
    return ChatTemplates({"default": source}, TOKENS)


def error_of(source: str, messages: Any, **options: Any) -> str:
    with pytest.raises(RequestError) as caught:
        templates(source).render_chat(messages, **options)
    return str(caught.value)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("chat", CHATS.values(), ids=CHATS)
@pytest.mark.parametrize("source", [HEADERS, FEATURES], ids=["headers", "features"])
def test_text_is_that_of_transformers(
    source: str, chat: list[dict[str, Any]], options: dict[str, Any]
) -> None:
    before = copy.deepcopy(chat)
    assert templates(source).render_chat(chat, **options) == by_transformers(
        source, chat, **options
    )
    assert chat == before


def test_features_show() -> None:
    """So that the comparison above is not of empty texts."""
    text = templates(FEATURES).render_chat(CHATS["calls"], TOOLS)
    assert str(datetime.date.today().year) in text
    assert '1/2 weather {"a": "<é>"}' in text and "Of a <place> & 'its'" in text
    assert text.endswith("answer")


@pytest.mark.parametrize("ending", ["", " ", "\n"])
def test_final_message_is_left_open(ending: str) -> None:
    chat = [user("a"), assistant("the beginning" + ending)]
    text = templates(HEADERS).render_chat(chat, continue_final_message=True)
    assert text == by_transformers(HEADERS, chat, continue_final_message=True)
    assert text.endswith("<|assistant|>\nthe beginning")
    whole = "{% for message in messages %}{{ message.content }}|{% endfor %}"
    text = templates(whole).render_chat(chat, continue_final_message=True)
    assert text == "a|the beginning" + ending


def test_final_message_that_cannot_be_continued_is_named() -> None:
    hides = "{% for message in messages[:-1] %}{{ message.content }}{% endfor %}"
    chat = [user("a"), assistant("b")]
    assert error_of(hides, chat, continue_final_message=True).startswith("messages[1]: ")
    upper = "{{ messages[-1].content | upper }}"
    assert error_of(upper, chat, continue_final_message=True).startswith("messages[1]: ")
    calls = [user("a"), assistant(None, tool_calls=CALLS)]
    assert error_of(HEADERS, calls, continue_final_message=True).startswith("messages[1]: ")
    both = error_of(HEADERS, chat, continue_final_message=True, add_generation_prompt=True)
    assert param_of(both) == "add_generation_prompt"


# --- content ------------------------------------------------------------------------------------

PARTS = [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}]
LOOPS = {
    "direct": "{% for message in messages %}{% for part in message.content %}",
    "item": "{% for message in messages %}{% for part in message['content'] | list %}",
    "variable": "{% for m in messages %}{% set c = m.content %}{% set d = c %}{% for part in d %}",
    "slice": "{% for message in messages %}{% for part in message.content[0:] %}",
}


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
def test_template_that_loops_over_parts_gets_them(loop: str) -> None:
    shows = templates(loop + "<{{ part.text }}>{% endfor %}{% endfor %}")
    assert shows.render_chat([user(PARTS), user("c")]) == "<a><b><c>"


def test_template_that_takes_text_and_parts_gets_what_was_sent() -> None:
    both = (
        "{% macro show(content) %}{% if content is string %}{{ content }}{% else %}"
        "{% for part in content %}<{{ part.text }}>{% endfor %}{% endif %}{% endmacro %}"
        "{% for message in messages %}{{ show(message.content) }}{% endfor %}"
    )
    assert templates(both).render_chat([user(PARTS), user("c")]) == "<a><b>c"


def test_other_templates_get_joined_text() -> None:
    joined = "{% for m in messages %}{{ m.content }}{% for x in m.content.split() %}{% endfor %}"
    text = templates(joined + "|{% endfor %}").render_chat([user(PARTS), user(["c", "d"])])
    assert text == "a\nb|c\nd|"


def test_arguments_of_calls_become_objects() -> None:
    function = {"name": "f", "arguments": '{"z": 1, "a": "<é>"}'}
    chat = [user("?"), assistant(None, tool_calls=[{"type": "function", "function": function}])]
    shows = "{{ messages[1].tool_calls[0].function.arguments | tojson }}"
    assert templates(shows).render_chat(chat) == '{"z": 1, "a": "<é>"}'
    assert function["arguments"] == '{"z": 1, "a": "<é>"}'


CONTENTS_TESTED_FOR_NONE = {
    "test": "{% if m.content is none %}",
    "item": "{% if m['content'] is none %}",
    "negated": "{% if not (m.get('content') is not none) %}",
    "comparison": "{% if m.content == none %}",
    "variable": "{% set c = m.content %}{% if c is none %}",
}


@pytest.mark.parametrize("asks", CONTENTS_TESTED_FOR_NONE.values(), ids=CONTENTS_TESTED_FOR_NONE)
@pytest.mark.parametrize("silent", [{"content": None}, {}, {"content": ""}])
def test_template_that_tests_for_none_sees_it(asks: str, silent: dict[str, Any]) -> None:
    source = (
        "{% for m in messages %}" + asks + "{% for t in m.tool_calls %}{{ '[' + t.function.name }}"
        "{% endfor %}{% else %}{{ '<' + m.content }}{% endif %}{% endfor %}"
    )
    call = {"function": {"name": "f", "arguments": "{}"}}
    chat = [user("a"), {"role": "assistant", **silent, "tool_calls": [call, call]}, user("")]
    assert templates(source).render_chat(chat) == "<a[f[f<"


JOINED = {
    "added": "{{ '<' + t.function.arguments + '>' }}",
    "item": "{{ '<' + t['function']['arguments'] + '>' }}",
    "concatenated": "{{ '<' ~ t.function.arguments ~ '>' }}",
    "variable": "{% set f = t.function %}{% set a = f.arguments %}{{ '<' + a + '>' }}",
    "macro": "{% macro show(x) %}{{ '<' + x + '>' }}{% endmacro %}{{ show(t.function.arguments) }}",
}


@pytest.mark.parametrize("joins", JOINED.values(), ids=JOINED)
def test_template_that_joins_arguments_gets_them_as_text(joins: str) -> None:
    source = "{% for t in messages[0].tool_calls %}" + joins + "{% endfor %}"
    calls = [
        {"function": {"name": "f", "arguments": arguments}}
        for arguments in ('{"z":  1, "a": "é"}', {"z": [None], "a": "é"}, None)
    ]
    text = templates(source).render_chat([assistant(None, tool_calls=calls)])
    assert text == '<{"z":  1, "a": "é"}><{"z": [null], "a": "é"}><{}>'


def test_template_that_writes_arguments_as_json_itself_gets_objects() -> None:
    source = (
        "{% set a = messages[0].tool_calls[0].function.arguments %}"
        "{{ 'text' + a if a is string else '<' + (a | tojson) + '>' }}"
    )
    call = {"function": {"name": "f", "arguments": '{"z":  1}'}}
    assert templates(source).render_chat([assistant(None, tool_calls=[call])]) == '<{"z": 1}>'


def test_developers_are_the_system_where_a_template_does_not_know_them() -> None:
    chat = [{"role": "developer", "content": "x"}]
    assert templates(HEADERS).render_chat(chat).startswith("<s><|system|>")
    knows = "{{ messages[0].role }}{# developer #}"
    assert templates(knows).render_chat(chat) == "developer"


# --- errors -------------------------------------------------------------------------------------

DEEP: list[Any] = []
for _ in range(MAX_DEPTH + 1):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    ("messages", "name"),
    [
        ("hello", "messages="),
        ([], "messages "),
        ([user("a"), "b"], "messages[1]="),
        ([user("a"), {"content": "b"}], "messages[1].role="),
        ([{"role": 3, "content": "b"}], "messages[0].role="),
        ([user(3)], "messages[0].content="),
        ([user([3])], "messages[0].content[0]="),
        ([user([{"type": "image_url"}])], "messages[0].content[0].type='image_url'"),
        ([user([{"type": "text"}])], "messages[0].content[0].text="),
        ([user([{"type": ["text"]}])], "messages[0].content[0].type="),
        ([user("a", more=DEEP)], "messages[0]: more than"),
        ([user("a"), user("b\ud83d")], "messages[1].content has a lone surrogate"),
        ([user([{"type": "text", "text": "\ud83d"}])], "messages[0].content[0].text has a lone"),
        ([user("a", **{"\ud83d": 1})], "messages[0] has a lone"),
        (
            [
                assistant(
                    "", tool_calls=[{"function": {"name": "f", "arguments": r'{"a": "\ud83d"}'}}]
                )
            ],
            "messages[0].tool_calls[0].function.arguments.a has a lone",
        ),
        ([user("a", more=object())], "messages[0].more: object"),
        ([assistant("a", tool_calls=3)], "messages[0].tool_calls="),
        ([assistant("a", tool_calls=[{}])], "messages[0].tool_calls[0].function"),
        (
            [assistant("a", tool_calls=[{"function": {"name": "f", "arguments": "{"}}])],
            "messages[0].tool_calls[0].function.arguments='{'",
        ),
        (
            [user("a"), {"role": "judge", "content": "b"}],
            "messages[1]: chat template: no role judge",
        ),
    ],
)
def test_errors_name_the_message(messages: Any, name: str) -> None:
    assert error_of(HEADERS, messages).startswith(name)


def test_variables_of_the_request_cannot_be_replaced() -> None:
    for name in ("messages", "tools", "add_generation_prompt", "chat_template"):
        said = error_of(HEADERS, [user("a")], chat_template_kwargs={name: 1})
        assert said.startswith(f"chat_template_kwargs.{name}: ")
    assert error_of(HEADERS, [user("a")], chat_template_kwargs=[1]).startswith("chat_template_kw")
    assert error_of(HEADERS, [user("a")], tools=[1]).startswith("tools ")
    assert error_of(HEADERS, [user("a")], documents="x").startswith("documents ")


GROWS = "{% set n = namespace(s='ab') %}{% for a in range(99) %}{% set n.s = "
ENDLESS = {
    "loops": (
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "0.2 s",
    ),
    "macros": (
        "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(99) }}",
        "it runs for more than 0.2 s",
    ),
    "output": (
        "{% for a in range(99999) %}{{ messages[0].content * 9999 }}{% endfor %}",
        "characters",
    ),
    "product": ("{{ messages[0].content * 99999999 }}", "characters"),
    "sum": (GROWS + "n.s + n.s %}{% endfor %}", "characters"),
    "join": (GROWS + "n.s ~ n.s %}{% endfor %}", "characters"),
    "power": ("{{ 10 ** 99999999 }}", "exponents"),
    "recursion": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
}


@pytest.mark.parametrize(("source", "reason"), ENDLESS.values(), ids=ENDLESS)
def test_template_without_an_end_is_stopped(
    source: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "0.2 s" in reason:
        monkeypatch.setattr(template_sandbox, "MAX_SECONDS", 0.2)
    said = error_of(source, [user("a")])
    assert said.startswith("messages: chat template: ") and reason in said


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ raise_exception.__globals__.json }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{% include 'x' %}",
    ],
)
def test_template_stays_in_its_sandbox(source: str) -> None:
    chat = [user("a")]
    assert error_of(source, chat).startswith("messages: chat template: ")
    assert chat == [user("a")]


def test_error_of_a_template_does_not_quote_whole_messages() -> None:
    quotes = "{{ raise_exception('refused: ' ~ messages[0].content) }}"
    said = error_of(quotes, [user("x" * 10_000)])
    assert "refused: xxx" in said and len(said) < 600


def test_template_that_python_cannot_compile_is_refused_at_once() -> None:
    nested = "{% for a in messages %}" * 30 + "{% endfor %}" * 30
    with pytest.raises(CheckpointError, match="'default'"):
        ChatTemplates({"default": nested})


def test_templates_with_errors_of_syntax_are_refused_at_once() -> None:
    with pytest.raises(CheckpointError, match="'default' line 2"):
        ChatTemplates({"default": "a\n{% if %}"})


# --- files --------------------------------------------------------------------------------------


def write_config(directory: Path, **values: Any) -> None:
    (directory / "tokenizer_config.json").write_text(json.dumps(values))


def shown(directory: Path, **options: Any) -> str:
    return ChatTemplates.from_directory(directory).render_chat([user("a")], **options)


def test_template_of_the_tokenizers_configuration(tmp_path: Path) -> None:
    bos = {"__type": "AddedToken", "content": "<b>"}
    source = "{{ bos_token }}{{ eos_token }}{{ messages[0].content }}"
    write_config(tmp_path, chat_template=source, bos_token=bos, eos_token=None)
    assert shown(tmp_path) == "<b>a"
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "<e>", "bos_token": "<x>"}')
    write_config(tmp_path, chat_template=source, bos_token=bos)
    assert shown(tmp_path) == "<b><e>a"


def test_several_named_templates(tmp_path: Path) -> None:
    named = [{"name": n, "template": n} for n in ("default", "tool_use", "rag")]
    write_config(tmp_path, chat_template=named)
    found = ChatTemplates.from_directory(tmp_path)
    assert found.names == ("default", "tool_use", "rag")
    assert shown(tmp_path) == found.source() == "default"
    assert shown(tmp_path, tools=TOOLS) == found.source(tools=True) == "tool_use"
    assert shown(tmp_path, tools=[]) == "default"
    assert shown(tmp_path, tools=TOOLS, template="rag") == "rag"
    with pytest.raises(RequestError, match=r"chat_template='x'.*default, tool_use, rag"):
        shown(tmp_path, template="x")


def test_files_of_their_own_go_first(tmp_path: Path) -> None:
    write_config(tmp_path, chat_template="configuration")
    (tmp_path / "chat_templates").mkdir()
    (tmp_path / "chat_templates" / "tool_use.jinja").write_text("tools")
    with pytest.raises(RequestError, match="tool_use"):
        shown(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("file é", encoding="utf-8")
    assert shown(tmp_path) == "file é"
    assert shown(tmp_path, tools=TOOLS) == "tools"
    other = tmp_path / "other.jinja"
    other.write_text("other")
    found = ChatTemplates.from_directory(tmp_path, chat_template=other)
    assert found.names == ("default",) and found.source() == "other"


def test_directory_without_a_template_says_so_when_it_is_asked(tmp_path: Path) -> None:
    assert ChatTemplates.from_directory(tmp_path).names == ()
    with pytest.raises(RequestError, match="no chat template"):
        shown(tmp_path)


@pytest.mark.parametrize(
    "value", [3, [3], [{"name": "a"}], [{"name": "a", "template": 3}], {"a": "b"}, "{% if %}"]
)
def test_corrupt_templates_are_errors_of_the_checkpoint(tmp_path: Path, value: Any) -> None:
    write_config(tmp_path, chat_template=value)
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        ChatTemplates.from_directory(tmp_path)


def test_file_that_is_not_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja"):
        ChatTemplates.from_directory(tmp_path)


# --- the embedded model -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny() -> Tokenizer:
    return Tokenizer.from_directory(model_directory("tiny"))


def test_begin_token_is_never_doubled(tiny: Tokenizer, tmp_path: Path) -> None:
    chat = [system("Be\nbrief"), user("def f():"), assistant("\n    pass\n"), user("def g():")]
    ids = ChatTemplates.from_directory("tiny").encode_chat(tiny, chat)
    assert tiny.bos_id is not None
    assert ids[0] == tiny.bos_id != ids[1]
    text = tiny.detokenize(ids, skip_special_tokens=False)
    begin, end = "<|begin|>", "<|endoftext|>"
    assert text == f"{begin}# Be\n# brief\ndef f():\n    pass\n{end}{begin}def g():"
    assert ids.count(tiny.bos_id) == ids.count(tiny.eos_ids[0]) + 1 == 2
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model_directory("tiny") / name, tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    without = ChatTemplates.from_directory(tmp_path).encode_chat(tiny, [user("a")])
    assert without == tiny.tokenize("a")


def test_template_of_the_embedded_model_is_as_transformers_renders_it(tiny: Tokenizer) -> None:
    ours = ChatTemplates.from_directory("tiny")
    tokens = {"bos_token": "<|begin|>", "eos_token": "<|endoftext|>"}
    chat = [*CHATS["calls"], system("x"), assistant("last")]
    (text,), _ = render_jinja_template(
        [copy.deepcopy(chat)],
        chat_template=ours.source(),
        tools=TOOLS,
        add_generation_prompt=True,
        **tokens,
    )
    assert ours.render_chat(chat, TOOLS) == text
    assert "<tool_call>" in text and text.endswith("last<|endoftext|>")


def test_token_ids_are_those_of_transformers(tiny: Tokenizer) -> None:
    """A special token that a user writes becomes its id too."""
    theirs = PreTrainedTokenizerFast.from_pretrained(model_directory("tiny"))
    for chat in (CHATS["turns"], [system("é"), user("a<|endoftext|>b")]):
        ids = theirs.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
        assert ChatTemplates.from_directory("tiny").encode_chat(tiny, chat) == ids


def test_text_that_is_no_unicode_is_refused(tiny: Tokenizer) -> None:
    with pytest.raises(RequestError, match="Unicode"):
        ChatTemplates.from_directory("tiny").encode_chat(tiny, [user("\ud800")])
