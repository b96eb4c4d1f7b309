"""Logarithm and exponential whose float32 result is the same bits on every device.

Only IEEE-754 float32 addition, subtraction and multiplication, integer operations on the bit
pattern and conversions are used, in a fixed order and never fused, so that torch on the CPU,
torch on CUDA and the Triton kernel (compiled without FMA contraction) agree exactly. Relative
errors are below 3e-7. The polynomials are weighted minimax fits (Lawson iteration) rounded to
float32; the constants here are also the kernel's.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Q in log(1 + f) = f - f**2 / 2 + f**3 * Q(f), f in [sqrt(1/2) - 1, sqrt(2) - 1], highest first.
LOG_COEFFICIENTS = tuple(
    float.fromhex(c)
    for c in (
        "0x1.646952p-4",
        "-0x1.243b5ap-3",
        "0x1.31765ap-3",
        "-0x1.538162p-3",
        "0x1.98d7b2p-3",
        "-0x1.000384p-2",
        "0x1.5556dap-2",
    )
)
# P in 2**r = 1 + r * P(r), r in (-1, 0], highest first.
EXP2_COEFFICIENTS = tuple(
    float.fromhex(c)
    for c in (
        "0x1.c946bap-14",
        "0x1.4e2ae6p-10",
        "0x1.39e3fcp-7",
        "0x1.c6948ep-5",
        "0x1.ebfac0p-3",
        "0x1.62e42cp-1",
    )
)
SQRT_HALF_BITS = 0x3F3504F3
# ln 2 in two parts; the first has so few bits that its product with an exponent is exact.
LN2_HIGH = float.fromhex("0x1.63p-1")
LN2_LOW = float.fromhex("-0x1.bd0106p-13")
LOG2_E = float.fromhex("0x1.715476p+0")

MASS_BITS = 43
"""``2**0`` is the mass ``2**MASS_BITS``; smaller powers of two are truncated to an integer."""
EXP2_MIN = -60.0
"""Arguments of ``exp2_mass`` are clamped to this; its mass is zero."""


def log(x: Tensor) -> Tensor:
    """Natural logarithm of positive, normal, finite float32 values of any shape."""
    bits = x.view(torch.int32)
    exponent = (bits - SQRT_HALF_BITS) >> 23
    f = (bits - (exponent << 23)).view(torch.float32) - 1.0
    e = exponent.to(torch.float32)
    square = f * f
    q = torch.full_like(f, LOG_COEFFICIENTS[0])
    for coefficient in LOG_COEFFICIENTS[1:]:
        q.mul_(f).add_(coefficient)
    q.mul_(f).mul_(square)
    q.add_(e * LN2_LOW)
    q.sub_(square.mul_(0.5))
    q.add_(f)
    return q.add_(e.mul_(LN2_HIGH))


def log1p(x: Tensor) -> Tensor:
    """``log(1 + x)`` of float32 ``x`` in ``(-1, 0]`` of any shape.

    ``1 + x`` is rounded to ``w`` and the rounding error ``x - (w - 1)``, itself exact, is added
    to ``log(w)``: its first-order effect is that error over ``w``, and it is nonzero only where
    ``w`` is so close to one, or the logarithm so large, that the division does not matter.
    """
    w = x + 1.0
    error = x - (w - 1.0)
    return log(w).add_(error)


def exp2_mass(x: Tensor) -> Tensor:
    """``2**x`` of float32 ``x <= 0`` of any shape as int64 in units of ``2**-MASS_BITS``.

    Sums of the result do not depend on their order. Up to ``2**19`` terms cannot overflow.
    """
    x = x.clamp(min=EXP2_MIN)
    whole = x.to(torch.int64)
    r = x - whole.to(torch.float32)
    p = torch.full_like(r, EXP2_COEFFICIENTS[0])
    for coefficient in EXP2_COEFFICIENTS[1:]:
        p.mul_(r).add_(coefficient)
    p.mul_(r).add_(1.0)
    mantissa = p.mul_(16777216.0).to(torch.int64)
    return (mantissa << (MASS_BITS - 24)) >> -whole
