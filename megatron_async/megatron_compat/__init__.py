"""megatron-core's releases: the one package that knows how they differ.

The rest of ``megatron_async`` asks it for a class, a spec, a name or a capability, and compares no
version. It prepares megatron-core when it is imported, so each module that imports megatron
imports this package first.

``release``: which release is installed. ``shims``: what an import needs. ``process_groups``:
parallel state without a launcher. ``classes``: of language models. ``specs``: how their parts are
built. ``contexts``: the base of inference contexts. ``checkpoints``: ``dist_checkpointing``.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from megatron_async.megatron_compat.process_groups import ensure_parallel_state
from megatron_async.megatron_compat.release import TRIED, Release, installed, warn_if_not_tried
from megatron_async.megatron_compat.shims import apply

__all__ = ["TRIED", "Release", "apply", "dist", "ensure_parallel_state", "found", "installed"]

apply()
warn_if_not_tried()


def found() -> dict[str, Any]:
    """What is known of the installed release, as plain JSON types."""
    from megatron_async.megatron_compat.classes import MODEL_BASE

    return {
        "version": installed().version,
        "tried": list(TRIED),
        "note": installed().not_tried,
        "model_class": MODEL_BASE.__name__,
    }
