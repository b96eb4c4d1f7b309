"""A model's configuration from the arguments of Megatron-LM's training.

What they mean is what ``core_transformer_config_from_args`` and ``gpt_builder`` of Megatron-LM make
of them (core_v0.15 and later).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args, get_type_hints

import torch

from megatron_async.checkpoint.megatron import megatron_experts, megatron_hybrid
from megatron_async.checkpoint.megatron.megatron_latents import latent_fields
from megatron_async.checkpoint.megatron.padded_vocabulary import PaddedVocabulary
from megatron_async.checkpoint.reading.common_file import COMMON_FILE, training_arguments
from megatron_async.checkpoint.reading.files import Description
from megatron_async.checkpoint.reading.pickle_reader import Global, Record
from megatron_async.checkpoint.targets import EMBEDDING
from megatron_async.errors import CheckpointError, shown
from megatron_async.models.description.config import ModelConfig, RopeScaling

# What a model must not have, by the values that say that it has it not.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **megatron_experts.NEUTRAL,
    "heterogeneous_layers_config_path": (None,),
    "yaml_cfg": (None,),
    "experimental_attention_variant": (None,),
    "linear_attention_freq": (None,),
    "linear_attention_type": (None,),
    "attention_output_gate": (None, False),
    "softmax_type": (None, "vanilla"),
    "softmax_scale": (None,),
    "window_size": (None,),
    "no_rope_freq": (None,),
    "rotary_interleaved": (None, False),
    "apply_residual_connection_post_layernorm": (None, False),
    "glu_linear_offset": (None, 0.0),
    "activation_func_clamp_value": (None,),
    "quick_geglu": (None, False),
    "onnx_safe": (None, False),
    "mtp_use_repeated_layer": (None, False),
    "group_attention_query_scale": (None,),
    "use_mup": (None, False),
}
_OF_HYBRIDS: dict[str, tuple[Any, ...]] = {"spec": (None,)}
# Megatron-LM's own, with --use-rope-scaling (RotaryEmbedding._apply_scaling).
_ROPE_LOW, _ROPE_HIGH, _ROPE_ORIGINAL = 1.0, 4.0, 8192


class _Arguments:
    """Typed reads of the stored arguments; None counts as absent."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def unsupported(self, name: str, supported: str) -> CheckpointError:
        return CheckpointError(
            f"args.{name}={_told(self._values.get(name))} is not supported; supported: {supported}"
        )

    def has(self, name: str) -> bool:
        return self._values.get(name) is not None

    def get(self, name: str) -> Any:
        """A value of any type."""
        return self._values.get(name)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self._values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise CheckpointError(f"args.{name}={_told(value)} must be True or False")
        return value

    def integer(self, name: str, default: int | None = None) -> int:
        value = self._values.get(name)
        if value is None and default is not None:
            return default
        if type(value) is not int:
            raise CheckpointError(f"args.{name}={_told(value)} must be an integer")
        return value

    def number(self, name: str, default: float) -> float:
        value = self._values.get(name)
        if value is None:
            return default
        if type(value) not in (int, float):
            raise CheckpointError(f"args.{name}={_told(value)} must be a number")
        return float(value)

    def word(self, name: str, default: str) -> str:
        value = self._values.get(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise CheckpointError(f"args.{name}={_told(value)} must be a text")
        return value

    def check_neutral(self, names: Mapping[str, tuple[Any, ...]]) -> None:
        for name, neutral in names.items():
            value = self._values.get(name)
            plain = value is None or type(value) in (bool, int, float, str)
            if not plain or value not in neutral:
                raise self.unsupported(name, " or ".join(map(repr, neutral)))

    def dtype(self) -> torch.dtype:
        stored = self._values.get("params_dtype")
        name = stored.name if isinstance(stored, Global) else "torch.bfloat16"
        found = {str(d): d for d in (torch.float32, torch.bfloat16, torch.float16)}.get(name)
        if found is None:
            raise self.unsupported("params_dtype", "torch.float32, torch.bfloat16, torch.float16")
        return found


def _told(value: Any) -> str:
    """A value in a message; what is behind a record may be of any depth."""
    if isinstance(value, Record | Global):
        return f"<{value.name}>"
    if isinstance(value, list | tuple | dict):
        return f"<a {type(value).__name__} of {len(value)}>"
    return shown(value)


def describe(directory: Path, shapes: Mapping[str, tuple[int, ...]]) -> Description:
    """Architecture and dtype of a checkpoint that has the arguments of its training.

    The configuration's vocabulary is the embedding's, padding included.

    Args:
        shapes: of the stored tensors.

    Raises:
        CheckpointError: there are no arguments, or one of them asks for what is not supported.
    """
    args = _Arguments(training_arguments(directory))
    try:
        hybrid = megatron_hybrid.is_hybrid(args, shapes)
        args.check_neutral(_NEUTRAL if hybrid else {**_NEUTRAL, **_OF_HYBRIDS})
        config = _convert(args, shapes.get(EMBEDDING, ()), hybrid)
        return Description(config, (), args.dtype(), _vocabulary(args))
    except CheckpointError as error:
        raise CheckpointError(f"{directory / COMMON_FILE}: {error}") from error


def _vocabulary(args: _Arguments) -> PaddedVocabulary:
    tokens = args.integer("vocab_size", 0)
    if tokens and args.word("tokenizer_type", "").startswith("Null"):
        tokens += 1  # its end is not counted
    multiple = args.integer("make_vocab_size_divisible_by", 128)
    ranks = args.integer("tensor_model_parallel_size", 1)
    return PaddedVocabulary(tokens if tokens > 0 else None, max(multiple * ranks, 1))


def _convert(args: _Arguments, embedding: tuple[int, ...], hybrid: bool) -> ModelConfig:
    hidden_size, heads = args.integer("hidden_size"), args.integer("num_attention_heads")
    if heads < 1:
        raise args.unsupported("num_attention_heads", "a positive integer")
    has_groups = args.flag("group_query_attention")
    biased = args.flag("add_bias_linear", not args.flag("disable_bias_linear"))
    position, rope_scaling = _position(args)
    num_layers = args.integer("num_layers")
    ffn_hidden_size = args.integer("ffn_hidden_size", 4 * hidden_size)
    common: dict[str, Any] = dict(
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_attention_heads=heads,
        num_kv_heads=args.integer("num_query_groups") if has_groups else heads,
        head_dim=args.integer("kv_channels", hidden_size // heads),
        ffn_hidden_size=ffn_hidden_size,
        vocab_size=embedding[0] if embedding else args.integer("padded_vocab_size"),
        max_sequence_length=args.integer("max_position_embeddings"),
        normalization=_one_of(args, "normalization", "LayerNorm", ("LayerNorm", "RMSNorm")),
        norm_epsilon=args.number("norm_epsilon", 1e-5),
        activation=_activation(args, biased),
        qk_norm=args.flag("qk_layernorm") or args.flag("qk_l2_norm"),
        qkv_bias=biased or args.flag("add_qkv_bias"),
        attention_output_bias=biased,
        mlp_bias=biased,
        tie_word_embeddings=not args.flag("untie_embeddings_and_output_weights"),
        position_embedding=position,
        rope_theta=args.number("rotary_base", 10000.0),
        rope_scaling=rope_scaling,
        mtp_num_layers=args.integer("mtp_num_layers", 0),
        **megatron_experts.expert_fields(args, num_layers, ffn_hidden_size),
        **_features(args),
        **(megatron_hybrid.hybrid_fields(args, num_layers) if hybrid else {}),
    )
    return ModelConfig(**(common | latent_fields(args)))


def _one_of(args: _Arguments, name: str, default: str, choices: tuple[str, ...]) -> Any:
    value = args.word(name, default)
    if value not in choices:
        raise args.unsupported(name, ", ".join(choices))
    return value


def _position(args: _Arguments) -> tuple[Any, RopeScaling | None]:
    """``position_embedding``, and how frequencies of rotations are scaled."""
    kinds = ("learned_absolute", "rope", "none")
    kind = _one_of(args, "position_embedding_type", "learned_absolute", kinds)
    rotated = kind == "rope" or args.flag("use_rotary_position_embeddings")
    kind = "rope" if rotated else kind
    interpolation = args.number("rotary_seq_len_interpolation_factor", 1.0)
    if rotated and interpolation != 1:
        if args.flag("use_rope_scaling"):
            raise args.unsupported("rotary_seq_len_interpolation_factor", "1 with use_rope_scaling")
        return kind, RopeScaling(kind="linear", factor=interpolation)
    if not (rotated and args.flag("use_rope_scaling")):
        return kind, None
    return kind, RopeScaling(
        factor=args.number("rope_scaling_factor", 8.0),
        low_freq_factor=_ROPE_LOW,
        high_freq_factor=_ROPE_HIGH,
        original_max_position_embeddings=_ROPE_ORIGINAL,
    )


def _activation(args: _Arguments, biased: bool) -> Any:
    name, value = "gelu", "gelu"
    if args.flag("swiglu"):
        value = "swiglu"
    elif args.flag("squared_relu"):
        name, value = "squared_relu", "squared_relu"
    elif args.flag("openai_gelu") or (biased and args.flag("bias_gelu_fusion", True)):
        value = "gelu_tanh"  # megatron's fused GELU is the approximation
    known = get_args(get_type_hints(ModelConfig)["activation"])
    if value not in known:
        raise args.unsupported(name, f"the activations {', '.join(known)}")
    return value


def _features(args: _Arguments) -> dict[str, Any]:
    """Fields of :class:`ModelConfig` beyond the common ones, where the model has such a feature."""
    wanted: dict[str, tuple[str, Any]] = {}
    if args.flag("apply_layernorm_1p"):
        wanted["apply_layernorm_1p"] = "zero_centered_gamma", True
    if args.flag("qk_l2_norm"):
        wanted["qk_l2_norm"] = "qk_norm_kind", "l2"
    if args.number("rotary_percent", 1.0) != 1.0:
        wanted["rotary_percent"] = "rotary_fraction", args.number("rotary_percent", 1.0)
    known = {field.name for field in dataclasses.fields(ModelConfig)}
    for name, (field, _) in wanted.items():
        if field not in known:
            raise args.unsupported(name, "1.0" if name == "rotary_percent" else "False")
    return dict(wanted.values())
