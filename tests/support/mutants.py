"""Faults that a decode engine with steps in flight can have, each as a context manager.

A mutant patches methods of the real classes while it is active; the product knows nothing of it.
``tests/unit/test_mutants.py`` shows that the normal checks catch each of them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from megatron_async.cache.automaton_space import AutomatonSpace
from megatron_async.cache.block_allocator import BlockAllocator
from megatron_async.cache.prefix_cache import ROOT, PrefixCache
from megatron_async.cache.state_snapshots import StateSnapshots
from megatron_async.device.cpu import CpuDevice, CpuPacketRing, CpuResultRing
from megatron_async.engine.metrics import HostMasks, NotOverlapped
from megatron_async.engine.requests.guidance import Guidance
from megatron_async.engine.stepping.loop import DecodeLoop
from megatron_async.errors import IntegrityError
from megatron_async.grammar.windows import WindowMasks
from megatron_async.request.request import FinishReason
from megatron_async.runner import guided_drafts
from megatron_async.runner import model_runner as runner
from megatron_async.runner import sampling_stage as stage
from megatron_async.runner.cuda_graphs import StepGraphs
from megatron_async.runner.guided_drafts import GuidedDrafts
from megatron_async.runner.masks import MaskRing
from megatron_async.runner.memory.automaton_pool import AutomatonPool
from megatron_async.runner.memory.forward_batch import ForwardBatch
from megatron_async.runner.memory.recurrent_states import ChunkStates, DecodeStates, RecurrentStates
from megatron_async.runner.model_runner import ModelRunner
from megatron_async.runner.sampling_stage import SamplingStage
from megatron_async.runner.step_program import StepProgram
from megatron_async.sampling import automata
from megatron_async.sampling.sample import SampleInputs
from megatron_async.scheduler.admission import PromptPlanner
from megatron_async.scheduler.events import Commit
from megatron_async.scheduler.request_state import Sequence, State
from megatron_async.scheduler.request_table import RequestTable, row_map
from megatron_async.scheduler.scheduler import Scheduler
from megatron_async.scheduler.slots import SlotTable
from megatron_async.step.packet import ROW_SLOT
from megatron_async.step.plan import Plan, SampleShape, SlotUpdate, StateCopy, Ticket
from megatron_async.step.records import StepResult
from megatron_async.step.slot_fields import Values
from tests.support.cuda_rings import CudaPackets, CudaResults, CudaRingsDevice
from tests.support.guided_automata import (
    automata_guide_rows_as_the_oracle,
    automata_keep_their_states_until_they_retire,
    forced_stretches_are_drafted_by_automata,
    no_launch_waits_for_a_token,
    recorded_decisions_are_repeated,
)
from tests.support.guided_rows import (
    forced_stretches_come_as_drafts,
    guided_rows_draft_and_are_those_of_the_oracle,
    rows_that_sit_launches_out_are_those_of_the_oracle,
)
from tests.support.patience import PATIENCE_SECONDS
from tests.support.pinned import (
    every_drain_is_called_what_it_is,
    head_of_the_queue_waits_while_others_are_stalled,
    kept_prefix_is_reused_from_its_end,
    next_turns_go_on_from_generated_tokens,
)


@dataclass(frozen=True)
class Mutant:
    """A fault, where it can be wrong at all, and which checks find it."""

    name: str
    target: Any
    method: str
    make: Callable[[Any], Any]
    """Gets the original method, returns the faulty one."""
    caught_by: tuple[str, ...]
    """Names of the exceptions that may catch it; see ``test_mutants.py``."""
    least_depth: int
    """With fewer steps in flight it does no harm."""
    device: type[CpuDevice] = CpuDevice
    """What the workload runs on."""
    scenario: Callable[[int, bool], None] | None = None
    """What finds it, at a depth, with debug checks or without; None is the workload."""
    window: int = 1
    """Tokens that a row of the workload may bring: more than one with drafts."""
    hybrid: bool = False
    """The workload's model has recurrent layers and experts."""

    @contextmanager
    def active(self) -> Iterator[None]:
        """The fault is in the code while this is entered."""
        with patch.object(self.target, self.method, self.make(getattr(self.target, self.method))):
            yield


MUTANTS: list[Mutant] = []


