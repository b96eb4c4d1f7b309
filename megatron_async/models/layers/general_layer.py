"""Decoder layers whose attention, MLP and norms go together in another way than megatron's."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from megatron_async import megatron_compat as compat  # noqa: F401  (before megatron)
from megatron_async.models.batch import padding_mask

from megatron.core.transformer.identity_op import IdentityOp  # isort: skip
from megatron.core.transformer.transformer_layer import TransformerLayer  # isort: skip


class GeneralDecoderLayer(TransformerLayer):  # type: ignore[misc]
    """megatron's layer with norms behind its parts, or with both parts side by side.

    Args:
        post_norm: class of the norms behind attention and MLP, before the residual addition.
        parallel_residual: see ``ModelConfig``.
        residual_multiplier: of what attention and MLP add to the residual stream.
    """

    def __init__(
        self,
        *args: Any,
        post_norm: type | None = None,
        parallel_residual: Literal["one_norm", "two_norms"] | None = None,
        residual_multiplier: float = 1.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.parallel_residual = parallel_residual
        self.residual_multiplier = residual_multiplier
        config = self.config
        arguments = (config, config.hidden_size, config.layernorm_epsilon)
        self.post_attention_layernorm: torch.nn.Module = IdentityOp()
        self.post_mlp_layernorm: torch.nn.Module = IdentityOp()
        if post_norm is not None:
            self.post_attention_layernorm = post_norm(*arguments)
            self.post_mlp_layernorm = post_norm(*arguments)

    @property
    def first_norm(self) -> torch.nn.Module:
        """The norm that reads the residual stream."""
        norm: torch.nn.Module = self.input_layernorm
        return norm

    def attach(self, next_norm: torch.nn.Module | None) -> None:
        """Nothing: no addition is computed together with the norm that follows it."""

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        hidden: Tensor = args[0] if args else kwargs["hidden_states"]
        context = kwargs.get("inference_context")
        if context is None:
            context = kwargs.get("inference_params")
        mask = padding_mask(self, context)
        normed = self.input_layernorm(hidden)
        packed = kwargs.get("packed_seq_params")
        attended = _sum(
            self.self_attention(normed, inference_context=context, packed_seq_params=packed)
        )
        attended = self._scaled(self.post_attention_layernorm(attended))
        if self.parallel_residual is None:
            hidden = hidden + attended
            normed = self.pre_mlp_layernorm(hidden)
        elif self.parallel_residual == "two_norms":
            normed = self.pre_mlp_layernorm(hidden)
        output = self._scaled(self.post_mlp_layernorm(_sum(self.mlp(normed, **mask))))
        if self.parallel_residual is not None:
            output = attended + output
        return hidden + output, None

    def _scaled(self, x: Tensor) -> Tensor:
        return x if self.residual_multiplier == 1 else x * self.residual_multiplier


def _sum(output: tuple[Tensor, Tensor | None]) -> Tensor:
    x, bias = output
    return x if bias is None else x + bias
