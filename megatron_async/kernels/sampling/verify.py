"""Which tokens of a window count, for the Triton kernels that need to know.

The reference is ``runner.sampling_stage.SamplingStage``. Tensors have rows on their first axis and
the places of a window, padded to a power of two, on the second.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from megatron_async.kernels.sampling.sample_triton import best_token
from megatron_async.sampling import synthetic_acceptance

SPREAD, FIRST_MIX, SECOND_MIX = (tl.constexpr(number) for number in synthetic_acceptance.MIX)


@triton.jit
def _synthetic_bits(position, seed):
    """``sampling.synthetic_acceptance.synthetic_bits`` of int64 tensors, as uint32."""
    bits = (position.to(tl.uint32) * SPREAD) ^ seed.to(tl.uint32)
    bits = (bits ^ (bits >> 16)) * FIRST_MIX
    bits = (bits ^ (bits >> 13)) * SECOND_MIX
    return bits ^ (bits >> 16)


@triton.jit
def load_bounds(
    slot, exists, samples, length, max_total, stop_ids, drafts, draft_width, seeds,
    STOPS: tl.constexpr, WINDOW: tl.constexpr, PLACES: tl.constexpr, ACCEPT_BELOW: tl.constexpr,
):  # fmt: skip
    """What :func:`verify` compares windows of slots [R] int64 with: drafts [R, PLACES], -1 for
    none, of ``draft_width`` by slot; stop ids [R, STOPS]; the number of tokens that ends a
    request [R]. With ``ACCEPT_BELOW`` a draft that is right has any number, and a wrong one -1."""
    place = tl.arange(0, PLACES)[None, :]
    # A draft stands at the place of the token that it may be; the last place has none.
    has_draft = exists[:, None] & (place + 1 < samples[:, None]) & (place < WINDOW - 1)
    if ACCEPT_BELOW is None:
        draft = tl.load(drafts + slot[:, None] * draft_width + place, mask=has_draft, other=-1)
    else:
        seed = tl.load(seeds + slot, mask=exists, other=0)
        bits = _synthetic_bits(length[:, None] + place + 1, seed[:, None])
        draft = tl.where(has_draft & (bits.to(tl.int64) < ACCEPT_BELOW), 0, -1)
    stop = slot[:, None] * STOPS + tl.arange(0, STOPS)[None, :]
    stops = tl.load(stop_ids + stop, mask=exists[:, None], other=-1)
    return draft, stops, tl.load(max_total + slot, mask=exists, other=0)


@triton.jit
def verify(
    packed, row, exists, splits, length, draft, stops, limit,
    SPLITS: tl.constexpr, WINDOW: tl.constexpr, PLACES: tl.constexpr, ACCEPT_BELOW: tl.constexpr,
):  # fmt: skip
    """Verify the windows of rows [R] int64, which begin at ``length`` [R] int64.

    Returns:
        The tokens sampled at each place [R, PLACES] int64, -1 where none could be. Of each row the
        place of the last token that counts, whether the request ends there, and whether it does
        since there is no token: then those before it count.
    """
    place = tl.arange(0, PLACES)[None, :]
    inside = exists[:, None] & (place < WINDOW)
    entry = row[:, None] * WINDOW + place
    count: tl.constexpr = entry.shape[0] * PLACES
    token = best_token(
        packed, tl.reshape(entry, [count]), tl.reshape(inside, [count]), splits, SPLITS
    )
    token = tl.reshape(token, [entry.shape[0], PLACES])
    # A draft is accepted while it is what was sampled in its place.
    right = (token == draft) & (draft >= 0) if ACCEPT_BELOW is None else draft >= 0
    accepted = tl.min(tl.where(right, PLACES, place), 1)
    # The stop ids of a set that is not full are -1, as is the token of a place that failed.
    is_stop = tl.max((stops[:, None, :] == token[:, :, None]).to(tl.int32), 2) != 0
    is_last = is_stop | (token < 0) | (length[:, None] + place + 1 >= limit[:, None])
    end = tl.min(tl.where(is_last, place, PLACES), 1)
    ended = end <= accepted
    final = tl.minimum(end, accepted)
    is_final = place == final[:, None]
    failed = ended & (tl.max((is_final & (token < 0)).to(tl.int32), 1) != 0)
    return token, final, ended, failed
