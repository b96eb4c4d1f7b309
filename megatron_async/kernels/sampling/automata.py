"""Triton functions for token automata inside of the kernels of S, and a kernel that makes what they
force the drafts of slots. The reference is ``sampling.automata``, equal bit for bit.

``addresses`` int64 [6] has where the tables of the pool are, in the order of
:class:`~megatron_async.sampling.automata.Automata`. They are read where some row has a state alone:
before the first grammar there are none.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from megatron_async.sampling.automata import DEAD as DEAD_
from megatron_async.sampling.automata import FORCED as FORCED_

DEAD = tl.constexpr(DEAD_)
FORCED = tl.constexpr(FORCED_)
TRANSITIONS, TEXT, ACCEPTING, FORCED_TOKENS, STARTS, DATA = (tl.constexpr(n) for n in range(6))
BYTES = tl.constexpr(256)


class Guides(NamedTuple):
    """What guides slots: their ``states`` in the pool int32 [S + 1], ``stops`` int32 [S + 1, W] and
    the pool's ``addresses``."""

    states: Tensor
    stops: Tensor
    addresses: Tensor


@triton.jit
def table_of(addresses, WHICH: tl.constexpr):
    """A table of int32."""
    return tl.load(addresses + WHICH).to(tl.pointer_type(tl.int32))


@triton.jit
def _bytes_of(addresses):
    return tl.load(addresses + DATA).to(tl.pointer_type(tl.uint8))


@triton.jit
def states_behind(addresses, stops, states, tokens, active):
    """The states behind a token each, where ``active``: blocks of one shape.

    Args:
        stops: where the stop tokens of each are, pointers to int32.
        states: int64, none of the active ones negative.
        tokens: int64.
    """
    transitions = table_of(addresses, TRANSITIONS)
    starts = table_of(addresses, STARTS)
    data = _bytes_of(addresses)
    tokens = tl.maximum(tokens, 0)
    first = tl.load(starts + tokens, mask=active, other=0)
    length = tl.load(starts + tokens + 1, mask=active, other=0) - first
    word = tl.load(stops + tokens // 32, mask=active, other=0)
    is_stop = ((word >> (tokens % 32).to(tl.int32)) & 1) != 0
    for at in range(tl.max(length, 0)):
        inside = at < length
        byte = tl.load(data + first + at, mask=inside, other=0).to(tl.int64)
        moved = tl.load(transitions + states * BYTES + byte, mask=inside, other=0)
        states = tl.where(inside, moved.to(tl.int64), states)
    return tl.where(active & is_stop, DEAD, states)


@triton.jit
def state_behind(addresses, stops, state, token):
    """The same of one state."""
    transitions = table_of(addresses, TRANSITIONS)
    starts = table_of(addresses, STARTS)
    data = _bytes_of(addresses)
    token = tl.maximum(token, 0)
    first = tl.load(starts + token)
    end = tl.load(starts + token + 1)
    word = tl.load(stops + token // 32)
    for at in range(first, end):
        byte = tl.load(data + at).to(tl.int64)
        state = tl.load(transitions + state * BYTES + byte).to(tl.int64)
    return tl.where(((word >> (token % 32).to(tl.int32)) & 1) != 0, DEAD, state)


@triton.jit
def allowed_words(addresses, stops, state, first, count, WORDS: tl.constexpr):
    """Words ``first + [0, WORDS)`` of the mask of a state, of ``count``; ``stops`` are the tokens
    that end the text."""
    text = table_of(addresses, TEXT)
    word = first + tl.arange(0, WORDS)
    inside = word < count
    ends = tl.load(stops + word, mask=inside, other=0)
    known = tl.load(text + state * count + word, mask=inside, other=0)
    accepting = tl.load(table_of(addresses, ACCEPTING) + state)
    return (known & ~ends) | tl.where(accepting != 0, ends, 0)


@triton.jit
def _force_kernel(states_ptr, addresses, drafts, COUNT: tl.constexpr, COLUMNS: tl.constexpr):
    """A slot."""
    slot = tl.program_id(0).to(tl.int64)
    state = tl.load(states_ptr + slot).to(tl.int64)
    if state >= 0:
        draft = tl.arange(0, COLUMNS)
        known = (draft < COUNT) & (draft < FORCED)
        forced = table_of(addresses, FORCED_TOKENS) + state * FORCED + draft
        token = tl.load(forced, mask=known, other=-1).to(tl.int64)
        tl.store(drafts + slot * COUNT + draft, token, mask=token >= 0)


def force_drafts_gpu(guides: Guides, drafts: Tensor) -> None:
    """``sampling.automata.force_drafts`` of contiguous ``drafts`` int64 [S + 1, k]."""
    count = drafts.shape[1]
    _force_kernel[(len(drafts),)](
        guides.states, guides.addresses, drafts,
        COUNT=count, COLUMNS=triton.next_power_of_2(count), num_warps=1,
    )  # fmt: skip
