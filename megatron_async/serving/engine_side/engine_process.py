"""The engine in a process of its own: ``python -m
megatron_async.serving.engine_side.engine_process FD``.

``FD`` is a connection to the supervisor that started it. Front ends send to one socket, which the
main thread reads, and get what they are sent through another, mostly from the engine's thread.
Nothing here waits for a front end.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import msgspec

from megatron_async.config.engine_config import EngineConfig
from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.processes import standard_error
from megatron_async.processes.garbage import keep_all
from megatron_async.processes.messages import Started
from megatron_async.processes.parent import EXIT_FAILED, Parent
from megatron_async.serving.engine_side.asleep import Awake, SleepingEngine
from megatron_async.serving.engine_side.controls import Controls
from megatron_async.serving.engine_side.fingerprint import fingerprint_of
from megatron_async.serving.engine_side.grammar_work import GrammarWork
from megatron_async.serving.engine_side.live_requests import ConnectedFrontEnd, LiveRequests
from megatron_async.serving.engine_side.sockets import Sockets
from megatron_async.serving.engine_side.stall_watch import StallWatch, seen_of
from megatron_async.serving.messages import (
    Abort,
    Answer,
    Bye,
    Cancel,
    Control,
    Dropped,
    EngineInfo,
    FromEngine,
    FromSupervisor,
    Generate,
    Hello,
    Kept,
    Launch,
    Snapshot,
    ToEngine,
)
from megatron_async.version import __version__

logger = logging.getLogger(__name__)

TICK_SECONDS = 0.5
"""Between two snapshots for the front ends, and two signs of life for the supervisor."""
DROPPED_SECONDS = 60.0
"""For how long a front end that does not read any more is remembered."""
MOMENT_SECONDS = 0.001
"""That a request has at least whose time is over."""


class EngineProcess:
    """Serves one engine to front ends.

    Args:
        clock: by which requests stall.
        sockets: None opens them.
    """

    def __init__(
        self,
        engine: DynamicInferenceEngine,
        launch: Launch,
        parent: Parent[FromSupervisor],
        clock: Callable[[], float] = time.monotonic,
        sockets: Sockets | None = None,
    ) -> None:
        self._engine = engine
        self._launch = launch
        self._parent = parent
        self._sockets = Sockets(launch.endpoint) if sockets is None else sockets
        self._exit: int | None = None
        self._front_ends: dict[bytes, ConnectedFrontEnd] = {}
        self._dropped: dict[bytes, float] = {}
        """Front ends that will be told so when they read again, if that is before a time."""
        self._outputs = self._sockets.outputs
        self._max_sequences: int | None = None
        if launch.max_queue is not None:
            self._max_sequences = engine.cache.sizes.max_requests + launch.max_queue
        self._requests = LiveRequests(engine, self._outputs, self._max_sequences, self._failed)
        self._grammars = GrammarWork(engine.requests.compile_now, self._sockets.wake)
        self._controls = Controls(engine, self._requests, self._keep)
        self._stalls = StallWatch(launch.stall_seconds, clock)

    def run(self, awake: Awake | None = None) -> int:
        """Serve until the supervisor or an error ends it; returns the exit status.

        Args:
            awake: what waits for an engine that has slept.
        """
        self._engine.deliver_to(self._requests)
        if awake is not None:
            self._go_on(awake)
        elif self._launch.kept is not None:
            self._controls.restore(self._launch.kept)
        self._engine.start()
        self._parent.send(Started())
        self._parent.send(self._info())
        next_tick = time.monotonic()
        while self._exit is None:
            now = time.monotonic()
            if now >= next_tick:
                next_tick = now + TICK_SECONDS
                self._tick()
            deadline = self._requests.expire(now)
            until = next_tick if deadline is None else min(next_tick, deadline)
            if self._sockets.wait(until):
                for identity, message in self._sockets.receive():
                    self._take(identity, message)
                self._add_compiled()
        self._close()
        return self._exit

    def stop(self, status: int = 0) -> None:
        """End the loop, from any thread."""
        self._exit = status
        self._sockets.wake()

    def _go_on(self, awake: Awake) -> None:
        """Go on as the engine that has slept would."""
        self._front_ends.update(awake.front_ends)
        asleep = tuple(tag for tag in awake.kept.asleep if tag not in awake.tags)
        self._controls.restore(msgspec.structs.replace(awake.kept, asleep=asleep))
        now = time.monotonic()
        for front_end, asked, _, until in awake.waiting:
            left = None if until is None else max(MOMENT_SECONDS, until - now)
            self._generate(
                front_end, msgspec.structs.replace(asked, timeout=left, acknowledge=False)
            )
        awake.answer({"is_sleeping": self._engine.is_sleeping})

    def _failed(self, error: BaseException) -> None:
        if self._exit is None:
            logger.error("the engine has stopped: %s", error)
            self.stop(EXIT_FAILED)

    def _close(self) -> None:
        self._controls.close()
        self._grammars.close()
        self._sockets.hang_up()
        self._engine.close()  # front ends learn of it
        self._sockets.close()

    # --- messages -----------------------------------------------------------------------------

    def _take(self, identity: bytes, message: ToEngine) -> None:
        front_end = self._front_ends.get(identity)
        if front_end is None:
            if isinstance(message, Bye):
                return
            if not isinstance(message, Hello):
                self._tell_dropped(identity)  # it has not heard of it
                return
            front_end = self._front_ends[identity] = ConnectedFrontEnd(identity)
        match message:
            case Generate():
                self._generate(front_end, message)
            case Abort():
                if not self._grammars.abort(front_end, message.request_id):
                    self._requests.abort(front_end, message.request_id)
            case Hello():
                self._outputs.send(identity, self._snapshot())  # it is there when that is ready
                self._outputs.send(identity, self._info())
            case Bye():
                self._drop(front_end)
            case Control(name="info"):
                info = msgspec.structs.asdict(self._info())
                self._say(front_end, Answer(message.number, info))
            case Control():
                self._controls.submit(front_end, message, partial(self._say, front_end))
            case Cancel(number=number):
                self._controls.cancel(front_end, number)

    def _generate(self, front_end: ConnectedFrontEnd, asked: Generate) -> None:
        if asked.params["structured_outputs"] is None:
            self._requests.add(front_end, asked)
        else:
            begin = partial(self._grammars.begin, front_end, asked)
            self._requests.or_refuse(front_end, asked, begin)

    def _add_compiled(self) -> None:
        for front_end, asked, error, is_aborted in self._grammars.take():
            if error is not None:
                self._requests.refuse(front_end, asked, error)
                continue
            self._requests.add(front_end, asked)
            if is_aborted:
                self._requests.abort(front_end, asked.request_id)

    def _drop(self, front_end: ConnectedFrontEnd) -> None:
        """Forget a front end; its requests are aborted."""
        front_end.is_gone = True
        self._grammars.forget(front_end)
        self._requests.abort_all(front_end)
        self._controls.cancel(front_end)
        self._front_ends.pop(front_end.identity, None)

    def _tick(self) -> None:
        self._parent.beat()
        self._controls.tick()
        self._stalls.look(len(self._requests), seen_of(self._engine))
        snapshot = self._snapshot()
        for front_end in list(self._front_ends.values()):
            self._say(front_end, snapshot)
            if front_end.is_gone:
                self._drop(front_end)
                self._dropped[front_end.identity] = time.monotonic() + DROPPED_SECONDS
        for identity, end in list(self._dropped.items()):
            if self._outputs.send(identity, Dropped()) or time.monotonic() > end:
                del self._dropped[identity]

    def _say(self, front_end: ConnectedFrontEnd, message: FromEngine) -> None:
        """Send from any thread. A front end that misses a message would wait for it, so it is
        dropped with the next tick, and told so when it reads."""
        if not front_end.is_gone and not self._outputs.send(front_end.identity, message):
            front_end.is_gone = True

    def _tell_dropped(self, identity: bytes) -> None:
        if not self._outputs.send(identity, Dropped()):
            self._dropped[identity] = time.monotonic() + DROPPED_SECONDS

    def _keep(self, kept: Kept) -> None:
        """In a control's thread: the next process and all front ends must know."""
        self._parent.send(kept)
        for front_end in list(self._front_ends.values()):
            self._say(front_end, self._info())

    # --- what it says -------------------------------------------------------------------------

    def _info(self) -> EngineInfo:
        engine = self._engine
        return EngineInfo(
            model_name=engine.model_name,
            vocab_size=engine.model.network.vocab_size,
            max_sequence_length=engine.max_request_tokens,
            eos_token_ids=list(engine.eos_token_ids or ()),
            dtype=str(engine.cache.spec.dtype).removeprefix("torch."),
            depth=engine.depth,
            max_requests=engine.cache.sizes.max_requests,
            block_count=engine.scheduler.limits.block_count,
            version=__version__,
            max_sequences=self._max_sequences,
            not_ready=self._controls.lost,
            kept=self._controls.kept,
            fingerprint=fingerprint_of(self._launch, self._controls.kept),
        )

    def _snapshot(self) -> Snapshot:
        scheduler = self._engine.scheduler
        waiting = scheduler.waiting_count
        live = len(self._requests)
        gauges: dict[str, int | float] = {
            "requests_running": max(0, live - waiting),
            "requests_waiting": waiting,
            "requests_stalled": scheduler.stalled_count,
            "blocks_free": scheduler.allocator.free_count,
            "blocks_total": scheduler.limits.block_count,
            "steps_in_flight": self._engine.in_flight_count,
            "suspended": int(self._engine.suspended),
            "weight_version": self._controls.weight_version,
            "front_ends": len(self._front_ends),
            "engine_stalled": int(self._stalls.stalled is not None),
            "engine_stalls": self._stalls.count,
            "log_lines_lost": standard_error.lost_lines(),
        }
        states, snapshots = self._engine.cache.states, scheduler.table.prefixes.snapshots
        if states is not None and snapshots is not None:
            gauges |= {
                "state_bytes": states.state_bytes,
                "state_snapshots": len(snapshots),
                "state_snapshots_most": snapshots.count,
            }
        counters = self._engine.counters.to_dict(self._requests.first_version)
        return Snapshot(time.time(), counters, gauges, self._stalls.stalled)


