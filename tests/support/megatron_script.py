"""A script as a megatron-core user writes it, after NVIDIA's dynamic-inference example of
core_v0.16.1: the same calls in the same order, with the imports changed and nothing else.

In a script for megatron-core the first import reads::

    from megatron.core.inference.contexts.dynamic_context import DynamicInferenceContext
    from megatron.core.inference.engines import DynamicInferenceEngine, EngineSuspendedError
    ...
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_async.megatron_api import (
    ContextOverflowError,
    DynamicInferenceContext,
    DynamicInferenceEngine,
    EngineSuspendedError,
    GPTInferenceWrapper,
    SamplingParams,
    TextGenerationController,
)


def parse_args(argv: list[str]) -> argparse.Namespace:
    """Those of megatron-core's arguments that the script reads, with their defaults."""
    parser = argparse.ArgumentParser()
    add = parser.add_argument
    add("--temperature", type=float, default=1.0)
    add("--top_k", type=int, default=1)
    add("--top_p", type=float, default=0.0)
    add("--return-log-probs", action="store_true")
    add("--skip-prompt-log-probs", action="store_true")
    add("--top-n-logprobs", type=int, default=0)
    add("--num-tokens-to-generate", type=int, default=30)
    add("--termination-id", type=int)
    add("--stop-words", nargs="+")
    add("--prompts", nargs="+", required=True)
    add("--incoming-requests-per-step", type=int)
    add("--suspend-resume-interval", type=int)
    add("--inference-repeat-n", type=int, default=1)
    add("--cuda-graph-impl", default="none")
    add("--seed", type=int, default=1234)
    add("--disable-chunked-prefill", action="store_true")
    add("--decode-only-cuda-graphs", action="store_true")
    add("--inference-logging-step-interval", type=int, default=0)
    add("--inference-dynamic-batching-buffer-size-gb", type=float, default=40.0)
    add("--inference-dynamic-batching-paused-buffer-size-gb", type=float)
    add("--inference-dynamic-batching-block-size", type=int, default=256)
    add("--inference-dynamic-batching-max-requests", type=int)
    add("--inference-dynamic-batching-max-tokens", type=int)
    add("--inference-dynamic-batching-num-cuda-graphs", type=int, default=16)
    add("--inference-dynamic-batching-track-paused-request-events", action="store_true")
    add("--inference-dynamic-batching-unified-memory-level", type=int, default=0)
    add("--inference-dynamic-batching-cuda-graph-max-tokens", type=int, default=16384)
    add("--inference-dynamic-batching-cuda-graph-mixed-prefill-count", type=int, default=16)
    add("--tensor-model-parallel-size", type=int, default=1)
    add("--pipeline-model-parallel-size", type=int, default=1)
    args = parser.parse_args(argv)
    # What the model's arguments have for a GPT model.
    args.multi_latent_attention = args.use_flashinfer_fused_rope = False
    args.qk_pos_emb_head_dim, args.rl_offload_kv_cache_during_training = 64, False
    return args


@dataclass
class Asked:
    """A request as the script sees it."""

    prompt_text: str
    prompt_tokens: list[int]
    sampling_params: Any
    state: str = "not-started"
    output_tokens: list[int] = field(default_factory=list)
    output_text: str | None = None
    log_probs: list[float] | None = None
    events: list[Any] = field(default_factory=list)


def build_context(
    args: argparse.Namespace, model: Any, requests: list[Asked], metrics_writer: Any = None
) -> Any:
    """A context with all the keywords that the example gives."""
    config = model.config
    longest = max(len(request.prompt_tokens) for request in requests)
    local = args.cuda_graph_impl == "local"
    return DynamicInferenceContext(
        params_dtype=config.params_dtype,
        num_layers=config.num_layers // args.pipeline_model_parallel_size,
        kv_channels=config.kv_channels,
        num_attention_heads=config.num_query_groups,
        max_sequence_length=longest + args.num_tokens_to_generate,
        num_cuda_graphs=args.inference_dynamic_batching_num_cuda_graphs if local else None,
        block_size_tokens=args.inference_dynamic_batching_block_size,
        buffer_size_gb=args.inference_dynamic_batching_buffer_size_gb,
        paused_buffer_size_gb=args.inference_dynamic_batching_paused_buffer_size_gb,
        max_requests=args.inference_dynamic_batching_max_requests,
        max_tokens=args.inference_dynamic_batching_max_tokens,
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        materialize_only_last_token_logits=not args.return_log_probs,
        mamba_inference_state_config=None,
        cache_mla_latent=args.multi_latent_attention,
        kv_lora_rank=None,
        qk_pos_emb_head_dim=args.qk_pos_emb_head_dim,
        use_cuda_graphs_for_non_decode_steps=not args.decode_only_cuda_graphs,
        use_flashinfer_fused_rope=args.use_flashinfer_fused_rope,
        unified_memory_level=args.inference_dynamic_batching_unified_memory_level,
        cuda_graph_max_tokens=args.inference_dynamic_batching_cuda_graph_max_tokens,
        cuda_graph_mixed_prefill_count=(
            args.inference_dynamic_batching_cuda_graph_mixed_prefill_count
        ),
        metrics_writer=metrics_writer,
        offload_kv_cache=args.rl_offload_kv_cache_during_training,
    )


