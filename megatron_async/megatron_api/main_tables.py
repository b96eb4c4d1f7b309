"""Names that came after core_v0.16: ``InferenceConfig``, ``MegatronLLM``, and what main has."""

from __future__ import annotations

from megatron_async.megatron_api.names import Table, accepted, refused, works
from megatron_async.megatron_api.tables import (
    CONTEXT,
    NO_ZMQ,
    STATE_POOL,
    STATIC,
    STEPS_OF_ITS_OWN,
)

_SHARED = (
    "block_size_tokens",
    "buffer_size_gb",
    "cuda_graph_max_tokens",
    "cuda_graph_mixed_prefill_count",
    "materialize_only_last_token_logits",
    "max_requests",
    "max_sequence_length",
    "max_tokens",
    "metrics_writer",
    "num_cuda_graphs",
    "paused_buffer_size_gb",
    "pg_collection",
    "request_metadata_types",
    "unified_memory_level",
    "use_cuda_graphs_for_non_decode_steps",
)
_NO_COORDINATOR = "one engine serves all requests, so none are routed"

_OF_THE_ENGINE = "llm.engine.start_listening_to_data_parallel_coordinator() takes it"

INFERENCE_CONFIG: Table = {
    **{name: CONTEXT[name] for name in _SHARED},
    "block_size_tokens": works("tokens of a block; the default is theirs, 256"),
    "mamba_memory_ratio": accepted(f"{STATE_POOL}; a warning names it"),
    "mamba_inference_state_config": works(
        "says which layers attend, and ssm_states_dtype; recurrent state has a pool of its own, "
        "which the engine sizes"
    ),
    "use_flashinfer_fused_rope": accepted(
        f"{CONTEXT['use_flashinfer_fused_rope'].note}; a warning names it"
    ),
    "kv_cache_management_mode": works(
        '"recompute" computes running requests again after resume(); "persist" and "offload" keep '
        "what they have. Memory stays with each; an engine of from_pretrained() can sleep()"
    ),
    "cuda_graph_sizing_distribution": accepted("graphs are captured for all row buckets"),
    "cuda_graph_all_prefills": accepted("steps of up to 4,096 prefill tokens are captured"),
    "static_kv_memory_pointers": accepted("the KV cache never moves"),
    "image_preprocessing_config": accepted("models take text alone", None),
    "enable_chunked_prefill": works("chunks of EngineConfig.prefill_chunk_tokens"),
    "num_speculative_tokens": works("drafts of the model's layers for multi-token prediction"),
    "enable_prefix_caching": works(""),
    "prefix_caching_eviction_policy": accepted(
        "blocks without a holder stay known until they are needed, the oldest first"
    ),
    "prefix_caching_coordinator_policy": accepted(_NO_COORDINATOR),
    "prefix_caching_routing_alpha": accepted(_NO_COORDINATOR),
    "prefix_caching_mamba_gb": accepted(f"{STATE_POOL}; a warning names it"),
    "track_paused_request_events": works(""),
    "track_generated_token_events": accepted(
        "a request's tpot has the time of each token; a warning names it"
    ),
    "logging_step_interval": works("steps between two lines of the log"),
    "sampling_backend": accepted(
        "tokens are sampled by kernels of this package; a warning names another than torch"
    ),
    "offset_sampling_seed_by_dp_rank": works("replicas have seeds of their own"),
    "async_sched_mode": works(
        '"async" is depth 1, "legacy" depth 0; the tokens are the same. "async" is the default of '
        'ours, and of MegatronLLM without one, as in main; 0.19 has "legacy"'
    ),
    "logprobs_mode": works("of requests that do not say log_probs_mode themselves"),
    "use_synchronous_zmq_collectives": accepted(
        "engines do not wait for each other; a warning names it"
    ),
    "disable_ep_consensus": accepted("rank 0 plans for all ranks of a model"),
    "ep_consensus_interval": accepted("rank 0 plans for all ranks of a model"),
    "verbose": accepted("the log says what was built"),
}
"""Fields of ``InferenceConfig``."""

