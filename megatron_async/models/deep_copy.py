"""Copies of a model: ``copy.deepcopy``, as trainers make a reference policy."""

from __future__ import annotations

import copy
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.nn import Module

from megatron_async.models import parallel

Model = TypeVar("Model", bound=Module)


def deep_copy(model: Model, memo: dict[int, Any]) -> Model:
    """A copy with weights of its own, among the same ranks: process groups, which cannot be copied,
    are shared. It is as plain as a model that was loaded: whoever serves ``model`` does not serve
    it.

    Args:
        memo: see :func:`copy.deepcopy`.
    """
    memo.update({id(each): each for each in _shared()})
    made = type(model).__new__(type(model))
    memo[id(model)] = made
    with torch.inference_mode(False):
        made.__setstate__({name: copy.deepcopy(value, memo) for name, value in vars(model).items()})
    for own, theirs in zip(made.parameters(), model.parameters(), strict=True):
        for name, value in vars(theirs).items():  # what megatron says of it; torch leaves it out
            vars(own).setdefault(name, copy.deepcopy(value, memo))
    return made


def _shared() -> list[Any]:
    """What is of a process and not of a model: its groups, and its place among ranks."""
    groups = list(dist.distributed_c10d._world.pg_map) if dist.is_initialized() else []
    place = parallel.current()
    return groups if place is None else [*groups, place]
