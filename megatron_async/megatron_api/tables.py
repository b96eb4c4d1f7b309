"""Every public name of the inference of megatron-core's releases, and what becomes of it here.

``since`` says which releases have a name; the names of ``main_tables`` stand there.
"""

from __future__ import annotations

from megatron_async.megatron_api.context_tables import (
    CONTEXT,
    CONTEXT_ATTRIBUTES,
    GROUPS,
    INNER,
    NO_ZMQ,
    STATE_POOL,
    STATIC,
    STEPS_OF_ITS_OWN,
)
from megatron_async.megatron_api.names import Table, accepted, refused, works

__all__ = [
    "CONTEXT",
    "CONTEXT_ATTRIBUTES",
    "CONTROLLER",
    "CONTROLLER_ATTRIBUTES",
    "ENGINE",
    "ENGINE_ATTRIBUTES",
    "INNER",
    "NO_ZMQ",
    "REQUEST",
    "SAMPLING_PARAMS",
    "STATE_POOL",
    "STATIC",
    "STEPS_OF_ITS_OWN",
    "WRAPPER",
    "WRAPPER_ATTRIBUTES",
]

WRAPPER: Table = {
    "model": works("a GPTModel; Float16Module and DistributedDataParallel are taken off"),
    "inference_wrapper_config": accepted("the model's own configuration says all that is needed"),
    "inference_context": works("may also come second: (model, context)"),
    "pg_collection": works(GROUPS),
}
"""Arguments of ``GPTInferenceWrapper``."""

WRAPPER_ATTRIBUTES: Table = {
    "inference_context": works(""),
    "inference_params": works("an older name of inference_context"),
    "inference_wrapper_config": works("as given"),
    "model": works("the GPTModel, adapted"),
    "model_is_pipeline_parallel": works("whether the model has several stages"),
    "prep_model_for_inference": accepted("the model is in evaluation mode already"),
    "sequence_parallel": works("False"),
    "tp_size": works("ranks that share each layer"),
    **dict.fromkeys(("pp_group", "tp_group"), works("of the model's ranks; None of one rank")),
    "pipeline_communication_dtype": works("the model's dtype"),
    **dict.fromkeys(
        (
            "dummy_forward",
            "forward_pass_with_pipeline_parallel_large_input_batch",
            "forward_pass_with_pipeline_parallel_small_input_batch",
            "forward_pass_without_pipeline_parallel",
            "forward_pass_with_pipeline_parallel",
            "run_one_forward_step",
        ),
        refused(INNER),
    ),
    "config": refused("the model has one: model.config"),
    **dict.fromkeys(("get_batch_for_context_window", "prep_inference_input"), refused(STATIC)),
}
"""Attributes and methods of ``GPTInferenceWrapper``."""

CONTROLLER: Table = {
    "inference_wrapped_model": works("a GPTInferenceWrapper, or the model itself"),
    "tokenizer": works("tokenize, detokenize, eod, bos; None where prompts are token ids"),
    "pp_group": accepted("the wrapped model knows its stages"),
}
"""Arguments of ``TextGenerationController``."""

