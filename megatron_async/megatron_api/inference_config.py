"""megatron-core's ``InferenceConfig``, of its main branch, and what it means for an engine."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from megatron_async.config.engine_config import RECURRENT_STATE_DTYPES
from megatron_async.errors import ConfigError, shown
from megatron_async.megatron_api.main_tables import INFERENCE_CONFIG
from megatron_async.megatron_api.names import check_keywords
from megatron_async.sampling_params import LOG_PROBS_MODES

logger = logging.getLogger(__name__)


class AsyncScheduleMode(str, Enum):
    """Whether a step is launched before the last one is committed."""

    LEGACY = "legacy"
    ASYNC = "async"


class KVCacheManagementMode(str, Enum):
    """What becomes of the KV cache while an engine is suspended."""

    PERSIST = "persist"
    OFFLOAD = "offload"
    RECOMPUTE = "recompute"


class PrefixCachingEvictionPolicy(str, Enum):
    """Accepted without effect: the least recently released block goes first."""

    REF_ZERO = "ref_zero"
    LRU = "lru"


class PrefixCachingCoordinatorPolicy(str, Enum):
    """Accepted without effect: one engine serves all requests."""

    LONGEST_PREFIX = "longest_prefix"
    FIRST_PREFIX_BLOCK = "first_prefix_block"
    LOAD_BALANCED = "load_balanced"


class CudaGraphSizingDistribution(str, Enum):
    """Accepted without effect: graphs are captured for all row buckets."""

    EXPONENTIAL = "exponential"
    LINEAR = "linear"


_WISHES: dict[str, tuple[Any, ...]] = {
    "use_flashinfer_fused_rope": (None, False),
    "sampling_backend": (None, "torch"),
    "use_synchronous_zmq_collectives": (None, False),
    "mamba_memory_ratio": (None,),
    "prefix_caching_mamba_gb": (None,),
    "track_generated_token_events": (None, False),
}
"""Fields without effect that a warning names, with the values that ask for nothing."""

_CHOICES: dict[str, type[Enum]] = {
    "async_sched_mode": AsyncScheduleMode,
    "kv_cache_management_mode": KVCacheManagementMode,
}


@dataclass
class InferenceConfig:
    """How a model is served, with the fields and defaults of megatron-core's main branch.
    ``docs/megatron.md`` says what each does here.

    Raises:
        ConfigError: a field has a value that would have an effect that there is none of.
    """

    block_size_tokens: int = 256
    buffer_size_gb: float = 20
    paused_buffer_size_gb: float | None = None
    mamba_inference_state_config: Any = None
    mamba_memory_ratio: float | None = None
    max_requests: int | None = None
    max_tokens: int | None = None
    unified_memory_level: int = 0
    kv_cache_management_mode: KVCacheManagementMode | str = KVCacheManagementMode.PERSIST
    num_cuda_graphs: int | None = None
    cuda_graph_mixed_prefill_count: int | None = 16
    cuda_graph_sizing_distribution: Any = CudaGraphSizingDistribution.EXPONENTIAL
    use_cuda_graphs_for_non_decode_steps: bool = True
    cuda_graph_all_prefills: bool = False
    cuda_graph_max_tokens: int = 512
    static_kv_memory_pointers: bool = False
    max_sequence_length: int = 2560
    pg_collection: Any = None
    image_preprocessing_config: Any = None
    use_flashinfer_fused_rope: bool | None = False
    materialize_only_last_token_logits: bool = True
    enable_chunked_prefill: bool = False
    num_speculative_tokens: int = 0
    enable_prefix_caching: bool = False
    prefix_caching_eviction_policy: Any = PrefixCachingEvictionPolicy.REF_ZERO
    prefix_caching_coordinator_policy: Any = PrefixCachingCoordinatorPolicy.LOAD_BALANCED
    prefix_caching_routing_alpha: float = 0.5
    prefix_caching_mamba_gb: float | None = None
    track_paused_request_events: bool = False
    track_generated_token_events: bool = False
    metrics_writer: Any = None
    logging_step_interval: int = 0
    sampling_backend: str = "torch"
    offset_sampling_seed_by_dp_rank: bool = True
    async_sched_mode: AsyncScheduleMode | str = AsyncScheduleMode.ASYNC
    logprobs_mode: str = "raw_logprobs"
    request_metadata_types: Any = None
    use_synchronous_zmq_collectives: bool = False
    disable_ep_consensus: bool = False
    ep_consensus_interval: int = 20
    verbose: dataclasses.InitVar[bool] = False

    def __post_init__(self, verbose: bool) -> None:
        _warn_of_wishes(_settings(self))


def _warn_of_wishes(values: Mapping[str, Any]) -> None:
    """Name the fields that ask for something and have no effect."""
    for name, neutral in _WISHES.items():
        value = values.get(name)
        if value not in neutral:
            said = value.value if isinstance(value, Enum) else value
            note = INFERENCE_CONFIG[name].note.partition(";")[0]
            logger.warning("%s=%s has no effect: %s", name, shown(said), note)


def _settings(config: Any) -> dict[str, Any]:
    """All fields of an ``InferenceConfig``, ours or megatron-core's own, checked.

    Raises:
        ConfigError: a field is unknown or cannot be served.
    """
    if not dataclasses.is_dataclass(config) or isinstance(config, type):
        raise ConfigError(f"inference_config is a {type(config).__name__}; give an InferenceConfig")
    values = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    check_keywords("InferenceConfig", INFERENCE_CONFIG, values)
    for name, choices in _CHOICES.items():
        values[name] = _choice(name, values.get(name, next(iter(choices))), choices)
    mode = values.get("logprobs_mode", "raw_logprobs")
    if mode not in LOG_PROBS_MODES:
        known = " or ".join(LOG_PROBS_MODES)
        raise ConfigError(f"logprobs_mode={shown(mode)} must be {known}")
    return values


def _choice(name: str, value: Any, choices: type[Enum]) -> str:
    text = value.value if isinstance(value, Enum) else value
    known = [str(each.value) for each in choices]
    if text not in known:
        raise ConfigError(f"{name}={shown(value)} must be {' or '.join(known)}")
    return str(text)


ATTENTION_LETTERS = "*+"
"""Layers of a hybrid model that keep keys and values."""

_OF_CONTEXT = (
    "block_size_tokens",
    "buffer_size_gb",
    "max_requests",
    "max_sequence_length",
    "max_tokens",
    "metrics_writer",
    "num_cuda_graphs",
    "num_speculative_tokens",
    "paused_buffer_size_gb",
    "use_cuda_graphs_for_non_decode_steps",
)


def attention_layers(kinds: Iterable[str]) -> int:
    """How many layers of a hybrid model keep keys and values. A cache has at least one, also of a
    model whose layers are all recurrent."""
    return max(sum(kind in ATTENTION_LETTERS for kind in kinds), 1)


def context_keywords(model_config: Any, config: Any) -> dict[str, Any]:
    """The keywords of a context for a model with this ``TransformerConfig``."""
    values = _settings(config)
    if not isinstance(config, InferenceConfig):  # ours has said it
        _warn_of_wishes(values)
    keywords = {name: values[name] for name in _OF_CONTEXT}
    heads = getattr(model_config, "num_query_groups", None) or model_config.num_attention_heads
    predicting = getattr(model_config, "mtp_num_layers", None) or 0
    kinds = getattr(values["mamba_inference_state_config"], "layer_type_list", None)
    attending = _layers_of_stage(model_config, values["pg_collection"])
    if kinds is not None:
        attending = attention_layers(kinds)
    keywords |= {
        "pg_collection": values["pg_collection"],
        "params_dtype": model_config.params_dtype,
        "num_layers": attending + predicting,
        "kv_channels": model_config.kv_channels,
        "num_attention_heads": heads,
    }
    if getattr(model_config, "multi_latent_attention", False):
        names = ("kv_lora_rank", "qk_pos_emb_head_dim")
        keywords |= {name: getattr(model_config, name) for name in names}
        keywords["cache_mla_latent"] = True
    return keywords


def _layers_of_stage(model_config: Any, collection: Any) -> int:
    """Decoder layers of this process."""
    count: int = model_config.num_layers
    if getattr(model_config, "pipeline_model_parallel_size", 1) == 1:
        return count
    from megatron.core.transformer.transformer_block import get_num_layers_to_build

    stage = None if collection is None else collection.pp.rank()
    count = get_num_layers_to_build(model_config, pp_rank=stage)
    return count


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What an ``InferenceConfig`` says to an engine. Fields have ``EngineConfig``'s names."""

    inference_async_scheduling: bool = False
    enable_prefix_caching: bool = True
    track_paused_request_events: bool = False
    inference_logging_step_interval: int = 0
    enable_chunked_prefill: bool = True
    num_speculative_tokens: int = 0
    log_probs_mode: str | None = None
    recurrent_state_dtype: str | None = None
    offsets_seed: bool = False
    """Each data-parallel replica has a seed of its own."""
    recomputes: bool = False
    """Running requests are computed again after the engine was suspended."""


