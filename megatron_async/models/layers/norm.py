"""RMSNorm and LayerNorm with the constructor that megatron's ``ModuleSpec`` calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from megatron_async.kernels.gemm.scaled_e4m3 import Sums
    from megatron_async.kernels.ranks.peer_rows import PeerRows

_FUSED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def fusable(x: Tensor) -> bool:
    """Whether ``x`` may go to a fused Triton kernel: on CUDA, where no gradient is wanted."""
    return x.is_cuda and not torch.is_grad_enabled() and x.dtype in _FUSED_DTYPES


class Norm(torch.nn.Module):
    """Base of norms over the last dimension, statistics in fp32."""

    bias: Tensor | None
    center = False
    """Subtract the mean: LayerNorm."""
    has_bias = False
    offset = 0.0
    """Added to the weight, in fp32 (megatron's ``layernorm_zero_centered_gamma``)."""
    feeds: Any = None
    """The linear layer for which kernels quantize the result (``quantized/fused_inputs.py``)."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        shape = self._shape(config, hidden_size)
        weight = torch.full(shape, 1.0 - self.offset, dtype=config.params_dtype)
        self.weight: Tensor = self._parameter(weight, config)
        bias = self._parameter(torch.zeros_like(weight), config) if self.has_bias else None
        self.register_parameter("bias", bias)

    def _shape(self, config: Any, hidden_size: int) -> tuple[int, ...]:
        return (hidden_size,)

    @staticmethod
    def _parameter(value: Tensor, config: Any) -> torch.nn.Parameter:
        parameter = torch.nn.Parameter(value)
        parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return parameter

    def add(
        self, x: Tensor, x_bias: Tensor | None, residual: Tensor, *, in_segments: bool = False
    ) -> Tensor:
        """``x + x_bias + residual``; applying this norm to the very tensor returned is free.

        For tensors that are :func:`fusable` only: the norm is computed in the same kernel. With
        ``in_segments`` ``x`` is what ``add_norm`` says; nothing may be quantized then.
        """
        hidden, normed = self._kernel(x, residual, x_bias, in_segments)
        hidden.normed_by = (self, normed)  # type: ignore[attr-defined]
        return hidden

    def add_scaled(self, sums: Sums, x_bias: Tensor | None, residual: Tensor) -> Tensor:
        """:meth:`add` of what ``sums`` are by their scales, with the same bits and in one kernel.
        For norms that quantize for a linear layer."""
        hidden, normed = self._kernel(sums, residual, x_bias)
        hidden.normed_by = (self, normed)  # type: ignore[attr-defined]
        return hidden

    def add_over_ranks(
        self, partial: Tensor, x_bias: Tensor | None, residual: Tensor, sums: PeerRows
    ) -> Tensor:
        """:meth:`add` of the sum over ranks of ``partial``, with the same bits and in one kernel.
        For norms with :attr:`sums_over_ranks`."""
        size = residual.shape[-1]
        hidden, normed = sums.add_norm(
            partial.view(-1, size), residual.view(-1, size), self.weight, self.eps, x_bias,
            self.offset,
        )  # fmt: skip
        hidden, normed = hidden.view(residual.shape), normed.view(residual.shape)
        hidden.normed_by = (self, normed)  # type: ignore[attr-defined]
        return hidden

    @property
    def sums_over_ranks(self) -> bool:
        """Whether :meth:`add_over_ranks` computes this norm."""
        is_plain = not self.center and self.bias is None and self.feeds is None
        return is_plain and self.weight.dtype == torch.bfloat16

    def forward(self, x: Tensor) -> Tensor:
        if fusable(x):
            norm, normed = getattr(x, "normed_by", (None, x))
            return normed if norm is self else self._kernel(x, None, None)[1]
        wide, weight, bias = x, self.weight, self.bias
        if self.offset:
            wide, weight = x.float(), self.weight.float() + self.offset
            bias = None if bias is None else bias.float()
        if self.center:
            return F.layer_norm(wide, weight.shape, weight, bias, self.eps).to(x.dtype)
        return F.rms_norm(wide, weight.shape, weight, self.eps).to(x.dtype)

    def _kernel(
        self,
        x: Tensor | Sums,
        residual: Tensor | None,
        x_bias: Tensor | None,
        in_segments: bool = False,
    ) -> tuple[Tensor, Tensor]:
        if self.feeds is not None:
            from megatron_async.models.quantized import fused_inputs

            return fused_inputs.add_norm(self, self.feeds, x, residual, x_bias)
        from megatron_async.kernels.norm.add_norm import add_norm

        assert isinstance(x, Tensor), "only a norm that quantizes applies scales"
        return add_norm(
            x, residual, self.weight, self.bias, self.eps, x_bias,
            center=self.center, offset=self.offset, in_segments=in_segments,
        )  # fmt: skip


class RMSNorm(Norm):
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension, statistics in fp32."""


class LayerNorm(Norm):
    """``(x - mean) / sqrt(var + eps) * weight + bias`` over the last dimension, fp32 inside."""

    center = has_bias = True


class ZeroCenteredRMSNorm(Norm):
    """:class:`RMSNorm` that multiplies by ``1 + weight``."""

    offset = 1.0


class ZeroCenteredLayerNorm(LayerNorm):
    """:class:`LayerNorm` that multiplies by ``1 + weight``."""

    offset = 1.0


class LayerNormWithoutBias(LayerNorm):
    """:class:`LayerNorm` of a weight alone."""

    has_bias = False


class L2Norm(torch.nn.Module):
    """RMSNorm of each head without a weight (megatron's ``qk_l2_norm``, Llama 4)."""

    def __init__(self, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], None, self.eps)


def norm_class(
    normalization: str, device: torch.device, *, zero_centered: bool = False, bias: bool = True
) -> type:
    """The class that builds a model's norms on a device.

    Transformer Engine's or Apex's where it is installed and the device is a GPU, else ours.

    Args:
        zero_centered: the weight is added to 1; such norms are always ours.
        bias: LayerNorm has one; those without are always ours.
    """
    if normalization == "LayerNorm" and not bias:
        return LayerNormWithoutBias
    if zero_centered:
        return ZeroCenteredRMSNorm if normalization == "RMSNorm" else ZeroCenteredLayerNorm
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


def head_norm_classes(norm: type, kind: str) -> tuple[type, type]:
    """The classes that build the norms of queries and of keys.

    Args:
        norm: what norms one vector.
        kind: ``ModelConfig.qk_norm_kind``.
    """
    if kind == "l2":
        return L2Norm, L2Norm
    if kind == "head":
        return norm, norm
    query, key = (
        type(f"{norm.__name__}OfAll{name}", (AllHeads, norm), {"heads_in": field, "kind": kind})
        for name, field in (("Queries", "num_attention_heads"), ("Keys", "num_query_groups"))
    )
    return query, key


class AllHeads(Norm):
    """A norm of ``[..., heads, head_dim]`` whose weights differ by head; no head may be split off
    to another rank.

    "each_head" has statistics of each head, "projection" those of all heads as one vector.
    """

    heads_in = ""
    """The field of megatron's config that counts the heads."""
    kind = ""

    def _shape(self, config: Any, hidden_size: int) -> tuple[int, ...]:
        return (getattr(config, self.heads_in), hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        if self.kind == "projection":
            wide = wide.flatten(-2)
        if self.center:
            normed = F.layer_norm(wide, wide.shape[-1:], None, None, self.eps)
        else:
            normed = F.rms_norm(wide, wide.shape[-1:], None, self.eps)
        weight = self.weight.float() + self.offset
        return (normed.view(x.shape) * weight).to(x.dtype)
