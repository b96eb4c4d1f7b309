"""What a request over HTTP asks of the engine, and the text of what comes back."""

from __future__ import annotations

import pytest

from megatron_async.sampling_params import SamplingParams
from megatron_async.serving.endpoints.request_shapes import ChatCompletionRequest, CompletionRequest
from megatron_async.serving.front_end.choice_text import ChoiceText
from megatron_async.serving.http.errors import ApiError, param_of
from megatron_async.serving.messages import Output
from tests.support.http_api import END, TOKENIZER, ids_of

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
