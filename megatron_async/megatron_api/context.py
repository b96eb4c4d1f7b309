"""megatron-core's inference context over ours: of core_v0.16, and of later releases."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from megatron_async.build.spec import CHUNKS_AT_ONCE
from megatron_async.config.engine_config import (
    DEFAULT_BLOCK_SIZE_TOKENS,
    MAX_COUNT,
    EngineConfig,
    check_buffer_size,
    check_integer,
)
from megatron_async.errors import ConfigError, shown
from megatron_async.megatron_api.inference_config import context_keywords
from megatron_async.megatron_api.model import outside_inference_mode
from megatron_async.megatron_api.names import check_keywords, no_attribute
from megatron_async.megatron_api.spmd.place import keywords_of_rank
from megatron_async.megatron_api.tables import CONTEXT, CONTEXT_ATTRIBUTES
from megatron_async.models.description.kv_cache_spec import KVCacheSpec
from megatron_async.ranks.replica import several
from megatron_async.runner.cuda_graphs import row_buckets
from megatron_async.runner.memory.cache_sizes import CacheSizes
from megatron_async.runner.memory.forward_batch import ForwardBatch
from megatron_async.runner.memory.kv_cache import KVCache

MAX_DERIVED_REQUESTS = 256
"""Rows that ``max_requests=None`` comes to at most, as many as vLLM runs by default."""

_OWN = frozenset(
    {
        "cache_mla_latent",
        "params_dtype",
        "num_layers",
        "kv_channels",
        "num_attention_heads",
        "max_sequence_length",
        "buffer_size_gb",
        "paused_buffer_size_gb",
        "block_size_tokens",
        "block_count",
        "slot_count",
        "device",
        "batch_invariant",
        "num_speculative_tokens",
        "further_token_bytes",
    }
)
"""Keywords that go to our cache as they are."""


_REQUIRED = (
    "params_dtype",
    "num_layers",
    "kv_channels",
    "num_attention_heads",
    "max_sequence_length",
)


class Usage(NamedTuple):
    """What an engine has in a context's cache now, and its steps until now."""

    blocks: int = 0
    paused_blocks: int = 0
    running_requests: int = 0
    paused_requests: int = 0
    waiting_requests: int = 0
    steps: int = 0
    overlapped_steps: int = 0
    prefilled_tokens: int = 0
    step_tokens: int = 0
    """Tokens of the last step that was launched."""
    caches_prefixes: bool = False


