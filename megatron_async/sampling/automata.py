"""Token automata: what may come next follows from a state, and the state from the bytes of tokens.

A pool has the states of several grammars; state 0 is dead: nothing may come there, and nothing
leads out of it. A row without an automaton has state -1. ``kernels/sampling/automata.py`` does the
same in Triton, inside of the kernels of S.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megatron_async.step.extras import DEAD_STATE, MOST_FORCED

DEAD, FORCED = DEAD_STATE, MOST_FORCED
BYTES = 256


class Automata(NamedTuple):
    """A pool of N states over V token ids.

    Args:
        transitions: int32 ``[N, 256]``, the state behind a byte.
        text: int32 ``[N, mask_words(V)]``, tokens of text that may come.
        accepting: int32 ``[N]``, 1 where the text may end.
        forced: int32 ``[N, FORCED]``, tokens that are the only way on, -1 behind them.
        starts: int32 ``[V + 1]``: token t has the bytes ``starts[t] .. starts[t + 1]``.
        data: uint8 ``[B]``, these bytes.
    """

    transitions: Tensor
    text: Tensor
    accepting: Tensor
    forced: Tensor
    starts: Tensor
    data: Tensor


def states_behind(automata: Automata, states: Tensor, tokens: Tensor, stops: Tensor) -> Tensor:
    """The states behind a token each; a stop token leads to the dead one. The work depends on how
    long the tokens are.

    Args:
        states: int64 ``[R]``; where one is -1 it stays.
        tokens: int64 ``[R]``; -1, of what could not be sampled, counts as 0.
        stops: int32 ``[R, mask_words(V)]``, the tokens that end each text.
    """
    tokens = tokens.clamp(min=0)
    first = automata.starts[tokens].long()
    length = automata.starts[tokens + 1].long() - first
    now = states.clamp(min=DEAD)
    for at in range(int(length.amax()) if len(length) else 0):
        is_inside = at < length
        byte = automata.data[torch.where(is_inside, first + at, 0)].long()
        now = torch.where(is_inside, automata.transitions[now, byte].long(), now)
    words = stops.gather(1, (tokens // 32)[:, None])[:, 0]
    is_stop = (words >> (tokens % 32).to(torch.int32)) & 1 != 0
    now = torch.where(is_stop, DEAD, now)
    return torch.where(states < 0, states, now)


def place_states(automata: Automata, states: Tensor, drafts: Tensor, stops: Tensor) -> Tensor:
    """The states at each place of windows, int64 ``[R, 1 + k]``.

    Args:
        states: int64 ``[R]``, at the first place.
        drafts: int64 ``[R, k]``.
        stops: as in :func:`states_behind`.
    """
    places = [states]
    for place in range(drafts.shape[1]):
        places.append(states_behind(automata, places[-1], drafts[:, place], stops))
    return torch.stack(places, 1)


def masks_at(automata: Automata, states: Tensor, stops: Tensor) -> Tensor:
    """The tokens that may come, int32 ``[R, mask_words(V)]``: of text, and stop tokens where the
    text may end.

    Args:
        states: int64 ``[R]``, none of them -1.
        stops: as in :func:`states_behind`.
    """
    ends = torch.where(automata.accepting[states] != 0, -1, 0)[:, None]
    return (automata.text[states] & ~stops) | (stops & ends.to(torch.int32))


def advance_states(
    automata: Automata, table: Tensor, slots: Tensor, tokens: Tensor, last: Tensor, stops: Tensor
) -> None:
    """Bring the states of slots behind the tokens that were sampled.

    Args:
        table: int32 ``[slots + 1]``, the states by slot; written.
        slots: int64 ``[R]``, distinct but for the null slot, whose state is -1.
        tokens: int64 ``[R, w]``; -1 where none could be sampled.
        last: int64 ``[R]``, the index of the last token that counts.
        stops: int32 ``[slots + 1, mask_words(V)]``.
    """
    guided = (table[slots] >= 0).nonzero()[:, 0]
    if not len(guided):
        return
    slots, tokens, last = slots[guided], tokens[guided], last[guided]
    places = place_states(automata, table[slots].long(), tokens, stops[slots])
    table[slots] = places.gather(1, last[:, None] + 1)[:, 0].to(torch.int32)


def force_drafts(automata: Automata, table: Tensor, drafts: Tensor) -> None:
    """Make what the states of slots force the first drafts of these.

    Args:
        table: int32 ``[slots + 1]``, the states by slot; -1 forces nothing.
        drafts: int64 ``[slots + 1, k]``, written.
    """
    states = table.long()
    forced = automata.forced[states.clamp(min=DEAD)][:, : drafts.shape[1]].long()
    forced = torch.where(states[:, None] < 0, -1, forced)
    known = drafts[:, : forced.shape[1]]
    known.copy_(torch.where(forced >= 0, forced, known))
