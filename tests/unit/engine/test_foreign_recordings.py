"""A recording of somebody else is refused or repeated, and never anything else."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import pytest

from megatron_async.config.engine_config import EngineConfig
from megatron_async.engine import commands, recorded_config
from megatron_async.engine.recording import read_run
from megatron_async.engine.replay import replay
from megatron_async.errors import ConfigError, MegatronAsyncError, RequestError
from tests.support.engines import hash_engine
from tests.support.hash_tokenizer import hash_tokenizer
from tests.support.recorded_runs import MORE_SIZES, more

WRONG: tuple[Any, ...] = (
    None, True, -1, 1.5, 2**64, -(2**80), 10**400, 1e308, "", "x", [], [-1], [[]], {}, {"a": 1},
)  # fmt: skip
"""What stands in place of a right value."""


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Any:
    """Where in a JSON value something else can stand: each member, and each first item."""
    members = value.items() if isinstance(value, dict) else enumerate(value[:2])
    for name, member in members:
        yield (*path, name)
        if isinstance(member, dict | list):
            yield from leaves(member, (*path, name))


def changed(line: dict[str, Any], path: tuple[Any, ...], value: Any) -> str:
    """``line`` with another value at ``path``; without one for ``...``."""
    line = json.loads(json.dumps(line))
    within: Any = line
    for name in path[:-1]:
        within = within[name]
    if value is ...:
        del within[path[-1]]
    else:
        within[path[-1]] = value
    return json.dumps(line)


def recorded_lines(path: Path) -> list[str]:
    """A run with every kind of line that a fuzzer may change."""
    with hash_engine(1, tokenizer=hash_tokenizer(), record=str(path), **MORE_SIZES) as engine:
        engine.add_request(0, [5, 6, 7], more(6, n=2, min_p=0.1, bad_words=[[1, 2]], seed=4))
        engine.step_modern()
        engine.update_sampling_params(0, temperature=0.5, top_k=3)
        engine.pause_request(0)
        engine.step_modern()
        engine.evict_request(0)
        engine.resume_request(0)
        while engine.has_unfinished_requests():
            engine.step_modern()
        engine.reset()
    return path.read_text().splitlines()


def repeated(path: Path) -> None:
    with hash_engine(1, tokenizer=hash_tokenizer(), **MORE_SIZES) as engine:
        replay(read_run(path), engine)


@pytest.mark.timeout(240)
def test_a_line_that_was_changed_is_refused_or_repeated_and_never_anything_else(
    tmp_path: Path,
) -> None:
    path = tmp_path / "run.jsonl"
    lines = recorded_lines(path)
    refused = tried = 0
    rng = random.Random(3)
    for number, line in enumerate(lines):
        entry = json.loads(line)
        for place in leaves(entry):
            for value in (..., *rng.sample(WRONG, 5)):
                other = [*lines[:number], changed(entry, place, value), *lines[number + 1 :]]
                path.write_text("\n".join(other) + "\n")
                tried += 1
                try:
                    if number:
                        repeated(path)
                    else:
                        read_run(path)
                except MegatronAsyncError as error:
                    refused += 1
                    assert len(str(error)) < 3000
    assert tried > 700 and refused > tried // 2


@pytest.mark.parametrize(
    "line", ("[" * 100_000, "9" * 5000, '{"a": ' + "9" * 5000 + "}", '{"a": NaN}', '"x"', "null")
)
def test_a_line_that_is_no_object_is_refused(line: str, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    lines = recorded_lines(path)
    path.write_text("\n".join([*lines[:2], line, *lines[2:]]))
    with pytest.raises(ConfigError, match=r"run.jsonl:3: not a"):
        read_run(path)


@pytest.mark.parametrize(
    ("name", "value"),
    (
        ("tokens", [5, -1]), ("tokens", [5, 10**6]), ("tokens", []), ("max_new", 10**9),
        ("max_new", 0), ("stop_ids", [-1]), ("values", []), ("values", [1e300, 0, 0.0, 1]),
        ("priority", 2**62), ("key", -1), ("key", 1), ("fork_of", 7), ("request_id", 2**70),
        ("params", {"temperature": -1.0}), ("params", {"no": 1}), ("extras", None),
    ),
)  # fmt: skip
def test_a_request_that_nobody_could_have_asked_is_refused_before_a_step(
    name: str, value: Any, tmp_path: Path
) -> None:
    path = tmp_path / "run.jsonl"
    lines = recorded_lines(path)
    at = 2 if (name, value) == ("key", 1) else 1
    value = 0 if at == 2 else value  # the first one's
    other = changed(json.loads(lines[at]), (name,), value)
    path.write_text("\n".join([*lines[:at], other, *lines[at + 1 :]]))
    with hash_engine(1, tokenizer=hash_tokenizer(), **MORE_SIZES) as engine:
        with pytest.raises(RequestError, match=r"command . of the run, AddRequest"):
            replay(read_run(path), engine)
        assert engine.counters.steps_launched == 0


def test_a_change_of_parameters_that_no_engine_records_is_refused(tmp_path: Path) -> None:
    """A user may say None for a default; a run has the default itself."""
    path = tmp_path / "run.jsonl"
    lines = recorded_lines(path)
    at = next(
        n for n, line in enumerate(lines) if '"temperature": 0.5' in line and "changes" in line
    )
    other = changed(json.loads(lines[at]), ("changes", "temperature"), None)
    path.write_text("\n".join([*lines[:at], other, *lines[at + 1 :]]))
    with pytest.raises(RequestError, match=r"temperature=None is 1[.]0 in a run"):
        repeated(path)


@pytest.mark.parametrize("step", (10**6, 2**40, 2**63 - 1))
def test_a_step_that_is_far_away_is_reached_at_once(step: int, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    lines = recorded_lines(path)
    path.write_text("\n".join([*lines[:-1], changed(json.loads(lines[-1]), ("step",), step)]))
    run = read_run(path)
    assert run.applied[-1].step == step
    with hash_engine(1, tokenizer=hash_tokenizer(), **MORE_SIZES) as engine:
        assert replay(run, engine).endings == run.endings
    path.write_text(path.read_text().replace(str(step), str(2**64)))
    with pytest.raises(ConfigError, match="step"):
        read_run(path)


def test_what_a_run_sets_of_the_configuration_is_a_closed_list(tmp_path: Path) -> None:
    groups = (
        recorded_config.TAKEN, recorded_config.PATHS, recorded_config.MACHINE,
        recorded_config.REFUSED,
    )  # fmt: skip
    names = [name for group in groups for name in group]
    assert sorted(names) == sorted(field.name for field in dataclasses.fields(EngineConfig))
    config_of = recorded_config.config_of_run  # a run of before there were automata has none
    for name in recorded_config.REFUSED:
        with pytest.raises(ConfigError, match=f"sets {name}="):
            config_of({name: {}})
            assert config_of({name: None}) == EngineConfig(guided_automata_bytes=0)
    with pytest.raises(ConfigError, match="'port', which this version does not know"):
        config_of({"port": 1})
    assert config_of({"device": "cuda:7"}).device is None
    assert config_of({"device": "cpu"}).device == "cpu"


@pytest.mark.parametrize(
    ("config", "command"),
    (
        ({"draft_model": "/home/x", "num_speculative_tokens": 1}, commands.Resume()),
        ({"tokenizer_model": "/etc/passwd"}, commands.Resume()),
        ({}, commands.UpdateWeights("/home/x", recompute_kv_cache=True)),
    ),
)
def test_paths_of_a_run_are_read_when_the_user_says_so_alone(
    config: dict[str, Any], command: commands.Command
) -> None:
    with pytest.raises(ConfigError, match="--trust-paths"):
        recorded_config.check_paths(EngineConfig(**config), [command])
    own = EngineConfig(draft_model="tiny", num_speculative_tokens=1)
    memory = commands.UpdateWeights(None, recompute_kv_cache=True)
    recorded_config.check_paths(own, [commands.Resume(), memory])