class DynamicInferenceContext(ForwardBatch):
    """KV cache and slots, with megatron-core's keywords. ``docs/megatron.md`` has them all.

    Either with the keywords of core_v0.16, or with ``model_config`` (a megatron-core
    ``TransformerConfig``) and ``inference_config`` (an
    :class:`~megatron_async.megatron_api.inference_config.InferenceConfig`, megatron-core's own
    too), as since 0.17. The keywords of the class that this one is derived from
    (``block_count``, ``slot_count``, ``device``, ...) are taken as well.

    Raises:
        ConfigError: a keyword is unknown, has a value that would have an effect that there is none
            of, or is out of range.
        CacheTooLargeError: cache and slots do not fit into the device's memory.
    """

    DEFAULT_MAX_TOKENS = 16384

    def __init__(
        self, model_config: Any = None, inference_config: Any = None, **keywords: Any
    ) -> None:
        if (model_config is None) != (inference_config is None):
            raise ConfigError("model_config and inference_config belong together; give both")
        if model_config is not None:
            keywords = context_keywords(model_config, inference_config) | keywords
        keywords = _of_latents(keywords_of_rank(keywords))
        known = {name: keywords[name] for name in keywords if name not in _OWN}
        check_keywords("DynamicInferenceContext", CONTEXT, known)
        self._usage: Callable[[], Usage] = Usage
        self.inference_config = inference_config
        self.pg_collection = keywords.get("pg_collection")
        groups = several(self.pg_collection)
        self.pipeline_parallel_group, self.expert_model_parallel_group = groups
        self.metrics_writer = keywords.get("metrics_writer")
        self.use_cuda_graphs_for_non_decode_steps = bool(
            keywords.get("use_cuda_graphs_for_non_decode_steps", True)
        )
        own = {name: value for name, value in keywords.items() if name in _OWN}
        own["num_cuda_graphs"] = _num_cuda_graphs(keywords.get("num_cuda_graphs"))
        own["max_requests"] = _max_requests(keywords)
        own["max_tokens"] = _max_tokens(keywords, own["max_requests"])
        missing = [name for name in _REQUIRED if name not in own]
        if missing:
            raise ConfigError(f"DynamicInferenceContext needs {', '.join(missing)}")
        with outside_inference_mode():
            super().__init__(_cache(**own))
        self.config = inference_config
        sizes = self.cache.sizes
        self.params_dtype = self.cache.spec.dtype
        self.max_requests, self.max_tokens = sizes.max_requests, sizes.max_tokens
        self.num_cuda_graphs = sizes.num_cuda_graphs
        self.block_count, self.paused_block_count = sizes.block_count, sizes.paused_block_count
        self.block_size_bytes = self.cache.block_size_bytes
        self.max_blocks_per_request = sizes.max_blocks_per_request
        layers, tensors, _, _, heads, size = self.kv_cache.shape
        self.num_attention_layers = layers
        self.num_attention_heads_per_partition = heads
        self.hidden_size_per_attention_head = size
        self.max_kv_block_count = self.max_blocks_per_request
        self.block_allocator = BlockAllocator(self)
        self.kv_block_allocator = self.block_allocator
        self.unified_memory_level = 0
        self.persist_cuda_graphs = True
        self.offload_kv_cache = False
        self.cache_mla_latent = tensors == 1
        self.kv_reduced_dim = size if self.cache_mla_latent else None
        self.async_sched_compaction_step_count = 0
        self.use_flashinfer_fused_rope = False
        self.request_metadata_types = None

    def limit_blocks(self, most: int) -> None:
        """No more than ``most`` blocks are used: another rank has no more."""
        super().limit_blocks(most)
        self.block_count = most
        self.block_allocator = self.kv_block_allocator = BlockAllocator(self)

    def serve(self, usage: Callable[[], Usage]) -> None:
        """The engine that has this context says what is in it."""
        self._usage = usage

    @property
    def is_hybrid_model(self) -> bool:
        """Whether an engine keeps recurrent state in it."""
        return self.states is not None

    @property
    def usage(self) -> Usage:
        """What is in the cache now."""
        return self._usage()

    @property
    def memory_buffer(self) -> Any:
        """The KV cache: [layers, key or value, blocks, tokens, heads, head dimension]."""
        return self.kv_cache

    @property
    def cuda_graph_token_counts(self) -> list[int]:
        """The row buckets of decode steps, captured on a GPU."""
        captures = self.device.type == "cuda"
        return row_buckets(self.max_requests, captures=captures, count=self.num_cuda_graphs)

    @property
    def cuda_graph_batch_dimensions_list(self) -> list[int]:
        """The same as ``cuda_graph_token_counts``."""
        return self.cuda_graph_token_counts

    @property
    def total_request_count(self) -> int:
        """Requests with a slot."""
        return self.usage.running_requests + self.usage.paused_requests

    @property
    def paused_request_count(self) -> int:
        """Requests that wait for a block, or that their user has paused."""
        return self.usage.paused_requests

    @property
    def step_count(self) -> int:
        """Steps launched since the engine was built or reset."""
        return self.usage.steps

    @property
    def async_sched_step_count(self) -> int:
        """Steps committed since then behind which another one was in flight."""
        return self.usage.overlapped_steps

    @property
    def lifetime_prefill_token_count(self) -> int:
        """Prompt tokens computed since the engine was built, again after evictions too."""
        return self.usage.prefilled_tokens

    @property
    def enable_prefix_caching(self) -> bool:
        """Whether requests share the blocks of common prefixes."""
        return self.usage.caches_prefixes

    def reset(self) -> None:
        """Forget all slots; nothing may be in flight."""
        self.cache.reset()

    def get_active_request_count(self) -> int:
        """Requests that run."""
        return self.usage.running_requests

    def has_unfinished_requests(self) -> bool:
        """Whether a request has a slot."""
        return self.total_request_count > 0

    def get_kvcache_utilization_stats(self) -> dict[str, int | float]:
        """Counts of blocks and requests; shares lie between 0 and 1."""
        usage = self.usage
        return {
            "total_blocks": self.block_count,
            "allocated_blocks": usage.blocks,
            "active_unique_blocks": usage.blocks - usage.paused_blocks,
            "allocated_utilization": usage.blocks / self.block_count,
            "active_utilization": (usage.blocks - usage.paused_blocks) / self.block_count,
            "active_request_count": usage.running_requests,
            "paused_request_count": usage.paused_requests,
            "waiting_request_count": usage.waiting_requests,
            "block_count_avail": self.block_count - usage.blocks,
            "active_token_count": usage.step_tokens,
            "total_request_count": self.total_request_count,
            "max_requests": self.max_requests,
        }

    def __getattr__(self, name: str) -> Any:
        raise no_attribute(self, name, CONTEXT_ATTRIBUTES)


class LoadedContext:
    """The names of a context for the cache of an engine that was loaded by path."""

    def __init__(self, batch: ForwardBatch) -> None:
        self._batch = batch

    def __getattr__(self, name: str) -> Any:
        cache = self._batch.cache
        for owner in (self._batch, cache, cache.sizes, cache.slots, cache.spec):
            if hasattr(owner, name):
                return getattr(owner, name)
        raise no_attribute(self, name, CONTEXT_ATTRIBUTES)


