"""Calls from inside a step, by a signal's handler or a callback: what would step or change the
engine is refused and harms nothing, what asks for something works.

Named after what went wrong: futures succeeded with wrong tokens, the engine died.
"""

from __future__ import annotations

import contextlib
import linecache
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

from megatron_async.device.cpu import CpuDevice
from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.errors import EngineStoppedError, EngineThreadError, ReentrantCallError
from megatron_async.request.request import FinishReason, RequestFuture
from tests.support.engines import drive, engine_at, greedy, hash_engine, sampling_params
from tests.support.hash_model import HashModel
from tests.support.oracle import Ask, decode_alone

pytestmark = pytest.mark.sweep

DEPTHS = (0, 1, 2, 3, 4)
Call = Callable[[DynamicInferenceEngine], object]

REFUSED: dict[str, Call] = {
    "step_modern": lambda engine: engine.step_modern(),
    "generate": lambda engine: engine.generate([[9]], greedy(3)),
    "suspend": lambda engine: engine.suspend(),
    "resume": lambda engine: engine.resume(),
    "reset": lambda engine: engine.reset(),
    "update_weights": lambda engine: engine.update_weights({"salt": 5}),
    "close": lambda engine: engine.close(),
}
each_refused_call = pytest.mark.parametrize("name", REFUSED)

ASKS = [
    Ask((1,), 14),
    Ask((2, 3), 20, temperature=1.0, seed=7),
    Ask((4,), 9, temperature=2.0, top_k=5, seed=8),
    Ask((5,), 17),
    Ask((6,) * 9, 12, temperature=1.0, top_p=0.8, seed=9),
]


def add_all(engine: DynamicInferenceEngine) -> list[RequestFuture]:
    return [
        engine.add_request(i, list(ask.prompt), sampling_params(ask)) for i, ask in enumerate(ASKS)
    ]


def check_unharmed(engine: DynamicInferenceEngine, futures: list[RequestFuture]) -> None:
    """Every request has its own tokens, none was computed twice, and the engine goes on."""
    for ask, future in zip(ASKS, futures, strict=True):
        request = future.result(timeout=0)
        assert (request.generated_tokens, request.finish_reason) == decode_alone(ask)
        assert request.counters.discarded == request.counters.evictions == 0
    assert (engine.suspended, engine.weight_version, engine.counters.barriers) == (False, 0, 0)
    engine.scheduler.check_idle()
    assert engine.generate([[3]], greedy(4))[0].generated_tokens == decode_alone(Ask((3,), 4))[0]


Handler = Callable[[int, FrameType | None], None]


@contextlib.contextmanager
def handling(handler: Handler) -> Iterator[None]:
    """``handler`` of the signals of :func:`signal_in_waits`."""
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


@contextlib.contextmanager
def timer(seconds: float, handler: Handler) -> Iterator[None]:
    """A signal every so many seconds; the timer of whoever had one goes on afterwards."""
    before = signal.signal(signal.SIGALRM, handler)
    left = signal.setitimer(signal.ITIMER_REAL, seconds, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, *left)


def signal_in_waits(engine: DynamicInferenceEngine) -> None:
    """Each wait for the device is interrupted by a signal, once before and once after the tokens
    have come."""
    results = engine.runner._results
    wait = results.wait

    def interrupted(number: int, width: int) -> Any:
        signal.raise_signal(signal.SIGUSR1)
        tokens = wait(number, width)
        signal.raise_signal(signal.SIGUSR1)
        return tokens

    results.wait = interrupted  # type: ignore[method-assign]


@each_refused_call
@pytest.mark.parametrize("depth", DEPTHS)
def test_a_handler_in_a_wait_gave_futures_wrong_tokens_or_the_engine_died(
    depth: int, name: str
) -> None:
    refused = 0

    def handler(*_: Any) -> None:
        nonlocal refused
        with pytest.raises(ReentrantCallError, match="in the midst of a step"):
            REFUSED[name](engine)
        refused += 1

    with engine_at(depth) as engine, handling(handler):
        futures = add_all(engine)
        signal_in_waits(engine)
        drive(engine)
        assert refused >= 2 * 20
        del engine.runner._results.wait  # type: ignore[union-attr]
        check_unharmed(engine, futures)


