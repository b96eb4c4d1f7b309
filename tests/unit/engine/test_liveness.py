"""An engine goes on by itself: its own thread never sleeps beside a request that it could serve.

The thread runs under control (``tests/support/own_thread.py``): each test says how many steps it
may make, nobody asks for anything meanwhile, and a thread that sleeps must have a reason of
:class:`~megatron_async.engine.metrics.Idle`. The state machine does the same with everything that
can happen to a request (``tests/unit/test_state_machine.py``).
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest

from megatron_async.engine.commands import CommandQueue
from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.engine.metrics import Idle
from megatron_async.engine.stepping.driver import Driver
from megatron_async.engine.stepping.engine_thread import EngineThread
from megatron_async.engine.stepping.loop import DecodeLoop
from megatron_async.engine.stepping.waiters import Waiter, Waiters
from megatron_async.errors import EngineStoppedError, IntegrityError
from megatron_async.request.request import RequestFuture
from megatron_async.scheduler.preemption import Preemption
from megatron_async.step.plan import Plan
from tests.support.drafting_model import DraftingHashModel
from tests.support.engines import (
    DEPTHS,
    drive,
    engine_at,
    greedy,
    hash_engine,
    random_ask,
    sampling_params,
)
from tests.support.hash_tokenizer import hash_tokenizer
from tests.support.oracle import Ask, decode_alone
from tests.support.own_thread import (
    AsleepBesideWorkError,
    OwnThread,
    WatchedWaiter,
    check_idle_for_a_reason,
    in_another_thread,
    watched_waiters,
)
from tests.support.patience import PATIENCE_SECONDS

MOST_STEPS = 2000


@contextmanager
def own_thread(engine: DynamicInferenceEngine) -> Iterator[OwnThread]:
    with watched_waiters(), engine:
        thread = OwnThread(engine)
        try:
            yield thread
        finally:
            thread.stop()


def tokens(future: RequestFuture) -> list[int]:
    return list(future.result(timeout=0).generated_tokens)


# --- a cache that is full ---------------------------------------------------------------------

ENDS = {
    "length": {},
    "stop token": {"stop_token_ids": (decode_alone(Ask((1,), 6))[0][5],)},
    "stop word": {"stop_words": ["never"]},
}


@pytest.mark.parametrize("drafts", (0, 2))
@pytest.mark.parametrize("end", (*ENDS, "abort"))
@pytest.mark.parametrize("depth", DEPTHS)
def test_a_request_that_waits_for_blocks_is_served_when_they_come_free(
    depth: int, end: str, drafts: int
) -> None:
    """The commit that frees them comes behind the plan that found none."""
    model = DraftingHashModel(drafts, 0.3)
    engine = hash_engine(
        depth, model=model, tokenizer=hash_tokenizer(), max_requests=2, block_size_tokens=4,
        block_count=5,
    )  # fmt: skip
    with own_thread(engine) as thread:
        params = greedy(20, **ENDS.get(end, {}))
        first = engine.add_request(0, [1], params)
        thread.run(3)
        second = engine.add_request(1, [2] * 15, greedy(5))
        if end == "abort":
            thread.run(2)
            engine.abort_request(0)
        thread.run_dry(MOST_STEPS)
        assert first.done() and tokens(second) == decode_alone(Ask((2,) * 15, 5))[0]


@pytest.mark.parametrize("drafts", (0, 3))
@pytest.mark.parametrize("count", (2, 3, 5))
@pytest.mark.parametrize("depth", DEPTHS)
def test_requests_that_outgrow_the_cache_in_the_same_step_all_end(
    depth: int, count: int, drafts: int
) -> None:
    """The plan that evicts one of them finds no row, and its blocks are free behind it."""
    model = DraftingHashModel(drafts, 0.3)
    engine = hash_engine(
        depth, model=model, max_requests=count, block_size_tokens=8, block_count=count * 2 + 1,
    )  # fmt: skip
    asks = [Ask((n + 1,) * 12, (count * 2 + 1) * 8 - 12) for n in range(count)]
    with own_thread(engine) as thread:
        futures = [
            engine.add_request(n, list(ask.prompt), sampling_params(ask))
            for n, ask in enumerate(asks)
        ]
        thread.run_dry(MOST_STEPS)
        assert engine.counters.evictions > 0
        assert [tokens(f) for f in futures] == [decode_alone(ask)[0] for ask in asks]


def full_engine(depth: int, **values: Any) -> DynamicInferenceEngine:
    """A cache of one longest request and a half, and prompts that share nothing."""
    return hash_engine(
        depth, max_requests=6, block_size_tokens=4, block_count=18, prefill_chunk_tokens=8,
        enable_prefix_caching=False, **values,
    )  # fmt: skip


class FreeBlocks:
    """Counts launches beside which the head of the queue was left out although it would have had
    a row and its blocks."""

    def __init__(self, engine: DynamicInferenceEngine) -> None:
        self.passed_over = 0
        self._scheduler = engine.scheduler

    def on_launch(self, plan: Plan) -> None:
        scheduler = self._scheduler
        table, limits = scheduler.table, scheduler.limits
        head = table.waiting.head()
        if head is None or table.stalled or table.running >= limits.max_requests:
            return
        need = -(-len(head.tokens) // limits.block_size) + table.running * limits.blocks_per_row
        budget = sum(len(chunk.tokens) for chunk in plan.prefills) + plan.decode_rows
        room = limits.max_tokens - budget >= min(len(head.tokens), limits.prefill_chunk_tokens)
        self.passed_over += room and table.allocator.free_count >= need


@pytest.mark.slow
@pytest.mark.parametrize("depth", DEPTHS)
def test_soak_over_a_cache_that_is_always_full(depth: int, request: pytest.FixtureRequest) -> None:
    """All requests are there from the beginning, the thread runs free, and the cache never has
    room for all that could run. ``--long-run``: 10,000 requests at each depth."""
    count = 10_000 if request.config.getoption("--long-run") else 100
    rng = random.Random(depth)
    asks = [random_ask(rng, max_prompt=30, max_new=30) for _ in range(count)]
    with own_thread(full_engine(depth, debug=False)) as thread:
        engine = thread.engine
        watch = FreeBlocks(engine)
        engine.observe(watch)
        futures = [
            engine.add_request(n, list(ask.prompt), sampling_params(ask))
            for n, ask in enumerate(asks)
        ]
        thread.run_dry(200 * count)
        for ask, future in zip(asks, futures, strict=True):
            result = future.result(timeout=0)
            assert (result.generated_tokens, result.finish_reason) == decode_alone(ask)
        counters = engine.counters
        assert counters.evictions >= count / 50 and counters.stalls >= count / 50
        assert watch.passed_over == 0
        assert counters.steps_launched >= thread.steps - counters.evictions - 2 * count


# --- commands at each point -------------------------------------------------------------------

Commands = dict[str, Callable[[DynamicInferenceEngine, dict[int, RequestFuture]], Any]]
COMMANDS: Commands = {
    "add": lambda engine, futures: futures.update({9: engine.add_request(9, [3], greedy(4))}),
    "resume request": lambda engine, futures: engine.resume_request(0),
    "pause": lambda engine, futures: engine.pause_request(1),
    "abort": lambda engine, futures: engine.abort_request(0),
    "cancel": lambda engine, futures: futures[0].cancel(),
    "evict": lambda engine, futures: engine.evict_request(0),
    "update sampling": lambda engine, futures: engine.update_sampling_params(0, seed=3),
    "suspend": lambda engine, futures: engine.suspend(),
    "resume": lambda engine, futures: engine.resume(),
    "suspend and resume": lambda engine, futures: (engine.suspend(), engine.resume()),
    "update weights": lambda engine, futures: engine.update_weights({"salt": 0}),
    "reset prefix cache": lambda engine, futures: engine.reset_prefix_cache(),
    "reset": lambda engine, futures: engine.reset(),
}
POINTS = ("after step", "after look", "before wait", "in wait")
LEAD = 3
"""Tokens of the request that runs until the thread has nothing to do."""


class Placed:
    """Calls a command once, at the given occurrence of a point in the thread's life; ``seen``
    counts how often the thread passed it."""

    def __init__(self, thread: OwnThread, point: str, at: int, command: Callable[[], Any]) -> None:
        self.seen = 0
        self._at = at
        self._command: Callable[[], Any] | None = command
        assert thread.waiter is not None
        if point == "after step":
            thread.after_step = self.pass_by
        elif point == "after look":
            thread.after_look = lambda idle: self.pass_by()
        elif point == "before wait":
            thread.waiter.before_wait = self.pass_by

    def pass_by(self) -> None:
        self.seen += 1
        if self.seen > self._at:
            self.call()

    def call(self) -> bool:
        command, self._command = self._command, None
        if command is not None:
            in_another_thread(command)
        return command is not None


def place(depth: int, name: str, point: str, at: int, *, paused: bool = True) -> bool:
    """Runs one request to its end beside a paused one, with a command at a point; False if the
    thread did not come there. Then everything is let go on, and must end."""
    futures: dict[int, RequestFuture] = {}
    with own_thread(engine_at(depth)) as thread:
        engine = thread.engine
        if name == "resume":
            engine.suspend()
        thread.run(1)
        futures[0] = engine.add_request(0, [1], greedy(5))
        if paused:
            engine.pause_request(0)
        thread.run(2)
        futures[1] = engine.add_request(1, [2], greedy(LEAD))
        placed = Placed(thread, point, at, lambda: COMMANDS[name](engine, futures))
        thread.run_dry(MOST_STEPS)
        if point == "in wait":
            placed.call()
            thread.run_dry(MOST_STEPS)
        elif placed.call():
            return False
        assert not engine.loop.commands.waiting
        engine.resume()
        engine.resume_request(0)
        engine.resume_request(1)
        thread.run_dry(MOST_STEPS)
        assert engine.loop.idle_reason is Idle.NO_REQUEST
        assert all(future.done() for future in futures.values())
        for n, length in ((1, LEAD), (9, 4)):
            if n in futures and not futures[n].cancelled() and name != "reset":
                prompt = (2,) if n == 1 else (3,)
                assert tokens(futures[n]) == decode_alone(Ask(prompt, length))[0]
    return True


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("depth", DEPTHS)
def test_a_command_at_any_point_before_the_wait_is_heeded(depth: int, name: str) -> None:
    for point in POINTS:
        at = 0
        while place(depth, name, point, at) and point != "in wait":
            at += 1
        assert at > 0 or point == "in wait", f"the thread never came to {point}"


@pytest.mark.parametrize("depth", DEPTHS)
def test_new_weights_hand_out_what_they_drain(depth: int) -> None:
    """To streams and sinks, though the thread has nothing to do behind them."""

    class Sink:
        def __init__(self) -> None:
            self.tokens: list[int] = []

        def deliver(self, taken: Any) -> None:
            self.tokens += [output.token_id for output in taken.outputs]

        def fail(self, error: EngineStoppedError) -> None:
            """At the close."""

    for steps in range(1, 8):
        sink = Sink()
        engine = engine_at(depth)
        engine.deliver_to(sink)
        with own_thread(engine) as thread:
            future = engine.add_request(0, [1], greedy(5))
            thread.run(steps)
            engine.update_weights({"salt": 0}, recompute_kv_cache=False)
            thread.run_dry(MOST_STEPS)
            assert sink.tokens == tokens(future) == decode_alone(Ask((1,), 5))[0]


# --- those who wait without the thread --------------------------------------------------------


def woken(call: Callable[[], Any], waits: Callable[[], bool], act: Callable[[], Any]) -> Any:
    """What ``call`` returns in another thread; ``act`` comes when ``waits`` says that it waits."""
    result: list[Any] = []
    thread = threading.Thread(target=lambda: result.append(call()), daemon=True)
    thread.start()
    end = int(PATIENCE_SECONDS / 1e-3)
    while not waits() and end:
        threading.Event().wait(1e-3)
        end -= 1
    assert end, "nobody came to wait"
    act()
    thread.join(PATIENCE_SECONDS)
    assert result, "nobody woke the thread"
    return result[0]


def waiting(engine: DynamicInferenceEngine, count: int = 1) -> Callable[[], bool]:
    def look() -> bool:
        found = list(engine.loop.commands.waiters.waiting.values())
        return sum(isinstance(w, WatchedWaiter) and w.sleeps for w in found) >= count

    return look


def resume_both(engine: DynamicInferenceEngine) -> None:
    for number in (0, 1):
        engine.resume_request(number)


BY_OTHERS: dict[str, Callable[[DynamicInferenceEngine], Any]] = {
    "resumes": resume_both,
    "resumes and steps": lambda engine: (resume_both(engine), drive(engine)),
    "aborts": lambda engine: [engine.abort_request(number) for number in (0, 1)],
    "starts the thread": lambda engine: (resume_both(engine), engine.start()),
    "resets": lambda engine: engine.reset(),
}


@pytest.mark.parametrize("act", BY_OTHERS.values(), ids=BY_OTHERS)
@pytest.mark.parametrize("depth", (0, 2))
def test_generate_beside_paused_requests_waits_without_a_poll(
    depth: int, act: Callable[[DynamicInferenceEngine], Any]
) -> None:
    """Two callers wait at once, and neither takes the other's wake-up."""
    with watched_waiters(), engine_at(depth) as engine:
        original = engine.requests.add

        def add_paused(*args: Any, **options: Any) -> Any:
            added = original(*args, **options)
            for number in (0, 1):
                engine.pause_request(number)
            return added

        results: list[Any] = []

        def generate() -> None:
            results.append(engine.generate([[2]], greedy(3)))

        with patch.object(engine.requests, "add", add_paused):
            callers = [threading.Thread(target=generate, daemon=True) for _ in range(2)]
            for caller in callers:
                caller.start()
            woken(lambda: True, waiting(engine, 2), lambda: None)
        before = engine.loop.steps_run
        act(engine)
        for caller in callers:
            caller.join(PATIENCE_SECONDS)
        assert len(results) == 2, "nobody woke generate"
        assert engine.loop.steps_run - before < 60


