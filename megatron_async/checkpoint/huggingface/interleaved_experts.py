"""Experts as GPT-OSS stores them: stacked, gate and up projection row by row in turns, as plain
``[experts, in, out]`` or as MXFP4."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_async.checkpoint.targets import Target
from megatron_async.models.quantized.values import meant_shape

Arrange = Callable[[Tensor], Tensor]


def apart(rows: Tensor) -> Tensor:
    """Rows (the last dimension but one) of two projections in turns as one's, then the other's."""
    return torch.cat((rows[..., 0::2, :], rows[..., 1::2, :]), dim=-2)


def _same(rows: Tensor) -> Tensor:
    return rows


def _of_rows(arrange: Arrange, share: Arrange, rows: Tensor) -> Tensor:
    """A rank's ``share`` of rows, once they are arranged."""
    return share(arrange(rows))


def _of_columns(arrange: Arrange, share: Arrange, columns: Tensor) -> Tensor:
    """A rank's ``share`` of rows that are stored as columns, once they are arranged."""
    return share(arrange(columns.mT))


def _of_numbers(arrange: Arrange, share: Arrange, numbers: Tensor) -> Tensor:
    """A rank's ``share`` of rows of one number each, once they are arranged."""
    return share(arrange(numbers[..., None])[..., 0])


def interleaved_targets(targets: Any, theirs: str, ours: str, stored: Collection[str]) -> None:
    """Targets of all experts of a layer, by the prefixes of stored names and of parameters.

    Args:
        targets: a ``huggingface_weights.Targets``.
        stored: names of the stored tensors; they decide whether weights are packed.

    Raises:
        CheckpointError: sizes of packed weights do not fit.
    """
    for stored_name, name, arrange, groups in (
        (f"{theirs}gate_up_proj", f"{ours}.linear_fc1", apart, 2),
        (f"{theirs}down_proj", f"{ours}.linear_fc2", _same, 1),
    ):
        weight = targets.parameter(f"{name}.weight")
        meant = meant_shape(weight)
        share = targets.share(f"{name}.weight", weight, meant, groups)
        is_packed = any(f"{stored_name}_{kind}" in stored for kind in ("blocks", "scales"))
        if is_packed and stored_name not in stored:
            of_one = targets.share(f"{name}.weight", weight, meant[1:], groups, of_one_expert=True)
            select = partial(_of_rows, arrange, of_one.select)
            first = targets.first_expert(weight)
            from megatron_async.checkpoint.quantized.mxfp4 import mxfp4_targets

            targets.update(
                mxfp4_targets(stored_name, f"{name}.weight", weight, share.shape, select, first)
            )
        else:
            *lead, rows, columns = share.shape
            select = partial(_of_columns, arrange, share.select)
            targets[stored_name] = Target(weight, (*lead, columns, rows), select)
        bias = targets.parameter(f"{name}.bias")
        share = targets.share(f"{name}.bias", bias, list(bias.shape), groups)
        select = partial(_of_numbers, arrange, share.select)
        targets[f"{stored_name}_bias"] = Target(bias, share.shape, select)
