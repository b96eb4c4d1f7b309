"""The engine of rank 0, which tells the others what each call of its user brought."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from megatron_async.config.engine_config import EngineConfig
from megatron_async.errors import ConfigError, MegatronAsyncError, RankDiedError, RequestError
from megatron_async.megatron_api.coordinator.headers import Headers
from megatron_async.megatron_api.engine import DynamicInferenceEngine
from megatron_async.megatron_api.engine_config import fit_length
from megatron_async.megatron_api.spmd.messages import (
    BROUGHT,
    BUILD,
    CLOSE,
    LISTEN,
    NEWS,
    ONE_ENGINE,
    SIGNAL,
    SIZES,
    Brought,
    Standing,
    Step,
    Totals,
)
from megatron_async.ranks.messages import Called
from megatron_async.ranks.users_ranks import UsersRanks, lead_users_ranks
from megatron_async.request.request import DynamicInferenceRequest, RequestFuture
from megatron_async.runner.memory.cache_sizes import CacheSizes
from megatron_async.runner.memory.forward_batch import ForwardBatch

T = TypeVar("T")
_OWN_OF_A_RANK = ("block_count", "paused_block_count", "asked")
"""Fields of a cache's sizes that may differ between stages."""


class Announcer:
    """Tells the other ranks of calls.

    Args:
        engine: rank 0's.
    """

    def __init__(self, group: UsersRanks, engine: Any) -> None:
        self._group = group
        self._engine = engine
        self._inside = threading.local()
        self._ended: list[tuple[int, RequestFuture]] = []
        self._deferred: list[tuple[str, dict[str, Any]]] = []
        self._known: set[int] = set()
        """Active requests whose records the others have."""
        self._lock = threading.RLock()
        self._telling = threading.Lock()
        """What is told last stands last, whichever thread tells it."""
        self.has_thread = False
        """The engine's own thread steps it, so that requests end between calls."""

    def run(self, name: str, call: Callable[[], T], bring: Callable[[T], dict[str, Any]]) -> T:
        """Make a call that the others make too, and tell them its outcome. One that another such
        call makes is that one's own."""
        if self._is_inside:
            return call()
        self._inside.calls, self._group.calling = True, name
        try:
            result = call()
            self._tell_deferred()
            self.tell(name, **bring(result))
            return result
        except BaseException as error:
            with contextlib.suppress(RankDiedError):  # the others know
                self._tell_deferred()
                self.tell(name, error=_described(error))
            raise
        finally:
            self._inside.calls, self._group.calling = False, ""

    @property
    def _is_inside(self) -> bool:
        """This thread is in a call that the others make too."""
        return bool(getattr(self._inside, "calls", False))

    @contextlib.contextmanager
    def silent(self, name: str) -> Iterator[None]:
        """Calls that this one makes are its own, and are not told."""
        was, self._inside.calls, self._group.calling = self._is_inside, True, name
        try:
            yield
        finally:
            self._inside.calls, self._group.calling = was, ""

    def tell_of_one(self, name: str, **brought: Any) -> None:
        """Tell of a call that the others may leave out; in the midst of another call or of telling,
        such as by a signal's handler, when that is over."""
        self._deferred.append((name, brought))
        while self._deferred and not self._is_inside:  # a handler may come at any line
            self._inside.calls = True
            try:
                self._tell_deferred()
            finally:
                self._inside.calls = False

    def _tell_deferred(self) -> None:
        while self._deferred:
            name, brought = self._deferred.pop(0)
            self.tell(name, **brought)

    def tell(self, name: str, **brought: Any) -> None:
        """Tell the outcome of a call; requests as they are.

        Args:
            brought: fields of :class:`Brought`; requests in place of their places.
        """
        with self._telling:
            self._group.tell(Called(name, BROUGHT.encode(self._outcome(name, brought))))

    def _outcome(self, name: str, brought: dict[str, Any]) -> Brought:
        records: dict[int, tuple[int, DynamicInferenceRequest]] = {}

        def place(request: DynamicInferenceRequest) -> int:
            return records.setdefault(id(request), (len(records), request))[0]

        standing = self._standing(name)
        with self._lock:
            ended, self._ended = self._ended, []
            fresh = [each for each in standing.active if each not in self._known]
            self._known = set(standing.active)
        opened = [self._engine.outputs.request(each) for each in fresh]
        done: list[tuple[int, int]] = []
        failed: list[tuple[int, str, str]] = []
        for request_id, future in ended:
            error = None if future.cancelled() else future.exception()
            if error is not None:
                failed.append((request_id, *_described(error)))
            elif not future.cancelled():
                done.append((request_id, place(future.result())))
        returned = [place(request) for request in brought.pop("returned", ())]
        step = brought.pop("step", None)
        if step is not None:
            step = Step(
                active=step["active_request_ids"],
                finished=[place(request) for request in step["finished_request_records"]],
                tokens=step["tokens"],
                reports=step["steps"],
                seconds=step["step_time"],
                graph_rows=step["cuda_graph_request_count"],
            )
        return Brought(
            standing=standing,
            opened=[place(request) for request in opened if request is not None],
            records=[request.serialize() for _, request in records.values()],
            returned=returned,
            done=done,
            failed=failed,
            step=step,
            **brought,
        )

    def _standing(self, name: str) -> Standing:
        engine = self._engine
        if name == BUILD and not engine.is_built:
            return Standing.before_it_is_built()
        active, counters = list(engine.outputs.keys), engine.counters
        has_totals = name in _WITH_TOTALS or not active
        return Standing(
            active=active,
            suspended=engine.suspended,
            sleeping=engine.is_sleeping,
            weight_version=engine.weight_version,
            steps=counters.steps_launched,
            evictions=counters.evictions,
            in_flight=engine.in_flight_count,
            totals=Totals.of(counters, engine.usage()) if has_totals else None,
        )

    def when_ended(self, request_id: int, future: RequestFuture) -> None:
        """Tell the others when a request has ended: with the next call, or at once where the
        engine's own thread steps."""

        def ended(_: object) -> None:
            with self._lock:
                self._ended.append((request_id, future))
            if self.has_thread:
                with contextlib.suppress(RankDiedError):
                    self.tell(NEWS)

        future.when_done(ended)


