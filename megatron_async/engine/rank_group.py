"""An engine over several ranks: what all of them give back, and what the death of one stops."""

from __future__ import annotations

from megatron_async.device.protocol import Device
from megatron_async.engine.lifecycle.sleep_mode import Memory
from megatron_async.engine.requests.output_processor import OutputProcessor
from megatron_async.engine.step_lock import StepLock
from megatron_async.engine.stepping.loop import DecodeLoop
from megatron_async.errors import CacheTooLargeError, EngineStoppedError, RankDiedError
from megatron_async.ranks import process_group
from megatron_async.ranks.group import RankGroup
from megatron_async.ranks.leader import LeadingRunner
from megatron_async.ranks.messages import Sleep, WakeUp
from megatron_async.runner.model_runner import ModelRunner


class MemoryOfRanks(Memory):
    """What engine ``engine`` can give back, on all ranks of ``group``; rank 0's is ``own``."""

    def __init__(self, own: Memory, group: RankGroup, engine: int) -> None:
        self._own, self._group, self._engine = own, group, engine

    @property
    def can_sleep(self) -> bool:
        return self._own.can_sleep

    def release(self, *, keep_weights: bool) -> None:
        self._group.tell(Sleep(self._engine, keep_weights))
        self._own.release(keep_weights=keep_weights)
        self._group.await_answers()

    def restore(self, tag: str) -> None:
        self._group.tell(WakeUp(self._engine, tag))
        failed: CacheTooLargeError | None = None
        try:
            self._own.restore(tag)
        except CacheTooLargeError as error:
            failed = error
        self._group.await_answers()
        if failed is not None:
            raise failed


LOCK_SECONDS = 5.0
"""For the thread that steps an engine over a GPU to see that a rank has died."""


class StopWhenARankDies:
    """Stops the engine that has these parts, if it does nothing then too; a thread that waits for
    its device gets the error. The engine holds it: the group forgets it with the engine.

    A thread that does not get it waits in a call of the GPU's driver for kernels which wait for the
    dead rank for ever. Then the process ends: nothing else frees the GPU.
    """

    def __init__(
        self,
        group: RankGroup,
        runner: ModelRunner,
        device: Device,
        lock: StepLock,
        outputs: OutputProcessor,
        loop: DecodeLoop,
    ) -> None:
        self._device, self._lock, self._outputs, self._loop = device, lock, outputs, loop
        if isinstance(runner, LeadingRunner):
            group.when_it_dies(runner.engine, self._died)

    def _died(self, error: RankDiedError) -> None:
        """Stop the engine; called in a thread of the group's."""
        self._device.fail(error)
        if self._device.captures and not self._steps_end():
            process_group.end_process(f"{error}; the GPU waits for it, and the engine for the GPU")
        with self._lock.gate, self._lock.mutex:
            reason = f"the engine was stopped by an error, {type(error).__name__}: {error}"
            self._lock.stop(EngineStoppedError(f"{reason}; build a new one"))
        self._outputs.resolve_futures()
        self._loop.commands.waiters.wake()

    def _steps_end(self) -> bool:
        """Whether the thread that steps the engine, if one does, comes out of its step."""
        held = []
        for lock in (self._lock.gate, self._lock.mutex):
            if lock.acquire(timeout=LOCK_SECONDS):
                held.append(lock)
        for lock in held:
            lock.release()
        return len(held) == 2
