"""What a decoder-only model looks like, independent of where its weights come from."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from megatron_async.errors import CheckpointError


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeScaling:
    """Llama-3 frequency scaling of rotary position embeddings.

    Wavelengths longer than ``original_max_position_embeddings / low_freq_factor`` are stretched
    by ``factor``, those shorter than ``original_max_position_embeddings / high_freq_factor`` are
    kept, the ones between are interpolated.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


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
        for name in (
            "num_layers",
            "hidden_size",
            "num_attention_heads",
            "num_kv_heads",
            "head_dim",
            "ffn_hidden_size",
            "vocab_size",
            "max_sequence_length",
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise CheckpointError(f"model config: {name}={value!r} must be a positive integer")
        if self.num_attention_heads % self.num_kv_heads:
            raise CheckpointError(
                f"model config: num_attention_heads={self.num_attention_heads} must be a multiple "
                f"of num_kv_heads={self.num_kv_heads}"
            )
        if self.position_embedding == "rope" and self.head_dim % 2:
            raise CheckpointError(
                f"model config: head_dim={self.head_dim} must be even for rotary embeddings"
            )
        if self.mtp_num_layers < 0:
            raise CheckpointError(
                f"model config: mtp_num_layers={self.mtp_num_layers} must not be negative"
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
