"""The engines over one model's weights, which get new ones all at once."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

from megatron_async.device.protocol import Device
from megatron_async.engine.loop import DecodeLoop
from megatron_async.engine.metrics import NotOverlapped
from megatron_async.engine.output_processor import OutputProcessor
from megatron_async.engine.step_lock import StepLock
from megatron_async.errors import CheckpointError, ConfigError
from megatron_async.runner.controller import TextGenerationController


class Engine(Protocol):
    """The parts of an engine that new weights concern."""

    controller: TextGenerationController
    device: Device
    lock: StepLock
    loop: DecodeLoop
    outputs: OutputProcessor


class SharedWeights:
    """What the engines over one model know of each other.

    ``lock`` is held by whoever replaces the weights, and by an engine that joins.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._torn = False
        self._engines: dict[int, weakref.ref[Any]] = {}
        self._joined = 0

    def join(self, engine: object) -> None:
        """Raises :class:`ConfigError` if the weights are partly new."""
        if self._torn:
            raise ConfigError(
                "an error interrupted the last update of this model's weights, and some are new "
                "and some are old; load the model again"
            )
        self._joined += 1
        self._engines[self._joined] = weakref.ref(engine)

    @property
    def engines(self) -> list[Any]:
        """In the order in which they joined."""
        alive = {number: ref for number, ref in self._engines.items() if ref() is not None}
        self._engines = alive
        return [engine for ref in alive.values() if (engine := ref()) is not None]

    def refused(self) -> None:
        """The copy has not begun: the weights are the old ones."""
        self._torn = False

    @contextmanager
    def replacing(self) -> Iterator[None]:
        """Around the copy: an error in it leaves nothing to build an engine over."""
        self._torn = True
        yield
        self._torn = False


_shared: dict[int, SharedWeights] = {}
_lock = threading.RLock()


def shared_weights(model: Any) -> SharedWeights:
    """Those of ``model``, by identity. An object that allows no weak reference shares nothing."""
    with _lock:
        if id(model) not in _shared:
            found = SharedWeights()
            try:
                weakref.finalize(model, _shared.pop, id(model), None).atexit = False
            except TypeError:
                return found
            _shared[id(model)] = found
        return _shared[id(model)]


def replace_weights(
    wanted: Engine,
    weights: SharedWeights,
    source: str | Path | Mapping[str, Any],
    *,
    recompute_kv_cache: bool,
) -> None:
    """New weights for all engines over them, each between two of its steps.

    They are read and checked first. An engine that has stopped, or does so now, is left out unless
    it is the one that is ``wanted``; an error from the first copy on stops them all.

    Raises:
        CheckpointError: the weights do not fit; the old ones stay.
    """
    sharing: list[Engine] = []
    try:
        with weights.lock, ExitStack() as stack:
            replace = wanted.controller.read_weights(source)
            sharing = weights.engines
            engines = [e for e in sharing if _drained(e, stack, wanted=wanted)]
            for engine in engines:
                stack.enter_context(engine.lock.entry())
                stack.enter_context(engine.lock)
            try:
                with weights.replacing():
                    replace()
            except CheckpointError as error:
                weights.refused()
                for engine in engines:
                    engine.lock.recover(error)
                raise
            path = None if isinstance(source, Mapping) else str(source)
            for engine in engines:
                engine.device.synchronize()
                engine.loop.adopt_weights(path, recompute_kv_cache=recompute_kv_cache)
    finally:
        for engine in sharing:  # outside of all locks
            engine.outputs.resolve_futures()
            engine.loop.commands.wake()


def _drained(engine: Engine, stack: ExitStack, *, wanted: Engine) -> bool:
    """Take what is in flight, and keep the engine's mutex in ``stack``."""
    stack.enter_context(engine.lock.gate)
    stack.enter_context(engine.lock.mutex)
    try:
        with engine.lock.entry(), engine.lock:
            engine.loop.apply_commands()
            engine.loop.drain(NotOverlapped.WEIGHTS)
            engine.device.synchronize()
    except Exception:
        if engine is wanted or engine.lock.stopped is None:
            raise
        return False
    return True
