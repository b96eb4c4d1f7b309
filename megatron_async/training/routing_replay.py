"""Experts that a rollout's tokens went to, for the forwards of a trainer's model."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_async import megatron_compat as compat  # noqa: F401  (before megatron)
from megatron_async.errors import ConfigError
from megatron_async.models.adapt import unwrapped
from megatron_async.models.moe.layer import MoELayer
from megatron_async.models.moe.routed import decoder_layers

from megatron.core.transformer.moe.moe_layer import (  # isort: skip
    MoELayer as MegatronMoELayer,
)

TopK = Callable[..., tuple[Tensor, Tensor]]


def forced_routing(model: Any, routed_experts: Tensor) -> ForcedRouting:
    """Have the layers of experts of a model take experts that were chosen before (routing replay).

    Their weights are those that the model's own router gives them now, so gradients go through the
    router. Aux losses, capacity factors and biases of experts work as else. The model's forwards
    outside of engines take them, with and without gradients, and so do activations that are
    recomputed as long as this is open.

    Args:
        model: one of this package, or a megatron-core model, with or without megatron's wrappers.
            Of sequence-parallel ranks each takes its own part of ``routed_experts``.
        routed_experts: integers ``[B, S, layers, top_k]``, those of token ids ``[B, S]``, as
            :func:`~megatron_async.request.rollouts.routed_experts_of` makes them. The router
            chooses by itself for tokens where they are -1. A pipeline stage takes those of its own
            layers.

    Returns:
        What ends it, by ``close`` or as a context.

    Raises:
        ConfigError: the experts do not suit the model, its router cannot be told what to choose, or
            it is told already. A forward over token ids of another shape than ``[B, S]`` raises it
            too, and so does one in ``torch.inference_mode``, where layers take it for an engine's.
    """
    return ForcedRouting(unwrapped(model), routed_experts)


class ForcedRouting:
    """What :func:`forced_routing` returns."""

    def __init__(self, model: Any, routed_experts: Tensor) -> None:
        self._layers: list[Any] = decoder_layers(model, (MoELayer, MegatronMoELayer))
        self._replays: list[tuple[Any, Any]] = []
        self._check(model, routed_experts)
        ids = _of_this_rank(model, routed_experts.transpose(0, 1)).flatten(0, 1)
        device = next(model.parameters()).device
        for number, layer in enumerate(self._layers):
            own = ids[:, number].to(device, torch.int32, non_blocking=True)
            if hasattr(layer, "forced"):
                layer.forced = own
            if isinstance(layer, MegatronMoELayer):
                self._replays.append((layer.router, layer.router.router_replay))
                layer.router.router_replay = _Replay(own)
        self._shape = tuple(routed_experts.shape[:2])
        self._signature = inspect.signature(type(model).forward)
        self._hook = model.register_forward_pre_hook(self._check_forward, with_kwargs=True)

    def close(self) -> None:
        """The model chooses by itself again."""
        self._hook.remove()
        for layer in self._layers:
            if hasattr(layer, "forced"):
                layer.forced = None
        for router, before in self._replays:
            router.router_replay = before
        self._replays.clear()

    def __enter__(self) -> ForcedRouting:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _check(self, model: Any, ids: Tensor) -> None:
        if not self._layers:
            raise ConfigError("forced_routing: the model has no layers of experts; leave it out")
        if getattr(model.config, "context_parallel_size", 1) > 1:
            raise ConfigError(
                "forced_routing: context_parallel_size must be 1, since its ranks have parts of "
                "sequences"
            )
        if is_forced(model):
            raise ConfigError(
                "forced_routing: the model's experts are forced already; close that first"
            )
        experts, chosen = _sizes(self._layers[0])
        shape = (len(self._layers), chosen)
        if ids.dim() != 4 or tuple(ids.shape[2:]) != shape or ids.dtype not in _INTEGERS:
            raise ConfigError(
                f"forced_routing: routed_experts are {ids.dtype} {list(ids.shape)} and must be "
                f"integers [B, S, {shape[0]}, {shape[1]}]: layers of experts, experts of a token"
            )
        if ids.numel() and not (ids.min() >= -1 and ids.max() < experts):
            raise ConfigError(
                f"forced_routing: routed_experts must lie between 0 and {experts - 1}, or be -1 "
                "for a token that the router chooses for"
            )
        for layer in self._layers:
            if isinstance(layer, MegatronMoELayer):
                _check_router(layer)

    def _check_forward(self, model: Any, args: Any, kwargs: Any) -> None:
        """Before a forward: raise where its tokens would get the experts of others, or none."""
        given = self._signature.bind_partial(model, *args, **kwargs).arguments
        given |= given.get("kwargs", {})
        tokens = given.get("input_ids")
        if tokens is None or given.get("inference_context") is not None:
            return
        if tuple(tokens.shape) != self._shape:
            raise ConfigError(
                f"forced_routing: input_ids are {list(tokens.shape)} and routed_experts are of "
                f"{list(self._shape)}: give the experts of this batch, one call for each"
            )
        if torch.is_inference_mode_enabled():
            raise ConfigError(
                "forced_routing: layers take a forward in torch.inference_mode() for an engine's, "
                "which chooses by itself: use torch.no_grad()"
            )


def is_forced(model: torch.nn.Module) -> bool:
    """Whether a :class:`ForcedRouting` of the model is open."""
    return any(
        getattr(layer, "forced", None) is not None
        or isinstance(getattr(layer.router, "router_replay", None), _Replay)
        for layer in decoder_layers(model, (MoELayer, MegatronMoELayer))
    )


_INTEGERS = (torch.uint8, torch.int16, torch.int32, torch.int64)


def _sizes(layer: Any) -> tuple[int, int]:
    """Experts of a layer, and those of a token."""
    if isinstance(layer, MegatronMoELayer):
        return layer.config.num_moe_experts, layer.config.moe_router_topk
    return layer.settings.num_experts, layer.settings.top_k


def _check_router(layer: Any) -> None:
    """Raises :class:`ConfigError` unless megatron's router asks for a replay."""
    router, config = layer.router, layer.config
    if not hasattr(router, "router_replay"):
        raise ConfigError(
            "forced_routing: routers of this release of megatron-core cannot be told what to "
            "choose; install one that has moe_enable_routing_replay"
        )
    if getattr(config, "moe_router_fusion", False):
        raise ConfigError(
            "forced_routing: a fused router chooses by itself; build the model with "
            "moe_router_fusion=False"
        )
    if getattr(router, "routing_type", None) == "sinkhorn":
        raise ConfigError("forced_routing: a sinkhorn router chooses by itself; use a top-k router")


def _of_this_rank(model: Any, ids: Tensor) -> Tensor:
    """The part of ``[S, B, ...]`` that a sequence-parallel rank has."""
    if not getattr(model.config, "sequence_parallel", False):
        return ids
    from megatron.core import parallel_state

    size = parallel_state.get_tensor_model_parallel_world_size()
    part: Tensor = ids.chunk(size)[parallel_state.get_tensor_model_parallel_rank()]
    return part


class _Replay:
    """What megatron's router asks for the experts of its tokens, in the place of a
    ``RouterReplay``: int32 ``[T, k]`` that stay the same for activations that are recomputed."""

    def __init__(self, ids: Tensor) -> None:
        self._ids = ids.long()

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: TopK | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Scores and experts ``[T, k]``; where there are none, those of the best scores."""
        assert default_compute_topk is not None
        if len(scores) != len(self._ids):
            raise ConfigError(
                f"forced_routing: a forward over {len(scores)} tokens has experts for "
                f"{len(self._ids)}"
            )
        own = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)[1]
        ids = torch.where(self._ids < 0, own, self._ids)
        return scores.gather(1, ids), ids
