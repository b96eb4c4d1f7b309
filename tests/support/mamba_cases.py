"""Random Mamba-2 layers, their pools, and the recurrence in float64 written once more."""

from __future__ import annotations

from typing import Any

import torch

from megatron_async.kernels.mamba.layer import (
    GatedNorm,
    LayerStates,
    MambaParameters,
    MambaSizes,
    StateRows,
)

SIZES = MambaSizes(heads=4, head_dim=8, groups=2, state_size=16)


def parameters_of(
    sizes: MambaSizes = SIZES,
    *,
    norm: str = "after",
    wide_d: bool = False,
    conv_bias: bool = True,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    dt_limits: tuple[float, float] = (0.0, float("inf")),
) -> MambaParameters:
    """Random parameters; ``norm`` is "after" the gate, "before" it, or "none"."""
    inner = sizes.inner
    gated = GatedNorm(
        (1 + torch.randn(inner) / 4).to(device, dtype), 1e-5, inner // sizes.groups,
        norm == "before",
    )  # fmt: skip
    return MambaParameters(
        sizes,
        (torch.randn(sizes.conv_channels, sizes.conv_width) / 2).to(device, dtype),
        torch.randn(sizes.conv_channels).to(device, dtype) if conv_bias else None,
        torch.randn(sizes.heads).to(device, dtype),
        torch.rand(sizes.heads).to(device),
        torch.randn(inner if wide_d else sizes.heads).to(device),
        None if norm == "none" else gated,
        dt_limits,
    )


def pool_of(
    slots: int,
    sizes: MambaSizes = SIZES,
    *,
    window: int = 1,
    dtype: torch.dtype = torch.float32,
    state_dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> LayerStates:
    """A pool of ``slots`` slots and the null slot, full of NaN."""
    shape = (slots + 1, sizes.ring(window), sizes.input_width)
    inputs = torch.full(shape, float("nan"), dtype=dtype, device=device)
    shape = (slots + 1, sizes.heads, sizes.head_dim, sizes.state_size)
    return LayerStates(inputs, torch.full(shape, float("nan"), dtype=state_dtype, device=device))


def rows_of(*columns: tuple[int, ...], device: str = "cpu") -> StateRows:
    """Rows from tuples of slot, first, length, start, behind, keep."""
    return StateRows(*torch.tensor(columns, device=device).T.contiguous())


def expected(projected: torch.Tensor, parameters: MambaParameters) -> tuple[Any, Any]:
    """One sequence's tokens from position 0: float64 output ``[T, inner]`` and last state."""
    sizes, (low, high) = parameters.sizes, parameters.dt_limits
    wide = projected.double().cpu()
    z, taken, dt = wide.split([sizes.inner, sizes.conv_channels, sizes.heads], dim=-1)
    weight = parameters.conv_weight.double().cpu().view(-1, sizes.conv_width)
    padded = torch.nn.functional.pad(taken.T, (sizes.conv_width - 1, 0))
    bias = None if parameters.conv_bias is None else parameters.conv_bias.double().cpu()
    conv = torch.nn.functional.conv1d(padded, weight[:, None], bias, groups=len(weight)).T
    conv = torch.nn.functional.silu(conv).to(projected.dtype).double()
    size = sizes.groups * sizes.state_size
    x, b, c = conv.split([sizes.inner, size, size], dim=-1)
    dt = torch.nn.functional.softplus(dt + parameters.dt_bias.double().cpu()).clamp(low, high)
    decay = -parameters.a_log.double().cpu().exp()
    d = parameters.d.double().cpu().view(sizes.heads, -1).expand(-1, sizes.head_dim)
    state = torch.zeros(sizes.heads, sizes.head_dim, sizes.state_size, dtype=torch.float64)
    out = torch.empty(len(wide), sizes.inner, dtype=torch.float64)
    for t in range(len(wide)):
        for head in range(sizes.heads):
            group = slice(head // (sizes.heads // sizes.groups) * sizes.state_size, None)
            b_t, c_t = (v[t, group][: sizes.state_size] for v in (b, c))
            at = slice(head * sizes.head_dim, (head + 1) * sizes.head_dim)
            state[head] *= torch.exp(decay[head] * dt[t, head])
            state[head] += dt[t, head] * torch.outer(x[t, at], b_t)
            out[t, at] = state[head] @ c_t + d[head] * x[t, at]
    gate, norm = torch.nn.functional.silu(z), parameters.norm
    if norm is None:
        return out * gate, state
    out = out if norm.before_gate else out * gate
    groups = out.unflatten(-1, (-1, norm.group_size))
    out = torch.nn.functional.rms_norm(groups, (norm.group_size,), None, norm.eps).flatten(-2)
    out = out * norm.weight.double().cpu()
    return (out * gate if norm.before_gate else out), state
