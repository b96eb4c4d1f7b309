"""A mixture of experts with megatron-core's parameter names and weights stacked over experts.

megatron's own layers read on the host how many tokens each expert has, so no graph can hold them.
This one drops no token, has fixed shapes and reads nothing on the host (``kernels/moe``).

Names, in megatron-core's words: ``router.weight``, ``router.expert_bias``;
``experts.linear_fc1.weight`` and ``experts.linear_fc2.weight``, whose first dimension is the
expert (``TEGroupedMLP`` has ``weight0``, ``weight1``, ...); ``shared_experts``,
``fc1_latent_proj``, ``fc2_latent_proj``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_async import megatron_compat as compat  # noqa: F401  (before megatron)
from megatron_async.errors import ConfigError
from megatron_async.kernels.moe.reference import held_experts
from megatron_async.models.description.config import ModelConfig
from megatron_async.models.moe.compute import KeptWeights, experts_of, routing_of
from megatron_async.models.moe.settings import expert_activation, router_settings
from megatron_async.models.moe.shards import expert_shards
from megatron_async.models.moe.trainer_ranks import (
    TrainerRanks,
    added_by_another,
    ranks_of,
    with_gradients,
)
from megatron_async.models.quantized.deferred import as_built
from megatron_async.models.quantized.linear import SCALE, weight_of

from megatron.core.transformer.mlp import MLPSubmodules  # isort: skip
from megatron.core.transformer.module import MegatronModule  # isort: skip
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection  # isort: skip
from megatron.core.transformer.moe.shared_experts import (  # isort: skip
    SharedExpertMLP as MegatronSharedExpertMLP,
)


class ExpertWeights(NamedTuple):
    """``w1`` ``[experts, 2 I or I, H]`` and ``w2`` ``[experts, H, I]``; ``b1`` ``[experts, 2 I or
    I]`` and ``b2`` ``[experts, H]``, or None."""

    w1: Tensor
    w2: Tensor
    b1: Tensor | None
    b2: Tensor | None


Initialize = Callable[[Tensor], Any]


class Leaving(threading.local):
    """What the forwards of a thread choose.

    Attributes:
        to: is called with a layer and its experts, int32 ``[T, k]``; None for nobody.
        chosen: by the id of a layer the experts that its next forwards with gradients take, in the
            same form; other layers choose the best.
        noted: by the id of a layer where its forwards leave the experts that they took.
    """

    to: Callable[[Any, Tensor], None] | None = None
    chosen: Mapping[int, Tensor] = MappingProxyType({})
    noted: Mapping[int, list[Tensor]] = MappingProxyType({})


leaving = Leaving()
"""Each thread has its own, since engines in several of them may run the same layers."""


def _parameter(config: Any, initialize: Initialize | None, *shape: int) -> torch.nn.Parameter:
    """A parameter on the device that the model is built on; zeros without ``initialize``."""
    device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
    weight = torch.empty(shape, dtype=config.params_dtype, device=device)
    if initialize is None:
        weight.zero_()
    elif config.perform_initialization:
        initialize(weight)
    return torch.nn.Parameter(weight)


class Linears(torch.nn.Module):
    """``weight`` ``[experts, out, in]`` and ``bias`` ``[experts, out]`` or None: a linear layer of
    each expert; or one, without the first dimension."""

    bias: Tensor | None

    def __init__(self, config: Any, initialize: Initialize, *shape: int, bias: bool) -> None:
        super().__init__()
        self.weight = _parameter(config, initialize, *shape)
        self.register_parameter("bias", _parameter(config, None, *shape[:-1]) if bias else None)


class Router(MegatronModule):  # type: ignore[misc]
    """``weight`` ``[experts, hidden]``; ``bias``, and ``expert_bias`` in fp32, ``[experts]`` or
    None."""

    def __init__(self, config: Any, model: ModelConfig) -> None:
        super().__init__(config)
        experts = model.num_moe_experts
        assert experts is not None
        self.weight = _parameter(config, config.init_method, experts, model.hidden_size)
        bias = _parameter(config, None, experts) if model.moe_router_bias else None
        self.register_parameter("bias", bias)
        expert_bias = None
        if model.moe_router_enable_expert_bias:
            zeros = torch.zeros(experts, dtype=torch.float32, device=self.weight.device)
            expert_bias = torch.nn.Parameter(zeros, requires_grad=False)
        self.register_parameter("expert_bias", expert_bias)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        # A change of dtype is for the others: a rounded bias chooses other experts.
        kept = None if self.expert_bias is None else self.expert_bias.detach()
        result = super()._apply(fn, recurse)
        if kept is not None:
            self.expert_bias.data = kept.to(self.expert_bias.device)
        return result


class Experts(MegatronModule):  # type: ignore[misc]
    """The linear layers of this rank's experts, stacked."""

    def __init__(self, config: Any, model: ModelConfig) -> None:
        super().__init__(config)
        self.gated = model.gated
        experts, ffn = model.num_moe_experts, model.moe_ffn_hidden_size
        assert experts is not None and ffn is not None
        experts //= config.expert_model_parallel_size
        ffn //= config.expert_tensor_parallel_size
        size, bias = model.moe_latent_size or model.hidden_size, model.mlp_bias
        inner = 2 * ffn if model.gated else ffn
        linears = as_built(Linears)
        self.linear_fc1 = linears(config, config.init_method, experts, inner, size, bias=bias)
        end = config.output_layer_init_method
        self.linear_fc2 = linears(config, end, experts, size, ffn, bias=bias)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> dict[str, Any]:
        """Return weights as megatron's experts store theirs, see :func:`expert_shards`."""
        return expert_shards(self, prefix, sharded_offsets, metadata)


