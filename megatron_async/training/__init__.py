"""For a trainer's own process: a forward whose log-probabilities are the engine's, bit for bit.

``exact`` puts the engine's values into a trainer's model: ``mirror`` has the same parameters in
modules of its own, and ``whole_sequences`` runs them as the engine does. ``log_probs`` computes
log-probabilities of logits as the engine does, with gradients. ``routing_replay`` has a model take
the experts of rollouts.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

HOMES = {
    "ExactNumerics": "exact",
    "ForcedRouting": "routing_replay",
    "exact_log_probs": "log_probs",
    "exact_numerics": "exact",
    "forced_routing": "routing_replay",
}
"""Where each name lives; ``__init__.pyi`` has the same for type checkers."""

__all__ = sorted(HOMES)


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *HOMES})
