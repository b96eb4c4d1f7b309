"""Which releases of megatron-core have a name, by the tables of ``tables`` and ``main_tables``.

A span is the first release, and behind a dash the last one where a name is gone. Names that stand
nowhere are of the main branch.
"""

from __future__ import annotations

SINCE: dict[str, dict[str, str]] = {
    "CLASSES": {
        "0.16": """
            ContextErrorFactory ContextOverflowError DataParallelInferenceCoordinator
            DynamicInferenceContext DynamicInferenceEngine DynamicInferenceEvent
            DynamicInferenceEventType DynamicInferenceRequest DynamicInferenceRequestRecord
            EncoderDecoderTextGenerationController EngineSuspendedError GPTInferenceWrapper
            Headers InferenceClient MambaInferenceStateConfig MaxSequenceLengthOverflowError
            SamplingParams Scheduler StaticInferenceContext StaticInferenceEngine Status
            T5InferenceWrapper TextGenerationController VLMInferenceWrapper
            VLMTextGenerationController
        """,
        "0.16-0.16": "BlockAllocator InferenceWrapperConfig",
        "0.17": """
            EngineState InferenceConfig KVCacheManagementMode PrefixCachingCoordinatorPolicy
            PrefixCachingEvictionPolicy
        """,
        "0.18": "MegatronAsyncLLM MegatronLLM ServeConfig",
        "0.19": "AsyncScheduleMode CudaGraphSizingDistribution",
    },
    "CLIENT": {
        "0.16": """
            add_request completion_futures context inference_coordinator_address listener_task
            next_request_id pause_engines request_submission_times resume_engines socket start
            stop stop_engines suspend_engines unpause_engines
        """,
        "0.16-0.16": "paused running stopped",
        "0.17": "deserialize set_generation_epoch shutdown_coordinator",
        "0.19": "start_cuda_profiler stop_cuda_profiler",
    },
    "CONTEXT": {
        "0.16-0.16": """
            block_size_tokens buffer_size_gb cache_mla_latent cuda_graph_max_tokens
            cuda_graph_mixed_prefill_count kv_channels kv_lora_rank mamba_inference_state_config
            materialize_only_last_token_logits max_requests max_sequence_length max_tokens
            metrics_writer num_attention_heads num_cuda_graphs num_layers offload_kv_cache
            params_dtype paused_buffer_size_gb persist_cuda_graphs pg_collection
            pipeline_model_parallel_size qk_pos_emb_head_dim request_metadata_types
            tensor_model_parallel_size unified_memory_level use_cuda_graphs_for_non_decode_steps
            use_flashinfer_fused_rope
        """,
        "0.17": "inference_config model_config",
    },
    "CONTEXT_ATTRIBUTES": {
        "0.16": """
            DEFAULT_MAX_TOKENS REQUEST_ROUNDER TOKEN_ROUNDER active_attn_metadata
            active_token_count add_dummy_requests_for_cudagraph_capture
            add_dummy_requests_parallel add_request append_key_value_cache
            apply_fused_qk_rotary_emb apply_rotary_emb_key apply_rotary_emb_query batch_dimensions
            batch_size_offset block_size_bytes block_size_tokens cache_mla_latent
            calculate_log_probs check_availability chunked_prefill_request_id cu_kv_lengths
            cu_query_lengths cuda_graph_batch_dimensions_list cuda_graph_token_counts
            current_input_and_position_ids evict_overflow_paused_requests
            expert_model_parallel_group get_active_request_count get_active_sequence_lengths
            get_index_of_chunked_prefill_request get_kvcache_utilization_stats
            get_max_sequence_lengths graph_attn_metadata has_unfinished_requests
            hidden_size_per_attention_head increment_batch_size_offset
            increment_sequence_len_offset initialize_attention_state is_decode_only
            is_dynamic_batching is_hybrid_model is_static_batching is_tensor_state_allocated
            key_value_cache kv_reduced_dim last_token_logits layer_map mamba_conv_states
            mamba_conv_states_shape mamba_metadata mamba_ssm_states mamba_ssm_states_shape
            mamba_states_cache max_kv_block_count max_requests max_sequence_length max_tokens
            memory_buffer non_graph_attn_metadata num_attention_heads_per_partition
            num_attention_layers num_decode_requests num_mamba_layers num_prefill_requests
            padded_active_request_count padded_active_token_count padded_batch_dimensions
            padding_slice params_dtype paused_request_count paused_tokens pipeline_parallel_group
            release_memory_blocks_from_request_indexes request_ids request_kv_block_counts
            request_kv_length_offsets request_last_kv_block_id request_last_kv_block_offset
            request_metadata request_metadata_types request_output_lengths request_query_lengths
            request_to_kv_block_ids reset reset_attention_state reset_batch_size_offset
            reset_mamba_state resume_paused_requests round_up_requests round_up_tokens
            sequence_len_offset token_to_block_idx token_to_input_ids
            token_to_local_position_within_kv_block token_to_pos_ids token_to_position_in_request
            token_to_request_idx total_request_count unified_memory_level unified_memory_mempool
            update_requests use_cuda_graphs_for_non_decode_steps use_flashinfer_fused_rope
            using_cuda_graph_this_step
        """,
        "0.16-0.16": """
            allocate_all_tensors block_allocator deallocate_all_tensors from_config
            has_explicit_chunked_prefill_req is_symmetric_memory_initialized
            materialize_only_last_token_logits maybe_initialize_symmetric_memory metrics_writer
            offload_kv_cache persist_cuda_graphs round_up
        """,
        "0.17": """
            TMS_TAG add_dummy_requests_for_expert_parallel_step config
            deallocate_inference_state_buffers enable_chunked_prefill enable_prefix_caching
            initialize_all_tensors is_chunked_prefill_enabled is_creating_cuda_graphs
            kv_block_allocator kv_cache_management_mode lifetime_prefill_token_count
            mamba_chunk_size mamba_conv_states_dtype mamba_intermediate_conv_states
            mamba_intermediate_ssm_states mamba_slot_allocator mamba_ssm_states_dtype
            moe_enable_routing_replay moe_routing_metadata num_speculative_tokens
            paused_speculative_tokens prefix_cache_blocks_matched prefix_cache_hits
            prefix_cache_lru_clock prefix_caching_coordinator_policy
            prefix_caching_eviction_policy prefix_caching_routing_alpha
            reinitialize_inference_state_buffers request_in_prefill_status_tensor reset_metadata
            reset_tensors static_kv_memory_pointers step_count
        """,
        "0.17-0.17": "smallest_non_decode_cuda_graph_size",
        "0.18": """
            active_logit_idxs active_request_last_token_idxs active_request_metadata
            build_active_slices gpu_view inference_grouped_gemm_backend num_last_token_logits
            pad_active_slices set_ep_zmq_communicator speculative_required_logit_indices
            transfer_bookkeeping_to_gpu
        """,
        "0.19": """
            async_sched_compaction_step_count async_sched_step_count calculate_log_probs_tensors
            can_prepare_requests commit_sampled_tokens copy_async_sched_sample_to_forward
            hidden_size inference_cuda_graph_scope max_mamba_intermediate_states_per_step
            mtp_decoder_hidden_states prefix_cache_prefill_computed_tokens
            prefix_cache_prefill_skipped_tokens prepare_requests resolve_requests
        """,
    },
    "CONTROLLER": {
        "0.16": "inference_wrapped_model tokenizer",
        "0.16-0.16": "pp_group",
    },
    "CONTROLLER_ATTRIBUTES": {
        "0.16": """
            async_generate_output_tokens_dynamic_batch detokenize_generations dummy_forward
            generate_all_output_tokens_static_batch generate_output_tokens_dynamic_batch
            inference_wrapped_model model_is_pipeline_parallel pad_input_prompt_tokens pp_group
            prep_inference_input sample_from_logits sampling_rng
            set_stop_word_finished_ids_callback stream_tokens tokenize_prompt tokenizer
            unpad_input_prompt_tokens update_generation_status
        """,
        "0.17": "detokenize model_config num_speculative_tokens vocab_size",
        "0.17-0.18": "num_mtp_heads",
        "0.19": "dp_group num_mtp_depths",
    },
    "ENGINE": {
        "0.16": "context controller",
        "0.16-0.16": """
            enable_chunked_prefill enable_cuda_graph inference_logging_step_interval pg_collection
            random_seed track_paused_request_events
        """,
    },
    "ENGINE_ATTRIBUTES": {
        "0.16": """
            add_request async_bookkeep async_forward async_step capture_stats context controller
            create_cuda_graphs cuda_graph_impl enable_chunked_prefill engine_loop_task ep_rank
            ep_world_size evicted_request_count expert_parallel_zmq_communicator
            failed_request_ids finished_request_count generate get_request has_unfinished_requests
            inference_coordinator_process inference_step_offset is_dp_coordinator
            is_mp_coordinator model_parallel_publisher_socket model_parallel_subscriber_socket
            pg_collection post_process_requests rank request_counter requests reset resume
            resume_request_ids run_engine run_engine_with_coordinator schedule_chunked_prefill
            schedule_non_chunked_prefill schedule_requests schedule_waiting_requests
            socket_for_receiving_requests start_listening_to_data_parallel_coordinator step
            step_end_event step_legacy step_modern step_start_event stop_word_being_finished_ids
            stop_word_finished_request_ids suspend suspend_resume_ctx track_paused_request_events
            unified_memory_level use_coordinator waiting_request_ids zmq_context zmq_sockets
        """,
        "0.16-0.16": """
            enable_cuda_graph inference_logging_step_interval is_suspended paused
            persist_cuda_graphs random_seed received_pause received_stop running step_count stop
            stopped suspend_signal
        """,
        "0.16-0.17": """
            model_parallel_num_msgs_publisher_socket model_parallel_num_msgs_subscriber_socket
        """,
        "0.16-0.18": "is_decode_only",
        "0.17": """
            chunked_prefill_request_id get_prefix_coordination_metrics logging_step_interval
            materialize_only_last_token_logits metrics_writer num_speculative_tokens shutdown
            state track_generated_token_events use_synchronous_zmq_collectives wait_until
            world_zmq_communicator
        """,
        "0.17-0.17": "cuda_graph_scope",
        "0.18": """
            cuda_graph_modules disable_ep_consensus ep_consensus_interval
            inference_cuda_graph_scope
        """,
        "0.19": "cuda_graph_all_prefills decode_only",
    },
    "INFERENCE_CONFIG": {
        "0.17": """
            block_size_tokens buffer_size_gb cuda_graph_mixed_prefill_count enable_chunked_prefill
            enable_prefix_caching kv_cache_management_mode logging_step_interval
            mamba_inference_state_config mamba_memory_ratio materialize_only_last_token_logits
            max_requests max_sequence_length max_tokens metrics_writer num_cuda_graphs
            num_speculative_tokens paused_buffer_size_gb pg_collection
            prefix_caching_coordinator_policy prefix_caching_eviction_policy
            prefix_caching_mamba_gb prefix_caching_routing_alpha request_metadata_types
            static_kv_memory_pointers track_generated_token_events track_paused_request_events
            unified_memory_level use_cuda_graphs_for_non_decode_steps use_flashinfer_fused_rope
            use_synchronous_zmq_collectives
        """,
        "0.18": """
            cuda_graph_all_prefills disable_ep_consensus ep_consensus_interval sampling_backend
            verbose
        """,
        "0.19": """
            async_sched_mode cuda_graph_max_tokens cuda_graph_sizing_distribution logprobs_mode
            offset_sampling_seed_by_dp_rank
        """,
    },
    "COORDINATOR": {
        "0.16": "inference_coordinator_port launch_inference_coordinator loop",
        "0.17": "coordinator_schedule_output_path hostname",
    },
    "LLM": {
        "0.18": """
            context controller coordinator_host coordinator_port engine generate inference_config
            is_primary_rank model pause resume serve shutdown suspend tokenizer unpause
            use_coordinator wait_for_shutdown
        """,
    },
    "REQUEST": {
        "0.16": """
            add_event add_event_error_nontransient add_event_error_transient add_event_evict
            add_event_fail add_event_finish add_event_pause arrival_time checkpoint deserialize
            encoder_prompt events failed finished_chunk_token_count from_request generated_length
            generated_log_probs generated_segments generated_sequence_lengths generated_text
            generated_tokens generated_top_n_logprobs get_metadata_types inference_parameters
            latency merge prompt prompt_log_probs prompt_tokens prompt_top_n_logprobs
            remaining_prompt_length remaining_prompt_tokens request_id requests sampling_params
            segments serialize status stop_word_ids succeeded tpot tracked_metadata
        """,
        "0.16-0.16": "add_event_add",
        "0.17": """
            add_event_add_context add_event_add_engine add_event_generated_token block_size_tokens
            enable_prefix_caching event_add_engine kv_cache_epoch policy_epoch
            precomputed_block_hashes routing_indices ttft
        """,
        "0.19": "cg_wait_iters num_cached_tokens prompt_length",
    },
    "SAMPLING_PARAMS": {
        "0.16": """
            add_BOS num_tokens_to_generate num_tokens_total return_log_probs
            return_prompt_top_n_logprobs return_segments skip_prompt_log_probs stop_words
            temperature termination_id top_k top_n_logprobs top_p
        """,
        "0.17": "detokenize_stop_sequence",
        "0.19": "return_prompt_tokens",
    },
    "WRAPPER": {
        "0.16": "inference_context model",
        "0.16-0.16": "inference_wrapper_config pg_collection",
    },
    "WRAPPER_ATTRIBUTES": {
        "0.16": """
            forward_pass_without_pipeline_parallel get_batch_for_context_window inference_context
            model model_is_pipeline_parallel pipeline_communication_dtype pp_group
            prep_inference_input prep_model_for_inference run_one_forward_step sequence_parallel
            tp_group tp_size
        """,
        "0.16-0.16": """
            forward_pass_with_pipeline_parallel_large_input_batch
            forward_pass_with_pipeline_parallel_small_input_batch inference_params
            inference_wrapper_config
        """,
        "0.16-0.17": "dummy_forward",
        "0.17": "config forward_pass_with_pipeline_parallel",
    },
}
