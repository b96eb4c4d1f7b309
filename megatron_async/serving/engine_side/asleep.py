"""What stands in for an engine whose process has died while it slept: its memory is somebody else's
by now, so none is taken until somebody wakes it up. Requests wait meanwhile."""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple, Protocol

import msgspec

from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.engine.lifecycle.sleep_mode import checked_level, tags_of
from megatron_async.errors import BusyError, RequestError
from megatron_async.processes.messages import Preparing, Started
from megatron_async.serving.engine_side.control_threads import answer_of
from megatron_async.serving.engine_side.live_requests import TIMEOUT, ConnectedFrontEnd
from megatron_async.serving.engine_side.sockets import Sockets
from megatron_async.serving.messages import (
    Abort,
    Answer,
    Bye,
    Control,
    FromEngine,
    Generate,
    Hello,
    Kept,
    Launch,
    Output,
    Outputs,
    Refused,
    Snapshot,
    ToEngine,
    named,
)

logger = logging.getLogger(__name__)

TICK_SECONDS = 0.5
_SAID = "the engine sleeps, and its process was started again meanwhile: wake it up first"


class Told(Protocol):
    """What is needed of a ``Parent``."""

    def send(self, message: msgspec.Struct) -> None:
        """See there."""

    def beat(self) -> None:
        """See there."""


class Waiting(NamedTuple):
    """A request that waits; ``until``: by ``time.monotonic``, None is for ever."""

    front_end: ConnectedFrontEnd
    asked: Generate
    since: float
    until: float | None


class Awake(NamedTuple):
    """What the engine goes on with.

    Args:
        kept: what it was told.
        tags: parts of its memory that it has again.
        front_ends: that have said hello.
        waiting: requests, in order.
        answer: tells the front end that has woken it up that it is done.
    """

    engine: DynamicInferenceEngine
    kept: Kept
    tags: frozenset[str]
    front_ends: dict[bytes, ConnectedFrontEnd]
    waiting: list[Waiting]
    answer: Callable[[dict[str, Any]], None]


