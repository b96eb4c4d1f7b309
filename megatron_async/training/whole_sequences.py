"""Logits of whole sequences, by the engine's forward of prompts in batch-invariant mode."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megatron_async.models.gpt_network import GPTNetwork
from megatron_async.models.moe.routed import decoder_layers
from megatron_async.runner.memory.whole_prompts import batch_of_prompts, forward_prompts
from megatron_async.training.routing import noted_experts


class WholeSequences:
    """A model's logits, as an engine with ``batch_invariant=True`` has them.

    Args:
        network: in batch-invariant mode.
        max_tokens: most tokens of a forward, unless one sequence has more.
        recurrent_state_dtype: the engine's, see ``EngineConfig``.
    """

    def __init__(
        self, network: GPTNetwork, *, max_tokens: int, recurrent_state_dtype: str | None
    ) -> None:
        self._network = network
        self._expert_layers = decoder_layers(network.model)
        self._max_tokens = max_tokens
        self._recurrent_state_dtype = recurrent_state_dtype

    @torch.no_grad()
    def logits(self, token_ids: Tensor, lengths: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
        """``[T, vocab]`` of sequences that lie one behind the other in int64 ``[T]``, and the
        experts of each of the decoder's layers that has some, int32 ``[T, k]``."""
        parts, experts, first = [], [], 0
        for group in _groups(lengths, self._max_tokens):
            end = first + sum(group)
            with noted_experts(self._expert_layers) as noted:
                parts.append(self._forward(token_ids[first:end], group))
            experts.append([each[: end - first] for each in noted])
            first = end
        return torch.cat(parts), [torch.cat(of_layer) for of_layer in zip(*experts, strict=True)]

    def _forward(self, token_ids: Tensor, lengths: list[int]) -> Tensor:
        batch = batch_of_prompts(
            self._network,
            self._network.kv_cache_spec,
            lengths,
            batch_invariant=True,
            recurrent_state_dtype=self._recurrent_state_dtype,
        )
        logits = forward_prompts(self._network, batch, token_ids, lengths)
        ranks = self._network.parallel
        if ranks is None or ranks.layout.tensor == 1:
            return logits
        # Each rank of an engine has its columns, the last ones with padding, as a model's own.
        return ranks.gather_logits(logits, ranks.layout.tensor * logits.shape[1])


def _groups(lengths: Sequence[int], most: int) -> Iterator[list[int]]:
    """Neighbours of at most ``most`` tokens together, or one alone."""
    group: list[int] = []
    for length in lengths:
        if group and sum(group) + length > most:
            yield group
            group = []
        group.append(length)
    if group:
        yield group
