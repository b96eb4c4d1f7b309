"""Requests whose S needs all tokens before: grammars give it masks, Python functions its logits."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from megatron_async.engine.commands import AddRequest
from megatron_async.engine.metrics import EngineCounters, GuidedRow, HostMasks
from megatron_async.errors import ModelOutputError, RequestError
from megatron_async.request.request import (
    DynamicInferenceEventType,
    DynamicInferenceRequest,
    FinishReason,
)
from megatron_async.runner.model_runner import ModelRunner
from megatron_async.runner.step_program import RowProcessor
from megatron_async.sampling_params import SamplingParams
from megatron_async.step.plan import Guess, Plan, Ticket

if TYPE_CHECKING:
    from megatron_async.engine.grammar_tables import GrammarTables
    from megatron_async.grammar.automata.table import TokenAutomaton
    from megatron_async.grammar.compiler import CompiledGrammar, GrammarCompiler
    from megatron_async.grammar.matcher import Follows
    from megatron_async.grammar.spec import StructuredOutputs
    from megatron_async.grammar.tables.kept import KeptAutomata
    from megatron_async.grammar.windows import Runs, Window, WindowMasks
    from megatron_async.scheduler.request_state import Sequence as ScheduledSequence
    from megatron_async.step.extras import GrammarTable

logger = logging.getLogger(__name__)

LogitsProcessor = Callable[[list[int], torch.Tensor], torch.Tensor]
"""From a request's token ids so far and its logits ``[vocabulary]`` to other logits."""


