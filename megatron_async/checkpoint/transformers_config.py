"""A model's architecture as transformers describes it: the way back from ``huggingface``."""

from __future__ import annotations

from typing import Any

from megatron_async.errors import ConfigError
from megatron_async.models.config import ModelConfig


def transformers_config(config: ModelConfig) -> Any:
    """The same architecture as transformers has it.

    Raises:
        ConfigError: it has none that we know of.
    """
    import transformers

    names = ("vocab_size", "tie_word_embeddings")
    common: dict[str, Any] = {name: getattr(config, name) for name in names}
    kind = config.position_embedding, config.normalization, config.activation
    biased = config.qkv_bias or config.attention_output_bias or config.mlp_bias
    if kind == ("rope", "RMSNorm", "swiglu") and not biased:
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
        if config.rope_scaling is not None:
            rope |= {"rope_type": "llama3", **config.to_dict()["rope_scaling"]}
        make = transformers.Qwen3Config if config.qk_norm else transformers.LlamaConfig
        return make(
            **common,
            hidden_size=config.hidden_size,
            intermediate_size=config.ffn_hidden_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_sequence_length,
            rms_norm_eps=config.norm_epsilon,
            rope_parameters=rope,
        )
    if kind == ("learned_absolute", "LayerNorm", "gelu_tanh") and config.qkv_bias:
        return transformers.GPT2Config(
            **common,
            n_positions=config.max_sequence_length,
            n_embd=config.hidden_size,
            n_layer=config.num_layers,
            n_head=config.num_attention_heads,
            n_inner=config.ffn_hidden_size,
            layer_norm_epsilon=config.norm_epsilon,
        )
    raise ConfigError("transformers has no counterpart of this architecture that we know of")
