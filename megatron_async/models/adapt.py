"""Make a model that a megatron-core user has built serveable, in place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_async.errors import ConfigError
from megatron_async.megatron_compat.classes import HYBRID_STACK
from megatron_async.megatron_compat.specs import mtp_inner_layer, number_mtp_layers
from megatron_async.models import parallel
from megatron_async.models.build import attach_rotary
from megatron_async.models.gpt import ADAPTED, GPTModel, Inference
from megatron_async.models.layers.attention import PagedSelfAttention
from megatron_async.models.layers.latent_attention import PagedLatentAttention
from megatron_async.models.layers.rope import RotaryTable
from megatron_async.models.layers.sharded_embedding import shard_embedding
from megatron_async.models.mamba.adapt import adapt_mixer, check_mixer, is_mamba_layer
from megatron_async.models.moe.adapt import (
    adapt_experts,
    check_experts,
    check_linear,
    is_of_megatron,
)

from megatron.core.models.common.embeddings import yarn_rotary_pos_embedding  # isort: skip
from megatron.core.transformer.attention import SelfAttention  # isort: skip
from megatron.core.transformer.identity_op import IdentityOp  # isort: skip
from megatron.core.transformer.multi_latent_attention import MLASelfAttention  # isort: skip
from megatron.core.transformer.utils import is_layer_window_attention  # isort: skip
from megatron.core.utils import unwrap_model  # isort: skip

# Config field, the value that is supported, what to do about any other.
_REQUIRED: tuple[tuple[str, Any, str], ...] = (
    ("attention_output_gate", False, "build the model without the gate"),
    ("rotary_interleaved", False, "permute the query and key weights to half-split pairs"),
    ("flash_decode", False, "set it to False: the context attends by itself"),
    ("context_parallel_size", 1, "load the model without context parallelism"),
    ("fp8", None, "load the model in bfloat16"),
)
_OF_TRAINING = (
    "recompute_input_layernorm", "recompute_pre_mlp_layernorm", "recompute_mlp",
    "offload_attn_norm", "offload_mlp_norm",
)  # fmt: skip
"""Attributes of megatron-core's layers."""
_FACTOR_OF_CONFIG = "_yarn_get_concentration_factor_from_config"
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
    """Turn a megatron-core model into one that is served, weights untouched; ours is returned as it
    is.

    It is a ``GPTModel``, a ``HybridModel`` or a ``MambaModel``, and keeps being one.
    ``Float16Module`` and ``DistributedDataParallel`` are taken off. Its attention layers become
    :class:`PagedSelfAttention` or :class:`PagedLatentAttention`, its mixers ones that this package
    computes (``models/mamba/adapt.py``), and its experts' weights views of stacked ones
    (``models/moe/adapt.py``). Rotary embeddings ("rope" and "yarn"), learned ones and none are
    supported.
    Graphs that megatron-core would capture are turned off, chunks of prefills, and outside of
    training recomputation and offloading.

    Raises:
        ConfigError: the model has a part that cannot be served; the message names it. The model
            is unchanged then.
    """
    model = unwrapped(model)
    if isinstance(model, Inference):
        return model  # type: ignore[return-value]
    layers = _checked_layers(model)
    _turn_off(model)
    for layer in layers:
        _save_memory_in_training(layer)
    model.__class__ = ADAPTED[type(model)]
    model.mtp_process = getattr(model, "mtp_process", False)
    number_mtp_layers(model)
    attending = [layer for layer in layers if _attends(layer)]
    for place, layer in enumerate(attending):
        attention = layer.self_attention
        if isinstance(attention, MLASelfAttention):
            attention.given_scale = float(attention.softmax_scale)
        attention.__class__ = _OURS[type(attention)]
        attention.cache_layer = place
    for layer in layers:
        if is_mamba_layer(layer):
            adapt_mixer(layer)
        else:
            adapt_experts(layer)
    if hasattr(model.decoder, "final_norm"):  # of a hybrid stack
        model.decoder.__class__ = AdaptedHybridStack
    if model.pre_process or model.mtp_process:
        shard_embedding(model.embedding)
    _attach_own_rotary(model, attending)
    for layer in attending:
        _limit(layer.self_attention, model.config)
    adapted: GPTModel = model
    return adapted


