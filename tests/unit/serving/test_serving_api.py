"""The HTTP front end, field by field, over an engine in the same process."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel
from tokenizers import decoders, models, pre_tokenizers, processors

from megatron_async.errors import ConfigError
from megatron_async.sampling_params import SamplingParams
from megatron_async.serving.chat.chat_template import ChatTemplates
from megatron_async.serving.endpoints.engine_api import DetokenizeRequest, TokenizeRequest
from megatron_async.serving.endpoints.foreign_fields import FOREIGN_FIELDS
from megatron_async.serving.endpoints.megatron_api import MegatronRequest
from megatron_async.serving.endpoints.request_shapes import ChatCompletionRequest, CompletionRequest
from megatron_async.serving.endpoints.responses_api import ResponsesRequest
from megatron_async.serving.front_end.choice_text import ChoiceText
from megatron_async.serving.http.errors import ApiError, param_of
from megatron_async.serving.http.frontend import ServerConfig
from megatron_async.serving.http.logs import JsonFormatter
from megatron_async.serving.messages import Output
from megatron_async.tokenizer.tokenizer import Tokenizer
from tests.support.engines import hash_engine
from tests.support.hash_tokenizer import hash_tokenizer
from tests.support.patience import PATIENCE_SECONDS
from tests.support.scripted_client import ScriptedClient, say, tiny_tokenizer
from tests.support.served import PlainTemplates, Served, served

KEYS = ("first-key", "second-key")
TOKENIZER = hash_tokenizer()
END = TOKENIZER.eod


def engine(depth: int = 1, **values: Any) -> Any:
    values = {"max_requests": 8, "block_size_tokens": 4, "block_count": 600, **values}
    return hash_engine(depth, tokenizer=TOKENIZER, **values)


def http(server: Served, **options: Any) -> httpx.Client:
    return httpx.Client(base_url=server.url, timeout=PATIENCE_SECONDS, **options)


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(engine()) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Served) -> Iterator[httpx.Client]:
    with http(server) as opened:
        yield opened


def post(client: httpx.Client, path: str, **body: Any) -> Any:
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def events_of(client: httpx.Client, path: str, **body: Any) -> list[Any]:
    """The JSON of each event of a stream, which ends as it should."""
    with client.stream("POST", path, json={**body, "stream": True}) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in answer.iter_lines() if line.startswith("data: ")]
    if path != "/v1/responses":
        assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def completion(client: httpx.Client, **body: Any) -> Any:
    return post(client, "/v1/completions", **{"prompt": "abc", "seed": 3, "max_tokens": 12, **body})


def chat(client: httpx.Client, **body: Any) -> Any:
    messages = [{"role": "user", "content": "hello"}]
    asked = {"messages": messages, "seed": 3, "max_completion_tokens": 12, **body}
    return post(client, "/v1/chat/completions", **asked)


def error_of(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return dict(error)


# --- what a request asks of the engine ------------------------------------------------------------


def test_fields_become_sampling_parameters() -> None:
    body = CompletionRequest.model_validate(
        {
            "prompt": "a",
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": -1,
            "min_p": 0.1,
            "n": 2,
            "seed": 7,
            "max_tokens": 5,
            "stop": "x",
            "presence_penalty": 0.1,
            "frequency_penalty": 0.2,
            "repetition_penalty": 1.5,
            "logit_bias": {"5": -200},
            "logprobs": 2,
            "ignore_eos": True,
            "min_tokens": 1,
            "stop_token_ids": [4],
            "allowed_token_ids": [1, 2, 4],
            "bad_words": ["no"],
            "include_stop_str_in_output": True,
            "num_speculative_tokens": 2,
            "guided_choice": ["a", "b"],
            "who_knows": 1,
        }
    )
    assert body.params(8) == SamplingParams(
        temperature=0.5,
        top_p=0.9,
        min_p=0.1,
        n=2,
        seed=7,
        num_tokens_to_generate=5,
        stop_words=("x",),
        presence_penalty=0.1,
        frequency_penalty=0.2,
        repetition_penalty=1.5,
        logit_bias={5: -100.0},
        return_log_probs=True,
        skip_prompt_log_probs=True,
        top_n_logprobs=2,
        ignore_eos=True,
        min_tokens=1,
        stop_token_ids=(4,),
        allowed_token_ids=(1, 2, 4),
        bad_words=("no",),
        include_stop_str_in_output=True,
        num_speculative_tokens=2,
        structured_outputs={"choice": ["a", "b"]},
    )


def test_null_is_the_default() -> None:
    names = CompletionRequest.model_fields.keys() - {"prompt"}
    nulls = CompletionRequest.model_validate({"prompt": "a", **dict.fromkeys(names)})
    assert nulls.params(8) == CompletionRequest.model_validate({"prompt": "a"}).params(8)


def test_default_lengths_are_those_of_openai() -> None:
    text = CompletionRequest.model_validate({"prompt": "a"}).params(8)
    talk = ChatCompletionRequest.model_validate({"messages": []}).params(8)
    assert (text.num_tokens_to_generate, talk.num_tokens_to_generate) == (16, None)


def test_no_probability_mass_is_greedy() -> None:
    assert CompletionRequest.model_validate({"prompt": "a", "top_p": 0}).params(8).greedy


def test_log_probs_of_text_and_prompt_are_asked_for_together() -> None:
    body = {"prompt": "a", "logprobs": 1, "prompt_logprobs": 5}
    params = CompletionRequest.model_validate(body).params(8)
    assert (params.top_n_logprobs, params.skip_prompt_log_probs) == (5, False)


STRUCTURES = {
    "response_format": ({"type": "json_object"}, {"json_object": True}),
    "guided_json": ({"type": "object"}, {"json": '{"type": "object"}'}),
    "guided_regex": ("[0-9]+", {"regex": "[0-9]+"}),
    "guided_grammar": ('root ::= "a"', {"grammar": 'root ::= "a"'}),
    "structured_outputs": ({"choice": ["a"]}, {"choice": ["a"]}),
}


@pytest.mark.parametrize("name", STRUCTURES)
def test_each_way_to_ask_for_structure(name: str) -> None:
    asked, structure = STRUCTURES[name]
    body = CompletionRequest.model_validate({"prompt": "a", name: asked})
    assert body.params(8).structured_outputs == structure


def test_two_structures_contradict_each_other() -> None:
    body = {"prompt": "a", "guided_regex": "a", "response_format": {"type": "json_object"}}
    with pytest.raises(ApiError, match="contradict") as raised:
        CompletionRequest.model_validate(body).params(8)
    assert raised.value.param == "response_format"


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("temperature=-1 must lie", "temperature"),
        ("messages[3].content=5 must be", "messages[3].content"),
        ("the request may need 5 KV blocks", None),
        ("the prompt holds token id 7", "prompt"),
        ("logit_bias has token 3 twice", "logit_bias"),
        ("min_tokens=5 exceeds max_tokens=3; lower one", "min_tokens"),
    ],
)
def test_errors_name_the_field(message: str, param: str | None) -> None:
    assert param_of(message) == param


# --- text -----------------------------------------------------------------------------------------


def output(ids: list[int], reason: str | None = None, text: str | None = None) -> Output:
    return Output(0, 0, ids, text, finish_reason=reason)


def ids_of(text: str) -> list[int]:
    return TOKENIZER.tokenize(text)


def test_half_a_character_is_held_back() -> None:
    first, second = (TOKENIZER._tokenizer.token_to_id(part) for part in "Ã©")
    text = ChoiceText(TOKENIZER, {END}, skip_special_tokens=True)
    assert text.push(output([first])) == ""
    assert text.push(output([second, *ids_of("a")])) == "éa"
    assert text.push(output([first], "length")) == "\ufffd"


def test_a_stop_token_adds_no_text() -> None:
    (a,), (b,) = ids_of("a"), ids_of("b")
    text = ChoiceText(TOKENIZER, {b}, skip_special_tokens=True)
    assert text.push(output([a, b], "stop")) == "a"
    # A request may also stop for another reason, with a token that does.
    text = ChoiceText(TOKENIZER, {b}, skip_special_tokens=True)
    assert text.push(output([b, a], "stop")) == "ba"


def test_text_of_the_engine_goes_first() -> None:
    text = ChoiceText(TOKENIZER, {END}, skip_special_tokens=True)
    assert text.push(output(ids_of("ab"), "stop", "a")) == "a"


# --- completions ----------------------------------------------------------------------------------


def test_completion_has_the_shape_of_openai(client: httpx.Client) -> None:
    answer = completion(client)
    assert answer["object"] == "text_completion" and answer["model"] == "tiny"
    (choice,) = answer["choices"]
    assert choice["index"] == 0 and choice["logprobs"] is None
    assert choice["finish_reason"] in ("stop", "length") and choice["text"]
    usage = answer["usage"]
    assert usage["prompt_tokens"] == 3
    assert usage["total_tokens"] == 3 + usage["completion_tokens"] <= 15


@pytest.mark.parametrize("seed", range(6))
def test_stream_brings_the_same_text(client: httpx.Client, seed: int) -> None:
    whole = completion(client, seed=seed, max_tokens=40, return_token_ids=True)["choices"][0]
    chunks = events_of(
        client,
        "/v1/completions",
        prompt="abc",
        seed=seed,
        max_tokens=40,
        return_token_ids=True,
        stream_options={"include_usage": True},
    )
    usage = chunks.pop()
    assert usage["choices"] == [] and usage["usage"]["prompt_tokens"] == 3
    shown = [chunk["choices"][0] for chunk in chunks]
    assert "".join(each["text"] for each in shown) == whole["text"]
    ids = [token for each in shown for token in each["token_ids"]]
    assert ids == whole["token_ids"]
    assert usage["usage"]["completion_tokens"] == len(ids)
    assert [each["finish_reason"] for each in shown[:-1]] == [None] * (len(shown) - 1)
    assert shown[-1]["finish_reason"] == whole["finish_reason"]
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_stop_word_ends_the_text(client: httpx.Client) -> None:
    text = completion(client, ignore_eos=True)["choices"][0]["text"]
    word = text[3:5]
    for include in (False, True):
        (choice,) = completion(
            client, ignore_eos=True, stop=[word], include_stop_str_in_output=include
        )["choices"]
        end = text.index(word) + include * len(word)
        assert choice["text"] == text[:end]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", word)


def test_stop_token_ends_the_text(client: httpx.Client) -> None:
    (free,) = completion(client, ignore_eos=True, return_token_ids=True)["choices"]
    stop = free["token_ids"][4]
    body = {"ignore_eos": True, "stop_token_ids": [stop], "return_token_ids": True}
    (choice,) = completion(client, **body)["choices"]
    shown = choice["token_ids"]
    assert shown == free["token_ids"][: len(shown)] and shown[-1] == stop
    assert choice["text"] == TOKENIZER.detokenize(shown[:-1])
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)


def test_prompts_may_be_texts_or_token_ids_one_or_several(client: httpx.Client) -> None:
    a, b = ids_of("abc"), ids_of("xyz")
    forms = ["abc", ["abc", "xyz"], a, [a, b]]
    shown = [[c["text"] for c in completion(client, prompt=form)["choices"]] for form in forms]
    assert shown[0] == shown[2] == shown[1][:1]
    assert shown[1] == shown[3] and len(shown[1]) == 2


def test_choices_of_several_prompts_are_numbered_through(client: httpx.Client) -> None:
    body = {"prompt": ["abc", "xyz"], "n": 3, "max_tokens": 5}
    whole = completion(client, **body)["choices"]
    assert [choice["index"] for choice in whole] == list(range(6))
    assert len({choice["text"] for choice in whole}) > 3
    texts = [""] * 6
    for chunk in events_of(client, "/v1/completions", seed=3, **body):
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["text"]
    assert texts == [choice["text"] for choice in whole]


def test_echo_puts_the_prompt_first(client: httpx.Client) -> None:
    plain, echoed = completion(client), completion(client, echo=True)
    assert echoed["choices"][0]["text"] == "abc" + plain["choices"][0]["text"]
    by_ids = completion(client, echo=True, prompt=ids_of("abc"))
    assert by_ids["choices"][0]["text"] == echoed["choices"][0]["text"]


def test_log_probs_of_a_completion(client: httpx.Client) -> None:
    body = {"echo": True, "logprobs": 2, "max_tokens": 4, "ignore_eos": True}
    (choice,) = completion(client, **body)["choices"]
    shown = choice["logprobs"]
    assert shown["tokens"][:3] == ["a", "b", "c"] and len(shown["tokens"]) == 7
    assert shown["token_logprobs"][0] is None and shown["top_logprobs"][0] is None
    assert shown["text_offset"][:3] == [0, 1, 2]
    named = zip(shown["tokens"], shown["token_logprobs"], shown["top_logprobs"], strict=True)
    for token, own, top in list(named)[1:]:
        assert own < 0 and top[token] == own and 2 <= len(top) <= 3
    streamed = events_of(client, "/v1/completions", prompt="abc", seed=3, **body)
    parts = [chunk["choices"][0]["logprobs"] for chunk in streamed]
    for name, values in shown.items():
        assert [value for part in parts for value in part[name]] == values


def test_echo_of_several_choices_waits_for_the_prompts_log_probs(client: httpx.Client) -> None:
    body = {"prompt": "abc", "seed": 3, "echo": True, "logprobs": 1, "max_tokens": 3, "n": 3}
    whole = completion(client, **body)["choices"]
    found: dict[int, list[Any]] = {}
    for chunk in events_of(client, "/v1/completions", **body):
        (choice,) = chunk["choices"]
        found.setdefault(choice["index"], []).extend(choice["logprobs"]["token_logprobs"])
    assert found == {c["index"]: c["logprobs"]["token_logprobs"] for c in whole}


def test_a_prompt_alone_may_be_scored(client: httpx.Client) -> None:
    body = {"echo": True, "logprobs": 1, "max_tokens": 0}
    (choice,) = completion(client, **body)["choices"]
    assert choice["text"] == "abc" and choice["finish_reason"] == "length"
    assert len(choice["logprobs"]["tokens"]) == 3
    (chunk,) = events_of(client, "/v1/completions", prompt="abc", seed=3, **body)
    assert chunk["choices"][0]["logprobs"] == choice["logprobs"]


def test_scoring_a_prompt_counts_no_generated_token(client: httpx.Client) -> None:
    body = {"echo": True, "logprobs": 1, "max_tokens": 0, "n": 2, "prompt": ["abc", "ab"]}
    usage = completion(client, **body)["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (5, 0, 5)
    options = {"include_usage": True}
    *_, last = events_of(client, "/v1/completions", **body, seed=3, stream_options=options)
    assert last["usage"]["completion_tokens"] == 0


def test_tokens_that_are_no_text_have_names_of_their_own(client: httpx.Client) -> None:
    first, second = (TOKENIZER._tokenizer.token_to_id(part) for part in "Ã©")
    body = {"prompt": [first, second], "echo": True, "logprobs": 0, "max_tokens": 0}
    shown = completion(client, **body)["choices"][0]["logprobs"]
    assert shown["tokens"] == ["bytes:\\xc3", "bytes:\\xa9"]
    assert shown["top_logprobs"] is None
    ids = completion(client, **body, return_tokens_as_token_ids=True)["choices"][0]["logprobs"]
    assert ids["tokens"] == [f"token_id:{first}", f"token_id:{second}"]


def test_prompt_log_probs_of_vllm(client: httpx.Client) -> None:
    (choice,) = completion(client, prompt_logprobs=2)["choices"]
    none, *known = choice["prompt_logprobs"]
    assert none is None and len(known) == 2 and choice["logprobs"] is None
    for token, each in zip(ids_of("bc"), known, strict=True):
        assert each[str(token)]["decoded_token"] == TOKENIZER.detokenize([token])
        assert sorted(of["rank"] for of in each.values() if of["rank"])[:2] == [1, 2]
    talk = chat(client, prompt_logprobs=0)
    assert len(talk["prompt_logprobs"]) == talk["usage"]["prompt_tokens"]


def test_events_that_are_made_from_parts_are_the_same(client: httpx.Client) -> None:
    body = {"prompt": "abc", "seed": 3, "max_tokens": 12, "ignore_eos": True, "n": 2}
    options = {"include_usage": True, "continuous_usage_stats": True}
    parts = events_of(client, "/v1/completions", **body)
    others = events_of(client, "/v1/completions", **body, stream_options=options)[:-1]

    def choices(events: list[Any], index: int) -> list[Any]:
        shown = [chunk["choices"][0] for chunk in events]
        return [choice for choice in shown if choice["index"] == index]

    for index in (0, 1):
        assert choices(parts, index) == choices(others, index)
    assert [chunk.keys() for chunk in others] == [{**chunk, "usage": 0}.keys() for chunk in parts]
    assert len(parts) > 12


def test_best_of_keeps_the_likeliest_and_is_no_stream(client: httpx.Client) -> None:
    body = {"seed": 3, "max_tokens": 6, "ignore_eos": True}
    three = completion(client, n=3, logprobs=0, **body)["choices"]
    (best,) = completion(client, best_of=3, **body)["choices"]
    likeliest = max(three, key=lambda choice: sum(choice["logprobs"]["token_logprobs"]))
    assert (best["index"], best["text"]) == (0, likeliest["text"])
    error = error_of(
        client.post("/v1/completions", json={"prompt": "a", "best_of": 3, "stream": True}), 400
    )
    assert error["param"] == "best_of"


def test_structure_is_followed(client: httpx.Client) -> None:
    (choice,) = completion(client, guided_regex="[0-9]{4}", max_tokens=30)["choices"]
    assert choice["text"].isdigit() and len(choice["text"]) == 4
    assert choice["finish_reason"] == "stop"


def test_usage_says_what_was_cached(client: httpx.Client) -> None:
    body = {"prompt": "abcdefgh" * 3, "max_tokens": 2}
    completion(client, **body)
    usage = completion(client, **body)["usage"]
    assert 0 < usage["prompt_tokens_details"]["cached_tokens"] < 24


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


# --- wrong values ---------------------------------------------------------------------------------

WRONG: dict[str, tuple[Any, ...]] = {
    "prompt": (None, 3, [1, "a"], [], [[]], [999], [-1], "", "a" * 300, ["a"] * 2000, "\ud800"),
    "temperature": ("x", -1, 1e9, "NaN", 10**400),
    "top_p": (-0.1, 1.1, "1"),
    "top_k": (-2, 1.5),
    "min_p": (2,),
    "n": (0, -1, 1000, "2", True),
    "best_of": (0, 1000),
    "seed": ("s", 2**70),
    "stop": (3, [1], [""], {}),
    "presence_penalty": (3,),
    "frequency_penalty": (-3,),
    "repetition_penalty": (0,),
    "logit_bias": ([], {"a": 1}, {"999": 1}, {"1": "x"}, {str(i): 1 for i in range(2000)}),
    "max_tokens": (-1, 0, 1000, 1.5),
    "min_tokens": (-1, 100),
    "num_speculative_tokens": (-1, 3, "x"),
    "stop_token_ids": ([-1], [999], 5),
    "allowed_token_ids": ([], [999]),
    "bad_words": ([""], "x"),
    "logprobs": (-1, 21, True),
    "prompt_logprobs": (-1, 21),
    "priority": ("high", 10**9),
    "guided_json": ("{", {"type": "nothing"}, 5),
    "guided_regex": ("((",),
    "guided_grammar": ("root ::= nothing",),
    "guided_choice": ([], "a"),
    "structured_outputs": ({}, {"json": "{}", "regex": "a"}, {"who": 1}),
    "stream": ("yes",),
    "suffix": ("x",),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_values_are_refused_by_field(client: httpx.Client, name: str) -> None:
    for value in WRONG[name]:
        content = json.dumps({"prompt": "a", "max_tokens": 4, name: value})
        for stream in ("", ', "stream": true'):
            if name == "stream" and stream:
                continue
            answer = client.post(
                "/v1/completions",
                content=f"{content[:-1]}{stream}}}".replace('"NaN"', "NaN"),
                headers={"content-type": "application/json"},
            )
            error = error_of(answer, 400)
            assert error["param"].split(".")[0].split("[")[0] == name, (value, error)
            assert error["type"] == "invalid_request_error"


CHAT_WRONG = [
    ({"messages": None}, "messages"),
    ({"messages": [3]}, "messages[0]"),
    ({"messages": [{"content": "a"}]}, "messages[0].role"),
    ({"messages": [{"role": "u", "content": "a" * 400}]}, "messages"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_completion_tokens": 1000}, "max_completion_tokens"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}},
     "response_format"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
]  # fmt: skip


USER: dict[str, Any] = {"role": "user", "content": "a"}
TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": 3}, "tools"),
        ({"tools": [{"type": "web"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": [TOOL], "tool_choice": "maybe"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": "required", "guided_regex": "a"}, "tool_choice"),
    ],
)
def test_wrong_tools_are_refused_by_field(client: httpx.Client, body: Any, param: str) -> None:
    pytest.importorskip("megatron_async.serving.chat.tool_calls")
    asked = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4, **body}
    assert error_of(client.post("/v1/chat/completions", json=asked), 400)["param"] == param


@pytest.mark.parametrize(("body", "param"), CHAT_WRONG)
def test_wrong_chats_are_refused_by_field(client: httpx.Client, body: Any, param: str) -> None:
    asked = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4, **body}
    assert error_of(client.post("/v1/chat/completions", json=asked), 400)["param"] == param


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": [{"type": "function_call_output"}]}, "input[0].call_id"),
        ({"input": "a", "tools": [{"type": "function"}]}, "tools[0].name"),
        ({"input": "a", "previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": "a", "background": True}, "background"),
        ({"input": "a", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "a", "text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"input": "a", "n": 2}, "n"),
        ({"input": "a" * 400}, "input"),
    ],
)
def test_wrong_responses_are_refused_by_field(client: httpx.Client, body: Any, param: str) -> None:
    assert error_of(client.post("/v1/responses", json=body), 400)["param"] == param


ODD: tuple[Any, ...] = (
    *(None, True, 0, 1, -1, 2, 3.5, 10**30, -(2**63), float("nan"), float("inf"), 60, 256),
    *("", "a", "\ud800", "\0", "auto", "[a-c]", 'root ::= "a"', '{"type": "integer"}'),
    *([], [1], ["a"], [[1]], [[]], [None], ["a", "b"], [{"role": "user", "content": "a"}]),
    *({}, {"a": 1}, {"1": 1}, {"type": "json_object"}, {"include_usage": True}, {"regex": "a"}),
    {"type": "json_schema", "json_schema": {"schema": {"type": "string", "maxLength": 2}}},
    {"type": "json_schema", "json_schema": {"schema": {"$ref": "#/x"}}},
    {"format": {"type": "json_schema", "name": "x", "schema": {"type": "boolean"}}},
)
SENT: dict[str, tuple[type[BaseModel], dict[str, Any]]] = {
    "/v1/completions": (CompletionRequest, {"prompt": "a", "max_tokens": 2}),
    "/v1/chat/completions": (
        ChatCompletionRequest,
        {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
    ),
    "/v1/responses": (ResponsesRequest, {"input": "a", "max_output_tokens": 2}),
    "/api": (MegatronRequest, {"prompts": ["a"], "tokens_to_generate": 2}),
    "/tokenize": (TokenizeRequest, {"prompt": "a"}),
    "/detokenize": (DetokenizeRequest, {"tokens": [1]}),
}


@pytest.mark.parametrize("path", SENT)
def test_no_value_is_an_internal_error(client: httpx.Client, path: str) -> None:
    model, body = SENT[path]
    names = sorted(field.alias or name for name, field in model.model_fields.items())
    chance, statuses = random.Random(path), set()
    for _ in range(120):
        name = chance.choice([name for name in names if name not in ("tools", "tool_choice")])
        sent = {**body, name: chance.choice(ODD)}
        headers = {"content-type": "application/json"}
        answer = client.post(path, content=json.dumps(sent), headers=headers)
        statuses.add(answer.status_code)
        assert answer.status_code in (200, 400, 404), (sent, answer.text)
        if answer.status_code != 200:
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        elif answer.headers["content-type"].startswith("text/event-stream"):
            assert '"error":{' not in answer.text
    assert {200, 400} <= statuses


MESSAGES = [{"role": "user", "content": "a"}]
ENDPOINTS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a", "max_tokens": 1},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 1},
    "/v1/responses": {"input": "a", "max_output_tokens": 1},
}


@pytest.mark.parametrize("path", ENDPOINTS)
def test_fields_of_other_servers_that_change_the_answer_are_refused(
    client: httpx.Client, path: str
) -> None:
    """Unless they say nothing."""
    own = {"/v1/completions": {"echo", "best_of", "suffix"}}.get(path, set())
    for name, instead in FOREIGN_FIELDS.items():
        if name in own:
            continue
        for value in (True, "some", [1], {"a": 1}, 7):
            error = error_of(client.post(path, json={**ENDPOINTS[path], name: value}), 400)
            assert error["param"] == name and instead in error["message"], (name, value)
    for value in (None, False, "", [], {}):
        names = FOREIGN_FIELDS.keys() - own
        post(client, path, **ENDPOINTS[path], **dict.fromkeys(names, value))
    neutral = {"length_penalty": 1.0, "mirostat": 0, "function_call": "auto"}
    post(client, path, **ENDPOINTS[path], **neutral, who_knows=[1], service_tier="flex", user="me")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("more", [{}, {"n": 2}, {"logprobs": 1}])
def test_chunks_before_the_last_say_that_usage_is_to_come(
    client: httpx.Client, path: str, more: dict[str, Any]
) -> None:
    if "logprobs" in more and "chat" in path:
        more = {"logprobs": True}
    body = {**ENDPOINTS[path], "max_tokens": 4, **more}
    *chunks, last = events_of(client, path, **body, stream_options={"include_usage": True})
    assert [chunk["usage"] for chunk in chunks] == [None] * len(chunks) and chunks
    assert last["choices"] == [] and last["usage"]["completion_tokens"] > 0
    assert not any("usage" in chunk for chunk in events_of(client, path, **body))
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events_of(client, path, **body, stream_options=options)
    assert all(chunk["usage"]["prompt_tokens"] for chunk in chunks)


def test_too_long_prompts_have_openais_code(client: httpx.Client) -> None:
    error = error_of(client.post("/v1/completions", json={"prompt": "a" * 256}), 400)
    assert error["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": "a" * 300}, "prompt"),
        ("/v1/completions", {"prompt": "abc", "max_tokens": 254}, "max_tokens"),
        ("/v1/completions", {"prompt": ["a", "abc"], "max_tokens": 255}, "max_tokens"),
        ("/v1/completions", {"prompt": "a" * 25_000}, "prompt"),
        (
            "/v1/chat/completions",
            {"messages": MESSAGES, "max_completion_tokens": 250},
            "max_completion_tokens",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "a" * 256}], "max_tokens": 1},
            "messages",
        ),
        ("/v1/responses", {"input": "a" * 256}, "input"),
        ("/v1/responses", {"input": "a", "max_output_tokens": 256}, "max_output_tokens"),
    ],
)
def test_too_long_requests_are_told_in_the_words_that_clients_look_for(
    client: httpx.Client, path: str, body: dict[str, Any], param: str
) -> None:
    error = error_of(client.post(path, json=body), 400)
    assert "maximum context length is 256 tokens" in error["message"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", param)


@pytest.mark.parametrize("path", ENDPOINTS)
def test_a_default_length_is_cut_to_what_fits(path: str) -> None:
    defaults = {"num_tokens_to_generate": 4000}
    body = {**ENDPOINTS[path], "ignore_eos": True}
    body = {name: value for name, value in body.items() if "max" not in name}
    with served(engine(), sampling_defaults=defaults) as server, http(server) as client:
        assert post(client, path, **body)["usage"]["total_tokens"] == 256
    short = {"num_tokens_to_generate": 2}
    with served(engine(), sampling_defaults=short) as server, http(server) as client:
        used = post(client, path, **body, min_tokens=5)["usage"]
        assert used.get("completion_tokens", used.get("output_tokens")) >= 5


@pytest.mark.parametrize("temperature", [1e-8, 5e-324, 9e-6])
@pytest.mark.parametrize("path", ENDPOINTS)
def test_a_temperature_next_to_nothing_is_greedy(
    client: httpx.Client, path: str, temperature: float
) -> None:
    def said(value: float) -> Any:
        answer = post(client, path, **{**ENDPOINTS[path], "temperature": value, "model": ""})
        assert answer["model"] == "tiny"
        return answer.get("choices") or answer["output"][0]["content"]

    assert said(temperature) == said(0)


def test_what_is_no_json_object_is_refused(client: httpx.Client) -> None:
    plain = {"content-type": "text/plain"}
    for content, headers in (
        ("{", None),
        ("[1]", None),
        ("", None),
        ("[" * 100_000, None),
        ('{"prompt": "a"}', plain),
        (b"\xff\xfe", None),
    ):
        headers = headers or {"content-type": "application/json"}
        error_of(client.post("/v1/completions", content=content, headers=headers), 400)


def test_unknown_models_and_paths_are_not_found(client: httpx.Client) -> None:
    body = {"prompt": "a", "model": "other"}
    assert error_of(client.post("/v1/completions", json=body), 404)["code"] == "model_not_found"
    assert error_of(client.get("/v1/models/other"), 404)["param"] == "model"
    error_of(client.get("/nowhere"), 404)
    error_of(client.get("/v1/completions"), 405)
    for method, path, allowed in (
        ("GET", "/api", "POST, PUT"),
        ("DELETE", "/v1/models/tiny", "GET, HEAD"),
        ("POST", "/health", "GET, HEAD"),
    ):
        answer = client.request(method, path)
        assert (answer.status_code, answer.headers["allow"]) == (405, allowed), path
    assert completion(client, model="small")["model"] == "small"


# --- the server -----------------------------------------------------------------------------------


def test_models_tokens_health_and_version(client: httpx.Client) -> None:
    listed = client.get("/v1/models").json()["data"]
    assert [each["id"] for each in listed] == ["tiny", "small"]
    assert client.get("/v1/models/small").json()["max_model_len"] == 256
    tokens = post(client, "/tokenize", prompt="abc", return_token_strs=True)
    assert tokens["tokens"] == ids_of("abc") and tokens["token_strs"] == ["a", "b", "c"]
    assert post(client, "/detokenize", tokens=tokens["tokens"]) == {"prompt": "abc"}
    talk = post(client, "/tokenize", messages=[{"role": "user", "content": "a"}])
    assert talk["count"] == len(ids_of("user:a,a:"))
    error_of(client.post("/tokenize", json={}), 400)
    error_of(client.post("/detokenize", json={"tokens": [10**6]}), 400)
    for path in ("/health", "/v1/health", "/version", "/metrics", "/openapi.json"):
        assert client.get(path).status_code == 200
    assert client.get("/docs").status_code == 404


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


def test_request_ids_are_echoed(client: httpx.Client) -> None:
    answer = client.post(
        "/v1/completions", json={"prompt": "a"}, headers={"x-request-id": "my-own"}
    )
    assert answer.headers["x-request-id"] == "my-own" and answer.json()["id"] == "cmpl-my-own"
    for odd in ("", "a b", "x" * 200):
        made = client.get("/nowhere", headers={"x-request-id": odd}).headers["x-request-id"]
        assert made != odd and len(made) == 32


def test_logs_are_json_without_prompts(
    server: Served, client: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    def logged() -> set[str]:
        fields = (vars(record).get("fields", {}) for record in caplog.records)
        return {each["request_id"] for each in fields if "status" in each}

    with caplog.at_level(logging.INFO, "megatron_async.serving"):
        headers = {"x-request-id": "logged"}
        body = {"prompt": "abcabc", "seed": 1}
        text = client.post("/v1/completions", json=body, headers=headers).json()["choices"][0]
        headers = {"x-request-id": "logged-too"}
        client.post("/v1/completions", json={"prompt": "zyxzyx", "n": 0}, headers=headers)
        server.until(lambda: {"logged", "logged-too"} <= logged())
    lines = [JsonFormatter().format(record) for record in caplog.records]
    said = next(line for line in map(json.loads, lines) if line.get("request_id") == "logged")
    assert (said["path"], said["status"]) == ("/v1/completions", 200)
    assert said["prompt_tokens"] == 6 and said["seconds"] >= 0
    assert 0 < said["completion_tokens"] <= 16
    for secret in ("abcabc", "zyxzyx", text["text"]):
        assert not any(secret in line for line in lines)


def test_metrics_are_told_what_happens(server: Served, client: httpx.Client) -> None:
    noted = server.metrics.noted

    def is_idle() -> bool:
        names = [name for name, _ in noted]
        return names.count("opened") == names.count("closed")

    server.until(is_idle)  # an answer arrives before its request is counted as over
    noted.clear()
    (choice,) = completion(client, max_tokens=4, ignore_eos=True)["choices"]
    server.until(lambda: noted[-1][0] == "closed")
    assert [name for name, _ in noted] == [
        *("opened", "first_token", "tokens", "tokens", "tokens", "finished", "closed")
    ]
    count, seconds = noted[2][1]
    reason, usage, total = noted[-2][1]
    assert (count, reason, usage["generated_tokens"]) == (1, choice["finish_reason"], 4)
    assert 0 <= seconds <= total and 0 <= noted[1][1] <= total
    noted.clear()
    for body in ({"prompt": "a", "stop_token_ids": [999]}, {"prompt": 1}):
        client.post("/v1/completions", json=body)
    client.get("/nowhere")
    server.until(lambda: len(noted) >= 6)
    assert noted == [("opened", None), ("closed", None), ("refused", 400)] * 2


def test_an_unexpected_error_is_a_500_that_says_nothing(
    server: Served, client: httpx.Client, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def broken(*_: Any) -> Any:
        raise ZeroDivisionError("a secret")

    monkeypatch.setattr(server.front.generator, "tokenize", broken)
    answer = client.post("/v1/completions", json={"prompt": "a"})
    error = error_of(answer, 500)
    assert "secret" not in error["message"] and error["type"] == "server_error"
    assert answer.headers["x-request-id"]
    assert any(record.exc_info for record in caplog.records)  # before the answer is sent


def test_only_known_keys_get_in() -> None:
    with served(engine(), api_keys=KEYS) as server, http(server) as client:
        for headers in ({}, {"authorization": "Bearer x"}, {"authorization": KEYS[0]},
                        {"authorization": "Bearer \xe9".encode("latin-1")}):  # fmt: skip
            answer = client.post("/v1/completions", json={"prompt": "a"}, headers=headers)
            assert error_of(answer, 401)["code"] == "invalid_api_key"
            error_of(client.post("/pause", headers=headers), 401)
        for path in ("/health", "/v1/health", "/version", "/metrics"):
            assert client.get(path).status_code == 200
        for key in KEYS:
            client.headers["authorization"] = f"Bearer {key}"
            assert completion(client)["choices"]


def test_controls_reach_the_engine_behind_a_key() -> None:
    with served(engine(), api_keys=KEYS) as server, http(server) as client:
        client.headers["authorization"] = f"Bearer {KEYS[1]}"
        assert post(client, "/pause", mode="wait", timeout=2.5) == {"done": "pause"}
        assert client.post("/pause").json() == {"done": "pause"}
        for name in ("resume", "suspend", "reset_prefix_cache"):
            assert client.post(f"/{name}").json() == {"done": name}
        assert client.post("/weights", json={"path": "somewhere"}).json() == {"done": "weights"}
        assert error_of(client.post("/weights", json={"path": "missing"}), 400)["message"]
        trace = client.post("/profile", json={"steps": 5})
        assert trace.json() == {"traceEvents": []}
        assert "trace.json" in trace.headers["content-disposition"]
        error_of(client.post("/pause", json={"mode": "now"}), 400)
        error_of(client.post("/profile", json={"steps": 0}), 400)
        asked = server.client.commands
    assert asked[0] == ("pause", {"mode": "wait", "timeout": 2.5})
    assert [name for name, _ in asked] == [
        *("pause", "pause", "resume", "suspend", "reset_prefix_cache"),
        *("weights", "weights", "profile"),
    ]


def test_without_keys_nobody_controls_the_engine(server: Served, client: httpx.Client) -> None:
    for name in ("pause", "resume", "suspend", "weights", "reset_prefix_cache", "profile"):
        error = error_of(client.post(f"/{name}", json={"path": "x"}), 403)
        assert "--api-key" in error["message"]
    assert server.client.commands == []


def test_large_bodies_are_refused_before_they_are_read() -> None:
    with served(engine(), max_body_bytes=1000) as server, http(server) as client:
        answer = client.post("/v1/completions", content=b"x" * 8_000_000)
        assert error_of(answer, 413)["message"]

        def endless() -> Iterator[bytes]:
            while True:
                yield b'{"prompt": ' + b" " * 4096

        headers = {"content-type": "application/json"}
        answer = client.post("/v1/completions", content=endless(), headers=headers)
        error_of(answer, 413)
        assert completion(client)["choices"]


def test_pages_from_elsewhere_may_call_only_if_allowed(client: httpx.Client) -> None:
    headers = {"origin": "https://other", "access-control-request-method": "POST"}
    assert "access-control-allow-origin" not in client.get("/version", headers=headers).headers
    allowed: dict[str, Any] = {"allow_origins": ("https://other",), "api_keys": KEYS}
    with served(engine(), **allowed) as server, http(server) as other:
        answer = other.options("/v1/completions", headers=headers)
        assert answer.headers["access-control-allow-origin"] == "https://other"


def test_a_full_queue_is_429_with_retry_after(server: Served, client: httpx.Client) -> None:
    server.client.most = 0
    try:
        for stream in (False, True):
            body = {"prompt": "a", "stream": stream}
            answer = client.post("/v1/completions", json=body)
            assert error_of(answer, 429)["code"] == "queue_full"
            assert int(answer.headers["retry-after"]) >= 1
    finally:
        server.client.most = None


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": "a", "n": 7}, "n"),
        ("/v1/completions", {"prompt": "a", "n": 7, "stream": True}, "n"),
        ("/v1/completions", {"prompt": "a", "best_of": 7}, "best_of"),
        ("/v1/completions", {"prompt": ["a"] * 4, "n": 2}, "prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "n": 7}, "n"),
        ("/api", {"prompts": ["a"] * 7}, "prompts"),
    ],
)
def test_what_can_never_fit_is_no_full_queue(
    server: Served, client: httpx.Client, path: str, body: dict[str, Any], param: str
) -> None:
    server.client.max_sequences = 6
    try:
        assert error_of(client.post(path, json=body), 400)["param"] == param
        assert len(completion(client, n=6, max_tokens=1)["choices"]) == 6
    finally:
        server.client.max_sequences = None


def test_head_is_allowed_where_get_is(server: Served, client: httpx.Client) -> None:
    for path in ("/health", "/v1/health", "/version", "/metrics", "/v1/models", "/v1/models/tiny"):
        answer = client.head(path)
        assert (answer.status_code, answer.content) == (200, b""), path
    assert client.head("/v1/models/other").status_code == 404
    assert client.head("/v1/completions").status_code == 405
    assert client.head("/").status_code == 200
    assert client.head("/live").status_code == 405  # its events have no end
    server.client.state = "dead"
    try:
        assert client.head("/health").status_code == 503
    finally:
        server.client.state = "ready"


def test_503_while_the_engine_is_not_there(server: Served, client: httpx.Client) -> None:
    server.client.state = "dead"
    try:
        for path in ("/health", "/v1/health"):
            answer = client.get(path)
            assert error_of(answer, 503)["type"] == "server_error"
            assert answer.headers["retry-after"]
        for stream in (False, True):
            error_of(client.post("/v1/completions", json={"prompt": "a", "stream": stream}), 503)
        assert client.get("/version").status_code == 200
        assert client.get("/v1/models").status_code == 200
    finally:
        server.client.state = "ready"
    assert client.get("/health").status_code == 200


def test_an_engine_that_dies_ends_streams_with_an_error() -> None:
    with served(engine()) as server, http(server) as client:
        body = {"prompt": "abc", "max_tokens": 200, "ignore_eos": True, "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as answer:
            lines = (line for line in answer.iter_lines() if line)
            assert "choices" in next(lines)
            server.client.kill()
            last = list(lines)[-1]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "engine_not_ready"


@pytest.mark.parametrize("stream", [False, True])
def test_a_timeout_ends_a_request_with_its_text(stream: bool) -> None:
    slow = engine(0)
    with served(slow, request_timeout=0.05) as server, http(server) as client:
        slow.suspend()
        body = {"prompt": "abc", "max_tokens": 200, "ignore_eos": True}
        if stream:
            choice = events_of(client, "/v1/completions", **body)[-1]["choices"][0]
        else:
            choice = post(client, "/v1/completions", **body)["choices"][0]
    # OpenAI's API has no word for it, and clients with types take no others.
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", "timeout")


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_aborts_its_request(
    stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    one = engine()
    with served(one) as server:
        body = {"prompt": "abc", "max_tokens": 200, "ignore_eos": True, "stream": stream, "n": 2}
        with http(server) as client:
            if stream:
                with client.stream("POST", "/v1/completions", json=body) as answer:
                    next(answer.iter_lines())
                    one.suspend()  # it does not end by itself
            else:
                one.suspend()
                with pytest.raises(httpx.ReadTimeout):
                    client.post("/v1/completions", json=body, timeout=0.2)
        server.until(lambda: len(server.client.aborted) == 1)
        assert server.call(lambda: (server.client.running, server.front.generator.running)) == (
            {},
            set(),
        )
        one.resume()
        with http(server) as client:
            assert completion(client)["choices"]
        server.until(lambda: not one.loop.has_work)
    one.scheduler.check_idle()
    assert [record.getMessage() for record in caplog.records if record.exc_info] == []


def test_draining_refuses_new_requests_and_ends_the_others() -> None:
    one = engine()
    with served(one) as server, http(server) as client:
        body = {"prompt": "abc", "max_tokens": 200, "ignore_eos": True, "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as answer:
            lines = (line for line in answer.iter_lines() if line)
            next(lines)
            one.suspend()
            server.front.generator.draining = True
            with http(server) as other:
                error_of(other.post("/v1/completions", json=body), 503)
                error_of(other.get("/health"), 503)
            server.spawn(server.front.generator.abort_all())
            *_, last, done = lines
        assert done == "data: [DONE]"
        choice = json.loads(last.removeprefix("data: "))["choices"][0]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("length", "abort")


@pytest.mark.parametrize(
    "values",
    [
        {"model_names": ()},
        {"api_keys": ("",)},
        {"api_keys": ("é",)},
        {"max_body_bytes": 0},
        {"request_timeout": 0.0},
        {"shutdown_timeout": -1.0},
    ],
)
def test_wrong_configurations_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        ServerConfig(**{"model_names": ("tiny",), **values})


# --- what must not take everybody's time ----------------------------------------------------------


def test_long_texts_are_refused_before_they_are_looked_at(client: httpx.Client) -> None:
    for path, body in (
        ("/v1/completions", {"prompt": "x" * 2_000_000}),
        ("/tokenize", {"prompt": "x" * 2_000_000}),
        ("/v1/completions", {"prompt": "ab", "stop": "x" * 100_000}),
    ):
        answer = client.post(path, json=body)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] in ("prompt", "stop"), answer.text


def test_a_lone_surrogate_is_the_clients_mistake(client: httpx.Client) -> None:
    lone = '"\\ud83d"'
    headers = {"content-type": "application/json"}
    for name, value in (
        ("stop", lone),
        ("bad_words", f"[{lone}]"),
        ("prompt", lone),
        ("guided_choice", f"[{lone}]"),
        ("guided_regex", lone),
        ("guided_json", f'{{"const": {lone}}}'),
    ):
        content = f'{{"prompt": "ab", "{name}": {value}}}'
        answer = client.post("/v1/completions", content=content, headers=headers)
        assert str(error_of(answer, 400)["param"]).split(".")[0].split("[")[0] == name, answer.text


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": ["a", "\ud83d"]}, "prompt"),
        ("/v1/completions", {"prompt": "a", "structured_outputs": {"\ud83d": "1"}},
         "structured_outputs"),
        ("/v1/chat/completions", {"messages": [USER, USER | {"content": "\ud83d"}]},
         "messages[1].content"),
        ("/v1/chat/completions", {"messages": [USER], "tools": [
            {"type": "function", "function": {"name": "f", "description": "\ud83d"}}]},
         "tools[0].function.description"),
        ("/v1/responses", {"input": "\ud83d"}, "input"),
        ("/v1/responses", {"input": "a", "instructions": "\ud83d"}, "instructions"),
        ("/v1/responses", {"input": [USER | {"content": [
            {"type": "input_text", "text": "\ud83d"}]}]}, "input[0].content[0].text"),
        ("/v1/responses", {"input": "a", "text": {"format": {
            "type": "json_schema", "name": "\ud83d", "schema": {}}}}, "text.format.name"),
        ("/tokenize", {"messages": [USER | {"content": "\ud83d"}]}, "messages[0].content"),
        ("/tokenize", {"prompt": "\ud83d"}, "prompt"),
        ("/api", {"prompts": ["\ud83d"]}, "prompts"),
    ],
)  # fmt: skip
def test_a_lone_surrogate_is_named_by_its_field(path: str, body: Any, param: str) -> None:
    templates = ChatTemplates.from_directory("tiny")
    asked = ScriptedClient(tiny_tokenizer(), ["a"] * 2)
    answer = say(asked, path, body, templates)
    assert error_of(answer, 400)["param"] == param


# --- begin tokens ---------------------------------------------------------------------------------


def with_begin_token() -> Tokenizer:
    """A tokenizer whose post-processor puts a begin token first."""
    made = tokenizers.Tokenizer.from_str(TOKENIZER._tokenizer.to_str())
    ((begin, token_id),) = [("<1>", made.token_to_id("<1>"))]
    made.add_special_tokens([begin])
    made.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A", special_tokens=[(begin, token_id)]
    )
    return Tokenizer(made, bos_token=begin, eos_token="<end>")


def test_prompts_begin_as_the_tokenizer_has_it_and_chats_as_their_template() -> None:
    tokenizer = with_begin_token()
    begin = tokenizer.bos_id
    with served(engine(), tokenizer=tokenizer) as server, http(server) as client:

        def asked(path: str = "/v1/completions", **body: Any) -> list[int]:
            shown = post(client, path, max_tokens=1, return_token_ids=True, **body)
            found = shown.get("prompt_token_ids") or shown["choices"][0]["prompt_token_ids"]
            return list(found)

        talk: Any = {"messages": [{"role": "user", "content": "a"}]}
        chats = "/v1/chat/completions"
        assert asked(prompt="ab") == [begin, *tokenizer.tokenize("ab")]
        assert asked(prompt="ab", add_special_tokens=False) == tokenizer.tokenize("ab")
        assert asked(prompt=ids_of("ab")) == ids_of("ab")
        assert begin not in asked(chats, **talk)
        assert asked(chats, **talk, add_special_tokens=True)[0] == begin
        for body, first in (
            ({"prompt": "ab"}, True),
            ({"prompt": "ab", "add_special_tokens": False}, False),
            (talk, False),
            ({**talk, "add_special_tokens": True}, True),
        ):
            assert (post(client, "/tokenize", **body)["tokens"][0] == begin) is first, body
        (choice,) = completion(client, prompt="ab", echo=True, logprobs=1, max_tokens=0)["choices"]
        assert choice["text"] == "ab" and choice["logprobs"]["tokens"] == ["<1>", "a", "b"]
        assert choice["logprobs"]["text_offset"] == [0, 0, 1]


# --- streams and whole answers --------------------------------------------------------------------

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


def test_parameters_that_leave_no_token_are_the_clients() -> None:
    body = {"prompt": "a", "guided_choice": ["a"], "allowed_token_ids": [1]}
    client = ScriptedClient(tiny_tokenizer(), ["H"], end="error")
    error = error_of(say(client, "/v1/completions", body), 400)
    assert (error["param"], error["code"]) == ("guided_choice", "nothing_allowed")
    assert error_of(say(client, "/v1/completions", {"prompt": "a"}), 500)["code"] == "nan"


def test_whole_floats_are_integers(client: httpx.Client) -> None:
    assert completion(client, max_tokens=3.0, ignore_eos=True)["usage"]["completion_tokens"] == 3
    for wrong in (3.5, float("1e999"), "3"):
        content = json.dumps({"prompt": "a", "max_tokens": wrong})
        headers = {"content-type": "application/json"}
        answer = client.post("/v1/completions", content=content, headers=headers)
        assert error_of(answer, 400)["param"] == "max_tokens"
