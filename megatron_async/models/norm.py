"""RMSNorm and LayerNorm with the constructor that megatron's ``ModuleSpec`` calls."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_FUSED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def fusable(x: Tensor) -> bool:
    """Whether ``x`` may go to a fused Triton kernel: on CUDA, where no gradient is wanted."""
    return x.is_cuda and not torch.is_grad_enabled() and x.dtype in _FUSED_DTYPES


class _Norm(torch.nn.Module):
    bias: Tensor | None

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = self._parameter(torch.ones(hidden_size, dtype=config.params_dtype), config)

    @staticmethod
    def _parameter(value: Tensor, config: Any) -> torch.nn.Parameter:
        parameter = torch.nn.Parameter(value)
        parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return parameter

    def add(self, x: Tensor, x_bias: Tensor | None, residual: Tensor) -> Tensor:
        """``x + x_bias + residual``; applying this norm to the very tensor returned is free.

        For tensors that are :func:`fusable` only: the norm is computed in the same kernel.
        """
        from megatron_async.kernels.norm.add_norm import add_norm

        hidden, normed = add_norm(x, residual, self.weight, self.bias, self.eps, x_bias)
        hidden.normed_by = (self, normed)  # type: ignore[attr-defined]
        return hidden

    def _fused(self, x: Tensor) -> Tensor:
        from megatron_async.kernels.norm.add_norm import add_norm

        norm, normed = getattr(x, "normed_by", (None, x))
        if norm is self:
            return normed
        return add_norm(x, None, self.weight, self.bias, self.eps)[1]


class RMSNorm(_Norm):
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension, statistics in fp32."""

    bias = None

    def forward(self, x: Tensor) -> Tensor:
        if fusable(x):
            return self._fused(x)
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class LayerNorm(_Norm):
    """``(x - mean) / sqrt(var + eps) * weight + bias`` over the last dimension, fp32 inside."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(config, hidden_size, eps)
        self.bias = self._parameter(torch.zeros(hidden_size, dtype=config.params_dtype), config)

    def forward(self, x: Tensor) -> Tensor:
        if fusable(x):
            return self._fused(x)
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


def norm_class(normalization: str, device: torch.device) -> type:
    """The class that builds a model's norms on a device.

    Transformer Engine's or Apex's where it is installed and the device is a GPU, else ours.
    """
    if device.type == "cuda":
        try:
            import transformer_engine  # noqa: F401
            from megatron.core.extensions.transformer_engine import TENorm

            transformer_engine_norm: type = TENorm
            return transformer_engine_norm
        except ImportError:
            pass
        if normalization == "LayerNorm":
            try:
                import apex  # noqa: F401
                from megatron.core.fusions.fused_layer_norm import FusedLayerNorm

                apex_norm: type = FusedLayerNorm
                return apex_norm
            except ImportError:
                pass
    return RMSNorm if normalization == "RMSNorm" else LayerNorm
