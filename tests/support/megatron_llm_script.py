"""A script as a user of core_v0.19 writes it: ``MegatronLLM``, ``MegatronAsyncLLM`` and a dynamic
engine with an ``InferenceConfig``, with the imports changed and nothing else.

In a script for megatron-core the imports read::

    from megatron.core.inference.apis import MegatronAsyncLLM, MegatronLLM
    from megatron.core.inference.config import AsyncScheduleMode, InferenceConfig
    ...
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable
from typing import Any

from megatron_async.megatron_api import (
    AsyncScheduleMode,
    DynamicInferenceContext,
    DynamicInferenceEngine,
    GPTInferenceWrapper,
    InferenceConfig,
    KVCacheManagementMode,
    MegatronAsyncLLM,
    MegatronLLM,
    SamplingParams,
    TextGenerationController,
)


def parse_args(argv: list[str]) -> argparse.Namespace:
    """As Megatron's own parser names them."""
    parser = argparse.ArgumentParser()
    add = parser.add_argument
    add("--prompts", nargs="+", required=True)
    add("--num-tokens-to-generate", type=int, default=30)
    add("--return-log-probs", action="store_true")
    add("--top_k", type=int, default=1)
    add("--top-n-logprobs", type=int, default=0)
    add("--stop-words", nargs="+")
    add("--api", choices=("engine", "llm", "coordinator", "async"), default="llm")
    add("--inference-dynamic-batching-async-sched-mode", default="async")
    add("--inference-dynamic-batching-logprobs-mode", default="raw_logprobs")
    add("--inference-dynamic-batching-sampling-backend", default="torch")
    add("--inference-dynamic-batching-block-size", type=int, default=16)
    add("--inference-dynamic-batching-buffer-size-gb", type=float, default=0.001)
    add("--inference-dynamic-batching-max-requests", type=int, default=3)
    add("--num-speculative-tokens", type=int, default=0)
    add("--inference-repeat-n", type=int, default=1)
    return parser.parse_args(argv)


def config_of(args: argparse.Namespace) -> InferenceConfig:
    """What the arguments say of an engine."""
    return InferenceConfig(
        block_size_tokens=args.inference_dynamic_batching_block_size,
        buffer_size_gb=args.inference_dynamic_batching_buffer_size_gb,
        max_requests=args.inference_dynamic_batching_max_requests,
        max_sequence_length=96,
        kv_cache_management_mode=KVCacheManagementMode.PERSIST,
        num_cuda_graphs=None,
        materialize_only_last_token_logits=not args.return_log_probs,
        enable_chunked_prefill=False,
        num_speculative_tokens=args.num_speculative_tokens,
        sampling_backend=args.inference_dynamic_batching_sampling_backend,
        async_sched_mode=AsyncScheduleMode(args.inference_dynamic_batching_async_sched_mode),
        logprobs_mode=args.inference_dynamic_batching_logprobs_mode,
    )


def by_engine(model: Any, tokenizer: Any, config: Any, prompts: list[str], params: Any) -> Any:
    """The loop of Megatron's dynamic example."""
    context = DynamicInferenceContext(model.config, config)
    wrapped = GPTInferenceWrapper(model, context)
    engine = DynamicInferenceEngine(TextGenerationController(wrapped, tokenizer), context)
    for number, prompt in enumerate(prompts):
        assert not context.max_tokens or len(prompt) <= context.max_tokens
        engine.add_request(number, prompt, params)
    finished: dict[int, Any] = {}
    while engine.has_unfinished_requests():
        result = engine.step_modern()
        for record in result["finished_request_records"]:
            request = record.merge()
            finished[request.request_id] = request
    assert engine.context.step_count > 0
    return [finished[number] for number in range(len(prompts))]


def by_llm(
    model: Any, tokenizer: Any, config: Any, prompts: list[str], params: Any, args: Any
) -> Any:
    """The loop of Megatron's offline example, synchronous."""
    with MegatronLLM(
        model=model,
        tokenizer=tokenizer,
        inference_config=config,
        use_coordinator=args.api == "coordinator",
        coordinator_host=None,
        coordinator_port=None,
    ) as llm:
        assert llm.is_primary_rank and max(map(len, prompts)) <= llm.context.max_tokens
        results = []
        for trial in range(args.inference_repeat_n):
            if trial > 0:
                llm.engine.reset()
            results = llm.generate(prompts, params)
        assert llm.engine.context.lifetime_prefill_token_count > 0
        assert llm.engine.context.async_sched_compaction_step_count == 0
        assert llm.engine.context.async_sched_step_count >= 0
        return results


async def by_async_llm(
    model: Any, tokenizer: Any, config: Any, prompts: list[str], params: Any
) -> Any:
    """The same with ``MegatronAsyncLLM``."""
    async with MegatronAsyncLLM(
        model=model, tokenizer=tokenizer, inference_config=config, use_coordinator=True
    ) as llm:
        one = await llm.generate(prompts[0], params)
        await llm.pause()
        await llm.unpause()
        rest = await llm.generate(prompts[1:], params)
        return [one, *rest]


def main(argv: list[str], get_model: Callable[[], Any], tokenizer: Any) -> list[Any]:
    """The requests in the order of the prompts."""
    args = parse_args(argv)
    params = SamplingParams(
        temperature=1.0,
        top_k=args.top_k,
        top_p=0.0,
        skip_prompt_log_probs=False,
        return_log_probs=args.return_log_probs,
        num_tokens_to_generate=args.num_tokens_to_generate,
        termination_id=tokenizer.eod,
        top_n_logprobs=args.top_n_logprobs,
        stop_words=args.stop_words,
        detokenize_stop_sequence=bool(args.stop_words),
        return_prompt_tokens=True,
    )
    given = get_model(), tokenizer, config_of(args), args.prompts, params
    if args.api == "engine":
        return list(by_engine(*given))
    if args.api == "async":
        return list(asyncio.run(by_async_llm(*given)))
    return list(by_llm(*given, args))
