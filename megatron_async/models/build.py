"""From a :class:`ModelConfig` to a megatron-core model on a device."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from megatron_async import megatron_compat as compat
from megatron_async.device.memory import weights_must_fit
from megatron_async.megatron_compat.specs import number_mtp_layers
from megatron_async.models import parallel
from megatron_async.models.description.config import ModelConfig
from megatron_async.models.description.memory_traffic import MXFP4_BYTES, weight_bytes
from megatron_async.models.gpt import GPTModel
from megatron_async.models.layers.attention import PagedAttention
from megatron_async.models.layers.decoder_layer import link_norms
from megatron_async.models.layers.rope import RotaryTable
from megatron_async.models.parallel_sizes import check_divides
from megatron_async.models.quantized.deferred import may_be_quantized as deferring
from megatron_async.models.spec import gpt_block_spec, mtp_block_spec

from megatron.core import parallel_state  # isort: skip
from megatron.core.transformer.transformer_block import get_num_layers_to_build  # isort: skip
from megatron.core.transformer.transformer_layer import (  # isort: skip
    get_transformer_layer_offset,
)
from megatron.core.transformer.transformer_config import (  # isort: skip
    MLATransformerConfig,
    TransformerConfig,
)


_OUTPUTS = ("linear_proj.weight", "linear_fc2.weight", "out_proj.weight")


def transformer_config(
    config: ModelConfig, dtype: torch.dtype, device: torch.device | str
) -> TransformerConfig:
    """megatron's config of the model, for the parallel sizes that are initialised.

    Linear biases are not in it: the layer spec decides them (:mod:`megatron_async.models.spec`).

    Raises:
        ConfigError: layers, heads, experts or other sizes do not divide by the parallel sizes, or
            the model has a part that works with none above 1.
    """
    tensor = parallel_state.get_tensor_model_parallel_world_size()
    stages: int = parallel_state.get_pipeline_model_parallel_world_size()
    check_divides(
        config,
        tensor=tensor,
        expert=parallel_state.get_expert_model_parallel_world_size(),
        pipeline=stages,
    )
    on_cpu = torch.device(device).type == "cpu"
    latent = config.latent_attention
    kind = TransformerConfig if latent is None else MLATransformerConfig
    return kind(
        **_latents(config),
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_kv_heads,
        kv_channels=config.head_dim,
        ffn_hidden_size=config.ffn_hidden_size,
        normalization=config.normalization,
        layernorm_epsilon=config.norm_epsilon,
        qk_layernorm=config.qk_norm,
        layernorm_zero_centered_gamma=config.zero_centered_gamma,
        softmax_scale=config.attention_scale,
        add_qkv_bias=config.qkv_bias,
        add_bias_linear=False,
        gated_linear_unit=config.gated,
        activation_func=F.silu if config.activation == "swiglu" else F.gelu,
        activation_func_clamp_value=config.activation_limit,
        softmax_type="learnable" if config.attention_sinks else "vanilla",
        use_te_activation_func=True,  # the MLP takes its activation from the layer spec
        mtp_num_layers=(config.mtp_num_layers or None) if stages == 1 else None,
        mamba_state_dim=config.mamba_state_dim,
        mamba_head_dim=config.mamba_head_dim,
        mamba_num_groups=config.mamba_num_groups,
        mamba_num_heads=config.mamba_num_heads,
        **_experts(config),
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=stages,
        num_layers_in_first_pipeline_stage=_layers_of_first_stage(config.num_layers, stages),
        use_cpu_initialization=on_cpu,
        perform_initialization=on_cpu,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
    )


def _layers_of_first_stage(layers: int, stages: int) -> int | None:
    """Where they do not divide, the first stage has more of them."""
    return layers - layers // stages * (stages - 1) if layers % stages else None


def _latents(config: ModelConfig) -> dict[str, Any]:
    """Fields of megatron's config that a model with multi-latent attention has. Its rotation and
    its scale are not read: ours have what YaRN does to them."""
    latent = config.latent_attention
    if latent is None:
        return {}
    names = ("q_lora_rank", "kv_lora_rank", "qk_pos_emb_head_dim", "v_head_dim")
    return {
        **{name: getattr(latent, name) for name in names},
        "qk_head_dim": config.head_dim - latent.qk_pos_emb_head_dim,
        "rope_type": "rope",
    }


def _experts(config: ModelConfig) -> dict[str, Any]:
    """Fields of megatron's config that a model with experts has, under the same names."""
    if config.num_moe_experts is None:
        return {}
    names = (
        "num_moe_experts", "moe_ffn_hidden_size", "moe_router_topk", "moe_router_score_function",
        "moe_router_num_groups", "moe_router_group_topk",
        "moe_router_topk_scaling_factor", "moe_router_enable_expert_bias",
        "moe_shared_expert_intermediate_size", "moe_shared_expert_gate", "moe_latent_size",
    )  # fmt: skip
    kinds = config.moe_layer_freq
    # A softmax over one chosen expert is 1, which megatron refuses since it has no gradient.
    takes_one = config.moe_router_topk == 1
    return {
        **{name: getattr(config, name) for name in names},
        "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
        "expert_tensor_parallel_size": parallel_state.get_expert_tensor_parallel_world_size(),
        "moe_router_pre_softmax": config.moe_router_pre_softmax or takes_one,
        "moe_layer_freq": 1 if kinds is None else list(kinds),
        "moe_router_dtype": "fp32",  # as kernels/moe computes
    }