def build_engine(launch: Launch, parent: Parent[FromSupervisor]) -> DynamicInferenceEngine:
    """The engine that is asked for; ``parent`` is told what is done for it."""

    def progress(each: Iterable[int], count: int) -> Iterator[int]:
        for number, tokens in enumerate(each, 1):
            parent.doing(f"captures CUDA graph {number} of {count}")
            yield tokens

    parent.doing("loads the model")
    config = EngineConfig(**launch.config)
    return DynamicInferenceEngine.from_pretrained(launch.model, config, progress=progress)


def main(arguments: Sequence[str]) -> int:
    """Load the model and serve it; returns the exit status."""
    parent: Parent[FromSupervisor] = Parent(int(arguments[0]), FromSupervisor)
    launch = parent.receive()
    assert isinstance(launch, Launch)
    form = "%(asctime)s %(levelname)s engine %(name)s: %(message)s"
    logging.basicConfig(level=launch.log_level, format=form)
    ends: list[Callable[[], None]] = []
    parent.watch(lambda _: ends[-1]() if ends else os._exit(0))
    sockets, awake = None, None
    if launch.kept is not None and launch.kept.asleep:
        sockets = Sockets(launch.endpoint)
        sleeping = SleepingEngine(launch, parent, sockets, lambda: build_engine(launch, parent))
        ends.append(sleeping.stop)
        awake = sleeping.run()
        if awake is None:
            return 0
        engine = awake.engine
    else:
        with parent.starting():
            engine = build_engine(launch, parent)
    keep_all()
    process = EngineProcess(engine, launch, parent, sockets=sockets)
    ends.append(process.stop)
    if awake is not None and sleeping.is_over:  # it was told so before it had an end of its own
        process.stop()
    return process.run(awake)


if __name__ == "__main__":
    ended_with = main(sys.argv[1:])
    standard_error.drain()
    os._exit(ended_with)  # libraries would say what they have not freed, and wait for threads
