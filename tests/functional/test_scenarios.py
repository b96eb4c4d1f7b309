"""The scenario table on two layers of the embedded model, through the code of
``verify --scenario``."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from itertools import combinations

import pytest

from megatron_async.config.engine_config import EngineConfig
from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.request.request import FinishReason
from megatron_async.verify.decode import Outcome
from megatron_async.verify.reference import Prepared, prepare_all, scenario_config
from megatron_async.verify.run import Run
from megatron_async.verify.scenarios import (
    MAX_LENGTH,
    MAX_NEW_TOKENS,
    TABLE,
    Action,
    Event,
    Witness,
)
from tests.support.cut_models import write_layers
from tests.support.engines import DEPTHS, config_at
from tests.support.own_thread import stepped_by_its_thread

W = Witness
PAIRED = (W.ADD, W.PAUSE, W.EVICT, W.ABORT, W.FINISH, W.BOUNDARY, W.PREFIX)
"""The table shows every two of these together."""

BY_NAME = {scenario.name: scenario for scenario in TABLE}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DynamicInferenceEngine]:
    """The model, loaded once."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    write_layers("tiny", folder, 2)
    config = EngineConfig(device="cpu", max_requests=1)
    with DynamicInferenceEngine.from_pretrained(folder, config) as engine:
        yield engine


@pytest.fixture(scope="module")
def prepared(tiny: DynamicInferenceEngine) -> dict[str, Prepared]:
    """Every scenario with its serial reference."""
    return {each.scenario.name: each for each in prepare_all(tiny, TABLE, config_at(0), seed=0)}


def run_at(tiny: DynamicInferenceEngine, prepared: Prepared, depth: int, **values: int) -> Run:
    """A run that has come to its end."""
    config = scenario_config(config_at(depth, debug=True, **values), prepared.scenario.sizes)
    with tiny.with_config(config) as engine:
        run = Run(engine, prepared)
        run.play()
    return run


@pytest.mark.sweep
@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("name", BY_NAME)
def test_whatever_happens_each_request_gets_the_tokens_it_gets_alone(
    tiny: DynamicInferenceEngine, prepared: dict[str, Prepared], name: str, depth: int
) -> None:
    report = run_at(tiny, prepared[name], depth).report()
    assert report.differences == []
    assert report.missing == []


AGAIN = [(name, DEPTHS[number % len(DEPTHS)]) for number, name in enumerate(BY_NAME)]


@pytest.mark.sweep
@pytest.mark.parametrize(("name", "depth"), AGAIN)
def test_the_own_thread_brings_each_scenario_to_its_end(
    tiny: DynamicInferenceEngine, prepared: dict[str, Prepared], name: str, depth: int
) -> None:
    """It never sleeps beside a request that could go on: see ``tests/support/own_thread.py``."""
    sizes = prepared[name].scenario.sizes
    config = scenario_config(config_at(depth, debug=True), sizes)
    with tiny.with_config(config) as engine, stepped_by_its_thread(engine) as thread:
        run = Run(engine, prepared[name])
        run.play()
        thread.run_dry(1000)
        report = run.report()
    assert report.differences == []
    assert report.missing == []
    assert thread.steps > 10


def test_the_table_shows_every_pair_even_without_its_last_scenario() -> None:
    assert TABLE[-1].name == "everything"
    shown = {
        pair
        for scenario in TABLE[:-1]
        for pair in combinations([w for w in PAIRED if w in scenario.witnesses], 2)
    }
    assert shown == set(combinations(PAIRED, 2))


def test_every_witness_and_action_is_in_the_table() -> None:
    assert set().union(*(scenario.witnesses for scenario in TABLE)) == set(Witness)
    assert {event.action for scenario in TABLE for event in scenario.events} == set(Action)


def test_scripts_name_requests_that_exist_and_leave_them_time() -> None:
    assert len(BY_NAME) == len(TABLE)
    for scenario in TABLE:
        asks = {ask.name: ask for ask in scenario.asks}
        assert len(asks) == len(scenario.asks)
        assert len(scenario.witnesses) >= 2
        for ask in scenario.asks:
            assert ask.new <= MAX_NEW_TOKENS
            assert sum(length for _, length in ask.prompt) + MAX_NEW_TOKENS <= MAX_LENGTH
        for event in scenario.events:
            assert event.target in asks or not event.target
            assert 0 < event.tokens < asks[event.request].new
            assert asks[event.request].stop is None


