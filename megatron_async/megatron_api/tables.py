"""Every public name of core_v0.16.1's inference, and what becomes of it here."""

from __future__ import annotations

from megatron_async.megatron_api.names import Table, accepted, refused, works

ONE_PROCESS = "one process holds the model: load the checkpoint with a parallel size of 1"
NO_GROUPS = "one process holds the model, so process groups are not asked"
LATENTS = "elements of a latent and of the rotated key behind it, with cache_mla_latent"
STATE_POOL = "recurrent state has a pool of its own, which the engine sizes"
INNER = "part of megatron-core's own step; the engine has another one"
NO_ZMQ = "there is no coordinator process; use MegatronLLM, or `megatron-async serve`"
STEPS_OF_ITS_OWN = "a thread of the engine's own runs no coroutines; use the methods"
STATIC = "static batching; the engine batches continuously"
ATTENTION = "rotary embeddings are computed with the append to the cache"

CONTEXT: Table = {
    "params_dtype": works("dtype of keys and values"),
    "num_layers": works("attention layers; those for multi-token prediction may be left out"),
    "kv_channels": works("head dimension"),
    "num_attention_heads": works("heads in the KV cache: the model's query groups"),
    "max_sequence_length": works("most tokens of a request"),
    "buffer_size_gb": works("size of the KV cache"),
    "paused_buffer_size_gb": works(
        "blocks that requests which wait for a block may keep; those beyond it are evicted"
    ),
    "max_requests": works("most rows of a forward; None derives it from the number of blocks"),
    "max_tokens": works("most tokens of a forward; None leaves room for four prefill chunks"),
    "block_size_tokens": works("tokens of a block; the default is 64 here"),
    "tensor_model_parallel_size": accepted(ONE_PROCESS, None, 1),
    "pipeline_model_parallel_size": accepted(ONE_PROCESS, None, 1),
    "pg_collection": accepted(NO_GROUPS),
    "cache_mla_latent": works("always so for a model with multi-latent attention"),
    "kv_lora_rank": works(LATENTS),
    "qk_pos_emb_head_dim": works(LATENTS),
    "num_cuda_graphs": works("most row buckets captured, at least 1; None and -1 capture all"),
    "materialize_only_last_token_logits": works(
        "log-probabilities of prompts are computed for the requests that ask, whatever it says"
    ),
    "mamba_inference_state_config": accepted(STATE_POOL, None),
    "use_cuda_graphs_for_non_decode_steps": works("False captures no steps with prefill chunks"),
    "use_flashinfer_fused_rope": accepted(ATTENTION + " by kernels of this package", None, False),
    "unified_memory_level": accepted("the KV cache stays in the memory of its device", None, 0),
    "cuda_graph_max_tokens": accepted("graphs are captured for all row buckets"),
    "cuda_graph_mixed_prefill_count": accepted("a graph of a mixed step takes any mix"),
    "metrics_writer": works("gets the counters every inference_logging_step_interval steps"),
    "request_metadata_types": accepted("sampling parameters are fields of the slots"),
    "persist_cuda_graphs": accepted("graphs are kept when the engine is suspended"),
    "offload_kv_cache": accepted("the KV cache stays on its device", None, False),
}
"""Keywords of ``DynamicInferenceContext`` in core_v0.16.1."""

