"""Make a ``GPTModel`` that a megatron-core user has built serveable, in place."""

from __future__ import annotations

from typing import Any

import torch

from megatron_async.errors import ConfigError
from megatron_async.models.attention import PagedSelfAttention
from megatron_async.models.build import attach_rotary
from megatron_async.models.gpt import GPTModel
from megatron_async.models.latent_attention import PagedLatentAttention
from megatron_async.models.moe.adapt import adapt_experts, check_experts
from megatron_async.models.rope import RotaryTable

from megatron.core.models.gpt.gpt_model import GPTModel as MegatronGPTModel  # isort: skip
from megatron.core.transformer.attention import SelfAttention  # isort: skip
from megatron.core.transformer.multi_latent_attention import MLASelfAttention  # isort: skip
from megatron.core.transformer.utils import is_layer_window_attention  # isort: skip
from megatron.core.utils import unwrap_model  # isort: skip

# Config field, the value that is supported, what to do about any other.
_REQUIRED: tuple[tuple[str, Any, str], ...] = (
    ("attention_output_gate", False, "build the model without the gate"),
    ("rotary_interleaved", False, "permute the query and key weights to half-split pairs"),
    ("flash_decode", False, "set it to False: the context attends by itself"),
    ("context_parallel_size", 1, "load the model without context parallelism"),
    ("sequence_parallel", False, "load the model without sequence parallelism"),
    ("pipeline_model_parallel_size", 1, "load the model without pipeline parallelism"),
    ("fp8", None, "load the model in bfloat16"),
)
_SOFTMAX_TYPES = ("vanilla", "off-by-one", "learnable")
_OURS: dict[type, type] = {
    SelfAttention: PagedSelfAttention,
    MLASelfAttention: PagedLatentAttention,
}


def unwrapped(model: Any) -> Any:
    """What megatron-core's and PyTorch's wrappers are around: the one of a list, too."""
    if isinstance(model, list) and len(model) == 1:
        (model,) = model
    model = unwrap_model(model)
    while isinstance(model, torch.nn.parallel.DistributedDataParallel):
        model = unwrap_model(model.module)
    return model


def adapt_model(model: Any) -> GPTModel:
    """Turn a megatron-core ``GPTModel`` into ours, weights untouched; ours is returned as it is.

    ``Float16Module`` and ``DistributedDataParallel`` are taken off. Its attention layers become
    :class:`PagedSelfAttention` or :class:`PagedLatentAttention`, its class :class:`GPTModel`, and
    its experts' weights views of stacked ones (``models/moe/adapt.py``). Rotary embeddings
    ("rope"), learned ones and none are supported. Graphs that megatron-core would capture are
    turned off.

    Raises:
        ConfigError: the model has a part that cannot be served; the message names it. The model
            is unchanged then.
    """
    model = unwrapped(model)
    if isinstance(model, GPTModel):
        return model
    layers = _attention_layers(model)
    _turn_off_own_graphs(model)
    for layer in layers:
        layer.self_attention.__class__ = _OURS[type(layer.self_attention)]
        adapt_experts(layer)
    model.__class__ = GPTModel
    _attach_own_rotary(model)
    for layer in layers:
        _limit(layer.self_attention, model.config)
    adapted: GPTModel = model
    return adapted


def _attention_layers(model: Any) -> list[Any]:
    """The layers of the decoder and of multi-token prediction; :class:`ConfigError` for a model
    that cannot be served."""
    if type(model).__name__ == "MambaModel":
        raise ConfigError(
            "model is a MambaModel, whose mixers need packages of their own to run: save it with "
            "megatron.core's dist_checkpointing, and load the directory with load_pretrained"
        )
    if type(model) is not MegatronGPTModel:
        raise ConfigError(
            f"model is a {type(model).__name__}, not megatron.core's GPTModel: pass the GPTModel "
            "itself"
        )
    _check_config(model.config)
    if model.position_embedding_type not in ("rope", "learned_absolute", "none"):
        raise ConfigError(
            f"position_embedding_type={model.position_embedding_type!r} is not supported: "
            "use 'rope', 'learned_absolute' or 'none'"
        )
    layers = list(model.decoder.layers)
    if model.mtp_process:
        layers += [layer.transformer_layer for layer in model.mtp.layers]
    for layer in layers:
        if type(layer.self_attention) not in _OURS:
            raise ConfigError(
                f"layer {layer.layer_number} has {type(layer.self_attention).__name__}: build the "
                "layers with megatron.core's SelfAttention or MLASelfAttention, as "
                "get_gpt_layer_local_spec() does"
            )
        if isinstance(layer.self_attention, MLASelfAttention):
            _check_latents(layer)
        check_experts(layer)
    return layers


