"""What front ends may ask of the whole engine, in threads of their own."""

from __future__ import annotations

import contextlib
import json
import logging
import platform
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import msgspec
import torch

from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.engine.lifecycle.host_timeline import HostTimeline
from megatron_async.engine.lifecycle.sleep_mode import checked_level
from megatron_async.errors import (
    BusyError,
    EngineDeadError,
    EngineStoppedError,
    IntegrityError,
    MegatronAsyncError,
    RankDiedError,
    RequestError,
)
from megatron_async.perfetto.events import Recording, trace_events
from megatron_async.request.request import StepReport
from megatron_async.serving.engine_side.live_requests import (
    TIMEOUT,
    ConnectedFrontEnd,
    LiveRequests,
)
from megatron_async.serving.engine_side.live_steps import LiveSteps
from megatron_async.serving.messages import Answer, Control, Kept
from megatron_async.weights.source import replaces_all
from megatron_async.weights.targets import covers
from megatron_async.weights.transfer import WeightTransfer

logger = logging.getLogger(__name__)

THREADS = 4
"""Controls at the same time: one that waits does not hold up the next ones."""
AT_ONCE = frozenset({"resume", "wake_up", "abort_requests", "suspend", "state"})
"""Have threads of their own: they end what others may wait for, however many do."""
CLOSE_SECONDS = 1.0
"""For controls to give their answers when the process ends."""
MAX_PROFILED_STEPS = 10_000
SENT = "a trainer, which has sent them,"
"""In place of the path of weights that are in no file: the next process cannot have them."""


