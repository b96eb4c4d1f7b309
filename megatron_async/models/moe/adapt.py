"""megatron-core's own layers of experts, made to run without reading on the host, in place."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_async import megatron_compat as compat  # noqa: F401  (before megatron)
from megatron_async.errors import ConfigError
from megatron_async.graph_audit.derived import Derived
from megatron_async.kernels.moe.settings import ExpertActivation
from megatron_async.models import parallel
from megatron_async.models.moe.compute import KeptWeights
from megatron_async.models.moe.layer import ExpertWeights, SharedExpertMLP, mixture
from megatron_async.models.moe.settings import router_settings
from megatron_async.models.moe.trainer_ranks import TrainerRanks, ranks_of
from megatron_async.models.parallel import ModelParallel

from megatron.core.activations import quick_gelu, squared_relu  # isort: skip
from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP  # isort: skip
from megatron.core.transformer.moe.moe_layer import (  # isort: skip
    MoELayer as MegatronMoELayer,
)

logger = logging.getLogger(__name__)

_REQUIRED: tuple[tuple[str, Any, str], ...] = (
    ("moe_apply_probs_on_input", False, "weight the experts' outputs"),
    ("moe_shared_expert_overlap", False, "build the model without the overlap"),
    ("moe_router_force_load_balancing", False, "turn it off: its routing is random"),
)
_FOR_TRAINING = {
    "moe_input_jitter_eps": "adds no noise to what routers get",
    "moe_expert_capacity_factor": "drops no token that experts have no room for",
}
"""Fields that an engine does not heed, and what it does, where megatron-core's evaluation does."""
_FUNCTIONS = {
    F.silu: "silu",
    F.gelu: "gelu",
    F.relu: "relu",
    quick_gelu: "quick_gelu",
    squared_relu: "squared_relu",
}


