"""Rollouts as tensors, for a trainer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_async.errors import RequestError, shown
from megatron_async.request.request import Rollout

NO_VERSION = -1
"""Weight version of a token that no weights have sampled."""
NO_EXPERT = -1
"""Expert of a token that no forward was over."""


class RolloutBatch(NamedTuple):
    """Rollouts of one batch, padded on the right to the longest, ``[B, T]`` each.

    What is about a token stands at its place: the logits that it was sampled from are those of the
    place before.

    Attributes:
        tokens: int64, prompt and generated tokens.
        attention_mask: bool, no padding.
        loss_mask: bool, tokens to learn from: sampled, and by weights that are not too old.
        log_probs: float32, of generated tokens, when they were sampled, or prefilled where they
            were forced; 0 elsewhere.
        weight_versions: int64, of the weights that ``log_probs`` are of; -1 for others.
    """

    tokens: Tensor
    attention_mask: Tensor
    loss_mask: Tensor
    log_probs: Tensor
    weight_versions: Tensor


def batch_of(
    rollouts: Sequence[Rollout],
    *,
    pad_token_id: int = 0,
    oldest_version: int = 0,
    mask_truncated: bool = False,
) -> RolloutBatch:
    """Tensors of ``rollouts`` on the CPU.

    Args:
        oldest_version: tokens that older weights sampled are masked, so that none is more than a
            bounded number of updates behind.
        mask_truncated: rollouts that did not end by themselves are masked as a whole.

    Raises:
        RequestError: there is no rollout, or an argument is wrong.
    """
    if not rollouts:
        raise RequestError("a batch needs at least one rollout")
    for each in rollouts:
        if not isinstance(each, Rollout):
            raise RequestError(f"a {type(each).__name__} is no rollout; give request.rollout()")
    for name, value in (("pad_token_id", pad_token_id), ("oldest_version", oldest_version)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise RequestError(f"{name}={shown(value)} must be an integer")
    shape = len(rollouts), max(len(rollout.tokens) for rollout in rollouts)
    tokens = torch.full(shape, pad_token_id, dtype=torch.int64)
    attention_mask = torch.zeros(shape, dtype=torch.bool)
    loss_mask = torch.zeros(shape, dtype=torch.bool)
    log_probs = torch.zeros(shape, dtype=torch.float32)
    versions = torch.full(shape, NO_VERSION, dtype=torch.int64)
    for row, rollout in enumerate(rollouts):
        start, end = len(rollout.prompt_tokens), len(rollout.tokens)
        tokens[row, :end] = torch.tensor(rollout.tokens, dtype=torch.int64)
        attention_mask[row, :end] = True
        log_probs[row, start:end] = torch.tensor(rollout.log_probs, dtype=torch.float32)
        versions[row, start:end] = torch.tensor(rollout.weight_versions, dtype=torch.int64)
        if not (mask_truncated and rollout.is_truncated):
            first = start + rollout.forced
            loss_mask[row, first:end] = versions[row, first:end] >= oldest_version
    return RolloutBatch(tokens, attention_mask, loss_mask, log_probs, versions)


def routed_experts_of(rollouts: Sequence[Rollout]) -> Tensor:
    """The experts that the tokens of :func:`batch_of` went to, for
    :func:`~megatron_async.training.forced_routing`.

    Returns:
        int16 ``[B, T, layers, top_k]``, and -1 where no forward was over a token: for the last one
        of a rollout, for padding, and for a rollout that was aborted before it ran.

    Raises:
        RequestError: there is no rollout, or one with generated tokens has no routed experts.
    """
    known = {row: each.routed_experts for row, each in enumerate(rollouts)}
    known = {row: routed for row, routed in known.items() if routed is not None}
    if not known or any(
        each.generated_tokens and row not in known for row, each in enumerate(rollouts)
    ):
        raise RequestError(
            "a rollout has no routed experts; add all requests with return_routed_experts=True"
        )
    sizes = next(iter(known.values())).shape[1:]
    shape = len(rollouts), max(len(rollout.tokens) for rollout in rollouts)
    routed = torch.full((*shape, *sizes), NO_EXPERT, dtype=torch.int16)
    for row, each in known.items():
        routed[row, : len(each)] = torch.from_numpy(each)
    return routed
