"""Requests that come to an engine while it steps, as those of a server's clients do."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from megatron_async.benchmark.measuring.loads import Request
from megatron_async.request.request import RequestFuture

_LONGEST_SLEEP = 0.05
"""Seconds: so soon :meth:`Arrivals.__exit__` ends the thread."""


class Arrivals:
    """Adds each request at its time: those that are due from the start by the caller, all others by
    a thread, so that a step that waits does not keep them back.

    Args:
        arrived: seconds after the start, ascending; None: all are there at once.
    """

    def __init__(
        self, engine: Any, requests: Sequence[Request], arrived: Sequence[float] | None
    ) -> None:
        self._engine = engine
        self._requests = requests
        self.arrived = [0.0] * len(requests) if arrived is None else arrived
        self.futures: list[RequestFuture] = []
        self.started = 0.0
        """When they began to come, as by ``time.perf_counter``."""
        self._error: BaseException | None = None
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="arrivals", daemon=True)

    def __enter__(self) -> Self:
        self.started = time.perf_counter()
        while self._has_more and self.arrived[len(self.futures)] <= 0.0:
            self._add()
        if self._has_more:
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_over = True
        if self._thread.ident is not None:
            self._thread.join()

    @property
    def more_come(self) -> bool:
        """Whether some have not been added yet; raises what adding one of them has raised."""
        if self._error is not None:
            raise self._error
        return self._has_more

    @property
    def _has_more(self) -> bool:
        return len(self.futures) < len(self._requests)

    def _add(self) -> None:
        number = len(self.futures)
        request = self._requests[number]
        self.futures.append(self._engine.add_request(number, request.prompt, request.params))

    def _run(self) -> None:
        try:
            while self._has_more and not self._is_over:
                now = time.perf_counter() - self.started
                missing = self.arrived[len(self.futures)] - now
                if missing > 0:
                    time.sleep(min(missing, _LONGEST_SLEEP))
                else:
                    self._add()
        except BaseException as error:
            self._error = error