class AdaptedHybridStack(HYBRID_STACK):  # type: ignore[misc]
    """megatron's stack of layers, with the name that a transformer block's last norm has."""

    @property
    def final_layernorm(self) -> torch.nn.Module:
        """``final_norm``."""
        norm: torch.nn.Module = self.final_norm
        return norm


def _attends(layer: Any) -> bool:
    attention = getattr(layer, "self_attention", None)
    return attention is not None and not isinstance(attention, IdentityOp)


def _checked_layers(model: Any) -> list[Any]:
    """The layers of the decoder and of multi-token prediction; :class:`ConfigError` for a model
    that cannot be served."""
    if type(model) not in ADAPTED:
        names = " or ".join(dict.fromkeys(theirs.__name__ for theirs in ADAPTED))
        raise ConfigError(
            f"model is a {type(model).__name__}, not megatron.core's {names}: pass the "
            "model itself, or save it with dist_checkpointing, and load the directory with "
            "load_pretrained"
        )
    _check_config(model.config)
    _check_stages(model)
    has_yarn = hasattr(model, "rotary_pos_emb") and not model.config.multi_latent_attention
    known = ("rope", *(("yarn",) if has_yarn else ()), "learned_absolute", "none")
    if model.position_embedding_type not in known:
        raise ConfigError(
            f"position_embedding_type={model.position_embedding_type!r} is not supported: "
            f"use {', '.join(map(repr, known[:-1]))} or {known[-1]!r}"
        )
    layers = list(model.decoder.layers)
    if getattr(model, "mtp_process", False):
        for layer in model.mtp.layers:
            layers += _layers_of_mtp(mtp_inner_layer(layer))
    for layer in layers:
        if is_mamba_layer(layer):
            _check_unsplit(model.config)
            check_mixer(layer)
            continue
        if _attends(layer) and type(layer.self_attention) not in _OURS:
            raise ConfigError(
                f"layer {layer.layer_number} has {type(layer.self_attention).__name__}: build the "
                "layers with megatron.core's SelfAttention or MLASelfAttention, as "
                "get_gpt_layer_local_spec() does"
            )
        if _attends(layer):
            _check_core(layer)
        if isinstance(getattr(layer, "self_attention", None), MLASelfAttention):
            _check_latents(layer)
        check_experts(layer)
    _check_rotary(model)
    return layers


def _check_core(layer: Any) -> None:
    """What is inside of an attention layer is not called, so that it must be megatron-core's."""
    core = layer.self_attention.core_attention
    if not is_of_megatron(type(core).forward):
        raise ConfigError(
            f"layer {layer.layer_number} attends by {type(core).__name__}, which steps do not "
            "call: build it with megatron.core's DotProductAttention or TEDotProductAttention"
        )


def _check_rotary(model: Any) -> None:
    if not hasattr(model, "rotary_pos_emb"):
        return
    rotary = model.rotary_pos_emb
    if not is_of_megatron(type(rotary).forward):
        raise ConfigError(
            f"the model rotates by {type(rotary).__name__}, which steps do not call: build it with "
            "megatron.core's RotaryEmbedding or YarnRotaryEmbedding"
        )


def _layers_of_mtp(inner: Any) -> list[Any]:
    """The layers of one multi-token prediction layer: one, or those of a hybrid model's stack."""
    if not hasattr(inner, "layers"):
        return [inner]
    layers = list(inner.layers)
    if any(map(is_mamba_layer, layers)) or sum(map(_attends, layers)) != 1:
        raise ConfigError(
            "each multi-token prediction layer of a hybrid model must have one attention layer and "
            "no Mamba layer: build the model without '/' in its pattern, or with one such as '/*-'"
        )
    return layers


def _check_stages(model: Any) -> None:
    place, config = parallel.current(), model.config
    stages = 1 if place is None else place.layout.pipeline
    size = config.pipeline_model_parallel_size
    if size not in (1, stages):
        raise ConfigError(
            f"model config pipeline_model_parallel_size={size} is not supported: load the model "
            "without pipeline parallelism, or in processes whose pipeline groups have that size"
        )
    if stages == 1:
        return
    for name, has in (
        ("a hybrid model", hasattr(model.decoder, "layer_type_list")),
        ("a model with multi_latent_attention", config.multi_latent_attention),
    ):
        if has:
            raise ConfigError(f"{name} has no stages: load it without pipeline parallelism")


