"""How an engine ends, and what becomes of those who wait: closed, failed, interrupted, dropped."""

from __future__ import annotations

import gc
import signal
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from megatron_async.device.cpu import CpuDevice
from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.errors import ConfigError, EngineStoppedError, RequestError
from tests.support.cuda_rings import CudaRingsDevice
from tests.support.engines import DEPTHS, drive, engine_at, greedy
from tests.support.hash_model import HashModel
from tests.support.oracle import Ask, decode_alone
from tests.support.patience import PATIENCE_SECONDS


class FailsOnce(HashModel):
    """Raises in the fifth forward and in no other."""

    forwards = 0

    def forward(self, *arguments: Any) -> Any:
        self.forwards += 1
        if self.forwards == 5:
            raise ValueError("boom")
        return super().forward(*arguments)


CALLS: list[Callable[[DynamicInferenceEngine], object]] = [
    lambda engine: engine.add_request(9, [1]),
    lambda engine: engine.step_modern(),
    lambda engine: engine.generate([[1]], greedy(2)),
    lambda engine: engine.update_weights({"salt": 1}),
    lambda engine: engine.suspend(),
    lambda engine: engine.resume(),
    lambda engine: engine.reset(),
    lambda engine: engine.start(),
]


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_closed_engine_fails_what_has_not_ended_and_refuses_every_call(depth: int) -> None:
    engine = engine_at(depth)
    (ended,) = engine.generate([[1]], greedy(2))
    future = engine.add_request(0, [1], greedy(50))
    for _ in range(4):
        engine.step_modern()
    engine.close()
    with pytest.raises(EngineStoppedError, match="closed; build a new one"):
        future.result(timeout=0)
    for call in CALLS:
        with pytest.raises(EngineStoppedError, match="closed; build a new one"):
            call(engine)
    for change in ("abort", "pause", "resume", "evict"):
        assert getattr(engine, f"{change}_request")(0) is False  # it has ended
    engine.close()
    assert ended.generated_tokens == decode_alone(Ask((1,), 2))[0]


def test_closing_ends_a_generation_in_another_thread() -> None:
    engine, raised = engine_at(1), []

    def generate() -> None:
        with pytest.raises(EngineStoppedError) as error:
            while True:  # until it is closed, however late
                engine.generate([[1]] * 30, greedy(50))
        raised.append(error)

    thread = threading.Thread(target=generate)
    thread.start()
    while not engine.counters.steps_committed:
        time.sleep(1e-3)
    engine.close()
    thread.join(PATIENCE_SECONDS)
    assert not thread.is_alive() and len(raised) == 1


class AddsWhenItFails:
    """In the place of a live request, one in whose end another thread adds a request."""

    def __init__(self, entries: dict[int, Any], key: int) -> None:
        self._entries, self._entry = entries, entries[key]

    @property
    def future(self) -> Any:
        self._entries[len(self._entries) + 999] = self._entry
        return self._entry.future


def test_an_engine_closes_while_a_thread_adds_requests() -> None:
    engine = engine_at(1)
    futures = [engine.add_request(number, [1], greedy(50)) for number in range(2)]
    entries = engine.outputs._entries
    for key in list(entries):
        entries[key] = AddsWhenItFails(entries, key)
    engine.close()
    for future in futures:
        with pytest.raises(EngineStoppedError, match="closed; build a new one"):
            future.result(timeout=0)


@pytest.mark.parametrize("depth", DEPTHS)
def test_an_error_in_a_step_reaches_everybody_who_waits(depth: int) -> None:
    with engine_at(depth, model=FailsOnce()) as engine:
        futures = [engine.add_request(i, [1], greedy(30)) for i in range(5)]
        with pytest.raises(ValueError, match="boom"):
            drive(engine)
        for future in futures:
            with pytest.raises(EngineStoppedError, match="ValueError: boom; build") as error:
                future.result(timeout=0)
            assert isinstance(error.value.__cause__, ValueError)
        for call in CALLS:
            with pytest.raises(EngineStoppedError, match="boom"):
                call(engine)


@pytest.mark.parametrize("error", [ConfigError("bad shape"), RequestError("bad token")])
def test_an_error_of_any_class_in_a_forward_stops_the_engine(error: Exception) -> None:
    class Fails(HashModel):
        def forward(self, *arguments: Any) -> Any:
            raise error

    with engine_at(1, model=Fails()) as engine:
        future = engine.add_request(0, [1], greedy(30))
        with pytest.raises(type(error)):
            drive(engine)
        assert future.done()


def test_an_error_in_a_commit_stops_the_engine_too() -> None:
    with engine_at(1) as engine:
        future = engine.add_request(0, [1], greedy(30))
        engine.step_modern()
        engine.loop._output = lambda *_: {}["row"]
        with pytest.raises(KeyError):
            drive(engine)
        with pytest.raises(EngineStoppedError, match="KeyError: 'row'"):
            future.result(timeout=0)


