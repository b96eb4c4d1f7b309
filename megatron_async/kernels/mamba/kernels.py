"""The kernels of a model's Mamba-2 layers in one engine, with what their programs share."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_async.kernels.gemm.tile_config import MAX_ROWS
from megatron_async.kernels.mamba.layer import (
    LayerStates,
    MambaParameters,
    MambaSizes,
    StateRows,
)
from megatron_async.kernels.mamba.mix_triton import (
    MixWorkspace,
    mix_rows_triton,
    scan_tokens_triton,
)
from megatron_async.kernels.mamba.scan_triton import scan_chunks_triton


class MambaKernels:
    """``reference.mix_rows`` and ``reference.scan_chunks`` on a GPU.

    Args:
        rows, window: the most of a step.
    """

    def __init__(self, rows: int, window: int, sizes: MambaSizes, device: torch.device) -> None:
        self._workspace = MixWorkspace(rows * window, rows, sizes, device)
        with torch.inference_mode(False):
            # Nobody writes to rows of padding.
            self._mixed = torch.zeros(MAX_ROWS, sizes.inner, dtype=torch.bfloat16, device=device)

    def mixed(self, tokens: int) -> Tensor:
        """bfloat16 ``[tokens, inner]``, finite, for what a fused block puts out."""
        return self._mixed[:tokens]

    def mix_rows(
        self,
        projected: Tensor,
        parameters: MambaParameters,
        states: LayerStates,
        rows: StateRows,
        out: Tensor,
        *,
        most: int,
    ) -> None:
        """Rows of up to ``most`` tokens, in one kernel."""
        mix_rows_triton(
            projected, parameters, states, rows, out, most=most, workspace=self._workspace
        )

    def scan_chunks(
        self,
        projected: Tensor,
        parameters: MambaParameters,
        states: LayerStates,
        rows: StateRows,
        out: Tensor,
    ) -> None:
        """Prefill chunks, in pieces."""
        scan_chunks_triton(projected, parameters, states, rows, out)

    def scan_exactly(
        self,
        projected: Tensor,
        parameters: MambaParameters,
        states: LayerStates,
        rows: StateRows,
        out: Tensor,
    ) -> None:
        """Prefill chunks token by token: the bits are those of decoding the same tokens."""
        scan_tokens_triton(projected, parameters, states, rows, out)
