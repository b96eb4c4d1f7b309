"""Whether a configuration's fields of a mixture of experts go together."""

from __future__ import annotations

from megatron_async.errors import CheckpointError
from megatron_async.models.description.config_protocol import ConfigFields


def check_experts(config: ConfigFields) -> None:
    """Check a configuration with experts.

    Raises:
        CheckpointError: a field is missing, or two contradict each other; the message names them.
    """
    experts, chosen = config.num_moe_experts, config.moe_router_topk
    assert experts is not None
    if config.moe_ffn_hidden_size is None:
        raise CheckpointError(f"model config: num_moe_experts={experts} needs moe_ffn_hidden_size")
    if chosen > experts:
        raise CheckpointError(
            f"model config: moe_router_topk={chosen} must be at most num_moe_experts={experts}"
        )
    if config.moe_router_enable_expert_bias and config.moe_router_score_function != "sigmoid":
        raise CheckpointError(
            "model config: moe_router_enable_expert_bias needs moe_router_score_function='sigmoid'"
        )
    if config.moe_shared_expert_gate and config.moe_shared_expert_intermediate_size is None:
        raise CheckpointError(
            "model config: moe_shared_expert_gate needs moe_shared_expert_intermediate_size"
        )
    _check_layers(config)
    _check_groups(config, experts, chosen)


def _check_layers(config: ConfigFields) -> None:
    kinds = config.moe_layer_freq
    if kinds is not None and (len(kinds) != config.num_layers or not set(kinds) <= {0, 1}):
        raise CheckpointError(
            f"model config: moe_layer_freq must have a 0 or a 1 for each of "
            f"num_layers={config.num_layers} layers"
        )


def _check_groups(config: ConfigFields, experts: int, chosen: int) -> None:
    groups, taken = config.moe_router_num_groups, config.moe_router_group_topk
    if (groups is None) != (taken is None):
        raise CheckpointError(
            "model config: moe_router_num_groups and moe_router_group_topk need each other"
        )
    if groups is None or taken is None:
        return
    if experts % groups:
        raise CheckpointError(
            f"model config: num_moe_experts={experts} must be a multiple of "
            f"moe_router_num_groups={groups}"
        )
    if not taken <= min(groups, chosen) or taken * (experts // groups) < chosen:
        raise CheckpointError(
            f"model config: moe_router_group_topk={taken} of {groups} groups must be at most "
            f"moe_router_topk={chosen}, and hold so many experts"
        )
