"""Hidden states of prompts: from the layers of a forward to the host."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from megatron_async.models.network import Network
from megatron_async.runner.prompt_log_probs import PromptTargets
from megatron_async.step.records import HiddenStates


class PromptHiddenStates:
    """Memory of the host, pinned for a GPU, for each ticket that asks for hidden states, and none
    while none does. What F(n) writes is there when the record of S(n) is, which comes behind it on
    the stream: nobody waits for it by itself.

    Args:
        entries: no fewer than the results' ring has, so none is dropped before it is taken.
    """

    def __init__(self, entries: int) -> None:
        self._entries: list[Tensor | None] = [None] * entries

    @contextmanager
    def left(self, network: Network, targets: PromptTargets) -> Iterator[None]:
        """Device: the one forward of ``network`` that runs meanwhile leaves the hidden states of
        ``targets``."""
        if not targets.layers:
            yield
            return
        index = torch.tensor(targets.hidden, pin_memory=network.device is not None
                             and network.device.type == "cuda")  # fmt: skip
        index = index.to(network.device, non_blocking=True)
        found: dict[int, Tensor] = {}

        def take(layer: int, states: Tensor) -> None:
            found[layer] = states.index_select(0, index)

        with network.handing_out_hidden_states(targets.layers, take):
            yield
        rows = torch.stack([found[layer] for layer in targets.layers], dim=1)
        entry = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=rows.is_cuda)
        entry.copy_(rows, non_blocking=True)
        self._entries[targets.number % len(self._entries)] = entry

    def take(self, targets: PromptTargets) -> HiddenStates | None:
        """Host: those of a ticket whose record has been taken, once; None if it asks for none."""
        if not targets.layers:
            return None
        place = targets.number % len(self._entries)
        entry, self._entries[place] = self._entries[place], None
        return HiddenStates(entry, targets.layers)
