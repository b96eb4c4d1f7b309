"""Activation of the MLP's hidden layer, each row independent of how many there are.

The CPU's fused ``silu`` and ``gelu`` treat the last few elements of a thread's share with
scalar code whose ``exp`` rounds differently from the vector code, so a row's result there
depends on its place. ``exp``, ``erf``, ``tanh`` and arithmetic do not.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_async.models.layers.norm import fusable


def silu(x: Tensor) -> Tensor:
    """``x * sigmoid(x)``, computed in fp32."""
    if x.is_cuda or x.requires_grad:
        return F.silu(x)
    wide = x.float()
    return (wide / (1 + torch.exp(-wide))).to(x.dtype)


def gelu(x: Tensor) -> Tensor:
    """Exact GELU, computed in fp32."""
    if x.is_cuda or x.requires_grad:
        return F.gelu(x)
    wide = x.float()
    return (wide * 0.5 * (1 + torch.erf(wide * math.sqrt(0.5)))).to(x.dtype)


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU's tanh approximation, computed in fp32."""
    if x.is_cuda or x.requires_grad:
        return F.gelu(x, approximate="tanh")
    wide = x.float()
    inner = math.sqrt(2 / math.pi) * (wide + 0.044715 * wide * wide * wide)
    return (wide * 0.5 * (1 + torch.tanh(inner))).to(x.dtype)


class SwiGLU(torch.nn.Module):
    """``[..., 2F] -> [..., F]``: SiLU of the first half times the second (arXiv:2002.05202).

    Attributes:
        feeds: the linear layer for which kernels quantize the result
            (``quantized/fused_inputs.py``).
    """

    feeds: Any = None

    def __init__(self, config: Any = None) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        if fusable(x):
            if self.feeds is not None:
                from megatron_async.models.quantized import fused_inputs

                return fused_inputs.swiglu(self.feeds, x)
            from megatron_async.kernels.norm.swiglu import swiglu

            return swiglu(x)
        gate, up = x.chunk(2, dim=-1)
        return silu(gate) * up


class ClampedSwiGLU(torch.nn.Module):
    """``[..., 2F] -> [..., F]``: ``x * sigmoid(1.702 x)`` of the first half times the second plus 1
    (GPT-OSS). The first is at most, the second between minus and plus megatron's
    ``activation_func_clamp_value``."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.limit: float = config.activation_func_clamp_value

    def forward(self, x: Tensor) -> Tensor:
        gate, up = x.float().chunk(2, dim=-1)
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return (gate / (1 + torch.exp(-1.702 * gate)) * (up + 1)).to(x.dtype)


class GELU(torch.nn.Module):
    """``[..., F] -> [..., F]``, exact."""

    def __init__(self, config: Any = None) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        return gelu(x)


class GELUTanh(torch.nn.Module):
    """``[..., F] -> [..., F]``, tanh approximation."""

    def __init__(self, config: Any = None) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        return gelu_tanh(x)


class GEGLU(torch.nn.Module):
    """``[..., 2F] -> [..., F]``: exact GELU of the first half times the second."""

    def __init__(self, config: Any = None) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return gelu(gate) * up


class GEGLUTanh(torch.nn.Module):
    """``[..., 2F] -> [..., F]``: GELU's tanh approximation of the first half times the second."""

    def __init__(self, config: Any = None) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return gelu_tanh(gate) * up


class ReLU(torch.nn.Module):
    """``[..., F] -> [..., F]``."""

    def __init__(self, config: Any = None) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x)


class SquaredReLU(torch.nn.Module):
    """``[..., F] -> [..., F]``: the square of ReLU (arXiv:2109.08668)."""

    def __init__(self, config: Any = None) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x).square()
