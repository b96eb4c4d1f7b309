"""Chats, responses and Megatron's API over HTTP."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.support.http_api import END, chat, error_of, events_of, ids_of, post
from tests.support.scripted_client import ScriptedClient, say, tiny_tokenizer
from tests.support.served import PlainTemplates

# --- chat and responses ---------------------------------------------------------------------------


def test_chat_has_the_shape_of_openai(client: httpx.Client) -> None:
    answer = chat(client, n=2, logprobs=True, top_logprobs=2, logit_bias={END: -100})
    assert answer["object"] == "chat.completion" and len(answer["choices"]) == 2
    for choice in answer["choices"]:
        tokens = choice["logprobs"]["content"]
        assert len(tokens) == 12 and all(len(token["top_logprobs"]) == 2 for token in tokens)
        text = bytes(byte for token in tokens for byte in token["bytes"]).decode(errors="replace")
        message = {"role": "assistant", "content": text, "refusal": None}
        assert choice["message"] == message


def test_chat_stream_brings_the_same_message(client: httpx.Client) -> None:
    body = {"messages": [{"role": "user", "content": "hello"}], "seed": 5, "max_tokens": 20}
    asked = {**body, "logprobs": True, "top_logprobs": 1, "n": 2}
    whole = post(client, "/v1/chat/completions", **asked)["choices"]
    chunks = events_of(client, "/v1/chat/completions", **asked)
    for index, choice in enumerate(whole):
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        text = "".join(each["delta"].get("content", "") for each in mine)
        assert text == choice["message"]["content"]
        shown = [of for each in mine if each["logprobs"] for of in each["logprobs"]["content"]]
        assert shown == choice["logprobs"]["content"]
        assert mine[-1]["finish_reason"] == choice["finish_reason"]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}


def test_chat_fills_the_context_unless_told(client: httpx.Client) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "ignore_eos": True, "seed": 1}
    answer = post(client, "/v1/chat/completions", **body)
    assert answer["usage"]["total_tokens"] == 256
    assert answer["choices"][0]["finish_reason"] == "length"


def test_usage_of_each_chunk_grows(client: httpx.Client) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4, "ignore_eos": True}
    chunks = events_of(client, "/v1/chat/completions", **body, stream_options=options)
    counts = [c["usage"]["completion_tokens"] for c in chunks if "usage" in c]
    assert counts == sorted(counts) and counts[-1] == 4
    assert counts[0] == 0, "the chunk of the role has no token"


def test_what_nobody_asked_for_is_null(client: httpx.Client) -> None:
    """Clients written for vLLM read these fields without asking whether they are there."""
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    chat = post(client, "/v1/chat/completions", **body)
    text = post(client, "/v1/completions", prompt="a", max_tokens=1)["choices"][0]
    for shown in (chat, text):
        assert shown["prompt_logprobs"] is None and shown["prompt_token_ids"] is None
    assert text["token_ids"] is None and chat["choices"][0]["token_ids"] is None


def test_response_events_are_those_of_openai(client: httpx.Client) -> None:
    body = {"input": "hello", "seed": 5, "max_output_tokens": 8, "ignore_eos": True}
    whole = post(client, "/v1/responses", **body)
    assert (whole["object"], whole["status"]) == ("response", "incomplete")
    assert whole["incomplete_details"] == {"reason": "max_output_tokens"}
    (item,) = whole["output"]
    events = events_of(client, "/v1/responses", **body)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    names = [event["type"].removeprefix("response.") for event in events]
    assert names[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert set(names[4:-4]) == {"output_text.delta"}
    done = ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert names[-4:] == done
    text = "".join(e["delta"] for e in events if e["type"] == "response.output_text.delta")
    assert text == item["content"][0]["text"] == events[-4]["text"]
    assert events[-1]["response"]["usage"] == whole["usage"] | {
        "input_tokens_details": events[-1]["response"]["usage"]["input_tokens_details"]
    }


def test_instructions_and_messages_make_the_prompt(client: httpx.Client) -> None:
    items = [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}]
    answer = post(client, "/v1/responses", input=items, instructions="be", max_output_tokens=1)
    assert answer["instructions"] == "be" and answer["usage"]["input_tokens"] > 4


# --- Megatron's API -------------------------------------------------------------------------------


def test_megatron_has_prompt_and_text(client: httpx.Client) -> None:
    body = {"prompts": ["abc", "xyz"], "tokens_to_generate": 5, "random_seed": 2, "logprobs": True}
    answer = client.put("/api", json=body).json()
    for prompt, text, tokens, segments, log_probs in zip(
        body["prompts"],
        *(answer[k] for k in ("text", "tokens", "segments", "logprobs")),
        strict=True,
    ):
        assert text.startswith(prompt) and tokens[:3] == ids_of(prompt)
        assert segments[:3] == list(prompt) and len(log_probs) == len(tokens) - 1


def test_megatron_scores_prompts(client: httpx.Client) -> None:
    body = {"prompts": ["abc"], "tokens_to_generate": 0, "logprobs": True, "top_n_logprobs": 2}
    answer = client.put("/api", json=body).json()
    assert answer["text"] == ["abc"] and len(answer["logprobs"][0]) == 2
    assert [len(top) for top in answer["top_n_logprobs"][0]] == [2, 2]


def test_megatron_stops_at_the_end_of_a_line(client: httpx.Client) -> None:
    answer = client.put("/api", json={"prompts": ["abc"], "stop_on_eol": True})
    assert answer.status_code == 200


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompts"),
        ({"prompts": []}, "prompts"),
        ({"prompts": ["a"] * 129}, "prompts"),
        ({"prompts": [""]}, "prompts"),
        ({"prompts": ["a"], "sentences": ["a"]}, "sentences"),
        ({"prompts": ["a"], "max_len": 3}, "max_len"),
        ({"prompts": ["a"], "tokens_to_generate": -1}, "tokens_to_generate"),
        ({"prompts": ["a"], "add_BOS": "y"}, "add_BOS"),
        ({"prompts": ["a"], "tokens_to_generate": 0}, "tokens_to_generate"),
        ({"prompts": ["a"], "tokens_to_generate": 999}, "tokens_to_generate"),
        ({"prompts": ["a"], "temperature": 0}, "temperature"),
        ({"prompts": ["a"], "top_k": 2, "top_p": 0.5}, "top_p"),
        ({"prompts": ["a"], "beam_width": 2}, "beam_width"),
        ({"prompts": ["a"], "random_seed": -1}, "random_seed"),
    ],
)
def test_megatron_names_the_field(client: httpx.Client, body: Any, param: str) -> None:
    assert error_of(client.put("/api", json=body), 400)["param"] == param


class ToolTemplates(PlainTemplates):
    """They show the names of tools, and whether the final message goes on."""

    def render_chat(self, messages: Any, tools: Any = None, **options: Any) -> str:
        names = [tool["function"]["name"] for tool in tools or ()]
        end = "+" if options["continue_final_message"] else ""
        return "".join(names) + super().render_chat(messages, **options) + end


@pytest.mark.parametrize(
    "more",
    [
        {"tools": [{"type": "function", "function": {"name": "weather"}}]},
        {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"},
        {"continue_final_message": True, "add_generation_prompt": False},
    ],
)
def test_tokens_of_a_chat_are_those_of_its_completion(more: dict[str, Any]) -> None:
    scripted = ScriptedClient(tiny_tokenizer(), ["x"])
    body = {"messages": [{"role": "user", "content": "Rain?"}], **more}
    counted = say(scripted, "/tokenize", body, ToolTemplates()).json()
    say(scripted, "/v1/chat/completions", body, ToolTemplates())
    assert counted["tokens"] == scripted.asked[0].prompt
