"""Triton's interpreter on the NumPy that is installed."""

from __future__ import annotations

import os
from typing import Any

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def mend_interpreter() -> None:
    """Let kernels loop up to a loaded value: Triton 3.6 converts an array of one element to an
    integer, which NumPy 2.4 refuses."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def mended(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = mended
