"""A Triton kernel with a mistake that its compiler finds."""

# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: F821

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _wrong_kernel(at):
    tl.store(at, there_is_no_such_name)


def launch(at: torch.Tensor) -> None:
    _wrong_kernel[(1,)](at)