def build_model(
    config: ModelConfig,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    initialize: bool = True,
    may_be_quantized: bool = False,
    keep_drawn: Callable[[str, Any], None] | None = None,
    expert_itemsize: float | None = None,
) -> GPTModel:
    """A model in training mode, all parameters on ``device`` in ``dtype``, rotary table in fp32.

    megatron's parallel state is initialised for one process if nobody has done so.

    Args:
        device: where the parameters are allocated; large models are never on the host first.
        dtype: of the parameters and activations.
        initialize: draw the weights (from torch's default generator on the CPU, from
            ``torch.initial_seed()`` on a GPU); if False their values are undefined.
        may_be_quantized: linear layers have no memory for weights yet, see
            :mod:`megatron_async.models.quantized.linear`.
        keep_drawn: what such a layer keeps, by name, once its weight is drawn.
        expert_itemsize: the fewest bytes of an element of experts; None is as of other layers.

    Raises:
        ConfigError: see :func:`transformer_config`.
        ModelTooLargeError: the device has less memory free than the weights take.
    """
    if not parallel_state.model_parallel_is_initialized():
        compat.ensure_parallel_state()
    device = torch.device(device)
    megatron_config = transformer_config(config, dtype, device)
    megatron_config.perform_initialization &= initialize
    stages = megatron_config.pipeline_model_parallel_size
    on_device: Any = contextlib.nullcontext()
    deferred = deferring() if may_be_quantized else contextlib.nullcontext()
    if device.type == "cuda":
        on_device = torch.cuda.device(device)
    itemsize = 1 if may_be_quantized else dtype.itemsize
    needed = _bytes_of_share(config, megatron_config, itemsize, expert_itemsize)
    with on_device, deferred, weights_must_fit(device, needed, dtype):
        model = GPTModel(
            config=megatron_config,
            transformer_layer_spec=gpt_block_spec(
                config,
                get_num_layers_to_build(megatron_config),
                device,
                first=get_transformer_layer_offset(megatron_config),
            ),
            mtp_block_spec=mtp_block_spec(config, device) if stages == 1 else None,
            vocab_size=config.vocab_size,
            max_sequence_length=config.max_sequence_length,
            share_embeddings_and_output_weights=config.tie_word_embeddings,
            position_embedding_type=(
                "learned_absolute" if config.position_embedding == "learned_absolute" else "none"
            ),
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
        )
        model.model_config = config
        number_mtp_layers(model)
        if config.hybrid_override_pattern is not None:
            from megatron_async.models.mamba.spec import number_attention_layers

            number_attention_layers(model.decoder.layers)
        link_norms(list(model.decoder.layers), model.decoder.final_layernorm)
        attach_features(model, config)
        model.to(device=device, dtype=dtype)
        if initialize and not megatron_config.perform_initialization:
            _initialize_on_device(model, device, keep_drawn)
    return model


def _bytes_of_share(
    config: ModelConfig,
    megatron_config: TransformerConfig,
    itemsize: int,
    expert_itemsize: float | None,
) -> int:
    """The fewest bytes that a rank's share of the weights takes: some are on each rank."""
    experts = config.num_moe_experts
    if experts is not None:
        experts //= megatron_config.expert_model_parallel_size
    parts: int = megatron_config.tensor_model_parallel_size
    parts *= megatron_config.pipeline_model_parallel_size
    return weight_bytes(config, itemsize, experts, expert_itemsize=expert_itemsize) // parts


