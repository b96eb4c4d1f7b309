"""Mamba-2 layers between their two projections, in PyTorch: the readable reference of the kernels.

The state update is the recurrence itself, token by token and in float32, in windows and in prefill
chunks alike. On the CPU a token's bits therefore depend on the tokens of its sequence alone: not on
how a prompt is divided into chunks, on windows and drafts, on evictions, or on the other rows
(``tests/unit/test_mamba_kernels.py``).
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_async.kernels.mamba.layer import GatedNorm, LayerStates, MambaParameters, StateRows

SOFTPLUS_LINEAR = 20.0
"""From here on softplus is the identity, as in PyTorch."""


def mix_rows(
    projected: Tensor,
    parameters: MambaParameters,
    states: LayerStates,
    rows: StateRows,
    out: Tensor,
    *,
    most: int,
) -> None:
    """Convolution, state update, gate and norm of rows of up to ``most`` tokens.

    Nothing is read on the host, and shapes are static, so this can be captured.

    Args:
        projected: ``[T, projection]``, what the input projection gave.
        states: read, and written: the tokens' inputs, and ``ssm`` after ``rows.keeps`` of them.
        out: ``[T, inner]``, filled for the tokens of rows that are not of the null slot; other
            tokens are left as they are.
    """
    sizes = parameters.sizes
    lead = sizes.conv_width - 1
    # The ring has room for a window that was accepted, its first token's lead and a new window.
    most_behind = (states.inputs.shape[1] - sizes.conv_width) // 2
    steps = torch.arange(-most_behind, most, device=projected.device)
    live = rows.slots != states.null_slot
    active = (steps >= -rows.behind[:, None]) & (steps < rows.lengths[:, None]) & live[:, None]
    inputs = _inputs(projected, states, rows, torch.arange(-most_behind - lead, most).to(steps))
    x, b, c, dt = _convolved(inputs, parameters, projected.dtype)

    is_new = (rows.starts == rows.behind) | ~live
    state = states.ssm[rows.slots].float().masked_fill(is_new[:, None, None, None], 0)
    kept = state
    mixed = []
    decay = torch.exp(dt * -torch.exp(parameters.a_log.float()))
    for i in range(len(steps)):
        entering = (x[:, i] * dt[:, i, :, None])[..., None] * _by_head(b[:, i], sizes.heads)
        updated = state * decay[:, i, :, None, None] + entering
        if states.ssm.dtype != torch.float32:
            updated = updated.to(states.ssm.dtype).float()
        state = torch.where(active[:, i, None, None, None], updated, state)
        token = i - most_behind
        kept = torch.where((rows.keeps == token + 1)[:, None, None, None], state, kept)
        if token >= 0:
            mixed.append((state * _by_head(c[:, i], sizes.heads)).sum(-1))
    states.ssm[rows.slots] = kept.to(states.ssm.dtype)

    tokens = slice(most_behind, None)
    y = torch.stack(mixed, 1) + x[:, tokens] * _skip(parameters)
    at = (rows.first[:, None] + steps[tokens]).clamp(max=len(projected) - 1)
    z = projected[:, : sizes.inner][at]
    gated = gated_norm(y.flatten(2), z, parameters.norm).to(out.dtype)
    _store(out, at, gated, active[:, tokens])
    _remember(inputs[:, lead + most_behind :], states, rows, active[:, tokens])


def scan_chunks(
    projected: Tensor,
    parameters: MambaParameters,
    states: LayerStates,
    rows: StateRows,
    out: Tensor,
) -> None:
    """The prefill chunks of a step, see :func:`mix_rows`; the host reads how long they are."""
    lengths = rows.lengths.tolist()
    for row, length in enumerate(lengths):
        if length:
            chunk = StateRows(*(column[row : row + 1] for column in rows))
            mix_rows(projected, parameters, states, chunk, out, most=length)


def gated_norm(y: Tensor, z: Tensor, norm: GatedNorm | None) -> Tensor:
    """``y`` and ``z`` ``[..., inner]`` to fp32 ``[..., inner]``: the gate, and the norm if any."""
    gate = _silu(z.float())
    if norm is None:
        return y.float() * gate
    value = y.float() if norm.before_gate else y.float() * gate
    groups = value.unflatten(-1, (-1, norm.group_size))
    scale = torch.rsqrt(groups.square().mean(-1, keepdim=True) + norm.eps)
    normed = (groups * scale).flatten(-2) * norm.weight.float()
    return normed * gate if norm.before_gate else normed


def _silu(x: Tensor) -> Tensor:
    """In operations whose bits do not depend on an element's place (``models/activation.py``)."""
    return x / (1 + torch.exp(-x))


