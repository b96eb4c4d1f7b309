"""What requests must conform to is compiled before they are added, in threads beside the loop."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from megatron_async.errors import QueueFullError, RequestError
from megatron_async.sampling_params import CheckedParams
from megatron_async.serving.engine_side.live_requests import ConnectedFrontEnd
from megatron_async.serving.messages import Generate

THREADS = 2
MOST_WAITING = 256


class Compiled(NamedTuple):
    """A request that may be added, or the reason why not.

    Args:
        is_aborted: meanwhile, so that it ends as soon as it is added.
    """

    front_end: ConnectedFrontEnd
    asked: Generate
    error: RequestError | None
    is_aborted: bool = False


class GrammarWork:
    """Requests whose grammar is being compiled, which takes up to a second.

    One thread begins, aborts and takes; it is woken when there is something to take.

    Args:
        compile: compiles for one request, from any thread; raises RequestError.
        wake: wakes that thread.
    """

    def __init__(
        self, compile: Callable[[CheckedParams], None], wake: Callable[[], object]
    ) -> None:
        self._compile = compile
        self._wake = wake
        self._threads = ThreadPoolExecutor(THREADS, "grammars")
        self._numbers = itertools.count()
        self._waiting: dict[tuple[ConnectedFrontEnd, int], int] = {}
        """The number under which each request is compiled."""
        self._aborted: set[int] = set()
        self._done: deque[tuple[int, Compiled]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def begin(self, front_end: ConnectedFrontEnd, asked: Generate) -> None:
        """Compile for a request.

        Raises:
            QueueFullError: too many wait.
            RequestError: its id is in use.
        """
        key = front_end, asked.request_id
        if len(self._waiting) >= MOST_WAITING:
            raise QueueFullError(f"{MOST_WAITING} requests wait for their grammars")
        if key in self._waiting:
            raise RequestError(f"request_id={asked.request_id} is in use; choose another")
        number = self._waiting[key] = next(self._numbers)
        self._threads.submit(self._run, number, front_end, asked)

    def abort(self, front_end: ConnectedFrontEnd, request_id: int) -> bool:
        """Abort a request; whether it is here."""
        number = self._waiting.get((front_end, request_id))
        if number is None:
            return False
        self._aborted.add(number)
        return True

    def forget(self, front_end: ConnectedFrontEnd) -> None:
        """A front end is gone, with all its requests."""
        for key in [key for key in self._waiting if key[0] is front_end]:
            self._aborted.discard(self._waiting.pop(key))

    def take(self) -> list[Compiled]:
        """Take the requests whose grammars are done."""
        taken = []
        while self._done:
            number, compiled = self._done.popleft()
            key = compiled.front_end, compiled.asked.request_id
            if self._waiting.get(key) == number:
                del self._waiting[key]
                is_aborted = number in self._aborted
                self._aborted.discard(number)
                taken.append(compiled._replace(is_aborted=is_aborted))
        return taken

    def close(self) -> None:
        """Nothing is begun any more."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _run(self, number: int, front_end: ConnectedFrontEnd, asked: Generate) -> None:
        error = None
        if self._waiting.get((front_end, asked.request_id)) == number:
            try:
                self._compile(asked.params)
            except RequestError as raised:
                error = raised
            except Exception as raised:  # the request is refused when it is added
                error = RequestError(f"structured_outputs cannot be compiled: {raised}")
        self._done.append((number, Compiled(front_end, asked, error)))
        self._wake()