def test_a_missing_witness_fails_the_scenario(
    tiny: DynamicInferenceEngine, prepared: dict[str, Prepared]
) -> None:
    whole = prepared["pause-and-resume"]
    scenario = whole.scenario._replace(witnesses=whole.scenario.witnesses | {Witness.EVICT})
    report = run_at(tiny, dataclasses.replace(whole, scenario=scenario), 1).report()
    assert report.differences == []
    assert report.missing == [f"pause-and-resume: {Witness.EVICT.value}"]
    assert not report.ok


def test_a_script_that_stands_still_fails_instead_of_hanging(
    tiny: DynamicInferenceEngine, prepared: dict[str, Prepared]
) -> None:
    whole = prepared["evict-while-paused"]
    events = (Event("a", 3, Action.PAUSE, "b"), Event("b", 20, Action.RESUME, "b"))
    scenario = whole.scenario._replace(events=events, witnesses=frozenset({Witness.PAUSE}))
    report = run_at(tiny, dataclasses.replace(whole, scenario=scenario), 2).report()
    assert report.missing == [
        "evict-while-paused: the script's 'resume b after 20 tokens of b' never came"
    ]
    (line,) = report.differences
    assert "request b: from token" in line


def test_an_event_that_comes_after_the_end_is_named(
    tiny: DynamicInferenceEngine, prepared: dict[str, Prepared]
) -> None:
    whole = prepared["evict-while-paused"]
    events = (Event("a", 27, Action.ABORT, "c"),)
    scenario = whole.scenario._replace(events=events, witnesses=frozenset())
    report = run_at(tiny, dataclasses.replace(whole, scenario=scenario), 1).report()
    assert report.differences == []
    assert report.missing == [
        "evict-while-paused: the script's 'abort c after 27 tokens of a' came too late"
    ]


@pytest.mark.parametrize("name", ["add-while-decoding", "abort-in-flight", "new-weights"])
def test_a_wrong_token_is_named(
    tiny: DynamicInferenceEngine, prepared: dict[str, Prepared], name: str
) -> None:
    """Of a request that ends by itself, of an aborted one, of one with two weight versions."""
    run = run_at(tiny, prepared[name], 1)
    run.records["b"].generated_tokens[2] ^= 1
    (line,) = run.report().differences
    assert line.startswith(f"{name}, depth 1, request b: from token 2 on [")


def test_wrong_weight_spans_are_named(
    tiny: DynamicInferenceEngine, prepared: dict[str, Prepared]
) -> None:
    run = run_at(tiny, prepared["new-weights"], 1)
    spans = run.records["a"].weight_spans
    assert [span.version for span in spans] == [0, 1, 2]
    spans[1] = spans[1]._replace(start=spans[1].start + 1)
    (line,) = run.report().differences
    assert "request a: weight_spans are" in line


def test_the_reference_ends_where_its_requests_say(prepared: dict[str, Prepared]) -> None:
    for each in prepared.values():
        for ask in each.scenario.asks:
            outcome = each.reference[ask.name]
            assert isinstance(outcome, Outcome)
            if ask.stop is None:
                assert len(outcome.tokens) == ask.new
                assert outcome.reason is FinishReason.LENGTH
            else:
                (stop,) = each.works[ask.name].params.stop_token_ids
                assert outcome.tokens.index(stop) == len(outcome.tokens) - 1 >= ask.stop
                assert outcome.reason is FinishReason.STOP


@pytest.mark.parametrize("name", ["shared-prefix-paused", "suspend"])
def test_scripts_do_not_hang_on_tokens_per_step(
    tiny: DynamicInferenceEngine, prepared: dict[str, Prepared], name: str
) -> None:
    """As many tokens in flight as scripts are made for."""
    report = run_at(tiny, prepared[name], 4, num_speculative_tokens=4).report()
    assert report.differences == report.missing == []
    assert report.counters.tokens_accepted > report.counters.steps_committed
