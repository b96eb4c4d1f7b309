"""Mamba-2 over whole sequences from zeros, in PyTorch, with gradients.

The scan is the chunked one of state space duality (Mamba-2, arXiv:2405.21060): inside of a chunk
of tokens it is a masked product like attention's, and between chunks the recurrence of states.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_async.kernels.mamba.layer import MambaParameters
from megatron_async.kernels.mamba.reference import gated_norm

CHUNK = 32


def mix_sequences(projected: Tensor, parameters: MambaParameters) -> Tensor:
    """What the input projection gave, ``[S, B, projection]``, to what the output projection takes,
    ``[S, B, inner]``."""
    sizes = parameters.sizes
    z, taken, dt = projected.transpose(0, 1).split(
        [sizes.inner, sizes.conv_channels, sizes.heads], dim=-1
    )
    weight = parameters.conv_weight.view(-1, 1, sizes.conv_width)
    padded = F.pad(taken.transpose(1, 2), (sizes.conv_width - 1, 0))
    convolved = F.conv1d(padded, weight, parameters.conv_bias, groups=sizes.conv_channels)
    x, b, c = (
        F.silu(convolved).transpose(1, 2).float()
        .split([sizes.inner, *[sizes.groups * sizes.state_size] * 2], dim=-1)
    )  # fmt: skip
    x = x.unflatten(-1, (sizes.heads, sizes.head_dim))
    b, c = (each.unflatten(-1, (sizes.groups, sizes.state_size)) for each in (b, c))
    steps = F.softplus(dt.float() + parameters.dt_bias.float()).clamp(*parameters.dt_limits)
    y = scan(x * steps[..., None], -steps * parameters.a_log.float().exp(), b, c)
    y = y + x * parameters.d.float().view(sizes.heads, -1)
    return gated_norm(y.flatten(2), z, parameters.norm).to(projected.dtype).transpose(0, 1)


def scan(x: Tensor, decay: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """``y_t = C_t h_t`` of ``h_t = exp(decay_t) h_(t-1) + x_t B_t``, from zeros.

    Args:
        x: ``[batch, S, heads, head_dim]``.
        decay: ``[batch, S, heads]``, at most 0.
        b, c: ``[batch, S, groups, state_size]``.

    Returns:
        ``[batch, S, heads, head_dim]``.
    """
    tokens, (heads, groups) = x.shape[1], (x.shape[2], b.shape[2])
    chunk = min(CHUNK, tokens)
    further = -tokens % chunk
    # [batch, chunks, tokens of a chunk, groups, heads of a group, ...]
    x = _chunks(x, chunk, further).unflatten(3, (groups, heads // groups))
    decay = _chunks(decay, chunk, further).unflatten(3, (groups, heads // groups))
    b, c = _chunks(b, chunk, further), _chunks(c, chunk, further)

    kept = torch.exp(_between(decay))
    scores = torch.einsum("zclgn,zcsgn->zclsg", c, b)
    y = torch.einsum("zclsg,zclsgh,zcsghp->zclghp", scores, kept, x)

    added = torch.einsum("zcsgn,zcsgh,zcsghp->zcghpn", b, kept[:, :, -1], x)
    total = decay.cumsum(2)
    state = torch.zeros_like(added[:, 0])
    before = []
    for number in range(added.shape[1]):
        before.append(state)
        state = state * torch.exp(total[:, number, -1])[..., None, None] + added[:, number]
    y = y + torch.einsum(
        "zclgn,zclgh,zcghpn->zclghp", c, torch.exp(total), torch.stack(before, dim=1)
    )
    return y.flatten(3, 4).flatten(1, 2)[:, :tokens]


def _between(decay: Tensor) -> Tensor:
    """``[z, c, l, s, ...]``: of a state behind token s until token l, minus infinity for l < s.

    Each is a sum of its own: the difference of two long sums would be less exact.
    """
    chunk = decay.shape[2]
    past = torch.ones(chunk, chunk, dtype=torch.bool, device=decay.device).tril()
    past = past.view(chunk, chunk, *[1] * (decay.dim() - 3))
    apart = past & ~torch.eye(chunk, dtype=torch.bool, device=decay.device).view(past.shape)
    sums = torch.where(apart, decay[:, :, :, None], 0.0).cumsum(2)
    decays: Tensor = sums.masked_fill(~past, float("-inf"))
    return decays


def _chunks(x: Tensor, chunk: int, further: int) -> Tensor:
    """``[batch, S, ...]`` to ``[batch, chunks, chunk, ...]``, with zeros behind the last token."""
    padded = F.pad(x, [0, 0] * (x.dim() - 2) + [0, further])
    chunks: Tensor = padded.unflatten(1, (-1, chunk))
    return chunks
