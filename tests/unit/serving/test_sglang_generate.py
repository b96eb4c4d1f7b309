"""``/generate`` as slime and AReaL call it: what they send, and what they read."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.serving.sglang import generate
from tests.support.cut_models import write_layers
from tests.support.engines import config_at
from tests.support.patience import PATIENCE_SECONDS
from tests.support.served_engine import NoParent
from tests.support.served_over_http import serving

PROMPT = [100, 101, 102]
SLIMES: dict[str, Any] = {
    "temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": 8, "stop": None,
    "stop_token_ids": None, "skip_special_tokens": False, "no_stop_trim": True,
    "spaces_between_special_tokens": False, "sampling_seed": 7,
}  # fmt: skip
AREALS: dict[str, Any] = {
    "top_p": 1.0, "top_k": 1 << 30, "max_new_tokens": 8, "temperature": 0.0,
    "stop_token_ids": [0, 2], "ignore_eos": False, "skip_special_tokens": True,
    "frequency_penalty": 0.0,
}  # fmt: skip


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder: Path = tmp_path_factory.mktemp("tiny") / "model"
    write_layers("tiny", folder, 1)
    config = config_at(1, dtype="float32", max_requests=8, max_sequence_length=128)
    engine = DynamicInferenceEngine.from_pretrained(folder, config)
    with (
        serving(engine, NoParent(), has_text=True) as url,
        httpx.Client(base_url=url, timeout=PATIENCE_SECONDS) as client,
    ):
        yield client


def generated(http: httpx.Client, status: int = 200, **body: Any) -> Any:
    answer = http.post("/generate", json={"input_ids": PROMPT, **body})
    assert answer.status_code == status, answer.text
    return answer.json()


def slimes(**changes: Any) -> dict[str, Any]:
    return {"sampling_params": SLIMES | changes, "return_logprob": True}


def test_slime_reads_what_it_needs(http: httpx.Client) -> None:
    found = generated(http, **slimes(ignore_eos=True))
    meta = found["meta_info"]
    tokens = [each[1] for each in meta["output_token_logprobs"]]
    assert tokens == found["output_ids"] and len(tokens) == 8
    assert all(each[0] <= 0 and each[2] is None for each in meta["output_token_logprobs"])
    assert meta["finish_reason"] == {"type": "length", "length": 8}
    assert meta["prompt_tokens"] == 3 and meta["completion_tokens"] == 8
    assert meta["weight_version"] == "0" and meta["cached_tokens"] == 0 and meta["id"]
    assert meta["input_token_logprobs"] == [] and "output_top_logprobs" not in meta
    text = http.post("/detokenize", json={"tokens": tokens}).json()["prompt"]
    assert found["text"] == text
    assert generated(http, **slimes(ignore_eos=True))["output_ids"] == tokens, "the seed"


def test_areal_goes_on_with_what_it_has(http: httpx.Client) -> None:
    """It sends the prompt and all tokens so far; image_data is None there."""
    body = {
        "sampling_params": AREALS | {"ignore_eos": True}, "image_data": None, "stream": False,
        "return_logprob": True,
    }  # fmt: skip
    whole = generated(http, **body)["output_ids"]
    ids = [*PROMPT, *whole[:3]]
    found = generated(http, **{**body, "input_ids": ids})
    assert found["output_ids"][:5] == whole[3:]


def test_log_probs_are_of_what_was_sampled_from(http: httpx.Client) -> None:
    asked = slimes(temperature=0.7, top_k=4, ignore_eos=True) | {"top_logprobs_num": 4}
    raw = generated(http, **asked, logprobs_mode="raw_logprobs")["meta_info"]
    found = generated(http, **asked)["meta_info"]
    for own, tops, of_model in zip(
        found["output_token_logprobs"], found["output_top_logprobs"], raw["output_top_logprobs"],
        strict=True,
    ):  # fmt: skip
        assert sum(math.exp(each[0]) for each in tops) == pytest.approx(1.0, abs=1e-4)
        scaled = {token: value / 0.7 for value, token, _ in of_model}
        total = math.log(sum(map(math.exp, scaled.values())))
        assert own[0] == pytest.approx(scaled[own[1]] - total, abs=1e-3)


def test_log_probs_of_the_prompt_begin_where_they_are_asked_for(http: httpx.Client) -> None:
    asked = slimes() | {"top_logprobs_num": 2, "return_text_in_logprobs": True}
    all_of_it = generated(http, **asked, logprob_start_len=0)["meta_info"]
    assert [each[1] for each in all_of_it["input_token_logprobs"]] == PROMPT
    assert [each[0] is None for each in all_of_it["input_token_logprobs"]] == [True, False, False]
    assert [each and len(each) for each in all_of_it["input_top_logprobs"]] == [None, 2, 2]
    assert all(isinstance(each[2], str) for each in all_of_it["input_token_logprobs"])
    later = generated(http, **asked, logprob_start_len=1)["meta_info"]["input_token_logprobs"]
    assert later[0][:2] == [None, 101] and later[1] == all_of_it["input_token_logprobs"][2]
    assert generated(http, **asked, logprob_start_len=-1)["meta_info"]["input_token_logprobs"] == []
    generated(http, 400, **asked, logprob_start_len=4)


def test_an_end_says_what_it_has_matched(http: httpx.Client) -> None:
    params = AREALS | {"ignore_eos": True}
    whole = generated(http, sampling_params=params)
    stop = whole["output_ids"][3]
    first = whole["output_ids"].index(stop)
    for trims in (False, True):
        ends = params | {"stop_token_ids": [stop], "no_stop_trim": not trims}
        found = generated(http, sampling_params=ends)
        assert found["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
        assert found["output_ids"] == whole["output_ids"][: first + 1]
        shown = found["output_ids"][:first] if trims else found["output_ids"]
        text = http.post("/detokenize", json={"tokens": shown}).json()["prompt"]
        assert found["text"] == text
    word = whole["text"][2:4]
    ends = params | {"stop": [word], "no_stop_trim": True}
    found = generated(http, sampling_params=ends)
    assert found["meta_info"]["finish_reason"] == {"type": "stop", "matched": word}
    assert found["text"].endswith(word)


def test_several_prompts_and_texts_come_in_one_list(http: httpx.Client) -> None:
    params = [SLIMES | {"n": 2, "max_new_tokens": count, "ignore_eos": True} for count in (2, 3)]
    body = {"input_ids": [PROMPT, [100]], "sampling_params": params, "rid": "a"}
    found = generated(http, **body, return_logprob=[True, False])
    assert [each["meta_info"]["completion_tokens"] for each in found] == [2, 2, 3, 3]
    assert [each["meta_info"]["id"] for each in found] == ["a_0", "a_0", "a_1", "a_1"]
    assert ["output_token_logprobs" in each["meta_info"] for each in found] == [1, 1, 0, 0]
    found = generated(http, **{**body, "rid": ["x", "y"]})
    assert [each["meta_info"]["id"] for each in found] == ["x", "x", "y", "y"]
    one = http.post("/generate", json={"text": ["ab"], "sampling_params": {"max_new_tokens": 1}})
    assert len(one.json()) == 1 and one.json()[0]["meta_info"]["prompt_tokens"] == 2


def test_a_stream_shows_all_so_far(http: httpx.Client) -> None:
    body = {"input_ids": PROMPT, "stream": True, **slimes(ignore_eos=True, n=2)}
    whole = generated(http, **{**body, "stream": False})
    answer = http.put("/generate", json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    *lines, end = [line for line in answer.text.splitlines() if line]
    assert end == "data: [DONE]"
    last: dict[int, Any] = {}
    for line in lines:
        shown = json.loads(line.removeprefix("data: "))
        before = last.get(shown["index"], {"text": "", "output_ids": []})
        assert shown["text"].startswith(before["text"])
        assert shown["output_ids"][: len(before["output_ids"])] == before["output_ids"]
        last[shown["index"]] = shown
    for index, each in enumerate(whole):
        assert last[index]["output_ids"] == each["output_ids"]
        assert last[index]["text"] == each["text"]
        own = last[index]["meta_info"]
        assert own["finish_reason"] == each["meta_info"]["finish_reason"]
        assert own["output_token_logprobs"] == each["meta_info"]["output_token_logprobs"]


def test_a_long_stream_has_few_events(http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each shows all so far: as many as tokens would take the square of the time."""
    monkeypatch.setattr(generate, "EVENTS_OF_ALL", 4)
    params = SLIMES | {"max_new_tokens": 100, "ignore_eos": True}
    body = {"input_ids": PROMPT, "stream": True, "sampling_params": params}
    *events, end = http.post("/generate", json=body).text.split("\n\n")[:-1]
    shown = [json.loads(each.removeprefix("data: ")) for each in events]
    assert end == "data: [DONE]" and len(shown) < 30
    assert len(shown[-1]["output_ids"]) == 100


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("image_data", ["x"]), ("lora_path", "x"),
        ("return_hidden_states", True), ("custom_logit_processor", "x"), ("priority", 3),
        ("session_params", {"id": "x"}), ("input_embeds", [[1.0]]), ("token_ids_logprob", [1]),
        ("return_sampling_mask", True), ("bootstrap_room", 1), ("return_indexer_topk", True),
    ],
)  # fmt: skip
def test_what_is_not_served_is_refused_by_name(http: httpx.Client, field: str, value: Any) -> None:
    error = generated(http, 400, sampling_params=SLIMES, **{field: value})["error"]
    assert error["message"].startswith(f"{field} is not supported here")
    nothing: Any = [None] if isinstance(value, list) else type(value)()
    generated(http, sampling_params=SLIMES, **{field: nothing})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"custom_params": {"return_top_p_token_ids": True}}, "sampling_params.custom_params"),
        ({"stop_regex": "a"}, "sampling_params.stop_regex"),
        ({"max_tokens": 3}, "sampling_params.max_tokens"),
        ({"max_new_tokens": -1}, "max_new_tokens"),
        ({"max_new_tokens": 1000}, "max_new_tokens"),
        ({"min_new_tokens": 9}, "min_new_tokens"),
        ({"temperature": -1.0}, "temperature"),
        ({"n": 0}, "n=0"),
        ({"regex": "a", "ebnf": 'root ::= "a"'}, "regex and ebnf"),
    ],
)
def test_wrong_parameters_are_named(http: httpx.Client, changes: Any, said: str) -> None:
    assert said in generated(http, 400, sampling_params=SLIMES | changes)["error"]["message"]


