"""Rotary embeddings as ``config.json`` describes them.

``rope_parameters``, or the older ``rope_theta`` with ``rope_scaling``.
"""

from __future__ import annotations

import math
from typing import Any, Literal, cast, get_args

from megatron_async.checkpoint.reading.fields import Fields
from megatron_async.config.engine_config import MAX_COUNT
from megatron_async.models.description.config import RopeScaling

_Kind = Literal["llama3", "linear", "dynamic", "yarn", "longrope"]
_KINDS = ("default", *get_args(_Kind))


def rope(fields: Fields, *, partial: bool = False) -> dict[str, Any]:
    """``rope_theta``, ``rope_scaling``, ``rotary_fraction`` and ``max_sequence_length`` of a
    :class:`ModelConfig` whose layers all rotate alike.

    Args:
        partial: the model may rotate a part of each head.

    Raises:
        CheckpointError: a value is missing, of a wrong type, or asks for something unknown.
    """
    inner = given_rope(fields)
    theta = fields.read("rope_theta", float, 10000.0)
    fraction = fields.optional("partial_rotary_factor", float, 1.0)
    tokens = fields.read("max_position_embeddings", int)
    fraction = inner.optional("partial_rotary_factor", float, fraction)
    if fraction is None:
        fraction = 1.0
    if fraction != 1 and not partial:
        raise fields.unsupported("partial_rotary_factor", "1.0", fraction)
    scaling = rope_scaling(fields, inner, tokens)
    if scaling is not None and scaling.kind in ("linear", "dynamic"):
        tokens = _stretched(inner, tokens, scaling)
    if scaling is not None and scaling.kind == "yarn":
        original = scaling.original_max_position_embeddings or 0
        tokens = max(tokens, _stretched(inner, original, scaling))
    return {
        "rope_theta": inner.read("rope_theta", float, theta),
        "rope_scaling": scaling,
        "rotary_fraction": fraction,
        "max_sequence_length": tokens,
    }


def given_rope(fields: Fields) -> Fields:
    """The object that describes the rope of all layers. Where both are there, transformers takes
    ``rope_scaling`` and nothing of ``rope_parameters``; a null is as absent.

    Raises:
        CheckpointError: it is no object, or one for each kind of layers.
    """
    name = "rope_scaling" if fields.values.get("rope_scaling") else "rope_parameters"
    values = fields.values.get(name)
    if values is None:
        values = fields.default(name) or {}
    if not isinstance(values, dict):
        raise fields.unsupported(name, "an object")
    if any(isinstance(value, dict) for value in values.values()):
        raise fields.unsupported(name, "one set of parameters for all layers")
    return Fields(values, at=f"{name}.")


def rope_kind(inner: Fields) -> Any:
    """The kind of a rope under its newer or its older name."""
    return inner.values.get("rope_type", inner.values.get("type", "default"))


def _stretched(inner: Fields, tokens: int, scaling: RopeScaling) -> int:
    if tokens * scaling.factor > MAX_COUNT:
        raise inner.unsupported("factor", f"at most {MAX_COUNT} positions", scaling.factor)
    return int(tokens * scaling.factor)


def rope_scaling(
    fields: Fields, inner: Fields, tokens: int, *, of_all_layers: bool = True
) -> RopeScaling | None:
    """The scaling that the object ``inner`` describes, in a model of ``tokens`` positions.

    Args:
        of_all_layers: a length of ``fields`` wins over that of ``inner``, as in transformers where
            all layers rotate alike.
    """
    name = rope_kind(inner)
    name = fields.rope_kinds.get(name, name) if isinstance(name, str) else name
    if name == "default":
        return None
    if name not in _KINDS:
        raise inner.unsupported("rope_type", ", ".join(_KINDS), name)
    kind = cast(_Kind, name)
    if kind == "linear":
        return RopeScaling(kind=kind, factor=inner.read("factor", float))
    if kind == "dynamic":
        factor = inner.read("factor", float)
        return RopeScaling(kind=kind, factor=factor, original_max_position_embeddings=tokens)
    original = None
    if of_all_layers:
        original = fields.optional("original_max_position_embeddings", int)
    if original is None:
        default = None if kind == "llama3" else tokens
        original = inner.read("original_max_position_embeddings", int, default)
    if kind == "llama3":
        return RopeScaling(
            kind=kind,
            factor=inner.read("factor", float),
            low_freq_factor=inner.read("low_freq_factor", float),
            high_freq_factor=inner.read("high_freq_factor", float),
            original_max_position_embeddings=original,
        )
    factor = inner.read("factor", float, tokens / max(original, 1))
    if kind == "longrope":
        return RopeScaling(
            kind=kind,
            factor=factor,
            original_max_position_embeddings=original,
            short_factor=tuple(inner.read("short_factor", list)),
            long_factor=tuple(inner.read("long_factor", list)),
            attention_factor=inner.read(
                "attention_factor", float, _longrope_attention_factor(factor, original)
            ),
        )
    return RopeScaling(
        kind=kind,
        factor=factor,
        original_max_position_embeddings=original,
        attention_factor=inner.read(
            "attention_factor", float, _yarn_attention_factor(inner, factor)
        ),
        beta_fast=inner.read("beta_fast", float, 32.0),
        beta_slow=inner.read("beta_slow", float, 1.0),
        truncate=inner.optional("truncate", bool, True) or False,
    )


def _longrope_attention_factor(factor: float, tokens: int) -> float:
    if factor <= 1 or tokens < 2:
        return 1.0
    return math.sqrt(1 + math.log(factor) / math.log(tokens))


def _yarn_attention_factor(inner: Fields, factor: float) -> float:
    def of(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    mscale = inner.unless_zero("mscale", float)
    all_dim = inner.unless_zero("mscale_all_dim", float)
    return of(mscale) / of(all_dim) if mscale and all_dim else of(1.0)


def rotation_border(scaling: RopeScaling | None) -> int | None:
    """Tokens up to which requests are rotated in one way; all layers have the same."""
    is_longrope = scaling is not None and scaling.kind == "longrope"
    return scaling.original_max_position_embeddings if scaling and is_longrope else None


def rope_of_kind(fields: Fields, kind: str) -> dict[str, Any]:
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


def checked_kind(values: dict[str, Any], kind: str) -> Fields:
    """Raises CheckpointError for what transformers takes elsewhere, and not in a kind of layers."""
    inner = Fields(values, at=f"rope_parameters.{kind}.")
    for name, neutral in (("truncate", True), ("partial_rotary_factor", 1.0)):
        if values.get(name, neutral) != neutral:
            raise inner.unsupported(name, str(neutral).lower())
    return inner