_WITH_TOTALS = frozenset({"generate", "suspend", "reset", "stop"})


def _described(error: BaseException) -> tuple[str, str]:
    """Class and message of an error; of one that only rank 0 knows, in words."""
    if isinstance(error, MegatronAsyncError):
        return type(error).__name__, str(error)
    return RankDiedError.__name__, f"rank 0: {type(error).__name__}: {error}"


def announced(
    method: Callable[..., T], bring: Callable[[T], dict[str, Any]] = lambda result: {}
) -> Callable[..., T]:
    """The method, as a call of all ranks."""

    @functools.wraps(method)
    def call(self: LeadingEngine, *args: Any, **kwargs: Any) -> T:
        work = functools.partial(method, self, *args, **kwargs)
        return self.announcer.run(method.__name__, work, bring)

    return call


def _value(result: Any) -> dict[str, Any]:
    return {"value": result}


def _of_request(method: Callable[..., bool]) -> Callable[..., bool]:
    """The method, which is about a request, as a call that the others may make."""

    @functools.wraps(method)
    def call(self: LeadingEngine, request_id: int, **changes: Any) -> bool:
        return self.about(method.__name__, request_id, lambda: method(self, request_id, **changes))

    return call


class LeadingEngine(DynamicInferenceEngine):
    """Rank 0's engine over a model that its user has divided: what its calls bring is the other
    ranks' too. For the arguments see :class:`DynamicInferenceEngine`."""

    is_built = False

    def __init__(self, controller: Any, context: Any, *args: Any, **options: Any) -> None:
        controller.check_free()  # as the others do before they connect
        if context is not None:
            fit_length(controller.served.network, context)
        config: EngineConfig | None = options.get("config")
        timeout = (config or EngineConfig()).rank_timeout_seconds
        group = lead_users_ranks(controller.served.network.parallel, timeout)
        self.announcer = Announcer(group, self)
        alone = controller.served
        try:
            _agree(group.await_ready(), context)
            controller.served = dataclasses.replace(alone, group=group)
            super().__init__(controller, context, *args, owned_group=group, **options)
            self.is_built = True
            self.announcer.tell(BUILD)
        except BaseException as error:
            controller.served = alone
            with contextlib.suppress(RankDiedError):
                self.announcer.tell(BUILD, error=_described(error))
            group.close()
            raise

    def with_config(self, config: EngineConfig, **options: Any) -> LeadingEngine:
        """Raises RequestError: all ranks build another engine."""
        raise RequestError(ONE_ENGINE)

    def usage(self) -> Any:
        """What is in the cache now."""
        return self._usage()

    # --- requests -----------------------------------------------------------------------------

    def add_request(self, request_id: int, *args: Any, **options: Any) -> RequestFuture:
        """See :class:`DynamicInferenceEngine`: counts for all ranks, once."""
        with self._telling("add_request", request_id):
            future = super().add_request(request_id, *args, **options)
            self.announcer.when_ended(request_id, future)
        return future

    def about(self, name: str, request_id: int, call: Callable[[], bool]) -> bool:
        """A call about one request, told to the others."""
        with self._telling(name, request_id) as brought:
            brought["value"] = value = call()
        return value

    @contextlib.contextmanager
    def _telling(self, name: str, request_id: int) -> Iterator[dict[str, Any]]:
        brought: dict[str, Any] = {}
        try:
            yield brought
        except BaseException as error:
            brought = {"error": _described(error)}
            raise
        finally:
            key = request_id if isinstance(request_id, int) else None
            self.announcer.tell_of_one(name, key=key, **brought)

    abort_request = _of_request(DynamicInferenceEngine.abort_request)
    pause_request = _of_request(DynamicInferenceEngine.pause_request)
    resume_request = _of_request(DynamicInferenceEngine.resume_request)
    evict_request = _of_request(DynamicInferenceEngine.evict_request)
    update_sampling_params = _of_request(DynamicInferenceEngine.update_sampling_params)

    def has_unfinished_requests(self) -> bool:
        """See :class:`DynamicInferenceEngine`: the same on all ranks."""
        value = super().has_unfinished_requests()
        if not self.announcer.has_thread:
            self.announcer.tell_of_one("has_unfinished_requests", value=value)
        return value

    # --- calls of all ranks -------------------------------------------------------------------

    step_modern = announced(DynamicInferenceEngine.step_modern, lambda result: {"step": result})
    generate = announced(DynamicInferenceEngine.generate, lambda found: {"returned": found})
    suspend = announced(DynamicInferenceEngine.suspend)
    resume = announced(DynamicInferenceEngine.resume)
    go_on = announced(DynamicInferenceEngine.go_on)
    forget_computed = announced(DynamicInferenceEngine.forget_computed)
    reset = announced(DynamicInferenceEngine.reset)
    reset_prefix_cache = announced(DynamicInferenceEngine.reset_prefix_cache)
    update_weights = announced(DynamicInferenceEngine.update_weights, _value)
    sleep = announced(DynamicInferenceEngine.sleep)
    wake_up = announced(DynamicInferenceEngine.wake_up)

    def start(self) -> None:
        """See :class:`DynamicInferenceEngine`."""

        def start() -> None:
            super(LeadingEngine, self).start()
            self.announcer.has_thread = True

        self.announcer.run("start", start, lambda _: {})

    def stop(self) -> None:
        """See :class:`DynamicInferenceEngine`."""

        def stop() -> None:
            super(LeadingEngine, self).stop()
            self.announcer.has_thread = False

        self.announcer.run("stop", stop, lambda _: {})

    async def start_listening_to_data_parallel_coordinator(self, *args: Any, **options: Any) -> str:
        """See :class:`DynamicInferenceEngine`; the others get the address too."""
        self._service.states.on_reached = self._tell_signal
        try:
            with self.announcer.silent(LISTEN):
                address = await super().start_listening_to_data_parallel_coordinator(
                    *args, **options
                )
        except MegatronAsyncError as error:
            self.announcer.tell(LISTEN, error=_described(error))
            raise
        self.announcer.tell(LISTEN, value=address)
        return address

    def _tell_signal(self, signal: Headers) -> None:
        with contextlib.suppress(RankDiedError):
            self.announcer.tell(SIGNAL, value=signal.name)

    def close(self) -> None:
        """See :class:`DynamicInferenceEngine`; the others' ends with it."""
        with self.announcer.silent(CLOSE):
            super().close()


def _agree(ready: dict[int, bytes], context: ForwardBatch | None) -> None:
    """Have the cache use as many blocks as each rank's has.

    Raises:
        ConfigError: the caches differ in something else.
    """
    others = {rank: SIZES.decode(data) if data else None for rank, data in ready.items()}
    own = None if context is None else context.cache.sizes
    for rank, sizes in others.items():
        if (sizes is None) != (own is None):
            raise ConfigError(
                f"rank {rank if sizes is None else 0} has no context and another rank has one: "
                "build the engine with one on all ranks, or on none"
            )
        if sizes is None or own is None:
            continue
        for field in dataclasses.fields(CacheSizes):
            name = field.name
            if name not in _OWN_OF_A_RANK and getattr(sizes, name) != getattr(own, name):
                raise ConfigError(
                    f"the context of rank {rank} has {name}={getattr(sizes, name)} and that of "
                    f"rank 0 {getattr(own, name)}: build the same one on all ranks"
                )
    if context is not None and own is not None:
        fewest = min(sizes.block_count for sizes in others.values() if sizes is not None)
        if fewest < own.block_count:
            context.limit_blocks(fewest)
