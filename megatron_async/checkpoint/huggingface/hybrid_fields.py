"""Mamba-2 layers and hybrid patterns as ``config.json`` describes them."""

from __future__ import annotations

import math
from typing import Any

from megatron_async.checkpoint.reading.fields import Fields
from megatron_async.models.mamba.sizes import ATTENTION, EXPERTS, LETTERS, MAMBA, MLP

_LETTERS = {
    "mamba": MAMBA,
    "linear_attention": MAMBA,
    "attention": ATTENTION,
    "full_attention": ATTENTION,
    "mlp": MLP,
    "moe": EXPERTS,
}


def mamba_fields(fields: Fields, *, expanded: bool = False) -> dict[str, Any]:
    """The ``mamba_*`` fields of a :class:`ModelConfig`, by their names or the family's aliases.

    Args:
        expanded: all heads together have ``mamba_expand`` times the hidden size; a head of "auto"
            elements has its share.

    Raises:
        CheckpointError: a value is missing, of a wrong type, or asks for what is not supported.
    """
    activation = fields.read("mamba_hidden_act", str, "silu")
    if activation not in ("silu", "swish"):
        raise fields.unsupported("mamba_hidden_act", "silu", activation)
    limits = fields.get("time_step_limit")
    if limits is not None and _numbers(limits) != [0.0, math.inf]:
        raise fields.unsupported("time_step_limit", "[0.0, Infinity]", limits)
    heads = fields.read("mamba_num_heads", int)
    if expanded:
        inner = fields.read("mamba_expand", int, 2) * fields.read("hidden_size", int)
        share = inner // max(heads, 1)
        is_auto = fields.get("mamba_head_dim") == "auto"
        head_dim = share if is_auto else fields.read("mamba_head_dim", int, share)
        if heads * head_dim != inner:
            of = f"so many that {heads} heads have {inner} elements"
            raise fields.unsupported("mamba_head_dim", of, head_dim)
    else:
        head_dim = fields.read("mamba_head_dim", int)
    return {
        "mamba_num_heads": heads,
        "mamba_head_dim": head_dim,
        "mamba_num_groups": fields.read("mamba_num_groups", int),
        "mamba_state_dim": fields.read("mamba_state_dim", int),
        "mamba_conv_kernel": fields.read("mamba_conv_kernel", int, 4),
        "mamba_conv_bias": bool(fields.optional("mamba_conv_bias", bool, True)),
        "mamba_proj_bias": fields.read("mamba_proj_bias", bool, False),
        "mamba_norm_epsilon": fields.read("rms_norm_eps", float),
    }


def _numbers(values: Any) -> list[float]:
    """The numbers of a list; an infinite one may be stored as an object."""
    infinite = {"__float__": "Infinity"}
    if not isinstance(values, list | tuple):
        return []
    found = [math.inf if value == infinite else value for value in values]
    return [float(value) for value in found if isinstance(value, int | float)]


def pattern_fields(kinds: str) -> dict[str, Any]:
    """``hybrid_override_pattern``, and how many layers it has."""
    return {"hybrid_override_pattern": kinds, "num_layers": len(kinds)}


def letters(fields: Fields, name: str, layers: int | None, default: str | None = None) -> str:
    """A letter for each kind of layer that a list in ``config.json`` names.

    Args:
        layers: as many as there must be; None for any number.
        default: of all layers, where there is no list.

    Raises:
        CheckpointError: it is missing, has another kind of layers, or not one for each layer.
    """
    kinds = fields.optional(name, list)
    if kinds is None and default is not None and layers is not None:
        return default * layers
    known = [_LETTERS.get(kind, "") if isinstance(kind, str) else "" for kind in kinds or ()]
    if not known or "" in known or layers not in (None, len(known)):
        raise fields.unsupported(name, f"one of {', '.join(_LETTERS)} for each layer")
    return "".join(known)


def pattern(fields: Fields, name: str) -> str | None:
    """A pattern of megatron-core's letters; None where there is none."""
    found: str | None = fields.optional(name, str)
    if found is not None and (not found or set(found) - set(LETTERS)):
        raise fields.unsupported(name, f"letters {LETTERS}")
    return found


def sigmoid_experts(fields: Fields) -> dict[str, Any]:
    """Layers of experts whose scores are sigmoids, with a bias for the choice and shared experts
    (Nemotron-H).

    Raises:
        CheckpointError: the choice of groups, or what weights add up to, is another than
            megatron-core's, which leaves the weight of one expert as it is.
    """
    chosen, groups = fields.read("num_experts_per_tok", int, 2), fields.read("n_group", int, 1)
    if (is_normed := fields.read("norm_topk_prob", bool, True)) != (chosen > 1):
        of = f"{str(chosen > 1).lower()} with num_experts_per_tok={chosen}"
        raise fields.unsupported("norm_topk_prob", of, is_normed)
    taken = fields.read("topk_group", int, 1)
    if groups > 1 and chosen != 2 * taken:
        raise fields.unsupported("topk_group", f"half of num_experts_per_tok={chosen}", taken)
    if fields.read("mlp_bias", bool, False):
        raise fields.unsupported("mlp_bias", "false with layers of experts")
    shared = fields.read("moe_shared_expert_intermediate_size", int)
    return {
        "num_moe_experts": fields.read("n_routed_experts", int),
        "moe_router_topk": chosen,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_num_groups": None if groups == 1 else groups,
        "moe_router_group_topk": None if groups == 1 else taken,
        "moe_router_topk_scaling_factor": fields.read("routed_scaling_factor", float, 1.0),
        "moe_ffn_hidden_size": fields.read("moe_intermediate_size", int),
        "moe_shared_expert_intermediate_size": shared,
        "moe_latent_size": fields.optional("moe_latent_size", int),
    }
