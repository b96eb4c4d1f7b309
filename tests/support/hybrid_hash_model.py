"""The hash model with an expert layer and two recurrent layers between its attention layers.

A recurrent layer's state is a hash of all tokens in their order, so one that is stale, not zeroed,
not restored or not taken back behind wrong drafts changes all later tokens. Each token has an
expert of its own by id and position, whose factor goes into the first recurrent layer; tokens of
padding and of rows that have ended must read none.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_async.models.description.recurrent_state_spec import RecurrentStateSpec, StateTensor
from megatron_async.runner.memory.forward_batch import ForwardBatch
from megatron_async.runner.memory.recurrent_states import RecurrentStates, StepStates
from tests.support.drafting_model import DraftingHashModel
from tests.support.hash_model import MODULUS, WEIGHTS, HashModel

FACTORS = (48271, 69621)
"""By which the state of each recurrent layer is multiplied at a token."""
EXPERTS = (3, 40692, 1343, 65539)
NO_EXPERT = -1


class DeadRowReadsExpertError(AssertionError):
    """An expert was read for padding, or for a row that has ended."""


class WrongEntryError(AssertionError):
    """A row was to begin from an entry that no window has."""


def hybrid_history(tokens: list[int], salt: int = 0) -> int:
    """What :func:`~tests.support.hash_model.hash_history` is for the hybrid model."""
    shallow = deep = first = second = 0
    for position, (token, weight) in enumerate(zip(tokens, WEIGHTS, strict=False)):
        token += 97 * salt
        shallow = (shallow + (token + 1) * weight) % MODULUS
        deep = (deep + (shallow + 1) * weight) % MODULUS
        of_expert = (token + 1) * EXPERTS[(7 * token + 13 * position) % len(EXPERTS)] % MODULUS
        first = (first * FACTORS[0] + of_expert + 1) % MODULUS
        x = (first + position + 1 + deep) % MODULUS
        second = (second * FACTORS[1] + x + 1) % MODULUS
    return (deep + second + len(tokens)) % MODULUS


class HybridLayers(HashModel):
    """An expert layer and recurrent layers, for a hash model that is the next base class."""

    recurrent_state_spec = RecurrentStateSpec(
        2, (StateTensor("fold", (), torch.int64), StateTensor("tokens", (2, 1), torch.int32))
    )
    history = staticmethod(hybrid_history)

    def __init__(self, *args: Any, **values: Any) -> None:
        super().__init__(*args, **values)
        # Tokens without an expert read 0.
        self._factors = torch.tensor((*EXPERTS, 0), device=self._positions.device)

    def further_layers(
        self,
        state: Tensor,
        token_ids: Tensor,
        position_ids: Tensor,
        context: ForwardBatch,
    ) -> Tensor:
        states = context.states
        assert states is not None and states.step is not None
        salted = token_ids + 97 * self.salt
        expert = (7 * salted + 13 * position_ids) % len(EXPERTS)
        expert = torch.where(context.padding_mask[0], NO_EXPERT, expert)
        if not expert.is_cuda:
            self._check(expert, states.step, states, context)
        first = self._recur(0, (salted + 1) * self._factors[expert] % MODULUS, states)
        second = self._recur(1, (first + state) % MODULUS, states)
        return (state + second) % MODULUS

    def _recur(self, layer: int, x: Tensor, states: RecurrentStates) -> Tensor:
        """Fold ``x`` [T] into the states; returns the hash behind each token plus the tokens that
        it is about [T]."""
        kept, factor, count = states.layer(layer), FACTORS[layer], len(x)
        # Those behind the last are places without a token.
        x = torch.cat([x, x[:1]])
        out = torch.zeros_like(x)
        assert states.step is not None
        slots, first, window, tokens = states.step.decode
        if tokens is None:
            places = torch.arange(len(slots) * window, device=x.device)
            tokens = places.view(-1, window)
        state, seen = self._begin(kept, slots, first)
        for place in range(window):
            at = tokens[:, place]
            state, seen = (state * factor + x[at] + 1) % MODULUS, seen + 1
            out[at] = state + seen
            kept["fold"][slots, place] = state
            kept["tokens"][slots, place] = seen.int()[:, None, None]
        if states.step.chunks is not None:
            slots, first, offsets, lengths = states.step.chunks
            state, seen = self._begin(kept, slots, first)
            for place in range(count):
                runs = place < lengths
                at = torch.where(runs, offsets + place, count)
                state = torch.where(runs, (state * factor + x[at] + 1) % MODULUS, state)
                out[at] = state + seen + place + 1
                if not x.is_cuda and place + 1 >= int(lengths.max()):
                    break
            kept["fold"][slots, 0] = state
            kept["tokens"][slots, 0] = (seen + lengths).int()[:, None, None]
        return out[:count]

    @staticmethod
    def _begin(kept: dict[str, Tensor], slots: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
        """The states that rows begin with, and how many tokens these are about."""
        at = slots, first.clamp(min=0)
        found = kept["fold"][at], kept["tokens"][at][:, 1, 0].long()
        state, seen = (torch.where(first < 0, 0, each) for each in found)
        return state, seen

    @staticmethod
    def _check(
        expert: Tensor, step: StepStates, states: RecurrentStates, context: ForwardBatch
    ) -> None:
        dead = context.finished[context.token_slots]
        if bool((expert[dead] != NO_EXPERT).any()):
            raise DeadRowReadsExpertError(f"of {expert.tolist()} the dead are {dead.tolist()}")
        for part in (step.decode, step.chunks):
            if part is not None and int(part.first.max()) >= states.entries:
                raise WrongEntryError(f"{part.first.tolist()} of {states.entries}")


class HybridHashModel(HybridLayers):
    """The hash model with an expert layer and recurrent layers."""


class HybridDraftingHashModel(HybridLayers, DraftingHashModel):
    """The same with drafts."""