class BlockAllocator:
    """Counts of a context's blocks, with megatron-core's names. ``total_count`` counts the null
    block too, which is ``dummy_block_idx``."""

    def __init__(self, context: DynamicInferenceContext) -> None:
        self._context = context
        self.total_count = self.pool_size = context.block_count + 1
        self.paused_count = context.paused_block_count or 0
        self.active_count = max(context.block_count - self.paused_count, 0)
        self.dummy_block_idx = context.block_count

    @property
    def total_avail(self) -> int:
        """Blocks that nobody holds."""
        return self._context.block_count - self.get_total_used()

    def get_total_used(self) -> int:
        """Blocks that requests hold."""
        return self._context.usage.blocks

    def get_active_used(self) -> int:
        """Blocks that running requests hold."""
        usage = self._context.usage
        return usage.blocks - usage.paused_blocks

    def get_paused_used(self) -> int:
        """Blocks that requests hold which wait for a block, or were paused."""
        return self._context.usage.paused_blocks

    def get_active_avail(self) -> int:
        """Return how many of the ``active_count`` blocks no running request holds."""
        return self.active_count - self.get_active_used()

    def get_paused_avail(self) -> int:
        """Return how many of the ``paused_count`` blocks no paused request holds."""
        return self.paused_count - self.get_paused_used()

    def is_memory_available(self, num_blocks: int) -> bool:
        """Whether ``num_blocks`` blocks are free."""
        return self.total_avail >= num_blocks

    def __str__(self) -> str:
        return (
            f"using: total {self.get_total_used()}/{self.total_count - 1}; "
            f"active {self.get_active_used()}/{self.active_count}; "
            f"paused {self.get_paused_used()}/{self.paused_count}"
        )


def _cache(
    *,
    params_dtype: torch.dtype,
    num_layers: int,
    kv_channels: int,
    num_attention_heads: int,
    device: torch.device | str | None = None,
    further_token_bytes: int = 0,
    cache_mla_latent: bool = False,
    **sizes: Any,
) -> KVCache:
    spec = KVCacheSpec(
        num_layers=num_layers,
        num_kv_heads=num_attention_heads,
        head_dim=kv_channels,
        dtype=params_dtype,
        latent_rank=0 if cache_mla_latent else None,
    )
    made = CacheSizes.of(spec.token_bytes + further_token_bytes, **sizes)
    return KVCache(made, spec, device, further_token_bytes=further_token_bytes)


def _num_cuda_graphs(count: Any) -> int | None:
    """The number that is given; None and -1 are all."""
    if count is None or (count == -1 and not isinstance(count, bool)):
        return None
    try:
        return check_integer("num_cuda_graphs", count, 1)
    except ConfigError as error:
        said = "; None and -1 capture all, and enable_cuda_graph=False of the engine none"
        raise ConfigError(f"{error}{said}") from None


def _of_latents(keywords: dict[str, Any]) -> dict[str, Any]:
    """With ``cache_mla_latent`` the sizes of a latent, which all heads share, are those of the
    cache."""
    has = keywords.get("cache_mla_latent")
    if has is None:
        return {name: value for name, value in keywords.items() if name != "cache_mla_latent"}
    if not isinstance(has, bool):
        raise ConfigError(f"cache_mla_latent={shown(has)} must be True or False")
    if not has:
        return keywords
    names = ("kv_lora_rank", "qk_pos_emb_head_dim")
    sizes = [check_integer(name, keywords.get(name), 1, MAX_COUNT) for name in names]
    return keywords | {"kv_channels": sum(sizes), "num_attention_heads": 1}


def _max_requests(keywords: dict[str, Any]) -> Any:
    """The number that is given, or one for each block that the cache will have."""
    if keywords.get("max_requests") is not None:
        return keywords["max_requests"]
    names = ("num_layers", "num_attention_heads", "kv_channels", "params_dtype", "buffer_size_gb")
    if keywords.get("block_count") is not None:
        blocks = keywords["block_count"]
    elif any(keywords.get(name) is None for name in names):
        return 1  # the context says what is missing
    elif not isinstance(keywords["params_dtype"], torch.dtype):
        raise ConfigError(f"params_dtype={shown(keywords['params_dtype'])} must be a torch.dtype")
    else:
        check_buffer_size(keywords["buffer_size_gb"])
        for name in names[:3]:
            check_integer(name, keywords[name], 1, MAX_COUNT)
        tensors = 1 if keywords.get("cache_mla_latent") else 2
        token_bytes = tensors * keywords["params_dtype"].itemsize
        for name in names[:3]:
            token_bytes *= keywords[name]
        size = keywords.get("block_size_tokens", DEFAULT_BLOCK_SIZE_TOKENS)
        size = check_integer("block_size_tokens", size, 1, MAX_COUNT)
        blocks = int(keywords["buffer_size_gb"] * 2**30) // max(token_bytes * size, 1) - 1
    return max(1, min(blocks, MAX_DERIVED_REQUESTS))


def _max_tokens(keywords: dict[str, Any], max_requests: Any) -> Any:
    """What is given, or room for some chunks next to full decode rows, as engines have it."""
    if keywords.get("max_tokens") is not None:
        return keywords["max_tokens"]
    length = keywords.get("max_sequence_length")
    if not isinstance(length, int) or not isinstance(max_requests, int):
        return None  # the context says what is wrong
    window = 1 + (keywords.get("num_speculative_tokens") or 0)
    return max_requests * window + CHUNKS_AT_ONCE * min(EngineConfig().prefill_chunk_tokens, length)
