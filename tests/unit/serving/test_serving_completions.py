"""Completions over HTTP, whole and in streams."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
import tokenizers
from tokenizers import processors

from megatron_async.tokenizer.tokenizer import Tokenizer
from tests.support.fake_engine_client import FINGERPRINT
from tests.support.http_api import (
    ENDPOINTS,
    TOKENIZER,
    chat,
    completion,
    engine,
    error_of,
    events_of,
    http,
    ids_of,
    post,
)
from tests.support.served import served

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
    assert [top and list(top) for top in shown["top_logprobs"]] == [None, ["bytes:\\xa9"]]
    ids = completion(client, **body, return_tokens_as_token_ids=True)["choices"][0]["logprobs"]
    assert ids["tokens"] == [f"token_id:{first}", f"token_id:{second}"]


def test_log_probs_of_no_likely_tokens_are_those_of_the_tokens_alone(client: httpx.Client) -> None:
    whole = completion(client, logprobs=0, max_tokens=5, ignore_eos=True)["choices"][0]
    shown = whole["logprobs"]
    pairs = zip(shown["tokens"], shown["token_logprobs"], strict=True)
    assert shown["top_logprobs"] == [{token: of} for token, of in pairs]
    body = {"prompt": "abc", "seed": 3, "logprobs": 0, "max_tokens": 5, "ignore_eos": True}
    chunks = events_of(client, "/v1/completions", **body)
    tops = [top for chunk in chunks for top in chunk["choices"][0]["logprobs"]["top_logprobs"]]
    assert tops == shown["top_logprobs"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "abc"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "abc"}]}),
    ],
)
def test_answers_have_the_fingerprint_of_the_server(
    path: str, body: dict[str, Any], client: httpx.Client
) -> None:
    whole = post(client, path, max_tokens=3, **body)
    assert whole["system_fingerprint"] == FINGERPRINT
    chunks = events_of(client, path, max_tokens=3, stream_options={"include_usage": True}, **body)
    assert {chunk["system_fingerprint"] for chunk in chunks} == {FINGERPRINT}


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


@pytest.mark.parametrize("path", ENDPOINTS)
def test_a_default_length_ends_the_answers_of_each_endpoint(path: str) -> None:
    body = {name: value for name, value in ENDPOINTS[path].items() if "max" not in name}
    defaults = {"num_tokens_to_generate": 3}
    with served(engine(), sampling_defaults=defaults) as server, http(server) as client:
        used = post(client, path, **body, ignore_eos=True)["usage"]
        assert used.get("completion_tokens", used.get("output_tokens")) == 3


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


@pytest.mark.parametrize(
    ("prompt", "skips", "text", "offsets"),
    [
        ("a<end>b", True, "a<end>b", [0, 0, 1, 6]),
        ("<1>a<end>", False, "<1>a<end>", [0, 0, 3, 4]),
        (["a", "<end>", "b"], True, "ab", [0, 1, 1]),
        (["<1>", "a", "<end>"], False, "<1>a<end>", [0, 3, 4]),
        (["Ã", "b"], True, "\ufffdb", [0, 1]),
        (["a", "Ã"], True, "a\ufffd", [0, 1]),  # what follows is no part of this character
    ],
)
def test_offsets_count_in_the_echoed_text(
    prompt: str | list[str], skips: bool, text: str, offsets: list[int]
) -> None:
    tokenizer = with_begin_token()
    sent = prompt
    if not isinstance(prompt, str):
        sent = [tokenizer.vocabulary[token] for token in prompt]  # type: ignore[assignment]
    body: Any = {"prompt": sent, "skip_special_tokens": skips, "logprobs": 0, "ignore_eos": True}
    with served(engine(), tokenizer=tokenizer) as server, http(server) as client:
        (alone,) = completion(client, **body)["choices"]
        (choice,) = completion(client, **body, echo=True)["choices"]
        streamed = events_of(client, "/v1/completions", seed=3, max_tokens=12, echo=True, **body)
    assert choice["text"] == text + alone["text"]
    behind = [len(text) + offset for offset in alone["logprobs"]["text_offset"]]
    assert choice["logprobs"]["text_offset"] == offsets + behind
    parts = [chunk["choices"][0]["logprobs"]["text_offset"] for chunk in streamed]
    assert [offset for part in parts for offset in part] == offsets + behind


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
