"""How a Mamba-2 layer finds its requests' states in a step, and what it leaves there."""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_async.kernels import trial
from megatron_async.kernels.mamba.layer import (
    LayerStates,
    MambaParameters,
    MambaSizes,
)
from megatron_async.kernels.mamba.reference import mix_rows, scan_chunks, scan_pieces
from megatron_async.kernels.mamba.rows import StepRows, WindowRows, rows_of_chunks
from megatron_async.models.description.recurrent_state_spec import StateTensor
from megatron_async.models.layers.norm import fusable

if TYPE_CHECKING:
    from megatron_async.kernels.mamba.kernels import MambaKernels

logger = logging.getLogger(__name__)

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


def mix_step(projected: Tensor, parameters: MambaParameters, context: Any, layer: int) -> Tensor:
    """The tokens of the forward that runs now.

    Args:
        projected: ``[T, projection]``, what the input projection gave.
        context: its ``states`` have the pool, and its ``position_ids`` the tokens' positions.
        layer: which of the recurrent layers.

    Returns:
        ``[T, inner]``; zeros for padding.
    """
    pool, states = context.states, layer_states(context, layer)
    rows = step_rows(context)
    out = projected.new_zeros(len(projected), parameters.sizes.inner)
    kernels = kernels_of(parameters, context) if fusable(projected) else None
    if len(rows.decode.slots):
        most = pool.step.decode.window
        if kernels is not None:
            kernels.mix_rows(projected, parameters, states, rows.decode, out, most=most)
        else:
            mix_rows(projected, parameters, states, rows.decode, out, most=most)
    if rows.chunks is not None:
        if kernels is not None:
            scan = kernels.scan_exactly if context.batch_invariant else kernels.scan_chunks
        else:
            scan = scan_pieces if projected.is_cuda else scan_chunks
        scan(projected, parameters, states, rows.chunks, out)
    return out


def layer_states(context: Any, layer: int) -> LayerStates:
    """The pool's states of recurrent layer ``layer``."""
    tensors = context.states.layer(layer)
    return LayerStates(tensors[INPUTS][:, 0], tensors[SSM][:, 0])


def kernels_of(parameters: MambaParameters, context: Any) -> MambaKernels | None:
    """The kernels of all Mamba-2 layers of a model in such a context; None where they are on trial,
    or do not compute the layers."""
    reason = kernels_why_not(parameters)
    if reason is not None:
        _log_torch(reason)
        return None
    from megatron_async.kernels.mamba.kernels import MambaKernels

    pool = context.states
    if pool.kernels is None:
        pool.kernels = MambaKernels(pool.null_slot, pool.entries, parameters.sizes, context.device)
    kernels: MambaKernels = pool.kernels
    return kernels


def kernels_why_not(parameters: MambaParameters) -> str | None:
    """Why no kernels compute such a layer on a GPU; None if they do."""
    if not trial.MAMBA:
        return trial.REASON
    from megatron_async.kernels.mamba.parts_triton import unsupported

    return unsupported(parameters)


@functools.cache
def _log_torch(reason: str) -> None:
    logger.warning("Mamba layers run in PyTorch's operations, which is slow: %s", reason)


def step_rows(context: Any) -> StepRows:
    """The rows of the forward that runs now; its first layer makes them."""
    pool = context.states
    if pool.step_rows is None:
        if pool.window_rows is None:
            pool.window_rows = WindowRows()
        positions, decode, chunks = context.position_ids, pool.step.decode, pool.step.chunks
        pool.step_rows = StepRows(
            pool.window_rows(decode.slots, decode.first, positions, decode.window, decode.tokens),
            None
            if chunks is None
            else rows_of_chunks(chunks.slots, chunks.offsets, chunks.lengths, positions),
        )
    rows: StepRows = pool.step_rows
    return rows
