"""Experts as GPT-OSS stores them: stacked, gate and up projection row by row in turns, as plain
``[experts, in, out]`` or as MXFP4."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_async.checkpoint.reading.mxfp4 import Arrange, mxfp4_targets
from megatron_async.checkpoint.targets import Target


def apart(rows: Tensor) -> Tensor:
    """Rows (the last dimension but one) of two projections in turns as one's, then the other's."""
    return torch.cat((rows[..., 0::2, :], rows[..., 1::2, :]), dim=-2)


def _same(rows: Tensor) -> Tensor:
    return rows


def _of_columns(arrange: Arrange, columns: Tensor) -> Tensor:
    """``arrange`` of rows that are stored as columns."""
    return arrange(columns.mT)


def _of_numbers(arrange: Arrange, numbers: Tensor) -> Tensor:
    """``arrange`` of rows of one number each."""
    return arrange(numbers[..., None])[..., 0]


def interleaved_targets(targets: Any, theirs: str, ours: str, stored: Collection[str]) -> None:
    """Targets of all experts of a layer, by the prefixes of stored names and of parameters.

    Args:
        targets: a ``huggingface_weights.Targets``.
        stored: names of the stored tensors; they decide whether weights are packed.

    Raises:
        CheckpointError: sizes of packed weights do not fit.
    """
    for stored_name, name, arrange in (
        (f"{theirs}gate_up_proj", f"{ours}.linear_fc1", apart),
        (f"{theirs}down_proj", f"{ours}.linear_fc2", _same),
    ):
        weight = targets.parameter(f"{name}.weight")
        if f"{stored_name}_blocks" in stored:
            targets.update(mxfp4_targets(stored_name, f"{name}.weight", weight, arrange))
        else:
            shape = tuple(weight.mT.shape)
            targets[stored_name] = Target(weight, shape, partial(_of_columns, arrange))
        bias = targets.parameter(f"{name}.bias")
        targets[f"{stored_name}_bias"] = Target(
            bias, tuple(bias.shape), partial(_of_numbers, arrange)
        )
