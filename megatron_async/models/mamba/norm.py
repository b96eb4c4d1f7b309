"""The norm behind a Mamba-2 mixer's scan, gated by z."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_async.models.activation import silu


class GatedRMSNorm(torch.nn.Module):
    """RMSNorm of ``x * silu(z)`` in each group of channels, statistics in fp32 (megatron-core's
    ``ExtendedRMSNorm``; Mamba-2, arXiv:2405.21060).

    Args:
        channels: of x and z.
        groups: of them, each with statistics of its own.
    """

    def __init__(self, channels: int, groups: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.groups = groups
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(channels, dtype=dtype))

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        """``x`` and ``z`` ``[..., channels]``; returns the like of ``z``."""
        gated = (x.float() * silu(z.float())).unflatten(-1, (self.groups, -1))
        mean_square = gated.square().mean(-1, keepdim=True)
        normed = (gated * torch.rsqrt(mean_square + self.eps)).flatten(-2)
        return (normed * self.weight.float()).to(z.dtype)
