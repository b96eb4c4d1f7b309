"""Products of Hopper's tensor cores whose first operand lies in registers, as widened weights do.

Such an instruction (``wgmma``) reads the registers while the program goes on, so they may not be
written before it has ended. In a loop Triton 3.6 and 3.7 let up to all but one of a step's
instructions run into the next step, and write the next step's operand meanwhile. Then some products
are those of other weights, more of them the more warps share the tensor cores. A step that uses the
sum for anything else waits for all its instructions.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import os

import triton
import triton.language as tl

_COMPILED = tl.constexpr(os.environ.get("TRITON_INTERPRET") != "1")
"""The interpreter knows no instructions, and nothing there runs ahead."""


@triton.jit
def ended(total):
    """fp32 ``total``, once the products that it is the sum of have ended. Costs no instruction but
    the wait."""
    if _COMPILED:
        total = tl.inline_asm_elementwise(
            "", "=r,0", [total], dtype=tl.float32, is_pure=True, pack=1
        )
    return total
