"""What an engine is built from, as data: made once on rank 0, with every error of a configuration,
and sent to the other ranks as it is."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from megatron_async.build.sizes import cached_tokens, limits_of, sizes_of, snapshot_count_of
from megatron_async.config import EngineConfig, check_config
from megatron_async.drafting.choose import Drafting, choose_drafting
from megatron_async.errors import ConfigError
from megatron_async.models.kv_cache_spec import KVCacheSpec
from megatron_async.models.served import ModelDescription, ServedModel
from megatron_async.ranks.layout import Layout, check_supported
from megatron_async.runner.cache_sizes import CacheSizes
from megatron_async.runner.kv_cache import KVCache
from megatron_async.scheduler.limits import Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """An engine over a model, on all of its ranks.

    Attributes:
        config: with the micro-batches that the limits come to.
        model: rank 0's share of it.
        draft_model: what drafts instead; None without.
        cache: what a token takes in rank 0's KV cache.
        further_token_bytes: what it takes in the cache of a model that drafts.
        snapshot_count: snapshots of recurrent state for the prefix cache.
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
    ) -> EngineSpec:
        """The engine that a configuration asks for.

        Args:
            device: "cpu" or "cuda".
            given: the cache, whose sizes win over the configuration's; None if it is to be made.

        Raises:
            ConfigError: the configuration does not suit the model, the cache or the ranks.
        """
        check_config(config)
        described = ModelDescription.of(model.network, config.recurrent_state_dtype)
        draft = None if model.draft is None else ModelDescription.of(model.draft)
        if given is None:
            cache, further = cached_tokens(described, draft, config)
            sizes = sizes_of(described, draft, config, device)
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
        snapshots = snapshot_count_of(described, sizes, config, device)
        limits = limits_of(
            sizes,
            config,
            described,
            drafting,
            device,
            enable_chunked_prefill=enable_chunked_prefill,
            state_snapshots=None if described.state_bytes is None else snapshots,
        )
        layout = layout_of(model, config)
        if given is not None:
            _check_suits(given, described, drafting)
        return cls(
            config=dataclasses.replace(config, pipeline_micro_batches=limits.micro_batches),
            model=described,
            draft_model=draft,
            layout=layout,
            cache=cache,
            further_token_bytes=further,
            sizes=sizes,
            drafting=drafting,
            limits=limits,
            snapshot_count=snapshots,
            has_filters_in_extras=layout.tensor > 1 and device == "cuda",
        )

    def to_dict(self) -> dict[str, Any]:
        """What other ranks build the same from; each has a device of its own, and records and
        publishes nothing."""
        device = self.config.device and self.config.device.partition(":")[0]
        config = dataclasses.replace(self.config, device=device, record=None, kv_events_config=None)
        return {**_plain(self), "config": dataclasses.asdict(config)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> EngineSpec:
        """The inverse of :meth:`to_dict`, after JSON too."""
        made = {
            "config": config_from_dict(values["config"]),
            "model": _described(values["model"]),
            "draft_model": values["draft_model"] and _described(values["draft_model"]),
            "layout": Layout(**values["layout"]),
            "cache": _cached(values["cache"]),
            "sizes": CacheSizes(**values["sizes"]),
            "drafting": Drafting(*values["drafting"]),
            "limits": Limits(**{**values["limits"], "windows": tuple(values["limits"]["windows"])}),
        }
        return cls(**{**values, **made})


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


def config_from_dict(values: Mapping[str, Any]) -> EngineConfig:
    """A configuration from its fields, after JSON too."""
    return EngineConfig(**values)


def _plain(value: Any) -> Any:
    """Fields of dataclasses by name, and dtypes as their names."""
    if dataclasses.is_dataclass(value):
        return {
            field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)
        }
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return value


def _cached(values: Mapping[str, Any]) -> KVCacheSpec:
    return KVCacheSpec(**{**values, "dtype": getattr(torch, values["dtype"])})


def _described(values: Mapping[str, Any]) -> ModelDescription:
    cache = values["kv_cache"]
    return ModelDescription(**{**values, "kv_cache": cache and _cached(cache)})
