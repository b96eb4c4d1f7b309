"""Another rank's calls of its engine: in each it does what rank 0 launches, until rank 0's own is
over."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping

import torch

from megatron_async.errors import (
    EngineStoppedError,
    MegatronAsyncError,
    RankDiedError,
    ReentrantCallError,
)
from megatron_async.megatron_api.model import outside_inference_mode
from megatron_async.megatron_api.spmd.messages import (
    BROUGHT,
    BUILD,
    CLOSE,
    OF_ONE_REQUEST,
    UNCALLED,
)
from megatron_async.megatron_api.spmd.mirror import Applied, Mirror
from megatron_async.models.parallel import ModelParallel
from megatron_async.ranks import users_ranks
from megatron_async.ranks.follower import Follower, Model
from megatron_async.ranks.messages import ANSWERS, Called, Stop, Where
from megatron_async.ranks.users_ranks import join_users_ranks

MOST_UNCLAIMED = 10_000


class Calls:
    """What rank 0 tells, taken in the calls of this rank's user, or by a thread.

    Args:
        device: this rank's.
        model: builds the engine.
        hooks: what happens besides with calls of rank 0's, by name.

    Attributes:
        mirror: what is known of rank 0's engine.
        over: why no call is possible any more.
    """

    def __init__(
        self,
        place: ModelParallel,
        device: torch.device,
        model: Model,
        hooks: Mapping[str, Callable[[Applied], None]],
    ) -> None:
        self._hooks = hooks
        self.mirror = Mirror()
        self.over: MegatronAsyncError | None = None
        self._rank, self._device = place.rank, device
        self._name, self._last = "", BUILD
        self._calling = threading.Lock()
        self._caller: int | None = None
        self._taken, self._heard = 0, time.monotonic()
        self._looks_again = False
        self._unclaimed: deque[Applied] = deque(maxlen=MOST_UNCLAIMED)
        """Outcomes of calls that rank 0 may make alone, since the last one of all ranks."""
        self._thread: threading.Thread | None = None
        self._is_threaded = False
        self._changed = threading.Condition()
        self._counts: Counter[str] = Counter()
        """rank 0's calls since the thread follows them, by name."""
        self._own: Counter[str] = Counter()
        self._latest: dict[str, Applied] = {}
        self._group, self._line = join_users_ranks(place, device.type, self._check)
        self._line.answer = self._where
        self._follower = Follower(self._group, model)

    def say(self, data: bytes) -> None:
        """Tell rank 0 something."""
        self._line.say(data)

    @property
    def has_thread(self) -> bool:
        """A thread follows rank 0, or has done so until this rank's own :meth:`end`."""
        return self._is_threaded

    @property
    def follows(self) -> bool:
        """A thread follows rank 0 now."""
        return self._thread is not None

    # --- one call -----------------------------------------------------------------------------

    def make(self, name: str, key: int | None = None) -> Applied:
        """Follow rank 0 until its call of that name is over, about request ``key`` if it is about
        one.

        Raises:
            EngineStoppedError: rank 0 has closed its engine, or makes another call.
            RankDiedError: the group has ended, or rank 0 makes no call for long.
            ReentrantCallError: it comes from a signal's handler in the midst of another one.
            MegatronAsyncError: what rank 0's call raised.
        """
        if self.over is not None:
            raise type(self.over)(*self.over.args)
        found = self._await(name, key) if self._is_threaded else None
        if found is None:
            with self._inside(name):
                found = self._follow(name, key)
        found.check()
        return found

    @contextlib.contextmanager
    def _inside(self, name: str) -> Iterator[None]:
        """One thread at a time is in a call."""
        if self._caller == threading.get_ident():
            raise ReentrantCallError(f"{name}() was called in the midst of {self._name}()")
        with self._calling:
            self._caller = threading.get_ident()
            self._name, self._heard = name, time.monotonic()
            try:
                yield
            finally:
                self._name, self._last, self._caller = "", name, None

    def _follow(self, name: str, key: int | None) -> Applied:
        found = self._claim(name, key)
        while found is None:
            applied = self._take()
            if applied is None:
                continue
            if _is(applied, name, key):
                found = applied
            elif applied.name in OF_ONE_REQUEST:
                self._unclaimed.append(applied.without_requests())
            elif applied.name not in UNCALLED:
                error = EngineStoppedError(
                    f"rank {self._rank} calls {name}() where rank 0 has called {applied.name}(): "
                    "all ranks make the same calls in the same order, or close() the engine while "
                    "rank 0 alone makes them"
                )
                self.abandon(error)
                raise error
        if name not in OF_ONE_REQUEST:
            self._unclaimed.clear()
        return found

    def _claim(self, name: str, key: int | None) -> Applied | None:
        for applied in self._unclaimed:
            if _is(applied, name, key):
                self._unclaimed.remove(applied)
                return applied
        return None

    def _take(self) -> Applied | None:
        """Do what rank 0 tells next; the outcome of a call if that is told."""
        try:
            with outside_inference_mode():
                message = self._group.receive()
                if self._line.failure is not None:
                    raise RankDiedError(f"{self._line.failure}; the engine has ended")
                self._taken, self._heard = self._taken + 1, time.monotonic()
                if isinstance(message, Called):
                    return self.mirror.apply(message.name, BROUGHT.decode(message.brought))
                if not isinstance(message, Stop):
                    self._follower.do(message)
                    return None
        except BaseException as error:
            self.abandon(error)
            raise
        closed = EngineStoppedError("rank 0 has closed the engine of all ranks; build a new one")
        self._end(closed)
        if self._name == CLOSE:
            return None
        raise closed

    def _check(self) -> None:
        """Raises where there is nothing to wait for any more."""
        if self._line.lost is not None:
            if not self._looks_again:
                self._looks_again = True  # rank 0's last words may have come in between
                return
            raise RankDiedError(f"{self._line.lost}; the engine has ended")
        seconds = time.monotonic() - self._heard
        waits = self._name not in ("", CLOSE) and not self.has_thread
        if waits and seconds > users_ranks.APART_SECONDS:
            raise RankDiedError(
                f"rank {self._rank} waits in {self._name}() for {seconds:.0f} s, and rank 0 makes "
                "no call of the engine: make the same calls on all ranks"
            )

    def _where(self) -> bytes:
        thread = self._thread  # which ends meanwhile
        name = self._name or ("" if thread is None else thread.name)
        return ANSWERS.encode(Where(name, self._last, self._taken))

    # --- the end ------------------------------------------------------------------------------

    def abandon(self, error: BaseException) -> None:
        """This rank goes on no more: the group ends, with ``error``."""
        if self.over is not None:
            return
        if self._line.lost is None:
            self._group.fail(error)
        if not isinstance(error, MegatronAsyncError):
            said = f"{type(error).__name__}: {error}"
            error = RankDiedError(f"rank {self._rank} has left the engine of all ranks, {said}")
        self._end(error)

    def _end(self, error: MegatronAsyncError) -> None:
        self.over = error
        self._follower.fail(error)
        self._line.hang_up()
        self.mirror.fail(error)
        with self._changed:
            self._changed.notify_all()

    def until_closed(self) -> None:
        """Follow rank 0 until it closes its engine. Raises RankDiedError if the group ends."""
        if isinstance(self.over, RankDiedError):
            return  # somebody has got the error
        while self.over is None:
            thread = self._thread
            if thread is not None:
                thread.join()
                continue
            with self._inside(CLOSE):
                self._take()
        if isinstance(self.over, RankDiedError):
            raise RankDiedError(*self.over.args)

    # --- a thread that follows ----------------------------------------------------------------

    def begin(self) -> None:
        """Follow rank 0 in a thread until it stops its own."""
        self._forget()
        self._is_threaded = True
        self._thread = threading.Thread(target=self._run, name="following rank 0", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Wait until the thread has ended with rank 0's."""
        self.make("stop")
        self._forget()

    def _forget(self) -> None:
        self._is_threaded = False
        self._unclaimed.clear()
        self._own.clear()
        self._counts.clear()

    def _run(self) -> None:
        name = ""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        try:
            while name != "stop" and self.over is None:
                applied = self._take()
                if applied is None:
                    continue
                name = applied.name
                with self._changed:
                    if name in OF_ONE_REQUEST:
                        self._unclaimed.append(applied.without_requests())
                    self._counts[name] += 1
                    self._latest[name] = applied
                    if name == "stop":
                        self._thread = None  # another one may follow from now on
                    self._changed.notify_all()
                if (hook := self._hooks.get(name)) is not None:
                    hook(applied)
        except MegatronAsyncError:
            pass  # calls that wait raise it
        finally:
            with self._changed:
                if self._thread is threading.current_thread():
                    self._thread = None
                self._changed.notify_all()

    def _await(self, name: str, key: int | None) -> Applied | None:
        """The outcome of rank 0's call, from the thread; None if it has ended without."""
        found: list[Applied] = []

        def is_there() -> bool:
            if name not in OF_ONE_REQUEST:
                return self._counts[name] >= self._own[name] or has_ended()
            claimed = self._claim(name, key)
            found.extend([] if claimed is None else [claimed])
            return claimed is not None or has_ended()

        def has_ended() -> bool:
            return self.over is not None or self._thread is None

        with self._changed:
            self._own[name] += name not in OF_ONE_REQUEST
            self._changed.wait_for(is_there, users_ranks.APART_SECONDS)
            if found:
                return found[0]
            if name not in OF_ONE_REQUEST and self._counts[name] >= self._own[name]:
                return self._latest[name]
            has_no_more = self._thread is None
        if self.over is not None:
            raise type(self.over)(*self.over.args)
        if has_no_more:
            self._forget()
            return None
        raise RankDiedError(f"rank 0 has not called {name}(), for which rank {self._rank} waits")


def _is(applied: Applied, name: str, key: int | None) -> bool:
    return applied.name == name and (key is None or applied.brought.key == key)
