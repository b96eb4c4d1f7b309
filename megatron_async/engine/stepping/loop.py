"""The loop: one for serial and asynchronous decoding."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from megatron_async.engine.commands import (
    AbortRequest,
    AddRequest,
    Command,
    CommandQueue,
    EvictRequest,
    PauseRequest,
    Reset,
    ResetPrefixCache,
    Resume,
    ResumeRequest,
    Suspend,
    UpdateSamplingParams,
    UpdateWeights,
)
from megatron_async.engine.metrics import (
    EngineCounters,
    GuidedRow,
    Idle,
    NotOverlapped,
    Observers,
)
from megatron_async.engine.recording import Recorder
from megatron_async.engine.requests.guidance import Guidance
from megatron_async.engine.requests.output_processor import OutputProcessor
from megatron_async.engine.requests.request_validation import RequestValidator
from megatron_async.errors import (
    EngineStoppedError,
    EngineThreadError,
    IntegrityError,
    ReentrantCallError,
)
from megatron_async.request.request import StepReport
from megatron_async.runner.model_runner import ModelRunner
from megatron_async.sampling_params import SamplingParams
from megatron_async.scheduler.request_state import Sequence
from megatron_async.scheduler.scheduler import Scheduler
from megatron_async.step.extras import GrammarTable
from megatron_async.step.plan import Plan, Ticket
from megatron_async.step.records import StepResult

if TYPE_CHECKING:
    from megatron_async.engine.stepping.late_planning import LatePlanning

logger = logging.getLogger(__name__)

NO_TICKET = -1


class DecodeLoop:
    """Applies commands, plans, launches and commits; ``depth`` 0 is serial decoding. Of several
    micro-batches the steps of others are in flight besides.

    Commands are applied in order before a plan, so that decisions depend on ticket numbers and not
    on when somebody called. The caller holds the engine's step lock.

    Args:
        on_interrupt: called with an error that interrupted a wait, after which nothing is lost.

    Attributes:
        late_planning: what waits before plans; None plans at once.
        suspended: nothing is launched.
        steps_run: how often :meth:`step` was called.
        recorder: where commands are written as they are applied; None for nowhere.
    """

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        outputs: OutputProcessor,
        guidance: Guidance,
        validator: RequestValidator,
        on_interrupt: Callable[[BaseException], None],
        *,
        depth: int,
        late_planning: LatePlanning | None,
        logging_interval: int,
        debug: bool,
    ) -> None:
        self.depth = depth
        self.late_planning = late_planning
        self.suspended = False
        self.steps_run = 0
        self.recorder: Recorder | None = None
        self.commands = CommandQueue()
        self.counters = EngineCounters()
        self._runner = runner
        self._scheduler = scheduler
        self._outputs = outputs
        self._guidance = guidance
        self._validator = validator
        self._on_interrupt = on_interrupt
        self._logging_interval = logging_interval
        self._debug = debug
        self._in_flight: deque[Ticket] = deque()
        self._updated: list[tuple[int, SamplingParams]] = []
        """New sampling parameters whose control has not been launched."""
        self._plans_without_rows = 0
        """In a row, with nothing in flight and a request that is not paused."""
        self._prepared: Ticket | None = None
        """The last one that has what guides its rows."""
        self._logged_at = 0
        self._new_scales: bool | None = None
        """Scales of an FP8 cache are to be chosen before tokens are computed with new weights; True
        takes those that came with these. None keeps what is there."""
        self._observers = Observers()
        self._observed: list[Any] = []
        self._bind()

    # --- a step -------------------------------------------------------------------------------

    def wait_for_requests(self) -> None:
        """Return when it is time for the next :meth:`step`, if plans are to be late. What
        interrupts the wait has changed nothing."""
        if self.late_planning is None or not len(self._in_flight) == self.depth > 0:
            return
        try:
            self.late_planning.wait(self._in_flight[0])
        except BaseException as error:
            self._on_interrupt(error)
            raise

    def step(self) -> None:
        """Launch a step, then commit what is in flight beyond ``depth``; depth 0 is serial."""
        while len(self._in_flight) > self.depth + self._scheduler.others:  # an interrupted wait
            self._commit_oldest(None)
        if self.commands.waiting:
            self.apply_commands()
        self.steps_run += 1
        if self.suspended:
            self._publish_events()
            return
        if self._logging_interval or self._scheduler.table.guided or self._new_scales is not None:
            self._before_plan()
        plan = self._plan()
        self._publish_events()
        if plan is not None:
            pending = self._runner.pending
            self._in_flight.append(self._launch(plan))
            self._launched(plan, pending)
        elif not self._in_flight:
            self._check_progress()
        # With nothing to launch the oldest step is taken: its commit is what makes room.
        allowed = self.depth + self._scheduler.others if plan else max(len(self._in_flight) - 1, 0)
        while len(self._in_flight) > allowed:
            self._commit_oldest(None)

    def _launched(self, plan: Plan, sampled: Ticket | None) -> None:
        """``sampled`` is the ticket whose logits this launch samples, if not its own: changed
        sampling parameters hold from there on."""
        self._plans_without_rows = 0
        self.counters.launched(plan, len(self._scheduler.table.waiting.items))
        self._outputs.launched(plan)
        if self._scheduler.left_out:
            self.counters.guided_rows[GuidedRow.SAT_OUT.value] += self._scheduler.left_out
        if self._updated:
            first = plan.number if sampled is None else sampled.number
            for key, params in self._updated:
                if self._outputs.is_live(key):
                    self._outputs.resampled(key, params, first)
            self._updated.clear()
        for on_launch in self._observers.on_launch:
            on_launch(plan)

    def _check_progress(self) -> None:
        """A plan has found nothing to launch, and no commit will make room. Each such plan evicts a
        request, so that a later one finds rows.

        Raises:
            IntegrityError: none did. An engine that went on would wait for ever.
        """
        if not self._scheduler.can_go_on:
            self._plans_without_rows = 0
            return
        self._plans_without_rows += 1
        if self._plans_without_rows > self._scheduler.unfinished_count + 1:
            raise IntegrityError(
                f"{self._scheduler.unfinished_count} requests have not ended, not all of them are "
                "paused, nothing is in flight, and no step can be planned"
            )

    def _before_plan(self) -> None:
        """What is not needed in every step: scales for new weights, the log, and what guides
        requests.

        The S that the next launch brings needs all tokens before those of a guided request, so what
        the step stands on whose logits it samples is committed. Its forward goes on. Of rows that
        sit launches out these tokens are committed as a rule.
        """
        if self._new_scales is not None:
            self._choose_scales()
        if self._logging_interval:
            self._log_step()
        if not self._scheduler.table.guided:
            return
        pending = self._runner.pending
        if pending is None:
            return
        sits_out = self._scheduler.limits.guided_lag is not None
        after = self._scheduler.guided_after if sits_out else pending.plan.after
        while self._in_flight[0].number <= after:
            self._commit_oldest(None)
        if self._guidance.has_processors(pending.plan):
            self.drain(NotOverlapped.LOGITS_PROCESSOR)
        else:
            self._guide(pending)

    def _choose_scales(self) -> None:
        """Choose the scales of an FP8 cache, once for all updates since the last launch. Nothing
        has been launched since, so nothing is in flight or in the cache. What interrupts it has
        changed nothing: they are chosen again. Ranks that have begun it together cannot."""
        if self._new_scales is None or not self._scheduler.can_go_on:
            return
        try:
            self._runner.choose_scales(stored=self._new_scales)
            self._new_scales = None
        except BaseException as error:
            if not self._runner.launching and not self._is_of_device(error):
                self._on_interrupt(error)
            raise

    def _guide(self, pending: Ticket) -> None:
        """Prepare what S of the pending ticket needs of the grammars and functions that guide its
        rows. What interrupts it before S is launched has changed nothing: masks are written, and
        functions called, again."""
        if self._prepared is pending:
            return
        try:
            self._scheduler.foresee(self._guidance.prepare(pending))
            self._prepared = pending
        except BaseException as error:
            launched = self._runner.pending is not pending or self._runner.launching
            if not launched and not self._is_of_device(error):
                self._on_interrupt(error)
            raise

    def drain(self, reason: NotOverlapped) -> None:
        """Commit all that is in flight: a barrier. The chain goes on with the next step."""
        self.counters.barriers += 1
        while self._in_flight:
            self._commit_oldest(reason)

    def _commit_oldest(self, barrier: NotOverlapped | None) -> None:
        """Take the tokens of the oldest step in flight, as soon as they are there.

        What interrupts the wait, such as Ctrl-C, leaves the step in flight, and nothing is lost.
        """
        ticket = self._in_flight[0]
        if ticket.plan.extended and self._runner.pending is ticket:
            self._guide(ticket)
        waited = self._runner.wait_ns
        try:
            result = self._runner.take(ticket)
        except BaseException as error:
            if not self._is_of_device(error) and self._runner.put_back(ticket):
                self._on_interrupt(error)
            raise
        self._in_flight.popleft()
        if self.late_planning is not None:
            waited = self._runner.wait_ns - waited
            self.late_planning.taken(ticket, waited, followed=bool(self._in_flight))
        started = time.perf_counter_ns()
        self._commit(ticket, result, barrier)
        if self._observers.on_span:
            self._observers.span("commit", ticket.number, started, time.perf_counter_ns())

    def _is_of_device(self, error: BaseException) -> bool:
        """Devices fail with a ``RuntimeError``, or on a CPU with what the model raised. What an
        engine refuses a handler is one too, and is not theirs."""
        if error is self._runner.device.failure:
            return True
        refused = (ReentrantCallError, EngineThreadError, EngineStoppedError)
        return isinstance(error, RuntimeError) and not isinstance(error, refused)

    def _commit(self, ticket: Ticket, result: StepResult, barrier: NotOverlapped | None) -> None:
        if self._guidance.keys:
            self._guidance.count(ticket.plan, self.counters)
        commit = self._scheduler.commit(ticket.plan, result)
        if self._guidance.keys:
            self._guidance.explain(commit.reasons)
        depth = len(self._in_flight) - self._scheduler.others
        if not 0 <= depth <= self.depth:
            depth = min(max(depth, 0), self.depth)
        reason = None if depth else self._not_overlapped(barrier).value
        discarded = commit.tokens.count(())
        committed = sum(map(len, commit.tokens))
        drafted, windows = 0, ticket.plan.rows.windows
        if windows:
            rows = commit.tokens[: ticket.plan.decode_rows]
            drafted = self.counters.verified(rows, windows)
            self._outputs.verified(commit.keys, rows, windows)
        report = StepReport(
            ticket=ticket.number,
            effective_depth=depth,
            overlapped=depth > 0,
            reason=reason,
            committed=committed,
            discarded=discarded,
            drafted=drafted,
            accepted=committed + discarded - len(commit.keys),
        )
        self.counters.committed(report)
        if result.routes is not None:
            self._outputs.take_routes(ticket.plan, commit, result.routes)
        if result.hidden_states is not None:
            self._outputs.take_hidden_states(ticket.plan, result.hidden_states)
        self._output(commit, report)
        self._publish_events()
        for on_commit in self._observers.on_commit:
            on_commit(report)

    def _publish_events(self) -> None:
        """Publish what the scheduler did besides tokens. Before a launch: in debug mode garbage
        goes into freed blocks ahead, in stream order, of the step that may use them again."""
        if self._debug:
            self._scheduler.check()
        if not self._scheduler.table.has_news:
            return
        events = self._scheduler.table.take_events()
        self.counters.record_events(events)
        self._outputs.record_events(events)
        retired, blocks, slots = self._scheduler.table.take_retired()
        if retired:
            self._outputs.close(retired)
            if self._guidance.keys:
                self._guidance.close(retired)
        if self._debug:
            self._runner.poison_freed(blocks, slots)

    def _not_overlapped(self, barrier: NotOverlapped | None) -> NotOverlapped:
        if self.depth == 0:
            return NotOverlapped.SERIAL
        if barrier is not None:
            return barrier
        if self._scheduler.is_short:
            return NotOverlapped.NO_CAPACITY
        return NotOverlapped.PAUSED if self._scheduler.has_unfinished else NotOverlapped.DRAINED

    def _log_step(self) -> None:
        launched = self.counters.steps_launched
        if launched % self._logging_interval or launched == self._logged_at:
            return
        self._logged_at = launched
        self.drain(NotOverlapped.LOGGED)
        counters = self.counters
        logger.info(
            "step %d: %d tokens committed, %d discarded, %d of %d drafts accepted, %d of %d steps "
            "overlapped, %d requests waiting, %d of %d blocks free",
            launched,
            counters.tokens_committed,
            counters.tokens_discarded,
            counters.tokens_accepted,
            counters.tokens_drafted,
            counters.steps_overlapped,
            counters.steps_committed,
            self._scheduler.waiting_count,
            self._scheduler.allocator.free_count,
            self._scheduler.limits.block_count,
        )

    # --- what is asked of it ------------------------------------------------------------------

    def apply_commands(self) -> None:
        """Do what users have asked for, in order."""
        self._plans_without_rows = 0
        while (command := self.commands.take()) is not None:
            if isinstance(command, AddRequest) and command.automaton:
                command = self._guidance.settled(command, may_open=not self.suspended)
            self._note(command)
            self._apply(command)

    def _note(self, command: Command) -> None:
        if self.recorder is not None:
            self.recorder.applied(command, self.steps_run, self._scheduler)

    def _apply(self, command: Command) -> None:
        scheduler, outputs = self._scheduler, self._outputs
        match command:
            case AddRequest(key=key) if outputs.knows(key):
                drafts = command.params["num_speculative_tokens"]
                if key in self._guidance.keys:
                    drafts = self._guidance.most_drafts(key, drafts)
                scheduler.add(self._sequence(command), command.priority, drafts)
            case AbortRequest(key=key):
                if scheduler.abort(key):
                    outputs.abort(key)
            case PauseRequest(key=key):
                scheduler.pause(key)
            case ResumeRequest(key=key):
                scheduler.resume(key)
            case EvictRequest(key=key):
                scheduler.evict(key)
            case UpdateSamplingParams(key=key, changes=changes) if outputs.is_live(key):
                request_id, params = outputs.change_sampling(key, changes, self._validator.seed)
                values = self._validator.values(request_id, params)
                drafts = params.num_speculative_tokens
                if key in self._guidance.keys:
                    drafts = self._guidance.most_drafts(key, drafts)
                if scheduler.update_values(key, values, drafts):
                    self._updated.append((key, params))

    def _sequence(self, command: AddRequest) -> Sequence:
        hidden = command.params["prompt_hidden_states"]
        return Sequence(
            command.key,
            command.tokens,
            command.max_new,
            command.stop_ids,
            command.values,
            extras=self._validator.extras_of(command),
            prompt_log_probs=command.prompt_log_probs,
            watched=command.key in self._outputs.ends.watchers,
            fork_of=command.fork_of,
            cache_salt=command.params["cache_salt"],
            hidden_layers=self._validator.layers_of(hidden) if hidden else (),
            grammar=self._grammar_of(command.key) if command.key in self._guidance.keys else None,
        )

    def _grammar_of(self, key: int) -> GrammarTable | None:
        """What may guide a request on the device. The first one brings the pool of the others."""
        grammar = self._guidance.grammar_of(key)
        if grammar is not None and self._scheduler.table.automata is None:
            from megatron_async.cache.automaton_space import AutomatonSpace

            self._scheduler.table.automata = AutomatonSpace(self._guidance.automaton_states)
        return grammar

    def suspend(self) -> None:
        """Commit what is in flight and launch nothing until :meth:`resume`."""
        self.apply_commands()
        self._note(Suspend())
        self.drain(NotOverlapped.SUSPENDED)
        self.suspended = True

    def resume(self) -> None:
        """Go on after :meth:`suspend`."""
        self.apply_commands()
        self._note(Resume())
        self.suspended = False

    def give_up_cache(self) -> None:
        """Evict all requests and forget all cached prefixes; nothing may be in flight."""
        for key in self._outputs.keys.values():
            self._note(EvictRequest(key))
        self._scheduler.evict_all()
        self.reset_prefix_cache()

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes; what is in flight goes on."""
        self.apply_commands()
        self._note(ResetPrefixCache())
        self._scheduler.table.forget_prefixes()
        self._publish_events()

    def reset(self) -> None:
        """Abort every request, commit what is in flight, and start the counters anew."""
        self.apply_commands()
        self._note(Reset())
        self.suspended = False
        for key in list(self._outputs.keys.values()):
            self._apply(AbortRequest(key))
        self.drain(NotOverlapped.RESET)
        self._publish_events()
        self._outputs.take()
        self._scheduler.check_idle()
        self._scheduler.table.forget_prefixes()
        self.counters = EngineCounters()
        self.counters.weights_changed(self._outputs.weight_version)
        self._logged_at = 0
        self._runner.wait_ns = 0

    def adopt_weights(
        self,
        source: str | None,
        *,
        recompute_kv_cache: bool,
        cache_scales: bool = False,
        restarted: Callable[[int], bool] | None = None,
    ) -> None:
        """The weights are new: what the old ones computed is not used for new prompts again, and
        with ``recompute_kv_cache`` not for running requests either, nor are log-probabilities of a
        prompt whose request has generated nothing. Those whose key is
        ``restarted`` begin again behind their prompts. If nobody has anything in an FP8 cache, its
        scales are chosen anew before the next launch, with ``cache_scales`` those that came with
        the weights: an update may come in several parts, and no scale is of some of them."""
        self._note(UpdateWeights(source, recompute_kv_cache, restarted is not None))
        if restarted is not None:
            for key in list(self._outputs.keys.values()):
                if restarted(key) and self._scheduler.restart(key):
                    stop_ids = self._outputs.restart(key)
                    watcher = self._guidance.restart(key, tuple(sorted(stop_ids)))
                    if watcher is not None:
                        self._outputs.ends.watch(key, watcher)
        if recompute_kv_cache:
            self._scheduler.evict_all()
            for key in self._scheduler.begin_prompts_anew():
                self._outputs.begin_prompt_anew(key)
        self._scheduler.table.forget_prefixes()
        if not self._scheduler.table.keeps_anything:
            self._new_scales = cache_scales
        self._scheduler.weights_changed()
        self._publish_events()
        self._outputs.weight_version += 1
        self.counters.weights_changed(self._outputs.weight_version)

    # --- what others may know -----------------------------------------------------------------

    @property
    def in_flight_count(self) -> int:
        """Steps whose tokens the host has not taken."""
        return len(self._in_flight)

    @property
    def has_work(self) -> bool:
        """A request has not ended, or a command or a step in flight is left."""
        return bool(self.commands.waiting or self._in_flight or self._scheduler.has_unfinished)

    def is_idle(self) -> bool:
        """Nothing can go on until somebody asks for something, for one of the reasons that
        :class:`Idle` names."""
        return self.idle_reason is not None

    @property
    def idle_reason(self) -> Idle | None:
        """Why nothing can go on; None if a step can do something.

        It follows from the state of the requests alone: no plan is asked, and none is remembered,
        so the answer is never older than the last change. The thread that changes it wakes all
        waiters.
        """
        if self._in_flight or self.commands.waiting:
            return None
        if self.suspended:
            return Idle.SUSPENDED
        if self._scheduler.can_go_on:
            return None
        return Idle.PAUSED if self._scheduler.has_unfinished else Idle.NO_REQUEST

    def observe(self, observer: Any) -> None:
        """Report the host's work to ``observer`` from the next step on."""
        self._observed.append(observer)
        self._bind()

    def forget_observer(self, observer: Any) -> None:
        """Take :meth:`observe` back."""
        self._observed = [each for each in self._observed if each is not observer]
        self._bind()

    def _bind(self) -> None:
        """The calls that a step is made of, timed if somebody observes them."""
        self._observers = observers = Observers.of(self._observed)
        self._runner.observe(observers.span if observers.on_span else None)
        self._plan = observers.timed(
            "plan", self._scheduler.plan, lambda _, plan: NO_TICKET if plan is None else plan.number
        )
        self._launch = observers.timed(
            "launch", self._runner.launch, lambda args, _: int(args[0].number)
        )
        self._output = observers.timed(
            "output", self._outputs.commit, lambda args, _: int(args[1].ticket)
        )
