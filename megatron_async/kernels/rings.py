"""Triton kernels that move packets and results between pinned host memory and the device.

The ring entry is chosen by a counter on the device, so one captured graph serves all entries.
Pinned memory is mapped into the device's address space; the reference is ``device/cpu.py``.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _read_packet_kernel(ring, counter, into, entries, stride, width, BLOCK: tl.constexpr):
    entry = tl.load(counter) % entries
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < width
    # The host rewrites the entry between launches: never take it from a cache.
    values = tl.load(ring + entry * stride + offsets, mask=mask, other=0, volatile=True)
    tl.store(into + offsets, values, mask=mask)


@triton.jit
def _advance_kernel(counter):
    tl.store(counter, tl.load(counter) + 1)


def read_packet(ring: torch.Tensor, counter: torch.Tensor, into: torch.Tensor, width: int) -> None:
    """Copy ``ring[counter % entries, :width]`` into ``into[:width]`` and advance the counter.

    ``ring`` is pinned int32 [entries, stride], ``counter`` int64 [1] and ``into`` int32 on the
    device.
    """
    entries, stride = ring.shape
    block = 1024
    grid = (triton.cdiv(width, block),)
    _read_packet_kernel[grid](ring, counter, into, entries, stride, width, BLOCK=block)
    _advance_kernel[(1,)](counter)


@triton.jit
def release(sequence, counter, number, ON_DEVICE: tl.constexpr):
    """Make result ``number``, which this program alone has written, visible to the host."""
    # All threads' stores come before the barrier, and the release of the first thread makes them
    # visible to the host before the sequence number (causality through a barrier is transitive).
    # A store, not an atomic: pinned host memory need not support those.
    tl.debug_barrier()
    following = (number + 1).to(tl.int32)
    if ON_DEVICE:
        tl.inline_asm_elementwise(
            """{
            .reg .u32 thread;
            .reg .pred is_first;
            mov.u32 thread, %tid.x;
            setp.eq.u32 is_first, thread, 0;
            @is_first st.release.sys.global.u32 [$1], $2;
            mov.u32 $0, $2;
            }""",
            "=r,l,r",
            [sequence, following],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.store(sequence, following)
    tl.store(counter, number + 1)


@triton.jit
def _publish_kernel(
    ring, sequence, counter, record, entries, stride, width,
    BLOCK: tl.constexpr, ON_DEVICE: tl.constexpr,
):  # fmt: skip
    number = tl.load(counter)
    entry = number % entries
    for start in range(0, width, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        mask = offsets < width
        tl.store(ring + entry * stride + offsets, tl.load(record + offsets, mask=mask), mask=mask)
    release(sequence, counter, number, ON_DEVICE)


def publish(
    ring: torch.Tensor, sequence: torch.Tensor, counter: torch.Tensor, record: torch.Tensor
) -> None:
    """Copy ``record`` into ``ring[counter % entries]``, then raise ``sequence`` to counter + 1.

    ``ring`` is pinned int32 [entries, stride], ``sequence`` pinned int32 [1], ``counter`` int64
    [1] and ``record`` int32 [width] on the device, contiguous.
    """
    entries, stride = ring.shape
    _publish_kernel[(1,)](
        ring, sequence, counter, record, entries, stride, record.numel(),
        BLOCK=1024, ON_DEVICE=record.is_cuda, num_warps=1,
    )  # fmt: skip
