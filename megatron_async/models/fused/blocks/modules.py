"""The blocks that run megatron's modules, where no kernels compute what these do.

They read the residual stream as it is, so they have no norm, and the block before leaves them no
statistics. Their output is added to the stream by the kernel that computes the statistics for the
next fused block (``kernels/norm/add_statistics.py``).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from megatron_async import megatron_compat as compat  # noqa: F401  (before megatron)
from megatron_async.models.batch import padding_mask
from megatron_async.models.fused.blocks.residual import HALF, LAYER, Norm, Step

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add  # isort: skip


class EmbeddingModule:
    """``model.embedding``."""

    norm: Norm | None = None

    def __init__(self, model: Any) -> None:
        self._model = model

    def __call__(self, step: Step, given: Tensor | None, reader: Norm | None) -> Tensor | None:
        """Begin the residual stream; returns the statistics for the reader."""
        embedded = self._model.embedding(
            input_ids=step.token_ids.unsqueeze(0), position_ids=step.position_ids.unsqueeze(0)
        )
        return step.residual.replace(embedded, reader, LAYER)


class AttentionModule:
    """``layer.input_layernorm`` and ``layer.self_attention``."""

    norm: Norm | None = None

    def __init__(self, layer: Any, where: int = HALF) -> None:
        self._layer, self._where = layer, where

    def __call__(self, step: Step, given: Tensor | None, reader: Norm | None) -> Tensor | None:
        """Add their output to the residual stream; returns the statistics for the reader."""
        layer = self._layer
        output = layer.self_attention(
            layer.input_layernorm(step.residual.hidden.unsqueeze(1)),
            attention_mask=None,
            inference_context=step.context,
        )
        return _add(step, layer, layer.self_attn_bda, output, reader, self._where)


class MlpModule:
    """``layer.pre_mlp_layernorm`` and ``layer.mlp``."""

    norm: Norm | None = None

    def __init__(self, layer: Any, where: int = LAYER) -> None:
        self._layer, self._where = layer, where

    def __call__(self, step: Step, given: Tensor | None, reader: Norm | None) -> Tensor | None:
        """Add their output to the residual stream; returns the statistics for the reader."""
        layer = self._layer
        hidden = layer.pre_mlp_layernorm(step.residual.hidden.unsqueeze(1))
        output = layer.mlp(hidden, **padding_mask(layer, step.context))
        return _add(step, layer, layer.mlp_bda, output, reader, self._where)


class MambaModule:
    """``layer.norm`` and ``layer.mixer`` of a hybrid model."""

    norm: Norm | None = None

    def __init__(self, layer: Any, where: int) -> None:
        self._layer, self._where = layer, where

    def __call__(self, step: Step, given: Tensor | None, reader: Norm | None) -> Tensor | None:
        """Add their output to the residual stream; returns the statistics for the reader."""
        layer, residual = self._layer, step.residual
        output, bias = layer.mixer(layer.norm(residual.hidden.unsqueeze(1)), step.context)
        return residual.add(output, bias, reader, self._where)


class LayerModule:
    """A whole layer, of which nobody knows how its parts go together."""

    norm: Norm | None = None

    def __init__(self, layer: Any) -> None:
        self._layer = layer

    def __call__(self, step: Step, given: Tensor | None, reader: Norm | None) -> Tensor | None:
        """Replace the residual stream; returns the statistics for the reader."""
        hidden, _ = self._layer(
            hidden_states=step.residual.hidden.unsqueeze(1),
            attention_mask=None,
            inference_context=step.context,
        )
        return step.residual.replace(hidden, reader, LAYER)


class HeadModule:
    """``model.decoder.final_layernorm`` and the output layer."""

    norm: Norm | None = None

    def __init__(self, model: Any) -> None:
        self._model = model

    def __call__(self, step: Step, given: Tensor | None, reader: Norm | None) -> None:
        """Fill the step's logits, and its hidden states if it wants them."""
        model, hidden = self._model, step.residual.hidden.unsqueeze(1)
        if model.decoder.final_layernorm is not None:
            hidden = model.decoder.final_layernorm(hidden)
        step.logits.copy_(model.logits(hidden, gather_output=False).squeeze(0))
        if step.hidden_states is not None:
            step.hidden_states.copy_(hidden.squeeze(1))


def _add(
    step: Step,
    layer: Any,
    bias_dropout_add: Any,
    output: tuple[Tensor, Tensor | None],
    reader: Norm | None,
    where: int,
) -> Tensor | None:
    residual = step.residual
    if bias_dropout_add is get_bias_dropout_add:
        return residual.add(*output, reader, where)
    fused = layer.config.bias_dropout_fusion
    total = bias_dropout_add(False, fused)(
        output, residual.hidden.unsqueeze(1), layer.hidden_dropout
    )
    return residual.replace(total, reader, where)
