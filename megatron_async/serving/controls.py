"""What front ends may ask of the whole engine, in threads of their own."""

from __future__ import annotations

import json
import platform
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.engine.host_timeline import HostTimeline
from megatron_async.errors import MegatronAsyncError, RequestError
from megatron_async.request import StepReport
from megatron_async.serving.live_requests import TIMEOUT, LiveRequests
from megatron_async.serving.live_steps import LiveSteps
from megatron_async.serving.messages import Answer, Control

THREADS = 4
"""Controls at the same time: one that waits does not hold up the next ones."""
MAX_PROFILED_STEPS = 10_000


class Controls:
    """Carries out :class:`~megatron_async.serving.messages.Control`, whose names are the methods
    here that have no underscore before them.

    Args:
        answer: sends an answer, from any thread.
    """

    def __init__(self, engine: DynamicInferenceEngine, requests: LiveRequests) -> None:
        self._engine = engine
        self._requests = requests
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="control")
        self._profiling = threading.Lock()
        self._live = LiveSteps(engine)

    def submit(self, control: Control, answer: Callable[[Answer], object]) -> None:
        """Begin a control; ``answer`` is called when it is done."""
        self._pool.submit(self._run, control, answer)

    def tick(self) -> None:
        """End what nobody asks for any more; called now and then."""
        if self._live.is_over():
            self._pool.submit(self._live.stop)  # which waits for a step

    def close(self) -> None:
        """Wait for nobody."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _run(self, control: Control, answer: Callable[[Answer], object]) -> None:
        try:
            method = CONTROLS.get(control.name)
            if method is None:
                raise RequestError(f"{control.name!r} is none of {', '.join(CONTROLS)}")
            answer(Answer(control.number, method(self, **control.arguments)))
        except Exception as error:
            known = isinstance(error, MegatronAsyncError)
            said = str(error) if known else f"{type(error).__name__}: {error}"
            answer(Answer(control.number, error=said))

    # --- controls -----------------------------------------------------------------------------

    def suspend(self) -> dict[str, Any]:
        """Commit what is in flight and launch nothing until ``resume``."""
        self._engine.suspend()
        return {"suspended": True}

    def pause(self, mode: str = "keep", timeout: float | None = None) -> dict[str, Any]:
        """Launch nothing until ``resume``.

        Args:
            mode: what becomes of the requests: ``"keep"`` lets them go on then, ``"wait"`` lets
                them end first, ``"abort"`` aborts them.
            timeout: seconds to wait; then they are aborted.
        """
        if mode not in ("keep", "wait", "abort"):
            raise RequestError(f"mode={mode!r} must be keep, wait or abort")
        if mode != "keep":
            self._requests.refusal = "the engine is paused"
            self._finish(timeout if mode == "wait" else 0.0, "abort")
        self._engine.suspend()
        self._requests.refusal = None  # they wait in the suspended engine
        return {"suspended": True}

    def resume(self) -> dict[str, Any]:
        """Go on after ``suspend``, ``pause`` and ``drain``."""
        self._requests.refusal = None
        self._engine.resume()
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
        version = self._engine.update_weights(path, recompute_kv_cache=recompute_kv_cache)
        return {"weight_version": version}

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
        """The last steps; see :class:`~megatron_async.serving.live_steps.LiveSteps`."""
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
            raise RequestError("another profile is being taken; wait for it")
        try:
            with self._live.set_aside():
                return self._profile(Path(path), steps, timeout)
        finally:
            self._profiling.release()

    # --- what they are made of ----------------------------------------------------------------

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
        from megatron_async.inference.trace.events import Recording, trace_events

        engine = self._engine
        counter = _StepCounter(steps)
        with engine.lock.gate, engine.lock.mutex:  # between two steps
            host = HostTimeline(engine)
            engine.device.start_timeline()
        start_ns = time.perf_counter_ns()
        forget = engine.observe(counter)
        try:
            counter.done.wait(timeout)
        finally:
            forget()
            suspended = engine.suspended
            engine.suspend()  # what is in flight is shown to its end
            device = engine.device.take_timeline()
            host.detach()
            if not suspended:
                engine.resume()
        recording = Recording(engine.model_name, _device_name(engine), start_ns, host, device, [])
        events, summary = trace_events(recording)
        try:
            path.write_text(json.dumps({"traceEvents": events}))
        except OSError as error:
            raise RequestError(f"path={str(path)!r} cannot be written: {error}") from None
        return {"path": str(path), "steps": counter.seen, "overlapped": summary.overlapped}


def _device_name(engine: DynamicInferenceEngine) -> str:
    device = engine.device.torch_device
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"a thread of the CPU ({platform.machine()})"


class _StepCounter:
    """An observer that waits for a number of steps."""

    def __init__(self, steps: int) -> None:
        self.done = threading.Event()
        self.seen = 0
        self._steps = steps

    def on_commit(self, report: StepReport) -> None:
        """A step was committed."""
        self.seen += 1
        if self.seen >= self._steps:
            self.done.set()


CONTROLS: dict[str, Callable[..., dict[str, Any]]] = {
    method.__name__: method
    for method in (
        Controls.suspend,
        Controls.pause,
        Controls.resume,
        Controls.drain,
        Controls.weights,
        Controls.reset_prefix_cache,
        Controls.check_idle,
        Controls.live,
        Controls.profile,
    )
}
"""By their names; ``info`` is answered without a thread."""
