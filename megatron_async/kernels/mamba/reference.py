"""Mamba-2 layers between their two projections, in PyTorch: the readable reference of the kernels.

The state update is the recurrence itself, token by token and in float32, in windows and in prefill
chunks alike. On the CPU a token's bits therefore depend on the tokens of its sequence alone: not on
how a prompt is divided into chunks, on windows and drafts, on evictions, or on the other rows
(``tests/unit/kernels/test_mamba_kernels.py``).
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
    taken = torch.arange(-most_behind - lead, most, device=projected.device)
    inputs = _inputs(projected, states, rows, taken.expand(len(live), -1))
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
    _finish(y, projected, parameters, rows.first[:, None] + steps[tokens], active[:, tokens], out)
    remember(projected, states, rows)


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


def scan_pieces(
    projected: Tensor,
    parameters: MambaParameters,
    states: LayerStates,
    rows: StateRows,
    out: Tensor,
    *,
    piece: int = 64,
) -> None:
    """:func:`scan_chunks` without the host, in shapes that are static, so it can be captured.

    The T tokens are gone through in pieces (SSD, arXiv:2405.21060, section 6), which end at
    multiples of ``piece`` positions: within one tokens meet as in attention, between them there is
    the state. Equal to the recurrence up to rounding.
    """
    heads, count = parameters.sizes.heads, len(rows.slots)
    device, lead = projected.device, parameters.sizes.conv_width - 1
    number = torch.where(rows.lengths > 0, (rows.starts % piece + rows.lengths - 1) // piece + 1, 0)
    ends = number.cumsum(0)
    index = torch.arange(len(projected) // piece + 2 * count, device=device)
    owner = torch.searchsorted(ends, index, right=True)
    used, owner = owner < count, owner.clamp(max=count - 1)
    row = StateRows(*(column[owner] for column in rows))
    place = index - (ends - number)[owner]
    begin = place * piece - row.starts % piece
    steps = begin[:, None] + torch.arange(piece, device=device)
    active = used[:, None] & (steps >= 0) & (steps < row.lengths[:, None])
    active &= (row.slots != states.null_slot)[:, None]
    taken = begin[:, None] + torch.arange(-lead, piece, device=device)
    inputs = _inputs(projected, states, row, taken)
    x, b, c, dt = (
        torch.where(active.view(active.shape + (1,) * (value.dim() - 2)), value, 0)
        for value in _convolved(inputs, parameters, projected.dtype)
    )
    b, c = (value.repeat_interleave(heads // value.shape[2], dim=2) for value in (b, c))

    fall = (dt * -torch.exp(parameters.a_log.float())).cumsum(1)
    total = fall[:, -1]
    past = torch.ones(piece, piece, dtype=torch.bool, device=device).tril()[..., None]
    fades = (fall[:, :, None] - fall[:, None]).masked_fill(~past, float("-inf")).exp()
    meet = torch.einsum("iqhn,ishn->iqsh", c, b) * fades * dt[:, None]
    y = torch.einsum("iqsh,ishp->iqhp", meet, x)
    share = dt * (total[:, None] - fall).exp()
    entering = torch.einsum("ish,ishp,ishn->ihpn", share, x, b)

    initial = states.ssm[rows.slots].float()
    initial = initial.masked_fill((rows.starts == 0)[:, None, None, None], 0)
    state = initial[0]
    before, after = [], []
    for i in range(len(index)):
        state = torch.where(place[i] == 0, initial.index_select(0, owner[i : i + 1])[0], state)
        before.append(state)
        state = state * total[i].exp()[:, None, None] + entering[i]
        after.append(state)
    y += torch.einsum("iqhn,ihpn->iqhp", c, torch.stack(before)) * fall.exp()[..., None]
    y += x * _skip(parameters)
    last = torch.stack(after)[(ends - 1).clamp(min=0)].to(states.ssm.dtype)
    states.ssm[torch.where(rows.lengths > 0, rows.slots, states.null_slot)] = last
    _finish(y, projected, parameters, row.first[:, None] + steps, active, out)
    remember(projected, states, rows)


def gated_norm(y: Tensor, z: Tensor, norm: GatedNorm | None) -> Tensor:
    """``y`` and ``z`` ``[..., inner]`` to fp32 ``[..., inner]``: the gate, and the norm if any."""
    gate = _silu(z.float())
    if norm is None:
        return y.float() * gate
    value = y.float() if norm.before_gate else y.float() * gate
    groups = value.unflatten(-1, (-1, norm.group_size))
    scale = torch.rsqrt(groups.square().mean(-1, keepdim=True) + norm.eps)
    normed = (groups * scale).flatten(-2) * norm.weight.float()
    return torch.mul(normed, gate) if norm.before_gate else normed


def _silu(x: Tensor) -> Tensor:
    """SiLU in operations whose bits do not depend on an element's place
    (``models/layers/activation.py``)."""
    return x / (1 + torch.exp(-x))


def _softplus(x: Tensor) -> Tensor:
    return torch.where(x > SOFTPLUS_LINEAR, x, torch.log1p(torch.exp(x)))


def _inputs(projected: Tensor, states: LayerStates, rows: StateRows, steps: Tensor) -> Tensor:
    """fp32 ``[R, S, input_width]``: what the projection gave at ``starts + steps``, int64 ``[R,
    S]``."""
    ring, width = states.inputs.shape[1:]
    positions = rows.starts[:, None] + steps
    before = states.inputs[rows.slots[:, None], positions % ring]
    before = before.masked_fill((positions < 0)[..., None], 0)
    at = (rows.first[:, None] + steps).clamp(0, len(projected) - 1)
    return torch.where((steps < 0)[..., None], before, projected[:, -width:][at]).float()


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


def _finish(
    y: Tensor,
    projected: Tensor,
    parameters: MambaParameters,
    at: Tensor,
    active: Tensor,
    out: Tensor,
) -> None:
    """Gate and norm ``y`` ``[R, S, H, P]``, and write it to ``out[at]`` where it is active."""
    z = projected[:, : parameters.sizes.inner][at.clamp(0, len(projected) - 1)]
    value = gated_norm(y.flatten(2), z, parameters.norm).to(out.dtype)
    # What is not active goes to a row behind the others.
    padded = torch.cat([out, out[:1]])
    padded[torch.where(active, at, len(out))] = value
    out.copy_(padded[:-1])


def remember(projected: Tensor, states: LayerStates, rows: StateRows) -> None:
    """Keep what the projection gave for the rows' last tokens, as many as the ring has room for."""
    ring, width = states.inputs.shape[1:]
    steps = rows.lengths[:, None] - 1 - torch.arange(ring, device=projected.device)
    slots = torch.where(steps >= 0, rows.slots[:, None], states.null_slot)
    at = (rows.first[:, None] + steps).clamp(0, len(projected) - 1)
    states.inputs[slots, (rows.starts[:, None] + steps) % ring] = projected[:, -width:][at]