@pytest.mark.parametrize("device", [CpuDevice, CudaRingsDevice])
@pytest.mark.parametrize("taken", [False, True])
@pytest.mark.parametrize("depth", DEPTHS)
def test_an_interrupted_wait_loses_nothing(
    depth: int, taken: bool, device: type[CpuDevice]
) -> None:
    """Ctrl-C mostly comes while the host waits for the device, or just after."""
    asks = [Ask((i + 1,), 12) for i in range(3)]
    with engine_at(depth, device=device(poison=True)) as engine:
        futures = [
            engine.add_request(i, list(ask.prompt), greedy(12)) for i, ask in enumerate(asks)
        ]
        results = engine.runner._results
        wait, interrupts = results.wait, iter([KeyboardInterrupt, TimeoutError] * 3)

        def interrupted(number: int, width: int) -> Any:
            error = next(interrupts, None) if number % 2 else None
            if error is not None:
                if taken:
                    wait(number, width)
                raise error
            return wait(number, width)

        results.wait = interrupted  # type: ignore[method-assign]
        count = 0
        while engine.has_unfinished_requests():
            try:
                engine.step_modern()
            except (KeyboardInterrupt, TimeoutError):
                count += 1
        assert count == 6
        engine.reset()
        for ask, future in zip(asks, futures, strict=True):
            assert future.result(timeout=0).generated_tokens == decode_alone(ask)[0]


def test_a_close_that_is_interrupted_is_made_up_for_at_exit() -> None:
    """A stream's thread that runs on in torch while the interpreter ends aborts the process."""
    device, go = CpuDevice(), threading.Event()

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    wait = device._over.wait

    def wait_a_while(*arguments: Any) -> bool:
        signal.setitimer(signal.ITIMER_REAL, 0.1)  # not before: the interrupt is to come in here
        return wait(*arguments)

    before = signal.signal(signal.SIGALRM, interrupt)
    device._over.wait = wait_a_while  # type: ignore[method-assign]
    device.enqueue(lambda: go.wait(PATIENCE_SECONDS) or None, "long")
    try:
        with pytest.raises(KeyboardInterrupt):
            device.close()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        device._over.wait = wait  # type: ignore[method-assign]
        signal.signal(signal.SIGALRM, before)
    assert device._end.alive and not device._over.is_set()
    threading.Timer(0.1, go.set).start()
    device._end()  # what the interpreter calls at its end
    assert device._over.is_set() and not device._thread.is_alive()


def test_an_interrupt_before_the_wait_stops_the_engine() -> None:
    """Nobody knows whether the device was asked for the tokens: the wait might never end."""
    with engine_at(0) as engine:
        future = engine.add_request(0, [1], greedy(5))
        engine.step_modern()
        engine.runner._sample_oldest = lambda: (_ for _ in ()).throw(KeyboardInterrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.step_modern()
        with pytest.raises(EngineStoppedError, match="KeyboardInterrupt"):
            engine.step_modern()
        assert future.done()


def test_a_generation_that_is_interrupted_leaves_no_request_behind() -> None:
    with engine_at(1) as engine:
        steps, take = iter(range(5)), engine.outputs.take

        def interrupted() -> Any:  # between two steps
            if next(steps, None) is None:
                raise KeyboardInterrupt
            return take()

        engine.outputs.take = interrupted  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            engine.generate([[1], [2]], greedy(50))
        engine.outputs.take = take  # type: ignore[method-assign]
        drive(engine)
        assert engine.counters.tokens_committed < 20
        assert (
            engine.generate([[1]], greedy(4))[0].generated_tokens == decode_alone(Ask((1,), 4))[0]
        )


def test_an_engine_that_nobody_refers_to_is_freed_and_so_is_its_thread() -> None:
    gc.collect()
    threads = threading.active_count()
    engine = engine_at(1)
    engine.generate([[1]], greedy(2))
    future = engine.add_request(0, [1], greedy(2))
    drive(engine)
    context = weakref.ref(engine.batch)
    del engine
    assert future.done()
    end = time.monotonic() + PATIENCE_SECONDS
    while (context() is not None or threading.active_count() > threads) and time.monotonic() < end:
        gc.collect()
        time.sleep(1e-2)
    assert context() is None and threading.active_count() <= threads


def test_a_refused_engine_leaves_no_thread() -> None:
    with engine_at(1) as engine:
        threads = threading.active_count()
        with pytest.raises(ConfigError, match="another engine"):
            DynamicInferenceEngine(engine.model, engine.config, batch=engine.batch)
        assert threading.active_count() <= threads


def test_a_request_goes_on_without_text_when_its_tokenizer_fails() -> None:
    wanted = decode_alone(Ask((1,), 3))[0]

    class Tokenizer:
        eod = None

        def detokenize(self, ids: list[int]) -> str:
            if ids == wanted:
                raise KeyError("unknown id")
            return "text"

    with engine_at(1) as engine:
        engine.outputs._tokenizer = Tokenizer()
        futures = [engine.add_request(i, [i + 1], greedy(3 + i)) for i in range(2)]
        drive(engine)
        first, second = (future.result(timeout=0) for future in futures)
    assert (first.generated_tokens, first.generated_text) == (wanted, None)
    assert "ERROR_NONTRANSIENT" in [event.type.name for event in first.events]
    assert (second.generated_tokens, second.generated_text) == (
        decode_alone(Ask((2,), 4))[0],
        "text",
    )
