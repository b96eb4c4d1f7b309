"""What front ends may ask of the whole engine, in threads of their own."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import msgspec

from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.engine.lifecycle.sleep_mode import TAGS, checked_level
from megatron_async.errors import BusyError, MegatronAsyncError, RequestError
from megatron_async.perfetto.recorder import device_name
from megatron_async.serving.engine_side.control_threads import Call, ControlThreads
from megatron_async.serving.engine_side.live_requests import (
    TIMEOUT,
    ConnectedFrontEnd,
    LiveRequests,
)
from megatron_async.serving.engine_side.live_steps import LiveSteps
from megatron_async.serving.engine_side.profile import Profiler
from megatron_async.serving.messages import Answer, Control, Kept
from megatron_async.serving.trainers.controls import TRAINER_CONTROLS, TrainerControls
from megatron_async.weights.source import replaces_all

logger = logging.getLogger(__name__)

RESUMED = "the engine was resumed while this waited for its requests to end"


class Controls:
    """Carries out :class:`~megatron_async.serving.messages.Control`, by the methods that
    :data:`CONTROLS` names.

    Args:
        keep: is told what the next process must know, whenever it changes.

    Attributes:
        lost: why the weights are not those that were last accepted; None when they are.
    """

    def __init__(
        self,
        engine: DynamicInferenceEngine,
        requests: LiveRequests,
        keep: Callable[[Kept], None] = lambda _: None,
    ) -> None:
        self.lost: str | None = None
        self._engine = engine
        self._requests = requests
        self._keep = keep
        self._kept = Kept()
        self._keeping = threading.Lock()
        self._trainer = TrainerControls(engine, self)
        self._threads = ControlThreads(
            {name: partial(method, self) for name, method in CONTROLS.items()}
            | {name: partial(method, self._trainer) for name, method in TRAINER_CONTROLS.items()}
        )
        self._switching = threading.Lock()
        """Held while the engine is stopped, or goes on."""
        self._resumed = 0
        """The order of the last control that had the engine go on: earlier ones stop it no more."""
        self._resumes_awake = False
        """The engine sleeps, and goes on when it is awake though it was stopped before."""
        self._is_drained = False
        self._making_way: set[Call] = set()
        """Controls that let no request in while they wait for the others."""
        self._updating = threading.Lock()
        self._live = LiveSteps(engine)
        self._profiler = Profiler(engine, self._live)

    @property
    def kept(self) -> Kept:
        """What the next process must know."""
        return self._kept

    @property
    def weight_version(self) -> int:
        """Weight updates since the server's start, whatever became of earlier processes."""
        return self._requests.first_version + self._engine.weight_version

    @property
    def call(self) -> Call:
        """The control of the thread that asks."""
        return self._threads.current

    def restore(self, kept: Kept) -> None:
        """Be as an earlier process was told to be, before requests come. Weights that cannot be had
        any more leave those of the model, and :attr:`lost` says so."""
        self.change(**msgspec.structs.asdict(kept))
        for path in kept.weights:
            try:
                self._engine.update_weights(path)
            except MegatronAsyncError as error:
                said = f"the engine was started again, and the weights of {path} are lost: {error}"
                self.lost = f"{said}; send new weights"
                logger.error("%s", self.lost)
                break
        self._requests.first_version = kept.weight_version - self._engine.weight_version
        if kept.suspended:
            self._engine.suspend()
        if kept.asleep or kept.lost_weights:
            engine = self._engine
            engine.sleep(2 if kept.lost_weights else 1)
            engine.wake_up([tag for tag in TAGS if tag not in kept.asleep])

    def submit(
        self, front_end: ConnectedFrontEnd, control: Control, answer: Callable[[Answer], object]
    ) -> None:
        """Begin a control; ``answer`` is called when it is done."""
        self._threads.submit(front_end, control, answer)

    def cancel(self, front_end: ConnectedFrontEnd, number: int | None = None) -> None:
        """Nobody waits for a front end's control any more, or for any of them."""
        self._threads.cancel(front_end, number)
        self._requests.wake_waiters()

    def tick(self) -> None:
        """End what nobody asks for any more; called now and then."""
        if self._live.is_over():
            self._threads.begin(self._live.stop, "live")  # which waits for a step

    def close(self) -> None:
        """End; controls in progress get a moment to answer."""
        self._threads.close(self._requests.wake_waiters)

    # --- controls -----------------------------------------------------------------------------

    def suspend(self) -> dict[str, Any]:
        """Commit what is in flight and launch nothing until ``resume``."""
        with self._switching:
            self._suspend()
        return {"suspended": True}

    def pause(self, mode: str = "keep", timeout: float | None = None) -> dict[str, Any]:
        """Launch nothing until ``resume``.

        Args:
            mode: what becomes of the requests: ``"keep"`` lets them go on then, ``"wait"`` lets
                them end first, ``"abort"`` aborts them.
            timeout: seconds to wait; then they are aborted.

        Raises:
            BusyError: somebody has resumed it meanwhile.
        """
        with self._make_way(mode, timeout):
            self._suspend()
        return {"suspended": True}

    def resume(self, when_awake: bool = False) -> dict[str, Any]:
        """Go on after ``suspend``, ``pause`` and ``drain``. Those that wait to stop the engine give
        up.

        Args:
            when_awake: an engine that sleeps goes on when all of its memory is there; else that is
                an error.
        """
        if not when_awake:
            self._engine.sleep_mode.check_awake()
        self._resumed = self._threads.current.order
        self._is_drained = False
        for call in list(self._making_way):
            if call.order < self._resumed:
                self._making_way.discard(call)
        self._refuse()
        self._requests.wake_waiters()
        with self._switching:
            self._resumes_awake = self._engine.is_sleeping
            if not self._resumes_awake:
                self._engine.resume()
            self.change(suspended=False)
        return {"suspended": False}

    def drain(self, timeout: float | None = None) -> dict[str, Any]:
        """Take no request until ``resume``, and wait until none is left.

        Args:
            timeout: seconds to wait; then they end with what they have.
        """
        self._is_drained = True
        self._refuse()
        return {"in_time": self._finish(timeout, TIMEOUT)}

    def weights(
        self, path: str, recompute_kv_cache: bool = True, called: str | None = None
    ) -> dict[str, Any]:
        """Replace the weights between two steps by those of a model directory or file, and call
        them by ``called``."""
        recompute = recompute_kv_cache and self._trainer.recompute
        with self.only_update(), self._trainer.naming(called):
            self._engine.update_weights(path, recompute_kv_cache=recompute)
            # The file has been accepted, so its header is no larger than it may be.
            self.note_weights(path, is_whole=replaces_all(self._engine.model.weights_owner, path))
        return {"weight_version": self.weight_version}

    def sleep(self, level: int = 1, mode: str = "keep") -> dict[str, Any]:
        """Give the memory of weights and KV cache back; new requests wait.

        Args:
            mode: what becomes of the requests, as in :meth:`pause`.

        Raises:
            BusyError: somebody has resumed it meanwhile.
        """
        checked_level(level)
        self._engine.sleep_mode.check_possible()
        with self._make_way(mode, None):
            self._engine.sleep(level)
            self.change(**self._asleep())
        return {"is_sleeping": True}

    def abort_requests(self, names: list[str] | None = None) -> dict[str, Any]:
        """End all requests with what they have, or those that have these ids; new ones are
        taken."""
        return {"aborted": self._requests.end_all("abort", names)}

    def wake_up(self, tags: list[str] | None = None) -> dict[str, Any]:
        """Take the memory back that ``sleep`` gave."""
        with self._switching:
            try:
                self._engine.wake_up(tags)
                if self._resumes_awake and not self._engine.is_sleeping:
                    self._resumes_awake = False
                    self._engine.resume()
            finally:
                self.change(**self._asleep())
        return {"is_sleeping": self._engine.is_sleeping}

    def state(self) -> dict[str, Any]:
        """Whether the engine sleeps or can, whether nothing is launched, and sequences that have
        not ended."""
        return {
            "is_sleeping": self._engine.is_sleeping,
            "is_paused": self._engine.suspended,
            "can_sleep": self._engine.sleep_mode.is_possible,
            "requests": len(self._requests),
        }

    def reset_prefix_cache(self) -> dict[str, Any]:
        """Forget all cached prefixes."""
        self._engine.reset_prefix_cache()
        return {}

    def check_idle(self) -> dict[str, Any]:
        """Check that all slots and blocks have come back; no request may be left."""
        engine = self._engine
        with engine.lock.gate, engine.lock.mutex:
            if engine.loop.has_work:
                raise RequestError("the engine is not idle")
            engine.scheduler.check_idle()
        return {"idle": True}

    def live(self) -> dict[str, Any]:
        """The last steps; see :class:`~megatron_async.serving.engine_side.live_steps.LiveSteps`."""
        return {"device": device_name(self._engine), "steps": self._live.read()}

    def profile(self, path: str, steps: int = 100, timeout: float | None = 60.0) -> dict[str, Any]:
        """Write what host and device do in the next steps, as a trace for Perfetto.

        Args:
            path: of the file to write, in the engine process's file system.
            steps: to record; fewer when they do not come within ``timeout`` seconds.
        """
        return self._profiler.take(self._threads.current, path, steps, timeout)

    # --- what they are made of ----------------------------------------------------------------

    def _suspend(self) -> None:
        self._engine.suspend()
        self._resumes_awake = False
        self.change(suspended=True)

    @contextlib.contextmanager
    def only_update(self) -> Iterator[None]:
        """Raises BusyError while another thread changes the weights, or waits for a trainer: those
        that wait would leave no thread for other controls."""
        if not self._updating.acquire(blocking=False):
            raise BusyError("the weights are being changed already; wait for it")
        try:
            yield
        finally:
            self._updating.release()

    @contextlib.contextmanager
    def _make_way(self, mode: str, timeout: float | None) -> Iterator[None]:
        """Stop the engine inside: see :meth:`pause`. No request is taken before, unless all are
        kept; then they wait in the engine that has stopped.

        Raises:
            BusyError: somebody has resumed the engine while this waited.
        """
        if mode not in ("keep", "wait", "abort"):
            raise RequestError(f"mode={mode!r} must be keep, wait or abort")
        waits = mode == "wait" and timeout is None
        if waits and self._engine.suspended and not self._requests.wait_until_empty(0.0):
            raise RequestError(
                "the engine is paused, so that no request ends; resume it, or give mode=abort"
            )
        call = self._threads.current
        try:
            if mode != "keep":
                self._making_way.add(call)
                self._refuse()
                self._finish(timeout if mode == "wait" else 0.0, "abort")
            with self._switching:
                if call.order < self._resumed:
                    raise BusyError(RESUMED)
                yield
        finally:
            self._making_way.discard(call)
            self._refuse()

    def _refuse(self) -> None:
        """Have requests refused while somebody needs it."""
        refusal = "the engine is paused" if self._making_way else None
        self._requests.refusal = "the engine is being drained" if self._is_drained else refusal

    def note_weights(self, path: str, *, is_whole: bool) -> None:
        """The weights are new, all of them or some: those of ``path``."""
        paths = (*(each for each in self._kept.weights if each != path), path)
        if is_whole:
            paths = (path,)
            self.lost = None
        self.change(weights=paths, weight_version=self.weight_version, **self._asleep())

    def _asleep(self) -> dict[str, Any]:
        """What a ``Kept`` says of sleep."""
        mode = self._engine.sleep_mode
        return {"asleep": tuple(sorted(mode.asleep)), "lost_weights": mode.lost_weights}

    def change(self, **changes: Any) -> None:
        """Say what the next process must know."""
        with self._keeping:
            self._kept = msgspec.structs.replace(self._kept, **changes)
            self._keep(self._kept)

    def _finish(self, timeout: float | None, reason: str) -> bool:
        """Wait for the requests, and end those that take longer; False when some did.

        Raises:
            BusyError: what waited to stop the engine is not to do so any more.
        """
        if self._wait(timeout):
            return True
        self._requests.end_all(reason)
        if self._engine.suspended:
            return False  # aborts are applied all the same
        self._wait(None)
        return False

    def _wait(self, timeout: float | None) -> bool:
        call = self._threads.current
        makes_way = call in self._making_way

        def is_over() -> bool:
            return call.is_cancelled or (makes_way and call.order < self._resumed)

        is_empty = self._requests.wait_until_empty(timeout, is_over)
        if is_over():
            raise BusyError(RESUMED)
        return is_empty


CONTROLS: dict[str, Callable[..., dict[str, Any]]] = {
    method.__name__: method
    for method in (
        Controls.suspend,
        Controls.pause,
        Controls.resume,
        Controls.drain,
        Controls.weights,
        Controls.sleep,
        Controls.abort_requests,
        Controls.wake_up,
        Controls.state,
        Controls.reset_prefix_cache,
        Controls.check_idle,
        Controls.live,
        Controls.profile,
    )
}
"""By their names, with :data:`TRAINER_CONTROLS`; ``info`` is answered without a thread."""
