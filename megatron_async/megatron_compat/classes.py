"""Classes of language models.

Until 0.18 models of attention layers are of ``GPTModel``. Since 0.19 that class is deprecated for
``HybridModel``, which came with 0.18 in the place of ``MambaModel``.
"""

from __future__ import annotations

from typing import Any

from megatron.core.models.gpt.gpt_model import GPTModel

from megatron_async.megatron_compat.release import installed

try:
    from megatron.core.models.hybrid.hybrid_block import HybridStack
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.models.mamba.mamba_model import MambaModel
except ImportError:  # until 0.17
    from megatron.core.models.mamba.mamba_model import MambaModel
    from megatron.core.ssm.mamba_block import MambaStack as HybridStack

    HybridModel = MambaModel

__all__ = ["GPT_MODEL", "HYBRID_MODEL", "HYBRID_STACK", "MAMBA_MODEL", "MODEL_BASE"]

GPT_MODEL: Any = GPTModel
HYBRID_MODEL: Any = HybridModel
MAMBA_MODEL: Any = MambaModel
"""The former name of ``HybridModel``: until 0.17 the same class, then one that derives from it."""
HYBRID_STACK: Any = HybridStack
MODEL_BASE: Any = HybridModel if installed().since(19) else GPTModel
"""What models that we build ourselves are."""
