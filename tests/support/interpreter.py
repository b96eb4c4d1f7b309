"""Where tests of Triton kernels run: compiled on a GPU, or in Triton's interpreter on the CPU.

``TRITON_INTERPRET=1`` counts when a kernel is defined, so interpreted tests need a process of their
own: ``tests/unit/kernels/test_interpreted_kernels.py`` starts it.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import pytest
import torch

HAS_TRITON = importlib.util.find_spec("triton") is not None
INTERPRETED = HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1"

interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in test_interpreted_kernels.py")
compiled = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        INTERPRETED or not torch.cuda.is_available(), reason="needs a CUDA device and a compiler"
    ),
]
on_devices = pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=interpreted), pytest.param("cuda", marks=compiled)]
)


def mend_interpreter() -> None:
    """Let kernels loop up to a loaded value, and give the rows of a product bits of their own.

    Triton 3.6 and 3.7 convert an array of one element to an integer, which NumPy 2.4 refuses. They
    multiply with ``np.matmul``, and some CPUs' BLAS adds a row up in an order that depends on where
    the row lies; a GPU's tensor cores do not. Of bfloat16 and e4m3 they multiply the bits, in
    products of matrices as of elements.
    """
    import numpy as np
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor
    e4m3 = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).float().numpy()

    def mended(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def widened(x: Any) -> Any:
        if x.dtype.scalar.is_bf16():  # held as the bits of the upper half of a float32
            return (x.data.astype(np.uint32) << 16).view(np.float32)
        if x.dtype.scalar.is_fp8e4nv():  # likewise as bytes
            return e4m3[x.data]
        return x.data

    def create_dot(self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
        left, right = (widened(x).astype(d.data.dtype) for x in (a, b))
        total = np.zeros_like(d.data)
        for k in range(left.shape[-1]):
            total += left[..., k : k + 1] * right[..., k : k + 1, :]
        return interpreter.TensorHandle(total + d.data, d.dtype.scalar)

    def create_fmul(self: Any, a: Any, b: Any) -> Any:
        if not a.dtype.scalar.is_bf16():
            return self.binary_op(a, b, np.multiply)
        with np.errstate(invalid="ignore"):  # an infinity times zero
            bits = (widened(a) * widened(b)).view(np.uint32)
        nearest = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
        return interpreter.TensorHandle(nearest.astype(np.uint16), a.dtype.scalar)

    interpreter._patch_lang_tensor = mended
    interpreter.InterpreterBuilder.create_fmul = create_fmul
    interpreter.InterpreterBuilder.create_dot = create_dot
