"""Hybrid models (``MambaModel``, now ``HybridModel``) from the arguments of its training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_async.checkpoint.huggingface.family import MAX_LAYERS
from megatron_async.checkpoint.megatron.megatron_experts import Arguments
from megatron_async.models.mamba.sizes import LETTERS

FINAL_NORM = "decoder.final_norm.weight"
"""A stored tensor that such models have, and no other."""
SPECS = (
    "megatron.core.models.mamba.mamba_layer_specs",
    "megatron.core.models.hybrid.hybrid_layer_specs",
)
_STAGES = "|"
"""Between layers of a pattern, where a pipeline stage ends."""
_PATTERNS = ("hybrid_override_pattern", "hybrid_layer_pattern")


def is_hybrid(args: Arguments, stored: Mapping[str, Any]) -> bool:
    """Whether it is one, by its arguments and the names of its stored tensors."""
    named = args.flag("is_hybrid_model") or any(map(args.has, _PATTERNS))
    return named or FINAL_NORM in stored


def hybrid_fields(args: Arguments, num_layers: int) -> dict[str, Any]:
    """Fields of ``ModelConfig`` of a hybrid model.

    Raises:
        CheckpointError: an argument asks for what is not supported.
    """
    spec = args.get("spec")
    if spec is not None and (
        not isinstance(spec, list | tuple) or not spec or spec[0] not in SPECS
    ):
        raise args.unsupported("spec", f"{SPECS[0]} mamba_stack_spec")
    return {
        "hybrid_override_pattern": _pattern(args, num_layers),
        "mamba_state_dim": args.integer("mamba_state_dim", 128),
        "mamba_head_dim": args.integer("mamba_head_dim", 64),
        "mamba_num_groups": args.integer("mamba_num_groups", 8),
        "mamba_num_heads": args.integer("mamba_num_heads") if args.has("mamba_num_heads") else None,
        "moe_layer_freq": None,  # the pattern says which layers have experts
    }


def _pattern(args: Arguments, num_layers: int) -> str:
    for name in _PATTERNS:
        if args.has(name):
            pattern = args.word(name, "").replace(_STAGES, "")
            if len(pattern) != num_layers or set(pattern) - set(LETTERS):
                raise args.unsupported(name, f"one of {LETTERS} for each of {num_layers} layers")
            return pattern
    if not 0 < num_layers <= MAX_LAYERS:
        raise args.unsupported("num_layers", f"1 to {MAX_LAYERS}")
    shares = [args.number(f"hybrid_{part}_ratio", 0.0) for part in ("attention", "mlp")]
    if min(shares) < 0 or sum(shares) > 1:
        raise args.unsupported("hybrid_attention_ratio", "shares that are at most 1 together")
    from megatron_async.megatron_compat.hybrid import pattern_from_ratios

    return pattern_from_ratios(num_layers, *shares)
