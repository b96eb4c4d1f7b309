"""One codec: what crosses processes or goes into files is typed data, encoded in one module."""

from __future__ import annotations

import ast
import dataclasses
import json
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch

from megatron_async.codec import Codec, from_plain, to_plain
from megatron_async.errors import RequestError
from megatron_async.request.request import DynamicInferenceRequest, Status
from tests.unit.test_architecture import PACKAGE, ROOT, imports_of

FILES = sorted(PACKAGE.rglob("*.py"))
IN_THE_BENCHMARK = PACKAGE / "benchmark" / "measuring" / "http_client.py"
"""A client of any server, which measures how fast ours answers."""
MADE_IN_THE_CODEC = ("msgspec.msgpack", "msgspec.json", "msgspec.convert", "msgspec.to_builtins")


@dataclasses.dataclass(frozen=True)
class Sizes:
    rows: int
    costs: tuple[tuple[int, float], ...] = ()


class Point(NamedTuple):
    x: int
    y: float = 0.0


class First(msgspec.Struct, frozen=True, tag=True):
    sizes: Sizes
    points: tuple[Point, ...]


class Second(msgspec.Struct, frozen=True, tag=True):
    data: bytes
    more: dict[str, Any]


BOTH: Codec[First | Second] = Codec(First | Second)


@pytest.mark.parametrize(
    "message",
    [
        First(Sizes(1, ((2, 0.5),)), (Point(1), Point(-(2**63), 1e-37))),
        Second(bytes(range(256)), {"a": [1, None, {"b": 2**64 - 1}]}),
    ],
)
def test_messages_come_back_as_they_were(message: First | Second) -> None:
    assert BOTH.decode(BOTH.encode(message)) == message
    plain = json.loads(json.dumps(to_plain(message)))
    assert from_plain(plain, First | Second) == message


@pytest.mark.parametrize(
    "data",
    [b"", b"\xc1", b"\x91" * 5000, msgspec.msgpack.encode({"type": "Third"}), b"\x80 and more"],
)
def test_what_is_no_message_says_so(data: bytes) -> None:
    with pytest.raises(ValueError, match="this is not a message: "):
        BOTH.decode(data)


class Name(str):
    pass


def test_subclasses_of_pythons_own_types_are_sent_as_those() -> None:
    message = Second(b"", {"a": np.float64(0.5), "b": Name("c"), "d": [True, Status.COMPLETED]})
    own = {"a": 0.5, "b": "c", "d": [True, Status.COMPLETED.value]}
    found = BOTH.decode(BOTH.encode(message))
    assert found == Second(b"", own) and to_plain(message.more) == own
    assert all(type(value) in (float, str, list) for value in to_plain(message.more).values())
    for wrong in (object(), torch.device("cpu"), {1: np.zeros(2)}):
        with pytest.raises(TypeError, match="is no data that is sent or written"):
            BOTH.encode(Second(b"", {"a": wrong}))
        with pytest.raises(TypeError, match="is no data that is sent or written"):
            to_plain(wrong)


def test_a_wrong_value_is_named_by_its_place() -> None:
    plain = {"type": "First", "sizes": {"rows": "2"}, "points": []}
    with pytest.raises(ValueError, match=r"Expected `int`, got `str` - at `\$\.sizes\.rows`"):
        from_plain(plain, First | Second)


def test_encoders_and_decoders_are_made_in_one_module() -> None:
    made = {
        path.relative_to(ROOT).as_posix()
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and ast.unparse(node) in MADE_IN_THE_CODEC
    }
    assert made == {"megatron_async/codec.py", IN_THE_BENCHMARK.relative_to(ROOT).as_posix()}


@pytest.mark.parametrize("folder", ["step", "scheduler", "cache"])
def test_decisions_need_no_codec(folder: str) -> None:
    for path in (PACKAGE / folder).glob("*.py"):
        found = {name.partition(".")[0] for name in imports_of(path)} | imports_of(path)
        assert not found & {"msgspec", "megatron_async.codec"}, path


def positional_calls(path: Path, names: set[str]) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in names and node.args
    ]


def test_plans_and_reports_are_filled_by_keyword() -> None:
    names = {"Plan", "StepReport"}
    assert [call for path in FILES for call in positional_calls(path, names)] == []


