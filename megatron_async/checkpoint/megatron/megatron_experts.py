"""Experts of a model from the arguments of Megatron-LM's training (core_v0.15 and later)."""

from __future__ import annotations

from typing import Any, Protocol

from megatron_async.checkpoint.huggingface.family import MAX_LAYERS
from megatron_async.errors import CheckpointError


class Arguments(Protocol):
    """Typed reads of the stored arguments; None counts as absent."""

    def unsupported(self, name: str, supported: str) -> CheckpointError: ...

    def has(self, name: str) -> bool: ...

    def get(self, name: str) -> Any: ...

    def flag(self, name: str, default: bool = False) -> bool: ...

    def integer(self, name: str, default: int | None = None) -> int: ...

    def number(self, name: str, default: float) -> float: ...

    def word(self, name: str, default: str) -> str: ...


NEUTRAL: dict[str, tuple[Any, ...]] = {
    "moe_apply_probs_on_input": (None, False),
    "moe_router_force_load_balancing": (None, False),
    "moe_router_topk_limited_devices": (None,),
}
"""What a model must not have, by the values that say that it has it not."""


def expert_fields(args: Arguments, num_layers: int, ffn_hidden_size: int) -> dict[str, Any]:
    """Fields of ``ModelConfig`` of a model with experts; none without.

    Training may drop tokens by a capacity (``moe_expert_capacity_factor``); here none is dropped.

    Raises:
        CheckpointError: an argument asks for what is not supported.
    """
    experts = args.integer("num_experts", 0)
    if not experts:
        return {}
    if "sinkhorn" in _words(args, "moe_router_load_balancing_type"):
        raise args.unsupported("moe_router_load_balancing_type", "a top-k router")
    found: dict[str, Any] = {
        "num_moe_experts": experts,
        "moe_layer_freq": _layers(args, num_layers),
        "moe_ffn_hidden_size": args.integer("moe_ffn_hidden_size", ffn_hidden_size),
        "moe_router_topk": args.integer("moe_router_topk", 2),
        "moe_router_score_function": args.word("moe_router_score_function", "softmax"),
        "moe_router_pre_softmax": args.flag("moe_router_pre_softmax"),
        "moe_router_enable_expert_bias": args.flag("moe_router_enable_expert_bias"),
        "moe_router_bias": args.flag("add_bias_linear", not args.flag("disable_bias_linear")),
        "moe_shared_expert_gate": args.flag("moe_shared_expert_gate"),
    }
    if args.has("moe_router_topk_scaling_factor"):
        name = "moe_router_topk_scaling_factor"
        found[name] = args.number(name, 1.0)
    sizes = (
        "moe_router_num_groups",
        "moe_router_group_topk",
        "moe_shared_expert_intermediate_size",
        "moe_latent_size",
    )
    return found | {name: args.integer(name) for name in sizes if args.has(name)}


def _words(args: Arguments, name: str) -> list[Any]:
    value = args.get(name)
    return value if isinstance(value, list) else [value]


def _layers(args: Arguments, num_layers: int) -> tuple[int, ...] | None:
    """``ModelConfig.moe_layer_freq``; a number n means each nth layer, from the first on."""
    name = "moe_layer_freq"
    frequency = args.get(name)
    if frequency in (None, 1):
        return None
    if num_layers > MAX_LAYERS:
        raise args.unsupported("num_layers", f"at most {MAX_LAYERS} with {name}")
    if type(frequency) is int and frequency > 0:
        kinds = [int(layer % frequency == 0) for layer in range(num_layers)]
    elif isinstance(frequency, list) and len(frequency) == num_layers:
        kinds = frequency
    else:
        raise args.unsupported(name, "a positive integer, or a 0 or a 1 for each layer")
    return None if all(kind == 1 for kind in kinds) else tuple(kinds)
