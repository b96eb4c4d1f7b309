"""The range of a sampling parameter is written once: what checks it and what describes it agree."""

from __future__ import annotations

import argparse
import math
from typing import Any

import pytest

from megatron_async.cli.options.sampling import add_sampling_options
from megatron_async.errors import RequestError
from megatron_async.request.parameter_ranges import INTEGERS, NUMBERS
from megatron_async.sampling_params import SamplingParams
from megatron_async.serving.endpoints.megatron_api import MegatronRequest
from megatron_async.serving.endpoints.request_shapes import ChatCompletionRequest, CompletionRequest

OF_REQUESTS = {**NUMBERS, **INTEGERS}
SHOWN_AS = {"prompt_logprobs": "top_n_logprobs", "logprobs": "top_n_logprobs"}
OWN = {"n", "best_of", "top_k", "seed"}
"""Parameters whose range in OpenAI's API is the server's own, or is not shown."""


@pytest.mark.parametrize("name", [name for name in OF_REQUESTS if name != "priority"])
def test_parameters_take_their_range_and_nothing_beyond(name: str) -> None:
    low, high = OF_REQUESTS[name]
    if name == "min_tokens":
        high = None  # bounded by what may be generated
    SamplingParams(**{name: low}).checked()
    below = math.nextafter(low, -math.inf) if name in NUMBERS else low - 1
    with pytest.raises(RequestError, match=name):
        SamplingParams(**{name: below}).checked()
    if high is not None:
        SamplingParams(**{name: high}).checked()
        with pytest.raises(RequestError, match=name):
            SamplingParams(**{name: high * 2 + 1}).checked()


@pytest.mark.parametrize("body", [CompletionRequest, ChatCompletionRequest])
def test_the_openapi_description_has_the_same_ranges(body: Any) -> None:
    shown = body.model_json_schema()["properties"]
    seen = set()
    for field, said in shown.items():
        name = SHOWN_AS.get(field, field)
        if name in OWN or name not in OF_REQUESTS or "minimum" not in said:
            continue
        low, high = OF_REQUESTS[name]
        assert (said["minimum"], said.get("maximum")) == (low, high), field
        seen.add(name)
    assert seen >= {*NUMBERS, "min_tokens", "num_speculative_tokens", "priority", "top_n_logprobs"}


def test_megatrons_request_has_the_same_ranges() -> None:
    shown = MegatronRequest.model_json_schema()["properties"]
    for name in ("top_p", "top_n_logprobs"):
        assert (shown[name]["minimum"], shown[name]["maximum"]) == OF_REQUESTS[name]


@pytest.mark.parametrize("name", ["temperature", "top_p", "top_k", "seed", "termination_id"])
def test_the_command_line_takes_the_same_ranges(name: str) -> None:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_sampling_options(parser)
    low, high = OF_REQUESTS[name]
    flag = "--" + name.replace("_", "-")
    assert getattr(parser.parse_args([f"{flag}={low}"]), name) == low
    for beyond in (low - 1, None if high is None else high * 2 + 1):
        if beyond is not None:
            with pytest.raises(argparse.ArgumentError):
                parser.parse_args([f"{flag}={beyond}"])
