"""Commands at each point of the steps of an engine's own thread, and those who wait for it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.engine.metrics import Idle
from megatron_async.request.request import RequestFuture
from tests.support.engines import engine_at, greedy
from tests.support.oracle import Ask, decode_alone
from tests.support.own_thread import OwnThread, WatchedWaiter, in_another_thread, watched_waiters
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
