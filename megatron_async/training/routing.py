"""The experts that one forward of a model chose, for another one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from megatron_async.models.moe.adapt import AdaptedMoELayer
from megatron_async.models.moe.layer import MoELayer


def expert_layers(model: torch.nn.Module) -> list[Any]:
    """The layers of experts of a model that is served, in its order."""
    return [each for each in model.modules() if isinstance(each, (MoELayer, AdaptedMoELayer))]


@contextmanager
def noted_experts(layers: Sequence[Any]) -> Iterator[list[Tensor]]:
    """What each of ``layers`` chooses in the one forward that runs meanwhile: int32 ``[T, k]``."""
    noted: list[list[Tensor]] = [[] for _ in layers]
    found: list[Tensor] = []
    try:
        for layer, own in zip(layers, noted, strict=True):
            layer.noted = own
        yield found
        found += [own[0] for own in noted]
    finally:
        for layer in layers:
            layer.noted = None


def choose(layers: Sequence[Any], experts: Sequence[Tensor] | None) -> None:
    """Have each of ``layers`` take these experts, int32 ``[T, k]``, in its next forwards with
    gradients; None has them choose again."""
    for number, layer in enumerate(layers):
        layer.chosen = None if experts is None else experts[number]