def describe(args: argparse.Namespace, context: Any) -> str:
    """The line that the example prints about its set-up."""
    graphs = "--"
    if args.cuda_graph_impl == "local":
        graphs = f"graphs {len(context.cuda_graph_batch_dimensions_list)}"
    return (
        f"{graphs} | uvm {int(context.unified_memory_level)} | "
        f"{context.block_allocator.active_count} chunks "
        f"[r {context.max_requests}, t {context.max_tokens}]"
    )


def run(args: argparse.Namespace, requests: list[Asked], engine: Any) -> dict[str, Any]:
    """Add requests as the steps go on, suspend and resume, and take what has ended."""
    added = attempts = 0
    times: dict[str, list[float]] = {"prefill": [], "decode": []}
    graph_counts: Counter[int] = Counter()
    while True:
        burst = args.incoming_requests_per_step or len(requests)
        for request_id in range(added, min(added + burst, len(requests))):
            request = requests[request_id]
            engine.add_request(request_id, request.prompt_text, request.sampling_params)
            request.state, added = "started", request_id + 1
        try:
            result = engine.step_modern()
        except EngineSuspendedError as error:
            result = error
        attempts += 1
        is_decode_only = engine.is_decode_only
        interval = args.suspend_resume_interval
        if interval is not None:
            if attempts % interval == 0:
                engine.suspend()
            if attempts > 0 and (attempts - interval // 2) % interval == 0:
                engine.resume()
        if isinstance(result, EngineSuspendedError):
            continue
        if result["cuda_graph_request_count"] is not None:
            graph_counts[result["cuda_graph_request_count"]] += 1
        if result["active_request_ids"] or result["finished_request_records"]:
            times["decode" if is_decode_only else "prefill"].append(result["step_time"])
            for record in result["finished_request_records"]:
                finish(record, requests)
        if not (engine.has_unfinished_requests() or added < len(requests)):
            break
    if engine.is_suspended:
        engine.resume()
    return {"times": times, "graphs": dict(graph_counts), "attempts": attempts}


def finish(record: Any, requests: list[Asked]) -> None:
    """Take the results of a request that has ended."""
    finished = record.merge()
    request = requests[finished.request_id]
    request.state, request.events = "finished", finished.events
    request.prompt_tokens = finished.prompt_tokens.tolist()
    request.prompt_text = finished.prompt
    request.output_tokens, request.output_text = finished.generated_tokens, finished.generated_text
    if finished.sampling_params.return_log_probs:
        if not finished.prompt_log_probs:
            finished.prompt_log_probs = []
        request.log_probs = finished.prompt_log_probs + finished.generated_log_probs


def main(
    argv: list[str], build_model: Callable[[], Any], tokenizer: Any, metrics_writer: Any = None
) -> dict[str, Any]:
    """The whole script. Like NVIDIA's it runs in inference mode, the building of the model too."""
    args = parse_args(argv)
    with torch.inference_mode():
        return _main(args, build_model(), tokenizer, metrics_writer)


def _main(
    args: argparse.Namespace, model: Any, tokenizer: Any, metrics_writer: Any
) -> dict[str, Any]:
    sampling_params = SamplingParams(
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        skip_prompt_log_probs=args.skip_prompt_log_probs,
        return_log_probs=args.return_log_probs,
        num_tokens_to_generate=args.num_tokens_to_generate,
        termination_id=args.termination_id if args.termination_id is not None else tokenizer.eod,
        top_n_logprobs=args.top_n_logprobs,
        stop_words=args.stop_words,
    )
    requests = [Asked(text, tokenizer.tokenize(text), sampling_params) for text in args.prompts]
    try:
        context = build_context(args, model, requests, metrics_writer)
    except ContextOverflowError as error:
        raise SystemExit(str(error)) from error
    wrapped = GPTInferenceWrapper(model, args, context)
    wrapped.model_is_pipeline_parallel = False
    controller = TextGenerationController(wrapped, tokenizer)
    if args.disable_chunked_prefill:
        longest = max(len(request.prompt_tokens) for request in requests)
        assert longest <= context.max_tokens, "a prompt is longer than context.max_tokens"
    engine = DynamicInferenceEngine(
        controller,
        context,
        enable_cuda_graph=args.cuda_graph_impl == "local",
        random_seed=args.seed,
        track_paused_request_events=args.inference_dynamic_batching_track_paused_request_events,
        enable_chunked_prefill=not args.disable_chunked_prefill,
        inference_logging_step_interval=args.inference_logging_step_interval,
    )
    setup = describe(args, context)
    throughputs = []
    for _ in range(args.inference_repeat_n):
        engine.reset()
        started = time.perf_counter()
        result = run(args, requests, engine)
        tokens = sum(len(request.output_tokens) for request in requests)
        throughputs.append(tokens / (time.perf_counter() - started))
    assert all(request.state == "finished" for request in requests)
    capture = f"{engine.capture_stats['time']:.2f} sec" if engine.capture_stats else "--"
    return {
        "setup": setup,
        "requests": requests,
        "step_count": engine.step_count,
        "capture": capture,
        "throughputs": throughputs,
        "json": json.dumps([vars(r) | {"sampling_params": None, "events": None} for r in requests]),
        "engine": engine,
        **result,
    }
