"""Drafts of rows that a grammar guides, between S and the forward that runs over them: those that
are there go to the host, which makes masks along them, and those that the grammar knows come from
it, or where an automaton guides the row from that."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial

import numpy as np
import torch

from megatron_async.device.protocol import Device, Ints
from megatron_async.kernels import trial
from megatron_async.runner.extras_tables import ExtrasTables
from megatron_async.runner.memory.slot_state import SlotState
from megatron_async.runner.sampler import has_triton
from megatron_async.sampling.automata import force_drafts
from megatron_async.step.extras import SlotExtras
from megatron_async.step.plan import Guess, Plan, RowMap

NO_TICKET = -1
NO_TOKEN = -1


class GuidedDrafts:
    """Work on the stream between S and a forward, inside of graphs of their own where the forward
    has windows: steps whose rows nothing guides have none of it.

    Invariant: a ticket's drafts are taken or left before its tokens are, so that no more are on
    their way than tickets are in flight.

    Args:
        entries: most tickets in flight, and one more.
        most_rows: of a step.
        tables: of what slots ask, with the automata that guide them.
    """

    def __init__(
        self,
        device: Device,
        slots: SlotState,
        entries: int,
        most_rows: int,
        tables: ExtrasTables,
    ) -> None:
        self._device = device
        self._slots = slots
        self._tables = tables
        self._shape = slots.drafts.shape
        self._ring = device.result_ring(entries, slots.drafts.numel(), of_steps=False)
        self._numbers: dict[int, int] = {}
        """By ticket what the ring calls its drafts, in the order of tickets."""
        self._next = 0
        self._last, self._drafts = NO_TICKET, np.zeros(self._shape, np.int32)
        self._guided: set[int] = set()
        """Slots whose masks the host makes."""
        self._forcing: set[int] = set()
        """Slots whose automaton forces some tokens."""
        self._guesses: dict[int, Sequence[Guess]] = {}
        """By ticket whose S has not been launched."""
        rows, count = self._shape
        width = 2 + (1 + count) ** 2
        # Entries begin at multiples of 16 bytes: a kernel is compiled once for all.
        size = -(-rows * width // 4) * 4
        pinned = slots.drafts.device.type == "cuda"
        self._words = torch.zeros(entries, size, dtype=torch.int32, pin_memory=pinned)
        """Guesses on their way, which the device reads itself. What follows those of ticket n is
        ahead of F(n + 1), which is over before ticket n + entries is guessed."""
        self._packets = device.packet_ring(entries, most_rows * width)
        self._rode = 0
        """Packets claimed: at most one for each ticket launched, so that the ring, whose entries
        outlive the tickets in flight, never wraps onto one that is not read."""
        none = Guess(rows - 1, 0, ((),))  # it fits no row
        self._no_guesses = np.full((most_rows, width), NO_TOKEN, np.int32)
        self._no_guesses[:] = packed([none], 1 + count, 1 + count)
        self._given = torch.from_numpy(self._no_guesses).to(slots.drafts.device, copy=True)
        self._showing = device.capture(self._publish, "drafts")
        # What a first guess would compile or load is made now.
        self._follow_behind(0, [none])

    def admit(self, slot: int, extras: SlotExtras | None) -> None:
        """A request takes ``slot``."""
        self._guided.discard(slot)
        self._forcing.discard(slot)
        if extras is None:
            return
        if extras.automaton is not None:
            if extras.automaton.table.forces:
                self._forcing.add(slot)
        elif extras.extras.guided:
            self._guided.add(slot)

    def come_between(self, plan: Plan) -> bool:
        """There is something to do between the S at the head of the plan's launch and its
        forward."""
        both = self._guided | self._forcing
        return bool(self._guesses) or _some_drafts(plan.rows, both)

    def ride(self, plan: Plan, sampled: int) -> None:
        """The next graph has :meth:`work_between`, ahead of the forward of the plan and behind the
        S of ticket ``sampled``: give it what that S is guessed to sample."""
        entry = self._packets.claim(self._rode).reshape(self._no_guesses.shape)
        self._rode += 1
        entry[:] = self._no_guesses
        guesses = self._guesses.pop(sampled, None)
        if guesses:
            width = 1 + self._shape[1]
            entry[: len(guesses)] = packed(guesses, width, width)
        self._numbers[plan.number] = self._next
        self._next += 1

    def work_between(self) -> None:
        """Follow the guesses that are given, draft what automata force, and show what the forward
        runs over: all in one, for graphs of a whole launch."""
        self._packets.read(self._given.view(-1), self._given.numel())
        self._follow(self._given)
        self._force()
        self._publish()

    def _force(self) -> None:
        tables, drafts = self._tables, self._slots.drafts
        if drafts.device.type != "cuda":
            if tables.automata is not None:
                force_drafts(tables.automata, tables.automaton, drafts)
        elif tables.addresses is not None:
            from megatron_async.kernels.sampling.automata import Guides, force_drafts_gpu

            force_drafts_gpu(Guides(tables.automaton, tables.stops, tables.addresses), drafts)

    # --- to the host --------------------------------------------------------------------------

    def show(self, plan: Plan) -> None:
        """Queue what automata force, and what the forward of the plan runs over, if the host makes
        masks along it."""
        if _some_drafts(plan.rows, self._forcing):
            self._device.enqueue(self._force, "drafts")
        if _some_drafts(plan.rows, self._guided):
            self._numbers[plan.number] = self._next
            self._next += 1
            self._showing.replay()

    def _publish(self) -> None:
        self._ring.publish(self._slots.drafts.int().flatten())

    def take(self, ticket: int) -> Ints | None:
        """The drafts of all slots that the forward of ``ticket`` runs over, int32
        ``[slots + 1, drafts]``; waits for them. None if they are not shown. What interrupts the
        wait loses nothing."""
        if ticket == self._last:
            return self._drafts
        number = self._numbers.get(ticket)
        if number is None:
            return None
        # Nobody asks for those of tickets before: their rows are guided by automata, or by nothing.
        for each in [each for each in self._numbers if self._last < each < ticket]:
            self._ring.skip(self._numbers.pop(each))
        try:
            drafts = self._ring.wait(number, self._shape.numel())
            self._drafts, self._last = drafts.reshape(self._shape), ticket
        except BaseException:
            self._ring.put_back(number)
            raise
        return self._drafts

    def leave(self, ticket: int) -> None:
        """The tokens of tickets up to this one are there: nobody asks any more for drafts that they
        ran over, nor follows what was guessed of them."""
        self._guesses.pop(ticket, None)
        for each in [each for each in self._numbers if each <= ticket]:
            number = self._numbers.pop(each)
            if each > self._last:
                self._ring.skip(number)

    # --- from the host ------------------------------------------------------------------------

    def guess(self, ticket: int, guesses: Sequence[Guess]) -> None:
        """Have :meth:`follow` draft by these guesses of what the S of ``ticket`` samples, and of
        what follows."""
        self._guesses[ticket] = guesses

    def follow(self, ticket: int) -> None:
        """Queue, behind the S of ``ticket``: where it has sampled as was guessed, the tokens that
        were guessed to follow are the row's drafts."""
        guesses = self._guesses.pop(ticket, None)
        if guesses:
            self._follow_behind(ticket, guesses)

    def _follow_behind(self, ticket: int, guesses: Sequence[Guess]) -> None:
        words = packed(guesses, 1 + self._shape[1])
        entry = self._words[ticket % len(self._words), : words.size].view(words.shape)
        entry.numpy()[:] = words
        self._device.enqueue(partial(self._follow, entry), "drafts")

    def _follow(self, words: torch.Tensor) -> None:
        state, on = self._slots, self._slots.drafts.device
        follow = follow_guesses
        if on.type == "cuda":
            if trial.GUESSES and has_triton():
                from megatron_async.kernels.drafting.guesses import follow_guesses_gpu as follow
            else:
                words = words.to(on, non_blocking=True)
        follow(state.drafts, state.last_token, state.kv_length, words)

    def restart(self) -> None:
        """Begin again with ticket 0; nothing is on its way."""
        self._numbers.clear()
        self._guided.clear()
        self._forcing.clear()
        self._guesses.clear()
        self._next, self._last = 0, NO_TICKET
        self._rode = 0
        self._packets.restart()
        self._ring.restart()


