"""One row for each type: the fields of ``config.json`` that its loader heeds, those that do not
matter, and those of which one value is supported.

``scripts/compare_config_fields.py`` compares every field of a type's class with transformers.
"""

from __future__ import annotations

from megatron_async.checkpoint.reading.field_uses import FieldUses

LIBRARY = FieldUses.of(
    heeded="architectures model_type dtype torch_dtype quantization_config compression_config "
    "eos_token_id is_causal",
    neutral="transformers_version auto_map name_or_path bos_token_id pad_token_id sep_token_id "
    "decoder_start_token_id tokenizer_class use_cache return_dict return_dict_in_generate "
    "output_attentions output_hidden_states output_scores torchscript id2label label2id "
    "problem_type chunk_size_feed_forward task_specific_params finetuning_task prefix "
    "attn_implementation num_logits_to_keep pretraining_tp initializer_range is_decoder",
    is_encoder_decoder=(False,),
    cross_attention_hidden_size=(),
    add_cross_attention=(False,),
    pruned_heads=({},),
    per_layer_config=({},),
    transformers_weights=(),
    quantization=(),
)
"""What transformers takes for every type, and where others say how weights are quantized."""
MXFP4 = FieldUses.of("quant_method", "modules_to_not_convert dequantize")
"""``quantization_config`` of GPT-OSS: the names of stored tensors say which are packed."""
TRAINING = FieldUses.of(
    neutral="attention_dropout resid_pdrop embd_pdrop attn_pdrop hidden_dropout residual_dropout "
    "embedding_dropout classifier_dropout router_aux_loss_coef output_router_logits "
    "router_jitter_noise z_loss_coefficient aux_loss_alpha seq_aux gradient_checkpointing "
    "rescale_prenorm_residual"
)
SIZES = FieldUses.of(
    heeded="hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
    "intermediate_size vocab_size hidden_act tie_word_embeddings max_position_embeddings"
)
RMS_NORM = FieldUses.of("rms_norm_eps")
ROPE = FieldUses.of(
    "rope_parameters rope_scaling rope_theta partial_rotary_factor original_max_position_embeddings"
)
BASE = LIBRARY | TRAINING | SIZES | RMS_NORM | ROPE
NO_WINDOW = FieldUses.of(neutral="sliding_window use_sliding_window max_window_layers layer_types")
"""For types whose class in transformers knows no window, whatever the file says."""
ALL_LAYERS = FieldUses.of("sliding_window", neutral="layer_types")
"""For types all of whose layers have the window."""
BY_LAYER = FieldUses.of("sliding_window layer_types")
SWITCHED = FieldUses.of("use_sliding_window sliding_window max_window_layers layer_types")
BIAS = FieldUses.of("attention_bias")
BIASES = FieldUses.of("attention_bias mlp_bias")
EXPERTS = FieldUses.of("num_experts num_experts_per_tok norm_topk_prob")
SPARSE = EXPERTS | FieldUses.of("moe_intermediate_size decoder_sparse_step mlp_only_layers")
MAMBA = FieldUses.of(
    "mamba_n_heads mamba_d_head mamba_n_groups mamba_d_state mamba_d_conv mamba_expand "
    "mamba_conv_bias mamba_proj_bias time_step_limit",
    neutral="mamba_chunk_size",
)
MULTIPLIERS = FieldUses.of(
    "embedding_multiplier residual_multiplier attention_multiplier logits_scaling"
)
GEMMA = FieldUses.of(
    "hidden_activation query_pre_attn_scalar final_logit_softcapping",
    "hidden_act mlp_bias",
    use_bidirectional_attention=(False,),
)

