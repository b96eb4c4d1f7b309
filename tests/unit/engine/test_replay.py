"""A run is recorded as commands with ticket numbers, and repeated from its file."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_async.engine import commands
from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.engine.recording import read_run
from megatron_async.engine.replay import replay
from megatron_async.errors import ConfigError, RequestError
from megatron_async.sampling_params import CheckedParams, SamplingParams
from tests.support.engines import DEPTHS, hash_engine
from tests.support.hash_tokenizer import hash_tokenizer
from tests.support.recorded_runs import (
    MORE,
    MORE_SIZES,
    SIZES,
    more,
    record,
    record_more,
    what_came,
    with_requests,
)

pytestmark = pytest.mark.sweep


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_run_is_repeated_exactly_at_its_depth(depth: int, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    record(path, depth, seed=depth)
    run = read_run(path)
    with hash_engine(depth, **SIZES, jitter_seed=5) as engine:
        result = replay(run, engine)
    assert result.exact and result.differences == ()
    assert len(run.entries) > 20 and len(result.endings) == len(run.endings) == 8


@pytest.mark.parametrize("recorded", DEPTHS)
@pytest.mark.parametrize("replayed", DEPTHS)
def test_a_run_gives_the_same_tokens_at_any_depth(
    recorded: int, replayed: int, tmp_path: Path
) -> None:
    path = tmp_path / "run.jsonl"
    tokens = record(path, recorded, seed=10 + recorded)
    with hash_engine(replayed, **SIZES) as engine:
        result = replay(read_run(path), engine)
    assert result.exact == (recorded == replayed) and result.differences == ()
    got = {e.request_id: e.tokens for e in result.endings if e.request_id in tokens}
    assert got == tokens


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    directory = tmp_path_factory.mktemp("runs")
    return {depth: directory / f"{depth}.jsonl" for depth in DEPTHS}


@pytest.mark.parametrize("recorded", DEPTHS)
@pytest.mark.parametrize("replayed", DEPTHS)
def test_requests_that_ask_for_more_are_repeated_at_any_depth(
    recorded: int, replayed: int, runs: dict[int, Path]
) -> None:
    expected = record_more(runs[recorded], recorded)
    with hash_engine(replayed, tokenizer=hash_tokenizer(), **MORE_SIZES) as engine:
        requests = with_requests(engine)
        result = replay(read_run(runs[recorded]), engine)
    assert result.exact == (recorded == replayed) and result.differences == ()
    assert len(expected) == len(MORE) - 1 + 2 + 3  # with all sequences
    assert what_came(requests) == expected
    # The witnesses: what was asked for has ended requests, and in more than one way.
    reasons = {came[3] for came in expected.values()}
    assert any(isinstance(reason, str) for reason in reasons)
    assert any(isinstance(reason, int) for reason in reasons)
    assert re.fullmatch("[a-f]{3,9}[0-9]+é?x", str(expected[0][1]))


WITHOUT_EFFECT: dict[str, Callable[[DynamicInferenceEngine], Any]] = {
    "abort": lambda engine: engine.loop.commands.submit(commands.AbortRequest(0)),
    "pause": lambda engine: engine.loop.commands.submit(commands.PauseRequest(0)),
    "parameters": lambda engine: engine.loop.commands.submit(
        commands.UpdateSamplingParams(0, {"temperature": 1.5, "seed": 3})
    ),
    "reset": lambda engine: engine.reset(),
    "new weights": lambda engine: engine.loop.adopt_weights("path", recompute_kv_cache=True),
}


@pytest.mark.parametrize("what", WITHOUT_EFFECT)
@pytest.mark.parametrize(("recorded", "replayed"), ((0, 2), (0, 4), (1, 0), (2, 4), (4, 0)))
def test_what_had_no_effect_on_a_request_has_none_in_a_replay(
    recorded: int, replayed: int, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request had ended when the command came; at another depth it may go on at that ticket."""
    path = tmp_path / "run.jsonl"
    with hash_engine(recorded, record=str(path), **SIZES) as engine:
        params = SamplingParams(num_tokens_to_generate=9, termination_id=-1, seed=1)
        future = engine.add_request(0, [1, 2], params)
        later = engine.add_request(1, [3], params)
        while not future.done():
            engine.step_modern()
        WITHOUT_EFFECT[what](engine)
        while engine.has_unfinished_requests():
            engine.step_modern()
        assert later.done()
    run = read_run(path)
    assert len(run.endings) == 2 and run.endings[0].reason == "length"
    adopted: list[Any] = []
    monkeypatch.setattr(
        DynamicInferenceEngine, "update_weights", lambda self, path, **more: adopted.append(path)
    )
    with hash_engine(replayed, **SIZES) as engine:
        result = replay(run, engine)
        assert result.differences == () and not result.exact
        assert result.endings[0] == run.endings[0]
        assert adopted == ["path"] * (what == "new weights")


