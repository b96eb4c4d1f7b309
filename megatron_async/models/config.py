"""What a decoder-only model looks like, independent of where its weights come from."""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

from megatron_async.config import MAX_COUNT
from megatron_async.errors import CheckpointError, shown


def _wanted(kind: Any, value: Any, least: int) -> str | None:
    """What a field of type ``kind`` must be, where ``value`` is not that."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind is float:
        # An integer of hundreds of digits is no float either.
        good, wanted = is_number and 0 < value <= sys.float_info.max, "a finite number above 0"
    elif kind is int:
        good = is_number and isinstance(value, int) and least <= value <= MAX_COUNT
        wanted = f"a {'positive' if least else 'non-negative'} integer of at most {MAX_COUNT}"
    elif kind is bool:
        good, wanted = isinstance(value, bool), "true or false"
    elif get_origin(kind) is Literal:
        known = isinstance(value, str) and value in get_args(kind)
        good, wanted = known, f"one of {', '.join(get_args(kind))}"
    else:
        good, wanted = value is None or isinstance(value, RopeScaling), "a RopeScaling or None"
    return None if good else wanted


def _check_fields(config: RopeScaling | ModelConfig, may_be_zero: tuple[str, ...] = ()) -> None:
    """Check each field by its type. Integers in float fields become floats: JSON does not tell
    them apart.

    Raises:
        CheckpointError: a value is of another type, or out of range.
    """
    for name, kind in get_type_hints(type(config)).items():
        value = getattr(config, name)
        wanted = _wanted(kind, value, least=0 if name in may_be_zero else 1)
        if wanted is not None:
            raise CheckpointError(f"model config: {name}={shown(value, 500)} must be {wanted}")
        if kind is float:
            object.__setattr__(config, name, float(value))


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeScaling:
    """Llama-3 frequency scaling of rotary position embeddings.

    Wavelengths longer than ``original_max_position_embeddings / low_freq_factor`` are stretched
    by ``factor``, those shorter than ``original_max_position_embeddings / high_freq_factor`` are
    kept, the ones between are interpolated.

    Raises:
        CheckpointError: a value is out of range or two values contradict each other.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def __post_init__(self) -> None:
        _check_fields(self)
        if self.high_freq_factor <= self.low_freq_factor:
            raise CheckpointError(
                f"model config: high_freq_factor={self.high_freq_factor} must be above "
                f"low_freq_factor={self.low_freq_factor}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Architecture of a dense megatron-core ``GPTModel``.

    ``head_dim`` is megatron's ``kv_channels``, ``num_kv_heads`` its ``num_query_groups``.
    ``vocab_size`` counts the rows of the embedding. All sizes are in elements.

    Raises:
        CheckpointError: a value is out of range or two values contradict each other.
    """

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_hidden_size: int
    vocab_size: int
    max_sequence_length: int
    normalization: Literal["RMSNorm", "LayerNorm"] = "RMSNorm"
    norm_epsilon: float = 1e-5
    activation: Literal["swiglu", "gelu", "gelu_tanh"] = "swiglu"
    qk_norm: bool = False
    qkv_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    position_embedding: Literal["rope", "learned_absolute"] = "rope"
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    mtp_num_layers: int = 0

    def __post_init__(self) -> None:
        _check_fields(self, may_be_zero=("mtp_num_layers",))
        if self.num_attention_heads % self.num_kv_heads:
            raise CheckpointError(
                f"model config: num_attention_heads={self.num_attention_heads} must be a multiple "
                f"of num_kv_heads={self.num_kv_heads}"
            )
        if self.position_embedding == "rope" and self.head_dim % 2:
            raise CheckpointError(
                f"model config: head_dim={self.head_dim} must be even for rotary embeddings"
            )

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types, the inverse of :meth:`from_dict`."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ModelConfig:
        """Build from plain JSON types; unknown names are an error.

        Raises:
            CheckpointError: a name is unknown or missing, or a value is invalid.
        """
        values = dict(values)
        scaling = values.get("rope_scaling")
        try:
            if scaling is not None:
                values["rope_scaling"] = RopeScaling(**scaling)
            return cls(**values)
        except TypeError as error:
            raise CheckpointError(f"model config: {error}") from error
