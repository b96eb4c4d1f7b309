"""The base of inference contexts.

Until 0.16 it is told which logits are wanted; since 0.17 it keeps an ``InferenceConfig``.
"""

from __future__ import annotations

import inspect
from typing import Any

from megatron.core.inference.contexts import BaseInferenceContext as MegatronContext

__all__ = ["BaseInferenceContext"]

_OPTION = "materialize_only_last_token_logits"


class BaseInferenceContext(MegatronContext):  # type: ignore[misc]
    """megatron's, of which only the last token's logits of each row are wanted."""

    materialize_only_last_token_logits = True

    def __init__(self) -> None:
        if _OPTION in inspect.signature(MegatronContext.__init__).parameters:
            super().__init__(materialize_only_last_token_logits=True)
            return
        from megatron.core.inference.config import InferenceConfig

        config: Any = InferenceConfig(materialize_only_last_token_logits=True)
        super().__init__(config)
