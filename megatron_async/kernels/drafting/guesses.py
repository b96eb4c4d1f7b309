"""Triton kernel that makes what the host has guessed the drafts of rows.

The reference is ``runner.guided_drafts.follow_guesses``, equal bit for bit.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


# Their values differ from step to step.
@triton.jit(do_not_specialize=["stride", "places"])
def _follow_kernel(
    drafts, last_token, kv_length, words, stride, places,
    COUNT: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A guess."""
    guess = words + tl.program_id(0).to(tl.int64) * stride
    slot = tl.load(guess).to(tl.int64)
    place = tl.load(kv_length + slot) - tl.load(guess + 1)
    inside = (place >= 0) & (place < places)
    run = guess + 2 + tl.where(inside, place, 0) * (1 + COUNT)
    fits = inside & (tl.load(run) == tl.load(last_token + slot))
    draft = tl.arange(0, COLUMNS)
    token = tl.load(run + 1 + draft, mask=draft < COUNT, other=-1).to(tl.int64)
    tl.store(drafts + slot * COUNT + draft, token, mask=fits & (draft < COUNT) & (token >= 0))


def follow_guesses_gpu(
    drafts: Tensor, last_token: Tensor, kv_length: Tensor, words: Tensor
) -> None:
    """``runner.guided_drafts.follow_guesses`` of the same tensors, each contiguous."""
    count = drafts.shape[1]
    places = (words.shape[1] - 2) // (1 + count)
    _follow_kernel[(len(words),)](
        drafts, last_token, kv_length, words, words.shape[1], places,
        COUNT=count, COLUMNS=triton.next_power_of_2(count), num_warps=1,
    )  # fmt: skip
