"""What an engine is built from, as data: made once on rank 0, with every error of a configuration,
and sent to the other ranks as it is."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from megatron_async.build.sizes import (
    automata_bytes_of,
    beside_steps,
    cached_tokens,
    sizes_of,
    snapshot_count_of,
)
from megatron_async.config.engine_config import EngineConfig, check_config, draft_windows
from megatron_async.drafting.choose import Drafting, choose_drafting
from megatron_async.errors import ConfigError
from megatron_async.models.description.kv_cache_spec import KVCacheSpec
from megatron_async.models.network import Network
from megatron_async.models.served import ModelDescription, ServedModel
from megatron_async.ranks.layout import Layout, check_supported
from megatron_async.runner.memory.cache_sizes import CacheSizes
from megatron_async.runner.memory.kv_cache import KVCache
from megatron_async.scheduler.limits import Limits

CHUNKS_AT_ONCE = 4
"""Prefill chunks that fit into a forward next to full decode rows, unless its size is given."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """An engine over a model, on all of its ranks.

    Attributes:
        model: rank 0's share of it.
        draft_model: what drafts instead; None without.
        cache: what a token takes in rank 0's KV cache.
        further_token_bytes: what it takes in the cache of a model that drafts.
        snapshot_count: snapshots of recurrent state for the prefix cache.
        automata_bytes: size of the pool of token automata, if requests may be guided by some.
        has_filters_in_extras: the plain S knows no top-k and top-p: on GPUs of which each has some
            columns of the logits.
    """

    config: EngineConfig
    model: ModelDescription
    draft_model: ModelDescription | None
    layout: Layout
    cache: KVCacheSpec
    further_token_bytes: int
    sizes: CacheSizes
    drafting: Drafting
    limits: Limits
    snapshot_count: int
    automata_bytes: int
    has_filters_in_extras: bool

    @classmethod
    def of(
        cls,
        model: ServedModel,
        config: EngineConfig,
        device: str,
        *,
        given: KVCache | None = None,
        enable_chunked_prefill: bool = True,
        free: int | None = None,
    ) -> EngineSpec:
        """The engine that a configuration asks for.

        Args:
            device: "cpu" or "cuda".
            free: bytes of its memory, beside the weights; None is as many as may be needed.
            given: the cache, whose sizes win over the configuration's; None if it is to be made.

        Raises:
            ConfigError: the configuration does not suit the model, the cache or the ranks.
        """
        check_config(config)
        described = ModelDescription.of(model.network, config.recurrent_state_dtype)
        draft = None if model.draft is None else ModelDescription.of(model.draft)
        free = beside_steps(described, config, device, free)
        pool = automata_bytes_of(config, device, free)
        if free is not None and device == "cuda" and has_automata(pool, config, model.network):
            free = max(free - pool, 0)  # it comes with the first request that has a table
        if given is None:
            cache, further = cached_tokens(described, draft, config)
            sizes = sizes_of(described, draft, config, device, free)
        else:
            cache, further, sizes = given.spec, 0, given.sizes
        drafting = choose_drafting(
            described, sizes.num_speculative_tokens, config, has_draft_model=draft is not None
        )
        if draft is not None and draft.state_bytes is not None:
            raise ConfigError(
                "draft_model has recurrent layers, whose state nobody takes back behind wrong "
                "drafts; give one that has attention layers alone, or speculative_method='ngram'"
            )
        snapshots = snapshot_count_of(described, sizes, config, device, free)
        limits = limits_of(
            sizes,
            config,
            described,
            drafting,
            device,
            draft_limit=None if draft is None else draft_limit_of(draft, sizes),
            enable_chunked_prefill=enable_chunked_prefill,
            state_snapshots=None if described.state_bytes is None else snapshots,
        )
        if config.block_size_tokens is None:
            config = replace(config, block_size_tokens=sizes.block_size_tokens)
        layout = layout_of(model, config)
        if config.return_routed_experts:
            from megatron_async.models.moe.routed import routed_layers

            routed_layers(model.network)
        if given is not None:
            _check_suits(given, described, drafting)
        if config.quantization is not None or config.kv_cache_dtype is not None:
            _check_quantized(model, config, described)
        return cls(
            config=config,
            model=described,
            draft_model=draft,
            layout=layout,
            cache=cache,
            further_token_bytes=further,
            sizes=sizes,
            drafting=drafting,
            limits=limits,
            snapshot_count=snapshots,
            automata_bytes=pool,
            has_filters_in_extras=layout.tensor > 1 and device == "cuda",
        )

    @property
    def cache_bytes(self) -> int:
        """What all usable blocks take on rank 0."""
        token_bytes = self.cache.token_bytes + self.further_token_bytes
        return self.sizes.block_count * self.sizes.block_size_tokens * token_bytes

    def repeatable(self, config: EngineConfig) -> EngineConfig:
        """``config`` with the sizes that were chosen here: another machine may have more free."""
        if config.block_count is None and config.buffer_size_gb is None:
            config = replace(config, block_count=self.sizes.block_count)
        if config.state_snapshot_count is None and self.model.state_bytes is not None:
            config = replace(config, state_snapshot_count=self.snapshot_count)
        return replace(config, max_sequence_length=self.sizes.max_sequence_length)


def has_automata(pool: int, config: EngineConfig, network: Network) -> bool:
    """Whether token automata in a pool of ``pool`` bytes may guide requests: of one process."""
    return network.parallel is None and pool > 0 and config.enable_sampling_extras


def layout_of(model: ServedModel, config: EngineConfig) -> Layout:
    """The ranks that a model is spread over.

    Raises:
        ConfigError: the configuration asks for other ones, or for what they do not do.
    """
    asked = Layout.of(config)
    found = Layout() if model.group is None else model.group.layout
    if asked not in (Layout(), found):
        raise ConfigError(
            f"the configuration asks for {asked} and the model is on {found}: load the model with "
            "those sizes"
        )
    check_supported(found, config)
    return found


def check_suits(given: KVCache, model: ServedModel, spec: EngineSpec) -> None:
    """Raises ConfigError unless a cache that another rank than 0 has made suits its share of a
    model."""
    described = ModelDescription.of(model.network, spec.config.recurrent_state_dtype)
    _check_suits(given, described, spec.drafting)


def _check_suits(given: KVCache, model: ModelDescription, drafting: Drafting) -> None:
    """Raises ConfigError unless a cache that was made before suits the model."""
    length, most = given.sizes.max_sequence_length, model.max_sequence_length
    if most is not None and length > most:
        raise ConfigError(
            f"the context's max_sequence_length={length} exceeds the model's {most}; lower it"
        )
    cache, spec = given.spec, model.kv_cache
    if spec is None:
        return
    if drafting.source == "mtp" and cache.num_layers < spec.num_layers:
        raise ConfigError(
            f"the context has num_layers={cache.num_layers} and drafts by multi-token prediction "
            f"need {spec.num_layers}; build it with those, or with num_speculative_tokens=0"
        )
    # Layers of multi-token prediction need room only where they run.
    needed = max(min(cache.num_layers, spec.num_layers), spec.decoder.num_layers)
    for name, has, needs in (
        ("num_layers", cache.num_layers, needed),
        ("num_attention_heads", cache.num_kv_heads, spec.num_kv_heads),
        ("kv_channels", cache.head_dim, spec.head_dim),
        ("cache_mla_latent", cache.latent_rank is not None, spec.latent_rank is not None),
        ("params_dtype", cache.dtype, spec.dtype),
    ):
        if has != needs:
            raise ConfigError(f"the context has {name}={has} and the model needs {needs}")


def _check_quantized(model: ServedModel, config: EngineConfig, described: ModelDescription) -> None:
    """Raise ConfigError where a model was not loaded as the configuration says."""
    if config.quantization is not None:
        from megatron_async.models.gpt_network import GPTNetwork
        from megatron_async.models.quantized.activations import has_quantized_activations
        from megatron_async.models.quantized.linear import quantizable

        network = model.network
        if not isinstance(network, GPTNetwork) or not quantizable(network.model):
            raise ConfigError("quantization is done with loading; give it to from_pretrained")
        if config.quantize_activations and not has_quantized_activations(network.model):
            raise ConfigError(
                "quantize_activations is done with loading; give it to from_pretrained"
            )
    if config.kv_cache_dtype is not None and described.cached.kept is None:
        raise ConfigError(
            "kv_cache_dtype is for models that this package has loaded; give it to from_pretrained"
        )


def micro_batches_of(model: ModelDescription, config: EngineConfig) -> int:
    """Return what the configuration says, or one for each pipeline stage."""
    return config.pipeline_micro_batches or model.stages


def draft_limit_of(draft: ModelDescription, sizes: CacheSizes) -> int | None:
    """Return the positions that a model that drafts takes, or None if no request has more."""
    limit = draft.position_limit
    if limit is None or limit >= sizes.max_sequence_length:
        return None
    logger.info(
        "draft_model drafts for the first %s tokens of a request, of at most %s; it goes on alone",
        f"{limit:,}",
        f"{sizes.max_sequence_length:,}",
    )
    return limit


def limits_of(
    sizes: CacheSizes,
    config: EngineConfig,
    model: ModelDescription,
    drafting: Drafting,
    device: str,
    *,
    draft_limit: int | None = None,
    enable_chunked_prefill: bool = True,
    state_snapshots: int | None = None,
) -> Limits:
    """The scheduler's limits; the cache's sizes win over the configuration's.

    Args:
        draft_limit: positions that a model that drafts takes; None is all.
        state_snapshots: None without recurrent layers.

    Raises:
        ConfigError: a chunk would not fit into a forward next to the decoding rows; drafts would
            cross the model's ``rotation_limit``.
    """
    window = 1 + sizes.num_speculative_tokens
    length, rotation_limit = sizes.max_sequence_length, model.rotation_limit
    if rotation_limit is not None and rotation_limit >= length:
        rotation_limit = None
    if rotation_limit is not None and window > 1:
        raise ConfigError(
            f"num_speculative_tokens={window - 1} needs a max_sequence_length of at most "
            f"{rotation_limit} with this model, whose rotary embeddings change there"
        )
    # No prompt is longer, so a larger chunk would only ask for memory.
    chunk = min(config.prefill_chunk_tokens, length) if enable_chunked_prefill else length
    least = sizes.max_requests * window + chunk
    max_tokens = config.max_tokens if sizes.max_tokens is None else sizes.max_tokens
    if max_tokens is None:
        max_tokens = sizes.max_requests * window + CHUNKS_AT_ONCE * chunk
    if max_tokens < least:
        raise ConfigError(
            f"max_tokens={max_tokens} must be at least max_requests + the prefill chunk = {least}"
        )
    # Nor does a step hold more than a chunk, or a window of drafts, in each row.
    max_tokens = min(max_tokens, sizes.max_requests * max(chunk, window))
    per_row = 1 + -(-(window + drafting.lookahead) // sizes.block_size_tokens)
    return Limits(
        max_requests=sizes.max_requests,
        slot_count=sizes.slot_count,
        max_tokens=max_tokens,
        prefill_chunk_tokens=chunk,
        block_size=sizes.block_size_tokens,
        block_count=sizes.block_count,
        max_assignments=sizes.max_requests * per_row + 4 * sizes.max_blocks_per_request,
        enable_prefix_caching=config.enable_prefix_caching,
        windows=draft_windows(window - 1, adaptive=config.adaptive_speculation),
        lookahead=drafting.lookahead,
        draft_limit=draft_limit,
        admit_tokens=drafting.wants_tokens,
        needs_guesses=drafting.needs_guesses,
        paused_block_count=sizes.paused_block_count,
        rotation_limit=rotation_limit,
        # Drafting writes behind the last token, and reads from there.
        attention_window=model.attention_window if window == 1 else None,
        state_snapshots=state_snapshots,
        micro_batches=min(micro_batches_of(model, config), sizes.max_requests),
        guided_lag=config.effective_depth if config.guided_rows == "sit_out" else None,
        long_prompt_tokens=config.long_prefill_token_threshold,
        long_prompts=config.max_long_partial_prefills,
    )