class Gated(HashModel):
    """Its ninth forward ends when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.forwards = 0
        self.waits = threading.Event()
        self.go = threading.Event()

    def forward(self, *arguments: Any) -> Any:
        self.forwards += 1
        if self.forwards == 9:
            self.waits.set()
            assert self.go.wait(60), "no signal came"
        return super().forward(*arguments)


def is_in_wait(frame: FrameType | None) -> bool:
    """The signal has interrupted a wait for the device."""
    while frame is not None:
        if frame.f_code is CpuDevice.wait_until.__code__:
            return True
        frame = frame.f_back
    return False


@each_refused_call
@pytest.mark.parametrize("depth", DEPTHS)
def test_a_timers_signal_while_the_host_is_blocked_in_a_wait(depth: int, name: str) -> None:
    """As it comes in life: the host sleeps until the device has tokens."""
    model = Gated()
    refused, begun = [], []

    def handler(_: int, frame: FrameType | None) -> None:
        if not model.waits.is_set() or not is_in_wait(frame) or begun:
            return  # the timer comes again
        begun.append(True)
        if len(begun) > 1:
            return  # it came between the two lines above
        with pytest.raises(ReentrantCallError) as error:
            REFUSED[name](engine)
        refused.append(error)
        model.go.set()

    with engine_at(depth, model=model) as engine:
        futures = add_all(engine)
        with timer(2e-3, handler):
            drive(engine)
        assert len(refused) == 1
        check_unharmed(engine, futures)


@each_refused_call
@pytest.mark.parametrize("depth", DEPTHS)
def test_a_refused_call_that_nobody_catches_interrupts_the_step_and_loses_nothing(
    depth: int, name: str
) -> None:
    signals = iter([True, False, False, True, True] + [False] * 10**4)

    def handler(*_: Any) -> None:
        if next(signals):
            REFUSED[name](engine)

    with engine_at(depth) as engine, handling(handler):
        futures = add_all(engine)
        signal_in_waits(engine)
        interrupted = 0
        while engine.has_unfinished_requests():
            try:
                engine.step_modern()
            except ReentrantCallError:
                interrupted += 1
        assert interrupted == 3
        del engine.runner._results.wait  # type: ignore[union-attr]
        check_unharmed(engine, futures)


@each_refused_call
@pytest.mark.parametrize("barrier", ("suspend", "reset", "update_weights"))
def test_a_handler_in_the_wait_of_a_barrier(barrier: str, name: str) -> None:
    """What takes the steps in flight is no moment for another change either."""
    refused = 0

    def handler(*_: Any) -> None:
        nonlocal refused
        with pytest.raises(ReentrantCallError):
            REFUSED[name](engine)
        refused += 1

    with engine_at(2) as engine, handling(handler):
        future = engine.add_request(0, [1], greedy(30))
        for _ in range(5):
            engine.step_modern()
        signal_in_waits(engine)
        REFUSED[barrier](engine)
        assert refused == 4  # two steps were in flight
        del engine.runner._results.wait  # type: ignore[union-attr]
        assert engine.suspended == (barrier == "suspend")
        assert engine.weight_version == (barrier == "update_weights")
        engine.update_weights({"salt": 0})
        engine.resume()
        drive(engine)
        assert future.done()
        assert (
            engine.generate([[3]], greedy(4))[0].generated_tokens == decode_alone(Ask((3,), 4))[0]
        )


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_handler_in_a_step_may_ask_for_things(depth: int) -> None:
    """Requests come, end, pause, go on, and are changed by the next step."""
    late = Ask((8,), 11)
    asked: list[Any] = []

    def handler(*_: Any) -> None:
        if asked:
            return
        assert engine.in_flight_count > depth, "in the midst of a step"
        asked.append(engine.add_request(9, list(late.prompt), sampling_params(late)))
        assert engine.abort_request(0)
        assert engine.pause_request(1) and engine.resume_request(1)
        assert engine.pause_request(2)
        assert engine.evict_request(3)
        assert engine.update_sampling_params(4, temperature=0.0)
        assert engine.get_request(9).request_id == 9
        assert engine.abort_request(77) is False and engine.has_unfinished_requests()

    asks = [Ask((i + 1,), 25) for i in range(4)] + [Ask((5,), 25, temperature=1.0, seed=3)]
    with hash_engine(depth, max_requests=6, block_size_tokens=4, block_count=80) as engine:
        futures = [
            engine.add_request(i, list(ask.prompt), sampling_params(ask))
            for i, ask in enumerate(asks)
        ]
        for _ in range(6 + depth):
            engine.step_modern()
        with handling(handler):
            signal_in_waits(engine)
            for _ in range(30):
                engine.step_modern()
            del engine.runner._results.wait  # type: ignore[union-attr]
        paused = engine.get_request(2)
        assert paused.generated_length < 25 and not futures[2].done()
        engine.resume_request(2)
        drive(engine)
        requests = [future.result(timeout=0) for future in futures]
        assert asked[0].result(timeout=0).generated_tokens == decode_alone(late)[0]
    assert requests[0].finish_reason is FinishReason.ABORT
    assert requests[0].generated_tokens == decode_alone(asks[0])[0][: requests[0].generated_length]
    for number in (1, 2, 3):
        assert requests[number].generated_tokens == decode_alone(asks[number])[0]
    assert requests[3].counters.evictions == 1
    (span,) = requests[4].sampling_spans
    assert span.params.temperature == 0.0
    first = next(i for i, step in enumerate(requests[4].steps) if step.ticket >= span.ticket)
    tokens = requests[4].generated_tokens
    assert 0 < first < 25
    assert tokens[:first] == decode_alone(asks[4])[0][:first]
    assert tokens[first:] == decode_alone(Ask((5, *tokens[:first]), 25 - first))[0]


@each_refused_call
@pytest.mark.parametrize("depth", (0, 2))
def test_a_callback_in_a_step_harms_nothing(depth: int, name: str) -> None:
    """An observer's, at every launch and commit."""
    refused = 0

    class Observer:
        def on_launch(self, *_: Any) -> None:
            nonlocal refused
            with pytest.raises(ReentrantCallError):
                REFUSED[name](engine)
            refused += 1

        on_commit = on_span = on_launch

    with engine_at(depth) as engine:
        forget = engine.observe(Observer())
        futures = add_all(engine)
        drive(engine)
        assert refused > 100
        forget()
        check_unharmed(engine, futures)