class SharedExpertMLP(MegatronSharedExpertMLP):  # type: ignore[misc]
    """megatron's, with a gate that treats each row alike on the CPU."""

    def forward(self, hidden_states: Tensor, **_: Any) -> Tensor:
        """``[T, H]`` to the same."""
        output: Tensor = super(MegatronSharedExpertMLP, self).forward(hidden_states)[0]
        if self.gate_weight is None:
            return output
        score = F.linear(hidden_states.float(), self.gate_weight.float())
        return output * (1 / (1 + torch.exp(-score))).to(output.dtype)


class MoELayer(MegatronModule):  # type: ignore[misc]
    """Router, experts, and what else a layer of experts has.

    Args:
        config: megatron's.
        model: the model's, with experts.
        submodules: the linear layers and the activation of the shared experts.

    Attributes:
        settings, activation: what router and experts compute, as the kernels read it.
        ranks: those that have some of the experts each, or a share of each expert; None for one
            rank.
        forced: experts that all forwards outside of engines take, int32 ``[T, k]``; -1 where the
            layer chooses. None chooses the best.
    """

    forced: Tensor | None = None

    def __init__(
        self, config: Any, model: ModelConfig, submodules: MLPSubmodules, **_: Any
    ) -> None:
        super().__init__(config)
        self.settings = router_settings(model)
        self.activation = expert_activation(model)
        self.ranks = ranks_of(config)
        self.router = Router(config, model)
        self.experts = Experts(config, model)
        self.shared_experts = self.fc1_latent_proj = self.fc2_latent_proj = None
        if model.moe_shared_expert_intermediate_size is not None:
            self.shared_experts = SharedExpertMLP(
                config, submodules, model.moe_shared_expert_gate, get_default_pg_collection()
            )
        latent, hidden = model.moe_latent_size, model.hidden_size
        if latent is not None:
            start, end = config.init_method, config.output_layer_init_method
            bias = model.mlp_bias
            self.fc1_latent_proj = Linears(config, start, latent, hidden, bias=bias)
            self.fc2_latent_proj = Linears(config, end, hidden, latent, bias=bias)

    @property
    def weights(self) -> ExpertWeights:
        """The weights of the experts, multiplied out where e4m3 or MXFP4 is kept."""
        fc1, fc2 = self.experts.linear_fc1, self.experts.linear_fc2
        dtype, kept = self.config.params_dtype, self.kept_weights
        b2 = added_by_another(fc2.bias) if kept.b2 is None else kept.b2
        return ExpertWeights(weight_of(fc1, dtype), weight_of(fc2, dtype), kept.b1, b2)

    @property
    def kept_weights(self) -> KeptWeights:
        """The weights of the experts, as the kernels read them. Of ranks that share each expert the
        first one adds the last bias."""
        fc1, fc2 = self.experts.linear_fc1, self.experts.linear_fc2
        adds_bias = self.ranks is None or self.ranks.expert_tensor_rank == 0
        return KeptWeights(
            fc1.weight,
            fc2.weight,
            fc1.bias,
            fc2.bias if adds_bias else None,
            getattr(fc1, SCALE, None),
            getattr(fc2, SCALE, None),
        )

    @property
    def quantizes_inputs(self) -> bool:
        """Experts multiply e4m3 by e4m3."""
        fc1, fc2 = self.experts.linear_fc1, self.experts.linear_fc2
        return all(getattr(each, "quantizes_input", False) for each in (fc1, fc2))

    def forward(
        self, hidden_states: Tensor, padding_mask: Tensor | None = None, **_: Any
    ) -> tuple[Tensor, None]:
        """:func:`mixture` ``[S, B, H]``, and no bias. In inference it is ``[T, 1, H]``.

        Raises:
            ConfigError: a trainer's ranks that share experts have a part of the sequence each.
        """
        if self.ranks is not None and self.config.sequence_parallel:
            raise ConfigError(
                "sequence_parallel=True is not supported with layers of experts of this package, "
                "which take whole sequences: set it to False in the model's config, or build the "
                "model with megatron-core's MoELayer"
            )
        return mixture(self, hidden_states, padding_mask), None


