"""A pool of token automata that no grammar has, for the kernels that read it."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_async.runner.extras_tables import ExtrasTables
from megatron_async.sampling.automata import BYTES, FORCED, Automata
from megatron_async.sampling.process_logits import mask_words
from megatron_async.step.extras import FEATURE_GUIDED, NO_AUTOMATON


def random_automata(states: int, vocab_size: int, seed: int) -> Automata:
    """On the CPU: some bytes and some tokens of no byte lead to the dead state, and some states
    force tokens."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator).int()

    transitions = drawn(0, states, states, BYTES)
    transitions[drawn(0, 8, states, BYTES) == 0] = 0
    text = drawn(-(2**31), 2**31 - 1, states, mask_words(vocab_size))
    accepting, forced = drawn(0, 2, states), drawn(0, vocab_size, states, FORCED)
    runs = drawn(0, FORCED + 1, states)[:, None]
    forced = torch.where(torch.arange(FORCED) < runs, forced, -1)
    starts = torch.cat([drawn(0, 1, 1), drawn(0, 5, vocab_size).cumsum(0).int()])
    data = drawn(0, BYTES, max(int(starts[-1]), 1)).to(torch.uint8)
    transitions[0], text[0], accepting[0], forced[0] = 0, 0, 0, -1
    return Automata(transitions, text, accepting, forced, starts, data)


def give_automata(tables: ExtrasTables, seed: int, states: int = 37) -> ExtrasTables:
    """Have automata guide most slots of tables."""
    device, vocab_size = tables.counts.device, tables.counts.shape[1]
    pool = random_automata(states, vocab_size, seed)
    pool = tables.automata = Automata(*(table.to(device) for table in pool))
    tables.addresses = torch.tensor([table.data_ptr() for table in pool], device=device)
    generator = torch.Generator().manual_seed(seed)
    shape = tables.automaton.shape
    begun = torch.randint(0, states, shape, generator=generator).int()
    has_one = torch.rand(shape, generator=generator) < 0.8
    has_one[-1] = False
    tables.features |= torch.where(has_one, FEATURE_GUIDED, 0).int().to(device)
    tables.automaton.copy_(torch.where(has_one, begun, NO_AUTOMATON))
    stops = torch.randint(0, 2**31 - 1, tables.stops.shape, generator=generator).int()
    rare = torch.rand(tables.stops.shape, generator=generator) < 0.1
    both = tables.stops | torch.where(rare, stops, 0).to(device)
    tables.stops.copy_(torch.where(has_one[:, None].to(device), both, tables.stops))
    return tables
