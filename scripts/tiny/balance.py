"""Experts that get about as many tokens each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_async.kernels.moe.reference import route, router_logits
from megatron_async.models.moe.layer import MoELayer


class LoadBalance:
    """The auxiliary loss of Switch Transformers (arXiv:2101.03961) over all layers of experts: the
    number of experts, times the sum over experts of the share of tokens that chose one and its mean
    probability. 1 is balanced."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._losses: list[Tensor] = []
        self.layers = [module for module in model.modules() if isinstance(module, MoELayer)]
        for layer in self.layers:
            layer.register_forward_pre_hook(self._look)

    def _look(self, layer: torch.nn.Module, given: tuple[Any, ...]) -> None:
        if not layer.training or not isinstance(layer, MoELayer):
            return
        hidden = given[0].reshape(-1, given[0].shape[-1])
        logits = router_logits(hidden, layer.router.weight, layer.router.bias)
        ids = route(logits.detach(), layer.settings).ids
        experts = torch.arange(logits.shape[1], device=ids.device)
        shares = (ids[..., None] == experts).float().mean(dim=(0, 1))
        means = torch.softmax(logits, dim=-1).mean(dim=0)
        self._losses.append(len(experts) * (shares * means).sum())

    def loss(self) -> Tensor | float:
        """The mean over the layers of the last forward, which is forgotten; 0 without experts."""
        losses, self._losses = self._losses, []
        return torch.stack(losses).mean() if losses else 0.0