def _check_config(config: Any) -> None:
    for name, supported, advice in _REQUIRED:
        value = getattr(config, name, supported)
        if value != supported:
            raise ConfigError(f"model config {name}={value!r} is not supported: {advice}")
    window = getattr(config, "window_size", None)
    if window is not None and tuple(window)[1:] not in ((0,), (-1,)):
        raise ConfigError(
            f"model config window_size={window!r} is not supported: use (tokens behind, 0)"
        )
    softmax = getattr(config, "softmax_type", "vanilla")
    known = ("vanilla",) if config.multi_latent_attention else _SOFTMAX_TYPES
    if getattr(softmax, "name", softmax) not in known:
        raise ConfigError(
            f"model config softmax_type={config.softmax_type!r} is not supported: use "
            f"{' or '.join(map(repr, known))}"
        )


def _check_latents(layer: Any) -> None:
    attention = layer.self_attention
    if hasattr(attention.linear_kv_up_proj, "layer_norm_weight"):
        raise ConfigError(
            f"layer {layer.layer_number} norms its latents inside of linear_kv_up_proj, and the "
            "cache holds normed ones: build it with get_gpt_layer_local_spec()"
        )
    if attention.config.rope_type == "rope" and attention.config.rotary_percent != 1:
        raise ConfigError(
            f"model config rotary_percent={attention.config.rotary_percent} is not supported with "
            "multi_latent_attention: use 1.0"
        )


def _attach_own_rotary(model: Any) -> None:
    """Rotations by our table, in the place of megatron-core's."""
    attach_rotary(model, None)
    if model.config.multi_latent_attention:
        table = _latent_table(model.decoder.layers[0].self_attention, model.max_sequence_length)
        attach_rotary(model, table.to(next(model.parameters()).device))
    elif model.position_embedding_type == "rope":
        rotary = model.rotary_pos_emb
        table = RotaryTable(
            rotary.inv_freq,
            model.max_sequence_length,
            rotary.seq_len_interpolation_factor or 1.0,
        )
        attach_rotary(model, table.to(next(model.parameters()).device))
        # GPTModel computes no rotary embeddings of its own from here on.
        model.position_embedding_type = "none"


def _latent_table(attention: Any, max_sequence_length: int) -> RotaryTable:
    """Rotations of multi-latent attention, which has its own in each layer."""
    rotary, factor = attention.rotary_pos_emb, 1.0
    frequencies = rotary.inv_freq
    if attention.config.rope_type == "yarn":
        angles, factor = rotary.get_emb(2)
        frequencies = angles[1].flatten()[: frequencies.shape[0]]
    return RotaryTable(frequencies, max_sequence_length, factor=factor)


def _turn_off_own_graphs(model: Any) -> None:
    """The engine captures whole steps, so that megatron-core captures no layer of them."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and getattr(config, "cuda_graph_impl", "none") != "none":
            config.cuda_graph_impl = "none"
        if hasattr(module, "cudagraph_manager"):
            del module.cudagraph_manager


def _limit(attention: Any, config: Any) -> None:
    """Give a layer its window, and take its rotation away, as megatron-core's config says.

    ``window_size`` counts the tokens behind a token, ours the token itself too.
    """
    number = attention.layer_number
    skipped = getattr(config, "no_rope_freq", None)
    if isinstance(skipped, list) and number <= len(skipped) and skipped[number - 1]:
        attention.attach(None)
    window = getattr(config, "window_size", None)
    frequency = getattr(config, "window_attn_skip_freq", None)
    if window is not None and is_layer_window_attention(window, frequency, number):
        attention.limit(window[0] + 1 if window[0] >= 0 else None, None, None)
