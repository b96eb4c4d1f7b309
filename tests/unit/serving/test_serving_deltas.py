"""What a stream brings bit by bit adds up to the whole answer."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from tokenizers import decoders, models, pre_tokenizers

from megatron_async.serving.front_end.choice_text import ChoiceText
from megatron_async.serving.messages import Output
from megatron_async.tokenizer.tokenizer import Tokenizer
from tests.support.http_api import TOOL, USER, chat, completion, events_of, post
from tests.support.scripted_client import ScriptedClient, say, tiny_tokenizer
from tests.support.served import PlainTemplates

CALL = '<tool_call>{"name": "f", "arguments": {"a": [1, "b"]}}</tool_call>'
texts = st.lists(
    st.sampled_from(["a", " ", "\n", "é", "{", "<tool_call>", CALL, CALL[:40]]), max_size=5
).map("".join)


@given(
    said=st.tuples(texts, texts),
    sizes=st.lists(st.sampled_from([1, 2, 5, 60, 500]), min_size=1, max_size=4),
    end=st.sampled_from(["stop", "length", "timeout"]),
    tools=st.booleans(),
)
@settings(max_examples=25, deadline=None)
def test_deltas_of_a_chat_add_up_to_its_message(
    said: tuple[str, str], sizes: list[int], end: str, tools: bool
) -> None:
    tokenizer = tiny_tokenizer()
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": "a"}],
        **{"n": 2, "logprobs": True, "top_logprobs": 2, "return_token_ids": True},
    }
    if tools:
        body["tools"] = [TOOL]

    def ask(**more: Any) -> str:
        client = ScriptedClient(tokenizer, said, sizes=sizes, end=end)
        return say(client, "/v1/chat/completions", {**body, **more}).text

    whole = json.loads(ask())
    ChatCompletion.model_validate(whole)
    lines = [line[6:] for line in ask(stream=True).splitlines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    made: list[dict[str, Any]] = [
        {"content": "", "calls": [], "logprobs": [], "ids": []} for _ in whole["choices"]
    ]
    for chunk in map(json.loads, lines):
        ChatCompletionChunk.model_validate(chunk)
        (choice,) = chunk["choices"]
        mine = made[choice["index"]]
        assert "finish_reason" not in mine
        mine["content"] += choice["delta"].get("content", "")
        for call in choice["delta"].get("tool_calls", ()):
            if "id" in call:
                assert call["index"] == len(mine["calls"])
                mine["calls"].append({"name": call["function"]["name"], "arguments": ""})
            mine["calls"][call["index"]]["arguments"] += call["function"]["arguments"]
        mine["logprobs"] += (choice["logprobs"] or {"content": []})["content"]
        mine["ids"] += choice.get("token_ids", [])
        if choice["finish_reason"] is not None:
            mine |= {"finish_reason": choice["finish_reason"], "stop_reason": choice["stop_reason"]}
    for mine, choice in zip(made, whole["choices"], strict=True):
        message = choice["message"]
        assert mine["content"] == (message["content"] or "")
        calls = [call["function"] for call in message.get("tool_calls", ())]
        assert mine["calls"] == calls and (tools or not calls)
        assert mine["logprobs"] == (choice["logprobs"] or {"content": []})["content"]
        assert mine["ids"] == choice["token_ids"]
        for name in ("finish_reason", "stop_reason"):
            assert mine[name] == choice[name]


def marking_tokenizer(kind: str) -> Tokenizer:
    """One whose markers of calls are special tokens, with bytes or words that begin with spaces."""
    if kind == "bytes":
        made = tokenizers.Tokenizer.from_str(tiny_tokenizer()._tokenizer.to_str())
    else:
        words = {chr(code): number for number, code in enumerate(range(33, 127))}
        made = tokenizers.Tokenizer(models.BPE({**words, "▁": len(words)}, []))
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        made.decoder = decoders.Metaspace(prepend_scheme="first")
    made.add_special_tokens(["<tool_call>", "</tool_call>", "<|python_tag|>", "<|end|>"])
    return Tokenizer(made)


LLAMA_CALL = '<|python_tag|>{"name": "f", "parameters": {"a": [1, "b"]}}'


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", ["bytes", "words"])
@pytest.mark.parametrize(
    ("template", "text", "content", "count"),
    [
        ("<tool_call>", f"So: {CALL}{CALL}", "So:", 2),
        ("<tool_call>", "a <tool_call>b</tool_call><|end|>", "a b", 0),
        ("<|python_tag|>", f"So: {LLAMA_CALL}", "So:", 1),
        ("<|python_tag|>", "a <|python_tag|>print(1)", "a print(1)", 0),
    ],
)
def test_markers_that_are_special_tokens_mark_calls_and_are_not_shown(
    kind: str, template: str, text: str, content: str, count: int, stream: bool
) -> None:
    tokenizer = marking_tokenizer(kind)
    body = {"messages": [{"role": "user", "content": "a"}], "tools": [TOOL], "stream": stream}
    client = ScriptedClient(tokenizer, [text], sizes=[1, 3])
    answer = say(client, "/v1/chat/completions", body, PlainTemplates(template)).text
    if stream:
        lines = [line[6:] for line in answer.splitlines() if line.startswith("data: {")]
        parts = [json.loads(line)["choices"][0]["delta"] for line in lines]
    else:
        parts = [json.loads(answer)["choices"][0]["message"]]
    assert "".join(part.get("content") or "" for part in parts).strip() == content
    calls = [call for part in parts for call in part.get("tool_calls", ())]
    assert len([call for call in calls if "id" in call]) == count
    arguments = "".join(call["function"]["arguments"] for call in calls)
    assert arguments.replace(" ", "") == '{"a":[1,"b"]}' * count


@given(cuts=st.lists(st.integers(1, 9), min_size=1, max_size=4), late=st.integers(0, 5))
@settings(max_examples=40, deadline=None)
def test_markers_stand_where_they_were_in_text_that_the_engine_cut(
    cuts: list[int], late: int
) -> None:
    """A stop word makes the engine hold text back, and it knows no special tokens."""
    tokenizer = marking_tokenizer("bytes")
    whole = "é<tool_call>ab</tool_call><|end|> c<tool_call>d"
    markers = tokenizer.special_tokens(["<tool_call>", "</tool_call>", "none"])
    text = ChoiceText(tokenizer, (), skip_special_tokens=True, markers=markers)
    plain, ids, said, given = "éab cd", tokenizer.tokenize(whole), "", 0
    for turn in range(len(ids)):
        size = cuts[turn % len(cuts)]
        part, ids = ids[:size], ids[size:]
        seen = max(given, len(plain) - len(tokenizer.detokenize(ids)) - late) if ids else len(plain)
        said += text.push(
            Output(1, 0, part, text=plain[given:seen], finish_reason=None if ids else "stop")
        )
        given = seen
        if not ids:
            break
    assert said == "é<tool_call>ab</tool_call> c<tool_call>d"


@pytest.mark.parametrize("stream", [False, True])
def test_one_call_alone_where_calls_are_not_parallel(stream: bool) -> None:
    body = {
        "messages": [{"role": "user", "content": "a"}],
        **{"tools": [TOOL], "parallel_tool_calls": False, "stream": stream},
    }
    client = ScriptedClient(tiny_tokenizer(), [f"So: {CALL}\n{CALL} and {CALL}"], sizes=[40, 1])
    answer = say(client, "/v1/chat/completions", body).text
    if stream:
        lines = [line[6:] for line in answer.splitlines() if line.startswith("data: {")]
        deltas = [json.loads(line)["choices"][0]["delta"] for line in lines]
    else:
        deltas = [json.loads(answer)["choices"][0]["message"]]
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert len([call for call in calls if "id" in call]) == 1
    assert "".join(call["function"]["arguments"] for call in calls) == '{"a": [1, "b"]}'
    assert {call.get("index", 0) for call in calls} == {0}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_deltas_with_stop_words_add_up(client: httpx.Client, path: str, seed: int) -> None:
    """The engine makes the text, of which the start of a stop word is held back."""
    shown = completion if path == "/v1/completions" else chat
    free = shown(client, seed=seed, max_tokens=30, ignore_eos=True)["choices"][0]
    text = free["text"] if path == "/v1/completions" else free["message"]["content"]
    body: dict[str, Any] = {"seed": seed, "stop": [text[4:7], text[7:9]], "n": 2}
    body |= {"max_tokens": 30, "ignore_eos": True}
    if path == "/v1/completions":
        body |= {"prompt": "abc", "logprobs": 1}
    else:
        body |= {"messages": [{"role": "user", "content": "hello"}], "logprobs": True}
    whole = post(client, path, **body)["choices"]
    assert whole[0]["stop_reason"] in body["stop"]
    made = [["", 0, None] for _ in whole]
    for chunk in events_of(client, path, **body):
        (choice,) = chunk["choices"]
        mine: list[Any] = made[choice["index"]]
        mine[0] += choice["text"] if "text" in choice else choice["delta"].get("content", "")
        if choice["logprobs"]:
            mine[1] += len(choice["logprobs"].get("tokens") or choice["logprobs"]["content"])
        if choice["finish_reason"]:
            mine[2] = (choice["finish_reason"], choice["stop_reason"])
    for mine, choice in zip(made, whole, strict=True):
        log_probs = choice["logprobs"].get("tokens") or choice["logprobs"]["content"]
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        end = (choice["finish_reason"], choice["stop_reason"])
        assert mine == [text, len(log_probs), end]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
def test_an_unexpected_error_in_a_stream_is_logged_and_says_nothing(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    client = ScriptedClient(tiny_tokenizer(), ["He"], end=ZeroDivisionError("a secret"))
    body = {"prompt": "a", "messages": [USER], "input": "a", "stream": True}
    if path != "/v1/completions":
        del body["prompt"]
    answer = say(client, path, body)
    assert answer.status_code == 200 and "internal server error" in answer.text
    assert "secret" not in answer.text
    logged = [record.exc_info[1] for record in caplog.records if record.exc_info]
    assert [type(error) for error in logged] == [ZeroDivisionError]