REQUEST = (
    '{"request_id": 7, "prompt": "abc", "prompt_tokens": [65, 66], '
    '"sampling_params": {"temperature": 1.0, "top_k": 0, "top_p": 0.0, '
    '"return_log_probs": false, "skip_prompt_log_probs": false, "return_segments": false, '
    '"num_tokens_to_generate": 3, "num_tokens_total": null, "termination_id": null, '
    '"top_n_logprobs": 2, "add_BOS": false, "stop_words": ["zz"], "stop_token_ids": [], '
    '"seed": null, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, '
    '"frequency_penalty": 0.0, "logit_bias": {"3": 1.5}, "allowed_token_ids": null, '
    '"bad_words": ["a", [1, 2]], "min_tokens": 0, "ignore_eos": false, '
    '"include_stop_str_in_output": false, "detokenize": true, "log_probs_mode": "raw", "n": 2, '
    '"best_of": null, "num_speculative_tokens": null, "cache_salt": null, '
    '"structured_outputs": {"json": {"enum": [1]}}, "forced_token_ids": null, '
    '"logits_processors": null, "return_routed_experts": false}, '
    '"generated_tokens": [4, 5], "generated_text": "de", "generated_log_probs": [-0.25, '
    '-Infinity], "prompt_log_probs": [-1.0], "generated_top_n_logprobs": [{"4": -0.25, '
    '"9": -1.5}, {}], "prompt_top_n_logprobs": [{"1": -2.0}], "prompt_token_ranks": null, '
    '"finish_reason": "stop", '
    '"stop_reason": "zz", "seed": 9223372036854775807, "choices": [{"request_id": -1, '
    '"prompt": null, "prompt_tokens": [65], "sampling_params": {"temperature": 1.0, '
    '"top_k": 0, "top_p": 0.0, "return_log_probs": false, "skip_prompt_log_probs": false, '
    '"return_segments": false, "num_tokens_to_generate": 30, "num_tokens_total": null, '
    '"termination_id": null, "top_n_logprobs": 0, "add_BOS": false, "stop_words": null, '
    '"stop_token_ids": [], "seed": null, "min_p": 0.0, "repetition_penalty": 1.0, '
    '"presence_penalty": 0.0, "frequency_penalty": 0.0, "logit_bias": null, '
    '"allowed_token_ids": null, "bad_words": null, "min_tokens": 0, "ignore_eos": false, '
    '"include_stop_str_in_output": false, "detokenize": true, "log_probs_mode": "raw", "n": 1, '
    '"best_of": null, "num_speculative_tokens": null, "cache_salt": null, '
    '"structured_outputs": null, '
    '"forced_token_ids": null, '
    '"logits_processors": null, "return_routed_experts": false}, '
    '"generated_tokens": [], "generated_text": null, '
    '"generated_log_probs": null, "prompt_log_probs": null, '
    '"generated_top_n_logprobs": [[["a", -0.5], ["b", -Infinity]]], '
    '"prompt_top_n_logprobs": null, "prompt_token_ranks": null, '
    '"finish_reason": "length", "stop_reason": null, '
    '"seed": null, "choices": [], "weight_spans": [], "sampling_spans": [], "steps": [], '
    '"status": "COMPLETED", "arrival_time": 1.5, "queue_time": null, "latency": null, '
    '"tpot": [], "events": [], "counters": {"launched": 0, "drafted": 0, "accepted": 0, '
    '"accepted_by_position": [], "committed": 0, "discarded": 0, "cached": 0, "replayed": 0, '
    '"stalls": 0, "evictions": 0, "restarts": 0}}], "weight_spans": [[0, 1], [3, 2]], '
    '"sampling_spans": [[4, {"temperature": 0.5, "top_k": 0, "top_p": 0.0, '
    '"return_log_probs": false, "skip_prompt_log_probs": false, "return_segments": false, '
    '"num_tokens_to_generate": 30, "num_tokens_total": null, "termination_id": null, '
    '"top_n_logprobs": 0, "add_BOS": false, "stop_words": null, "stop_token_ids": [], '
    '"seed": null, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, '
    '"frequency_penalty": 0.0, "logit_bias": null, "allowed_token_ids": null, '
    '"bad_words": null, "min_tokens": 0, "ignore_eos": false, '
    '"include_stop_str_in_output": false, "detokenize": true, "log_probs_mode": "raw", "n": 1, '
    '"best_of": null, "num_speculative_tokens": null, "cache_salt": null, '
    '"structured_outputs": null, '
    '"forced_token_ids": null, '
    '"logits_processors": null, "return_routed_experts": false}]], '
    '"steps": [[1, 0, false, "serial", 1, 0, 0, 0], [2, 1, true, '
    'null, 1, 0, 2, 1]], "status": "FAILED", "arrival_time": 1700000000.25, "queue_time": 0.5, '
    '"latency": 2.0, "tpot": [0.5, 0.25], "events": [{"type": "ADD", "timestamp": 1.0, '
    '"payload": null}, {"type": "ERROR_NONTRANSIENT", "timestamp": 2.0, '
    '"payload": {"type": "RequestError", "message": "why"}}, {"type": "FAIL", '
    '"timestamp": 3.0, "payload": "said"}], "counters": {"launched": 3, "drafted": 0, '
    '"accepted": 0, "accepted_by_position": [1, 0], "committed": 0, "discarded": 0, '
    '"cached": 0, "replayed": 0, "stalls": 0, "evictions": 0, "restarts": 0}}'
)
"""What version 0.1.0 made of a request."""


def test_requests_of_earlier_versions_are_read_and_written_alike() -> None:
    request = DynamicInferenceRequest.deserialize(json.loads(REQUEST))
    assert json.dumps(request.serialize()) == REQUEST
    assert request.seed == 2**63 - 1 and request.choices[0] is request
    assert str(request.events[1].payload) == "why" and request.steps[1].accepted == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("generated_tokens", ["4"]),
        ("counters", {"launched": 1.5}),
        ("steps", [[1]]),
        ("finish_reason", "tired"),
        ("sampling_spans", [[1]]),
        ("prompt_tokens", "65"),
        ("generated_top_n_logprobs", [[["a"]]]),
        ("events", [{"type": "ADD"}]),
        ("status", "GONE"),
    ],
)
def test_a_wrong_field_of_a_request_is_named(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=f"{name} of the serialized request is not valid"):
        DynamicInferenceRequest.deserialize({"request_id": 1, name: value})
