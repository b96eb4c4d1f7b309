"""The head in one kernel: the final norm inside the output layer's GEMM."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from megatron_async.kernels.gemm.tile_config import STORE, padded
from megatron_async.models.fused.blocks.gemms import SkinnyGemms, Work, missing
from megatron_async.models.fused.blocks.kernel_parameters import norm_of, output_weight
from megatron_async.models.fused.blocks.residual import Norm, Step


class HeadBlock:
    """Final norm and output layer.

    The normed hidden states exist nowhere in it; a step that wants them has the model's own norm
    applied to the residual stream besides.

    Args:
        model: one that ``coverage.head_why_not`` has nothing against.
    """

    def __init__(self, model: Any, gemms: SkinnyGemms) -> None:
        self._model, self._kernels = model, gemms
        self.norm: Norm = norm_of(model.decoder.final_layernorm)
        self._gemm = gemms.declare("head", self._weight, self.norm.kind, STORE)

    @property
    def _weight(self) -> Tensor:
        return output_weight(self._model)

    def why_not(self, rows: int, context: Any) -> str | None:
        """Why it does not run for padded ``rows``; None if it does."""
        return missing({"head": self._gemm}, rows)

    def __call__(self, step: Step, given: Tensor | None, reader: Norm | None) -> None:
        """Fill the step's logits, and its hidden states if it wants them."""
        residual = step.residual
        if step.hidden_states is not None:
            self._norm_into(step.hidden_states, residual.hidden)
        self._kernels.get(self._gemm, padded(residual.hidden.shape[0]))(
            residual.input_of(self.norm), self._weight, step.logits, norm=self.norm.parameters,
            statistics=given,
        )  # fmt: skip

    def _norm_into(self, out: Tensor, hidden: Tensor) -> None:
        """Write the norm of ``hidden`` for the GEMM behind, which brings its weights meanwhile."""
        if not hidden.is_cuda:
            out.copy_(self._model.decoder.final_layernorm(hidden))
            return
        from megatron_async.kernels.drafting import mtp_norms

        mtp_norms.norm_rows(hidden, mtp_norms.NormParameters(*self.norm.parameters), out)

    def work(self, rows: int, context: Any, reader: Norm | None) -> Iterator[Work]:
        """What is compiled for ``rows`` tokens."""
        most = padded(rows)
        if self.why_not(most, context) is None:
            yield self._kernels.work(self._gemm, most)