class SleepingEngine:
    """Serves front ends as an engine that sleeps.

    Args:
        launch: what the last process was told, and has said of itself.
        build: makes an engine, which may take long. Called in a thread.

    Attributes:
        is_over: it was told to end.
    """

    def __init__(
        self,
        launch: Launch,
        parent: Told,
        sockets: Sockets,
        build: Callable[[], DynamicInferenceEngine],
    ) -> None:
        assert launch.kept is not None and launch.info is not None
        self._kept = launch.kept
        self._info = launch.info
        self._parent = parent
        self._sockets = sockets
        self._build = build
        self._front_ends: dict[bytes, ConnectedFrontEnd] = {}
        self._waiting: dict[tuple[bytes, int], Waiting] = {}
        self.is_over = False
        self._waking: tuple[ConnectedFrontEnd, Control, frozenset[str]] | None = None
        self._built: DynamicInferenceEngine | Exception | None = None

    def run(self) -> Awake | None:
        """Serve until it is awake; None when it is told to end before."""
        self._parent.send(Started())
        next_tick = time.monotonic()
        while not self.is_over:
            if time.monotonic() >= next_tick:
                next_tick = time.monotonic() + TICK_SECONDS
                self._tick()
            if self._sockets.wait(next_tick):
                for identity, message in self._sockets.receive():
                    self._take(identity, message)
            if self._built is not None and (awake := self._woken(self._built)) is not None:
                return awake
        return None

    def stop(self) -> None:
        """End, from any thread."""
        self.is_over = True
        self._sockets.wake()

    def _tick(self) -> None:
        self._parent.beat()
        now = time.monotonic()
        for key, each in list(self._waiting.items()):
            if each.until is not None and each.until < now:
                self._end(key, TIMEOUT)
        snapshot = self._snapshot()
        for front_end in list(self._front_ends.values()):
            if not self._say(front_end, snapshot):
                self._drop(front_end)

    # --- messages -----------------------------------------------------------------------------

    def _take(self, identity: bytes, message: ToEngine) -> None:
        front_end = self._front_ends.get(identity)
        if isinstance(message, Hello):
            front_end = self._front_ends.setdefault(identity, ConnectedFrontEnd(identity))
            self._say(front_end, self._snapshot())
            self._say(front_end, msgspec.structs.replace(self._info, kept=self._kept))
        elif front_end is None:
            return
        elif isinstance(message, Generate):
            self._add(front_end, message)
        elif isinstance(message, Abort):
            self._end((identity, message.request_id), "abort")
        elif isinstance(message, Bye):
            self._drop(front_end)
        elif isinstance(message, Control):
            try:
                result = self._control(front_end, message)
            except Exception as error:
                self._say(front_end, answer_of(message, error))
            else:
                if result is not None:
                    self._say(front_end, Answer(message.number, result))

    def _add(self, front_end: ConnectedFrontEnd, asked: Generate) -> None:
        most, now = self._info.max_sequences, time.monotonic()
        if most is not None and len(self._waiting) >= most:
            said = f"{len(self._waiting)} sequences wait, and {most} may"
            self._say(front_end, Outputs([Refused(asked.request_id, "full", said)]))
            return
        until = None if asked.timeout is None else now + asked.timeout
        key = front_end.identity, asked.request_id
        self._waiting[key] = Waiting(front_end, asked, now, until)
        if asked.acknowledge:
            self._say(front_end, Outputs([Output(asked.request_id, 0, [])]))

    def _end(self, key: tuple[bytes, int], reason: str) -> None:
        """End a request with nothing."""
        waiting = self._waiting.pop(key, None)
        if waiting is None:
            return
        asked = waiting.asked
        usage: dict[str, int | float] = {
            "prompt_tokens": len(asked.prompt),
            "cached_tokens": 0,
            "generated_tokens": 0,
            "queue_time": time.monotonic() - waiting.since,
        }
        ends: list[Output | Refused] = [
            Output(asked.request_id, index, [], finish_reason=reason, usage=usage)
            for index in range(asked.params["n"])
        ]
        self._say(waiting.front_end, Outputs(ends))

    def _end_all(self, ids: Iterable[str] | None = None) -> int:
        """All, or those that ``ids`` mean. Returns how many there were."""
        waiting = {key: (at.asked.name, at.asked.answer_id) for key, at in self._waiting.items()}
        keys = list(waiting) if ids is None else named(ids, waiting)
        for key in keys:
            self._end(key, "abort")
        return len(keys)

    def _drop(self, front_end: ConnectedFrontEnd) -> None:
        self._front_ends.pop(front_end.identity, None)
        for key in [key for key in self._waiting if key[0] == front_end.identity]:
            del self._waiting[key]

    def _say(self, front_end: ConnectedFrontEnd, message: FromEngine) -> bool:
        return self._sockets.outputs.send(front_end.identity, message)

    # --- controls -----------------------------------------------------------------------------

    def _control(self, front_end: ConnectedFrontEnd, control: Control) -> dict[str, Any] | None:
        """What one gives; None when it is answered later."""
        match control.name:
            case "wake_up":
                self._wake_up(front_end, control)
                return None
            case "state":
                count = sum(each.asked.params["n"] for each in self._waiting.values())
                return {
                    "is_sleeping": True,
                    "is_paused": True,
                    "can_sleep": True,
                    "requests": count,
                }
            case "info":
                return msgspec.structs.asdict(self._info)
            case "suspend" | "pause":
                if control.arguments.get("mode") == "abort":
                    self._end_all()
                self._keep(suspended=True)
                return {"suspended": True}
            case "sleep":
                level = checked_level(control.arguments["level"])
                self._keep(lost_weights=self._kept.lost_weights or level == 2)
                return {"is_sleeping": True}
            case "abort_requests":
                return {"aborted": self._end_all(control.arguments.get("names"))}
            case "resume" if control.arguments.get("when_awake"):
                self._keep(suspended=False)
                return {"suspended": False}
            case "hold_weights" | "take_weights":
                return {}
            case "live":
                return {"device": "asleep", "steps": []}
        raise RequestError(_SAID)

    def _keep(self, **changes: Any) -> None:
        self._kept = msgspec.structs.replace(self._kept, **changes)
        self._parent.send(self._kept)

    def _wake_up(self, front_end: ConnectedFrontEnd, control: Control) -> None:
        if self._waking is not None:
            raise BusyError("the engine wakes up already; wait for it")
        self._waking = front_end, control, tags_of(control.arguments.get("tags"))
        self._parent.send(Preparing())

        def build() -> None:
            try:
                self._built = self._build()
            except Exception as error:
                self._built = error
            self._sockets.wake()

        threading.Thread(target=build, name="wake up", daemon=True).start()

    def _woken(self, built: DynamicInferenceEngine | Exception) -> Awake | None:
        assert self._waking is not None
        front_end, control, tags = self._waking
        if isinstance(built, Exception):
            self._waking = self._built = None
            gc.collect()  # what it has got of its memory
            self._parent.send(Started())
            self._say(front_end, answer_of(control, built))
            return None
        done = partial(self._done, front_end, control)
        waiting = list(self._waiting.values())
        return Awake(built, self._kept, tags, self._front_ends, waiting, done)

    def _done(self, front_end: ConnectedFrontEnd, control: Control, result: dict[str, Any]) -> None:
        self._say(front_end, Answer(control.number, result))

    def _snapshot(self) -> Snapshot:
        gauges: dict[str, int | float] = {
            "requests_running": 0,
            "requests_waiting": len(self._waiting),
            "suspended": 1,
            "weight_version": self._kept.weight_version,
            "front_ends": len(self._front_ends),
        }
        return Snapshot(time.time(), {}, gauges)