CONTEXT_ATTRIBUTES: Table = {
    **dict.fromkeys(
        (
            "block_size_tokens",
            "is_decode_only",
            "is_dynamic_batching",
            "is_static_batching",
            "last_token_logits",
            "max_requests",
            "max_sequence_length",
            "params_dtype",
            "reset",
            "using_cuda_graph_this_step",
        ),
        works(""),
    ),
    "DEFAULT_MAX_TOKENS": works("what max_tokens is at most when it is left out"),
    "batch_dimensions": refused(INNER),
    "block_allocator": works("total_count, active_count, paused_count, and what is used of them"),
    "block_size_bytes": works(""),
    "cache_mla_latent": works("whether the cache holds latents"),
    "cuda_graph_batch_dimensions_list": works("the row buckets, as numbers"),
    "cuda_graph_token_counts": works("the row buckets"),
    "get_active_request_count": works(""),
    "get_kvcache_utilization_stats": works("what metrics_writer gets"),
    "has_unfinished_requests": works(""),
    "hidden_size_per_attention_head": works(""),
    "is_hybrid_model": works("whether an engine keeps recurrent state in it"),
    "materialize_only_last_token_logits": works("True: see the keyword"),
    "max_kv_block_count": works("blocks of a longest request"),
    "max_tokens": works("a number, also where none was given"),
    "memory_buffer": works("the KV cache, [layers, key or value, blocks, tokens, heads, size]"),
    "metrics_writer": works(""),
    "num_attention_heads_per_partition": works(""),
    "num_attention_layers": works(""),
    "offload_kv_cache": works("False"),
    "paused_request_count": works("requests that wait for a block, or were paused"),
    "persist_cuda_graphs": works("True: graphs are kept when the engine is suspended"),
    "request_metadata_types": works("None"),
    "total_request_count": works("requests with a slot"),
    "unified_memory_level": works("0"),
    "use_cuda_graphs_for_non_decode_steps": works(""),
    "use_flashinfer_fused_rope": works("False"),
    **dict.fromkeys(
        ("REQUEST_ROUNDER", "TOKEN_ROUNDER", "round_up", "round_up_requests"),
        refused("sizes are not rounded"),
    ),
    "round_up_tokens": refused("sizes are not rounded"),
    "from_config": refused("give an InferenceConfig to the constructor"),
    **dict.fromkeys(
        (
            "active_attn_metadata",
            "active_token_count",
            "add_dummy_requests_for_cudagraph_capture",
            "add_dummy_requests_parallel",
            "add_request",
            "allocate_all_tensors",
            "append_key_value_cache",
            "calculate_log_probs",
            "check_availability",
            "chunked_prefill_request_id",
            "cu_kv_lengths",
            "cu_query_lengths",
            "current_input_and_position_ids",
            "deallocate_all_tensors",
            "evict_overflow_paused_requests",
            "get_active_sequence_lengths",
            "get_index_of_chunked_prefill_request",
            "get_max_sequence_lengths",
            "graph_attn_metadata",
            "has_explicit_chunked_prefill_req",
            "initialize_attention_state",
            "is_symmetric_memory_initialized",
            "is_tensor_state_allocated",
            "key_value_cache",
            "layer_map",
            "maybe_initialize_symmetric_memory",
            "non_graph_attn_metadata",
            "num_decode_requests",
            "num_prefill_requests",
            "padded_active_request_count",
            "padded_active_token_count",
            "padded_batch_dimensions",
            "padding_slice",
            "paused_tokens",
            "release_memory_blocks_from_request_indexes",
            "request_ids",
            "request_kv_block_counts",
            "request_kv_length_offsets",
            "request_last_kv_block_id",
            "request_last_kv_block_offset",
            "request_metadata",
            "request_output_lengths",
            "request_query_lengths",
            "request_to_kv_block_ids",
            "reset_attention_state",
            "resume_paused_requests",
            "token_to_block_idx",
            "token_to_input_ids",
            "token_to_local_position_within_kv_block",
            "token_to_pos_ids",
            "token_to_position_in_request",
            "token_to_request_idx",
            "unified_memory_mempool",
            "update_requests",
        ),
        refused(INNER),
    ),
    **dict.fromkeys(
        ("apply_fused_qk_rotary_emb", "apply_rotary_emb_key", "apply_rotary_emb_query"),
        refused(ATTENTION),
    ),
    **dict.fromkeys(("batch_size_offset", "sequence_len_offset"), refused(STATIC)),
    **dict.fromkeys(
        (
            "increment_batch_size_offset",
            "increment_sequence_len_offset",
            "reset_batch_size_offset",
        ),
        accepted(STATIC),
    ),
    **dict.fromkeys(
        ("expert_model_parallel_group", "pipeline_parallel_group"), refused(ONE_PROCESS)
    ),
    "kv_reduced_dim": works("with cache_mla_latent; None without"),
    **dict.fromkeys(
        (
            "mamba_conv_states",
            "mamba_conv_states_shape",
            "mamba_metadata",
            "mamba_ssm_states",
            "mamba_ssm_states_shape",
            "mamba_states_cache",
            "num_mamba_layers",
            "reset_mamba_state",
        ),
        refused(STATE_POOL),
    ),
}
"""Attributes and methods of ``DynamicInferenceContext`` in core_v0.16.1."""

WRAPPER: Table = {
    "model": works("a GPTModel; Float16Module and DistributedDataParallel are taken off"),
    "inference_wrapper_config": accepted("the model's own configuration says all that is needed"),
    "inference_context": works("may also come second: (model, context)"),
    "pg_collection": accepted(NO_GROUPS),
}
"""Arguments of ``GPTInferenceWrapper``."""

