"""A trace of the next steps of an engine that serves."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.errors import BusyError, RequestError
from megatron_async.perfetto.events import trace_events
from megatron_async.perfetto.recorder import StepRecorder
from megatron_async.request.request import StepReport
from megatron_async.serving.engine_side.control_threads import Call
from megatron_async.serving.engine_side.live_steps import LiveSteps

MAX_PROFILED_STEPS = 10_000


class Profiler:
    """Takes one profile at a time. ``live`` steps are set aside meanwhile."""

    def __init__(self, engine: DynamicInferenceEngine, live: LiveSteps) -> None:
        self._engine = engine
        self._live = live
        self._profiling = threading.Lock()

    def take(self, call: Call, path: str, steps: int, timeout: float | None) -> dict[str, Any]:
        """Write what host and device do in the next steps, as a trace for Perfetto.

        Args:
            call: which ends it when it is cancelled.
            path: of the file to write, in the engine process's file system.
            steps: to record; fewer when they do not come within ``timeout`` seconds.

        Raises:
            BusyError: another one is taken.
            RequestError: it cannot be taken so, or be written, or nobody waits for it any more.
        """
        if not isinstance(steps, int) or not 0 < steps <= MAX_PROFILED_STEPS:
            raise RequestError(f"steps={steps!r} must be an integer from 1 to {MAX_PROFILED_STEPS}")
        if not self._profiling.acquire(blocking=False):
            raise BusyError("another profile is being taken; wait for it")
        try:
            with self._live.set_aside():
                return self._take(call, Path(path), steps, timeout)
        finally:
            self._profiling.release()

    def _take(self, call: Call, path: Path, steps: int, timeout: float | None) -> dict[str, Any]:
        engine = self._engine
        counter = _StepCounter(steps, call.wake)
        with engine.lock.gate, engine.lock.mutex:  # between two steps
            recorder = StepRecorder(engine)
        start_ns = time.perf_counter_ns()
        forget = engine.observe(counter)
        try:
            call.wake.wait(timeout)
        finally:
            forget()
            suspended = engine.suspended
            engine.suspend()  # what is in flight is shown to its end
            try:
                recording = recorder.take(engine.model_name, start_ns)
            finally:
                if not suspended:
                    engine.resume()
        if call.is_cancelled:
            raise RequestError("nobody waits for the profile any more")
        events, summary = trace_events(recording)
        try:
            path.write_text(json.dumps({"traceEvents": events}))
        except OSError as error:
            raise RequestError(f"path={str(path)!r} cannot be written: {error}") from None
        return {"path": str(path), "steps": counter.seen, "overlapped": summary.overlapped}


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
