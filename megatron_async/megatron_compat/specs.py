"""How parts of a layer are described, and found again.

Since 0.18 a layer's MLP is not built from a ``ModuleSpec`` but by a call, with arguments that
depend on no class. Since 0.17 the layer of a multi-token prediction layer has another name, and a
number of its own.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionLayer as MegatronMtpLayer,
)
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec

__all__ = [
    "MTP_LAYERS",
    "LatentAttention",
    "MultiTokenPredictionLayer",
    "mlp_spec",
    "moe_spec",
    "mtp_inner_layer",
    "mtp_submodules",
    "number_mtp_layers",
]

_FORMER, _PRESENT = "transformer_layer", "mtp_model_layer"
_MTP_FIELD = next(
    name
    for name in (_PRESENT, _FORMER)
    if name in MultiTokenPredictionLayerSubmodules.__dataclass_fields__
)
_CALLS_MLP = hasattr(MLP, "as_mlp_submodule")


class _DuckSpec(NamedTuple):
    """A ``ModuleSpec`` in all but its type: of one with an MLP that it does not know megatron warns
    for each layer."""

    module: type
    params: dict[str, Any]
    submodules: MLPSubmodules


def mlp_spec(submodules: MLPSubmodules) -> Any:
    """megatron's ``MLP`` as a layer's ``mlp``."""
    if _CALLS_MLP:
        return functools.partial(MLP.as_mlp_submodule, submodules=submodules)
    return ModuleSpec(module=MLP, submodules=submodules)


def moe_spec(module: type, params: dict[str, Any], submodules: MLPSubmodules) -> Any:
    """A class of experts as a layer's ``mlp``; it is called with the config, ``params``,
    ``submodules``, and keywords that it may ignore."""
    if _CALLS_MLP:
        return functools.partial(module, **params, submodules=submodules)
    return _DuckSpec(module, params, submodules)


def mtp_submodules(transformer_layer: ModuleSpec, **parts: Any) -> Any:
    """The submodules of a multi-token prediction layer; ``parts`` are those of one name."""
    return MultiTokenPredictionLayerSubmodules(**{_MTP_FIELD: transformer_layer}, **parts)


class LatentAttention(MLASelfAttention):  # type: ignore[misc]
    """megatron's multi-latent attention, of the linear layers and norms that its spec names.

    Since 0.19 megatron decides by its config which of them there are, and without Transformer
    Engine refuses a norm of latents in a model whose queries have none.
    """

    def _resolve_qk_norm_config(self, submodules: Any) -> Any:
        return vars(submodules)


class MultiTokenPredictionLayer(MegatronMtpLayer):  # type: ignore[misc]
    """megatron's, whose layer is ``transformer_layer`` on each release, in state dicts too."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if _PRESENT in self._modules:
            modules = {_FORMER if n == _PRESENT else n: m for n, m in self._modules.items()}
            self._modules.clear()
            self._modules.update(modules)

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(_FORMER if name == _PRESENT else name)


MTP_LAYERS = (MultiTokenPredictionLayer, MegatronMtpLayer)
"""Ours and megatron's."""


def mtp_inner_layer(layer: Any) -> Any:
    """The layer of a multi-token prediction layer, of ours or of megatron's."""
    parts = dict(layer.named_children())
    return parts[_FORMER if _FORMER in parts else _PRESENT]


def number_mtp_layers(model: Any) -> None:
    """Count layers of multi-token prediction on from the decoder's, as 0.16 does."""
    if not getattr(model, "mtp_process", False):
        return
    for depth, layer in enumerate(model.mtp.layers):
        inner: Any = mtp_inner_layer(layer)
        inner.layer_number = model.config.num_layers + 1 + depth
        attention = getattr(inner, "self_attention", None)
        if attention is not None:
            attention.layer_number = inner.layer_number