WRAPPER_ATTRIBUTES: Table = {
    "inference_context": works(""),
    "inference_params": works("an older name of inference_context"),
    "inference_wrapper_config": works("as given"),
    "model": works("the GPTModel, adapted"),
    "model_is_pipeline_parallel": accepted(ONE_PROCESS, False),
    "prep_model_for_inference": accepted("the model is in evaluation mode already"),
    "sequence_parallel": works("False"),
    "tp_size": works("1"),
    **dict.fromkeys(("pp_group", "tp_group", "pipeline_communication_dtype"), refused(ONE_PROCESS)),
    **dict.fromkeys(
        (
            "dummy_forward",
            "forward_pass_with_pipeline_parallel_large_input_batch",
            "forward_pass_with_pipeline_parallel_small_input_batch",
            "forward_pass_without_pipeline_parallel",
            "run_one_forward_step",
        ),
        refused(INNER),
    ),
    **dict.fromkeys(("get_batch_for_context_window", "prep_inference_input"), refused(STATIC)),
}
"""Attributes and methods of ``GPTInferenceWrapper``."""

CONTROLLER: Table = {
    "inference_wrapped_model": works("a GPTInferenceWrapper, or the model itself"),
    "tokenizer": works("tokenize, detokenize, eod, bos; None where prompts are token ids"),
    "pp_group": accepted(NO_GROUPS),
}
"""Arguments of ``TextGenerationController``."""

CONTROLLER_ATTRIBUTES: Table = {
    "inference_wrapped_model": works(""),
    "model_is_pipeline_parallel": works("False"),
    "pp_group": works("as given"),
    "tokenize_prompt": works(""),
    "tokenizer": works(""),
    **dict.fromkeys(
        (
            "async_generate_output_tokens_dynamic_batch",
            "dummy_forward",
            "generate_output_tokens_dynamic_batch",
            "sample_from_logits",
            "sampling_rng",
            "set_stop_word_finished_ids_callback",
        ),
        refused(INNER),
    ),
    **dict.fromkeys(
        (
            "detokenize_generations",
            "generate_all_output_tokens_static_batch",
            "pad_input_prompt_tokens",
            "prep_inference_input",
            "stream_tokens",
            "unpad_input_prompt_tokens",
            "update_generation_status",
        ),
        refused(STATIC),
    ),
}
"""Attributes and methods of ``TextGenerationController``."""

ENGINE: Table = {
    "controller": works(""),
    "context": works(""),
    "enable_cuda_graph": works(
        "False launches kernels one by one; else steps are captured on a GPU, and never on a CPU"
    ),
    "random_seed": works("from which requests that bring no seed derive theirs"),
    "track_paused_request_events": works(""),
    "enable_chunked_prefill": works(
        "False prefills a prompt in one forward, where max_tokens leaves room for it"
    ),
    "inference_logging_step_interval": works("steps between two lines of the log"),
    "pg_collection": accepted(NO_GROUPS),
}
"""Arguments of ``DynamicInferenceEngine`` in core_v0.16.1."""

ENGINE_ATTRIBUTES: Table = {
    "add_request": works("a request that is too long becomes a FAILED record"),
    "async_step": works(""),
    "capture_stats": works("time, allocated_bytes, reserved_bytes; None on a CPU"),
    "context": works(""),
    "controller": works(""),
    "cuda_graph_impl": works('"local" or "none", as enable_cuda_graph says'),
    "enable_chunked_prefill": works(""),
    "enable_cuda_graph": works("as given"),
    "evicted_request_count": works("evictions since the engine was built or reset"),
    "generate": works("returns records, in the order of the prompts"),
    "get_request": works(""),
    "has_unfinished_requests": works(""),
    "inference_logging_step_interval": works(""),
    "is_decode_only": works("of the last step that was launched"),
    "is_suspended": works(""),
    "persist_cuda_graphs": works("True"),
    "pg_collection": works("as given"),
    "random_seed": works(""),
    "rank": works("0"),
    "reset": works(""),
    "resume": works(""),
    "run_engine": works("steps in a thread of the engine's own until the task is cancelled"),
    "step": works("requests in place of a dictionary, as step_legacy"),
    "step_count": works("steps launched since the engine was built or reset"),
    "step_legacy": works(""),
    "step_modern": works(
        "with `tokens` and `steps` too; EngineSuspendedError when suspended, once all that "
        "was in flight has been handed out"
    ),
    "stop": works("ends the engine's own thread"),
    "suspend": works("tokens in flight are committed; the KV cache stays on its device"),
    "track_paused_request_events": works(""),
    "unified_memory_level": works("0"),
    "requests": accepted("another object than theirs; use get_request, or add_request's futures"),
    "finished_request_count": refused("count finished_request_records, or see counters"),
    "waiting_request_ids": refused("use get_request: a request's status says where it stands"),
    "failed_request_ids": refused("finished_request_records has failed requests too"),
    **dict.fromkeys(
        (
            "async_bookkeep",
            "async_forward",
            "create_cuda_graphs",
            "inference_step_offset",
            "post_process_requests",
            "request_counter",
            "resume_request_ids",
            "schedule_chunked_prefill",
            "schedule_non_chunked_prefill",
            "schedule_waiting_requests",
            "step_end_event",
            "step_start_event",
            "stop_word_being_finished_ids",
            "stop_word_finished_request_ids",
            "suspend_resume_ctx",
        ),
        refused(INNER),
    ),
    **dict.fromkeys(
        (
            "engine_loop_task",
            "ep_rank",
            "ep_world_size",
            "expert_parallel_zmq_communicator",
            "inference_coordinator_process",
            "is_dp_coordinator",
            "is_mp_coordinator",
            "model_parallel_num_msgs_publisher_socket",
            "model_parallel_num_msgs_subscriber_socket",
            "model_parallel_publisher_socket",
            "model_parallel_subscriber_socket",
            "paused",
            "received_pause",
            "received_stop",
            "run_engine_with_coordinator",
            "running",
            "schedule_requests",
            "socket_for_receiving_requests",
            "start_listening_to_data_parallel_coordinator",
            "stopped",
            "suspend_signal",
            "use_coordinator",
            "zmq_context",
            "zmq_sockets",
        ),
        refused(NO_ZMQ),
    ),
}
"""Attributes and methods of ``DynamicInferenceEngine`` in core_v0.16.1."""