def _state_dtype(states: Any) -> str | None:
    """The dtype of recurrent layers' sums, where a ``MambaInferenceStateConfig`` says one."""
    dtype = getattr(states, "ssm_states_dtype", None)
    if dtype is None:
        return None
    name = str(dtype).removeprefix("torch.")
    if name not in RECURRENT_STATE_DTYPES:
        names = " or ".join(RECURRENT_STATE_DTYPES)
        raise ConfigError(f"ssm_states_dtype={name} is not supported: use {names}")
    return name


def engine_settings(config: Any) -> EngineSettings:
    """What ``config`` says; of None the engine's own defaults."""
    if config is None:
        return EngineSettings()
    values = _settings(config)
    return EngineSettings(
        inference_async_scheduling=values["async_sched_mode"] == AsyncScheduleMode.ASYNC.value,
        enable_prefix_caching=bool(values["enable_prefix_caching"]),
        track_paused_request_events=bool(values["track_paused_request_events"]),
        inference_logging_step_interval=values["logging_step_interval"],
        enable_chunked_prefill=bool(values["enable_chunked_prefill"]),
        num_speculative_tokens=values["num_speculative_tokens"],
        log_probs_mode=LOG_PROBS_MODES[values["logprobs_mode"]],
        recurrent_state_dtype=_state_dtype(values.get("mamba_inference_state_config")),
        offsets_seed=bool(values.get("offset_sampling_seed_by_dp_rank", True)),
        recomputes=values["kv_cache_management_mode"] == KVCacheManagementMode.RECOMPUTE.value,
    )
