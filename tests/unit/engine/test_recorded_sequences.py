"""Prompts and answers of a recorded run, whoever wrote it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_async import SamplingParams
from megatron_async.engine.recording import read_run
from megatron_async.errors import ConfigError
from tests.support.engines import hash_engine


def test_an_ending_of_a_request_that_nobody_added_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with hash_engine(1, max_requests=2, record=str(path)) as engine:
        engine.generate([[1, 2, 3]], SamplingParams(num_tokens_to_generate=3, termination_id=-1))
    ((prompt, answer),) = read_run(path).sequences()
    assert prompt == (1, 2, 3) and len(answer) == 3
    lines = path.read_text().splitlines()
    path.write_text("\n".join(x for x in lines if json.loads(x).get("command") != "AddRequest"))
    with pytest.raises(ConfigError, match="request_id=0 ended and was not added"):
        read_run(path).sequences()
