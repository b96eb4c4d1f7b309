"""What rank 0 tells of its user's calls, whoever makes them meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_async import megatron_compat as compat  # noqa: F401  (before megatron)
from megatron_async.engine.metrics import EngineCounters
from megatron_async.errors import ConfigError, RequestError
from megatron_async.megatron_api.context import Usage
from megatron_async.megatron_api.spmd import leading
from megatron_async.megatron_api.spmd.leading import Announcer, LeadingEngine
from megatron_async.megatron_api.spmd.messages import BROUGHT, NEWS, Brought
from megatron_async.ranks.messages import Called
from tests.support.patience import PATIENCE_SECONDS

SOON = 0.3
"""Seconds for what must not happen."""


class Engine:
    """Rank 0's engine, with one request. ``meanwhile`` happens once, when its counters are read."""

    suspended = is_sleeping = False
    weight_version = in_flight_count = 0
    is_built = True

    def __init__(self) -> None:
        self.outputs = SimpleNamespace(keys=[1], request=lambda request_id: None)
        self.meanwhile: Callable[[], None] | None = None

    @property
    def counters(self) -> EngineCounters:
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is not None:
            meanwhile()
        return EngineCounters()

    def usage(self) -> Usage:
        return Usage()


class Group:
    """Takes what is told. ``meanwhile`` happens once, while a message is sent."""

    calling = ""

    def __init__(self) -> None:
        self.told: list[tuple[str, Brought]] = []
        self.meanwhile: Callable[[], None] | None = None

    def tell(self, message: Called) -> None:
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is not None:
            meanwhile()
        self.told.append((message.name, BROUGHT.decode(message.brought)))

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.told]


def announcer_of(engine: Engine, group: Group) -> Announcer:
    stands: Any = group
    return Announcer(stands, engine)


def test_what_is_told_last_stands_last() -> None:
    """The engine's thread ends a request while the user's thread tells of a call."""
    engine, group = Engine(), Group()
    announcer = announcer_of(engine, group)
    news = threading.Thread(target=lambda: announcer.tell(NEWS))

    def end() -> None:
        engine.outputs.keys = []
        news.start()
        news.join(SOON)

    engine.meanwhile = end
    announcer.tell_of_one("pause_request", key=1, value=True)
    news.join(PATIENCE_SECONDS)
    assert group.names == ["pause_request", NEWS]
    assert group.told[-1][1].standing.active == []


def test_a_signals_handler_tells_when_what_it_interrupts_is_told() -> None:
    engine, group = Engine(), Group()
    announcer = announcer_of(engine, group)
    group.meanwhile = lambda: announcer.tell_of_one("abort_request", key=1, value=True)
    announcer.tell_of_one("add_request", key=1)
    assert group.names == ["add_request", "abort_request"]


def test_what_happened_in_a_call_that_fails_is_told_too() -> None:
    engine, group = Engine(), Group()
    announcer = announcer_of(engine, group)

    def generate() -> None:
        announcer.tell_of_one("abort_request", key=1, value=True)
        raise RequestError("too long")

    with pytest.raises(RequestError):
        announcer.run("generate", generate, lambda _: {})
    assert group.names == ["abort_request", "generate"]
    assert group.told[-1][1].error == ("RequestError", "too long")


def test_a_controller_that_is_taken_is_refused_before_the_others_are_awaited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They refuse theirs at once, and never connect."""
    monkeypatch.setattr(leading, "lead_users_ranks", lambda *_: pytest.fail("they are awaited"))

    def check_free() -> None:
        raise ConfigError("serves another engine")

    controller: Any = SimpleNamespace(
        check_free=check_free, served=SimpleNamespace(network=SimpleNamespace(parallel=None))
    )
    engine: Any = object.__new__(LeadingEngine)
    with pytest.raises(ConfigError, match="serves another engine"):
        engine.__init__(controller, None)
