"""Hugging Face directories of Llama, Qwen2, Qwen3 and MiMo: ``config.json`` to
:class:`ModelConfig`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_async.checkpoint import mimo
from megatron_async.checkpoint.files import Description, parse_dtype, parse_token_ids
from megatron_async.checkpoint.json_file import read_json
from megatron_async.checkpoint.regular_files import is_regular_file
from megatron_async.errors import CheckpointError
from megatron_async.models.config import ModelConfig, RopeScaling

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    mimo.MODEL_TYPE: mimo.ARCHITECTURE,
}
_LIKE_QWEN2 = ("qwen2", mimo.MODEL_TYPE)
# What transformers assumes where config.json is silent.
_DEFAULT_KV_HEADS = {"qwen2": 32, "qwen3": 32, mimo.MODEL_TYPE: 32}
_DEFAULT_HEAD_DIM = {"qwen3": 128}


class _Fields:
    """Typed reads of ``config.json``; a null counts as absent."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values

    def unsupported(self, name: str, supported: str, value: Any = None) -> CheckpointError:
        value = self.values.get(name) if value is None else value
        return CheckpointError(f"{name}={value!r} is not supported; supported: {supported}")

    def read(self, name: str, kind: type, default: Any = None) -> Any:
        value = self.values.get(name)
        if value is None:
            if default is None:
                raise CheckpointError(f"{name} is missing")
            return default
        if type(value) is not kind and not (kind is float and type(value) is int):
            raise CheckpointError(f"{name}={value!r} must be of type {kind.__name__}")
        return value


def _family(fields: _Fields) -> str:
    supported = ", ".join(f"{name} ({ARCHITECTURES[name]})" for name in ARCHITECTURES)
    architectures = fields.values.get("architectures")
    model_type = fields.values.get("model_type")
    if model_type is None and isinstance(architectures, list):
        model_type = next((k for k, v in ARCHITECTURES.items() if architectures == [v]), None)
        if model_type is None:
            raise fields.unsupported("architectures", supported)
    if not isinstance(model_type, str) or model_type not in ARCHITECTURES:
        raise fields.unsupported("model_type", supported)
    if architectures is not None and architectures != [ARCHITECTURES[model_type]]:
        raise fields.unsupported("architectures", supported)
    return model_type


def _rope(fields: _Fields) -> tuple[float, RopeScaling | None]:
    """(theta, scaling) from ``rope_parameters`` or the older ``rope_theta``, ``rope_scaling``.

    Where both are there, transformers takes ``rope_scaling`` and nothing of the other.
    """
    name = "rope_scaling" if fields.values.get("rope_scaling") else "rope_parameters"
    values = fields.values.get(name)
    theta = fields.read("rope_theta", float, 10000.0)
    if values is None:
        return theta, None
    if not isinstance(values, dict):
        raise fields.unsupported(name, "an object")
    inner = _Fields(values)
    theta = inner.read("rope_theta", float, theta)
    rope_type = values.get("rope_type", values.get("type", "default"))
    if any(isinstance(value, dict) for value in values.values()):
        raise fields.unsupported(name, "one set of parameters for all layers")
    _check_partial_rotary(inner)
    if rope_type == "default":
        return theta, None
    if rope_type != "llama3":
        raise fields.unsupported(f"{name}.rope_type", "default, llama3", rope_type)
    return theta, RopeScaling(
        factor=inner.read("factor", float),
        low_freq_factor=inner.read("low_freq_factor", float),
        high_freq_factor=inner.read("high_freq_factor", float),
        original_max_position_embeddings=inner.read("original_max_position_embeddings", int),
    )


def _check_partial_rotary(fields: _Fields) -> None:
    if fields.values.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise fields.unsupported("partial_rotary_factor", "1.0")


def _check_supported(fields: _Fields) -> None:
    if fields.values.get("quantization_config") is not None:
        raise fields.unsupported("quantization_config", "unquantized weights")
    if fields.values.get("hidden_act", "silu") not in ("silu", "swish"):
        raise fields.unsupported("hidden_act", "silu")
    if fields.values.get("use_sliding_window"):
        raise fields.unsupported("use_sliding_window", "false (full attention)")
    layer_types = fields.values.get("layer_types")
    if layer_types is not None and (
        not isinstance(layer_types, list) or set(map(str, layer_types)) != {"full_attention"}
    ):
        raise fields.unsupported("layer_types", "full_attention in every layer")
    _check_partial_rotary(fields)


def convert_config(path: Path, values: dict[str, Any]) -> ModelConfig:
    """:class:`ModelConfig` of the ``config.json`` at ``path`` with content ``values``.

    Raises:
        CheckpointError: a field is missing or asks for something this package cannot do; the
            message names the field, its value and what is supported.
    """
    try:
        return _convert(_Fields(values))
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error


def _convert(fields: _Fields) -> ModelConfig:
    family = _family(fields)
    _check_supported(fields)
    rope_theta, rope_scaling = _rope(fields)
    hidden_size = fields.read("hidden_size", int)
    heads = fields.read("num_attention_heads", int)
    if heads < 1:
        raise fields.unsupported("num_attention_heads", "a positive integer")
    # A null is not as absent here: transformers takes it for one head for each attention head.
    has_kv_heads = "num_key_value_heads" in fields.values
    default_kv_heads = heads if has_kv_heads else _DEFAULT_KV_HEADS.get(family, heads)
    attention_bias = family not in _LIKE_QWEN2 and fields.read("attention_bias", bool, False)
    return ModelConfig(
        num_layers=fields.read("num_hidden_layers", int),
        hidden_size=hidden_size,
        num_attention_heads=heads,
        num_kv_heads=fields.read("num_key_value_heads", int, default_kv_heads),
        head_dim=fields.read("head_dim", int, _DEFAULT_HEAD_DIM.get(family, hidden_size // heads)),
        ffn_hidden_size=fields.read("intermediate_size", int),
        vocab_size=fields.read("vocab_size", int),
        max_sequence_length=fields.read("max_position_embeddings", int),
        norm_epsilon=fields.read("rms_norm_eps", float, 1e-6),
        qk_norm=family == "qwen3",
        qkv_bias=family in _LIKE_QWEN2 or attention_bias,
        attention_output_bias=attention_bias,
        mlp_bias=family == "llama" and fields.read("mlp_bias", bool, False),
        tie_word_embeddings=fields.read("tie_word_embeddings", bool, False),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        mtp_num_layers=fields.read(mimo.MTP_LAYERS, int, 0) if family == mimo.MODEL_TYPE else 0,
    )


def describe(directory: Path, values: dict[str, Any]) -> Description:
    """Architecture, end-of-sequence ids and dtype; ``values`` is the content of config.json."""
    path = directory / "config.json"
    config = convert_config(path, values)
    dtype = values["dtype"] if values.get("dtype") is not None else values.get("torch_dtype")
    eos_path, eos = path, values.get("eos_token_id")
    generation_path = directory / "generation_config.json"
    if is_regular_file(generation_path):
        generation_eos = read_json(generation_path).get("eos_token_id")
        if generation_eos is not None:
            eos_path, eos = generation_path, generation_eos
    return Description(
        config, parse_token_ids(eos_path, "eos_token_id", eos), parse_dtype(path, dtype)
    )