SAMPLING_PARAMS: Table = {
    **dict.fromkeys(
        (
            "temperature",
            "top_k",
            "top_p",
            "return_log_probs",
            "skip_prompt_log_probs",
            "num_tokens_to_generate",
            "num_tokens_total",
            "add_BOS",
        ),
        works(""),
    ),
    "return_segments": accepted("TokenOutput has the text of each token", None, False),
    "termination_id": works("None takes the tokenizer's eod, -1 none"),
    "top_n_logprobs": works(
        "at most 20; by text, of tokens with the same text the likeliest; return_log_probs is not "
        "needed"
    ),
    "return_prompt_top_n_logprobs": accepted("skip_prompt_log_probs decides"),
    "stop_words": works("the text is cut before the word"),
    "detokenize_stop_sequence": works("main: the text is cut behind the word"),
    "return_prompt_tokens": accepted("main: a record always has its prompt_tokens"),
    "streaming": accepted("main: engine.stream() streams any request"),
    "streaming_interval": accepted("main: each token is streamed"),
    "do_kv_handoff": accepted("main: keys and values stay in this engine", None, False),
}
"""Fields of megatron-core's ``SamplingParams``, whose objects requests may bring."""

REQUEST: Table = {
    **dict.fromkeys(
        (
            "add_event",
            "arrival_time",
            "deserialize",
            "events",
            "failed",
            "generated_length",
            "generated_log_probs",
            "generated_tokens",
            "get_metadata_types",
            "latency",
            "merge",
            "prompt",
            "prompt_log_probs",
            "request_id",
            "requests",
            "sampling_params",
            "serialize",
            "status",
            "succeeded",
            "tpot",
            "tracked_metadata",
        ),
        works(""),
    ),
    "generated_text": works("without the token that ended it, unlike theirs"),
    "generated_top_n_logprobs": works("by text; by token id where there is no tokenizer"),
    "prompt_top_n_logprobs": works("by text; by token id where there is no tokenizer"),
    "prompt_tokens": works("a list with tolist(), numel(), shape and size()"),
    "prompt_length": works("main"),
    "ttft": works("main: seconds from arrival to the first token"),
    "num_cached_tokens": works("main: prompt tokens found in the prefix cache"),
    **dict.fromkeys(
        (
            "add_event_add",
            "add_event_error_nontransient",
            "add_event_error_transient",
            "add_event_evict",
            "add_event_fail",
            "add_event_finish",
            "add_event_pause",
        ),
        refused("the engine records events; add_event adds one of any type"),
    ),
    **dict.fromkeys(
        (
            "finished_chunk_token_count",
            "remaining_prompt_length",
            "remaining_prompt_tokens",
            "stop_word_ids",
        ),
        refused(INNER),
    ),
    **dict.fromkeys(
        (
            "encoder_prompt",
            "generated_segments",
            "generated_sequence_lengths",
            "inference_parameters",
            "segments",
        ),
        refused(STATIC),
    ),
    "checkpoint": refused("a record has one request, also after evictions"),
    "from_request": refused("a request is its own record"),
}
"""Of ``DynamicInferenceRequest`` and ``DynamicInferenceRequestRecord``, which are one here."""
