"""The device's pool of token automata: tables that S reads by the state of a slot."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_async.device.memory import GIB, is_out_of_memory
from megatron_async.device.protocol import Device
from megatron_async.runner.extras_tables import ExtrasTables
from megatron_async.sampling.automata import BYTES, DEAD, FORCED, Automata
from megatron_async.sampling.process_logits import mask_words

logger = logging.getLogger(__name__)


def state_bytes(vocab_size: int) -> int:
    """Bytes of a state in the pool."""
    return 4 * (BYTES + mask_words(vocab_size) + 1 + FORCED)


class AutomatonPool:
    """States of the grammars that requests use now, and the bytes of all tokens.

    Captured graphs know one address alone, that of ``addresses``, where those of the tables are
    from the first grammar on: so an engine that no grammar guides has no pool. The tables then stay
    where they are.

    Args:
        token_bytes: by id what a token adds to a text.
        budget: bytes of all of it.
        addresses: int64 ``[6]`` on the device, written.

    Attributes:
        capacity: states; with less than 2 there is room for none.
        tables: None without capacity.
    """

    def __init__(self, token_bytes: Sequence[bytes], budget: int, addresses: Tensor) -> None:
        device, vocab_size = addresses.device, len(token_bytes)
        ends = np.cumsum([0, *map(len, token_bytes)], dtype=np.int64)
        words = 4 * len(ends) + max(int(ends[-1]), 1)
        self._token_bytes = token_bytes
        self._pinned = device.type == "cuda"
        self.capacity = max(0, (budget - words) // state_bytes(vocab_size))
        self.tables: Automata | None = None
        if self.capacity < DEAD + 2:
            return

        def room(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.int32, device=device)

        states = self.capacity
        self.tables = Automata(
            room(states, BYTES), room(states, mask_words(vocab_size)), room(states),
            room(states, FORCED), room(len(ends)),
            torch.empty(max(int(ends[-1]), 1), dtype=torch.uint8, device=device),
        )  # fmt: skip
        self._addresses = addresses
        self._starts = torch.from_numpy(ends.astype(np.int32))
        self._data = torch.from_numpy(
            np.frombuffer(b"".join(token_bytes) or b"\0", np.uint8).copy()
        )

    @property
    def memory_bytes(self) -> int:
        """Bytes on the device."""
        return 0 if self.tables is None else sum(table.nbytes for table in self.tables)

    def begin(self) -> None:
        """Device: write what is in the tables from the start, and then where they are."""
        assert self.tables is not None
        self.tables.starts.copy_(self._starts)
        self.tables.data.copy_(self._data)
        # A state that no grammar has is dead, whatever happens.
        self.tables.transitions.fill_(DEAD)
        self.tables.text.zero_()
        self.tables.accepting.zero_()
        self.tables.forced.fill_(-1)
        self._addresses.copy_(torch.tensor([table.data_ptr() for table in self.tables]))

    def load(self, base: int, automaton: Any) -> None:
        """Device: write the states of a ``TokenAutomaton`` from state ``base`` on. Nothing in
        flight reads there: the grammar that had these states has given them back."""
        assert self.tables is not None
        states = slice(base, base + len(automaton.accepting))
        moves = self._copied(automaton.transitions)
        self.tables.transitions[states] = torch.where(moves < 0, DEAD, moves.int() + base)
        self.tables.text[states] = self._copied(automaton.text)
        self.tables.accepting[states] = self._copied(automaton.accepting).int()
        self.tables.forced[states] = self._copied(automaton.forced)

    def _copied(self, table: np.ndarray[Any, np.dtype[Any]]) -> Tensor:
        """A table on the device. Pinned memory comes from PyTorch's allocator, which gives it to
        nobody else before the copy has been made."""
        there = torch.from_numpy(np.ascontiguousarray(table))
        if self._pinned:
            there = there.pin_memory()
        return there.to(self._addresses.device, non_blocking=True)

    def state_of(self, base: int, automaton: Any, tokens: Sequence[int]) -> int:
        """Host: the state behind tokens that a text has begun with."""
        text = b"".join([self._token_bytes[token] for token in tokens])
        state = automaton.after(0, text) if text else 0
        return DEAD if state < 0 else base + int(state)


def open_pool(
    token_bytes: Sequence[bytes], budget: int, tables: ExtrasTables, device: Device
) -> AutomatonPool | None:
    """A pool that the S of all launches to come reads; None where the device's memory, or the
    budget, does not suffice. For the arguments see :class:`AutomatonPool`."""
    assert tables.addresses is not None
    try:
        with device.inline():
            pool = AutomatonPool(token_bytes, budget, tables.addresses)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        logger.warning("grammars are followed on the host, since a pool does not fit: %s", error)
        return None
    if pool.tables is None:
        return None
    tables.automata = pool.tables
    device.enqueue(pool.begin, "automata")
    logger.info(
        "token automata of grammars take %.3f GiB: %d states",
        pool.memory_bytes / GIB,
        pool.capacity,
    )
    return pool
