"""The engines over one model's weights, which get new ones all at once."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megatron_async.errors import ConfigError


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
