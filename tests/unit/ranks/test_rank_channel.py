"""The ring: a reader never sleeps beside a message, whenever that comes."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import pytest

from megatron_async.ranks import channel
from megatron_async.ranks.channel import RingReceiver, RingSender, _Ring

ROUNDS = 3000
MOMENTS = range(1, 5)
"""Of a reader that finds nothing: around the clearing of what wakes it, behind the fence, and when
it waits."""


class SleptError(Exception):
    """A reader would have slept for ever."""


class Moments(threading.Event):
    """What wakes a reader. At the moment ``at`` of all those at which its thread could be stopped,
    something else happens."""

    def __init__(self, at: int, happens: Callable[[], None]) -> None:
        super().__init__()
        self.at, self.happens = at, happens
        self.passed = 0

    def passes(self) -> None:
        self.passed += 1
        if self.passed == self.at:
            self.happens()

    def clear(self) -> None:
        self.passes()
        super().clear()
        self.passes()

    def wait(self, timeout: float | None = None) -> bool:
        self.passes()
        assert timeout is None, "nothing is made up for by a poll"
        if not self.is_set():
            raise SleptError
        return True


def ring_of(
    at: int, messages: int, *, is_silent: bool = False, monkeypatch: pytest.MonkeyPatch
) -> tuple[RingReceiver, Moments]:
    """A reader, and ``messages`` that are sent at one of its moments."""
    sender = RingSender(1, lambda place: is_silent or wakes.set(), lambda: None, size=1 << 10)

    def send() -> None:
        for number in range(messages):
            sender.send(b"%d" % number)

    wakes = Moments(at, send)
    reader = RingReceiver(os.dup(sender.descriptor), 0, 1, wakes, 0.0)
    fence = _Ring.fence

    def fenced(ring: _Ring) -> None:
        fence(ring)
        if ring is reader._ring:
            wakes.passes()

    monkeypatch.setattr(_Ring, "fence", fenced)
    return reader, wakes


@pytest.mark.parametrize("messages", [1, 2])
def test_a_message_is_read_whenever_it_comes(
    messages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the reader says that it sleeps, after, when it has looked again, and while it waits;
    so too where it slept before and is woken once too often."""
    for at in MOMENTS:
        reader, wakes = ring_of(at, messages, monkeypatch=monkeypatch)
        for number in range(messages):
            assert reader.receive() == b"%d" % number
        assert wakes.passed >= at
        with pytest.raises(SleptError):  # nothing is left, and it says so rightly
            reader.receive()
    reader, wakes = ring_of(MOMENTS[-1] + 1, messages, monkeypatch=monkeypatch)
    with pytest.raises(SleptError):  # there is no other moment
        reader.receive()


def test_a_waker_that_is_silent_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = []
    for at in MOMENTS:
        reader, _ = ring_of(at, 1, is_silent=True, monkeypatch=monkeypatch)
        try:
            outcomes.append(reader.receive())
        except SleptError:
            outcomes.append(b"slept")
    assert b"slept" in outcomes


def test_a_late_waking_harms_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sender has seen that the reader sleeps; before it wakes it the reader has read and sleeps
    again."""
    read: list[bytes] = []

    class Late(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            raise SleptError

    def wake(place: int) -> None:
        if not read:
            read.append(reader.receive())
            with pytest.raises(SleptError):
                reader.receive()
            assert sender._ring.asleep[0]

    sender = RingSender(1, wake, lambda: None, size=1 << 10)
    reader = RingReceiver(os.dup(sender.descriptor), 0, 1, Late(), 0.0)
    with pytest.raises(SleptError):
        reader.receive()
    sender.send(b"first")
    assert read == [b"first"] and sender._ring.asleep[0]
    sender.send(b"second")
    assert not sender._ring.asleep[0]
    assert reader.receive() == b"second"


def test_no_waking_is_lost_between_two_threads() -> None:
    """Each sends one message after that of the other one, so that both fall asleep each time."""
    wakes = [threading.Event(), threading.Event()]
    senders = [
        RingSender(1, lambda place, end=end: wakes[end].set(), lambda: None, size=1 << 10)
        for end in range(2)
    ]
    readers = [
        RingReceiver(os.dup(sender.descriptor), 0, 1, wakes[end], 0.0)
        for end, sender in enumerate(senders)
    ]
    found: list[Any] = []

    def answer() -> None:
        for _ in range(ROUNDS):
            senders[1].send(readers[0].receive())

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    for number in range(ROUNDS):
        senders[0].send(b"%d" % number)
        found.append(readers[1].receive())
    thread.join()
    assert found == [b"%d" % number for number in range(ROUNDS)]


def test_a_reader_that_is_far_behind_is_waited_for_and_not_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(channel, "FULL_SECONDS", 0.01)
    sender = RingSender(1, lambda place: None, lambda: None, size=1 << 10)
    with pytest.raises(channel.IntegrityError, match="does not read what it is told"):
        for _ in range(100):
            sender.send(bytes(100))
