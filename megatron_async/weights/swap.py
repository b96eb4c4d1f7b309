"""The engines over one model's weights, which get new ones all at once."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

from megatron_async.config.engine_config import EngineConfig
from megatron_async.device.protocol import Device
from megatron_async.errors import CheckpointError, ConfigError, RequestError
from megatron_async.models.served import ServedModel

CONTINUE = "continue"
RESTART = "restart"
"""What becomes of requests that have generated tokens with the old weights."""


if TYPE_CHECKING:
    from megatron_async.weights.source import AnySource

    Source: TypeAlias = str | Path | Mapping[str, Any] | AnySource


class Lock(Protocol):
    """An engine's step lock: ``gate``, ``mutex``, then an entry and itself, in this order."""

    @property
    def gate(self) -> AbstractContextManager[Any]: ...

    @property
    def mutex(self) -> AbstractContextManager[Any]: ...

    @property
    def stopped(self) -> BaseException | None: ...

    def entry(self) -> AbstractContextManager[Any]: ...

    def recover(self, error: BaseException) -> None: ...

    def __enter__(self) -> Any: ...

    def __exit__(self, *exc: Any) -> Any: ...


class Loop(Protocol):
    """An engine's loop of steps."""

    def adopt_weights(
        self,
        path: str | None,
        *,
        recompute_kv_cache: bool,
        cache_scales: bool,
        restarted: Callable[[int], bool] | None,
    ) -> None: ...


class SleepMode(Protocol):
    """Whether an engine has its weights."""

    @property
    def lost_weights(self) -> bool: ...

    def check_weights(self) -> None: ...

    def weights_replaced(self) -> None: ...


class Streams(Protocol):
    """Whose tokens are handed out one by one."""

    @property
    def keys(self) -> Collection[int]: ...


@runtime_checkable
class CheckedCopy(Protocol):
    """A copy of new weights that can look at what it has done."""

    def check(self) -> None:
        """Raises IntegrityError if parameters do not have the new values."""


class Engine(Protocol):
    """The parts of an engine that new weights concern."""

    @property
    def config(self) -> EngineConfig: ...

    @property
    def model(self) -> ServedModel: ...

    @property
    def device(self) -> Device: ...

    @property
    def lock(self) -> Lock: ...

    @property
    def loop(self) -> Loop: ...

    @property
    def sleep_mode(self) -> SleepMode: ...

    @property
    def streams(self) -> Streams: ...

    def drain_for_weights(self) -> None:
        """Take what is in flight, inside of a step."""

    def weights_changed(self) -> None:
        """What was in flight before is handed out, and the engine goes on."""

    @property
    def delivers(self) -> bool:
        """Somebody gets the tokens of all requests as they come."""


class SharedWeights:
    """What the engines over one model know of each other.

    ``lock`` is held by the thread that replaces the weights, and by an engine that joins.
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
        """The engines in the order in which they joined."""
        alive = {number: ref for number, ref in self._engines.items() if ref() is not None}
        self._engines = alive
        return [engine for ref in alive.values() if (engine := ref()) is not None]

    def check_one_engine(self) -> None:
        """Raises :class:`ConfigError` if several engines have joined."""
        if len(self.engines) > 1:
            raise ConfigError("another engine is over the same weights; close it first")

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
    """Return those of ``model``, by identity. An object that allows no weak reference shares
    nothing."""
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
    source: Source,
    *,
    recompute_kv_cache: bool,
    partial_rollouts: str = CONTINUE,
    partial_update: bool = False,
    allow_non_finite_weights: bool | None = None,
) -> None:
    """New weights for all engines over them, each between two of its steps.

    They are read and checked first. An engine that has stopped, or does so now, is left out unless
    it is the one that is ``wanted``; an error from the first copy on stops them all. An interrupt
    of the main thread waits until all is copied.

    Raises:
        CheckpointError: the weights do not fit, or are not finite and must be; the old ones stay.
        RequestError: requests that a sink gets the tokens of were to be restarted.
    """
    from megatron_async.processes.interrupts import with_interrupt_behind
    from megatron_async.weights.source import ModelDirectory, source_of

    _check_partial_rollouts(partial_rollouts, weights.engines)
    restarts = partial_rollouts == RESTART
    sharing: list[Engine] = []
    try:
        with weights.lock:
            allow = allow_non_finite_weights
            if allow is None:
                allow = wanted.config.allow_non_finite_weights
            wanted.sleep_mode.check_weights()
            found = source_of(source)
            path = found.path
            # A directory is whole, and a file may have some alone.
            is_whole = path is None and not partial_update
            replace = wanted.model.read_weights(
                source,
                allow_non_finite_weights=allow,
                all_parameters=is_whole or wanted.sleep_mode.lost_weights,
            )
            sharing = weights.engines

            def copy(engines: list[Engine]) -> None:
                try:
                    with weights.replacing():
                        replace()
                        if isinstance(replace, CheckedCopy) and any(
                            engine.config.audits for engine in engines
                        ):
                            replace.check()
                except CheckpointError as error:
                    weights.refused()
                    for engine in engines:
                        engine.lock.recover(error)
                    raise
                for engine in engines:
                    engine.device.synchronize()
                    engine.loop.adopt_weights(
                        path,
                        recompute_kv_cache=recompute_kv_cache,
                        cache_scales=isinstance(found, ModelDirectory),
                        restarted=_not_streamed(engine) if restarts else None,
                    )
                    engine.sleep_mode.weights_replaced()

            with_interrupt_behind(lambda: _between_steps(sharing, wanted, copy))
    finally:
        for engine in sharing:  # outside of all locks
            engine.weights_changed()


def _check_partial_rollouts(partial_rollouts: str, engines: list[Engine]) -> None:
    if partial_rollouts not in (CONTINUE, RESTART):
        raise RequestError(
            f"partial_rollouts={partial_rollouts!r} must be {CONTINUE!r} or {RESTART!r}"
        )
    if partial_rollouts == RESTART and any(engine.delivers for engine in engines):
        raise RequestError(
            f"partial_rollouts={RESTART!r}: tokens of running requests have been delivered, as a "
            "server's are; abort them and send them again"
        )


def _not_streamed(engine: Engine) -> Callable[[int], bool]:
    """Whether a request, by its key, may lose its tokens: nobody has got them one by one."""
    streamed = engine.streams.keys
    return lambda key: key not in streamed


# By recursion and not with an ``ExitStack``: one that a signal interrupts keeps locks for ever.


def _between_steps(
    engines: list[Engine], wanted: Engine, then: Callable[[list[Engine]], None], *drained: Engine
) -> None:
    """Take what is in flight in ``engines``, and call ``then`` with those that have not stopped,
    all of them held between two steps."""
    if not engines:
        _inside(list(drained), lambda: then(list(drained)))
        return
    engine, *others = engines
    with engine.lock.gate, engine.lock.mutex:
        taken = (engine,) if _drain(engine, wanted) else ()
        _between_steps(others, wanted, then, *drained, *taken)


def _inside(engines: list[Engine], then: Callable[[], None]) -> None:
    """Call ``then`` as a step of all ``engines``."""
    if not engines:
        then()
        return
    lock = engines[0].lock
    with lock.entry(), lock:
        _inside(engines[1:], then)


def _drain(engine: Engine, wanted: Engine) -> bool:
    """Take what is in flight; False if the engine has stopped or does so now, and is not wanted."""
    try:
        with engine.lock.entry(), engine.lock:
            engine.drain_for_weights()
    except Exception:
        if engine is wanted or engine.lock.stopped is None:
            raise
        return False
    return True
