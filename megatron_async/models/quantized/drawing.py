"""What layers of a model with random weights keep of what is drawn for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_async.errors import ConfigError
from megatron_async.kernels.moe.mxfp4 import BLOCK
from megatron_async.models.description.config import ModelConfig
from megatron_async.models.quantized import linear, mxfp4


def keeper(config: ModelConfig, *, quantize: bool, pack: bool) -> Callable[[str, Any], None]:
    """What makes a layer, given with its name, keep e4m3 with ``quantize``, or if it is of experts
    MXFP4 with ``pack``.

    Raises:
        ConfigError: there are no experts to be packed, or their rows are no whole blocks.
    """
    size, ffn = config.moe_latent_size or config.hidden_size, config.moe_ffn_hidden_size
    if pack and (config.num_moe_experts is None or ffn is None):
        raise ConfigError("quantization='mxfp4' is for experts, and the model has none")
    if pack and ((ffn or 0) % BLOCK or size % BLOCK):
        raise ConfigError(
            f"quantization='mxfp4' needs experts of multiples of {BLOCK}, and these are "
            f"{ffn} x {size}"
        )

    def keep(name: str, layer: Any) -> None:
        if pack and ".mlp.experts." in name:
            mxfp4.pack_in_place(layer)
        elif quantize:
            linear.quantize_in_place(layer)

    return keep
