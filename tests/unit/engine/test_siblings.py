"""Requests of several sequences: each is a request of its own, all are one to their user."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest

from megatron_async.engine.commands import AddRequest
from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.engine.recording import read_run
from megatron_async.engine.replay import replay
from megatron_async.engine.requests.request_validation import derive_seed
from megatron_async.engine.requests.siblings import sibling_seed
from megatron_async.errors import EngineStoppedError, RequestError
from megatron_async.request.request import DynamicInferenceRequest, FinishReason
from megatron_async.sampling_params import SamplingParams
from tests.support.engines import DEPTHS, drive, engine_at, hash_engine
from tests.support.oracle import Ask, decode_alone
from tests.unit.engine import test_nan_logits

pytestmark = pytest.mark.sweep

PROMPT = (5, 6, 7, 8, 9)
SEED = 11


def asked(count: int = 12, **values: Any) -> SamplingParams:
    values = {"temperature": 1.0, "seed": SEED, "termination_id": -1, **values}
    return SamplingParams(num_tokens_to_generate=count, **values)


def alone(index: int, count: int = 12, seed: int = SEED, **values: Any) -> list[int]:
    ask = Ask(PROMPT, count, temperature=1.0, seed=sibling_seed(seed, index), **values)
    return decode_alone(ask)[0]


def tokens_of(request: DynamicInferenceRequest) -> list[list[int]]:
    return [choice.generated_tokens for choice in request.choices]


def record_commands(engine: DynamicInferenceEngine) -> list[AddRequest]:
    """The requests that the engine is given from now on."""
    added: list[AddRequest] = []
    submit = engine.loop.commands.submit

    def note(*commands: Any) -> None:
        added.extend(command for command in commands if isinstance(command, AddRequest))
        submit(*commands)

    engine.loop.commands.submit = note  # type: ignore[method-assign]
    return added


def rank_by_length(engine: DynamicInferenceEngine) -> None:
    """Longer sequences get higher log-probabilities."""

    def finish(request: DynamicInferenceRequest) -> None:
        if request.sampling_params.wants_log_probs:
            length = request.generated_length
            request.generated_log_probs = [-1.0 / length] * length

    engine.outputs.on_finish = finish


@pytest.mark.parametrize("depth", DEPTHS)
def test_each_sequence_gets_the_tokens_of_its_seed_alone(depth: int) -> None:
    with engine_at(depth) as engine:
        future = engine.add_request(7, list(PROMPT), asked(n=4))
        other = engine.add_request(0, [1], asked(5))
        drive(engine)
        request = future.result(timeout=0)
        assert tokens_of(request) == [alone(index) for index in range(4)]
        assert request is request.choices[0] and request.request_id == 7
        assert len({tuple(tokens) for tokens in tokens_of(request)}) == 4
        assert [choice.seed for choice in request.choices] == [
            sibling_seed(SEED, index) for index in range(4)
        ]
        assert other.result(timeout=0).choices == []
        assert engine.scheduler.allocator.free_count == 60


def test_the_first_sequence_is_that_of_a_request_for_one() -> None:
    for values in ({"seed": SEED}, {"seed": None}):
        tokens = []
        for n in (1, 4):
            with engine_at(1) as engine:
                (request,) = engine.generate([list(PROMPT)], asked(n=n, **values))
                tokens.append(request.generated_tokens)
        assert tokens[0] == tokens[1]


def test_no_other_request_derives_the_seed_of_a_sibling() -> None:
    derived = {derive_seed(SEED, request_id) for request_id in range(1000)}
    assert derived.isdisjoint(sibling_seed(SEED, index) for index in range(1000))
    assert len({sibling_seed(seed, index) for seed in range(20) for index in range(20)}) == 400


def test_siblings_share_a_prefill_and_ask_for_no_prompt_log_probs_of_their_own() -> None:
    with engine_at(1) as engine:
        added = record_commands(engine)
        engine.add_request(7, list(PROMPT), asked(n=3, return_log_probs=True, frequency_penalty=1))
        first, *others = added
        assert first.fork_of is None and first.prompt_log_probs and first.params["n"] == 3
        for index, sibling in enumerate(others, 1):
            assert sibling.fork_of == first.key and not sibling.prompt_log_probs
            assert (sibling.tokens, sibling.max_new) == (first.tokens, first.max_new)
            assert (sibling.extras, sibling.priority) == (first.extras, first.priority)
            assert sibling.params["seed"] == sibling_seed(SEED, index)
            assert (sibling.params["n"], sibling.params["skip_prompt_log_probs"]) == (1, True)


def test_siblings_have_the_functions_of_the_first() -> None:
    processors = [lambda tokens, logits: logits]
    with engine_at(1) as engine:
        engine.add_request(7, list(PROMPT), asked(n=2, logits_processors=processors))
        choices = engine.get_request(7).choices
        for choice in choices:
            assert choice.sampling_params.logits_processors == tuple(processors)


def test_ids_of_siblings_are_in_nobodys_way() -> None:
    with engine_at(1) as engine:
        futures = [engine.add_request(i, list(PROMPT), asked(n=3)) for i in range(3)]
        (generated,) = engine.generate([[4]], asked(3))
        drive(engine)
        choices = [choice for future in futures for choice in future.result(0).choices]
        ids = [choice.request_id for choice in choices]
        assert ids == [0, -1, -2, 1, -3, -4, 2, -5, -6] and generated.request_id == 3
        with pytest.raises(RequestError, match="request_id=-1 must be an integer of at least 0"):
            engine.add_request(-1, [1])


def test_an_id_is_in_use_until_the_last_sequence_has_ended() -> None:
    stops = tuple(alone(0)[2:3])
    assert stops[0] not in alone(1)
    with engine_at(0) as engine:
        future = engine.add_request(7, list(PROMPT), asked(n=2, stop_token_ids=stops))
        while engine.outputs.key_of(7) is not None:
            engine.step_modern()
        assert not future.done()
        with pytest.raises(RequestError, match="request_id=7 is in use"):
            engine.add_request(7, [1])
        drive(engine)
        assert [c.finish_reason for c in future.result(0).choices] == ["stop", "length"]
        engine.add_request(7, [1], asked(2))


@pytest.mark.parametrize("how", ("abort", "cancel"))
@pytest.mark.parametrize("first_has_ended", (False, True))
def test_an_abort_ends_all_sequences(how: str, first_has_ended: bool) -> None:
    stops = tuple(alone(0)[2:3]) if first_has_ended else ()
    with engine_at(2) as engine:
        future = engine.add_request(7, list(PROMPT), asked(40, n=3, stop_token_ids=stops))
        steps = 0
        while engine.outputs.key_of(7) is not None if first_has_ended else steps < 3:
            engine.step_modern()
            steps += 1
        assert future.cancel() if how == "cancel" else engine.abort_request(7)
        before = engine.counters.steps_launched
        drive(engine)
        assert engine.counters.steps_launched - before < 5
        assert engine.scheduler.allocator.free_count == 60
        assert not engine.abort_request(7)
        if how == "abort":
            reasons = [choice.finish_reason for choice in future.result(timeout=0).choices]
            first = FinishReason.STOP if first_has_ended else FinishReason.ABORT
            assert reasons == [first, FinishReason.ABORT, FinishReason.ABORT]


def test_one_sequence_can_be_aborted_and_the_others_go_on() -> None:
    with engine_at(1) as engine:
        future = engine.add_request(7, list(PROMPT), asked(n=3))
        engine.step_modern()
        sibling = engine.get_request(7).choices[1]
        assert engine.abort_request(sibling.request_id)
        drive(engine)
        request = future.result(timeout=0)
        assert request.choices[1].finish_reason is FinishReason.ABORT
        assert tokens_of(request)[::2] == [alone(0), alone(2)]


def test_what_is_asked_of_a_request_holds_for_its_sequences() -> None:
    with engine_at(0, prefill_chunk_tokens=64) as engine:
        future = engine.add_request(7, list(PROMPT), asked(n=3))
        while min(map(len, tokens_of(engine.get_request(7)))) < 2:
            engine.step_modern()
        assert engine.pause_request(7)
        engine.step_modern()
        paused = [list(tokens) for tokens in tokens_of(engine.get_request(7))]
        engine.step_modern()
        assert tokens_of(engine.get_request(7)) == paused
        assert engine.update_sampling_params(7, seed=99, temperature=2.0)
        assert engine.resume_request(7)
        drive(engine)
        for index, choice in enumerate(future.result(timeout=0).choices):
            start = Ask(PROMPT, 12, temperature=1.0, seed=sibling_seed(SEED, index))
            then = Ask(PROMPT, 12, temperature=2.0, seed=sibling_seed(99, index))
            changed = len(paused[index])
            assert choice.generated_tokens == decode_alone(start, changes=[(changed, then)])[0]


def test_an_error_of_one_sequence_does_not_lose_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(test_nan_logits, "MARK", sibling_seed(SEED, 1))
    with engine_at(1, model=test_nan_logits.FailsAt()) as engine:
        future = engine.add_request(7, list(PROMPT), asked(n=3))
        drive(engine)
    request = future.result(timeout=0)
    assert [choice.finish_reason for choice in request.choices] == ["length", "error", "length"]
    assert tokens_of(request)[::2] == [alone(0), alone(2)]


def test_new_seeds_of_all_follow_from_the_one_that_is_given_or_derived() -> None:
    with engine_at(1) as engine:
        engine.add_request(7, list(PROMPT), asked(40, n=3))
        choices = engine.get_request(7).choices
        for seed, base in ((-5, -5), (None, derive_seed(0, 7))):
            assert engine.update_sampling_params(7, seed=seed)
            engine.step_modern()
            own = [choice.sampling_params.seed for choice in choices]
            assert own == [seed, sibling_seed(base, 1), sibling_seed(base, 2)]
            assert [choice.seed for choice in choices] == [base, *own[1:]]
        with pytest.raises(RequestError, match="top_p=7"):
            engine.update_sampling_params(7, top_p=7)
        assert engine.get_request(choices[2].request_id) is choices[2]


@pytest.mark.parametrize("opened", (2, 3))
def test_an_interrupted_call_leaves_nothing_behind(
    opened: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal's handler may raise in the midst of it."""
    with engine_at(1) as engine:
        calls, real = [0], engine.outputs.open

        def interrupted(*arguments: Any) -> Any:
            calls[0] += 1
            future = real(*arguments)
            if calls[0] == opened:
                raise KeyboardInterrupt
            return future

        monkeypatch.setattr(engine.outputs, "open", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.add_request(7, list(PROMPT), asked(n=3))
        monkeypatch.undo()
        assert engine.outputs.keys == {}
        future = engine.add_request(7, list(PROMPT), asked(n=3))
        drive(engine)
        assert tokens_of(future.result(timeout=0)) == [alone(index) for index in range(3)]


def test_a_closed_engine_fails_the_request_once() -> None:
    with engine_at(1) as engine:
        future = engine.add_request(7, list(PROMPT), asked(n=3))
        engine.step_modern()
    with pytest.raises(EngineStoppedError):
        future.result(timeout=0)


# --- best_of ----------------------------------------------------------------------------------


def test_the_likeliest_sequences_are_kept_best_first() -> None:
    stops = tuple(range(0, 61, 9))
    lengths = [len(alone(index, 30, stop_ids=stops)) for index in range(6)]
    order = sorted(range(6), key=lambda index: -lengths[index])
    assert order[0] != 0 and len(set(lengths)) > 2
    with engine_at(1) as engine:
        rank_by_length(engine)
        params = asked(30, n=2, best_of=6, stop_token_ids=stops)
        future = engine.add_request(7, list(PROMPT), params)
        drive(engine)
        request = future.result(timeout=0)
    assert request is request.choices[0] and request.request_id == 7
    assert tokens_of(request) == [alone(index, 30, stop_ids=stops) for index in order[:2]]
    assert [choice.seed for choice in request.choices] == [
        sibling_seed(SEED, index) for index in order[:2]
    ]
    # They were only there to choose by.
    assert [choice.generated_log_probs for choice in request.choices] == [None, None]
    assert not any(choice.sampling_params.return_log_probs for choice in request.choices)
    assert (request.sampling_params.n, request.sampling_params.best_of) == (2, 6)


def test_log_probs_that_were_asked_for_stay() -> None:
    with engine_at(1) as engine:
        rank_by_length(engine)
        params = asked(n=1, best_of=2, return_log_probs=True)
        (request,) = engine.generate([list(PROMPT)], params)
    assert request.generated_log_probs == [-1 / 12] * 12 and len(request.choices) == 1


def test_sequences_are_ranked_by_the_mean_and_failed_ones_come_last() -> None:
    likeliest = {0: [-5.0], 1: [-1.0, -2.0], 2: [-1.4], 3: [], 4: [-0.1]}

    def finish(request: DynamicInferenceRequest) -> None:
        index = {sibling_seed(SEED, i): i for i in likeliest}[request.seed or 0]
        request.generated_log_probs = likeliest[index]

    with engine_at(1) as engine:
        engine.outputs.on_finish = finish
        future = engine.add_request(8, list(PROMPT), asked(n=4, best_of=5))
        engine.step_modern()
        engine.abort_request(engine.get_request(8).choices[4].request_id)
        drive(engine)
        seeds = [choice.seed for choice in future.result(timeout=0).choices]
    assert seeds == [sibling_seed(SEED, index) for index in (2, 1, 0, 3)]


def test_log_probs_are_switched_on_to_choose_by() -> None:
    with engine_at(1) as engine:
        added = record_commands(engine)
        engine.add_request(7, list(PROMPT), asked(best_of=2))
        engine.add_request(8, list(PROMPT), asked(n=2, best_of=2))
        ranked, plain = added[:2], added[2:]
        for command in ranked:
            assert command.extras is not None and not command.prompt_log_probs
            assert command.params.params().wants_log_probs
        for command in plain:
            assert command.extras is None


# --- how they are driven ----------------------------------------------------------------------


def test_a_stream_has_one_sequence() -> None:
    async def first(engine: DynamicInferenceEngine, **values: Any) -> None:
        async for _ in engine.stream(list(PROMPT), asked(**values)):
            return

    with engine_at(1) as engine:
        for values in ({"n": 2}, {"best_of": 2}):
            with pytest.raises(RequestError, match="a stream has one sequence"):
                asyncio.run(first(engine, **values))
        assert not engine.has_unfinished_requests() and engine.outputs.keys == {}


def test_a_thread_of_the_engines_own_serves_several_at_once() -> None:
    with engine_at(2) as engine:
        engine.start()
        futures: dict[int, Any] = {}

        def add(number: int) -> None:
            futures[number] = engine.add_request(number, list(PROMPT), asked(8, n=3))

        threads = [threading.Thread(target=add, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        done, waiting = concurrent.futures.wait(futures.values(), timeout=60)
        assert len(done) == 4 and not waiting
        for number, future in futures.items():
            request = future.result(timeout=0)
            assert request.request_id == number
            assert tokens_of(request) == [alone(index, 8) for index in range(3)]
        engine.stop()


def test_it_can_be_awaited() -> None:
    async def main(engine: DynamicInferenceEngine) -> DynamicInferenceRequest:
        engine.start()
        return await engine.add_request(7, list(PROMPT), asked(n=2))

    with engine_at(1) as engine:
        assert tokens_of(asyncio.run(main(engine))) == [alone(0), alone(1)]


def test_generate_takes_requests_of_one_and_of_several() -> None:
    with engine_at(1) as engine:
        prompts = [list(PROMPT), [1, 2], list(PROMPT)]
        requests = engine.generate(prompts, [asked(n=2), asked(4), asked(n=3)])
        assert [len(request.choices) for request in requests] == [2, 0, 3]
        assert tokens_of(requests[2])[:2] == tokens_of(requests[0])
        with pytest.raises(RequestError, match="num_tokens_to_generate"):
            engine.generate([list(PROMPT), [1]], [asked(n=3), asked(0)])
        drive(engine)
        assert engine.scheduler.allocator.free_count == 60


def test_who_keeps_the_future_keeps_no_engine() -> None:
    engine = engine_at(1)
    future = engine.add_request(7, list(PROMPT), asked(n=2))
    drive(engine)
    engine.close()
    dead = weakref.ref(engine.loop.commands)
    del engine
    gc.collect()
    assert dead() is None and len(future.result(timeout=0).choices) == 2


@pytest.mark.parametrize("replayed", (0, 1, 2))
def test_a_recorded_run_is_repeated(replayed: int, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"max_requests": 3, "block_size_tokens": 4, "block_count": 30}
    path = tmp_path / "run.jsonl"
    with hash_engine(1, record=str(path), **sizes) as engine:
        future = engine.add_request(7, list(PROMPT), asked(n=3, logit_bias={1: 0.0}))
        aborted = engine.add_request(8, list(PROMPT), asked(n=3))
        for _ in range(4):
            engine.step_modern()
        engine.pause_request(7)
        engine.step_modern()
        engine.abort_request(8)
        engine.resume_request(7)
        drive(engine)
        assert aborted.result(timeout=0).choices[2].finish_reason == "abort"
    run = read_run(path)
    with hash_engine(replayed, **sizes) as engine:
        result = replay(run, engine)
        assert result.exact == (replayed == 1) and result.differences == ()
    tokens = {ending.request_id: ending.tokens for ending in result.endings}
    assert [tokens[7], tokens[-1], tokens[-2]] == tokens_of(future.result(timeout=0))


def test_a_recorded_run_with_functions_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with hash_engine(1, record=str(path), max_requests=3) as engine:
        engine.add_request(0, [1], asked(2, logits_processors=[lambda tokens, logits: logits]))
        drive(engine)
    with (
        hash_engine(1, max_requests=3) as engine,
        pytest.raises(RequestError, match="functions do not come back from JSON"),
    ):
        replay(read_run(path), engine)
