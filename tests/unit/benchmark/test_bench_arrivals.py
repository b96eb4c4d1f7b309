"""Requests come while the engine steps."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_async.benchmark.measuring.arrivals import Arrivals
from megatron_async.benchmark.measuring.loads import Request

SECONDS = 30


class Engine:
    """It takes requests, and says when it has some."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.added: list[int] = []
        self.threads: list[threading.Thread] = []
        self.third = threading.Event()
        self._fails_at = fails_at

    def add_request(self, number: int, prompt: list[int], params: Any) -> int:
        if number == self._fails_at:
            raise ValueError("no room")
        self.added.append(number)
        self.threads.append(threading.current_thread())
        if number == 2:
            self.third.set()
        return number


def requests(count: int) -> list[Request]:
    made: Any = [SimpleNamespace(prompt=[1], params=None) for _ in range(count)]
    return made  # type: ignore[no-any-return]


def test_who_comes_later_is_added_while_the_caller_waits() -> None:
    engine = Engine()
    with Arrivals(engine, requests(3), [0.0, 0.0, 1e-3]) as arrivals:
        assert engine.added[:2] == [0, 1]
        assert engine.third.wait(SECONDS)  # as a step does
    futures: list[Any] = list(arrivals.futures)
    assert engine.added == futures == [0, 1, 2]
    here = threading.current_thread()
    assert [thread is here for thread in engine.threads] == [True, True, False]


def test_those_that_come_at_once_need_no_thread() -> None:
    engine, before = Engine(), threading.active_count()
    with Arrivals(engine, requests(3), None) as arrivals:
        assert not arrivals.more_come and threading.active_count() == before
    assert engine.added == [0, 1, 2]


def test_what_adding_raises_reaches_the_caller() -> None:
    engine = Engine(fails_at=1)
    with Arrivals(engine, requests(2), [0.0, 1e-3]) as arrivals, pytest.raises(ValueError):
        while arrivals.more_come:
            pass
    with pytest.raises(ValueError), Arrivals(Engine(fails_at=0), requests(1), None):
        pass


def test_one_that_is_left_early_ends_its_thread() -> None:
    engine, before = Engine(), threading.active_count()
    with Arrivals(engine, requests(2), [0.0, 3600.0]):
        pass
    assert engine.added == [0] and threading.active_count() == before