def test_an_error_that_stops_no_step_ends_the_thread_and_all_who_wait() -> None:
    """A sink that breaks its word: it raises outside of the step lock."""

    class Raises:
        def deliver(self, taken: Any) -> None:
            raise OSError("the sink is full")

        def fail(self, error: EngineStoppedError) -> None:
            """At the end."""

    engine = engine_at(1)
    engine.deliver_to(Raises())
    with engine:
        engine.start()
        future = engine.add_request(0, [1], greedy(40))
        with pytest.raises(EngineStoppedError, match="the sink is full"):
            future.result(PATIENCE_SECONDS)
        with pytest.raises(EngineStoppedError, match="the sink is full"):
            engine.generate([[1]], greedy(2))


def test_generate_takes_over_the_steps_of_a_thread_that_is_stopped() -> None:
    with watched_waiters():
        engine = engine_at(1)
        with engine:
            thread = OwnThread(engine)
            result = woken(
                lambda: engine.generate([[1]], greedy(40)),
                lambda: waiting(engine)() and thread.run(1) is False and thread.steps > 3,
                thread.stop,
            )
            assert result[0].generated_tokens == decode_alone(Ask((1,), 40))[0]


def test_streams_get_tokens_that_a_caller_steps_for() -> None:
    """Also when the thread was stopped under them."""
    import asyncio

    async def consume(engine: DynamicInferenceEngine) -> list[int]:
        found = []
        async for output in engine.stream([1], greedy(30)):
            found.append(output.token_id)
            if len(found) == 3:
                await asyncio.to_thread(engine.stop)
                await asyncio.to_thread(drive, engine)
        return found

    with engine_at(1) as engine:
        engine.start()
        assert asyncio.run(consume(engine)) == decode_alone(Ask((1,), 30))[0]


