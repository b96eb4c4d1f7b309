"""Calls of another rank than 0, with rank 0 played by the test."""

from __future__ import annotations

import os
import queue
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_async import megatron_compat as compat  # noqa: F401  (before megatron)
from megatron_async.errors import EngineStoppedError, RankDiedError, ReentrantCallError
from megatron_async.megatron_api.spmd import calls as calls_module
from megatron_async.megatron_api.spmd.calls import Calls
from megatron_async.megatron_api.spmd.messages import BROUGHT, NEWS, Brought, Standing
from megatron_async.megatron_api.spmd.mirror import Applied
from megatron_async.ranks.channel import RingSender
from megatron_async.ranks.follower import Group
from megatron_async.ranks.messages import MESSAGES, Called, Stop
from tests.support.patience import PATIENCE_SECONDS

STANDING = Standing.before_it_is_built()


class Played:
    """Rank 0's end. ``late`` happens once, when the other rank goes to sleep."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, hooks: dict[str, Any] | None = None
    ) -> None:
        self.sender = RingSender(1, lambda place: None, lambda: None)
        self.said: list[bytes] = []
        self.late: Any = None
        self.line = SimpleNamespace(
            wakes=self, lost=None, failure=None, answer=None, say=self.said.append,
            hang_up=lambda: None,
        )  # fmt: skip

        def join(place: Any, device: str, check: Any) -> tuple[Group, Any]:
            ring = os.dup(self.sender.descriptor)
            return Group(1, self.line, ring, 1, 0.0, check), self.line  # type: ignore[arg-type]

        monkeypatch.setattr(calls_module, "join_users_ranks", join)
        place: Any = SimpleNamespace(rank=1)
        self.calls = Calls(place, torch.device("cpu"), None, hooks or {})  # type: ignore[arg-type]

    def tell(self, message: Any) -> None:
        self.sender.send(MESSAGES.encode(message))

    def called(self, name: str, **brought: Any) -> None:
        self.tell(Called(name, BROUGHT.encode(Brought(standing=STANDING, **brought))))

    def clear(self) -> None:
        """As of an event."""

    def wait(self, seconds: float | None = None) -> None:
        """As of an event; what happens meanwhile."""
        late, self.late = self.late, None
        if late is not None:
            late()


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Played:
    return Played(monkeypatch)


def test_rank_0_that_closes_while_this_one_falls_asleep_has_closed(played: Played) -> None:
    def close() -> None:
        played.tell(Stop())
        played.line.lost = "rank 0 is gone"

    played.late = close
    played.calls.until_closed()
    with pytest.raises(EngineStoppedError, match="rank 0 has closed"):
        played.calls.make("step_modern")


def test_rank_0_that_goes_without_a_word_has_died(played: Played) -> None:
    played.line.lost = "rank 0 is gone"
    with pytest.raises(RankDiedError, match="rank 0 is gone"):
        played.calls.until_closed()
    with pytest.raises(RankDiedError, match="rank 0 is gone"):
        played.calls.make("step_modern")


def test_what_was_told_before_a_group_failed_is_void(played: Played) -> None:
    played.called("suspend")
    played.line.failure = "rank 2 has died"
    with pytest.raises(RankDiedError, match="rank 2 has died"):
        played.calls.make("suspend")


def test_calls_of_rank_0_alone_are_passed_over(played: Played) -> None:
    played.called("add_request", key=1)
    played.called("abort_request", key=1, value=True)
    played.called("add_request", key=2)
    assert played.calls.make("add_request", 2).brought.key == 2
    assert played.calls.make("abort_request", 1).brought.value is True
    played.called("suspend")
    played.calls.make("suspend")
    played.called("resume")
    # The first request was rank 0's alone: nobody here has asked for it until a call of all.
    with pytest.raises(EngineStoppedError, match=r"rank 1 calls add_request\(\) where rank 0 has"):
        played.calls.make("add_request", 1)
    assert b"EngineStoppedError" in played.said[-1]


def test_news_of_requests_leaves_calls_their_outcomes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls_module, "MOST_UNCLAIMED", 2)
    played = Played(monkeypatch)
    played.called("add_request", key=1)
    for _ in range(3):
        played.called(NEWS)
    played.called("abort_request", key=2, value=True)
    played.calls.make("abort_request", 2)
    monkeypatch.setattr("megatron_async.ranks.users_ranks.APART_SECONDS", -1.0)
    assert played.calls.make("add_request", 1).brought.key == 1


def test_an_error_of_rank_0s_is_raised_here_too(played: Played) -> None:
    played.called("suspend", error=("EngineThreadError", "a thread steps"))
    with pytest.raises(Exception, match="a thread steps") as caught:
        played.calls.make("suspend")
    assert type(caught.value).__name__ == "EngineThreadError"
    played.called("suspend", error=("ValueError", "rank 0 alone knows it"))
    with pytest.raises(RankDiedError, match="rank 0 alone knows it"):
        played.calls.make("suspend")


def test_a_wait_for_rank_0_has_an_end(played: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_async.ranks.users_ranks.APART_SECONDS", -1.0)
    with pytest.raises(RankDiedError, match=r"rank 1 waits in step_modern\(\)"):
        played.calls.make("step_modern")


def test_a_call_in_the_midst_of_another_is_refused(played: Played) -> None:
    caught: list[Exception] = []

    def handle() -> None:
        try:
            played.calls.make("abort_request", 3)
        except ReentrantCallError as error:
            caught.append(error)
        played.called("suspend")

    played.late = handle
    played.calls.make("suspend")
    assert "in the midst of suspend()" in str(caught[0])


def test_a_thread_follows_until_rank_0_stops(played: Played) -> None:
    played.called("start")
    played.calls.make("start")
    played.called("generate")
    played.called("stop")
    played.calls.begin()
    until = time.monotonic() + PATIENCE_SECONDS
    while played.calls.follows and time.monotonic() < until:
        time.sleep(0.001)
    # What rank 0 has done before it stopped was done for the calls that come late here.
    assert played.calls.has_thread
    played.calls.make("generate")
    played.calls.end()
    assert not played.calls.has_thread
    played.called("suspend")
    played.calls.make("suspend")


def test_a_thread_that_ends_late_leaves_the_next_one_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    ending: queue.SimpleQueue[threading.Thread] = queue.SimpleQueue()
    goes_on = threading.Event()

    def stopped(applied: Applied) -> None:
        ending.put(threading.current_thread())
        goes_on.wait(PATIENCE_SECONDS)

    played = Played(monkeypatch, {"stop": stopped})
    for name in ("start", "stop"):
        played.called(name)
    played.calls.make("start")
    played.calls.begin()
    first = ending.get(timeout=PATIENCE_SECONDS)
    played.calls.end()
    played.called("start")
    played.calls.make("start")
    played.calls.begin()
    goes_on.set()
    first.join(PATIENCE_SECONDS)
    assert played.calls.follows
    played.called("stop")
    played.calls.end()
    assert not played.calls.follows


def test_rank_0_alone_may_stop_its_thread(played: Played) -> None:
    played.called("start")
    played.calls.make("start")
    played.calls.begin()
    played.called("stop")
    played.called("generate")
    played.calls.make("generate")
    assert not played.calls.has_thread
