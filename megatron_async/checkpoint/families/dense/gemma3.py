"""Gemma 3, text: Gemma 2 with norms of heads, and a theta of its own in layers with a window."""

from __future__ import annotations

from typing import Any

from megatron_async.checkpoint.families.dense.gemma2 import ALIASES, DEFAULTS, NAMES, gemma
from megatron_async.checkpoint.huggingface.family import Family
from megatron_async.checkpoint.huggingface.rope_fields import rope_scaling
from megatron_async.checkpoint.reading.fields import Fields


def config(fields: Fields) -> dict[str, Any]:
    pattern = fields.read("sliding_window_pattern", int, 6)
    return {
        # The caps are in config.json, and transformers does not cap the scores.
        **gemma(fields, lambda layer: (layer + 1) % max(pattern, 1) != 0),
        "attention_soft_cap": None,
        "qk_norm": True,
        **_ropes(fields),
    }


def _ropes(fields: Fields) -> dict[str, Any]:
    tokens = fields.read("max_position_embeddings", int)
    full, sliding = (_rope_of(fields, kind) for kind in ("full_attention", "sliding_attention"))
    added = fields.optional("rope_scaling", dict) or {}
    inner, local = (
        _checked({**full, **added}, "full_attention"),
        _checked(sliding, "sliding_attention"),
    )
    theta = fields.read("rope_theta", float, 1000000.0)
    local_theta = fields.read("rope_local_base_freq", float, 10000.0)
    return {
        "rope_theta": inner.read("rope_theta", float, theta),
        "rope_scaling": rope_scaling(fields, inner, tokens, of_all_layers=False),
        "sliding_rope_theta": local.read("rope_theta", float, local_theta),
        "sliding_rope_scaling": rope_scaling(fields, local, tokens, of_all_layers=False),
        "max_sequence_length": tokens,
    }


def _rope_of(fields: Fields, kind: str) -> dict[str, Any]:
    """What ``rope_parameters`` has for a kind of layers. Without it the kind of rope is given, so
    that the older name "type" of ``rope_scaling`` says nothing, as in transformers."""
    kinds: dict[str, Any] | None = fields.optional("rope_parameters", dict)
    if kinds is None:
        return {"rope_type": "default"}
    if not set(kinds) <= {"full_attention", "sliding_attention"}:
        raise fields.unsupported("rope_parameters", "those of full_attention, sliding_attention")
    found = kinds.get(kind)
    if not isinstance(found, dict | None):
        raise fields.unsupported("rope_parameters", f"an object for {kind}")
    return found or {"rope_type": "default"}


def _checked(values: dict[str, Any], kind: str) -> Fields:
    """Raises CheckpointError for what transformers takes elsewhere, and not in a kind of layers."""
    inner = Fields(values, at=f"rope_parameters.{kind}.")
    for name, neutral in (("truncate", True), ("partial_rotary_factor", 1.0)):
        if values.get(name, neutral) != neutral:
            raise inner.unsupported(name, str(neutral).lower())
    return inner


FAMILY = Family(
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    config=config,
    names=NAMES,
    defaults=DEFAULTS,
    aliases=ALIASES,
    has_rope=False,
)
