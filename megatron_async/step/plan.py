"""What one step is: the host's plan, frozen at launch into a ticket that commit reads alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain, compress, repeat
from typing import NamedTuple, TypeVar

T = TypeVar("T")


class BlockGrant(NamedTuple):
    """``block`` becomes entry ``column`` of ``slot``'s row of the block table."""

    slot: int
    column: int
    block: int


class PrefillChunk(NamedTuple):
    """Tokens ``start .. start + len(tokens)`` of a prompt, run as row ``row`` of this forward.

    ``samples`` is true for the chunk that ends the prompt: only its logits are sampled.
    """

    row: int
    slot: int
    start: int
    tokens: tuple[int, ...]
    samples: bool


class Admission(NamedTuple):
    """Device-resident state that a request brings into its slot.

    ``inverse_temperature`` 0 means greedy. ``max_total`` counts prompt and generated tokens,
    ``cached`` the tokens whose keys and values are in the cache already.
    """

    slot: int
    inverse_temperature: float
    top_k: int
    top_p: float
    seed: int
    max_total: int
    cached: int
    stop_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RowMap:
    """Which request each row of a forward holds; the three tuples are parallel.

    ``epochs[i]`` is the generation of ``slots[i]`` at launch: a row whose epoch is older than its
    slot's is dead. ``keys[i]`` is the scheduler's own number of the request.
    """

    slots: tuple[int, ...]
    epochs: tuple[int, ...]
    keys: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.slots)


class Plan(NamedTuple):
    """The host's decision for one step. Pure data: rows ``0 .. decode_rows`` decode one token
    each, the rows after them prefill one chunk each, in the order of ``prefills``."""

    number: int
    rows: RowMap
    decode_rows: int
    grants: tuple[BlockGrant, ...]
    prefills: tuple[PrefillChunk, ...] = ()
    admissions: tuple[Admission, ...] = ()

    @property
    def is_decode_only(self) -> bool:
        """True when the step is one token for each row: the shape that is captured."""
        return not self.prefills

    @property
    def num_tokens(self) -> int:
        """Tokens of the forward, without padding."""
        return self.decode_rows + sum(len(chunk.tokens) for chunk in self.prefills)

    def sampled(self, rows: Iterable[T]) -> Iterable[T]:
        """Those of ``rows``, one for each row of the forward, whose logits are sampled."""
        if not self.prefills:
            return rows
        last_chunks = (chunk.samples for chunk in self.prefills)
        return compress(rows, chain(repeat(True, self.decode_rows), last_chunks))


class Ticket(NamedTuple):
    """Launch-time snapshot of one launched step. The forward of ticket n is over on the device
    when the tokens sampled from its logits are on the host: its commit is its retirement."""

    number: int
    plan: Plan
    row_bucket: int


class StepResult(NamedTuple):
    """What S found for each row of a ticket, padding left out: the token, and on the device's own
    judgement whether the row was still live when it was sampled and whether the token ends the
    request."""

    tokens: list[int]
    live: list[int]
    ended: list[int]
