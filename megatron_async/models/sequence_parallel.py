"""Sequence parallelism, which is for training: an engine runs a model without it, and leaves it on.

Tokens of an inference step are few, and of many requests: each tensor-parallel rank has all of
them, and so has each rank of those that have some of the experts. What a trainer does between two
steps finds the model as it was built."""

from __future__ import annotations

from typing import Any

import torch

_NAMES = ("sequence_parallel", "reduce_scatter_embeddings", "has_own_tokens")
"""Attributes of megatron-core's modules and configs that say that a sequence is divided, and of
adapted layers whose experts are spread over ranks."""


class WithoutSequenceParallel:
    """A scope in which a model's layers get all tokens. It may be entered again inside of itself.

    Args:
        owners: objects and attributes that are True outside of it.
    """

    def __init__(self, owners: list[tuple[Any, str]]) -> None:
        self._owners = owners
        self._depth = 0

    def __enter__(self) -> None:
        if not self._depth:
            self._set(False)
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._set(True)

    def _set(self, value: bool) -> None:
        for owner, name in self._owners:
            setattr(owner, name, value)


def without_sequence_parallel(model: torch.nn.Module) -> WithoutSequenceParallel | None:
    """The scope for a model that trains with sequence parallelism, or whose ranks have some of the
    experts each; None for others."""
    owners: dict[tuple[int, str], tuple[Any, str]] = {}
    for module in model.modules():
        for owner in (module, getattr(module, "config", None)):
            for name in _NAMES:
                if getattr(owner, name, False) is True:
                    owners[id(owner), name] = owner, name
    return WithoutSequenceParallel(list(owners.values())) if owners else None