def test_a_tokenizer_that_steps_the_engine_costs_its_request_the_text_alone() -> None:
    class Tokenizer:
        eod = None

        def detokenize(self, ids: list[int]) -> str:
            engine.step_modern()
            raise AssertionError("it was allowed")

    with engine_at(1) as engine:
        engine.outputs._tokenizer = Tokenizer()
        (request,) = engine.generate([[1]], greedy(6))
    assert request.generated_tokens == decode_alone(Ask((1,), 6))[0]
    assert request.generated_text is None
    (error,) = (event.payload for event in request.events if "ERROR" in event.type.name)
    assert isinstance(error, ReentrantCallError)


@pytest.mark.parametrize("state", ("started", "closed"))
def test_what_another_engine_refuses_a_handler_is_no_failure_of_this_device(state: str) -> None:
    """A handler in this engine's wait steps one that has a thread of its own, or is closed."""
    calls = iter((True,))

    def handler(*_: Any) -> None:
        if next(calls, False):
            other.step_modern()

    with engine_at(1) as engine, engine_at(1) as other, handling(handler):
        if state == "started":
            other.start()
        else:
            other.close()
        futures = add_all(engine)
        signal_in_waits(engine)
        with pytest.raises(EngineThreadError if state == "started" else EngineStoppedError):
            drive(engine)
        drive(engine)
        del engine.runner._results.wait  # type: ignore[union-attr]
        check_unharmed(engine, futures)


def test_another_engine_may_be_stepped_from_a_handler() -> None:
    def handler(*_: Any) -> None:
        if not results:
            results.append(None)
            results[0] = other.generate([[7]], greedy(5))[0].generated_tokens

    results: list[Any] = []
    with engine_at(1) as engine, engine_at(1) as other, handling(handler):
        futures = add_all(engine)
        signal_in_waits(engine)
        drive(engine)
        assert results == [decode_alone(Ask((7,), 5))[0]]
        del engine.runner._results.wait  # type: ignore[union-attr]
        check_unharmed(engine, futures)


# --- between any two lines --------------------------------------------------------------------


class Lines:
    """Calls ``interrupt`` where a signal's handler might run: at the ``at``-th line or call of our
    code, counted from :meth:`armed` on."""

    def __init__(self, interrupt: Callable[[], None], modules: tuple[str, ...]) -> None:
        self._interrupt = interrupt
        self._modules = modules
        self._left = 0
        self.reached = False

    @contextlib.contextmanager
    def armed(self, at: int) -> Iterator[None]:
        self._left, self.reached = at, False
        before = sys.gettrace()
        sys.settrace(self._trace)
        try:
            yield
        finally:
            sys.settrace(before)

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        name = frame.f_globals.get("__name__", "")
        if self.reached or not name.startswith(self._modules):
            return None
        if event in ("call", "line") and not self._leaves_with(frame, event):
            self._left -= 1
            if self._left < 0:
                self.reached = True
                self._interrupt()
        return self._trace

    @staticmethod
    def _leaves_with(frame: FrameType, event: str) -> bool:
        """A trace sees the line of a ``with`` again when it is left. Signals are not handled there,
        before the interpreter's own locks have been given back."""
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        return event == "line" and line.lstrip().startswith("with ")


ENGINE = ("megatron_async.engine", "threading")
LONG = [Ask((i + 1,), 230) for i in range(3)]


