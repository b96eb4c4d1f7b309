"""Behaviour that no wrong token gives away, each as a short run of an engine at any depth."""

from __future__ import annotations

from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.engine.metrics import NotOverlapped
from tests.support.engines import drive, greedy, hash_engine
from tests.support.hybrid_hash_model import HybridHashModel, hybrid_history
from tests.support.oracle import Ask, decode_alone, decode_with_salts


def kept_prefix_is_reused_from_its_end(depth: int, debug: bool = True) -> None:
    """Of five blocks that a request leaves behind, another one takes two: the deepest, so that
    those that are left are a prefix still."""
    prompt = list(range(21))
    with hash_engine(
        depth, debug=debug, max_requests=1, block_size_tokens=4, block_count=8
    ) as engine:
        engine.generate([prompt], greedy(2))
        # Of 8 blocks 5 are kept, 3 are free.
        (other,) = engine.generate([[60 - n for n in range(17)]], greedy(1))
        (again,) = engine.generate([prompt], greedy(2))
        assert other.counters.cached == 0
        assert again.counters.cached == 12


def head_of_the_queue_waits_while_others_are_stalled(depth: int, debug: bool = True) -> None:
    """The running request finds no block, so the paused one is evicted. What comes free is for the
    one that stalled, though it would suffice for the one that waits at that moment."""
    paused, running = Ask(tuple(range(12)), 20), Ask((20, 21, 22, 23), 24)
    waiting = Ask(tuple(range(30, 43)), 2)
    with hash_engine(
        depth, debug=debug, max_requests=2, block_size_tokens=4, block_count=8
    ) as engine:
        futures = [engine.add_request(0, list(paused.prompt), greedy(paused.max_new))]
        while len(engine.get_request(0).generated_tokens) < 3:
            engine.step_modern()
        engine.pause_request(0)
        for request_id, ask in ((1, running), (2, waiting)):
            futures.append(engine.add_request(request_id, list(ask.prompt), greedy(ask.max_new)))
        order = []
        while not (futures[1].done() and futures[2].done()):
            order += [output.request_id for output in engine.step_modern()["tokens"]]
        assert [n for n in order if n] == [1] * 24 + [2] * 2
        assert (engine.counters.stalls, engine.counters.evictions) == (1, 1)
        engine.resume_request(0)
        drive(engine)
        for future, ask in zip(futures, (paused, running, waiting), strict=True):
            assert future.result(timeout=0).generated_tokens == decode_alone(ask)[0]


def every_drain_is_called_what_it_is(depth: int, debug: bool = True) -> None:
    """The steps that did not overlap, and why not."""
    said: dict[NotOverlapped, int] = {}

    def check(engine: DynamicInferenceEngine, *reasons: NotOverlapped) -> None:
        for reason in reasons if depth else ():
            said[reason] = said.get(reason, 0) + 1
        if not depth:
            said[NotOverlapped.SERIAL] = engine.counters.steps_committed
        found = {reason: n for reason, n in engine.counters.not_overlapped.items() if n}
        assert found == {reason.value: n for reason, n in said.items()}, found

    with hash_engine(depth, debug=debug, max_requests=2, block_count=8) as engine:

        def steps() -> None:
            for _ in range(depth + 3):
                engine.step_modern()

        engine.add_request(0, [1, 2], greedy(60))
        steps()
        check(engine)
        engine.pause_request(0)
        steps()
        check(engine, NotOverlapped.PAUSED)
        engine.resume_request(0)
        steps()
        engine.suspend()
        steps()
        check(engine, NotOverlapped.SUSPENDED)
        engine.resume()
        steps()
        engine.update_weights({"salt": 1})
        check(engine, NotOverlapped.WEIGHTS)
        drive(engine)
        steps()
        check(engine, NotOverlapped.DRAINED)
        engine.add_request(1, [3], greedy(60))
        steps()
        ended = engine.add_request(2, [4], greedy(8))
        engine.pause_request(1)
        while not ended.done():
            engine.step_modern()
        steps()
        check(engine, NotOverlapped.PAUSED)  # one of two has ended, the other is left


def next_turns_go_on_from_generated_tokens(depth: int, debug: bool = True) -> None:
    """Of two requests side by side, whose states are kept where a block of what they generate
    ends."""
    asks = [Ask((first, 2, 3, 4, 5), 20) for first in (1, 9)]
    with hash_engine(
        depth,
        debug=debug,
        model=HybridHashModel(),
        max_requests=2,
        block_size_tokens=4,
        block_count=40,
    ) as engine:
        for cached in (0, 2 * 24):
            requests = engine.generate([list(ask.prompt) for ask in asks], greedy(20))
            for ask, request in zip(asks, requests, strict=True):
                expected, _ = decode_with_salts(ask, [(0, 0)], (), hybrid_history)
                assert request.generated_tokens == expected
            assert engine.counters.tokens_cached == cached
            asks = [
                Ask((*ask.prompt, *request.generated_tokens, 6), 20)
                for ask, request in zip(asks, requests, strict=True)
            ]


SCENARIOS = (
    next_turns_go_on_from_generated_tokens,
    kept_prefix_is_reused_from_its_end,
    head_of_the_queue_waits_while_others_are_stalled,
    every_drain_is_called_what_it_is,
)
