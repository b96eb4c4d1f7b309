"""The layers of hybrid models: one part behind one norm, added to the residual stream.

Their parameters have the names of megatron-core's ``MambaStack``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import dropout

from megatron_async import megatron_compat as compat  # noqa: F401  (before megatron)
from megatron_async.models.batch import padding_mask
from megatron_async.models.layers.norm import Norm, fusable

from megatron.core.transformer.module import MegatronModule  # isort: skip
from megatron.core.transformer.spec_utils import ModuleSpec, build_module  # isort: skip
from megatron.core.transformer.transformer_layer import TransformerLayer  # isort: skip


class _OnePart:
    """What the layers have in common."""

    training: bool
    hidden_dropout: float
    residual_multiplier: float = 1.0

    def attach(self, next_norm: torch.nn.Module | None) -> None:
        """Take the norm that reads this layer's output; None leaves that addition alone."""
        # Not a submodule: it belongs to the layer that applies it.
        self.__dict__["next_norm"] = next_norm

    def _add(self, output: tuple[Tensor, Tensor | None], hidden: Tensor) -> tuple[Tensor, None]:
        """The residual stream with a part's output and bias; on CUDA in inference in one kernel
        with the next layer's norm."""
        x, bias = output
        next_norm = self.__dict__.get("next_norm")
        if self.residual_multiplier != 1:
            x, bias = (x if bias is None else x + bias) * self.residual_multiplier, None
        if self.training and self.hidden_dropout:
            x, bias = dropout(x if bias is None else x + bias, self.hidden_dropout), None
        if isinstance(next_norm, Norm) and fusable(hidden) and not self.training:
            return next_norm.add(x, bias, hidden), None
        return hidden + (x if bias is None else x + bias), None


def _inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Any]:
    """Hidden states and the inference context, as megatron's block gives them."""
    context = kwargs.get("inference_context")
    if context is None:
        context = kwargs.get("inference_params")
    return args[0] if args else kwargs["hidden_states"], context


class AttentionLayer(_OnePart, TransformerLayer):  # type: ignore[misc]
    """``input_layernorm`` and ``self_attention``."""

    def __init__(self, *args: Any, residual_multiplier: float = 1.0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.residual_multiplier = residual_multiplier

    @property
    def first_norm(self) -> torch.nn.Module:
        """The norm that reads the residual stream."""
        norm: torch.nn.Module = self.input_layernorm
        return norm

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        hidden, context = _inputs(args, kwargs)
        normed = self.input_layernorm(hidden)
        return self._add(self.self_attention(normed, inference_context=context), hidden)


class MlpLayer(_OnePart, TransformerLayer):  # type: ignore[misc]
    """``pre_mlp_layernorm`` and ``mlp``, which may be experts."""

    def __init__(self, *args: Any, residual_multiplier: float = 1.0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.residual_multiplier = residual_multiplier

    @property
    def first_norm(self) -> torch.nn.Module:
        """The norm that reads the residual stream."""
        norm: torch.nn.Module = self.pre_mlp_layernorm
        return norm

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        hidden, context = _inputs(args, kwargs)
        mask = padding_mask(self, context)
        return self._add(self.mlp(self.pre_mlp_layernorm(hidden), **mask), hidden)


class MambaLayer(_OnePart, MegatronModule):  # type: ignore[misc]
    """``norm`` and ``mixer``.

    Args:
        norm: class of the norm.
        mixer: of :class:`~megatron_async.models.mamba.mixer.MambaMixer`.
    """

    def __init__(
        self,
        config: Any,
        norm: type,
        mixer: ModuleSpec,
        layer_number: int = 1,
        residual_multiplier: float = 1.0,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self.layer_number = layer_number
        self.hidden_dropout = config.hidden_dropout
        self.residual_multiplier = residual_multiplier
        self.norm = norm(config, config.hidden_size, config.layernorm_epsilon)
        self.mixer = build_module(mixer, config=config, layer_number=layer_number)

    @property
    def first_norm(self) -> torch.nn.Module:
        """The norm that reads the residual stream."""
        norm: torch.nn.Module = self.norm
        return norm

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        hidden, context = _inputs(args, kwargs)
        return self._add(self.mixer(self.norm(hidden), inference_context=context), hidden)