def _check_unsplit(config: Any) -> None:
    if config.tensor_model_parallel_size != 1:
        raise ConfigError(
            "Mamba layers are not divided over tensor-parallel ranks: load the model without "
            "tensor parallelism"
        )


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
    if window is not None and window[0] >= 0 and config.multi_latent_attention:
        raise ConfigError(
            f"model config window_size={window!r} is not supported with multi_latent_attention: "
            "build the model without a window"
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
    check_linear(attention.linear_kv_up_proj, f"layer {layer.layer_number} has latents")
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


def _attach_own_rotary(model: Any, attending: list[Any]) -> None:
    """Rotations by our table, in the place of megatron-core's."""
    attach_rotary(model, None)
    if not attending:
        return
    if model.config.multi_latent_attention:
        table = _latent_table(attending[0].self_attention, model.max_sequence_length)
        attach_rotary(model, table.to(next(model.parameters()).device))
    elif model.position_embedding_type in ("rope", "yarn"):
        table = _table(model)
        attach_rotary(model, table.to(next(model.parameters()).device))
        # The model computes no rotary embeddings of its own from here on.
        model.position_embedding_type = "none"


def _table(model: Any) -> RotaryTable:
    """Rotations that all layers of a model share."""
    rotary, length = model.rotary_pos_emb, model.max_sequence_length
    if model.position_embedding_type == "yarn":
        frequencies, factor = _of_yarn(rotary)
        return RotaryTable(frequencies, length, factor=factor)
    # megatron-core's attention asks the config for it, however the angles are made.
    factor_of = getattr(yarn_rotary_pos_embedding, _FACTOR_OF_CONFIG, None)
    factor = 1.0 if factor_of is None else factor_of(model.config)
    interpolation = rotary.seq_len_interpolation_factor or 1.0
    return RotaryTable(rotary.inv_freq, length, interpolation, factor)


def _latent_table(attention: Any, max_sequence_length: int) -> RotaryTable:
    """Rotations of multi-latent attention, which has its own in each layer."""
    rotary, factor = attention.rotary_pos_emb, 1.0
    frequencies = rotary.inv_freq
    if attention.config.rope_type == "yarn":
        frequencies, factor = _of_yarn(rotary)
    return RotaryTable(frequencies, max_sequence_length, factor=factor)


def _of_yarn(rotary: Any) -> tuple[Tensor, float]:
    """Angles of a position, ``[pairs]``, and what cosines and sines are multiplied by."""
    angles, factor = rotary.get_emb(2)
    both = angles[1].flatten()
    return both[: len(both) // 2], factor


def _turn_off(model: Any) -> None:
    """The engine captures whole steps, so that megatron-core captures no layer of them; and it
    divides prefills, where megatron-core would add the bias of an MLP once for each chunk."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and getattr(config, "cuda_graph_impl", "none") != "none":
            config.cuda_graph_impl = "none"
        if config is not None and getattr(config, "mlp_chunks_for_prefill", 1) > 1:
            config.mlp_chunks_for_prefill = 1
        if hasattr(module, "cudagraph_manager"):
            del module.cudagraph_manager


class _InTraining:
    """What megatron-core's layer reads as true or false in each forward: true where gradients are
    wanted in training."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer

    def __bool__(self) -> bool:
        return bool(self._layer.training) and torch.is_grad_enabled()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _InTraining)

    def __hash__(self) -> int:
        return hash(_InTraining)


def _save_memory_in_training(layer: Any) -> None:
    """Parts that are recomputed in the backward pass read random states in each forward, which no
    graph can hold, and give up memory; what is offloaded for it makes events."""
    for name in _OF_TRAINING:
        if getattr(layer, name, False) is True:
            setattr(layer, name, _InTraining(layer))


def _limit(attention: Any, config: Any) -> None:
    """Give a layer its window, and take its rotation away, as megatron-core's config says.

    ``window_size`` counts the tokens behind a token, ours the token itself too.
    """
    number = attention.layer_number
    skipped = getattr(config, "no_rope_freq", None)
    has_latents = config.multi_latent_attention  # which megatron-core rotates in each layer
    listed = isinstance(skipped, list) and number <= len(skipped) and skipped[number - 1]
    if listed and not has_latents:
        attention.attach(None)
    window = getattr(config, "window_size", None)
    frequency = getattr(config, "window_attn_skip_freq", None)
    if window is not None and is_layer_window_attention(window, frequency, number):
        attention.limit(window[0] + 1 if window[0] >= 0 else None, None, None)
