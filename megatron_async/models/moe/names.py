"""The names that megatron-core's classes of experts have for one expert's weights."""

from __future__ import annotations

from torch import Tensor
from torch.nn import Module

from megatron_async.models.moe.layer import MoELayer

_NAMES = {
    "SequentialMLP": "local_experts.{expert}.{linear}.{kind}",
    "TEGroupedMLP": "{linear}.{kind}{expert}",
}


def expert_views(model: Module, rank: int = 0) -> dict[str, Tensor]:
    """Views of the stacked weights in ``model``, expert by expert, under the names that a state
    dict of megatron-core has for them: those of each of its classes. ``rank``: which of the ranks
    that have some experts each the model is of; 0 gives its experts numbers from 0 on."""
    found: dict[str, Tensor] = {}
    for prefix, layer in model.named_modules():
        if not isinstance(layer, MoELayer):
            continue
        for name, stacked in layer.experts.named_parameters():
            linear, kind = name.split(".")
            for expert, view in enumerate(stacked.detach(), rank * len(stacked)):
                for pattern in _NAMES.values():
                    of_one = pattern.format(expert=expert, linear=linear, kind=kind)
                    found[f"{prefix}.experts.{of_one}"] = view
    return found
