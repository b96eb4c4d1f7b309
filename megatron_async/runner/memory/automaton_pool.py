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


MOST_STATES = 1 << 16
"""States of a pool, whose budget may have room for more of a small vocabulary."""
LOADED_BYTES = 4 << 20
"""The states of a grammar are brought to the device in parts of this size."""
LEFT_FREE = 256 << 20
"""Bytes of a GPU that a pool leaves to what steps may still ask for."""


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
        ends = np.zeros(vocab_size + 1, np.int64)
        np.cumsum(np.fromiter(map(len, token_bytes), np.int64, vocab_size), out=ends[1:])
        words = 4 * len(ends) + max(int(ends[-1]), 1)
        self._token_bytes = token_bytes
        self._pinned = device.type == "cuda"
        self.capacity = min(max(0, (budget - words) // state_bytes(vocab_size)), MOST_STATES)
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
        flight reads there: the grammar that had these states has given them back. Nothing is
        allocated on the device, whose memory may all be taken."""
        tables = self.tables
        assert tables is not None
        most = max(1, LOADED_BYTES // state_bytes(len(self._token_bytes)))
        for first in range(0, len(automaton.accepting), most):
            states, to = slice(first, first + most), base + first
            moves = automaton.transitions[states].astype(np.int32)
            self._write(tables.transitions, to, np.where(moves < 0, DEAD, moves + base))
            self._write(tables.text, to, automaton.text[states])
            self._write(tables.accepting, to, automaton.accepting[states])
            self._write(tables.forced, to, automaton.forced[states])

    def _write(self, table: Tensor, first: int, rows: np.ndarray[Any, np.dtype[Any]]) -> None:
        """Pinned memory comes from PyTorch's allocator, which gives it to nobody else before the
        copy has been made; where there is none the host waits for the copy."""
        there = torch.from_numpy(np.ascontiguousarray(rows, np.int32))
        if self._pinned:
            try:
                there = there.pin_memory()
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
        table[first : first + len(there)].copy_(there, non_blocking=True)

    def state_of(self, base: int, automaton: Any, tokens: Sequence[int]) -> int:
        """Host: the state behind tokens that a text has begun with."""
        text = b"".join([self._token_bytes[token] for token in tokens])
        state = automaton.after(0, text) if text else 0
        return DEAD if state < 0 else base + int(state)


def open_pool(
    token_bytes: Sequence[bytes],
    budget: int,
    tables: ExtrasTables,
    device: Device,
    free: int | None = None,
) -> AutomatonPool | None:
    """A pool that the S of all launches to come reads; None where the device's memory, or the
    budget, does not suffice. For the other arguments see :class:`AutomatonPool`.

    Args:
        free: bytes of the device's memory; None is not asked.
    """
    assert tables.addresses is not None
    if free is not None and free < budget + LEFT_FREE:
        logger.warning(
            "grammars are followed on the host: a pool of automata takes %.3f GiB, and %.3f GiB "
            "are free; lower the size of the KV cache, or guided_automata_bytes",
            budget / GIB,
            free / GIB,
        )
        return None
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
