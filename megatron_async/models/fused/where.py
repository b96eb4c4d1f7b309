"""Whether any fused kernel runs where a model is."""

from __future__ import annotations

from typing import Any


def device_why_not(model: Any) -> str | None:
    """Why no kernel runs where ``model`` is; None if they do."""
    weight = next(model.parameters())
    if weight.device.type != "cuda":
        return "the model is not on a GPU"
    from megatron_async.kernels import compile as cuda

    return cuda.unavailable(weight.device.index or 0)
