"""Messages in the forms that the templates of real models take."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.serving.test_chat_template import (
    CALLS,
    PARTS,
    assistant,
    error_of,
    templates,
    user,
)

READS = {
    "joined": "{{ '<' + m.content }}",
    "searched": "{% if '<' not in m.content %}{{ '<' + m['content'] }}{% endif %}",
    "method": "{{ '<' + m.content.split('|')[-1] }}",
    "filter": "{% set c = m.content %}{{ '<' + (c if c is string else c | tojson) }}",
    "length": "{% if m.content is none or m.content | length == 0 %}<{% endif %}"
    "{% if m.content | length > 0 %}{{ '<' + m.content }}{% endif %}",
}


@pytest.mark.parametrize("reads", READS.values(), ids=READS)
@pytest.mark.parametrize("silent", [{"content": None}, {}, {"content": ""}, {"content": []}])
def test_call_without_content_is_rendered_where_content_is_read(
    reads: str, silent: dict[str, Any]
) -> None:
    source = (
        "{% for m in messages %}" + reads + "{% for t in m.tool_calls %}"
        "{{ '[' + t.function.name }}{% endfor %}{% endfor %}"
    )
    call = {"function": {"name": "f", "arguments": "{}"}}
    chat = [user("a"), {"role": "assistant", **silent, "tool_calls": [call]}, user("b")]
    assert templates(source).render_chat(chat) == "<a<[f<b"


def test_call_without_content_has_no_parts() -> None:
    shows = "{% for m in messages %}[{% for part in m.content %}{{ part.text }}{% endfor %}]"
    calls = [user("a"), assistant(None, tool_calls=CALLS)]
    assert templates(shows + "{% endfor %}").render_chat(calls) == "[a][]"


def test_error_of_a_template_that_tests_for_none_is_its_own() -> None:
    refuses = "{% if messages[0].content is none %}{% endif %}{{ raise_exception('never') }}"
    assert error_of(refuses, [assistant(None, tool_calls=CALLS)]).endswith("never")


@pytest.mark.parametrize("role", ["system", "tool", "user", "assistant"])
def test_parts_are_texts_where_a_template_takes_texts(role: str) -> None:
    source = (
        "{% for m in messages %}{% if m.role != 'user' %}({{ m.content }})"
        "{% elif m.content is string %}({{ m.content }}){% else %}"
        "{% for part in m.content %}<{{ part.text }}>{% endfor %}{% endif %}{% endfor %}"
    )
    text = templates(source).render_chat([{"role": role, "content": PARTS}])
    assert text == ("<a><b>" if role == "user" else "(a\nb)")


def test_loop_over_calls_that_are_content_takes_no_parts() -> None:
    source = (
        "{% for m in messages %}{% if m.role == 'tool_calls' %}{% set calls = m.content %}"
        "{% for call in calls %}{{ call.function.name }}{% endfor %}"
        "{% else %}{{ '<' + m.content }}{% endif %}{% endfor %}{% if x is string %}{% endif %}"
    )
    assert templates(source).render_chat([user(PARTS)]) == "<a\nb"


LENGTHS = {
    "length": "{% if t.id | length != 9 %}{{ raise_exception('9') }}{% endif %}",
    "item": "{% if not t['id'] | length == 9 %}{{ raise_exception('9') }}{% endif %}",
    "count": "{% set i = t.id %}{% if i | count != 9 %}{{ raise_exception('9') }}{% endif %}",
}


@pytest.mark.parametrize("asks", LENGTHS.values(), ids=LENGTHS)
def test_ids_of_calls_have_the_length_that_a_template_asks_for(asks: str) -> None:
    source = (
        "{% for m in messages %}{% for t in m.tool_calls %}" + asks + "{{ t.id }}{% endfor %}"
        "{{ m.tool_call_id }}|{% endfor %}"
    )
    own = "call_0123456789abcdef"  # as this server makes them, but shorter
    call = {"id": own, "function": {"name": "f", "arguments": "{}"}}
    chat = [
        assistant(None, tool_calls=[call]),
        {"role": "tool", "content": "", "tool_call_id": own},
    ]
    assert templates(source).render_chat(chat) == "789abcdef|789abcdef|"
    free = source.replace(asks, "{% if t.id | length > 9 %}{% endif %}")
    assert templates(free).render_chat(chat) == f"{own}|{own}|"
    short = [assistant(None, tool_calls=[{**call, "id": "1"}])]
    assert error_of(source, short).endswith("9")


def test_empty_list_of_calls_is_none() -> None:
    source = "{% for m in messages %}{{ m.tool_calls is defined }}{% endfor %}"
    chat = [assistant("a", tool_calls=[]), assistant("a", tool_calls=CALLS)]
    assert templates(source).render_chat(chat) == "FalseTrue"