def test_a_stream_that_opens_while_the_engine_stops_ends_with_the_reason() -> None:
    """The engine stops behind the check, and before the stream is there to be told."""
    import asyncio

    async def consume(engine: DynamicInferenceEngine) -> None:
        add = engine.streams.add

        def add_late(*args: Any) -> None:
            with pytest.raises(EngineStoppedError):
                in_another_thread(lambda: fail_now(engine))
            add(*args)

        with patch.object(engine.streams, "add", add_late):
            async for _ in engine.stream([1], greedy(3)):
                raise AssertionError("a token of an engine that has stopped")

    def fail_now(engine: DynamicInferenceEngine) -> None:
        engine.lock.stop(EngineStoppedError("stopped meanwhile"))
        engine.lock.check()

    with engine_at(1) as engine:
        engine.start()
        with pytest.raises(EngineStoppedError, match="stopped meanwhile"):
            asyncio.run(asyncio.wait_for(consume(engine), PATIENCE_SECONDS))


# --- what the loop says -----------------------------------------------------------------------


def test_an_engine_that_can_plan_nothing_stops_and_says_so() -> None:
    """A scheduler that forgets to make room is an error, not a silence."""
    with engine_at(1) as engine:
        future = engine.add_request(0, [1], greedy(5))
        with (
            patch.object(engine.scheduler, "plan", lambda: None),
            pytest.raises(IntegrityError, match="no step can be planned"),
        ):
            engine.loop._plan = engine.scheduler.plan
            for _ in range(10):
                engine.step_modern()
        with pytest.raises(EngineStoppedError, match="no step can be planned"):
            future.result(timeout=0)


