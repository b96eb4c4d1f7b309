"""Launches plans and takes their results: the one place between scheduler and device."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from megatron_async.device.memory import GIB, free_bytes, must_fit
from megatron_async.device.protocol import Device, Ints
from megatron_async.models.network import Network
from megatron_async.runner.cuda_graphs import StepGraphs, row_buckets, token_buckets
from megatron_async.runner.drafter import Drafter
from megatron_async.runner.extras_tables import ExtrasTables
from megatron_async.runner.masks import Mask, MaskRing
from megatron_async.runner.memory.forward_batch import ForwardBatch
from megatron_async.runner.prompt_log_probs import PromptLogProbs, PromptTargets
from megatron_async.runner.sampling_stage import SamplingExtras
from megatron_async.runner.step_program import RowProcessor, StepProgram
from megatron_async.step.extras import LOG_PROB_WORDS, SlotAutomaton, SlotExtras
from megatron_async.step.packet import PacketLayout, StepShape, write_control, write_packet
from megatron_async.step.plan import Guess, Plan, SampleShape, StateCopy, Ticket
from megatron_async.step.records import RECORD_HEAD, StepResult, record_width

if TYPE_CHECKING:
    from megatron_async.graph_audit.audit import GraphAudit
    from megatron_async.models.moe.routed import RoutedLayers
    from megatron_async.runner.guided_drafts import GuidedDrafts
    from megatron_async.runner.hidden_states import PromptHiddenStates
    from megatron_async.runner.memory.automaton_pool import AutomatonPool
    from megatron_async.runner.routed_experts import RoutedExperts

logger = logging.getLogger(__name__)

Progress = Callable[[Iterable[int], int], Iterable[int]]
"""Wraps an iterable of known length to show a progress bar."""

_never_freed: list[dict[str, object]] = []
"""What graphs in flight on failed devices use."""

OnSpan = Callable[[str, int, int, int], None]
"""Called with a name, a ticket, start and end in nanoseconds of ``time.perf_counter_ns``."""


class ModelRunner:
    """The rings, buffers and graphs of one engine.

    Args:
        model: what F runs.
        max_tokens, max_assignments: of one step.
        depth: steps in flight beyond the one that is being taken.
        micro_batches: their number less one more steps are in flight.
        poison: fill consumed buffers with garbage.
        extras: keep room for requests with extras, and capture the steps that they need.
        has_automata: some of them may be guided by automata, whose pool comes with the first.
        capture_mixed: capture steps with prefill chunks too.
        progress: shows the capture of graphs.
        make_drafter: from the batch and the most rows of a step.
        windows: those that plans may have, ascending; the last one holds the batch's drafts.
        synthetic_acceptance: drafts count as right at this rate, and tokens mean nothing.
        routed: layers whose choice of experts is handed out; None hands out none.
        keeps_prefixes: that of cached tokens is kept too.

    Attributes:
        wait_ns: time that the host was blocked on the device.
        pending: the ticket whose S has not been launched: the next launch brings it, or its
            :meth:`take`. Stages before the last, which take what S has sampled, may be behind.
        launching: the S of the pending ticket is being launched by itself, behind Python functions;
            or ranks choose scales together.
        last_graph_rows: row bucket of the last launch; None if it was no decode step.
        audit: checks what the graphs hold; None where nobody asked for it.
    """

    def __init__(
        self,
        device: Device,
        batch: ForwardBatch,
        model: Network,
        *,
        max_tokens: int,
        max_assignments: int,
        depth: int,
        poison: bool,
        extras: bool,
        capture_mixed: bool,
        progress: Progress | None,
        make_drafter: Callable[[ForwardBatch, int], Drafter | None],
        windows: tuple[int, ...] = (1,),
        micro_batches: int = 1,
        synthetic_acceptance: float | None = None,
        routed: RoutedLayers | None = None,
        keeps_prefixes: bool = True,
        has_automata: bool = False,
    ) -> None:
        self.device = device
        self.wait_ns = 0
        self.launching = False
        self.last_graph_rows: int | None = None
        self.audit: GraphAudit | None = None
        self._batch = batch
        self._cache = cache = batch.cache
        sizes = cache.sizes
        buckets = row_buckets(
            sizes.max_requests,
            captures=device.captures,
            count=sizes.num_cuda_graphs,
            window=windows[-1],
        )
        tokens = token_buckets(max_tokens, captures=device.captures)
        max_rows = buckets[-1]
        self._layout = PacketLayout(
            max_rows, tokens[-1], max_assignments, sizes.slot_count, windows[-1]
        )
        # A packet is consumed and a result taken before its ticket is committed, and no more than
        # depth + micro_batches tickets are ever in flight: the rings never wrap onto a live entry.
        entries = depth + micro_batches + 1
        self._packets = device.packet_ring(entries, self._layout.width)
        self._controls = device.packet_ring(entries, self._layout.control_size)
        self._record_widths = {
            (window, extended): record_width(window, extended=extended)
            for window in windows
            for extended in (False, True)
        }
        width = self._record_widths[windows[-1], extras] * max_rows
        self._results = device.result_ring(entries, width)
        on = device.torch_device
        self._extended_slots: set[int] = set()
        self._extras: SamplingExtras | None = None
        if extras:
            masks = MaskRing(entries, max_rows * windows[-1], model.vocab_size, on)
            tables = self._extras_tables(model.vocab_size, has_automata=has_automata)
            self._extras = SamplingExtras(tables, masks)
        self._automata: AutomatonPool | None = None
        self._prompt_log_probs = PromptLogProbs(entries, tokens[-1], on)
        self._hidden_states: PromptHiddenStates | None = None
        self._ring_entries = entries
        self._hands_out = model.parallel is None or model.parallel.rank == 0
        """Each rank of a layer has whole hidden states, of which rank 0 hands out its own."""
        self._routes: RoutedExperts | None = None
        if routed is not None:
            from megatron_async.runner.routed_experts import RoutedExperts

            most = max(tokens[-1], max_rows * windows[-1])
            self._routes = RoutedExperts(
                device, routed, entries, most, sizes, keeps_prefixes=keeps_prefixes
            )
        self._model = model
        self._drafter = make_drafter(batch, max_rows)
        self._guided_drafts: GuidedDrafts | None = None
        if self._extras is not None and self._drafter is not None:
            from megatron_async.runner.guided_drafts import GuidedDrafts

            self._guided_drafts = GuidedDrafts(
                device, batch.slots, entries, max_rows, self._extras.tables
            )
        self._program = StepProgram(
            device,
            batch,
            model,
            self._layout,
            self._packets,
            self._controls,
            self._results,
            self._prompt_log_probs,
            self._extras,
            logits_dtype=model.logits_dtype or cache.spec.dtype,
            poison=poison,
            drafter=self._drafter,
            synthetic_acceptance=synthetic_acceptance,
            routes=self._routes,
        )
        if self._extras is not None:
            self._log_extras(self._extras)
        self._graphs = StepGraphs(
            device,
            self._program,
            buckets,
            tokens,
            windows,
            extended=(False, True) if extras else (False,),
            capture_mixed=capture_mixed,
            between=None if self._guided_drafts is None else self._guided_drafts.work_between,
        )
        self.pending: Ticket | None = None
        self._unsampled: deque[Ticket] = deque()
        """Launched, and not sampled or taken on this rank."""
        parallel = model.parallel
        self._held_back = 0 if parallel is None else min(parallel.stages_behind, micro_batches - 1)
        """For this many launches this stage goes on before it takes what S has sampled: so long the
        stages behind it compute, and the last one samples."""
        self._launched = self._skipped = 0
        self._control_count = 0
        self._on_span: OnSpan | None = None
        self._graphs.compile(model, batch)
        # What has been allocated is filled on another stream than that of the graphs.
        device.synchronize()
        captured: Iterable[int] = self._graphs.capture()
        if progress is not None:
            captured = progress(captured, self._graphs.capture_count)
        for _ in captured:
            # Warm-up runs admit nobody to slot 0. It must not run on until its tokens end.
            device.enqueue(cache.slots.reset, "reset")
        device.enqueue(self._reset, "reset")
        device.synchronize()

    @property
    def graph_count(self) -> int:
        """Graphs that were captured; one of them shows the drafts of guided rows."""
        return self._graphs.graph_count + (self._guided_drafts is not None)

    @property
    def row_buckets(self) -> list[int]:
        """Padded row counts, ascending."""
        return self._graphs.buckets

    def _extras_tables(self, vocab_size: int, *, has_automata: bool) -> ExtrasTables:
        # Token counts are by far the most of them.
        sizes = self._cache.sizes
        with must_fit(
            self.device.torch_device,
            4 * (sizes.slot_count + 1) * vocab_size,
            f"the token counts of {sizes.slot_count} slots for penalties",
            "max_requests or depth, or turn off enable_sampling_extras",
        ):
            return ExtrasTables(
                sizes.slot_count, vocab_size, sizes.max_sequence_length, self._cache.device,
                has_automata=has_automata,
            )  # fmt: skip

    @property
    def takes_automata(self) -> bool:
        """Requests may be guided by automata: see :meth:`open_automata`."""
        has_some = self._extras is not None and self._extras.tables.addresses is not None
        return has_some and self._program.guides_by_automata

    def open_automata(self, token_bytes: Sequence[bytes], budget: int) -> int:
        """Have a pool of token automata, of at most ``budget`` bytes, from the next launch on.
        Returns how many states it holds; 0 where the memory does not suffice."""
        from megatron_async.runner.memory.automaton_pool import open_pool

        assert self._extras is not None
        on = self.device.torch_device
        free = free_bytes(on) if on.type == "cuda" else None
        tables = self._extras.tables
        pool = self._automata = open_pool(token_bytes, budget, tables, self.device, free)
        return 0 if pool is None else pool.capacity

    def _log_extras(self, extras: SamplingExtras) -> None:
        logger.info(
            "penalties, filters and log-probabilities: %.3f GiB for %d slots, %.3f GiB of the host "
            "for masks",
            (extras.tables.memory_bytes + self._program.extended_bytes) / GIB,
            self._cache.sizes.slot_count,
            extras.masks.memory_bytes / GIB,
        )

    def _reset(self) -> None:
        self._cache.reset()
        if self._extras is not None:
            self._extras.tables.reset()

    def restart(self) -> None:
        """Begin again as before the first launch: tickets begin at 0. All have been taken."""
        self.device.synchronize()
        for ring in (self._packets, self._results, self._guided_drafts):
            if ring is not None:
                ring.restart()
        self._program.restart()
        self.pending = self.last_graph_rows = None
        self._unsampled.clear()
        self._launched = self._skipped = 0
        self.wait_ns = 0
        self.device.enqueue(self._reset, "reset")
        self.device.synchronize()

    def choose_scales(self, *, stored: bool) -> None:
        """Choose the scales of an FP8 cache for new weights. Nothing is in flight, and what the
        cache has is not read again. See
        :func:`~megatron_async.runner.memory.cache_scales.choose_scales`."""
        if self._batch.scales is not None:
            from megatron_async.runner.memory.cache_scales import choose_scales

            self.device.synchronize()
            choose_scales(self._model, self._batch, stored=stored)
            self.device.synchronize()

    def launch(self, plan: Plan) -> Ticket:
        """Queue C if there is control, S of the pending logits, H2D and F of ``plan``; returns at
        once."""
        graphs, started = self._graphs, time.perf_counter_ns()
        rows = graphs.bucket(len(plan.rows.slots))
        # A decode step's packet has room for one block assignment a row.
        is_decode = not plan.prefills and len(plan.assignments) <= rows
        shape = StepShape(rows, rows * plan.window, plan.window)
        if not is_decode:
            drafts = plan.decode_tokens - plan.decode_rows
            shape = graphs.mixed_shape(rows, plan.num_tokens + drafts, plan.window)
        tokens = None if is_decode else shape.tokens
        packet = self._packets.claim(plan.number)
        write_packet(packet, self._layout, plan, shape.rows, tokens, self._cache.null_slot)
        self.device.mark_ticket(plan.number)
        if plan.control:
            self._write_control(plan)
        if plan.admissions and self._extras is not None and (plan.extended or self._extended_slots):
            self._admit_extras(self._extras.tables, plan)
        if plan.admissions and self._drafter is not None and self._drafter.wants_tokens:
            for admission in plan.admissions:
                work = partial(self._drafter.admit, admission.slot, admission.tokens)
                self.device.enqueue(work, "drafts")
        if plan.restores:
            self._copy_states(plan.restores, "restore")
        if self._on_span is not None:
            self._on_span("pack", plan.number, started, time.perf_counter_ns())
        self.last_graph_rows = rows if is_decode else None
        unsampled = self._unsampled
        due = self._due(plan) if self._held_back else len(unsampled)
        steady = (rows, plan.window, plan.window - 1)
        guided = self._guided_drafts if plan.extended else None
        if guided is not None and not guided.come_between(plan):
            guided = None
        if is_decode and due == 1 and not guided and unsampled[0].sampled[:3] == steady:
            sampled = unsampled.popleft()
            self.device.sampled = sampled.number
            graphs.step(sampled.sampled, controlled=bool(plan.control)).replay()
        elif is_decode and due == 1 and guided is not None and plan.window > 1:
            self._launch_guided(guided, plan, rows)
        else:
            if plan.control:
                graphs.control().replay()
            for _ in range(due):
                self._sample_oldest()
            if guided is not None:
                guided.show(plan)
            if is_decode:
                graphs.forward(rows, plan.window).replay()
            else:
                targets = _prompt_targets(plan)
                if targets is not None and targets.layers and self._hidden_states is None:
                    self._start_hidden_states()
                graphs.launch_mixed(shape, targets)
        if self._routes is not None:
            self._routes.publish(plan.number, shape.tokens)
        if plan.snapshots:
            self._copy_states(plan.snapshots, "snapshot")
        later = SampleShape(shape.rows, plan.window, plan.drafts, plan.extended)
        self.pending = ticket = Ticket(plan.number, plan, later)
        unsampled.append(ticket)
        self._launched = plan.number + 1
        return ticket

    def _launch_guided(self, guided: GuidedDrafts, plan: Plan, rows: int) -> None:
        """The graphs of a decode step with windows of guided rows, behind one S: one graph where
        the step before had its shape, else two; and C."""
        graphs, sampled = self._graphs, self._unsampled[0]
        if plan.control:
            graphs.control().replay()
        guided.ride(plan, sampled.number)
        is_steady = sampled.sampled[:3] == (rows, plan.window, plan.window - 1)
        step = graphs.guided_step(sampled.sampled) if is_steady else None
        if step is None:
            self._sample_oldest()
            graphs.guided_forward(rows, plan.window).replay()
        else:
            self._unsampled.popleft()
            self.device.sampled = sampled.number
            step.replay()

    def _start_hidden_states(self) -> None:
        from megatron_async.runner.hidden_states import PromptHiddenStates

        if self._hands_out:
            self._hidden_states = PromptHiddenStates(self._ring_entries)
            self._program.prompt_hidden_states = self._hidden_states

    def _due(self, plan: Plan) -> int:
        """How many tickets are to be taken ahead of a launch, by a stage that is before others."""
        last = max(plan.after, plan.number - 1 - self._held_back)
        return sum(ticket.number <= last for ticket in self._unsampled)

    def take(self, ticket: Ticket) -> StepResult:
        """Wait for the tokens of ``ticket``: the oldest in flight, each once. Its S rides at the
        head of the next launch; where there was none, as always at depth 0, it is launched now."""
        while self._unsampled and self._unsampled[0].number <= ticket.number:
            self._sample_oldest()
        rows, window, _, extended = ticket.sampled
        fields = self._record_widths[window, extended]
        started = time.perf_counter_ns()
        values = self._results.wait(ticket.number, fields * rows)
        ended = time.perf_counter_ns()
        self.wait_ns += ended - started
        if self._on_span is not None:
            self._on_span("wait", ticket.number, started, ended)
        if self._guided_drafts is not None:
            self._guided_drafts.leave(ticket.number)
        records = values.reshape(fields, rows)[:, : len(ticket.plan.rows.slots)]
        log_probs = prompt_log_probs = hidden = None
        if extended:
            head = RECORD_HEAD + window
            log_probs = records[head:].T.reshape(-1, window, LOG_PROB_WORDS)
            records = records[:head]
        if ticket.plan.prefills:
            targets = _prompt_targets(ticket.plan)
            if targets is not None:
                prompt_log_probs = self._prompt_log_probs.take(targets)
                if self._hidden_states is not None:
                    hidden = self._hidden_states.take(targets)
        routes = None
        if self._routes is not None:
            plan = ticket.plan
            is_decode = not plan.prefills and len(plan.assignments) <= rows
            routes = self._routes.take(plan, window if is_decode else None)
        columns = records.tolist()
        tokens = list(zip(*columns[RECORD_HEAD:], strict=True))
        heads = columns[0], columns[1]
        return StepResult(*heads, tokens, log_probs, prompt_log_probs, routes, hidden)

    def lacks(self, ticket: Ticket) -> bool:
        """Whether the S of a ticket in flight has not been launched on this rank."""
        return bool(self._unsampled) and self._unsampled[0].number <= ticket.number

    def sample_until(self, number: int) -> None:
        """Launch by itself the S of all tickets up to ``number`` that this rank lacks."""
        while self._unsampled and self._unsampled[0].number <= number:
            self._sample_oldest()

    def settle(self) -> None:
        """Take, before the end, what the last stage has told and this one has not taken, which the
        next engine over these ranks would find. Nobody has sampled the ticket launched last."""
        if self.device.failure is not None:
            return  # nothing is launched behind what may never end
        with contextlib.suppress(Exception):  # of a device that fails now
            while len(self._unsampled) > 1:
                self._sample_oldest()

    def skip_results(self) -> None:
        """Leave the tokens of all tickets whose S has been launched, for a caller that wants none.
        Waits for nothing."""
        lacking = self._unsampled[0].number if self._unsampled else self._launched
        for number in range(self._skipped, lacking):
            self._results.skip(number)
        self._skipped = lacking
        if self._guided_drafts is not None:
            self._guided_drafts.leave(self._launched)

    def claim_masks(self, ticket: Ticket) -> tuple[Mask, Mask]:
        """Where to write the allowed-token masks of the pending ticket, ``[rows * window, words]``,
        those of row r's window from ``r * window`` on, and a 1 for each that counts."""
        assert self._extras is not None
        rows, window = ticket.sampled[:2]
        return self._extras.masks.claim(ticket.number, rows * window)

    def take_drafts(self, ticket: Ticket) -> Ints | None:
        """The drafts of all slots, int32 ``[slots + 1, drafts]``, that the forward of the pending
        ticket runs over, where guided rows have some; waits for the S that has made them."""
        if self._guided_drafts is None:
            return None
        started = time.perf_counter_ns()
        drafts = self._guided_drafts.take(ticket.number)
        self.wait_ns += time.perf_counter_ns() - started
        return drafts

    @property
    def takes_guesses(self) -> bool:
        """:meth:`guess` is worth a call: rows draft."""
        return self._guided_drafts is not None

    def guess(self, ticket: Ticket, guesses: Sequence[Guess]) -> None:
        """Have tokens that the host has guessed be drafts behind the S of the pending ticket."""
        if self._guided_drafts is not None:
            self._guided_drafts.guess(ticket.number, guesses)

    def process_logits(self, ticket: Ticket, processors: Mapping[int, RowProcessor]) -> None:
        """Give logits of the pending ticket to Python functions and launch its S; a barrier.

        Args:
            processors: by row, a function of its logits ``[vocabulary]`` that returns others. It
                raises nothing.
        """
        self.device.synchronize()
        # In the caller's thread: it holds the step lock, and gets what interrupts a function.
        with self.device.inline():
            processed = self._program.process(ticket.sampled, processors)
        work = partial(self._program.sample_processed, ticket.sampled, processed)
        self.launching = True
        self.device.sampled = ticket.number
        self.device.enqueue(work, "S+ processed")
        if self._guided_drafts is not None:
            self._guided_drafts.follow(ticket.number)
        self.pending = None
        self._unsampled.clear()
        self.launching = False

    def put_back(self, ticket: Ticket) -> bool:
        """A signal came in the midst of :meth:`take`: the tokens are there to be taken again. Not
        (False) if it came before the wait: nobody knows whether S was launched."""
        if self.lacks(ticket):
            return False
        self._results.put_back(ticket.number)
        return True

    def poison_freed(self, blocks: list[int], slots: list[int]) -> None:
        """Queue garbage for freed KV blocks and for the recurrent state of freed slots (debug
        mode)."""
        if blocks:
            self.device.enqueue(partial(self._program.poison_blocks, blocks), "poison")
        if slots and self._cache.states is not None:
            self.device.enqueue(partial(self._cache.states.poison, slots), "poison")

    def observe(self, on_span: OnSpan | None) -> None:
        """Report how long packing, waiting and a lone S take; None ends it."""
        self._on_span = on_span

    def release(self) -> None:
        """Drop graphs, rings and buffers, and the cache; nothing may be in flight. Done by hand:
        graphs and what they run refer to each other. Of a GPU that has failed they are kept, since
        to free them may wait for what is in flight there."""
        if self.device.captures and self.device.failure is not None:
            _never_freed.append(self.__dict__.copy())
        else:
            if self._graphs is not None:
                self._graphs.release()
            self._batch.release()
        for name in (
            "_graphs", "_program", "_packets", "_controls", "_results", "_extras",
            "_prompt_log_probs", "_hidden_states", "_drafter", "_guided_drafts", "_routes",
            "_model", "_automata",
        ):  # fmt: skip
            setattr(self, name, None)

    def _admit_extras(self, tables: ExtrasTables, plan: Plan) -> None:
        """Queue what requests with extras bring into their slots, ahead of the launch: nothing in
        flight names these slots, since the last ticket that did has retired."""
        for slot, _, extras, _ in plan.admissions:
            if self._guided_drafts is not None:
                self._guided_drafts.admit(slot, extras)
            if extras is not None:
                self._extended_slots.add(slot)
                work = partial(tables.admit, slot, extras)
                if extras.automaton is not None:
                    work = partial(work, self._begin_automaton(extras, extras.automaton))
                self.device.enqueue(work, "extras")
            elif slot in self._extended_slots:
                self._extended_slots.remove(slot)
                self.device.enqueue(partial(tables.clear, slot), "extras")

    def _begin_automaton(self, extras: SlotExtras, automaton: SlotAutomaton) -> int:
        """Queue an automaton that is not in the pool. Returns the state that it begins in, behind
        what an evicted request has generated."""
        pool, (table, base, is_new, _) = self._automata, automaton
        assert pool is not None
        if is_new:
            self.device.enqueue(partial(pool.load, base, table.automaton), "automaton")
        return pool.state_of(base, table.automaton, extras.tokens[extras.prompt_length :])

    def _copy_states(self, copies: Iterable[StateCopy], name: str) -> None:
        """Queue copies of recurrent state: restored into slots that nothing in flight names, since
        the last ticket that did has retired; snapshots behind the forward that leaves them."""
        states = self._cache.states
        assert states is not None
        copy = states.restore if name == "restore" else states.take_snapshot
        for each in copies:
            self.device.enqueue(partial(copy, *each), name)

    def _write_control(self, plan: Plan) -> None:
        packet = self._controls.claim(self._control_count)
        self._control_count += 1
        write_control(packet, self._layout, plan.control, self._cache.null_slot)

    def _sample_oldest(self) -> None:
        ticket, started = self._unsampled[0], time.perf_counter_ns()
        self.device.sampled = ticket.number
        self._graphs.sample(ticket.sampled).replay()
        if self._guided_drafts is not None:
            self._guided_drafts.follow(ticket.number)
        if ticket is self.pending:
            self.pending = None
        self._unsampled.popleft()
        if self._on_span is not None:
            self._on_span("sample", ticket.number, started, time.perf_counter_ns())


def _prompt_targets(plan: Plan) -> PromptTargets | None:
    """The prompt tokens whose log-probabilities or hidden states a plan asks for; None if it asks
    for none."""
    for chunk in plan.prefills:
        if chunk.targets or chunk.layers:
            return PromptTargets.of(plan)
    return None