CONTROLLER_ATTRIBUTES: Table = {
    "inference_wrapped_model": works(""),
    "model_is_pipeline_parallel": works("False"),
    "pp_group": works("as given"),
    "tokenize_prompt": works(
        "of (prompt, add_BOS), as in 0.16, and of (tokenizer, prompt, add_BOS); without begin "
        "tokens of the tokenizer's own"
    ),
    "tokenizer": works(""),
    "detokenize": refused("use the tokenizer's; records have generated_text"),
    "dp_group": works("megatron-core's data-parallel group; None where there is none"),
    "model_config": refused("the model has one: inference_wrapped_model.model.config"),
    **dict.fromkeys(
        ("num_mtp_depths", "num_mtp_heads", "num_speculative_tokens"),
        refused("a number of the engine's: num_speculative_tokens"),
    ),
    "vocab_size": refused("the wrapper has it: inference_wrapped_model.vocab_size"),
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
    "pg_collection": works("an attribute; the ranks are those of the wrapped model"),
}
"""Arguments of ``DynamicInferenceEngine``."""

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
    "pg_collection": works("as given, to the InferenceConfig too"),
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
    "track_generated_token_events": works("False: a request's tpot has the time of each token"),
    "logging_step_interval": works("as inference_logging_step_interval"),
    "materialize_only_last_token_logits": works("True: see the keyword of the context"),
    "metrics_writer": works("that of the context"),
    "num_speculative_tokens": works("drafts a step of each request"),
    "shutdown": works("a coroutine function: closes the engine"),
    "unified_memory_level": works("0"),
    "start_listening_to_data_parallel_coordinator": works(
        "a thread of this engine's answers InferenceClient, ours and megatron-core's own of 0.16 "
        "to main; this host alone, unless hostname says another address"
    ),
    "use_coordinator": works("whether it listens"),
    "engine_loop_task": works("done when a client stops the engine; None before it listens"),
    "running": works("set while clients let the engine run"),
    "paused": works("set while clients have paused the engine"),
    "stopped": works("set when a client has stopped the engine"),
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
            "chunked_prefill_request_id",
            "cuda_graph_all_prefills",
            "cuda_graph_modules",
            "cuda_graph_scope",
            "inference_cuda_graph_scope",
        ),
        refused(INNER),
    ),
    **dict.fromkeys(
        ("disable_ep_consensus", "ep_consensus_interval"), works("rank 0 plans for all: False, 20")
    ),
    **dict.fromkeys(
        (
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
            "received_pause",
            "received_stop",
            "run_engine_with_coordinator",
            "schedule_requests",
            "socket_for_receiving_requests",
            "suspend_signal",
            "zmq_context",
            "zmq_sockets",
            "get_prefix_coordination_metrics",
            "use_synchronous_zmq_collectives",
            "world_zmq_communicator",
        ),
        refused(NO_ZMQ),
    ),
}
"""Attributes and methods of ``DynamicInferenceEngine``."""

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
    "detokenize_stop_sequence": works("the text is cut behind the word"),
    "return_prompt_tokens": accepted("a record always has its prompt_tokens"),
    "streaming": accepted("engine.stream() streams any request"),
    "streaming_interval": accepted("each token is streamed"),
    "do_kv_handoff": accepted("keys and values stay in this engine", None, False),
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
    "prompt": works("of token ids their text, when the request has ended"),
    "generated_text": works("without the token that ended it, unlike theirs"),
    "generated_top_n_logprobs": works("by text; by token id where there is no tokenizer"),
    "prompt_top_n_logprobs": works("by text; by token id where there is no tokenizer"),
    "prompt_tokens": works("a list with tolist(), numel(), shape and size()"),
    "prompt_length": works(""),
    "ttft": works("seconds from arrival to the first token"),
    "policy_epoch": works("of a client's request: positions from which an epoch's weights sampled"),
    "kv_cache_epoch": works("the same of its keys and values; one epoch after they came anew"),
    "num_cached_tokens": works("prompt tokens found in the prefix cache"),
    **dict.fromkeys(
        (
            "add_event_add",
            "add_event_error_nontransient",
            "add_event_error_transient",
            "add_event_evict",
            "add_event_fail",
            "add_event_finish",
            "add_event_pause",
            "add_event_add_context",
            "add_event_add_engine",
            "add_event_generated_token",
            "event_add_engine",
        ),
        refused("the engine records events; add_event adds one of any type"),
    ),
    **dict.fromkeys(
        (
            "finished_chunk_token_count",
            "remaining_prompt_length",
            "remaining_prompt_tokens",
            "stop_word_ids",
            "block_size_tokens",
            "cg_wait_iters",
            "enable_prefix_caching",
            "precomputed_block_hashes",
            "routing_indices",
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
"""Names of ``DynamicInferenceRequest`` and ``DynamicInferenceRequestRecord``, which are one
here."""
