"""Answers say which weights sampled them, as spans of their tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from megatron_async.engine.engine import DynamicInferenceEngine
from tests.support.cut_models import write_layers
from tests.support.engines import config_at
from tests.support.patience import PATIENCE_SECONDS
from tests.support.served_engine import NoParent
from tests.support.served_over_http import serving

BODY: dict[str, Any] = {"return_weight_versions": True, "ignore_eos": True}
PATHS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a", "max_tokens": 8},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 8},
    "/v1/responses": {"input": "a", "max_output_tokens": 8},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root: Path = tmp_path_factory.mktemp("weights")
    write_layers("tiny", root / "old", 1)
    write_layers("tiny", root / "new", 1, scale=1.3)
    return [root / "old", root / "new"]


@pytest.fixture(scope="module")
def http(folders: list[Path]) -> Iterator[httpx.Client]:
    config = config_at(1, dtype="float32", max_requests=4, max_sequence_length=1024)
    engine = DynamicInferenceEngine.from_pretrained(folders[0], config)
    with (
        serving(engine, NoParent(), development=True, has_text=True) as url,
        httpx.Client(base_url=url, timeout=PATIENCE_SECONDS) as client,
    ):
        yield client


def update(http: httpx.Client, folder: Path) -> int:
    answer = http.post("/weights", json={"path": str(folder)}).raise_for_status()
    version: int = answer.json()["weight_version"]
    return version


def ends_of(path: str, answer: httpx.Response, stream: bool) -> list[dict[str, Any]]:
    """What says why a text ended."""
    if not stream:
        found = answer.json()
        return list(found.get("choices", [found]))
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
    events = [json.loads(line) for line in lines]
    if path == "/v1/responses":
        return [events[-1]["response"]]
    return [each for event in events for each in event["choices"] if each["finish_reason"]]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
def test_an_answer_says_which_weights_sampled_it(
    http: httpx.Client, folders: list[Path], path: str, stream: bool
) -> None:
    body = {**PATHS[path], "stream": stream}
    for folder in reversed(folders):
        version = update(http, folder)
        (end,) = ends_of(path, http.post(path, json=body | BODY).raise_for_status(), stream)
        assert end["weight_versions"] == [{"version": version, "start": 0, "end": 8}]
    (silent,) = ends_of(path, http.post(path, json=body).raise_for_status(), stream)
    assert "weight_versions" not in silent


def test_new_weights_begin_a_span(http: httpx.Client, folders: list[Path]) -> None:
    body = {"prompt": ["a", "b"], "max_tokens": 500, "stream": True, "return_token_ids": True}
    ends: list[dict[str, Any]] = []
    while len(ends) < 2 or any(len(end["weight_versions"]) != 2 for end in ends):
        first, lines = update(http, folders[1]), []
        with http.stream("POST", "/v1/completions", json=body | BODY) as answer:
            each = answer.iter_lines()
            while len(lines) < 8:  # they have begun, and may end before the new weights come
                lines.append(next(each))
            second = update(http, folders[0])
            lines += each
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        choices = [choice for event in events for choice in event["choices"]]
        ends = [choice for choice in choices if choice["finish_reason"]]
    assert second == first + 1
    for end in ends:
        old, new = end["weight_versions"]
        assert (old["version"], new["version"]) == (first, second)
        assert 0 == old["start"] < old["end"] == new["start"] < new["end"] == 500


@pytest.mark.parametrize("path", PATHS)
def test_spans_say_how_many_drafts_were_accepted(folders: list[Path], path: str) -> None:
    """By place; what a request is told is what the metrics have of the same weights."""
    config = config_at(
        1, dtype="float32", max_requests=2, num_speculative_tokens=2, speculative_method="ngram"
    )
    engine = DynamicInferenceEngine.from_pretrained(folders[0], config)
    with (
        serving(engine, NoParent(), development=True, has_text=True) as url,
        httpx.Client(base_url=url, timeout=PATIENCE_SECONDS) as client,
    ):
        update(client, folders[1])
        asked = {**PATHS[path], **BODY, "temperature": 0}
        asked |= {name: 40 for name in asked if name.startswith("max_")}
        (end,) = ends_of(path, client.post(path, json=asked).raise_for_status(), False)
        (span,) = end["weight_versions"]
        assert (span["version"], span["start"], span["end"]) == (1, 0, 40)
        assert len(span["drafted"]) == len(span["accepted"]) == 2
        assert span["drafted"][0] >= span["accepted"][0] >= span["accepted"][1] > 0
        counters = engine.counters.to_dict()["drafts_by_version"]["1"]
        accepted = [*counters["accepted"], *[0] * (2 - len(counters["accepted"]))]
        assert (span["drafted"], span["accepted"]) == (counters["drafted"], accepted)
