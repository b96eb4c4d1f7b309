"""A run is recorded as commands with ticket numbers, and repeated from its file."""

from __future__ import annotations

import dataclasses
import errno
import functools
import json
import os
import random
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_async.config.engine_config import EngineConfig
from megatron_async.engine import commands, recorded_config, recording
from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.engine.recording import Recorder, RunFile, read_run
from megatron_async.engine.replay import replay
from megatron_async.errors import ConfigError, MegatronAsyncError, RequestError
from megatron_async.request.request import DynamicInferenceRequest, FinishReason
from megatron_async.sampling_params import CheckedParams, SamplingParams
from megatron_async.step.extras import Extras
from tests.support.engines import DEPTHS, hash_engine, random_ask, sampling_params
from tests.support.hash_tokenizer import hash_tokenizer

SIZES: dict[str, Any] = {
    "max_requests": 3,
    "block_size_tokens": 4,
    "block_count": 22,
    "prefill_chunk_tokens": 5,
}


def record(path: Path, depth: int, seed: int) -> dict[int, list[int]]:
    """A run in which much happens; the tokens of the requests that were not aborted."""
    rng = random.Random(seed)
    asks = [random_ask(rng, max_prompt=20, max_new=30) for _ in range(8)]
    futures = {}
    with hash_engine(depth, record=str(path), **SIZES) as engine:
        while len(futures) < len(asks) or engine.has_unfinished_requests():
            if len(futures) < len(asks) and rng.random() < 0.4:
                number = len(futures)
                futures[number] = engine.add_request(
                    number,
                    list(asks[number].prompt),
                    sampling_params(asks[number]),
                    priority=rng.choice((0, 0, -1)),
                )
            active = [n for n, future in futures.items() if not future.done()]
            victim = rng.choice(active or [0])
            draw = rng.random()
            if draw < 0.05:
                engine.abort_request(victim)
            elif draw < 0.2:
                engine.pause_request(victim)
            elif draw < 0.45:
                engine.evict_request(victim)
            elif draw < 0.5:
                engine.suspend()
                engine.step_modern()
                engine.resume()
            elif draw < 0.8:
                for number in futures:
                    engine.resume_request(number)
            engine.step_modern()
        engine.suspend()
        assert engine.counters.evictions and engine.counters.pauses and engine.counters.barriers
    ended = {number: future.result(timeout=0) for number, future in futures.items()}
    return {n: r.generated_tokens for n, r in ended.items() if r.finish_reason != "abort"}


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


# --- requests that ask for more ---------------------------------------------------------------


def more(count: int = 22, **values: Any) -> SamplingParams:
    values = {"temperature": 1.2, "seed": 5, "ignore_eos": True, **values}
    return SamplingParams(num_tokens_to_generate=count, **values)


MORE: tuple[SamplingParams, ...] = (
    more(structured_outputs={"regex": "[a-f]{3,9}[0-9]+é?x"}),
    more(stop_words=["k1", "0", "tr"], min_tokens=3),
    more(return_log_probs=True, top_n_logprobs=3, presence_penalty=0.7, bad_words=[[1, 2], [3]]),
    more(n=3, structured_outputs={"choice": ["abcabcabcabc", "null", "true"]}, ignore_eos=False),
    more(logit_bias={7: 2.5}, min_p=0.05, stop_token_ids=range(0, 24, 2), min_tokens=4),
    more(9, n=2, best_of=4, stop_words=["a", "e"], frequency_penalty=0.4),
    more(40, structured_outputs={"json_object": True}, log_probs_mode="processed", top_k=30,
         return_log_probs=True, skip_prompt_log_probs=True),
    more(),
)  # fmt: skip
ABORTED = 6
MORE_SIZES = {**SIZES, "block_count": 32}


def with_requests(engine: DynamicInferenceEngine) -> dict[int, DynamicInferenceRequest]:
    """All requests that ``engine`` gets from now on, each sequence by its id."""
    requests: dict[int, DynamicInferenceRequest] = {}
    opens = engine.outputs.open

    def watched(key: int, request: DynamicInferenceRequest, *more: Any) -> Any:
        requests[request.request_id] = request
        return opens(key, request, *more)

    engine.outputs.open = watched  # type: ignore[method-assign]
    return requests


def what_came(requests: dict[int, DynamicInferenceRequest]) -> dict[int, Any]:
    return {
        number: (
            request.generated_tokens,
            request.generated_text,
            request.finish_reason,
            request.stop_reason,
            request.generated_log_probs,
            request.generated_top_n_logprobs,
            request.seed,
        )
        for number, request in requests.items()
        if number != ABORTED
    }


@functools.cache
def record_more(path: Path, depth: int) -> dict[int, Any]:
    """A run of requests that ask for more, paused, evicted and once aborted; what each got."""
    rng = random.Random(depth)
    with hash_engine(depth, tokenizer=hash_tokenizer(), record=str(path), **MORE_SIZES) as engine:
        requests = with_requests(engine)
        waiting = list(enumerate(MORE))
        step = 0
        while waiting or engine.has_unfinished_requests():
            if waiting and step % 4 == 0:
                number, asked = waiting.pop(0)
                engine.add_request(number, [7, 1, 9, number, 2, 7][: 3 + number % 4], asked)
            live = [n for n, request in requests.items() if request.finish_reason is None]
            draw, victim = rng.random(), rng.choice(live or [0])
            if draw < 0.1:
                engine.pause_request(victim)
            elif draw < 0.35:
                engine.evict_request(victim)
            elif draw < 0.7:
                for number in requests:
                    engine.resume_request(number)
            if len(waiting) == 0 and step % 7 == 0:
                engine.abort_request(ABORTED)
            engine.step_modern()
            step += 1
        engine.suspend()
        assert engine.counters.evictions and engine.counters.pauses
        assert engine.counters.steps_with_extras
    return what_came(requests)


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


# --- files of others --------------------------------------------------------------------------

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
    config_of = recorded_config.config_of_run
    for name in recorded_config.REFUSED:
        with pytest.raises(ConfigError, match=f"sets {name}="):
            config_of({name: {}})
        assert config_of({name: None}) == EngineConfig()
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


# --- files that cannot be written any more ----------------------------------------------------


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