TABLE: dict[str, FieldUses] = {
    "bamba": BASE | BIASES | MAMBA | NO_WINDOW
    | FieldUses.of("attn_layer_indices", neutral="attn_rotary_emb", partial_rotary_factor=(0.5,)),
    "cohere": BASE | BIAS | NO_WINDOW
    | FieldUses.of("layer_norm_eps logit_scale use_qk_norm", "rms_norm_eps mlp_bias"),
    "deepseek_v2": BASE | NO_WINDOW | FieldUses.of(
        "n_routed_experts num_experts num_experts_per_tok moe_intermediate_size n_shared_experts "
        "routed_scaling_factor first_k_dense_replace topk_method n_group topk_group kv_lora_rank "
        "q_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim",
        "num_key_value_heads head_dim ep_size num_nextn_predict_layers qk_head_dim",
        attention_bias=(False,), mlp_bias=(False,), norm_topk_prob=(False,), moe_layer_freq=(1,),
        scoring_func=("softmax",),
    ),
    "gemma2": BASE | BIAS | BY_LAYER | GEMMA | FieldUses.of("attn_logit_softcapping"),
    "gemma3_text": BASE | BIAS | BY_LAYER | GEMMA | FieldUses.of(
        "sliding_window_pattern rope_local_base_freq", "attn_logit_softcapping cache_implementation"
    ),
    "glm": BASE | BIAS | NO_WINDOW | FieldUses.of(neutral="mlp_bias"),
    "glm4": BASE | BIAS | NO_WINDOW | FieldUses.of(neutral="mlp_bias"),
    "gpt2": LIBRARY | TRAINING | FieldUses.of(
        "n_embd n_head n_layer n_positions n_inner layer_norm_epsilon activation_function "
        "vocab_size tie_word_embeddings scale_attn_weights hidden_size max_position_embeddings "
        "num_attention_heads num_hidden_layers",
        "n_ctx summary_type summary_use_proj summary_activation summary_proj_to_labels "
        "summary_first_dropout summary_last_dropout reorder_and_upcast_attn "
        "attention_bias mlp_bias num_key_value_heads",
        scale_attn_by_inverse_layer_idx=(False,), head_dim=(),
    ),
    "gpt_neox": BASE | BIAS | NO_WINDOW | FieldUses.of(
        "layer_norm_eps rotary_emb_base rotary_pct use_parallel_residual",
        "rms_norm_eps rope_theta partial_rotary_factor num_key_value_heads mlp_bias",
        head_dim=(),
    ),
    "gpt_oss": BASE | BIAS | BY_LAYER | FieldUses.of(
        "num_local_experts num_experts num_experts_per_tok swiglu_limit",
        "initial_context_length experts_per_token mlp_bias norm_topk_prob",
        swiglu_alpha=(1.702,),
    ),
    "granite": BASE | BIASES | MULTIPLIERS | NO_WINDOW,
    "granitemoehybrid": BASE | BIAS | MAMBA | MULTIPLIERS | FieldUses.of(
        "layer_types layers_block_type shared_intermediate_size num_local_experts "
        "num_experts_per_tok position_embedding_type",
        "mlp_bias",
    ),
    "helium": BASE | BIASES | NO_WINDOW,
    "llama": BASE | BIASES | NO_WINDOW | FieldUses.of("layer_types"),
    "mamba2": LIBRARY | TRAINING | FieldUses.of(
        "num_heads head_dim vocab_size hidden_size state_size num_hidden_layers layer_norm_epsilon "
        "expand conv_kernel n_groups use_bias use_conv_bias hidden_act time_step_limit "
        "tie_word_embeddings max_position_embeddings",
        "residual_in_fp32 time_step_rank time_step_min time_step_max time_step_floor chunk_size "
        "attention_bias mlp_bias attention_head_dim num_attention_heads num_key_value_heads "
        "intermediate_size",
    ),
    "mimo": BASE | SWITCHED | FieldUses.of("num_nextn_predict_layers", "attention_bias mlp_bias"),
    "ministral": BASE | BY_LAYER | FieldUses.of(neutral="attention_bias mlp_bias"),
    "ministral3": BASE | ALL_LAYERS | FieldUses.of(neutral="attention_bias mlp_bias"),
    "mistral": BASE | ALL_LAYERS | FieldUses.of(neutral="attention_bias mlp_bias"),
    "mixtral": BASE | ALL_LAYERS | FieldUses.of(
        "num_local_experts num_experts num_experts_per_tok",
        "attention_bias mlp_bias norm_topk_prob",
    ),
    "nemotron_h": LIBRARY | TRAINING | SIZES | FieldUses.of(
        "mlp_bias hybrid_override_pattern layer_types layers_block_type attention_head_dim "
        "mlp_hidden_act layer_norm_epsilon mamba_num_heads mamba_head_dim n_groups ssm_state_size "
        "conv_kernel use_conv_bias use_bias mamba_hidden_act time_step_limit n_routed_experts "
        "num_experts_per_tok n_group topk_group norm_topk_prob routed_scaling_factor "
        "moe_intermediate_size moe_shared_expert_intermediate_size moe_latent_size "
        "num_local_experts mamba_n_groups mamba_d_conv mamba_dt_limit mamba_conv_bias",
        "hidden_act num_hidden_layers use_mamba_kernels expand time_step_min time_step_max "
        "time_step_floor time_step_rank chunk_size mamba_proj_bias mamba_ssm_cache_dtype "
        "mamba_expand mamba_dt_min mamba_dt_max mamba_dt_init_floor mamba_chunk_size "
        "n_shared_experts moe_shared_expert_overlap residual_in_fp32 num_nextn_predict_layers "
        "mtp_layers_block_type mtp_hybrid_override_pattern rope_theta partial_rotary_factor",
        sliding_window=(), attention_bias=(False,), tie_word_embeddings=(False,),
    ),
    "olmo2": BASE | BIAS | NO_WINDOW | FieldUses.of(neutral="mlp_bias"),
    "olmoe": BASE | BIAS | EXPERTS | NO_WINDOW
    | FieldUses.of("num_local_experts", "mlp_bias", clip_qkv=()),
    "phi3": BASE | ALL_LAYERS | FieldUses.of(neutral="attention_bias mlp_bias"),
    "qwen2": BASE | SWITCHED | FieldUses.of(neutral="attention_bias mlp_bias"),
    "qwen2_moe": BASE | SWITCHED | SPARSE | FieldUses.of(
        "shared_expert_intermediate_size qkv_bias", "attention_bias mlp_bias"
    ),
    "qwen3": BASE | BIAS | SWITCHED | FieldUses.of(neutral="mlp_bias"),
    "qwen3_moe": BASE | BIAS | SWITCHED | SPARSE
    | FieldUses.of("num_local_experts", "max_window_layers layer_types mlp_bias"),
    "smollm3": BASE | BIASES | SWITCHED
    | FieldUses.of("no_rope_layers no_rope_layer_interval", "max_window_layers"),
    "starcoder2": BASE | ALL_LAYERS
    | FieldUses.of("use_bias norm_epsilon", "rms_norm_eps attention_bias mlp_bias"),
}  # fmt: skip
