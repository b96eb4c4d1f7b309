"""What the arithmetic of a Mamba-2 layer reads and writes: sizes, parameters, states, rows.

A layer's input projection gives each token ``z | x | B | C | dt``. A causal convolution over
``x | B | C``, the state update and the gate make of it what the output projection takes (Mamba-2,
arXiv:2405.21060; names and order are those of megatron's MambaMixer).

**The state of a sequence** is in two tensors of a pool, addressed by slot.

- ``inputs`` has the last tokens' ``x | B | C | dt`` as the projection gave them. It is a ring: that
  of position p lies at ``p % ring``. The convolution needs ``conv_width - 1`` of them.
- ``ssm`` has the state after some position. It may lag: a row says how many tokens it is behind,
  and these are taken from the ring first.

So a window of several tokens reads the state once and writes it once, after its first token. What
the next window is behind are the drafts that were accepted, and its start says how many: nothing is
rolled back, nothing is copied.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # sizes are part of configurations, which need no torch
    from torch import Tensor


class MambaSizes(NamedTuple):
    """Sizes of a layer, or of a rank's share of it."""

    heads: int
    head_dim: int
    groups: int
    state_size: int
    conv_width: int = 4

    @property
    def inner(self) -> int:
        """Elements of ``x``, of ``z``, and of what the output projection takes."""
        return self.heads * self.head_dim

    @property
    def conv_channels(self) -> int:
        """Elements of ``x | B | C``."""
        return self.inner + 2 * self.groups * self.state_size

    @property
    def input_width(self) -> int:
        """Elements that a token has in ``inputs``: ``x | B | C | dt``."""
        return self.conv_channels + self.heads

    @property
    def projection(self) -> int:
        """Outputs of the input projection: ``z | x | B | C | dt``."""
        return self.inner + self.input_width

    def ring(self, window: int = 1) -> int:
        """Tokens that ``inputs`` has room for, with windows of up to ``window`` tokens.

        WAR: a window's tokens never meet those that its other programs still read, which are the
        accepted drafts of the window before it and what the convolution needs in front of them.
        """
        return 2 * window + self.conv_width - 2


class GatedNorm(NamedTuple):
    """RMSNorm of groups of ``group_size`` elements, with the gate ``silu(z)``.

    Args:
        weight: ``[inner]``.
        before_gate: ``norm(y) * silu(z)``; else ``norm(y * silu(z))``.
    """

    weight: Tensor
    eps: float
    group_size: int
    before_gate: bool = False


class MambaParameters(NamedTuple):
    """Parameters between the two projections, in any floating dtype.

    Args:
        conv_weight: ``[conv_channels, conv_width]``, or with a dimension of 1 in the middle.
        conv_bias: ``[conv_channels]`` or None.
        dt_bias, a_log: ``[heads]``; the decay of a step of length dt is ``exp(-exp(a_log) * dt)``.
        d: ``[heads]``, or ``[inner]`` for one each element.
        norm: None for the gate alone.
        dt_limits: to which dt is clamped after the softplus.
    """

    sizes: MambaSizes
    conv_weight: Tensor
    conv_bias: Tensor | None
    dt_bias: Tensor
    a_log: Tensor
    d: Tensor
    norm: GatedNorm | None
    dt_limits: tuple[float, float] = (0.0, float("inf"))


class LayerStates(NamedTuple):
    """One layer's states in the pool; the last slot is the null slot, of padding and dead rows.

    Args:
        inputs: ``[slots, ring, input_width]``, of the projection's dtype.
        ssm: ``[slots, heads, head_dim, state_size]``, float32, or bfloat16, to which the state is
            rounded after each token.
    """

    inputs: Tensor
    ssm: Tensor

    @property
    def null_slot(self) -> int:
        """The slot that is read as zeros; nobody reads what is written to it."""
        return self.ssm.shape[0] - 1


class StateRows(NamedTuple):
    """R rows of consecutive tokens, on the device: int64 ``[R]`` each.

    Args:
        slots: of the states; the null slot for rows without a token and for dead ones.
        first: index of the row's first token among those of the forward.
        lengths: tokens of the row, drafts included.
        starts: position of the first token in its sequence.
        behind: tokens in front of it that ``ssm`` lacks and the ring has, so that ``ssm`` stands at
            position ``starts - behind``. At position 0 it is zero, whatever the pool holds.
        keeps: after how many of the row's tokens ``ssm`` is written: 1 for a row that decodes, its
            length for a prefill chunk.
    """

    slots: Tensor
    first: Tensor
    lengths: Tensor
    starts: Tensor
    behind: Tensor
    keeps: Tensor
