"""Sampling defaults and end ids of ``generation_config.json``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig

from megatron_async.checkpoint.huggingface.generation_config import (
    SAMPLED,
    TOP_K,
    sampling_defaults,
)
from megatron_async.cli.main import main
from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.errors import CheckpointError, ConfigError
from megatron_async.sampling_params import SamplingParams
from megatron_async.serving.endpoints.request_shapes import ChatCompletionRequest, CompletionRequest
from tests.support.engines import config_at
from tests.support.huggingface_models import random_model

GIVEN = {
    "do_sample": True,
    "temperature": 0.7,
    "top_k": 20,
    "top_p": 0.8,
    "repetition_penalty": 1.05,
    "max_new_tokens": 9,
}


def write(path: Path, values: Any) -> Path:
    (path / "generation_config.json").write_text(json.dumps(values))
    return path


def test_fields_become_sampling_parameters(tmp_path: Path) -> None:
    assert sampling_defaults(write(tmp_path, GIVEN)) == {
        "temperature": 0.7,
        "top_k": 20,
        "top_p": 0.8,
        "repetition_penalty": 1.05,
        "num_tokens_to_generate": 9,
    }
    assert sampling_defaults(write(tmp_path, {"do_sample": True, "top_k": 0})) == {
        "temperature": 1.0
    }
    for silent in ({}, {"top_k": None}):
        found = sampling_defaults(write(tmp_path, {"do_sample": True, **silent}))
        assert found == {"temperature": 1.0, "top_k": 50}
    for greedy in (
        {}, {"temperature": 0.5}, {"do_sample": False, "top_p": 0.5},
        {"do_sample": True, "temperature": 0}, {"do_sample": True, "temperature": 0.0},
    ):  # fmt: skip
        assert sampling_defaults(write(tmp_path, greedy)) == {"temperature": 0.0}


def named(log: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in log.records]


def test_the_table_has_every_field_of_transformers() -> None:
    assert not set(vars(GenerationConfig())) - SAMPLED.names - {"_from_model_config"}
    assert set(GenerationConfig._get_default_generation_params()) <= SAMPLED.names


def test_what_transformers_takes_by_default_changes_nothing(log: pytest.LogCaptureFixture) -> None:
    defaults = GenerationConfig._get_default_generation_params()
    assert defaults["top_k"] == TOP_K
    assert set(SAMPLED.unsupported(defaults)) == {"max_length"}


OTHERS = {
    "num_beams": 4, "typical_p": 0.9, "no_repeat_ngram_size": 3, "min_new_tokens": 5,
    "stop_strings": ["x"], "suppress_tokens": [3], "sequence_bias": [[[3], -1.0]], "max_time": 0.5,
    "guidance_scale": 1.5, "num_return_sequences": 2, "cache_implementation": "quantized",
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_what_would_change_the_tokens_is_named(
    name: str, tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    sampling_defaults(write(tmp_path, {"do_sample": True, name: OTHERS[name]}))
    (said,) = named(log)
    assert f"{name}={OTHERS[name]!r}" in said and "left unread" in said


def test_filters_of_sampling_do_not_matter_where_the_likeliest_token_is_taken(
    tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    values = {"typical_p": 0.9, "eta_cutoff": 0.1, "epsilon_cutoff": 0.1, "top_h": 0.3}
    sampling_defaults(write(tmp_path, values))
    assert not named(log)


def test_fields_that_nobody_knows_are_named(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    sampling_defaults(write(tmp_path, {"mood\n": 3, "_from_model_config": True}))
    (said,) = named(log)
    assert said.endswith(r"fields that are left unread: mood\n")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"do_sample": 1}, "do_sample=1 must be of type bool"),
        ({"do_sample": True, "temperature": "hot"}, "temperature='hot' must be of type float"),
        ({"do_sample": True, "top_p": 1.5}, "top_p=1.5"),
        ({"max_new_tokens": -3}, "num_tokens_to_generate=-3"),
    ],
)
def test_wrong_value_is_named(values: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message) as raised:
        sampling_defaults(write(tmp_path, values))
    assert str(raised.value).startswith(str(tmp_path / "generation_config.json"))


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no generation_config\.json"):
        sampling_defaults(tmp_path)


def test_requests_over_http_take_what_they_leave_out() -> None:
    defaults = {"temperature": 0.7, "top_k": 20, "num_tokens_to_generate": 9}
    body = ChatCompletionRequest.model_validate({"messages": [], "temperature": 0.2})
    params = body.with_defaults(defaults).params(8)
    assert (params.temperature, params.top_k, params.num_tokens_to_generate) == (0.2, 20, 9)
    params = body.with_defaults({}).params(8)
    assert (params.temperature, params.top_k) == (0.2, 0)
    own = CompletionRequest.model_validate({"prompt": "a", "max_tokens": 3, "top_k": -1})
    params = own.with_defaults(defaults).params(8)
    assert (params.temperature, params.top_k, params.num_tokens_to_generate) == (0.7, 0, 3)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    random_model("llama").save_pretrained(path)
    return path


def test_requests_without_parameters_take_them(directory: Path) -> None:
    write(directory, GIVEN)
    prompt = [5, 6, 7]
    config = config_at(1, max_requests=2, generation_config=True)
    with DynamicInferenceEngine.from_pretrained(directory, config) as engine:
        (taken,) = engine.generate([prompt])
        params = SamplingParams(**sampling_defaults(directory))
        with engine.with_config(config) as other:
            (given,) = other.generate([prompt], params)
        plain = config_at(1, max_requests=2)
        with engine.with_config(plain) as other:
            assert len(other.generate([prompt])[0].generated_tokens) == 30
            with pytest.raises(ConfigError, match="give it to from_pretrained"):
                other.with_config(config)
    assert len(taken.generated_tokens) == 9
    assert taken.generated_tokens == given.generated_tokens


def test_generate_command_takes_them(directory: Path, capsys: Any) -> None:
    write(directory, {"max_new_tokens": 5})
    prompts = directory / "prompts.jsonl"
    prompts.write_text('{"prompt": [5, 6, 7]}\n')
    command = ["generate", "--model", str(directory), "--prompt-file", str(prompts), "--json"]
    assert main([*command, "--generation-config"]) == 0
    assert len(json.loads(capsys.readouterr().out)["token_ids"]) == 5


def test_twelve_end_ids_end_a_request_at_every_depth(directory: Path) -> None:
    """The device knows eight of them."""
    write(directory, {})
    with DynamicInferenceEngine.from_pretrained(directory, config_at(0)) as engine:
        params = SamplingParams(temperature=0, num_tokens_to_generate=20, termination_id=-1)
        tokens = engine.generate([[5, 6, 7]], params)[0].generated_tokens
    others = [token for token in range(128) if token not in tokens]
    for place in (3, 12):
        wanted = tokens[: tokens.index(tokens[place]) + 1]
        ends = [*others[:11], tokens[place]]  # the largest ids are those the host alone knows
        for depth in (0, 1, 2):
            write(directory, {"eos_token_id": ends})
            with DynamicInferenceEngine.from_pretrained(directory, config_at(depth)) as engine:
                assert set(engine.eos_token_ids or ()) == set(ends)
                (found,) = engine.generate(
                    [[5, 6, 7]], SamplingParams(temperature=0, num_tokens_to_generate=20)
                )
            assert found.generated_tokens == wanted