def test_wrong_prompts_are_named(http: httpx.Client) -> None:
    for body, said in (
        ({"input_ids": None}, "either text or input_ids"),
        ({"text": "a"}, "either text or input_ids"),
        ({"input_ids": []}, "input_ids is empty"),
        ({"input_ids": [[1], 2]}, "input_ids[1]"),
        ({"input_ids": [1, -1]}, "input_ids[1]"),
        ({"input_ids": [1 << 30]}, "input_ids has token id"),
        ({"rid": "a b"}, "rid must have"),
        ({"rid": ["a", "b"]}, "rid has 2 values"),
        ({"sampling_params": [SLIMES] * 2}, "sampling_params has 2 values"),
    ):
        assert said in generated(http, 400, **body)["error"]["message"]


def test_structures_are_kept(http: httpx.Client) -> None:
    found = generated(http, sampling_params=AREALS | {"regex": "(ab|cd)"})
    assert found["text"] in ("ab", "cd")


def test_what_looks_is_answered(http: httpx.Client) -> None:
    for path in ("/get_model_info", "/model_info"):
        found = http.get(path).json()
        assert found["is_generation"] is True and found["weight_version"] == "0"
        assert found["model_path"] == "small"
    assert http.get("/health_generate").status_code == 200
    assert http.post("/pause_generation").status_code == 404, "by option alone"
