"""A spec as the fields of a message to other ranks, and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from megatron_async.build.spec import EngineSpec
from megatron_async.config.engine_config import EngineConfig
from megatron_async.drafting.choose import Drafting
from megatron_async.models.description.kv_cache_spec import KVCacheSpec
from megatron_async.models.served import ModelDescription
from megatron_async.ranks.layout import Layout
from megatron_async.runner.memory.cache_sizes import CacheSizes
from megatron_async.scheduler.limits import Limits


def spec_to_dict(spec: EngineSpec) -> dict[str, Any]:
    """What other ranks build the same from; each has a device of its own, and records and
    publishes nothing."""
    device = spec.config.device and spec.config.device.partition(":")[0]
    config = dataclasses.replace(spec.config, device=device, record=None, kv_events_config=None)
    return {**_plain(spec), "config": dataclasses.asdict(config)}


def spec_from_dict(values: Mapping[str, Any]) -> EngineSpec:
    """The inverse of :func:`spec_to_dict`, after JSON too."""
    made = {
        "config": EngineConfig(**values["config"]),
        "model": _described(values["model"]),
        "draft_model": values["draft_model"] and _described(values["draft_model"]),
        "layout": Layout(**values["layout"]),
        "cache": _cached(values["cache"]),
        "sizes": CacheSizes(**values["sizes"]),
        "drafting": Drafting(*values["drafting"]),
        "limits": Limits(**{**values["limits"], "windows": tuple(values["limits"]["windows"])}),
    }
    return EngineSpec(**{**values, **made})


def _plain(value: Any) -> Any:
    """Fields of dataclasses by name, without those that follow from others; names of dtypes."""
    if dataclasses.is_dataclass(value):
        return {
            field.name: _plain(getattr(value, field.name))
            for field in dataclasses.fields(value)
            if field.init
        }
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return value


def _cached(values: Mapping[str, Any]) -> KVCacheSpec:
    return KVCacheSpec(**{**values, "dtype": getattr(torch, values["dtype"])})


def _described(values: Mapping[str, Any]) -> ModelDescription:
    cache = values["kv_cache"]
    return ModelDescription(**{**values, "kv_cache": cache and _cached(cache)})
