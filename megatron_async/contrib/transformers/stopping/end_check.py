"""The check for end tokens as one kernel.

PyTorch has five for it (compare, any, where, and what puts the results together), and each waits
for a free place on a GPU that computes the next token meanwhile.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
from torch import Tensor

try:  # comes with PyTorch's builds for NVIDIA GPUs
    import triton
    import triton.language as tl
except ImportError:  # pragma: no cover - the torch code runs
    HAS_TRITON = False
else:
    HAS_TRITON = True


def after_ends(tokens: Tensor, unfinished: Tensor, ends: Tensor) -> Tensor:
    """Tokens, and which rows are unfinished after them.

    Args:
        tokens: int64 ``(batch,)``.
        unfinished: int64 ``(batch,)``, 1 or 0, before them.
        ends: int64 ``(count,)``, the end tokens.

    Returns:
        int64 ``(2, batch)``, a row of each; memory of its own.
    """
    if HAS_TRITON and tokens.is_cuda:
        return launch(tokens, unfinished, ends)
    return torch.stack((tokens, unfinished.masked_fill(torch.isin(tokens, ends), 0)))


if HAS_TRITON:
    ROWS = 16

    @triton.jit
    def _after_ends_kernel(
        tokens_ptr, token_stride, unfinished_ptr, unfinished_stride, ends_ptr, out_ptr, batch,
        count, ROWS: tl.constexpr, ENDS: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        end = tl.arange(0, ENDS)
        in_batch = row < batch
        token = tl.load(tokens_ptr + row * token_stride, mask=in_batch, other=0)
        left = tl.load(unfinished_ptr + row * unfinished_stride, mask=in_batch, other=0)
        ends = tl.load(ends_ptr + end, mask=end < count, other=0)
        is_end = (token[:, None] == ends[None, :]) & (end < count)[None, :]
        ended = tl.max(is_end.to(tl.int32), 1)
        tl.store(out_ptr + row, token, mask=in_batch)
        tl.store(out_ptr + batch + row, tl.where(ended > 0, 0, left), mask=in_batch)

    def launch(tokens: Tensor, unfinished: Tensor, ends: Tensor) -> Tensor:
        """:func:`after_ends` by the kernel."""
        batch, count = tokens.shape[0], ends.shape[0]
        out = torch.empty((2, batch), dtype=torch.long, device=tokens.device)
        _after_ends_kernel[(triton.cdiv(batch, ROWS),)](
            tokens, tokens.stride(0), unfinished, unfinished.stride(0), ends, out, batch, count,
            ROWS=ROWS, ENDS=triton.next_power_of_2(max(count, 1)), num_warps=1,
        )  # fmt: skip
        return out
