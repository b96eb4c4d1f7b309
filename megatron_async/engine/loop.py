"""The loop: one for serial and asynchronous decoding."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

from megatron_async.config import EngineConfig
from megatron_async.engine.metrics import EngineCounters, NotOverlapped
from megatron_async.engine.output_processor import OutputBook, TokenOutput
from megatron_async.engine.step_lock import Told, Turn
from megatron_async.errors import EngineStoppedError
from megatron_async.request import DynamicInferenceRequest
from megatron_async.runner.controller import InFlight, TextGenerationController
from megatron_async.scheduler.scheduler import Scheduler
from megatron_async.step.plan import Plan, StepResult

logger = logging.getLogger(__name__)


class DecodeLoop:
    """Plans, launches and commits steps; ``depth`` 0 is serial decoding.

    ``_inbox`` holds what users asked for since the last step, applied in order before the next
    plan, so that decisions depend on step numbers and not on when somebody called.
    """

    def __init__(
        self,
        controller: TextGenerationController,
        scheduler: Scheduler,
        book: OutputBook,
        config: EngineConfig,
    ) -> None:
        self.controller = controller
        self.scheduler = scheduler
        self.config = config
        self.depth = config.effective_depth
        self.counters = EngineCounters()
        self._book = book
        self._in_flight: deque[InFlight] = deque()
        self._inbox: deque[Callable[[], object]] = deque()
        self._outputs: list[TokenOutput] = []
        self._finished: list[DynamicInferenceRequest] = []
        self._listeners: dict[int, deque[TokenOutput]] = {}
        self._logged_at = 0
        self._no_plan = False
        self._turns = 0
        self._turn = Turn(self._fail)
        self._told = Told(book.tell)

    def _step(self) -> None:
        """Launch a step, then commit what is in flight beyond ``depth``; depth 0 is serial."""
        self._obey()
        self._commit_all_but(self.depth)  # there are more only after an interrupted wait
        plan = self.scheduler.plan()
        self._no_plan = plan is None
        self._settle()
        if plan is not None:
            self._in_flight.append(self.controller.launch(plan))
            self._launched(plan)
        # With nothing to launch the oldest step is taken: its commit is what makes room.
        allowed = self.depth if plan is not None else max(len(self._in_flight) - 1, 0)
        self._commit_all_but(allowed)

    def _drain(self, reason: NotOverlapped) -> None:
        """Commit all that is in flight: a barrier. The chain goes on with the next step."""
        self.counters.barriers += 1
        while self._in_flight:
            self._commit(*self._take(), barrier=reason)

    def _commit_all_but(self, count: int) -> None:
        while len(self._in_flight) > count:
            self._commit(*self._take())

    def _obey(self) -> None:
        """Do what users have asked for."""
        while self._inbox:
            self._inbox.popleft()()

    def _take(self) -> tuple[Plan, StepResult]:
        """The tokens of the oldest step in flight, as soon as they are there.

        What interrupts the wait, such as Ctrl-C, leaves the step in flight, and nothing is lost.
        Devices fail with a ``RuntimeError``, or on a CPU with what the model raised.
        """
        oldest = self._in_flight[0]
        self.controller.flush(oldest.ticket)
        try:
            taken = oldest.wait()
        except RuntimeError:
            raise
        except BaseException as error:
            if error is not getattr(self.controller.device, "failure", None):
                self.controller.put_back(oldest.ticket)
                self._turn.harmless = error
            raise
        self._in_flight.popleft()
        return taken

    def _commit(self, plan: Plan, result: StepResult, barrier: NotOverlapped | None = None) -> None:
        commit = self.scheduler.commit(plan, result)
        discarded = len(commit.discarded)
        kept = len(commit.keys) - discarded
        self.counters.committed(kept, discarded, self._not_overlapped(barrier))
        self._emit(*self._book.commit(commit))

    def _fail(self, error: EngineStoppedError) -> None:
        """The engine has stopped: no request will end any more."""
        self._book.fail(error)

    def _launched(self, plan: Plan) -> None:
        self.counters.launched(plan, self.scheduler.waiting_count)
        self._book.launched(plan)

    def _emit(self, outputs: list[TokenOutput], finished: list[DynamicInferenceRequest]) -> None:
        self._outputs += outputs
        self._finished += finished
        if self._listeners:
            for output in outputs:
                listener = self._listeners.get(output.request_id)
                if listener is not None:
                    listener.append(output)
        self._settle()

    def _settle(self) -> None:
        """Record what the scheduler did beside tokens. Before a launch: in debug mode garbage goes
        into freed blocks ahead, in stream order, of the step that may use them again."""
        events = self.scheduler.take_events()
        if events:
            self.counters.happened(events)
            self._book.happened(events)
        retired, blocks = self.scheduler.take_retired()
        self._book.close(retired)
        if self.config.debug:
            self.scheduler.check()
            if blocks:
                self.controller.poison_blocks(blocks)

    def _not_overlapped(self, barrier: NotOverlapped | None) -> NotOverlapped | None:
        if self._in_flight:
            return None
        if self.depth == 0:
            return NotOverlapped.SERIAL
        if barrier is not None:
            return barrier
        if self.scheduler.waiting_count or self.scheduler.stalled_count:
            return NotOverlapped.NO_CAPACITY
        return NotOverlapped.PAUSED if self.scheduler.has_unfinished else NotOverlapped.DRAINED

    def _log_step(self) -> None:
        interval = self.config.inference_logging_step_interval
        launched = self.counters.steps_launched
        if not interval or launched % interval or launched == self._logged_at:
            return
        self._logged_at = launched
        self._drain(NotOverlapped.LOGGED)
        counters = self.counters
        logger.info(
            "step %d: %d tokens committed, %d discarded, %d of %d steps overlapped, "
            "%d requests waiting, %d of %d blocks free",
            launched,
            counters.tokens_committed,
            counters.tokens_discarded,
            counters.steps_overlapped,
            counters.steps_committed,
            self.scheduler.waiting_count,
            self.scheduler.allocator.free_count,
            self.scheduler.limits.block_count,
        )
