"""Which tokens of a forward are none of a request's."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def padding_mask(layer: Any, context: Any) -> dict[str, Tensor]:
    """What the MLP of ``layer`` is called with beside its input: which tokens of the forward that
    runs now are padding or of requests that have ended, where that matters."""
    mask = None if context is None else context.padding_mask
    return {"padding_mask": mask} if mask is not None and hasattr(layer.mlp, "settings") else {}
