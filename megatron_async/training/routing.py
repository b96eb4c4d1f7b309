"""The experts that one forward of a model chose, for another one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from megatron_async.models.moe.routed import expert_layers as expert_layers


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
