"""Layers of experts of fused steps by their reference in place of the kernels, which need a GPU or
Triton's interpreter; the blocks around them stay as they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_async.kernels.moe import decode, decode_reference
from megatron_async.kernels.moe.reference import held_experts, route


def install(patch: pytest.MonkeyPatch) -> list[Any]:
    """From now on; returns a list of the shapes of the layers that have run."""
    ran: list[Any] = []

    def run(
        self: Any, weights: Any, hidden: Tensor, statistics: Tensor, eps: float, out: Tensor,
        *, live: Any = None, residual: Any = None, statistics_out: Any = None, scaled: Any = None,
        one_launch: bool = False, sums: Any = None,
    ) -> None:  # fmt: skip
        assert sums is None, "the reference knows one rank"
        ran.append(self.shape)
        mask = None if live is None else live.values >= live.first
        _, logits = decode_reference.norm_reference(self.shape, weights, hidden, eps)
        routing = route(logits, self.shape.settings, expert_bias=weights.expert_bias, live=mask)
        routing = held_experts(routing, self.shape.expert_begin, self.shape.held)
        self.ids[: len(hidden), : self.shape.settings.top_k] = routing.ids
        out.copy_(
            decode_reference.moe_decode_reference(
                self.shape, weights, hidden, eps, live=live, residual=residual, routing=routing
            )
        )
        if statistics_out is not None:
            tiles = out.float().unflatten(1, (statistics_out.shape[1], -1))
            mean = tiles.mean(2) if scaled is None else torch.zeros(tiles.shape[:2])
            statistics_out[..., 0] = mean
            statistics_out[..., 1] = (tiles - mean[..., None]).square().sum(2)
        if scaled is not None:
            weight, into = scaled
            into.copy_(out * weight)

    patch.setattr(decode.MoeDecode, "__call__", run)
    return ran