def test_a_run_with_functions_says_that_it_cannot_be_repeated(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with hash_engine(1, record=str(path), **SIZES) as engine:
        engine.generate([[1]], more(3, logits_processors=[lambda tokens, logits: logits]))
    with (
        hash_engine(1, **SIZES) as engine,
        pytest.raises(RequestError, match="logits_processors"),
    ):
        replay(read_run(path), engine)


@pytest.mark.parametrize("changed", ("tokens", "plans", "ticket"))
def test_a_run_that_went_otherwise_is_told_from_the_replay(changed: str, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    record(path, 1, seed=3)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        if changed == "tokens" and "finished" in line:
            line["finished"]["tokens"].append(61)
        elif isinstance(line.get(changed), int):
            line[changed] += 1
    path.write_text("\n".join(map(json.dumps, lines)))
    with hash_engine(1, **SIZES) as engine:
        (difference,) = replay(read_run(path), engine).differences
    assert difference.startswith("entry ")


def test_a_run_at_another_depth_that_got_other_tokens_is_told(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    record(path, 1, seed=3)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    ended = [li for li in lines if "finished" in li and li["finished"]["reason"] != "abort"]
    ended[0]["finished"]["tokens"][0] = 60
    path.write_text("\n".join(map(json.dumps, lines)))
    with hash_engine(2, **SIZES) as engine:
        (difference,) = replay(read_run(path), engine).differences
    assert difference.startswith(f"request {ended[0]['finished']['request_id']}: ")


@pytest.mark.parametrize("replayed", (0, 1, 4))
def test_changes_while_requests_run_come_behind_other_tokens_at_another_depth(
    replayed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who got them on the way is not compared; those before and behind are."""
    path = tmp_path / "run.jsonl"
    params = SamplingParams(temperature=1.0, seed=3, num_tokens_to_generate=20, termination_id=-1)

    def add(engine: DynamicInferenceEngine, *numbers: int, steps: int) -> None:
        for number in numbers:
            engine.add_request(number, [number, 5], params)
        for _ in range(steps):
            engine.step_modern()

    with hash_engine(2, record=str(path), **SIZES) as engine:
        add(engine, 0, steps=40)
        add(engine, 1, 2, steps=9)
        engine.update_sampling_params(2, temperature=0.0)
        add(engine, steps=40)
        add(engine, 3, 0, steps=11)
        engine.update_weights({"salt": 2})
        add(engine, 4, steps=60)
    text = path.read_text().replace('"source": null', '"source": "salt"')
    path.write_text(text)
    own = DynamicInferenceEngine.update_weights
    monkeypatch.setattr(
        DynamicInferenceEngine,
        "update_weights",
        lambda self, source, **more: own(self, {"salt": 2}, **more),
    )
    run = read_run(path)
    with hash_engine(replayed, **SIZES) as engine:
        result = replay(run, engine)
    assert len(result.endings) == 6 and result.differences == ()
    numbers = [ending.request_id for ending in run.endings]
    for number in (0, 1, 4):
        lines = [json.loads(line) for line in text.splitlines()]
        ended = [line["finished"] for line in lines if "finished" in line]
        ended[numbers.index(number)]["tokens"][-1] ^= 1
        path.write_text("\n".join(map(json.dumps, lines)))
        with hash_engine(replayed, **SIZES) as engine:
            (difference,) = replay(read_run(path), engine).differences
        assert difference.startswith(f"request {number}: ")


def test_commands_are_numbered_in_the_order_in_which_they_are_applied(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    record(path, 2, seed=4)
    applied = [entry for entry in read_run(path).entries if "command" in entry]
    assert [entry["number"] for entry in applied] == list(range(len(applied)))
    for name in ("step", "ticket", "retired"):
        points = [entry[name] for entry in applied]
        assert points == sorted(points)


def test_a_run_that_was_cut_short_is_repeated_as_far_as_it_goes(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    record(path, 1, seed=5)
    text = path.read_text()
    path.write_text(text[: len(text) // 2])
    with hash_engine(1, **SIZES) as engine:
        assert replay(read_run(path), engine).differences == ()


@pytest.mark.parametrize(
    "command",
    (
        commands.AddRequest(
            1,
            2,
            "text",
            (3, 4),
            5,
            (6,),
            (0.1, 0, 1e-37, -(2**63)),
            -1,
            CheckedParams((("seed", 3), ("logit_bias", ((5, 1.5),)), ("bad_words", ("a", (3, 4))))),
        ),
        commands.AbortRequest(7),
        commands.UpdateSamplingParams(7, {"temperature": 0.3}),
        commands.Suspend(),
        commands.UpdateWeights("path", recompute_kv_cache=False),
    ),
)
def test_a_command_comes_back_from_its_json_as_it_was(command: commands.Command) -> None:
    text = json.dumps(commands.to_json(command))
    assert commands.from_json(json.loads(text)) == command
    assert type(command).__struct_config__.frozen


@pytest.mark.parametrize("added", [{}, {"top_k": 3}, {"min_p": 0.1}])
def test_a_run_that_turns_filters_on_is_refused_where_ranks_of_gpus_cannot_repeat_it(
    added: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on GPUs with tensor parallelism: the request's S knows no thresholds, unless it was added
    with some, or takes the extended S for another reason."""
    path = tmp_path / "filters.run"
    with hash_engine(1, record=str(path), **SIZES) as engine:
        engine.add_request(0, [1, 2], SamplingParams(num_tokens_to_generate=6, **added))
        engine.step_modern()
        engine.update_sampling_params(0, temperature=0.5)
        engine.update_sampling_params(0, top_p=0.9)
        while engine.has_unfinished_requests():
            engine.step_modern()
    with hash_engine(1, **SIZES) as engine:
        monkeypatch.setattr(engine.requests._validator._extras, "needed_by_filters", True)
        if added:
            run = read_run(path)
            assert replay(run, engine).endings == run.endings
            return
        with pytest.raises(ConfigError, match=r"the run turns top_k or top_p on .*model_parallel"):
            replay(read_run(path), engine)
        assert engine.counters.steps_launched == 0
