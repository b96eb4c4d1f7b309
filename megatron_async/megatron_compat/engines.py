"""megatron-core's own dynamic engine over a model, as each release builds it.

0.16 takes keywords where later releases take an ``InferenceConfig``; asynchronous scheduling came
with 0.19.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import types
from collections.abc import Sequence
from typing import Any

from megatron.core.inference.contexts.dynamic_context import DynamicInferenceContext
from megatron.core.inference.engines import DynamicInferenceEngine
from megatron.core.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import (
    GPTInferenceWrapper,
)
from megatron.core.inference.sampling_params import SamplingParams
from megatron.core.inference.text_generation_controllers.text_generation_controller import (
    TextGenerationController,
)

from megatron_async.megatron_compat.release import installed

__all__ = [
    "MODES",
    "config_options",
    "greedy",
    "leave_inference",
    "megatron_engine",
    "tokens_of",
]

MODES: tuple[str, ...] = ("legacy", "async") if installed().since(19) else ("legacy",)
"""How its engine may schedule."""


def config_options() -> dict[str, Any]:
    """Fields of a ``TransformerConfig`` with which its engine captures a decode step as few graphs
    as it can."""
    from megatron.core.transformer import enums

    scope = getattr(enums, "InferenceCudaGraphScope", None)
    if scope is not None:
        return {"cuda_graph_impl": "local", "inference_cuda_graph_scope": scope.block}
    full = [enums.CudaGraphScope.full_iteration]
    return {"cuda_graph_impl": "local", "cuda_graph_scope": full}


def greedy(count: int) -> Any:
    """Its parameters of a request for exactly ``count`` tokens."""
    return SamplingParams(num_tokens_to_generate=count, termination_id=-1, top_k=1)


def megatron_engine(
    model: Any, mode: str, *, max_requests: int, max_tokens: int, max_sequence_length: int
) -> Any:
    """Its engine over one of its models, with room for ``max_requests`` of the longest sequences.

    Args:
        mode: one of :data:`MODES`.
        max_tokens: most tokens of a step: enough to prefill what comes at once.
    """
    config = model.config
    block = 256
    blocks = max_requests * -(-max_sequence_length // block) + 2
    heads = config.num_query_groups or config.num_attention_heads
    size = 2 * config.num_layers * heads * config.kv_channels * config.params_dtype.itemsize
    shared: dict[str, Any] = {
        "max_sequence_length": max_sequence_length,
        "buffer_size_gb": (blocks + 0.5) * block * size / 2**30,
        "block_size_tokens": block,
        "max_requests": max_requests,
        "max_tokens": max_tokens,
        "num_cuda_graphs": None if config.cuda_graph_impl == "none" else 1,
        "use_cuda_graphs_for_non_decode_steps": False,
        "use_flashinfer_fused_rope": importlib.util.find_spec("flashinfer") is not None,
    }
    tokenizer = types.SimpleNamespace(
        vocab_size=model.vocab_size, eod=-1, bos=None, detokenize=lambda tokens: ""
    )
    if installed().since(17):
        context, wrapper = _with_config(model, mode, shared)
        controller = TextGenerationController(wrapper, tokenizer)
        return DynamicInferenceEngine(controller, context)
    context, wrapper = _with_keywords(model, shared, heads)
    controller = TextGenerationController(wrapper, tokenizer)
    captures = config.cuda_graph_impl != "none"
    return DynamicInferenceEngine(controller, context, enable_cuda_graph=captures, random_seed=0)


def _with_config(model: Any, mode: str, shared: dict[str, Any]) -> tuple[Any, Any]:
    from megatron.core.inference import config as configs

    fields = {field.name for field in dataclasses.fields(configs.InferenceConfig)}
    if "async_sched_mode" in fields:
        shared["async_sched_mode"] = configs.AsyncScheduleMode(mode)
        if mode == "async":  # the other one waits for the device in each step
            shared["sampling_backend"] = "flashinfer"
    made = configs.InferenceConfig(**shared)
    context = DynamicInferenceContext(model.config, made)
    wrapper = GPTInferenceWrapper(model, context)
    wrapper.model_is_pipeline_parallel = False
    return context, wrapper


def _with_keywords(model: Any, shared: dict[str, Any], heads: int) -> tuple[Any, Any]:
    from megatron.core.inference.model_inference_wrappers import inference_wrapper_config as module

    config = model.config
    context = DynamicInferenceContext(
        params_dtype=config.params_dtype,
        num_layers=config.num_layers,
        kv_channels=config.kv_channels,
        num_attention_heads=heads,
        **shared,
    )
    wrapper_config = module.InferenceWrapperConfig(
        hidden_size=config.hidden_size,
        params_dtype=config.params_dtype,
        inference_batch_times_seqlen_threshold=-1,
        padded_vocab_size=model.vocab_size,
        inference_max_requests=shared["max_requests"],
        inference_max_seq_length=shared["max_sequence_length"],
    )
    wrapper = GPTInferenceWrapper(model, wrapper_config, context)
    wrapper.model_is_pipeline_parallel = False
    return context, wrapper


def leave_inference(model: Any) -> None:
    """Take back what its engine sets for the whole process, since 0.18, and the graphs that it has
    captured: each holds the context of the engine that it was captured for."""
    from megatron.core.inference import utils
    from megatron.core.transformer import cuda_graphs

    for module in model.modules():
        if isinstance(getattr(module, "cudagraph_manager", None), cuda_graphs.CudaGraphManager):
            make = getattr(module, "create_mcore_cudagraph_manager", None)
            if make is None:
                module.cudagraph_manager = cuda_graphs.CudaGraphManager(module.config)
            else:
                make(module.config)
    if hasattr(cuda_graphs, "delete_cuda_graphs"):
        cuda_graphs.delete_cuda_graphs()
    mode = getattr(utils, "InferenceMode", None)
    if mode is not None:
        mode.unset_active()


def tokens_of(records: Sequence[Any]) -> dict[int, list[int]]:
    """The generated tokens of finished records, by the number of the request."""
    merged = [record.merge() for record in records]
    return {request.request_id: list(request.generated_tokens) for request in merged}