def mixture(layer: Any, hidden_states: Tensor, padding_mask: Tensor | None) -> Tensor:
    """Each token's experts, weighted and added up, and what all tokens pass.

    Args:
        layer: a :class:`MoELayer`, or what has its attributes.
        hidden_states: ``[S, B, H]``.
        padding_mask: bool ``[B, S]``, true for tokens that no expert is read for. What comes out
            for them is of the shared experts alone.

    Returns:
        ``[S, B, H]``.
    """
    tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
    live = None if padding_mask is None else ~padding_mask.t().reshape(-1)
    chosen = leaving.chosen.get(id(layer)) if torch.is_grad_enabled() else None
    if layer.forced is not None and not torch.is_inference_mode_enabled():
        chosen = layer.forced  # an engine's forwards are in that mode
    routing = routing_of(layer, tokens, live=live, chosen=chosen)
    noted = leaving.noted.get(id(layer))
    if noted is not None:
        noted.append(routing.ids)
    if leaving.to is not None:
        leaving.to(layer, routing.ids)
    ranks, hidden = layer.ranks, _linear(tokens, layer.fc1_latent_proj)
    if ranks is not None:
        if torch.is_grad_enabled():
            ranks = with_gradients(ranks)
        held = len(layer.kept_weights.w1)
        routing = held_experts(routing, held * ranks.expert_rank, held)
        if isinstance(ranks, TrainerRanks):
            hidden, routing = ranks.shared(hidden, routing)
    output = experts_of(layer, hidden, routing)
    if ranks is not None:
        output = ranks.sum_experts_(output)
    output = _linear(output, layer.fc2_latent_proj)
    if layer.shared_experts is not None:
        output = output + layer.shared_experts(tokens)
    return output.view_as(hidden_states)


def _linear(x: Tensor, linear: Any) -> Tensor:
    return x if linear is None else F.linear(x, linear.weight, linear.bias)
