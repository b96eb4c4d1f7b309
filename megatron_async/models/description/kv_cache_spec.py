"""What a model's attention layers need of the KV cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from megatron_async.errors import ConfigError
from megatron_async.megatron_compat.specs import mtp_inner_layer

from megatron.core.transformer.identity_op import IdentityOp  # isort: skip

MTP_LAYER = "MTP layer"


@dataclass(frozen=True, kw_only=True, slots=True)
class KVCacheSpec:
    """What one token needs in the KV cache of this rank.

    ``num_layers`` counts the ``num_mtp_layers`` of multi-token prediction too, after the decoder's;
    ``num_kv_heads`` is this tensor-parallel rank's share. With multi-latent attention a token has
    one key, of ``head_dim`` elements, and no value: the first ``latent_rank`` of the key are it.
    ``dtype`` is the model's; ``kept`` that of the cache, if it is another.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    num_mtp_layers: int = 0
    latent_rank: int | None = None
    kept: torch.dtype | None = None

    @property
    def stored(self) -> torch.dtype:
        """The dtype of the cache."""
        return self.kept or self.dtype

    @property
    def decoder(self) -> KVCacheSpec:
        """What is needed where the layers of multi-token prediction do not run."""
        return replace(self, num_layers=self.num_layers - self.num_mtp_layers, num_mtp_layers=0)

    @property
    def token_bytes(self) -> int:
        """Bytes of the keys and values of one token."""
        tensors = 2 if self.latent_rank is None else 1
        return tensors * self.num_layers * self.num_kv_heads * self.head_dim * self.stored.itemsize


def kv_cache_spec(model: Any) -> KVCacheSpec:
    """The cache that all attention layers of ``model`` share, those of multi-token prediction too.

    A layer's attention says which layer of the cache is its own (``layer_index``, or its layer's
    number). A model whose layers are all recurrent has a cache of no layers.

    Raises:
        ConfigError: there is no layer that attends or is recurrent, or two attention layers differ
            in what they cache.
    """
    shapes: dict[tuple[int, int, int | None], str] = {}
    num_layers = num_mtp_layers = 0
    for name, index, attention in _attention_layers(model):
        shapes.setdefault(_cached(attention), name)
        num_layers = max(num_layers, index + 1)
        num_mtp_layers += name.startswith(MTP_LAYER)
    if not shapes and any(hasattr(module, "state_tensors") for module in model.modules()):
        shapes[1, 1, None] = "no layer"
    if not shapes:
        raise ConfigError("the model has no attention layer; serve one that has")
    if len(shapes) > 1:
        found = ", ".join(
            f"{name} has {kv_heads} KV heads of {head_dim} elements"
            for (kv_heads, head_dim, _), name in shapes.items()
        )
        raise ConfigError(
            f"the model's attention layers differ in what they cache: {found}; one KV cache serves "
            "layers that are alike in this"
        )
    ((num_kv_heads, head_dim, latent_rank),) = shapes
    return KVCacheSpec(
        num_layers=num_layers,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=plain_parameter(model).dtype,
        num_mtp_layers=num_mtp_layers,
        latent_rank=latent_rank,
    )


def plain_parameter(model: Any) -> torch.Tensor:
    """The first parameter in the dtype that ``model`` computes in: none that is kept in a byte."""
    found: torch.Tensor = next(each for each in model.parameters() if each.dtype.itemsize > 1)
    return found


def _cached(attention: Any) -> tuple[int, int, int | None]:
    """KV heads, elements of a key, and how many of them are the value of a latent."""
    latent_rank: int | None = getattr(attention, "latent_rank", None)
    if latent_rank is not None:
        return 1, latent_rank + attention.config.qk_pos_emb_head_dim, latent_rank
    kv_heads: int = attention.num_query_groups_per_partition
    return kv_heads, attention.hidden_size_per_attention_head, None


def _attention_layers(model: Any) -> Iterator[tuple[str, int, Any]]:
    """Yield name, layer of the cache and attention of each layer that attends."""
    decoder = list(model.decoder.layers)
    predicting: list[Any] = []
    if model.mtp_process:
        for layer in model.mtp.layers:
            inner: Any = mtp_inner_layer(layer)
            predicting += getattr(inner, "layers", [inner])
    for place, layer in enumerate([*decoder, *predicting]):
        attention = getattr(layer, "self_attention", None)
        if attention is None or isinstance(attention, IdentityOp):
            continue
        name = f"layer {place + 1}"
        if place >= len(decoder):
            name = f"{MTP_LAYER} {place - len(decoder) + 1}"
        yield name, getattr(attention, "layer_index", place), attention
