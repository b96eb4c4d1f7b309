"""What one step is: the host's plan, frozen at launch into a ticket that commit reads alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain, compress, repeat
from typing import NamedTuple, TypeVar

from megatron_async.step.extras import SlotExtras
from megatron_async.step.slot_fields import Values

T = TypeVar("T")


class BlockAssignment(NamedTuple):
    """``block`` becomes entry ``column`` of ``slot``'s row of the block table."""

    slot: int
    column: int
    block: int


class PrefillChunk(NamedTuple):
    """Tokens ``start .. start + len(tokens)`` of a prompt, run as row ``row`` of this forward.

    ``samples`` is true for the chunk that ends the prompt: only its logits are sampled.
    ``targets`` are the prompt tokens that follow the chunk's first ones, where their
    log-probabilities are wanted. Behind ``layers`` the hidden states of its tokens are wanted.
    """

    row: int
    slot: int
    start: int
    tokens: tuple[int, ...]
    samples: bool
    targets: tuple[int, ...] = ()
    layers: tuple[int, ...] = ()

    def __repr__(self) -> str:
        """As before there were layers, where there are none: recorded runs have its checksum."""
        shown = zip(self._fields, self[: None if self.layers else -1], strict=False)
        return f"PrefillChunk({', '.join(f'{name}={value!r}' for name, value in shown)})"


class Admission(NamedTuple):
    """Device-resident state that a request brings into its slot: the values of the ADMISSION and
    REQUEST fields of ``slot_fields``, in the table's order, its extras, and its tokens for a
    drafter that wants them."""

    slot: int
    values: Values
    extras: SlotExtras | None = None
    tokens: tuple[int, ...] = ()


class StateCopy(NamedTuple):
    """The recurrent state of ``slot`` behind the first ``length`` tokens of its request, and
    ``place`` among the snapshots."""

    slot: int
    place: int
    length: int


class SlotUpdate(NamedTuple):
    """What control tells the device about a slot before S: its request has ended, as the host
    alone knows, or the values of its REQUEST fields are new."""

    slot: int
    ends: bool
    values: Values | None


@dataclass(frozen=True, slots=True)
class RowMap:
    """Which request each row of a forward holds; the tuples are parallel.

    ``epochs[i]`` is the generation of ``slots[i]`` at launch: a row whose epoch is older than its
    slot's is dead. ``keys[i]`` is the scheduler's own number of the request. ``windows[i]`` is how
    many tokens the row may bring, 1 and its drafts; empty where no row drafts.
    """

    slots: tuple[int, ...]
    epochs: tuple[int, ...]
    keys: tuple[int, ...]
    windows: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.slots)


class Plan(NamedTuple):
    """The host's decision for one step. Pure data: rows ``0 .. decode_rows`` decode, the rows after
    them prefill one chunk each, in the order of ``prefills``. ``control`` reaches the S at the head
    of this launch. ``extended``: a request with extras holds a slot, so the S of this step's logits
    is the extended one. ``window`` is that of the forward's decode rows, of which a row may use
    less; ``drafts`` are what the S of its logits makes for each row; ``reason`` says why that many.
    Recurrent states are restored ahead of this forward, and snapshots taken behind it. ``after`` is
    the last ticket whose tokens it needs: of several micro-batches the last ticket is that of
    another one, and its tokens may come later."""

    number: int
    rows: RowMap
    decode_rows: int
    assignments: tuple[BlockAssignment, ...]
    prefills: tuple[PrefillChunk, ...] = ()
    admissions: tuple[Admission, ...] = ()
    control: tuple[SlotUpdate, ...] = ()
    extended: bool = False
    window: int = 1
    drafts: int = 0
    reason: str = ""
    restores: tuple[StateCopy, ...] = ()
    snapshots: tuple[StateCopy, ...] = ()
    after: int = -1

    @property
    def is_decode_only(self) -> bool:
        """No prompt is prefilled: the shape of a steady step."""
        return not self.prefills

    @property
    def num_tokens(self) -> int:
        """Tokens of the forward, without padding and drafts."""
        count = self.decode_rows
        for chunk in self.prefills:
            count += len(chunk.tokens)
        return count

    @property
    def decode_tokens(self) -> int:
        """Tokens of the decode rows, drafts included."""
        return sum(self.rows.windows[: self.decode_rows]) or self.decode_rows

    def sampled(self, rows: Iterable[T]) -> Iterable[T]:
        """The items of ``rows``, one for each row of the forward, whose logits are sampled."""
        if not self.prefills:
            return rows
        last_chunks = [chunk.samples for chunk in self.prefills]
        return compress(rows, chain(repeat(True, self.decode_rows), last_chunks))


class Guess(NamedTuple):
    """What the host guesses of a row whose request has ``length`` tokens before an S samples: for
    each place of its window a run of tokens, from the one that S samples there on, or none."""

    slot: int
    length: int
    tokens: tuple[tuple[int, ...], ...]


class SampleShape(NamedTuple):
    """Rows and window of the forward whose logits an S samples, and how many drafts it makes for
    the next one: with its variant all that distinguishes its graph."""

    rows: int
    window: int = 1
    drafts: int = 0
    extended: bool = False


class Ticket(NamedTuple):
    """Launch-time snapshot of one launched step. The forward of ticket n is over on the device
    when the tokens sampled from its logits are on the host: its commit is its retirement."""

    number: int
    plan: Plan
    sampled: SampleShape