def _softplus(x: Tensor) -> Tensor:
    return torch.where(x > SOFTPLUS_LINEAR, x, torch.log1p(torch.exp(x)))


def _inputs(projected: Tensor, states: LayerStates, rows: StateRows, steps: Tensor) -> Tensor:
    """fp32 ``[R, len(steps), input_width]``: what the projection gave at ``starts + steps``."""
    ring, width = states.inputs.shape[1:]
    positions = rows.starts[:, None] + steps
    before = states.inputs[rows.slots[:, None], positions % ring]
    before = before.masked_fill((positions < 0)[..., None], 0)
    at = (rows.first[:, None] + steps).clamp(0, len(projected) - 1)
    return torch.where((steps < 0)[:, None], before, projected[:, -width:][at]).float()


def _convolved(
    inputs: Tensor, parameters: MambaParameters, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x ``[R, S, H, P]``, B and C ``[R, S, G, N]``, dt ``[R, S, H]`` of S + conv_width - 1 inputs.

    The convolution is computed in fp32 and rounded to ``dtype``, the model's."""
    sizes = parameters.sizes
    width = sizes.conv_width
    steps = inputs.shape[1] - width + 1
    weight = parameters.conv_weight.float().view(-1, width)
    taken = inputs[..., : sizes.conv_channels]
    total = taken[:, :steps] * weight[:, 0]
    for tap in range(1, width):
        total = total + taken[:, tap : tap + steps] * weight[:, tap]
    if parameters.conv_bias is not None:
        total = total + parameters.conv_bias.float()
    total = _silu(total).to(dtype).float()
    size = sizes.groups * sizes.state_size
    x, b, c = total.split([sizes.inner, size, size], dim=-1)
    dt = _softplus(inputs[:, width - 1 :, sizes.conv_channels :] + parameters.dt_bias.float())
    return (
        x.unflatten(-1, (sizes.heads, sizes.head_dim)),
        b.unflatten(-1, (sizes.groups, sizes.state_size)),
        c.unflatten(-1, (sizes.groups, sizes.state_size)),
        dt.clamp(*parameters.dt_limits),
    )


def _by_head(x: Tensor, heads: int) -> Tensor:
    """``[R, G, N]`` to ``[R, H, 1, N]``."""
    return x.repeat_interleave(heads // x.shape[1], dim=1)[:, :, None]


def _skip(parameters: MambaParameters) -> Tensor:
    """fp32 ``[H, 1]`` or ``[H, P]``."""
    return parameters.d.float().view(parameters.sizes.heads, -1)


def _store(out: Tensor, at: Tensor, values: Tensor, active: Tensor) -> None:
    """Write the active tokens' ``values`` ``[R, S, inner]`` to ``out[at]``."""
    # What is not active goes to a row behind the others.
    padded = torch.cat([out, out[:1]])
    padded[torch.where(active, at, len(out))] = values
    out.copy_(padded[:-1])


def _remember(inputs: Tensor, states: LayerStates, rows: StateRows, active: Tensor) -> None:
    """Keep the inputs ``[R, S, input_width]`` of the active tokens, the last of them that fit."""
    ring = states.inputs.shape[1]
    steps = torch.arange(inputs.shape[1], device=inputs.device)
    last = active & (steps >= rows.lengths[:, None] - ring)
    slots = torch.where(last, rows.slots[:, None], states.null_slot)
    at = (rows.starts[:, None] + steps) % ring
    states.inputs[slots, at] = inputs.to(states.inputs.dtype)
