"""What a configuration's layers of experts compute, in the words of ``kernels/moe``."""

from __future__ import annotations

from megatron_async.kernels.moe.settings import SIGMOID, ExpertActivation, RouterSettings
from megatron_async.models.description.config import ModelConfig

_FUNCTIONS = {
    "swiglu": "silu",
    "clamped_swiglu": "quick_gelu",
    "geglu": "gelu",
    "geglu_tanh": "gelu_tanh",
    "gelu": "gelu",
    "gelu_tanh": "gelu_tanh",
    "relu": "relu",
    "squared_relu": "squared_relu",
}


def router_settings(config: ModelConfig) -> RouterSettings:
    """How megatron-core routes with these fields; ``config`` has experts. It may be megatron's own,
    which does not know groups by their largest score, and keeps all groups of a config that does
    not say how many."""
    assert config.num_moe_experts is not None
    top_k, kept = config.moe_router_topk, config.moe_router_group_topk
    by_largest = getattr(config, "moe_router_group_max", False)
    return RouterSettings(
        num_experts=config.num_moe_experts,
        top_k=top_k,
        score_function=config.moe_router_score_function,
        pre_softmax=config.moe_router_pre_softmax,
        normalize=config.moe_router_score_function == SIGMOID and top_k > 1,
        num_groups=(config.moe_router_num_groups or 1) if kept else 1,
        kept_groups=kept or 1,
        group_score_experts=top_k // kept if kept and not by_largest else 1,
        scaling_factor=config.moe_router_topk_scaling_factor or 1.0,
    )


def expert_activation(config: ModelConfig) -> ExpertActivation:
    """What is between an expert's two linear layers."""
    return ExpertActivation(
        function=_FUNCTIONS[config.activation],
        gated=config.gated,
        limit=config.activation_limit,
        offset=float(config.activation == "clamped_swiglu"),
    )