class Grammars:
    """Compiles what structured outputs conform to, in the threads of the callers that ask.

    Args:
        tokenizer: the model's, or None.
        vocab_size: of the model.
        automata_bytes: of the device's pool of token automata; 0 where there is none.
        at_once: their tables are made where grammars are compiled, and not in the background.
    """

    def __init__(
        self, tokenizer: Any, vocab_size: int, automata_bytes: int = 0, *, at_once: bool = False
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._at_once = at_once
        self.automata_bytes = automata_bytes
        self._compiler: list[GrammarCompiler] = []
        self._windows: list[WindowMasks] = []
        self._automata: list[KeptAutomata] = []

    def compile(self, structured_outputs: Any) -> None:
        """Compile a ``StructuredOutputs``, or a dict of its fields, so that it is found when the
        request is opened.

        Raises:
            RequestError: it cannot be compiled; says what to change.
        """
        spec, grammar = self.compiled(structured_outputs)
        if self.automata_bytes and self._at_once:
            self.automata.of(spec, grammar)

    def compiled(self, structured_outputs: Any) -> tuple[StructuredOutputs, CompiledGrammar]:
        """What a text conforms to, and its grammar: see :meth:`compile`.

        Raises:
            RequestError: it cannot be compiled; says what to change.
        """
        from megatron_async.grammar.compiler import GrammarCompiler
        from megatron_async.grammar.spec import StructuredOutputs

        spec = StructuredOutputs.from_any(structured_outputs)
        if self._tokenizer is None:
            raise RequestError(
                "structured_outputs needs a tokenizer, and the model has none; leave it out"
            )
        if not self._compiler:
            # Without a lock, which a signal's handler would wait for: two may be made, and the
            # first is used.
            self._compiler.append(GrammarCompiler(self._tokenizer, self._vocab_size))
        return spec, self._compiler[0].compile(spec)

    @property
    def automata(self) -> KeptAutomata:
        """The token automata of grammars; one has been compiled."""
        if not self._automata:
            from megatron_async.grammar.tables.background import make_in_background
            from megatron_async.grammar.tables.kept import KeptAutomata

            kept = KeptAutomata(self.automata_bytes)
            if not self._at_once:
                make_in_background(kept, self._compiler[0], self.automata_bytes)
            self._automata.append(kept)
        return self._automata[0]

    def close(self) -> None:
        """Make no more tables."""
        for automata in self._automata:
            automata.close()

    def token_bytes(self) -> Sequence[bytes]:
        """What each token adds to a text; a grammar has been compiled."""
        return self._compiler[0].masks(()).later_bytes

    @property
    def windows(self) -> WindowMasks:
        """What makes the masks of a step, in the thread that steps."""
        if not self._windows:
            from megatron_async.grammar.windows import WindowMasks

            self._windows.append(WindowMasks(self._vocab_size))
        return self._windows[0]

    @property
    def new_window(self) -> Callable[[Any], Window]:
        """Makes a window of all its fields."""
        from megatron_async.grammar.windows import Window

        return Window._make


class Guidance:
    """Grammars and logits processors of live requests, by scheduler key.

    Args:
        sequences: those of the scheduler, by key.
        drafts: rows that a grammar guides may have some.
        without: why there are no automata, in an engine that has none.

    Attributes:
        keys: of the requests that have some.
    """

    def __init__(
        self,
        runner: ModelRunner,
        grammars: Grammars,
        sequences: Mapping[int, ScheduledSequence],
        *,
        drafts: bool = True,
        without: HostMasks = HostMasks.OFF,
    ) -> None:
        self.keys: set[int] = set()
        self._sequences = sequences
        self._without = without
        self._tables: list[GrammarTables] = []
        self._compiled: dict[int, tuple[Any, CompiledGrammar]] = {}
        """What a text conforms to, and its grammar."""
        self._automata: dict[int, TokenAutomaton | str] = {}
        """The automata of requests whose commands have not been applied."""
        self._reasons: dict[int, str] = {}
        """Why a request cannot be guided by an automaton."""
        self._drafts = drafts
        self._runner = runner
        self._grammars = grammars
        self._matchers: dict[int, tuple[DynamicInferenceRequest, Follows]] = {}
        self._processors: dict[int, tuple[DynamicInferenceRequest, Sequence[LogitsProcessor]]] = {}

    def decided(self, command: AddRequest, params: SamplingParams) -> AddRequest:
        """The command of a new request, with whether an automaton guides it: where the table of its
        grammar is there now. This is the one place where that depends on when it was made."""
        grammars, outputs = self._grammars, params.structured_outputs
        if outputs is None or not grammars.automata_bytes:
            return command
        found = grammars.automata.wanted(*grammars.compiled(outputs))
        return msgspec.structs.replace(command, automaton=not isinstance(found, str))

    def settled(self, command: AddRequest, *, may_open: bool) -> AddRequest:
        """A command that is about to be applied, as it is recorded: an automaton guides no request
        where the device has no room for a pool.

        Args:
            may_open: a pool may be allocated; an engine that sleeps has lent the memory.
        """
        found = self._automata.get(command.key)
        if found is None:
            return command
        if not isinstance(found, str) and self._tables_of_all.has_pool(may_open=may_open):
            return command
        if not isinstance(found, str):
            self._automata[command.key] = HostMasks.POOL.value
        return msgspec.structs.replace(command, automaton=False)

    def open(self, command: AddRequest, request: DynamicInferenceRequest) -> GrammarEnd | None:
        """Guide a request as its sampling parameters say, if they do, and by an automaton as its
        command says. Returns what follows its grammar along its tokens. From any thread."""
        key = command.key
        params = request.sampling_params
        if params.logits_processors or params.structured_outputs is not None:
            self.keys.add(key)
        if params.logits_processors:
            self._processors[key] = request, params.logits_processors
        if params.structured_outputs is None:
            return None
        spec, grammar = self._compiled[key] = self._grammars.compiled(params.structured_outputs)
        if self._grammars.automata_bytes:
            self._automata[key] = self._automaton(command, spec, grammar)
        return self._follow(key, request, grammar, command.stop_ids)

    def _automaton(
        self, command: AddRequest, spec: StructuredOutputs, grammar: CompiledGrammar
    ) -> TokenAutomaton | str:
        """What guides a request, or why the host does. A recorded one has waited for its table: it
        is made here if it is not there."""
        if command.automaton is not False:
            return self._grammars.automata.of(spec, grammar)
        found = self._grammars.automata.find(spec)
        return found if isinstance(found, str) else HostMasks.LATER.value

    def restart(self, key: int, stop_ids: tuple[int, ...]) -> GrammarEnd | None:
        """The request begins again; returns as :meth:`open`."""
        guided = self._matchers.get(key)
        if guided is None:
            return None
        return self._follow(key, guided[0], self._compiled[key][1], stop_ids)

    def _follow(
        self,
        key: int,
        request: DynamicInferenceRequest,
        grammar: CompiledGrammar,
        stop_ids: tuple[int, ...],
    ) -> GrammarEnd:
        matcher = grammar.matcher(stop_ids)
        self._matchers[key] = request, matcher
        return GrammarEnd(matcher, ends_by_itself=not stop_ids)

    def close(self, keys: Iterable[int]) -> None:
        """The last tickets of these requests have retired."""
        for key in keys:
            self.keys.discard(key)
            self._matchers.pop(key, None)
            self._processors.pop(key, None)
            self._compiled.pop(key, None)
            self._automata.pop(key, None)
            self._reasons.pop(key, None)
            for tables in self._tables:
                tables.close(key)

    def most_drafts(self, key: int, asked: int | None) -> int | None:
        """How many drafts a row of a request may have that ``asked`` for some: Python functions see
        the logits of one position."""
        has_none = key in self._processors or (key in self._matchers and not self._drafts)
        return 0 if has_none else asked

    def explain(self, reasons: Mapping[int, FinishReason]) -> None:
        """Say why, in the records of requests that end since no token can come, where it is their
        grammar's fault. Their tokens have been taken."""
        for key, reason in reasons.items():
            guided = self._matchers.get(key)
            if reason is not FinishReason.ERROR or guided is None:
                continue
            request, matcher = guided
            error = _why_nothing_may_come(matcher)
            if error is not None:
                failure = ModelOutputError(f"structured_outputs allows no further token: {error}")
                request.add_event(DynamicInferenceEventType.ERROR_NONTRANSIENT, failure)

    def grammar_of(self, key: int) -> GrammarTable | None:
        """The automaton that may guide a request on the device; None if there is none. For requests
        in the order of their commands."""
        if key not in self._compiled:
            return None
        automaton = self._automata.pop(key, self._without.value)
        if key in self._processors:
            automaton = HostMasks.PROCESSOR.value
        found = self._tables_of_all.open(key, self._compiled[key][0], automaton)
        if isinstance(found, str):
            self._reasons[key] = found
            return None
        return found

    @property
    def _tables_of_all(self) -> GrammarTables:
        """In the thread that steps."""
        if not self._tables:
            from megatron_async.engine.grammar_tables import GrammarTables

            grammars = self._grammars
            tables = GrammarTables(self._runner, grammars.automata_bytes, grammars.token_bytes)
            self._tables.append(tables)
        return self._tables[0]

    @property
    def automaton_states(self) -> int:
        """How many states the device's pool of automata holds, once there is one."""
        return (self._tables[0].capacity or 0) if self._tables else 0

    def count(self, plan: Plan, counters: EngineCounters) -> None:
        """Count how each sampled row of a plan that is guided gets what its S needs, before the
        plan's ticket retires."""
        windows = plan.rows.windows or (1,) * len(plan.rows)
        for key, window in plan.sampled(list(zip(plan.rows.keys, windows, strict=True))):
            if key in self._processors:
                way = GuidedRow.PROCESSOR
            elif key not in self._matchers:
                continue
            elif self._sequences[key].automaton is not None:
                way = GuidedRow.AUTOMATON
            else:
                way = GuidedRow.WINDOW if window > 1 else GuidedRow.TOKEN
            counters.guided_rows[way.value] += 1
            if key in self._matchers and way is not GuidedRow.AUTOMATON:
                counters.host_masks[self._reasons.get(key, HostMasks.FULL.value)] += 1

    def has_processors(self, plan: Plan) -> bool:
        """Some row of a plan goes through Python functions."""
        return not self._processors.keys().isdisjoint(plan.rows.keys)

    def prepare(self, ticket: Ticket) -> dict[int, int]:
        """Write masks for the S of the pending ``ticket``, once all earlier tokens of its rows are
        taken, and launch it where Python functions come first. Returns how many drafts of the next
        row of each request that a grammar guides are guessed."""
        guessed: dict[int, int] = {}
        if not self._waits(ticket.plan):
            return guessed
        masks, masked = self._runner.claim_masks(ticket)
        drafts = self._runner.take_drafts(ticket)
        plan, rows = ticket.plan, ticket.plan.rows
        processors: dict[int, RowProcessor] = {}
        guided: list[int] = []
        windows: list[Window] = []
        new_window = self._grammars.new_window
        guesses_any = self._runner.takes_guesses and self._drafts
        for row, key in plan.sampled(list(enumerate(rows.keys))):
            if key in self._matchers and self._sequences[key].waits:
                at, window = row * plan.window, rows.windows[row] if rows.windows else 1
                ahead = [] if drafts is None else drafts[rows.slots[row], : window - 1].tolist()
                request, matcher = self._matchers[key]
                # Where the request's rows may have drafts.
                guesses = guesses_any and request.sampling_params.num_speculative_tokens != 0
                end = at + window
                guided.append(row)
                windows.append(new_window((matcher, ahead, masks[at:end], masked[at:end], guesses)))
            if key in self._processors:
                processors[row] = partial(_process, *self._processors[key])
        known: list[Guess] = []
        for row, runs in zip(guided, self._fill(windows), strict=True):
            key = rows.keys[row]
            guessed[key] = max(map(len, runs)) - 1 if any(runs) else 0
            if guessed[key]:
                known.append(Guess(rows.slots[row], self._length(key), runs))
        if known:
            self._runner.guess(ticket, known)
        if processors:
            self._runner.process_logits(ticket, processors)
        return guessed

    def _waits(self, plan: Plan) -> bool:
        """Some row of a plan needs something of the host."""
        if not self._matchers and not self._processors:
            return False
        keys = self.keys.intersection(plan.rows.keys)
        return any(self._sequences[key].waits for key in keys)

    def _fill(self, windows: Sequence[Window]) -> list[Runs]:
        return self._grammars.windows.fill(windows) if windows else []

    def _length(self, key: int) -> int:
        """Tokens of a request, prompt included, that have been taken."""
        request, _ = self._matchers[key]
        return len(request.prompt_tokens) + len(request.generated_tokens)


class GrammarEnd:
    """Follows the tokens of a request that is guided by a grammar.

    Args:
        ends_by_itself: no token ends the request, so it ends with the last that the grammar allows.
    """

    def __init__(self, matcher: Follows, *, ends_by_itself: bool) -> None:
        self._matcher = matcher
        self._ends_by_itself = ends_by_itself

    def take(self, token: int, /) -> bool:
        """Take a token before it is committed; True if it is the last."""
        if not self._matcher.accept(token):
            return True  # no mask allows such a token
        return self._ends_by_itself and self._matcher.must_end


def _why_nothing_may_come(matcher: Follows) -> str | None:
    try:
        return matcher.error
    except Exception as raised:
        return f"{type(raised).__name__}: {raised}"


def _process(
    request: DynamicInferenceRequest, processors: Sequence[LogitsProcessor], logits: torch.Tensor
) -> torch.Tensor:
    """What a processor raises ends its request alone: NaN is what the device ends it for. Ctrl-C is
    the stepping thread's."""
    tokens = [*request.prompt_tokens, *request.generated_tokens]
    result = torch.empty_like(logits)
    try:
        for process in processors:
            processed = process(list(tokens), logits)
            if not isinstance(processed, torch.Tensor) or processed.shape != logits.shape:
                raise TypeError(
                    f"a logits processor returned {processed!r:.60} where logits of shape "
                    f"{tuple(logits.shape)} are due"
                )
            logits = processed
        return result.copy_(logits)
    except BaseException as error:
        is_main = threading.current_thread() is threading.main_thread()
        if isinstance(error, KeyboardInterrupt) and is_main:
            raise
        request.add_event(DynamicInferenceEventType.ERROR_NONTRANSIENT, error)
        logger.warning(
            "request %d ends, since a logits processor of it failed (%s: %s)",
            request.request_id,
            type(error).__name__,
            error,
        )
        return result.fill_(float("nan"))