MAIN_CONTEXT_ATTRIBUTES: Table = {
    "step_count": works("steps launched since the engine was built or reset"),
    "async_sched_step_count": works("steps that overlapped the commit of the one before"),
    "async_sched_compaction_step_count": works("0: no row is moved when a request ends"),
    "lifetime_prefill_token_count": works("prompt tokens computed, those after evictions too"),
    "kv_block_allocator": works("as block_allocator, with pool_size"),
    "num_speculative_tokens": works(""),
    "enable_prefix_caching": works(""),
}
"""Attributes of ``DynamicInferenceContext`` that scripts of the main branch read."""

MAIN_ENGINE_ATTRIBUTES: Table = {
    "decode_only": works("launched and consumed: of the last step that was launched"),
    "state": works("an EngineState: RUNNING, PAUSED, SUSPENDED or STOPPED"),
    "wait_until": works("RUNNING, PAUSED, SUSPENDED, RESUMED or STOPPED, as clients say"),
    "local_metadata_ledger": works(
        "policy_epoch, kv_cache_epoch and num_evictions of clients' requests that have ended, by "
        "uid"
    ),
    "local_metadata_ledger_enabled": works("False"),
}
"""Attributes of ``DynamicInferenceEngine`` that scripts of the main branch read."""

LLM: Table = {
    "model": works("a GPTModel, HybridModel or MambaModel, adapted in place"),
    "tokenizer": works(""),
    "inference_config": works(""),
    "use_coordinator": works("True: a thread of the engine's own steps it; False: the caller does"),
    "coordinator_host": accepted(_OF_THE_ENGINE, None),
    "coordinator_port": accepted(_OF_THE_ENGINE, None),
    "inference_wrapper_cls": works("a class that is called with (model, context)"),
    "generate": works("MegatronAsyncLLM returns one record for one prompt, as theirs"),
    "multi_modal_data": accepted("models take text alone", None),
    "pause": works("tokens in flight are committed, and nothing is launched"),
    "unpause": works(""),
    "suspend": works("as pause; the KV cache stays on its device"),
    "resume": works("the engine is paused then, as theirs"),
    "update_weights": works("ours: a directory, a .safetensors file, or a state dict"),
    "shutdown": works("closes the engine"),
    "wait_for_shutdown": works(""),
    "serve": refused(
        "the server's engine is a process of its own, started again when it dies, which cannot "
        "have a model of this one: give the checkpoint's directory, or that of "
        "megatron_async.checkpoint.save_distributed, to `megatron-async serve --model PATH`"
    ),
    "submit": refused(STEPS_OF_ITS_OWN),
    "run_sync": refused(STEPS_OF_ITS_OWN),
    "engine": works(""),
    "context": works(""),
    "controller": works(""),
    "is_primary_rank": works("True"),
}
"""Arguments and methods of ``MegatronLLM`` and ``MegatronAsyncLLM``."""

NOT_HERE: Table = {
    **dict.fromkeys(
        ("StaticInferenceEngine", "MCoreEngine", "StaticInferenceContext", "Scheduler"),
        refused(STATIC),
    ),
    "DataParallelInferenceCoordinator": refused(NO_ZMQ),
    "ServeConfig": refused(
        "the server has options: `megatron-async serve --model PATH --host --port "
        "--api-server-count`, and those that `megatron-async serve --help` lists"
    ),
    **dict.fromkeys(
        (
            "VLMInferenceWrapper",
            "VLMTextGenerationController",
            "T5InferenceWrapper",
            "EncoderDecoderTextGenerationController",
            "ImageProcessingConfig",
        ),
        refused("models take text alone, and only decode"),
    ),
    **dict.fromkeys(
        ("InferenceWrapperConfig", "MambaInferenceStateConfig"),
        refused("import it from megatron.core, or leave it out: nothing of it is read"),
    ),
    "ContextErrorFactory": refused("DynamicInferenceRequest.serialize() has the errors of events"),
}
"""Classes of theirs that ``megatron_async.megatron_api`` has not."""
