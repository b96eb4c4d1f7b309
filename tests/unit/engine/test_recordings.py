"""What is recorded, in which words, and what becomes of a file that cannot be written."""

from __future__ import annotations

import errno
import json
import os
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_async.config.engine_config import EngineConfig
from megatron_async.engine import commands, recording
from megatron_async.engine.recording import Recorder, RunFile, read_run
from megatron_async.engine.replay import replay
from megatron_async.errors import ConfigError, RequestError
from megatron_async.request.request import DynamicInferenceRequest, FinishReason
from megatron_async.sampling_params import CheckedParams
from megatron_async.step.extras import Extras
from tests.support.engines import hash_engine, random_ask, sampling_params
from tests.support.recorded_runs import SIZES

RECORDED = (
    '{"number": 0, "step": 4, "ticket": 3, "retired": 1, "command": "AddRequest", '
    '"key": 1, "request_id": 2, "prompt": "text", "tokens": [3, 4], "max_new": 5, '
    '"stop_ids": [6], "values": [0.1, 0, 1e-37, -9223372036854775808], "priority": -1, '
    '"params": {"seed": null, "logit_bias": {"5": 1.5}, "bad_words": ["a", [3, 4]]}, '
    '"extras": [0, 0.5, 1.0, 0.0, 0.0, 0, [], [[5, 1.5]], null, [], [[3, 4]], false], '
    '"prompt_log_probs": true, "fork_of": null}\n'
    '{"number": 1, "step": 4, "ticket": 3, "retired": 1, '
    '"command": "UpdateSamplingParams", "key": 1, "changes": {"temperature": 0.3}}\n'
    '{"number": 2, "step": 4, "ticket": 3, "retired": 1, "command": "EvictRequest", '
    '"key": 2}\n'
    '{"number": 3, "step": 4, "ticket": 3, "retired": 1, "command": "UpdateWeights", '
    '"source": null, "recompute_kv_cache": true, "restart": true}\n'
    '{"finished": {"request_id": 2, "reason": "stop", "tokens": [6]}, "plans": 0}\n'
)
"""What version 0.1.0 wrote behind its header."""


def test_files_of_earlier_versions_are_read_and_written_alike(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    header = {"format": "megatron-async run 1", "model": "m", "config": {"depth": None}}
    path.write_text(json.dumps(header) + "\n" + RECORDED)
    run = read_run(path)
    assert [(a.step, a.ticket, a.endings, a.has_effect) for a in run.applied] == [
        (4, 3, 0, True), (4, 3, 0, True), (4, 3, 0, False), (4, 3, 0, True),
    ]  # fmt: skip
    extras = Extras(min_p=0.5, bias=((5, 1.5),), bad_words=((3, 4),))
    params = CheckedParams.deserialize(
        {"seed": None, "logit_bias": {"5": 1.5}, "bad_words": ["a", [3, 4]]}
    )
    values = (0.1, 0, 1e-37, -(2**63))
    assert [applied.command for applied in run.applied] == [
        commands.AddRequest(
            1, 2, "text", (3, 4), 5, (6,), values, -1, params, extras, prompt_log_probs=True
        ),
        commands.UpdateSamplingParams(1, {"temperature": 0.3}),
        commands.EvictRequest(2),
        commands.UpdateWeights(None, recompute_kv_cache=True, restart=True),
    ]
    assert [(e.request_id, e.reason, e.tokens) for e in run.endings] == [(2, "stop", [6])]
    file = RunFile(path)
    recorder = Recorder(file.write)
    scheduler: Any = SimpleNamespace(next_ticket=3, retired_ticket=1)
    for applied in run.applied:
        recorder.applied(applied.command, applied.step, scheduler)
    recorder.finished(
        DynamicInferenceRequest(request_id=2, finish_reason=FinishReason.STOP, generated_tokens=[6])
    )
    file.close()
    assert path.read_text() == RECORDED


@pytest.mark.parametrize(
    "data",
    (
        None,
        {},
        {"command": "Nothing"},
        {"command": "AbortRequest"},
        {"command": "AbortRequest", "key": "1"},
        {"command": "AbortRequest", "key": 1, "more": 2},
    ),
)
def test_what_is_no_command_is_refused(data: Any) -> None:
    with pytest.raises(RequestError, match="command"):
        commands.from_json(data)


@pytest.mark.parametrize(
    ("text", "message"),
    (
        ("", "not a recorded run of this version"),
        ("[]", "not a JSON object"),
        ("no json\n{}", "1: not a line of JSON"),
        ('{"format": "megatron-async run 1", "model": "m"}', "config"),
        ('{"format": "megatron-async run 1", "model": "m", "config": {"depth": -1}}', "depth"),
    ),
)
def test_what_is_no_run_is_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with pytest.raises(ConfigError, match="cannot be read"):
        read_run(path)
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_run(path)


def test_a_run_with_weights_from_memory_says_that_it_cannot_be_repeated(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with hash_engine(1, record=str(path), **SIZES) as engine:
        engine.generate([[1]], sampling_params(random_ask(random.Random(1))))
        engine.update_weights({"salt": 1})
    with (
        hash_engine(1, **SIZES) as engine,
        pytest.raises(ConfigError, match="weights from memory"),
    ):
        replay(read_run(path), engine)


def test_a_record_that_cannot_be_written_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written"):
        hash_engine(1, record=str(tmp_path / "missing" / "run.jsonl"), **SIZES)


def test_nothing_is_recorded_that_nobody_asked_for(tmp_path: Path) -> None:
    file = RunFile(tmp_path / "run")
    file.begin(hash_config(), "hash")
    entries: list[dict[str, Any]] = []
    with hash_engine(1, **SIZES) as engine:
        assert engine.loop.recorder is None
        engine.record(Recorder(entries.append))
        engine.generate([[1]], sampling_params(random_ask(random.Random(1))))
    assert [e.get("command", "finished") for e in entries] == ["AddRequest", "finished"]
    file.close()


def hash_config() -> Any:
    from megatron_async.config.engine_config import EngineConfig

    return EngineConfig()


@pytest.mark.parametrize("what", ("full disk", "closed pipe", "disk that fills up"))
def test_a_recording_that_fails_ends_with_one_warning_and_requests_go_on(
    what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run"
    reader = -1
    if what == "closed pipe":
        os.mkfifo(path)
        reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    elif what == "full disk":
        path = Path("/dev/full")
    asked = [sampling_params(random_ask(random.Random(number))) for number in range(4)]
    prompts = [[1, 2], [3], [4], [5, 6]]
    with hash_engine(1, **SIZES) as engine:
        expected = [r.generated_tokens for r in engine.generate(prompts, asked)]
    with hash_engine(1, record=str(path), **SIZES) as engine:
        if reader >= 0:
            os.close(reader)
        if what == "disk that fills up":
            engine.generate([[9]], asked[0])
            monkeypatch.setattr(recording.json, "dumps", fail_with_no_space)
        assert [r.generated_tokens for r in engine.generate(prompts, asked)] == expected
        engine.reset()
    (warning,) = [r for r in caplog.records if "cannot be written any more" in r.message]
    assert warning.levelname == "WARNING" and str(path) in warning.message
    if what == "disk that fills up":
        monkeypatch.undo()
        assert len(read_run(path).endings) == 1


def fail_with_no_space(*_: Any) -> str:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("record", (True, 1, b"run", ["run"], 2.5))
def test_a_record_is_a_path(record: Any) -> None:
    with pytest.raises(ConfigError, match="record="):
        EngineConfig(record=record)