@pytest.mark.parametrize(
    ("name", "depth"),
    [
        ("step_modern", 0),
        ("step_modern", 2),
        ("generate", 1),
        ("suspend", 1),
        ("update_weights", 2),
    ],
)
def test_a_handler_between_any_two_lines_of_a_step_harms_nothing(name: str, depth: int) -> None:
    """Inside of the step it is refused, before and after it works; nowhere is a token lost."""
    done: dict[bool, int] = {True: 0, False: 0}

    def interrupt() -> None:
        refused = False
        try:
            if name == "update_weights":
                engine.update_weights({"salt": 0}, recompute_kv_cache=False)
            else:
                REFUSED[name](engine)
        except ReentrantCallError:
            refused = True
        done[refused] += 1

    with engine_at(depth, debug=False) as engine:
        futures = []
        lines = Lines(interrupt, ENGINE)
        at = 0
        ended = False
        while not ended:
            for number, ask in enumerate(LONG):
                if len(futures) <= number or futures[number].done():
                    if len(futures) > number:
                        got = futures[number].result().generated_tokens
                        assert got == decode_alone(ask)[0]
                        del futures[number]
                    futures.insert(
                        number, engine.add_request(number, list(ask.prompt), sampling_params(ask))
                    )
            with lines.armed(at):
                engine.step_modern()
            ended = not lines.reached
            engine.resume()
            at += 1
        drive(engine)
        for ask, future in zip(LONG, futures, strict=True):
            assert future.result(timeout=0).generated_tokens == decode_alone(ask)[0]
    assert done[True] > 40 and done[False] > 5, done


@pytest.mark.slow
@pytest.mark.parametrize("call", ("add_request", "step_modern", "generate", "suspend", "start"))
def test_a_handler_between_any_two_lines_may_add_and_abort_requests(call: str) -> None:
    """No lock is in its way, those of threading's events included."""
    calls: dict[str, Call] = {
        "add_request": lambda engine: engine.add_request(1000 + at, [1], greedy(2)),
        "start": lambda engine: (engine.start(), engine.stop()),
    }
    numbers = iter(range(10**6))
    futures = []

    def interrupt() -> None:
        number = 10_000 + next(numbers)
        futures.append(engine.add_request(number, [2], greedy(3)))
        # A thread of the engine may have served the request, or ended it, before it is asked.
        done = [engine.abort_request(number), engine.evict_request(number)]
        assert all(done) or call == "start"

    with engine_at(1, debug=False) as engine:
        lines = Lines(interrupt, ENGINE)
        at = 0
        while True:
            with lines.armed(at):
                calls.get(call, REFUSED.get(call))(engine)  # type: ignore[misc]
            if not lines.reached:
                break
            engine.resume()
            at += 1
        engine.resume()
        drive(engine)
        assert len(futures) == at > 10
        ends = {future.result(timeout=0).finish_reason for future in futures}
        assert FinishReason.ABORT in ends
        assert ends <= {FinishReason.ABORT, *([FinishReason.LENGTH] if call == "start" else [])}


def may_be_had(lock: Any) -> bool:
    """Another thread gets the lock."""
    got: list[bool] = []

    def take() -> None:
        got.append(lock.acquire(timeout=10))
        if got[0]:
            lock.release()

    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    return got[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "depth"),
    [("step_modern", 0), ("step_modern", 2), ("suspend", 1), ("update_weights", 1)],
)
def test_an_interrupt_between_any_two_lines_stops_the_engine_or_loses_nothing(
    name: str, depth: int
) -> None:
    """Ctrl-C anywhere in a call: afterwards steps go on, or the engine says that it has stopped. It
    never takes itself for being in the midst of a step that is over, and no lock is lost."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    outcomes: dict[str, int] = {"goes on": 0, "stopped": 0}
    expected = {ask: decode_alone(ask)[0][:6] for ask in LONG}
    at, reached = 0, True
    while reached:
        with engine_at(depth, debug=False) as engine:
            futures = [
                engine.add_request(i, list(ask.prompt), greedy(6)) for i, ask in enumerate(LONG)
            ]
            for _ in range(3):
                engine.step_modern()
            lines = Lines(interrupt, ("megatron_async.engine", "contextlib"))
            with contextlib.suppress(KeyboardInterrupt), lines.armed(at):
                if name == "update_weights":
                    engine.update_weights({"salt": 0})
                else:
                    REFUSED[name](engine)
            reached = lines.reached
            assert may_be_had(engine.lock.mutex) and may_be_had(engine.lock.gate), at
            try:
                engine.resume()
                drive(engine)
            except EngineStoppedError:
                outcomes["stopped"] += 1
                for future in futures:
                    assert isinstance(future.exception(timeout=0), EngineStoppedError)
            else:
                outcomes["goes on"] += 1
                for ask, future in zip(LONG, futures, strict=True):
                    assert future.result(timeout=0).generated_tokens == expected[ask]
        at += 1
    assert outcomes["goes on"] > 3 and outcomes["stopped"] > 3, outcomes
