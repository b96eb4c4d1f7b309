"""The ends of an MTP layer that drafts: the projection in front of its transformer layer, and the
head behind it; fused, and by their modules.

    norms of embedding and hidden state -> projection -> transformer layer -> final norm -> logits
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from megatron_async.kernels.drafting.mtp_input import DraftInput, NormParameters, hidden_before
from megatron_async.kernels.gemm.tile_config import ADD, FEW_ROWS, MAX_ROWS, NO_NORM, STORE, padded
from megatron_async.models.fused.blocks.gemms import Gemm, SkinnyGemms, Work, missing
from megatron_async.models.fused.blocks.kernel_parameters import norm_of, output_weight, scale_of
from megatron_async.models.fused.blocks.residual import LAYER, Norm, Step
from megatron_async.models.fused.quantized_rows import quantized_rows, quantizes

NORM_IN_GEMM = True
"""The norm of a layer's output has no kernel of its own where the last tokens of all rows lie one
behind the other: the head's GEMM computes it, and the kernel in front of the next layer."""

BEGIN_IN_INPUT = True
"""The index arithmetic ahead of all drafts is inside the kernel of the first layer's input."""


@dataclass(frozen=True, slots=True)
class DraftStep(Step):
    """One forward of an MTP layer: n tokens in each of R rows. ``logits`` are those of the last
    token of each row, ``hidden_states`` ``[R * n, hidden size]`` after the layer's final norm.

    Args:
        input: what the layer takes in.
    """

    input: DraftInput


def _parameters(norm: Any) -> NormParameters:
    found = norm_of(norm)
    return NormParameters(found.weight, found.bias, found.eps)


class ProjectionBlock:
    """``[enorm(embedding), hnorm(hidden state)]`` in one kernel, and the GEMM with the projection,
    which begins the residual stream.

    Args:
        layer: one that ``coverage.projection_why_not`` has nothing against.
    """

    norm: Norm | None = None
    scratch: ClassVar[frozenset[str]] = frozenset({"_nothing"})

    def __init__(self, layer: Any, model: Any, gemms: SkinnyGemms, number: int) -> None:
        self._linear = layer.eh_proj
        self._weight: Tensor = layer.eh_proj.weight
        self._scale = scale_of(layer.eh_proj)
        self._enorm, self._hnorm = _parameters(layer.enorm), _parameters(layer.hnorm)
        self._embedding = model.embedding
        self._has_positions = model.position_embedding_type == "learned_absolute"
        self._kernels = gemms
        self._gemm = gemms.declare(
            "eh_proj", self._weight, NO_NORM, ADD, number, self._scale, quantizes(self._linear)
        )
        with torch.inference_mode(False):
            self._nothing = torch.zeros(
                MAX_ROWS, self._gemm.n, dtype=torch.bfloat16, device=self._weight.device
            )

    def why_not(self, rows: int, context: Any) -> str | None:
        """Why it does not run for padded ``rows``; None if it does."""
        return missing({"eh_proj": self._gemm}, rows)

    def input_of(self, step: DraftStep) -> Tensor:
        """What the projection reads, bfloat16 ``[R * n, 2 * hidden size]``."""
        from megatron_async.kernels.drafting import mtp_norms

        embedding, rows = self._embedding, len(step.residual.hidden)
        x = step.residual.workspace.buffer("mtp input", self._gemm.k)[:rows]
        positions = embedding.position_embeddings.weight if self._has_positions else None
        mtp_norms.input_kernel(x)(
            step.input, embedding.word_embeddings.weight, positions, self._enorm, self._hnorm, x
        )
        return x

    def __call__(self, step: DraftStep, given: Tensor | None, reader: Norm | None) -> Tensor | None:
        """Begin the residual stream; returns the statistics for the reader."""
        residual, hidden = step.residual, step.residual.hidden
        rows = len(hidden)
        x, scale = self.input_of(step), None
        if self._gemm.reads_e4m3(padded(rows)):
            x, scale = quantized_rows(self._linear, x, residual.workspace)
        kernel = self._kernels.get(self._gemm, padded(rows), _kind(reader))
        statistics = residual.statistics(LAYER, kernel.statistic_rows)
        kernel(
            x, self._weight, hidden, residual=self._nothing[:rows],
            scaled=residual.scaled_for(reader), statistics_out=statistics,
            weight_scale=self._scale, input_scale=scale,
        )  # fmt: skip
        return statistics if reader is not None else None

    def work(self, rows: int, context: Any, reader: Norm | None) -> Iterator[Work]:
        """What is compiled for padded ``rows``."""
        if self.why_not(rows, context) is None:
            yield self._kernels.work(self._gemm, rows, _kind(reader))


