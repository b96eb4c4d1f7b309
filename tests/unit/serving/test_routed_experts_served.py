"""Answers say which experts their tokens went to, in vLLM's and in SGLang's form."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from megatron_async import SamplingParams
from megatron_async.engine.engine import DynamicInferenceEngine
from tests.support.cut_models import write_layers
from tests.support.engines import config_at
from tests.support.patience import PATIENCE_SECONDS
from tests.support.served_engine import NoParent
from tests.support.served_over_http import serving

PROMPT = list(b"def f(x):")
LENGTH = 6


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[httpx.Client, Any]]:
    """A client, and the experts that the engine itself says. Clients count all layers of the model:
    the first one has no experts, and zeros."""
    folder: Path = tmp_path_factory.mktemp("weights") / "experts"
    write_layers("tiny-moe", folder, 2)
    config = config_at(
        1, dtype="float32", max_requests=2, max_sequence_length=256, return_routed_experts=True,
        batch_invariant=True,
    )  # fmt: skip
    engine = DynamicInferenceEngine.from_pretrained(folder, config)
    params = SamplingParams(
        temperature=0.0, num_tokens_to_generate=LENGTH, termination_id=-1, ignore_eos=True,
        return_routed_experts=True,
    )  # fmt: skip
    (request,) = engine.generate([PROMPT], params)
    with (
        serving(engine, NoParent(), development=True, has_text=True) as url,
        httpx.Client(base_url=url, timeout=PATIENCE_SECONDS) as client,
    ):
        expected = np.pad(request.routed_experts, ((0, 0), (1, 0), (0, 0)))
        assert expected.shape[1] == 2
        yield client, expected


def body(**values: Any) -> dict[str, Any]:
    return {
        "prompt": PROMPT, "max_tokens": LENGTH, "temperature": 0, "ignore_eos": True,
        "return_routed_experts": True, **values,
    }  # fmt: skip


def loaded(shown: str) -> Any:
    return np.load(io.BytesIO(base64.b64decode(shown)), allow_pickle=False)


@pytest.mark.parametrize("stream", (False, True))
def test_completions_have_them_as_vllm_does(served: Any, stream: bool) -> None:
    http, expected = served
    answer = http.post("/v1/completions", json=body(stream=stream)).raise_for_status()
    choices = ends_of(answer, stream)
    found = loaded(choices[0]["routed_experts"])
    assert found.dtype == np.uint16 and len(found) == len(PROMPT) + LENGTH - 1
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("stream", (False, True))
def test_chat_and_responses_have_them(served: Any, stream: bool) -> None:
    http, expected = served
    asked = body(stream=stream, messages=[{"role": "user", "content": "a"}])
    del asked["prompt"]
    answer = http.post("/v1/chat/completions", json=asked).raise_for_status()
    found = loaded(ends_of(answer, stream)[0]["routed_experts"])
    assert found.shape[1:] == expected.shape[1:] and len(found) > LENGTH
    if not stream:
        asked = body(input="a", max_output_tokens=LENGTH)
        del asked["prompt"], asked["max_tokens"]
        response = http.post("/v1/responses", json=asked).raise_for_status().json()
        assert loaded(response["routed_experts"]).shape[1:] == expected.shape[1:]


@pytest.mark.parametrize("stream", (False, True))
def test_generate_has_them_as_sglang_does(served: Any, stream: bool) -> None:
    http, expected = served
    params = {"max_new_tokens": LENGTH, "temperature": 0, "ignore_eos": True}
    asked: dict[str, Any] = {"input_ids": PROMPT, "sampling_params": params, "stream": stream}
    answer = http.post("/generate", json=asked | {"return_routed_experts": True})
    answer.raise_for_status()
    shown = events_of(answer)[-1] if stream else answer.json()
    ids = np.frombuffer(base64.b64decode(shown["meta_info"]["routed_experts"]), np.int32)
    np.testing.assert_array_equal(ids.reshape(expected.shape), expected)
    silent = http.post("/generate", json=asked | {"stream": False}).raise_for_status().json()
    assert "routed_experts" not in silent["meta_info"]


def test_nothing_is_said_unless_asked(served: Any) -> None:
    http, _ = served
    answer = http.post("/v1/completions", json=body(return_routed_experts=False))
    assert "routed_experts" not in answer.raise_for_status().json()["choices"][0]


def events_of(answer: httpx.Response) -> list[dict[str, Any]]:
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


def ends_of(answer: httpx.Response, stream: bool) -> list[dict[str, Any]]:
    """The choices that say why a text ended."""
    shown = events_of(answer) if stream else [answer.json()]
    choices = [choice for each in shown for choice in each["choices"]]
    return [choice for choice in choices if choice["finish_reason"] is not None]