def mutant(
    target: Any, method: str, *caught_by: str, least_depth: int = 0, **workload: Any
) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
    """Register a fault under the name of the function that makes it; ``workload`` is what it is
    to be looked for in."""

    def register(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
        MUTANTS.append(
            Mutant(make.__name__, target, method, make, caught_by, least_depth, **workload)
        )
        return make

    return register


# --- blocks and slots -------------------------------------------------------------------------


@mutant(RequestTable, "leave", "WrongTokensError")
def block_freed_when_the_last_row_is_planned(original: Any) -> Any:
    """Not when it has retired: the same plan gives the block to another request."""

    def leave(self: RequestTable, sequence: Sequence, state: State) -> None:
        was_decoding = sequence.state is State.DECODING
        original(self, sequence, state)
        if was_decoding and state is State.ENDING:
            blocks, sequence.blocks = sequence.blocks, []
            self._freed_blocks += self.allocator.release(blocks)

    return leave


@mutant(RequestTable, "_give_up", "IntegrityError")
def block_freed_twice(original: Any) -> Any:
    def give_up(self: RequestTable, sequence: Sequence) -> None:
        blocks = list(sequence.blocks)
        original(self, sequence)
        self.allocator.release(blocks)

    return give_up


@mutant(RequestTable, "_give_up", "IntegrityError")
def reserved_block_not_released(original: Any) -> Any:
    def give_up(self: RequestTable, sequence: Sequence) -> None:
        del sequence.blocks[-1:]
        original(self, sequence)

    return give_up


@mutant(
    RequestTable,
    "_give_up",
    "IntegrityError",
    "KeyError",
    "WrongTokensError",
    "WrongCountsError",
    least_depth=1,
)
def slot_and_blocks_back_before_the_last_ticket(original: Any) -> Any:
    def give_up(self: RequestTable, sequence: Sequence) -> None:
        sequence.last_ticket = -1
        original(self, sequence)
        self.retire(self.retired_ticket)

    return give_up


@mutant(RequestTable, "evict", "IntegrityError", "WrongCountsError", least_depth=1)
def evicted_request_loses_its_token_in_flight(original: Any) -> Any:
    def evict(self: RequestTable, sequence: Sequence) -> None:
        self.slots.end_epoch(sequence.slot)
        original(self, sequence)

    return evict


# --- prefixes and weights ---------------------------------------------------------------------


@mutant(PromptPlanner, "_admit_next", "WrongTokensError")
def prefix_registered_before_it_is_written(original: Any) -> Any:
    def admit_next(self: PromptPlanner, *args: Any) -> Sequence | None:
        sequence: Sequence | None = original(self, *args)
        if sequence is not None:
            self._table.register_blocks(sequence, len(sequence.tokens))
        return sequence

    return admit_next


@mutant(PrefixCache, "insert", "WrongTokensError")
def prefix_found_by_its_last_block_alone(original: Any) -> Any:
    def insert(self: PrefixCache, parent: int, tokens: tuple[int, ...], block: int) -> int:
        original(self, ROOT, tokens, block)
        return ROOT

    return insert


@mutant(PrefixCache, "clear", "WrongTokensError")
def prefix_of_the_old_weights_kept(original: Any) -> Any:
    return lambda self: None


@mutant(DecodeLoop, "drain", "WrongTokensError", least_depth=1)
def token_of_the_old_weights_committed(original: Any) -> Any:
    return lambda self, reason: None


# --- decisions that cost no token ----------------------------------------------------------------


def pinned(
    target: Any, method: str, scenario: Callable[[int, bool], None], *, least_depth: int = 0
) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
    """Register a fault that the workload does not show, and ``scenario`` does."""

    def register(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
        caught_by = ("AssertionError",)
        MUTANTS.append(
            Mutant(make.__name__, target, method, make, caught_by, least_depth, scenario=scenario)
        )
        return make

    return register


@pinned(BlockAllocator, "release", kept_prefix_is_reused_from_its_end)
def blocks_released_front_to_back(original: Any) -> Any:
    """The beginning of a kept prefix is reused first, and the rest is worth nothing."""
    return lambda self, blocks: original(self, list(blocks)[::-1])


@pinned(PromptPlanner, "_admit_next", head_of_the_queue_waits_while_others_are_stalled)
def head_admitted_while_others_are_stalled(original: Any) -> Any:
    def admit_next(self: PromptPlanner, *args: Any) -> Sequence | None:
        table = self._table
        stalled, table.stalled = table.stalled, {}
        try:
            sequence: Sequence | None = original(self, *args)
        finally:
            table.stalled = stalled
        return sequence

    return admit_next


@pinned(DecodeLoop, "_not_overlapped", every_drain_is_called_what_it_is, least_depth=1)
def drain_of_the_paused_called_drained(original: Any) -> Any:
    def not_overlapped(self: DecodeLoop, barrier: NotOverlapped | None) -> NotOverlapped:
        reason: NotOverlapped = original(self, barrier)
        return NotOverlapped.DRAINED if reason is NotOverlapped.PAUSED else reason

    return not_overlapped


@pinned(RequestTable, "reserve_snapshot", next_turns_go_on_from_generated_tokens)
def snapshot_of_a_decode_row_taken_from_another_slot(original: Any) -> Any:
    def reserve_snapshot(self: RequestTable, sequence: Sequence) -> StateCopy | None:
        copy: StateCopy | None = original(self, sequence)
        others = [each.slot for each in self.decoding[0].values() if each is not sequence]
        return copy if copy is None or not others else copy._replace(slot=others[0])

    return reserve_snapshot


# --- commit -----------------------------------------------------------------------------------


@mutant(Scheduler, "commit", "TokenAfterEndError", least_depth=1)
def overshoot_token_kept(original: Any) -> Any:
    def commit(self: Scheduler, plan: Plan, result: StepResult) -> Commit:
        taken: Commit = original(self, plan, result)
        sampled = dict(zip(plan.rows.keys, result.tokens, strict=True))
        rows = zip(taken.keys, taken.tokens, strict=True)
        kept = [sampled[key][:1] if key in taken.discarded else tokens for key, tokens in rows]
        return taken._replace(tokens=kept, discarded=set())

    return commit


@mutant(SlotTable, "end_epoch", "IntegrityError", "TokenAfterEndError", least_depth=1)
def epoch_not_checked(original: Any) -> Any:
    return lambda self, slot: None


@mutant(ModelRunner, "take", "IntegrityError", "WrongTokensError")
def rows_swapped(original: Any) -> Any:
    def take(self: ModelRunner, ticket: Ticket) -> StepResult:
        result: StepResult = original(self, ticket)
        if ticket.plan.decode_rows < 2:
            return result
        return StepResult(*([column[1], column[0], *column[2:]] for column in result[:3]))

    return take


@mutant(Scheduler, "commit", "IntegrityError", "WrongTokensError", "KeyError", least_depth=1)
def commit_reads_the_live_row_map(original: Any) -> Any:
    def commit(self: Scheduler, plan: Plan, result: StepResult) -> Commit:
        live = row_map(self.table.decoding[0].values())
        if plan.is_decode_only and len(live) == len(plan.rows):
            plan = plan._replace(rows=live)
        taken: Commit = original(self, plan, result)
        return taken

    return commit


@mutant(Scheduler, "commit", "IntegrityError", least_depth=1)
def end_decided_from_what_has_been_launched(original: Any) -> Any:
    """One token too few: the next launch has advanced the count that commit reads."""

    def commit(self: Scheduler, plan: Plan, result: StepResult) -> Commit:
        sequences = self.table.sequences
        known = [sequences[key] for key in plan.rows.keys if key in sequences]
        lengths = [sequence.max_total for sequence in known]
        for sequence in known:
            if sequence.launched == sequence.max_new:
                sequence.max_total = len(sequence.tokens) + 1
        taken: Commit = original(self, plan, result)
        for sequence, length in zip(known, lengths, strict=True):
            sequence.max_total = length
        return taken

    return commit


# --- the device's side ------------------------------------------------------------------------


@mutant(StepProgram, "load_decode", "IntegrityError", "WrongTokensError")
def row_map_of_the_step_before(original: Any) -> Any:
    def load_decode(self: StepProgram, rows: int, window: int = 1) -> None:
        stale = self._row_records[:rows, ROW_SLOT].clone()
        original(self, rows, window)
        self._row_records[:rows, ROW_SLOT] = stale

    return load_decode


@mutant(StepGraphs, "_step_work", "IntegrityError", "WrongTokensError", least_depth=1)
def packet_taken_before_the_pending_logits_are_sampled(original: Any) -> Any:
    def step_work(self: StepGraphs, sampled: SampleShape) -> None:
        self._program.load_decode(sampled.rows, sampled.window)
        self._program.sample(sampled)
        self._program.forward_decode(sampled.rows, sampled.window)

    return step_work


@mutant(StepProgram, "forward_decode", "IntegrityError", "WrongTokensError")
def length_not_advanced_at_a_block_boundary(original: Any) -> Any:
    def forward_decode(self: StepProgram, rows: int, window: int) -> None:
        original(self, rows, window)
        lengths = self._batch.kv_length
        lengths -= (lengths % self._batch.block_size_tokens == 0).long() * (lengths > 0)

    return forward_decode


@mutant(stage, "sample_tokens", "IntegrityError", "WrongTokensError")
def noise_at_the_position_the_host_knows(original: Any) -> Any:
    """The host's count of tokens lags behind the device's."""

    def sample_tokens(logits: torch.Tensor, inputs: SampleInputs, **options: Any) -> torch.Tensor:
        lagging = inputs._replace(position=inputs.position - 1)
        tokens: torch.Tensor = original(logits, lagging, **options)
        return tokens

    return sample_tokens


@mutant(StepProgram, "sample", "IntegrityError", "DeadRowLivedError", least_depth=1)
def end_marked_a_step_late(original: Any) -> Any:
    def sample(self: StepProgram, shape: SampleShape) -> None:
        slots = self._row_records[: shape.rows, ROW_SLOT].long()
        before = self._batch.finished[slots]
        original(self, shape)
        self._batch.finished[slots] = before

    return sample


@mutant(ForwardBatch, "begin_forward", "DeadRowWroteError", least_depth=1)
def forward_ignores_the_end(original: Any) -> Any:
    def begin_forward(self: ForwardBatch, *args: Any, **options: Any) -> None:
        finished = self.slots.finished
        self.slots.finished = torch.zeros_like(finished)
        original(self, *args, **options)
        self.slots.finished = finished

    return begin_forward


# --- control ----------------------------------------------------------------------------------


@mutant(StepGraphs, "_controlled_work", "WrongTokensError", "DeadRowLivedError", least_depth=1)
def control_applied_a_launch_late(original: Any) -> Any:
    """After the S of its own launch."""

    def controlled_work(self: StepGraphs, sampled: SampleShape) -> None:
        self._program.sample(sampled)
        self._program.load_control()
        self._program.load_decode(sampled.rows, sampled.window)
        self._program.forward_decode(sampled.rows, sampled.window)

    return controlled_work


@mutant(StepGraphs, "control", "IntegrityError", "WrongTokensError", "DeadRowLivedError")
def control_behind_the_next_lone_sample(original: Any) -> Any:
    """Where C is replayed by itself: in front of steps that replay more than one graph."""

    def control(self: StepGraphs) -> Any:
        late, sample = original(self), self.sample

        def sample_before(shape: SampleShape) -> Any:
            vars(self).pop("sample", None)
            return _InTurn(sample(shape), late)

        self.sample = sample_before  # type: ignore[method-assign]
        return _InTurn()

    return control


class _InTurn:
    """Graphs as one."""

    def __init__(self, *graphs: Any) -> None:
        self._graphs = graphs

    def replay(self) -> None:
        for graph in self._graphs:
            graph.replay()


@mutant(runner, "write_control", "IntegrityError", "WrongTokensError", "DeadRowLivedError")
def control_of_one_slot_applied_to_another(original: Any) -> Any:
    def write_control(
        packet: Any, layout: Any, updates: tuple[SlotUpdate, ...], null_slot: int
    ) -> None:
        shifted = [each._replace(slot=(each.slot + 1) % null_slot) for each in updates]
        original(packet, layout, tuple(shifted), null_slot)

    return write_control


@mutant(RequestTable, "finish_by_host", "DeadRowLivedError", least_depth=1)
def end_of_an_abort_never_sent(original: Any) -> Any:
    """All tokens are right: the host drops what the device samples for nobody."""

    def finish_by_host(self: RequestTable, sequence: Sequence, reason: FinishReason) -> None:
        slot = sequence.slot
        original(self, sequence, reason)
        self.control.pop(slot, None)

    return finish_by_host


@mutant(RequestTable, "update_values", "WrongTokensError")
def sampling_update_lost_on_eviction(original: Any) -> Any:
    """The slot has the new values, and the admission that follows an eviction brings the old."""

    def update_values(self: RequestTable, sequence: Sequence, values: Values, window: int) -> None:
        admitted_with = sequence.values
        original(self, sequence, values, window)
        if sequence.slot >= 0:
            sequence.values = admitted_with

    return update_values


# --- windows of drafts ------------------------------------------------------------------------

WINDOW = 4


def _miscounted(original: Any, wrong: Callable[[int], int]) -> Any:
    def take(self: ModelRunner, ticket: Ticket) -> StepResult:
        result: StepResult = original(self, ticket)
        return result._replace(counts=[wrong(count) for count in result.counts])

    return take


@mutant(ModelRunner, "take", "IndexError", "IntegrityError", "WrongTokensError", window=WINDOW)
def token_behind_the_accepted_ones_taken(original: Any) -> Any:
    return _miscounted(original, lambda count: count + (0 < count < WINDOW))


@mutant(ModelRunner, "take", "IntegrityError", "WrongTokensError", window=WINDOW)
def last_token_of_a_window_left(original: Any) -> Any:
    return _miscounted(original, lambda count: count - (count > 1))


@mutant(Scheduler, "_cut", "WrongCountsError", window=WINDOW)
def bounds_not_corrected_at_commit(original: Any) -> Any:
    """Each window takes blocks as if the ones before had been accepted to their ends."""

    def cut(
        self: Scheduler, sequence: Sequence, window: tuple[int, ...], bound: int
    ) -> tuple[int, ...]:
        before = sequence.kv_bound
        kept: tuple[int, ...] = original(self, sequence, window, bound)
        sequence.kv_bound = before
        return kept

    return cut


@mutant(SamplingStage, "sample", "IntegrityError", "WrongTokensError", window=WINDOW)
def drafts_accepted_without_comparing(original: Any) -> Any:
    """What is sampled behind a wrong draft counts."""

    def sample(
        self: SamplingStage, logits: torch.Tensor, shape: SampleShape, *processed: Any
    ) -> None:
        slots = self._row_records[: shape.rows, ROW_SLOT].long()
        sample_tokens = stage.sample_tokens

        def agreeing(*args: Any, **options: Any) -> torch.Tensor:
            tokens = sample_tokens(*args, **options)
            windows = tokens.view(shape.rows, shape.window)
            self._state.drafts[:, : shape.window - 1][slots] = windows[:, :-1]
            return tokens

        with patch.object(stage, "sample_tokens", agreeing):
            original(self, logits, shape, *processed)

    return sample


@mutant(SamplingStage, "sample", "IntegrityError", "DeadRowLivedError", window=WINDOW)
def length_end_inside_a_window_ignored(original: Any) -> Any:
    """The device ends a request where a window begins behind its length."""

    def sample(self: SamplingStage, *args: Any) -> None:
        self._state.max_total += WINDOW - 1
        original(self, *args)
        self._state.max_total -= WINDOW - 1

    return sample


@mutant(ModelRunner, "launch", "IntegrityError", "WrongTokensError", window=WINDOW)
def block_assignments_beyond_the_rows_dropped(original: Any) -> Any:
    """A decode step's packet has room for one in each padded row."""

    def launch(self: ModelRunner, plan: Plan) -> Ticket:
        if not plan.prefills:
            room = self._graphs.bucket(len(plan.rows))
            plan = plan._replace(assignments=plan.assignments[:room])
        ticket: Ticket = original(self, plan)
        return ticket

    return launch


# --- windows of guided rows ---------------------------------------------------------------------


@pinned(WindowMasks, "fill", guided_rows_draft_and_are_those_of_the_oracle)
def mask_of_the_place_before(original: Any) -> Any:
    """The second and later places of a window get the mask of the one before."""

    def fill(self: WindowMasks, windows: Any) -> Any:
        runs = original(self, windows)
        for window in windows:
            window.masks[1:] = window.masks[:-1].copy()
        return runs

    return fill


@pinned(WindowMasks, "_find", guided_rows_draft_and_are_those_of_the_oracle)
def grammar_not_taken_back_behind_rejected_drafts(original: Any) -> Any:
    def find(self: WindowMasks, quick: Any, count: int) -> Any:
        found = original(self, quick, count).copy()
        for each in quick:
            each.used.try_consume_tokens(each.drafts[:1])
        return found

    return find


@pinned(WindowMasks, "_find", guided_rows_draft_and_are_those_of_the_oracle)
def masks_of_the_row_before(original: Any) -> Any:
    return lambda self, quick, count: np.roll(original(self, quick, count), 1, axis=0)


@pinned(MaskRing, "entry", guided_rows_draft_and_are_those_of_the_oracle)
def mask_a_step_late(original: Any) -> Any:
    """S reads the masks of the ticket before its own."""
    return lambda self, number: original(self, max(number - 1, 0))


@pinned(GuidedDrafts, "take", guided_rows_draft_and_are_those_of_the_oracle)
def masks_along_the_drafts_of_the_step_before(original: Any) -> Any:
    def take(self: GuidedDrafts, ticket: int) -> Any:
        drafts = original(self, ticket)
        stale = getattr(self, "stale", drafts)
        if drafts is not None:
            self.stale = drafts.copy()  # type: ignore[attr-defined]
        return drafts if stale is None else stale

    return take


@pinned(WindowMasks, "fill", forced_stretches_come_as_drafts)
def forced_token_accepted_against_its_grammar(original: Any) -> Any:
    """Where the grammar leaves one token its mask is taken for needless, and S samples any."""

    def fill(self: WindowMasks, windows: Any) -> Any:
        found = original(self, windows)
        for window, runs in zip(windows, found, strict=True):
            for place, run in enumerate(runs):
                window.masked[place] = 0 if run else window.masked[place]
        return found

    return fill


@pinned(guided_drafts, "follow_guesses", forced_stretches_come_as_drafts)
def guess_followed_from_another_place(original: Any) -> Any:
    """No wrong token: drafts that nobody accepts."""

    def follow_guesses(
        drafts: torch.Tensor, last_token: torch.Tensor, kv_length: torch.Tensor, words: torch.Tensor
    ) -> None:
        original(drafts, last_token, kv_length - 1, words)

    return follow_guesses


@pinned(Scheduler, "plan", rows_that_sit_launches_out_are_those_of_the_oracle, least_depth=2)
def rows_launched_together_wait_for_no_token(original: Any) -> Any:
    """Where all rows are guided none sits out, and masks need tokens in flight."""

    def plan(self: Scheduler) -> Plan | None:
        found: Plan | None = original(self)
        self.guided_after = -1
        return found

    return plan


@pinned(Guidance, "prepare", rows_that_sit_launches_out_are_those_of_the_oracle)
def row_that_sat_out_has_no_mask(original: Any) -> Any:
    """As if it had been made for the launch before."""

    def prepare(self: Guidance, ticket: Ticket) -> Any:
        found = original(self, ticket)
        self._runner.claim_masks(ticket)
        return found

    return prepare


# --- rows that automata guide -------------------------------------------------------------------


@pinned(automata, "advance_states", automata_guide_rows_as_the_oracle)
def automaton_walked_over_rejected_drafts(original: Any) -> Any:
    """The state goes on by all that was sampled in the window."""

    def advance_states(
        pool: Any, table: Any, slots: Any, tokens: torch.Tensor, last: torch.Tensor, stops: Any
    ) -> None:
        end = torch.full_like(last, tokens.shape[1] - 1)
        original(pool, table, slots, tokens, end, stops)

    return advance_states


@pinned(automata, "advance_states", automata_guide_rows_as_the_oracle)
def automaton_a_step_late(original: Any) -> Any:
    """The state stays before the last token that counts."""

    def advance_states(
        pool: Any, table: Any, slots: Any, tokens: Any, last: torch.Tensor, stops: Any
    ) -> None:
        original(pool, table, slots, tokens, last - 1, stops)

    return advance_states


@pinned(SamplingStage, "_guide", automata_guide_rows_as_the_oracle)
def automaton_of_the_slot_with_the_number_of_the_row(original: Any) -> Any:
    """Right as long as no row before it has ended."""

    def guide(
        self: SamplingStage, tables: Any, masks: Any, masked: Any, each: torch.Tensor, window: int
    ) -> Any:
        rows = torch.arange(len(each) // window).clamp(max=len(tables.automaton) - 1)
        return original(self, tables, masks, masked, rows.repeat_interleave(window), window)

    return guide


@pinned(automata, "place_states", automata_guide_rows_as_the_oracle)
def automaton_not_walked_along_the_drafts(original: Any) -> Any:
    """All places of a window have the mask of the first."""
    return lambda pool, states, drafts, stops: states[:, None].repeat(1, 1 + drafts.shape[1])


@pinned(automata, "masks_at", automata_guide_rows_as_the_oracle)
def automaton_allows_ends_everywhere(original: Any) -> Any:
    return lambda pool, states, stops: original(pool, states, stops) | stops


@pinned(AutomatonPool, "state_of", automata_keep_their_states_until_they_retire)
def automaton_of_an_evicted_request_begins_anew(original: Any) -> Any:
    return lambda self, base, automaton, tokens: original(self, base, automaton, ())


@pinned(RequestTable, "_give_up", automata_keep_their_states_until_they_retire, least_depth=1)
def automaton_given_back_before_the_last_ticket(original: Any) -> Any:
    """An evicted request's token in flight is sampled by the table of who comes next."""

    def give_up(self: RequestTable, sequence: Sequence) -> None:
        if sequence.automaton is not None and self.automata is not None:
            AutomatonSpace.give_back(self.automata, sequence.automaton.table.number)
            self.automata.give_back = lambda number: None  # type: ignore[method-assign]
        original(self, sequence)

    return give_up


@pinned(guided_drafts, "force_drafts", forced_stretches_are_drafted_by_automata)
def forced_by_the_state_of_the_slot_before(original: Any) -> Any:
    """No wrong token: drafts that nobody accepts."""
    return lambda pool, table, drafts: original(pool, table.roll(1), drafts)


@pinned(Guidance, "_automaton", recorded_decisions_are_repeated)
def replayed_by_the_tables_that_are_there(original: Any) -> Any:
    """Which depends on when they were made."""

    def automaton(self: Guidance, command: Any, spec: Any, grammar: Any) -> Any:
        return self._grammars.automata.find(spec) or HostMasks.LATER.value

    return automaton


@pinned(Guidance, "decided", recorded_decisions_are_repeated)
def tables_made_with_their_requests(original: Any) -> Any:
    """The first request of a grammar waits."""
    return lambda self, command, params: command


@pinned(Guidance, "grammar_of", no_launch_waits_for_a_token, least_depth=2)
def rows_of_automata_wait_like_others(original: Any) -> Any:
    return lambda self, key: None


# --- recurrent state and experts ----------------------------------------------------------------


@mutant(ModelRunner, "launch", "WrongTokensError", hybrid=True)
def state_freed_when_its_row_leaves_the_row_map(original: Any) -> Any:
    """Not when its last ticket has retired: the request may be paused, or wait for a block."""

    def launch(self: ModelRunner, plan: Plan) -> Ticket:
        states, mapped = self._batch.states, set(plan.rows.slots)
        left = list(getattr(self, "mapped", mapped) - mapped)
        self.mapped = mapped  # type: ignore[attr-defined]
        if left and states is not None:
            self.device.enqueue(partial(states.poison, left), "poison")
        ticket: Ticket = original(self, plan)
        return ticket

    return launch


@mutant(RecurrentStates, "restore", "WrongTokensError", hybrid=True)
def state_not_restored_after_a_prefix_hit(original: Any) -> Any:
    return lambda self, slot, place, length: None


@mutant(RecurrentStates, "chunks", "WrongTokensError", hybrid=True)
def state_not_zeroed_at_admission(original: Any) -> Any:
    def chunks(self: RecurrentStates, *tensors: torch.Tensor) -> ChunkStates:
        found: ChunkStates = original(self, *tensors)
        return found._replace(first=found.first.clamp(min=0))

    return chunks


@mutant(RecurrentStates, "decode_rows", "WrongTokensError", hybrid=True, window=WINDOW)
def state_not_taken_back_behind_rejected_drafts(original: Any) -> Any:
    """Rows go on from the state behind all drafts of the window before."""

    def decode_rows(
        self: RecurrentStates, slots: torch.Tensor, positions: torch.Tensor, *rest: Any
    ) -> DecodeStates:
        before = getattr(self, "windows", None)
        if before is None:
            before = self.windows = torch.ones_like(self._base)  # type: ignore[attr-defined]
        found: DecodeStates = original(self, slots, positions, *rest)
        first = torch.where(found.first < 0, found.first, before[found.slots] - 1)
        before[found.slots] = found.window
        return found._replace(first=first)

    return decode_rows


@mutant(RecurrentStates, "decode_rows", "WrongTokensError", hybrid=True, window=WINDOW)
def state_behind_accepted_drafts_lost(original: Any) -> Any:
    """Rows go on from the state behind the first token of the window before."""

    def decode_rows(self: RecurrentStates, *args: Any) -> DecodeStates:
        found: DecodeStates = original(self, *args)
        return found._replace(first=found.first.clamp(max=0))

    return decode_rows


@mutant(ModelRunner, "launch", "WrongTokensError", hybrid=True)
def snapshot_taken_ahead_of_its_forward(original: Any) -> Any:
    def launch(self: ModelRunner, plan: Plan) -> Ticket:
        self._copy_states(plan.snapshots, "snapshot")
        ticket: Ticket = original(self, plan._replace(snapshots=()))
        return ticket

    return launch


@mutant(PrefixCache, "until_snapshot", "WrongTokensError", hybrid=True)
def prefix_hit_goes_beyond_its_snapshot(original: Any) -> Any:
    def until_snapshot(
        self: PrefixCache, blocks: list[int], root: int = ROOT
    ) -> tuple[list[int], int]:
        found: tuple[list[int], int] = original(self, blocks, root)
        return (blocks, found[1]) if found[0] else found

    return until_snapshot


@mutant(StateSnapshots, "take", "IntegrityError", "WrongTokensError", hybrid=True)
def snapshot_overwritten_and_still_known(original: Any) -> Any:
    def take(self: StateSnapshots, node: int, *, is_wanted: bool) -> int | None:
        known = {**self._wanted, **self._spare}
        place: int | None = original(self, node, is_wanted=is_wanted)
        for each in known.keys() - self._wanted.keys() - self._spare.keys():
            self._wanted[each] = known[each]
        return place

    return take


@mutant(ForwardBatch, "padding_mask", "DeadRowReadsExpertError", hybrid=True)
def expert_read_for_a_dead_row(original: Any) -> Any:
    return property(lambda self: torch.zeros_like(original.fget(self)))


# --- rings ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rings:
    """A device and the classes of its rings."""

    device: type[CpuDevice]
    packets: type[Any]
    results: type[Any]


CPU_RINGS = Rings(CpuDevice, CpuPacketRing, CpuResultRing)
CUDA_RINGS = Rings(CudaRingsDevice, CudaPackets, CudaResults)


STEPS, CONTROL = 0, 1
"""Which of a device's packet rings, in the order in which they are made."""


def ring_mutant(
    method: str, *caught_by: str, least_depth: int = 0, ring: int = STEPS
) -> Callable[[Callable[[Rings], type[Any]]], Callable[[Rings], type[Any]]]:
    """Register a fault of the rings of a CPU and of those of a GPU.

    ``method`` of the device makes the rings, of which one is faulty. The function gets the rings
    and returns a faulty class.
    """

    def register(make: Callable[[Rings], type[Any]]) -> Callable[[Rings], type[Any]]:
        for rings, where in ((CPU_RINGS, ""), (CUDA_RINGS, "_on_a_gpu")):
            MUTANTS.append(
                Mutant(
                    make.__name__ + where,
                    rings.device,
                    method,
                    partial(_maker, make(rings), ring),
                    caught_by,
                    least_depth,
                    rings.device,
                )
            )
        return make

    return register


def _maker(faulty: type[Any], ring: int, original: Any) -> Callable[..., Any]:
    """Makes the ring number ``ring`` of a device as ``faulty``."""
    made: list[CpuDevice] = []

    def make(self: CpuDevice, entries: int, width: int, **options: Any) -> Any:
        made.append(self)
        make_ring = faulty if made.count(self) == ring + 1 else original
        return make_ring(self, entries, width, **options)

    return make


def _late_packets(rings: Rings) -> type[Any]:
    """One entry, which the device reads when the host waits: all in flight are unread till then."""

    class Late(rings.packets):  # type: ignore[misc, name-defined]
        def __init__(self, device: CpuDevice, entries: int, width: int) -> None:
            super().__init__(device, 1, width)
            opened = self._opened = threading.Event()

            class Opening(rings.results):  # type: ignore[misc, name-defined]
                def wait(self, number: int, width: int) -> Any:
                    opened.set()
                    return super().wait(number, width)

            device.result_ring = partial(Opening, device)  # type: ignore[method-assign]

        def claim(self, number: int) -> Any:
            try:
                return super().claim(number)
            except IntegrityError:
                self._opened.set()
                raise

        def read(self, into: torch.Tensor, width: int) -> None:
            assert self._opened.wait(PATIENCE_SECONDS), "the host neither waited nor failed"
            super().read(into, width)

    return Late


@ring_mutant("packet_ring", "IntegrityError", least_depth=1)
def packet_ring_too_short(rings: Rings) -> type[Any]:
    return _late_packets(rings)


@ring_mutant("packet_ring", "IndexError", "IntegrityError", "WrongTokensError", least_depth=1)
def packet_overwritten_before_it_was_read(rings: Rings) -> type[Any]:
    """The same without the guard of the claim."""

    class Unguarded(_late_packets(rings)):  # type: ignore[misc]
        def claim(self, number: int) -> Any:
            self._device.raise_failure()
            return getattr(self, "host", self)._views[0]

    return Unguarded


@ring_mutant("packet_ring", "IntegrityError")
def packet_claimed_twice(rings: Rings) -> type[Any]:
    class Twice(rings.packets):  # type: ignore[misc, name-defined]
        def claim(self, number: int) -> Any:
            super().claim(number)
            return super().claim(number)

    return Twice


@ring_mutant("packet_ring", "IntegrityError", ring=CONTROL)
def control_packet_claimed_twice(rings: Rings) -> type[Any]:
    return packet_claimed_twice(rings)


@ring_mutant("packet_ring", "IntegrityError", "WrongTokensError", "DeadRowLivedError", ring=CONTROL)
def control_of_an_earlier_launch_taken_again(rings: Rings) -> type[Any]:
    class Stale(rings.packets):  # type: ignore[misc, name-defined]
        def read(self, into: torch.Tensor, width: int) -> None:
            super().read(into, width)
            stale = getattr(self, "_before", into[:width])
            self._before = into[:width].clone()
            into[:width] = stale

    return Stale


@ring_mutant("result_ring", "IntegrityError", least_depth=2)
def result_overwritten_before_it_was_taken(rings: Rings) -> type[Any]:
    """One entry, taken when the device has done all that was queued."""

    class Late(rings.results):  # type: ignore[misc, name-defined]
        def __init__(self, device: CpuDevice, entries: int, width: int) -> None:
            super().__init__(device, 1, width)
            self._stream = device

        def wait(self, number: int, width: int) -> Any:
            self._stream.synchronize()
            return super().wait(number, width)

    return Late


@ring_mutant("result_ring", "IntegrityError", "WrongTokensError", "KeyError")
def result_of_the_step_before_taken_again(rings: Rings) -> type[Any]:
    class Stale(rings.results):  # type: ignore[misc, name-defined]
        def wait(self, number: int, width: int) -> Any:
            values = super().wait(number, width)
            stale = getattr(self, "_before", values)
            self._before = values.copy()
            values[: len(stale)] = stale[: len(values)]
            return values

    return Stale


@ring_mutant("result_ring", "IntegrityError")
def result_taken_and_put_back(rings: Rings) -> type[Any]:
    """The count of the results taken is one behind."""

    class Behind(rings.results):  # type: ignore[misc, name-defined]
        def wait(self, number: int, width: int) -> Any:
            values = super().wait(number, width)
            self.put_back(number)
            return values

    return Behind