class ProjectionModule:
    """``layer.enorm``, ``layer.hnorm`` and ``layer.eh_proj``.

    Args:
        fused: computes the input where only the GEMM has no kernel; None where nothing is fused.
    """

    norm: Norm | None = None

    def __init__(self, layer: Any, model: Any, fused: ProjectionBlock | None) -> None:
        self._layer, self._model, self._fused = layer, model, fused

    def __call__(self, step: DraftStep, given: Tensor | None, reader: Norm | None) -> Tensor | None:
        """Begin the residual stream; returns the statistics for the reader."""
        x = self._input_of(step.input) if self._fused is None else self._fused.input_of(step)
        projected, _ = self._layer.eh_proj(x[:, None])
        return step.residual.replace(projected, reader, LAYER)

    def _input_of(self, of: DraftInput) -> Tensor:
        layer = self._layer
        embedded = self._model.embedding(
            input_ids=of.tokens.reshape(1, -1), position_ids=of.position_ids[None]
        )
        before = hidden_before(of).flatten(0, 1)
        return torch.cat([layer.enorm(embedded.squeeze(1)), layer.hnorm(before)], 1)


class DraftHeadBlock:
    """The layer's final norm in one kernel, and the GEMM with the output layer over the last token
    of each row. The same norm is inside that GEMM: it is the one of the decoder's head.

    Args:
        layer: one that ``coverage.head_why_not`` has nothing against.
    """

    norm: Norm | None = None
    scratch: ClassVar[frozenset[str]] = frozenset({"_statistics"})

    def __init__(self, layer: Any, model: Any, gemms: SkinnyGemms, number: int) -> None:
        self._norm, self._model, self._kernels = layer.final_layernorm, model, gemms
        self._kind = norm_of(self._norm).kind
        self._gemm = gemms.declare("head", self._weight, self._kind, STORE, number)
        with torch.inference_mode(False):
            self._statistics = torch.empty(FEW_ROWS, 1, 2, device=self._weight.device)

    @property
    def _weight(self) -> Tensor:
        return output_weight(self._model)

    def why_not(self, rows: int, context: Any) -> str | None:
        """Why it does not run for padded ``rows``, of one token each; None if it does."""
        return missing({"head": self._gemm}, rows)

    def __call__(self, step: DraftStep, given: Tensor | None, reader: Norm | None) -> None:
        """Fill the step's logits and hidden states."""
        from megatron_async.kernels.drafting import mtp_norms

        assert step.hidden_states is not None
        rows = step.logits.shape[0]
        norm, hidden = _parameters(self._norm), step.residual.hidden
        last = step.residual.workspace.buffer("last", hidden.shape[1])[:rows]
        statistics = self._statistics[:rows]
        mtp_norms.output_kernel(hidden)(hidden, norm, step.hidden_states, last, statistics)
        self._kernels.get(self._gemm, padded(rows))(
            last, self._weight, step.logits, norm=(norm.weight, norm.bias, norm.eps),
            statistics=statistics,
        )  # fmt: skip

    def alone(self, rows: int, width: int) -> GemmHeadBlock | None:
        """The block that needs no kernel but the GEMM, where it can be taken."""
        if not NORM_IN_GEMM or (rows > 1 and width > 1):
            return None
        return GemmHeadBlock(self._norm, self._model, self._kernels, self._gemm)

    def work(self, rows: int, context: Any, reader: Norm | None) -> Iterator[Work]:
        """What is compiled for padded ``rows``."""
        if self.why_not(rows, context) is None:
            yield self._kernels.work(self._gemm, rows)


class GemmHeadBlock:
    """The GEMM of :class:`DraftHeadBlock`, with the statistics of the block in front of it, of one
    row or of one token each. Hidden states stay as they were before the norm.

    Args:
        final: the layer's final norm.
    """

    def __init__(self, final: Any, model: Any, gemms: SkinnyGemms, gemm: Gemm) -> None:
        self._final, self._model, self._kernels, self._gemm = final, model, gemms, gemm

    @property
    def norm(self) -> Norm:
        """What the block in front leaves statistics for."""
        return norm_of(self._final)

    @property
    def parameters(self) -> NormParameters:
        """The parameters of the norm that hidden states have not passed."""
        return _parameters(self._final)

    def __call__(self, step: DraftStep, given: Tensor | None, reader: Norm | None) -> None:
        """Fill the step's logits."""
        assert given is not None
        rows, norm = step.logits.shape[0], self.norm
        self._kernels.get(self._gemm, padded(rows))(
            step.residual.input_of(norm)[-rows:], output_weight(self._model), step.logits,
            norm=norm.parameters, statistics=given[-rows:],
        )  # fmt: skip


class DraftHeadModule:
    """``layer.final_layernorm`` and the output layer."""

    norm: Norm | None = None

    def __init__(self, layer: Any, model: Any) -> None:
        self._layer, self._model = layer, model

    def __call__(self, step: DraftStep, given: Tensor | None, reader: Norm | None) -> None:
        """Fill the step's logits and hidden states."""
        assert step.hidden_states is not None
        hidden = self._layer.final_layernorm(step.residual.hidden)
        step.hidden_states.copy_(hidden)
        last = hidden.unflatten(0, (len(step.logits), -1))[:, -1]
        step.logits.copy_(self._model.logits(last[:, None], gather_output=True).squeeze(0))


def _kind(reader: Norm | None) -> int:
    return NO_NORM if reader is None else reader.kind