class AdaptedMoELayer(MegatronMoELayer):  # type: ignore[misc]
    """megatron's, with its weights as they are, computed as ``MoELayer`` of this package does.

    Each expert's parameters are views of stacked ones from then on: what changes them in place
    changes what is computed. What moves the whole module, as ``to()`` does, stacks them anew.
    """

    asks_for_padding_mask = True
    """megatron's layers around it hand the mask on, if the model is given one."""
    ranks: ModelParallel | TrainerRanks | None = None
    """Ranks that have some of the experts each, or a share of each; None for one rank."""
    forced: Tensor | None = None
    """As that of ``MoELayer``; in training nobody reads it."""
    has_own_tokens = False
    """Ranks that have some of the experts each have tokens of their own, which megatron's forward
    exchanges: outside of an engine's forwards, see ``models/sequence_parallel.py``."""

    def forward(
        self,
        hidden_states: Tensor,
        intermediate_tensors: Any = None,
        padding_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """As ``MoELayer`` of this package; as megatron's in training, and where each rank has
        tokens of its own, as in a trainer's evaluation."""
        if self.training or self.config.sequence_parallel or self.has_own_tokens:
            return super().forward(hidden_states, intermediate_tensors, padding_mask, **kwargs)
        self._check_place()
        return mixture(self, hidden_states, padding_mask), None

    def stack(self) -> None:
        """Make the parameters of the experts views of stacked ones, unless they are already."""
        fc1, fc2 = (_linears(self.experts, name) for name in ("linear_fc1", "linear_fc2"))
        adds_bias = self.ranks is None or self.ranks.expert_tensor_rank == 0
        # Not parameters of the layer's own: they belong to the experts.
        self.__dict__["weights"] = ExpertWeights(
            _stacked(fc1, "weight"), _stacked(fc2, "weight"),
            _stacked(fc1, "bias"), _stacked(fc2, "bias") if adds_bias else None,
        )  # fmt: skip

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        result = super()._apply(fn, recurse)
        self.stack()
        return result

    def __getstate__(self) -> dict[str, Any]:
        """What a copy is made of: without the stacked weights, since it has its own."""
        return {name: value for name, value in vars(self).items() if name != "weights"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.stack()

    def _check_place(self) -> None:
        """Raise :class:`ConfigError` where the first or the last expert has its weights elsewhere:
        looking at all of them in each forward would take long."""
        stacked: ExpertWeights = vars(self)["weights"]
        last = self.experts.num_local_experts - 1
        for whole, name, number in (
            (stacked.w1, "linear_fc1", 0),
            (stacked.w2, "linear_fc2", last),
        ):
            weight = _linear(self.experts, name, number)["weight"]
            if weight.data_ptr() != whole[number].data_ptr():
                raise ConfigError(
                    f"layer {self.layer_number}: parameters of experts were moved to other memory "
                    "since the model was adapted: change them in place, as load_state_dict does "
                    "without assign=True, and wrap a model before an engine is built over it"
                )

    @property
    def weights(self) -> ExpertWeights:
        """The stacked weights, with gradients that are those of each expert's parameters."""
        stacked: ExpertWeights = vars(self)["weights"]
        if not torch.is_grad_enabled():
            return stacked
        fc1, fc2 = (_linears(self.experts, name) for name in ("linear_fc1", "linear_fc2"))
        pairs = ((fc1, "weight"), (fc2, "weight"), (fc1, "bias"), (fc2, "bias"))
        linked: list[Any] = [
            None if whole is None else _Stacked.apply(whole, *_parameters(*pair))  # type: ignore[no-untyped-call]
            for whole, pair in zip(stacked, pairs, strict=True)
        ]
        return ExpertWeights(*linked)

    @property
    def kept_weights(self) -> KeptWeights:
        """As that of ``MoELayer``."""
        return KeptWeights(*self.weights)

    def derived_tensors(self) -> Iterator[Derived]:
        """Each expert's part of the stacked weights, which its parameter is a view of."""
        fc1, fc2 = (_linears(self.experts, name) for name in ("linear_fc1", "linear_fc2"))
        w1, w2, b1, b2 = vars(self)["weights"]
        stacks = {"w1": (w1, fc1, "weight"), "w2": (w2, fc2, "weight")}
        stacks |= {"b1": (b1, fc1, "bias"), "b2": (b2, fc2, "bias")}
        for name, (stacked, linears, kind) in stacks.items():
            for number, row in enumerate(() if stacked is None else stacked):
                value = partial(torch.Tensor.detach, linears[number][kind])
                yield Derived(f"weights.{name}[{number}]", row, value)


class _Stacked(torch.autograd.Function):
    """Stacked parameters, which are views of the first argument, and whose gradients are its
    rows'."""

    @staticmethod
    def forward(ctx: Any, stacked: Tensor, *parameters: Tensor) -> Tensor:
        return stacked.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, *grads[0].unbind()


def check_experts(layer: Any) -> None:
    """Check a layer whose MLP may be megatron's layer of experts.

    Raises:
        ConfigError: it is one that cannot be served; the message names it.
    """
    if type(getattr(layer, "mlp", None)) is not MegatronMoELayer:
        return
    config, experts = layer.config, layer.mlp.experts
    _check_ranks(config)
    for name, supported, advice in _REQUIRED:
        value = getattr(config, name, supported)
        if value != supported:
            raise ConfigError(f"model config {name}={value!r} is not supported: {advice}")
    if "sinkhorn" in str(config.moe_router_load_balancing_type):
        raise ConfigError(
            "model config moe_router_load_balancing_type='sinkhorn' is not supported: use a top-k "
            "router"
        )
    if type(experts) not in (SequentialMLP, TEGroupedMLP):
        raise ConfigError(
            f"layer {layer.layer_number} has {type(experts).__name__}: build its experts with "
            "SequentialMLP or TEGroupedMLP"
        )
    for part in (layer.mlp.router, layer.mlp.shared_experts):
        if part is not None and not is_of_megatron(type(part)):
            raise ConfigError(
                f"layer {layer.layer_number} has {type(part).__name__}, which steps do not call: "
                "build it with megatron.core's TopKRouter and SharedExpertMLP"
            )
    _check_linears(layer)
    _check_groups(config)
    _check_clamp(config)
    _activation(config)
    for name in _FOR_TRAINING:
        _say_what_is_left_out(name, getattr(config, name, None))


@functools.cache
def _say_what_is_left_out(name: str, value: Any) -> None:
    """Once for all layers."""
    if value is not None:
        logger.warning(
            "model config %s=%r is heeded in training alone: the engine %s",
            name, value, _FOR_TRAINING[name],
        )  # fmt: skip


def _check_linears(layer: Any) -> None:
    """Weights are read, so that nothing else may be computed with them."""
    experts, names = layer.mlp.experts, ("linear_fc1", "linear_fc2")
    holders = experts.local_experts if type(experts) is SequentialMLP else [experts]
    linears = [getattr(holder, name) for holder in holders for name in names]
    if layer.config.moe_latent_size:
        linears += [layer.mlp.fc1_latent_proj, layer.mlp.fc2_latent_proj]
    for linear in linears:
        check_linear(linear, f"layer {layer.layer_number} has experts")


def check_linear(linear: Any, where: str) -> None:
    """Check a linear layer whose weight is read in place of a call.

    Raises:
        ConfigError: it is not megatron-core's, such as one with an adapter around it.
    """
    if not is_of_megatron(type(linear).forward):
        raise ConfigError(
            f"{where} with {type(linear).__name__}, which steps do not call: merge adapters into "
            "the weights, and take them off"
        )


def is_of_megatron(given: Any) -> bool:
    """Whether a class or a method is megatron-core's own."""
    return str(given.__module__).startswith("megatron.core.")


def _check_groups(config: Any) -> None:
    """Groups are scored by one expert or more, and those that are kept have enough of them."""
    kept, chosen = config.moe_router_group_topk, config.moe_router_topk
    if not kept:
        return
    of_group = config.num_moe_experts // config.moe_router_num_groups
    if not kept <= chosen <= kept * of_group:
        raise ConfigError(
            f"model config moe_router_topk={chosen} is not supported with "
            f"moe_router_group_topk={kept}: choose from {kept} to {kept * of_group} experts, since "
            f"each of the {kept} groups that are kept has {of_group}"
        )


def _check_clamp(config: Any) -> None:
    limit = getattr(config, "activation_func_clamp_value", None)
    is_fused = config.bias_activation_fusion and config.activation_func is F.silu
    if limit is not None and is_fused and config.gated_linear_unit:
        raise ConfigError(
            f"model config activation_func_clamp_value={limit} is not supported with experts whose "
            "SwiGLU is fused, which leaves it out: set bias_activation_fusion to False, or the "
            "clamp to None"
        )


def _check_ranks(config: Any) -> None:
    """Experts are divided over ranks that this process knows, each as a whole or each by itself."""
    place, size = parallel.current(), config.expert_model_parallel_size
    if size not in (1, 1 if place is None else place.layout.expert):
        raise ConfigError(
            f"model config expert_model_parallel_size={size} is not supported: load the model "
            "without expert parallelism, or in processes whose expert groups have that size"
        )
    of_each = config.expert_tensor_parallel_size
    if of_each != (config.tensor_model_parallel_size if size == 1 else 1):
        raise ConfigError(
            f"model config expert_tensor_parallel_size={of_each} is not supported: use "
            "tensor_model_parallel_size without expert parallelism, and 1 with it"
        )


def adapt_experts(layer: Any) -> None:
    """Turn megatron's layer of experts into :class:`AdaptedMoELayer`; others stay as they are."""
    mlp: Any = getattr(layer, "mlp", None)
    if type(mlp) is not MegatronMoELayer:
        return
    mlp.__class__ = AdaptedMoELayer
    mlp.__dict__["ranks"] = ranks_of(mlp.config)
    mlp.__dict__["has_own_tokens"] = mlp.config.expert_model_parallel_size > 1
    mlp.settings = router_settings(mlp.config)
    _keep_expert_bias(mlp.router)
    mlp.activation = _activation(mlp.config)
    if mlp.shared_experts is not None:
        mlp.shared_experts.__class__ = SharedExpertMLP
    if not mlp.config.moe_latent_size:
        mlp.fc1_latent_proj = mlp.fc2_latent_proj = None
    mlp.stack()


def _keep_expert_bias(router: Any) -> None:
    """Have the expert bias in float32 and where it is from now on: in a model of 16 bits megatron's
    first forward would put another tensor in its place, and captured steps would read what has the
    memory then."""
    bias = getattr(router, "expert_bias", None)
    if bias is not None and bias.dtype != torch.float32:
        bias.data = bias.data.float()


def _linears(experts: Any, name: str) -> list[dict[str, Any]]:
    """``weight`` and ``bias`` of each expert's linear layer."""
    return [_linear(experts, name, number) for number in range(experts.num_local_experts)]


def _linear(experts: Any, name: str, number: int) -> dict[str, Any]:
    if type(experts) is SequentialMLP:
        linear = getattr(experts.local_experts[number], name)
        return {"weight": linear.weight, "bias": getattr(linear, "bias", None)}
    grouped = getattr(experts, name)
    kinds = ("weight", "bias") if getattr(grouped, "use_bias", False) else ("weight",)
    return {kind: getattr(grouped, f"{kind}{number}") for kind in kinds}


def _parameters(linears: list[dict[str, Any]], kind: str) -> list[Any]:
    return [x[kind] for x in linears if x.get(kind) is not None and x[kind].numel()]


def _stacked(linears: list[dict[str, Any]], kind: str) -> Any:
    """One tensor of all experts', which become views of it; None where there are none."""
    parameters = _parameters(linears, kind)
    if not parameters:
        return None
    stacked = _stacked_before(parameters)
    if stacked is not None:
        return stacked
    if any(p.data.untyped_storage().nbytes() > p.data.nbytes for p in parameters):
        logger.warning(
            "weights of experts lie in a buffer, such as an optimizer's, and are moved out of it: "
            "wrap the model before the buffer is made"
        )
    stacked = torch.stack([parameter.data for parameter in parameters])
    for parameter, row in zip(parameters, stacked, strict=True):
        parameter.data = row
    return stacked


def _stacked_before(parameters: list[Any]) -> Tensor | None:
    """The tensor that these are rows of, one behind the other, or None."""
    first = parameters[0].data
    storage, size = first.untyped_storage(), first.numel()
    for number, each in enumerate(parameters):
        data = each.data
        is_row = (
            data.is_contiguous()
            and (data.dtype, data.shape) == (first.dtype, first.shape)
            and data.untyped_storage().data_ptr() == storage.data_ptr()
            and data.storage_offset() == first.storage_offset() + number * size
        )
        if not is_row:
            return None
    stacked: Tensor = first.as_strided((len(parameters), *first.shape), (size, *first.stride()))
    return stacked


def _activation(config: Any) -> ExpertActivation:
    function = _FUNCTIONS.get(config.activation_func)
    if function is None:
        name = getattr(config.activation_func, "__name__", repr(config.activation_func))
        raise ConfigError(
            f"model config activation_func={name} is not supported with experts: use one of "
            f"{', '.join(_FUNCTIONS.values())}"
        )
    gated = config.gated_linear_unit
    return ExpertActivation(
        function=function,
        gated=gated,
        # Without a gate megatron-core reads neither of them.
        limit=getattr(config, "activation_func_clamp_value", None) if gated else None,
        offset=getattr(config, "glu_linear_offset", 0.0) if gated else 0.0,
    )