class Call:
    """A control in progress.

    Attributes:
        wake: set when it is cancelled, so that what waits ends; a control may set it too.
    """

    def __init__(self) -> None:
        self.is_cancelled = False
        self.wake = threading.Event()

    def cancel(self) -> None:
        """Nobody waits for it any more."""
        self.is_cancelled = True
        self.wake.set()


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
        self._first_version = 0
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="control")
        self._pool_at_once = ThreadPoolExecutor(THREADS, thread_name_prefix="control at once")
        self._running: set[Future[None]] = set()
        self._calls: dict[tuple[ConnectedFrontEnd, int], Call] = {}
        self._call = threading.local()
        """``current`` is the thread's own."""
        self._updating = threading.Lock()
        self._profiling = threading.Lock()
        self._live = LiveSteps(engine)
        self._transfer = WeightTransfer(engine.cache.device)

    @property
    def kept(self) -> Kept:
        """What the next process must know."""
        return self._kept

    @property
    def weight_version(self) -> int:
        """Weight updates since the server's start, whatever became of earlier processes."""
        return self._first_version + self._engine.weight_version

    def restore(self, kept: Kept) -> None:
        """Be as an earlier process was told to be, before requests come. Weights that cannot be had
        any more leave those of the model, and :attr:`lost` says so."""
        self._kept = kept
        for path in kept.weights:
            try:
                self._engine.update_weights(path)
            except MegatronAsyncError as error:
                said = f"the engine was started again, and the weights of {path} are lost: {error}"
                self.lost = f"{said}; send new weights"
                logger.error("%s", self.lost)
                break
        self._first_version = kept.weight_version - self._engine.weight_version
        if kept.suspended:
            self._engine.suspend()

    def submit(
        self, front_end: ConnectedFrontEnd, control: Control, answer: Callable[[Answer], object]
    ) -> None:
        """Begin a control; ``answer`` is called when it is done."""
        key = front_end, control.number
        call = self._calls[key] = Call()
        pool = self._pool_at_once if control.name in AT_ONCE else self._pool
        future = pool.submit(self._run, control, call, answer)
        self._running.add(future)
        future.add_done_callback(self._running.discard)
        future.add_done_callback(lambda _: self._calls.pop(key, None))

    def cancel(self, front_end: ConnectedFrontEnd, number: int | None = None) -> None:
        """Nobody waits for a front end's control any more, or for any of them."""
        for (of, each), call in list(self._calls.items()):
            if of is front_end and number in (None, each):
                call.cancel()

    def tick(self) -> None:
        """End what nobody asks for any more; called now and then."""
        if self._live.is_over():
            self._pool.submit(self._live.stop)  # which waits for a step

    def close(self) -> None:
        """Those in progress get a moment to answer."""
        for pool in (self._pool, self._pool_at_once):
            pool.shutdown(wait=False, cancel_futures=True)
        for call in list(self._calls.values()):
            call.cancel()
        wait(list(self._running), CLOSE_SECONDS)

    def _run(self, control: Control, call: Call, answer: Callable[[Answer], object]) -> None:
        if call.is_cancelled:
            return
        self._call.current = call
        try:
            method = CONTROLS.get(control.name)
            if method is None:
                raise RequestError(f"{control.name!r} is none of {', '.join(CONTROLS)}")
            answer(Answer(control.number, method(self, **control.arguments)))
        except Exception as error:
            kind = _kind_of(error)
            if kind == "internal":
                logger.exception("%s failed", control.name)
            known = isinstance(error, MegatronAsyncError)
            said = str(error) if known else f"{type(error).__name__}: {error}"
            answer(Answer(control.number, error=said, kind=kind))

    # --- controls -----------------------------------------------------------------------------

    def suspend(self) -> dict[str, Any]:
        """Commit what is in flight and launch nothing until ``resume``."""
        self._engine.suspend()
        self._change(suspended=True)
        return {"suspended": True}

    def pause(self, mode: str = "keep", timeout: float | None = None) -> dict[str, Any]:
        """Launch nothing until ``resume``.

        Args:
            mode: what becomes of the requests: ``"keep"`` lets them go on then, ``"wait"`` lets
                them end first, ``"abort"`` aborts them.
            timeout: seconds to wait; then they are aborted.
        """
        self._make_way(mode, timeout)
        self._engine.suspend()
        self._requests.refusal = None  # they wait in the suspended engine
        self._change(suspended=True)
        return {"suspended": True}

    def resume(self) -> dict[str, Any]:
        """Go on after ``suspend``, ``pause`` and ``drain``."""
        self._requests.refusal = None
        self._engine.resume()
        self._change(suspended=False)
        return {"suspended": False}

    def drain(self, timeout: float | None = None) -> dict[str, Any]:
        """Take no request until ``resume``, and wait until none is left.

        Args:
            timeout: seconds to wait; then they end with what they have.
        """
        self._requests.refusal = "the engine is being drained"
        return {"in_time": self._finish(timeout, TIMEOUT)}

    def weights(self, path: str, recompute_kv_cache: bool = True) -> dict[str, Any]:
        """Replace the weights between two steps by those of a model directory or file."""
        with self._only_update():
            self._engine.update_weights(path, recompute_kv_cache=recompute_kv_cache)
            # The file has been accepted, so its header is no larger than it may be.
            is_whole = replaces_all(self._engine.model.weights_owner, path)
            paths = (*(each for each in self._kept.weights if each != path), path)
            if is_whole:
                paths = (path,)
                self.lost = None
            self._change(weights=paths, weight_version=self.weight_version)
        return {"weight_version": self.weight_version}

    def sleep(self, level: int = 1, mode: str = "keep") -> dict[str, Any]:
        """Give the memory of weights and KV cache back; new requests wait.

        Args:
            mode: what becomes of the requests, as in :meth:`pause`.
        """
        checked_level(level)
        self._engine.sleep_mode.check_possible()
        refusal = self._requests.refusal
        try:
            self._make_way(mode, None)
            self._engine.sleep(level)
        finally:
            self._requests.refusal = refusal  # new ones wait in the sleeping engine
        return {"is_sleeping": True}

    def abort_requests(self) -> dict[str, Any]:
        """End all requests with what they have; new ones are taken."""
        return {"aborted": self._requests.end_all("abort")}

    def wake_up(self, tags: list[str] | None = None) -> dict[str, Any]:
        """Take it back."""
        self._engine.wake_up(tags)
        return {"is_sleeping": self._engine.is_sleeping}

    def state(self) -> dict[str, Any]:
        """Whether the engine sleeps, and whether nothing is launched."""
        return {"is_sleeping": self._engine.is_sleeping, "is_paused": self._engine.suspended}

    def init_weight_transfer(self, **where: Any) -> dict[str, Any]:
        """Join a trainer's group."""
        with self._only_update():
            self._transfer.connect(**where, given_up=self._call.current.wake)
        return {}

    def start_weight_update(self) -> dict[str, Any]:
        """Begin an update by the group."""
        with self._only_update():
            self._transfer.start()
        return {}

    def receive_weights(self, **announced: Any) -> dict[str, Any]:
        """Take tensors of the group's trainer, beside those that are served."""
        with self._only_update():
            return {"tensors": self._transfer.receive(**announced)}

    def finish_weight_update(self) -> dict[str, Any]:
        """Replace the weights by all that has come. They are in no file: should this process end,
        the next one says that they are lost."""
        with self._only_update():
            names = self._transfer.finish(self._engine.update_weights)
            paths = (*(each for each in self._kept.weights if each != SENT), SENT)
            if covers(self._engine.model.weights_owner, names):
                paths = (SENT,)
                self.lost = None
            if names:
                self._change(weights=paths, weight_version=self.weight_version)
        return {"weight_version": self.weight_version}

    def reset_prefix_cache(self) -> dict[str, Any]:
        """Forget all cached prefixes."""
        self._engine.reset_prefix_cache()
        return {}

    def check_idle(self) -> dict[str, Any]:
        """An error unless, with no request left, all slots and blocks have come back."""
        engine = self._engine
        with engine.lock.gate, engine.lock.mutex:
            if engine.loop.has_work:
                raise RequestError("the engine is not idle")
            engine.scheduler.check_idle()
        return {"idle": True}

    def live(self) -> dict[str, Any]:
        """The last steps; see :class:`~megatron_async.serving.engine_side.live_steps.LiveSteps`."""
        return {"device": _device_name(self._engine), "steps": self._live.read()}

    def profile(self, path: str, steps: int = 100, timeout: float | None = 60.0) -> dict[str, Any]:
        """Write what host and device do in the next steps, as a trace for Perfetto.

        Args:
            path: of the file to write, in the engine process's file system.
            steps: to record; fewer when they do not come within ``timeout`` seconds.
        """
        if not isinstance(steps, int) or not 0 < steps <= MAX_PROFILED_STEPS:
            raise RequestError(f"steps={steps!r} must be an integer from 1 to {MAX_PROFILED_STEPS}")
        if not self._profiling.acquire(blocking=False):
            raise BusyError("another profile is being taken; wait for it")
        try:
            with self._live.set_aside():
                return self._profile(Path(path), steps, timeout)
        finally:
            self._profiling.release()

    # --- what they are made of ----------------------------------------------------------------

    @contextlib.contextmanager
    def _only_update(self) -> Iterator[None]:
        """Raises BusyError while another thread changes the weights, or waits for a trainer: those
        that wait would leave no thread for other controls."""
        if not self._updating.acquire(blocking=False):
            raise BusyError("the weights are being changed already; wait for it")
        try:
            yield
        finally:
            self._updating.release()

    def _make_way(self, mode: str, timeout: float | None) -> None:
        """Before the engine stops: see :meth:`pause`. No request is taken until somebody says so,
        unless all are kept."""
        if mode not in ("keep", "wait", "abort"):
            raise RequestError(f"mode={mode!r} must be keep, wait or abort")
        waits = mode == "wait" and timeout is None
        if waits and self._engine.suspended and not self._requests.wait_until_empty(0.0):
            raise RequestError(
                "the engine is paused, so that no request ends; resume it, or give mode=abort"
            )
        if mode != "keep":
            self._requests.refusal = "the engine is paused"
            self._finish(timeout if mode == "wait" else 0.0, "abort")

    def _change(self, **changes: Any) -> None:
        """Say what the next process must know."""
        with self._keeping:
            self._kept = msgspec.structs.replace(self._kept, **changes)
            self._keep(self._kept)

    def _finish(self, timeout: float | None, reason: str) -> bool:
        """Wait for the requests, and end those that take longer; False when some did."""
        if self._requests.wait_until_empty(timeout):
            return True
        self._requests.end_all(reason)
        if self._engine.suspended:
            return False  # aborts are applied all the same
        self._requests.wait_until_empty(None)
        return False

    def _profile(self, path: Path, steps: int, timeout: float | None) -> dict[str, Any]:
        engine = self._engine
        call: Call = self._call.current
        counter = _StepCounter(steps, call.wake)
        with engine.lock.gate, engine.lock.mutex:  # between two steps
            host = HostTimeline(engine)
            engine.device.start_timeline()
        start_ns = time.perf_counter_ns()
        forget = engine.observe(counter)
        try:
            call.wake.wait(timeout)
        finally:
            forget()
            suspended = engine.suspended
            engine.suspend()  # what is in flight is shown to its end
            device = engine.device.take_timeline()
            host.detach()
            if not suspended:
                engine.resume()
        if call.is_cancelled:
            raise RequestError("nobody waits for the profile any more")
        recording = Recording(engine.model_name, _device_name(engine), start_ns, host, device, [])
        events, summary = trace_events(recording)
        try:
            path.write_text(json.dumps({"traceEvents": events}))
        except OSError as error:
            raise RequestError(f"path={str(path)!r} cannot be written: {error}") from None
        return {"path": str(path), "steps": counter.seen, "overlapped": summary.overlapped}


def _kind_of(error: Exception) -> str:
    """Return the kind of an :class:`~megatron_async.serving.messages.Answer`."""
    if isinstance(error, BusyError):
        return "busy"
    if isinstance(error, EngineStoppedError | EngineDeadError | RankDiedError):
        return "dead"
    is_known = isinstance(error, MegatronAsyncError) and not isinstance(error, IntegrityError)
    return "invalid" if is_known else "internal"


def _device_name(engine: DynamicInferenceEngine) -> str:
    device = engine.device.torch_device
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"a thread of the CPU ({platform.machine()})"


class _StepCounter:
    """An observer that sets ``done`` after a number of steps."""

    def __init__(self, steps: int, done: threading.Event) -> None:
        self.seen = 0
        self._done = done
        self._steps = steps

    def on_commit(self, report: StepReport) -> None:
        """A step was committed."""
        self.seen += 1
        if self.seen >= self._steps:
            self._done.set()


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
        Controls.init_weight_transfer,
        Controls.start_weight_update,
        Controls.receive_weights,
        Controls.finish_weight_update,
        Controls.reset_prefix_cache,
        Controls.check_idle,
        Controls.live,
        Controls.profile,
    )
}
"""By their names; ``info`` is answered without a thread."""