def test_the_reasons_of_an_idle_engine() -> None:
    with engine_at(1) as engine:
        assert engine.loop.idle_reason is Idle.NO_REQUEST
        engine.add_request(0, [1], greedy(9))
        assert engine.loop.idle_reason is None
        engine.pause_request(0)
        engine.step_modern()
        assert engine.loop.idle_reason is Idle.PAUSED
        engine.suspend()
        assert engine.loop.idle_reason is Idle.SUSPENDED
        engine.resume()
        engine.add_request(1, [2], greedy(2))
        drive_until_idle(engine)
        assert engine.loop.idle_reason is Idle.PAUSED
        check_idle_for_a_reason(engine)
        engine.abort_request(0)
        assert engine.loop.idle_reason is None
        drive(engine)
        drive_until_idle(engine)
        assert engine.loop.idle_reason is Idle.NO_REQUEST


def drive_until_idle(engine: DynamicInferenceEngine) -> None:
    for _ in range(MOST_STEPS):
        if engine.loop.is_idle():
            return
        engine.step_modern()
    raise AssertionError("the engine does not come to rest")


# --- faults -----------------------------------------------------------------------------------


def stale_idleness(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was there before: the last plan is believed, whatever came behind it."""
    step = DecodeLoop.step

    def stepping(self: Any) -> None:
        plan, self.found = self._plan, []
        self._plan = lambda: self.found.append(plan()) or self.found[-1]
        try:
            step(self)
        finally:
            self._plan = plan

    def idle_reason(self: Any) -> Idle | None:
        if self._in_flight or self.commands.waiting:
            return None
        found = getattr(self, "found", [])
        return Idle.PAUSED if (found and found[-1] is None) or self.suspended else None

    monkeypatch.setattr(DecodeLoop, "step", stepping)
    monkeypatch.setattr(DecodeLoop, "idle_reason", property(idle_reason))


def silent_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        CommandQueue, "submit", lambda self, *commands: self.waiting.extend(commands)
    )


def silent_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Driver, "_changed", lambda self: self._outputs.resolve_futures())


def wakes_before_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def submit(self: CommandQueue, *commands: Any) -> None:
        self.waiters.wake()
        self.waiting.extend(commands)

    monkeypatch.setattr(CommandQueue, "submit", submit)


def one_token_for_all_who_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    def wake(self: Waiters) -> None:
        for waiter in list(self.waiting.values())[:1]:
            waiter.wake()

    monkeypatch.setattr(Waiters, "wake", wake)


def forgets_a_wake_up_before_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    wait = WatchedWaiter.wait

    def forgetful(self: Any) -> None:
        self.before_wait()
        self.before_wait = lambda: None
        while not self._wakes.empty():
            self._wakes.get()
            self._taken += 1
        wait(self)

    monkeypatch.setattr(WatchedWaiter, "wait", forgetful)


def paused_requests_are_counted_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The count of paused requests is one too high, so all seem to be paused."""
    from megatron_async.scheduler.request_table import RequestTable

    hold = RequestTable.hold

    def holding(self: Any, sequence: Any) -> None:
        hold(self, sequence)
        self.held += 1

    monkeypatch.setattr(RequestTable, "hold", holding)


def nothing_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is evicted: those who are short wait for each other."""
    monkeypatch.setattr(Preemption, "relieve", lambda self, need, beneficiary: None)


FAULTS: dict[Callable[[pytest.MonkeyPatch], None], Callable[[], Any]] = {
    stale_idleness: lambda: test_a_request_that_waits_for_blocks_is_served_when_they_come_free(
        1, "length", 0
    ),
    silent_commands: lambda: place(1, "add", "in wait", 0),
    wakes_before_the_command: lambda: wakes_too_early(),
    silent_changes: lambda: place(1, "resume", "in wait", 0, paused=False),
    one_token_for_all_who_wait: lambda: two_who_wait(),
    forgets_a_wake_up_before_the_wait: lambda: place(1, "add", "before wait", 0),
    paused_requests_are_counted_twice: lambda: place(1, "add", "in wait", 0),
    nothing_gives_way: lambda: test_requests_that_outgrow_the_cache_in_the_same_step_all_end(
        1, 2, 0
    ),
}


def wakes_too_early() -> None:
    """The thread looks between the wake-up and the command."""
    with own_thread(engine_at(1)) as thread:
        thread.run(1)
        wake = Waiters.wake

        def wake_and_let_it_look(self: Waiters) -> None:
            wake(self)
            thread.settle()

        with patch.object(Waiters, "wake", wake_and_let_it_look):
            thread.engine.add_request(0, [1], greedy(3))
        thread.run_dry(MOST_STEPS)


def two_who_wait() -> None:
    """The engine's thread and one more; the one that came last is to go on."""
    with watched_waiters(), engine_at(1) as engine, engine.loop.commands.waiters.waiter() as first:
        assert isinstance(first, Waiter)
        thread = EngineThread(lambda: None, engine.loop.is_idle, engine.loop.commands.waiters)
        thread.start()
        woken(lambda: True, waiting(engine), lambda: None)
        engine.add_request(0, [1], greedy(3))
        waiters = list(engine.loop.commands.waiters.waiting.values())
        asleep = [w for w in waiters if isinstance(w, WatchedWaiter) and w.sleeps]
        thread._stopping = True
        for waiter in waiters:
            waiter.wake()
        if asleep:
            raise AsleepBesideWorkError(f"{len(asleep)} of {len(waiters)} sleep")


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_faults_are_found(
    fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    FAULTS[fault]()
    fault(monkeypatch)
    with pytest.raises((AsleepBesideWorkError, IntegrityError, EngineStoppedError)):
        FAULTS[fault]()
