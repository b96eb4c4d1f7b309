"""Programmatic dependent launch: a kernel's launch overlaps the tail of the kernel before it.

A kernel launched this way may start before its predecessor has ended, so each of its programs waits
for it before the first write and before it reads what the predecessor writes. The kernel that comes
after may start once all have waited, and waits in turn, so order on the stream is what it was. (The
second launch of ``moe_widened.cu`` lets it start before, and waits before it ends.)
Hopper and later; CUDA programming guide, "Programmatic Dependent Launch".
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl


@functools.cache
def uses_pdl(device: torch.device) -> bool:
    """True where kernels should be launched with ``launch_pdl=True`` and ``PDL=True``."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit
def pdl_enter(PDL: tl.constexpr):
    """Before what the kernel in front writes is read, and before anything is written, in all
    programs of every kernel that may be launched early. Those before that one have ended."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
