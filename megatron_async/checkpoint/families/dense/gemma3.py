"""Gemma 3, text: Gemma 2 with norms of heads, and a theta of its own in layers with a window."""

from __future__ import annotations

from typing import Any

from megatron_async.checkpoint.families.dense.gemma2 import ALIASES, DEFAULTS, NAMES, gemma
from megatron_async.checkpoint.huggingface.family import Family
from megatron_async.checkpoint.huggingface.rope_fields import (
    checked_kind,
    rope_of_kind,
    rope_scaling,
    rotation_border,
)
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
    full, sliding = (rope_of_kind(fields, kind) for kind in ("full_attention", "sliding_attention"))
    added = fields.optional("rope_scaling", dict) or {}
    inner, local = (
        checked_kind({**full, **added}, "full_attention"),
        checked_kind(sliding, "sliding_attention"),
    )
    scaling, sliding_scaling = (
        rope_scaling(fields, one, tokens, of_all_layers=False) for one in (inner, local)
    )
    if rotation_border(sliding_scaling) not in (None, rotation_border(scaling)):
        raise local.unsupported("rope_type", "longrope where full_attention changes there too")
    theta = fields.read("rope_theta", float, 1000000.0)
    local_theta = fields.read("rope_local_base_freq", float, 10000.0)
    return {
        "rope_theta": inner.read("rope_theta", float, theta),
        "rope_scaling": scaling,
        "sliding_rope_theta": local.read("rope_theta", float, local_theta),
        "sliding_rope_scaling": sliding_scaling,
        "max_sequence_length": tokens,
    }


FAMILY = Family(
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    config=config,
    names=NAMES,
    defaults=DEFAULTS,
    aliases=ALIASES,
    has_rope=False,
)
