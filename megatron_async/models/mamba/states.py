"""How a Mamba-2 layer finds its requests' states in a step, and what it leaves there."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_async.kernels.mamba.layer import (
    LayerStates,
    MambaParameters,
    MambaSizes,
    StateRows,
)
from megatron_async.kernels.mamba.reference import mix_rows, scan_chunks
from megatron_async.models.recurrent_state_spec import StateTensor

INPUTS, SSM = "inputs", "ssm"


def state_tensors(sizes: MambaSizes, dtype: torch.dtype) -> tuple[StateTensor, ...]:
    """What a mixer with activations of ``dtype`` keeps of a request: see ``kernels/mamba/layer``.

    The ring of inputs holds what a window's tokens leave, so one state is enough for any window.
    """
    ring = sizes.ring(2) - sizes.ring(1), 2 * sizes.ring(1) - sizes.ring(2)
    shape = (sizes.heads, sizes.head_dim, sizes.state_size)
    return (
        StateTensor(INPUTS, (sizes.input_width,), dtype, entries=ring),
        StateTensor(SSM, shape, torch.float32, is_sum=True, entries=(0, 1)),
    )


class StepRows(NamedTuple):
    """The rows of a forward, the same for all layers."""

    decode: StateRows
    chunks: StateRows | None


def mix_step(projected: Tensor, parameters: MambaParameters, context: Any, layer: int) -> Tensor:
    """The tokens of the forward that runs now.

    Args:
        projected: ``[T, projection]``, what the input projection gave.
        context: its ``states`` have the pool, and its ``position_ids`` the tokens' positions.
        layer: which of the recurrent layers.

    Returns:
        ``[T, inner]``; zeros for padding.
    """
    pool = context.states
    tensors = pool.layer(layer)
    states = LayerStates(tensors[INPUTS], tensors[SSM][:, 0])
    rows = _rows(context)
    out = projected.new_zeros(len(projected), parameters.sizes.inner)
    if len(rows.decode.slots):
        mix_rows(
            projected, parameters, states, rows.decode, out,
            most=pool.step.decode.window, most_behind=pool.entries - 1,
        )  # fmt: skip
    if rows.chunks is not None:
        scan_chunks(projected, parameters, states, rows.chunks, out)
    return out


def _rows(context: Any) -> StepRows:
    """Those of the forward that runs now; its first layer makes them."""
    pool = context.states
    if pool.prepared is None or pool.prepared[0] is not pool.step:
        pool.prepared = pool.step, _rows_of(pool.step, context.position_ids)
    rows: StepRows = pool.prepared[1]
    return rows


def _rows_of(step: Any, positions: Tensor) -> StepRows:
    slots, first, window, tokens = step.decode
    last = len(positions) - 1
    # A slot's state is that behind its last window's first token; ``first`` of that window's other
    # tokens are in front of this one.
    behind = first.clamp(min=0)
    if tokens is None:
        begin = torch.arange(len(slots), device=slots.device) * window
        lengths = torch.full_like(begin, window)
    else:
        begin, lengths = tokens[:, 0], (tokens <= last).sum(1)
    starts = positions[begin.clamp(max=last)]
    decode = StateRows(slots, begin, lengths, starts, behind, torch.ones_like(begin))
    if step.chunks is None:
        return StepRows(decode, None)
    slots, first, offsets, lengths = step.chunks
    starts = positions[offsets.clamp(max=last)]
    behind = torch.zeros_like(first)
    return StepRows(decode, StateRows(slots, offsets, lengths, starts, behind, lengths))
