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
from megatron_async.kernels.mamba.rows import rows_of_chunks, rows_of_windows
from megatron_async.models.recurrent_state_spec import StateTensor

INPUTS, SSM = "inputs", "ssm"


def state_tensors(sizes: MambaSizes, dtype: torch.dtype) -> tuple[StateTensor, ...]:
    """What a mixer with activations of ``dtype`` keeps of a request: see ``kernels/mamba/layer``.

    The ring of inputs holds what a window's tokens leave, so one state is enough for any window.
    """
    ring, growth = sizes.ring(1), sizes.ring(2) - sizes.ring(1)
    shape = (sizes.heads, sizes.head_dim, sizes.state_size)
    return (
        StateTensor(INPUTS, (ring, sizes.input_width), dtype, window_growth=growth),
        StateTensor(SSM, shape, torch.float32, is_sum=True),
    )


class StepRows(NamedTuple):
    """The rows of a forward, the same for all layers; ``of`` is what they were made of."""

    of: Any
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
    states = LayerStates(tensors[INPUTS][:, 0], tensors[SSM][:, 0])
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
    step = context.states.step
    rows: StepRows | None = getattr(context, "mamba_rows", None)
    if rows is None or rows.of is not step:
        positions, decode, chunks = context.position_ids, step.decode, step.chunks
        rows = StepRows(
            step,
            rows_of_windows(decode.slots, decode.first, positions, decode.window, decode.tokens),
            None
            if chunks is None
            else rows_of_chunks(chunks.slots, chunks.offsets, chunks.lengths, positions),
        )
        context.mamba_rows = rows
    return rows
