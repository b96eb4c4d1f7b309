"""The experts that one forward of a model chose, for another one, in this thread."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from megatron_async.models.moe.layer import leaving
from megatron_async.models.moe.routed import expert_layers as expert_layers


@contextmanager
def noted_experts(layers: Sequence[Any]) -> Iterator[list[Tensor]]:
    """What each of ``layers`` chooses in the one forward that runs meanwhile: int32 ``[T, k]``."""
    noted: dict[int, list[Tensor]] = {id(layer): [] for layer in layers}
    found: list[Tensor] = []
    before = leaving.noted
    leaving.noted = {**before, **noted}
    try:
        yield found
        found += [noted[id(layer)][0] for layer in layers]
    finally:
        leaving.noted = before


def choose(layers: Sequence[Any], experts: Sequence[Tensor] | None) -> None:
    """Have each of ``layers`` take these experts, int32 ``[T, k]``, in its next forwards with
    gradients; None has them choose again."""
    others = {id(layer) for layer in layers}
    chosen = {key: value for key, value in leaving.chosen.items() if key not in others}
    if experts is not None:
        chosen |= {id(layer): own for layer, own in zip(layers, experts, strict=True)}
    leaving.chosen = chosen
