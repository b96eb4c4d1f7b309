"""The model's log-probability of one token of each row in one Triton kernel, bit for bit equal to
``sampling.log_probs``: a trainer's, over all tokens of a batch.

A program has a row. It reads the logits twice, for their maximum and for their masses, and writes
nothing else.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from contextlib import nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_async.kernels.sampling.row_thresholds import (
    LOG2_E,
    MASS_UNIT,
    NEG_INF,
    exact_log,
    exp2_mass,
    is_nan,
    log_prob_of,
    scale,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BLOCK = 2048
"""Logits that a program reads at once."""
_WARPS = 8


@triton.jit(do_not_specialize=["vocab_size"])
def _token_log_prob_kernel(
    logits, logits_stride, tokens_ptr, out_ptr, vocab_size, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * logits_stride
    place = tl.arange(0, BLOCK)
    highest = tl.full([BLOCK], NEG_INF, tl.float32)
    failed = tl.zeros([BLOCK], tl.int32)
    for first in range(0, vocab_size, BLOCK):
        x = tl.load(logits + first + place, mask=first + place < vocab_size, other=NEG_INF)
        x = x.to(tl.float32)
        failed |= is_nan(x).to(tl.int32)
        highest = tl.where(x > highest, x, highest)
    largest = tl.max(highest, 0)
    scaled_max = scale(largest, 1.0) + 0.0
    mass = tl.zeros([BLOCK], tl.int64)
    for first in range(0, vocab_size, BLOCK):
        x = tl.load(logits + first + place, mask=first + place < vocab_size, other=NEG_INF)
        x = x.to(tl.float32)
        own = exp2_mass((scale(x, 1.0) + 0.0 - scaled_max) * LOG2_E)
        mass += tl.where(x > NEG_INF, own, 0)
    log_total = exact_log(tl.sum(mass, 0).to(tl.float32) * MASS_UNIT)
    token = tl.load(tokens_ptr + row)
    is_token = (token >= 0) & (token < vocab_size)
    x = tl.load(logits + token, mask=is_token, other=0.0).to(tl.float32)
    found = tl.where(x > NEG_INF, log_prob_of(x, 1.0, scaled_max, log_total), NEG_INF)
    is_valid = is_token & (tl.max(failed, 0) == 0) & (largest > NEG_INF)
    tl.store(out_ptr + row, tl.where(is_valid, found, float("nan")))


def takes(logits: Tensor) -> bool:
    """Whether the kernel takes logits ``[N, V]`` as they lie."""
    return logits.dtype in DTYPES and logits.stride(1) == 1


def token_log_prob(logits: Tensor, tokens: Tensor) -> Tensor:
    """:func:`megatron_async.sampling.log_probs.token_log_prob` of logits that it :func:`takes`.

    Args:
        logits: ``[N, V]`` of any stride between rows.
        tokens: int64 ``[N]``; a negative one has NaN.

    Returns:
        float32 ``[N]``.
    """
    rows, vocab_size = logits.shape
    out = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if not rows:
        return out
    # Triton launches on the current device.
    with torch.cuda.device(logits.device) if logits.is_cuda else nullcontext():
        _token_log_prob_kernel[(rows,)](
            logits, logits.stride(0), tokens.contiguous(), out, vocab_size, BLOCK=BLOCK,
            num_warps=_WARPS, enable_fp_fusion=False,
        )  # fmt: skip
    return out