def _some_drafts(rows: RowMap, slots: Collection[int]) -> bool:
    """Some row of these slots brings several tokens."""
    pairs = zip(rows.slots, rows.windows, strict=False)
    return any(window > 1 and slot in slots for slot, window in pairs)


def packed(guesses: Sequence[Guess], width: int, places: int | None = None) -> Ints:
    """Guesses as int32 ``[R, 2 + places * width]``: the slot, the length before the window, and
    ``width`` tokens for each place of it, NO_TOKEN where none is guessed. Without ``places`` there
    are as many as some guess has."""
    if places is None:
        places = max(len(each.tokens) for each in guesses)
    words: list[int] = []
    for slot, length, tokens in guesses:
        end = len(words) + 2 + places * width
        words += (slot, length)
        for run in tokens:
            words += run[:width]
            words += (NO_TOKEN,) * (width - len(run))
        words += (NO_TOKEN,) * (end - len(words))
    return np.array(words, np.int32).reshape(len(guesses), -1)


def follow_guesses(
    drafts: torch.Tensor, last_token: torch.Tensor, kv_length: torch.Tensor, words: torch.Tensor
) -> None:
    """Write the drafts of slots whose last token, behind an S, is the one that was guessed for its
    place. Where no token is guessed the draft stays.

    Args:
        drafts: int64 ``[slots + 1, k]``, written.
        last_token, kv_length: int64 ``[slots + 1]``; the last token is at index ``kv_length``.
        words: int32 ``[R, 2 + places * (1 + k)]``, see :func:`packed`; slots are distinct.
    """
    words = words.long()
    slots, lengths = words[:, 0], words[:, 1]
    guessed = words[:, 2:].view(len(words), -1, 1 + drafts.shape[1])
    place = kv_length[slots] - lengths
    inside = (place >= 0) & (place < guessed.shape[1])
    index = place.clamp(0, guessed.shape[1] - 1)[:, None, None].expand(-1, 1, guessed.shape[2])
    run = guessed.gather(1, index)[:, 0]
    fits = inside & (run[:, 0] == last_token[slots])
    following = run[:, 1:]
    drafts[slots] = torch.where(fits[:, None] & (following >= 0), following, drafts[slots])
