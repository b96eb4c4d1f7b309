"""What a layer for multi-token prediction takes in when it drafts."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from megatron_async.kernels.drafting.mtp_rows import RowsKernel


class NormParameters(NamedTuple):
    """A norm's weight ``[N]``, its bias ``[N]`` (a LayerNorm; None of an RMSNorm) and epsilon."""

    weight: Tensor
    bias: Tensor | None
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        """Norm ``x`` with PyTorch."""
        if self.bias is None:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class DraftInput(NamedTuple):
    """The input of the layer that gives a draft, over n tokens in each of R rows.

    Args:
        draft, layer: which draft, and of which layer; both from 0. A draft beyond its layer's own
            is one token whose hidden state is what the layer has put out for the draft before.
        tokens: int64 ``[R, n]``, rows may be strided.
        position_ids: int64 ``[R * n]``, where the tokens stand; read by learned embeddings only.
        hidden: ``[R, m, hidden]``, contiguous: what the layer before has put out. For the first
            layer those of the decoder's tokens, from the token in front of the row's first one on.
        last: int64 ``[R]``: token ``w - 1 - last`` of the first layer's n = w is the row's first.
        slots: int64 ``[R]``.
        tails: ``[slots, layers, hidden]``: by layer, what its row of the row's first token needs of
            the layer before, which put it out in an earlier step.
        norm: the final norm of the layer before, which ``hidden`` has not passed; None if it has.
        begin: fills ``tokens`` and what attention reads of them. The kernel of the first layer's
            input does this too, and takes the tokens from where this does; None if it is done.
    """

    draft: int
    layer: int
    tokens: Tensor
    position_ids: Tensor
    hidden: Tensor
    last: Tensor
    slots: Tensor
    tails: Tensor
    norm: NormParameters | None = None
    begin: RowsKernel | None = None

    @property
    def token_count(self) -> int:
        """The number of tokens of all rows."""
        return self.tokens.numel()


def hidden_before(of: DraftInput) -> Tensor:
    """The hidden states that the tokens meet, ``[R, n, hidden]``; keeps the tails of the next
    step."""
    hidden, draft = of.hidden if of.norm is None else of.norm(of.hidden), of.draft
    if draft > of.layer:
        return hidden[:, -1:]
    window = hidden.shape[1]
    column = torch.arange(window, device=hidden.device)
    if draft == 0:
        index = (of.last[:, None] - (window - 1) + column).clamp(min=0)
        return hidden.gather(1, index[:, :, None].expand(-1, -1, hidden.shape[2]))
    before = of.tails[of.slots, draft]
    of.tails[of.slots, draft] = hidden[:, window - draft]
    is_first = column == (window - 1 - draft - of.last)[:, None]
    return torch.where(is_first[:, :, None], before[:, None], hidden)
