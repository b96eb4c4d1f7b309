"""From the shards of tensor-parallel ranks to whole parameters, and back.

As megatron-core divides them: heads by query group, so that the rows of ``linear_qkv`` follow each
other by rank; of a gated ``linear_fc1`` each rank has its share of the gate, then its share of the
up projection; norms and biases of row-parallel layers are on each rank. Experts are divided in the
same way, stacked or each by itself, or stacked ones among the ranks as a whole (expert parallel).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_async.checkpoint.quantized.state_dicts import scales_among, scales_of_rows
from megatron_async.checkpoint.targets import EMBEDDING, OUTPUT, SPLIT_DIMENSION, same_values
from megatron_async.errors import CheckpointError
from megatron_async.models.quantized.values import E4M3
from megatron_async.weights.tensor_info import TensorInfo

_OF_ONE_EXPERT = re.compile(r"(weight|bias)\d+$")
"""Transformer Engine's grouped layers number the experts behind the kind."""


class Split(NamedTuple):
    """The dimension along which ranks have shares, of ``groups`` blocks each."""

    dimension: int
    groups: int


def split_of(name: str, dimensions: int, *, gated: bool, by_expert: bool = False) -> Split | None:
    """How parameter ``name`` is divided; None if each rank has the whole.

    Args:
        dimensions: of its shape: that of stacked experts has one more in front.
        gated: the MLPs have a gate.
        by_expert: stacked experts are divided among the ranks, each as a whole.
    """
    *_, layer, kind = ["", *name.split(".")]
    kind = _OF_ONE_EXPERT.sub(r"\1", kind)
    dimension = SPLIT_DIMENSION.get(f"{layer}.{kind}")
    if dimension is None:
        return None
    in_front = dimensions - (2 if kind == "weight" else 1)
    if by_expert and in_front and ".experts." in name:
        return Split(0, 1)
    groups = 2 if gated and layer == "linear_fc1" else 1
    return Split(dimension + in_front, groups)


def join_shards(
    name: str, shards: Sequence[Tensor], *, gated: bool, by_expert: bool = False
) -> Tensor:
    """The whole parameter from the shards of ranks 0, 1, ...

    Raises:
        CheckpointError: their shapes do not fit together, or shards that should be the same differ.
    """
    first, *others = shards
    for rank, shard in enumerate(others, 1):
        if shard.shape != first.shape or shard.dtype != first.dtype:
            raise CheckpointError(
                f"{name} is {shard.dtype} {tuple(shard.shape)} on tensor-parallel rank {rank} and "
                f"{first.dtype} {tuple(first.shape)} on rank 0"
            )
    split = split_of(name, first.dim(), gated=gated, by_expert=by_expert)
    if split is None:
        for rank, shard in enumerate(others, 1):
            if not same_values(shard, first):
                raise CheckpointError(
                    f"{name} is not divided, and differs between tensor-parallel ranks 0 and {rank}"
                )
        return first
    _check_divides(name, first.shape[split.dimension], split.groups)
    blocks = zip(*(shard.chunk(split.groups, split.dimension) for shard in shards), strict=True)
    return torch.cat([share for block in blocks for share in block], split.dimension)


def shard_of(
    name: str, whole: Tensor, rank: int, size: int, *, gated: bool, by_expert: bool = False
) -> Tensor:
    """The shard of one of ``size`` tensor-parallel ranks: a view where it can be one.

    Raises:
        CheckpointError: the parameter does not divide by the ranks.
    """
    split = split_of(name, whole.dim(), gated=gated, by_expert=by_expert)
    if split is None or size == 1:
        return whole
    _check_divides(name, whole.shape[split.dimension], split.groups * size)
    blocks = whole.chunk(split.groups, split.dimension)
    shares = [block.chunk(size, split.dimension)[rank] for block in blocks]
    return shares[0] if len(shares) == 1 else torch.cat(shares, split.dimension)


def relay(
    shards: Sequence[Mapping[str, Tensor]],
    *,
    gated: bool,
    rank: int = 0,
    size: int = 1,
    vocab_size: int | None = None,
    by_expert: tuple[bool, bool] = (False, True),
) -> dict[str, Tensor]:
    """The state dict of one tensor-parallel rank of an engine from those of a trainer's ranks.
    Scales of e4m3, which each of these has for its own shard, become those of rows and of as many
    columns as share one.

    Args:
        shards: of the trainer's ranks 0, 1, ..., with the same names.
        rank, size: of the engine.
        vocab_size: rows of the engine's embedding, over all of its ranks. Training may have padded
            the vocabulary to more, which are left out. None for as many.
        by_expert: whether the trainer's stacked experts, and the engine's, are divided among the
            ranks each as a whole, and not by their rows.

    Raises:
        CheckpointError: names or shapes do not fit together.
    """
    if not shards:
        raise CheckpointError("there are no shards of the new weights")
    for number, other in enumerate(shards[1:], 1):
        if odd := shards[0].keys() ^ other.keys():
            raise CheckpointError(
                f"{min(odd)} is not on each tensor-parallel rank: compare rank 0 and rank {number}"
            )
    state, scales = {}, scales_among(shards[0])
    for name in shards[0]:
        layout, parts = name, [shard[name] for shard in shards]
        if name in scales and shards[0][scales[name]].dtype == E4M3:
            layout = scales[name]
            parts = [_scales_to_cut(name, layout, shard, size) for shard in shards]
        whole = join_shards(layout, parts, gated=gated, by_expert=by_expert[0])
        if vocab_size is not None and layout in (EMBEDDING, OUTPUT):
            whole = whole[:vocab_size]
        state[name] = shard_of(layout, whole, rank, size, gated=gated, by_expert=by_expert[1])
    return state


def _scales_to_cut(name: str, of: str, shard: Mapping[str, Tensor], size: int) -> Tensor:
    """fp32 ``[..., rows, groups]``: the scales of a shard's weight, in groups of columns that
    ``size`` ranks can have shares of."""
    weight, scale = (TensorInfo(n, shard[n].dtype, tuple(shard[n].shape)) for n in (of, name))
    found = scales_of_rows(weight, scale, shard[name])
    columns = weight.shape[-1]
    width = columns // found.shape[-1]
    return found.repeat_interleave(width // math.gcd(width, -(-columns // size)), -1)


def _check_divides(name: str, rows: int, parts: int) -> None:
    if rows % parts:
        raise CheckpointError(f"{name}: {rows} rows or columns do not divide by {parts}")