def build_random_model(
    config: ModelConfig,
    *,
    device: torch.device,
    dtype: torch.dtype,
    seed: int = 0,
    quantize: bool = False,
    pack: bool = False,
    quantize_activations: bool = False,
) -> GPTModel:
    """A model in evaluation mode with random weights, drawn where they stay.

    Linear layers draw from a normal distribution of standard deviation 0.02 (those that end a
    residual branch from a narrower one), so activations stay finite in bfloat16 at any depth.

    Args:
        quantize: linear layers keep e4m3 with a scale a row.
        pack: experts keep MXFP4.
        quantize_activations: linear layers of e4m3 quantize their inputs, by token.

    Raises:
        ConfigError: the model has no experts that could be packed, or the GPU does not multiply
            e4m3.
        ModelTooLargeError: the device has less memory free than the weights take.
    """
    torch.manual_seed(seed)
    drawn: dict[str, Any] = {}
    if quantize or pack:
        from megatron_async.models.quantized import activations, drawing, linear

        keep_drawn = drawing.keeper(config, quantize=quantize, pack=pack)
        drawn = {"may_be_quantized": True, "keep_drawn": keep_drawn}
        drawn["expert_itemsize"] = MXFP4_BYTES if pack else None
    model = build_model(config, device=device, dtype=dtype, **drawn)
    if drawn:
        for name, layer in linear.quantizable(model).items():
            if layer.weight.dtype not in linear.KEPT:
                keep_drawn(name, layer)
        if quantize_activations:
            activations.quantize_activations(model)
    place = parallel.current()
    if place is not None and config.tie_word_embeddings:
        place.share_from_first_stage_(model.shared_embedding_or_output_weight)
    model.eval()
    model.requires_grad_(False)
    return model


def attach_features(model: GPTModel, config: ModelConfig) -> None:
    """Give attention layers, embedding and output layer what megatron's config does not say."""
    is_rotary = config.position_embedding == "rope"
    attach_rotary(model, RotaryTable.from_config(config) if is_rotary else None)
    if is_rotary and config.sliding_rope_theta is not None:
        model.sliding_rotary = RotaryTable.from_config(config, sliding=True)
    query_scaling = None
    if config.query_scaling_beta is not None:
        scaling = config.rope_scaling
        tokens = config.query_scaling_tokens
        if not tokens and scaling is not None:
            tokens = scaling.original_max_position_embeddings
        query_scaling = config.query_scaling_beta, tokens or config.max_sequence_length
    for module in model.modules():
        if isinstance(module, PagedAttention):
            layer = module.layer_number - 1
            window = config.attention_window(layer)
            rotary = model.rotary if window is None else model.sliding_rotary or model.rotary
            module.attach(None if layer in config.nope_layers else rotary)
            module.limit(window, config.attention_soft_cap, query_scaling)
            latent = config.latent_attention
            if latent is not None and latent.norm_epsilon is not None:
                for norm in (module.kv_layernorm, getattr(module, "q_layernorm", None)):
                    if norm is not None:
                        norm.eps = latent.norm_epsilon
    if model.pre_process:
        if config.embedding_multiplier != 1:
            from megatron_async.models.layers.scaled_layers import scale_embedding

            scale_embedding(model.embedding, config.embedding_multiplier)
        if parallel_state.get_tensor_model_parallel_world_size() > 1:
            from megatron_async.models.layers.sharded_embedding import shard_embedding

            shard_embedding(model.embedding)
    if model.post_process and (config.logit_multiplier != 1 or config.logit_soft_cap is not None):
        from megatron_async.models.layers.scaled_layers import scale_logits

        scale_logits(model.output_layer, config.logit_multiplier, config.logit_soft_cap)


def attach_rotary(model: GPTModel, rotary: RotaryTable | None) -> None:
    """Give the model its rotary table (None for no rotation), which all attention layers read."""
    model.rotary, model.sliding_rotary = rotary, None
    for module in model.modules():
        if isinstance(module, PagedAttention):
            module.attach(rotary)


def _initialize_on_device(
    model: GPTModel, device: torch.device, keep_drawn: Callable[[str, Any], None] | None
) -> None:
    # megatron's own GPU initialisation needs its CUDA random state tracker. Same distributions
    # here; norms are already ones and zeros. Each rank draws its own shards; the learned position
    # embedding is replicated, and drawn first while the ranks' generators agree.
    from megatron_async.models.quantized import linear

    config = model.config
    seed = torch.initial_seed() & (2**63 - 1)
    generator = torch.Generator(device)

    def draw(parameter: torch.Tensor, std: float) -> None:
        torch.nn.init.normal_(parameter, std=std, generator=generator)

    std = config.init_method_std
    output_std = std / math.sqrt(2 * config.num_layers)
    generator.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("position_embeddings.weight"):
                draw(parameter, std)
        generator.manual_seed(seed + 1 + parallel_state.get_tensor_model_parallel_rank())
        deferred = {f"{name}.weight": m for name, m in linear.quantizable(model).items()}
        for name, parameter in list(model.named_parameters()):
            if name in deferred:
                linear.keep(deferred[name], None)
                parameter = deferred[name].weight
            if name.endswith("position_embeddings.weight"):
                continue
            if "conv1d" in name:
                continue
            if name.endswith("weight") and parameter.dim() > 1 and "norm" not in name:
                is_output = name.endswith(_OUTPUTS)
                draw(parameter, output_std if is_output else std)
                if name in deferred and keep_drawn is not None:
                    keep_drawn(name.removesuffix(".weight"), deferred[name])
            elif ("linear" in name or "_proj" in name) and name.endswith(".bias"):
                parameter.zero_()
