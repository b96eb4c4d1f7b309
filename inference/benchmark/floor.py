"""The least time of a decode step: what it has to read, at the bandwidth of the memory."""

from __future__ import annotations

from functools import partial

import torch

from megatron_async.device.cuda_timeline import mean_us
from megatron_async.models.config import ModelConfig

COPY_BANDWIDTH = {"NVIDIA H200": 4.3e12, "NVIDIA H100 80GB HBM3": 3.03e12}
"""Bytes per second of a large copy, read and written, as measured, by the GPU's name. So reports of
two such machines have the same floor."""
_COPY_BYTES = 1 << 28
"""At least twice the L2 cache of any GPU."""
_COPIES = 10


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second that a large copy reads and writes on a GPU: of :data:`COPY_BANDWIDTH`, or
    measured now where the GPU is another.

    Raises:
        torch.OutOfMemoryError: for the copy 512 MiB must be free.
    """
    known = COPY_BANDWIDTH.get(torch.cuda.get_device_name(device))
    return _measured(device) if known is None else known


def _measured(device: torch.device) -> float:
    with torch.cuda.device(device):
        source = torch.zeros(_COPY_BYTES, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        target.copy_(source)
        seconds = 1e-6 * mean_us(partial(target.copy_, source), _COPIES)
        del source, target
        torch.cuda.empty_cache()
        return 2 * _COPY_BYTES / seconds


def weight_bytes(config: ModelConfig, itemsize: int) -> int:
    """Bytes of weights that one decode step reads.

    All of the decoder and the output projection. Of an input embedding that is not the output
    projection too a step reads a row per request, which is nothing, and of learned positions
    likewise; layers of multi-token prediction are not run.
    """
    hidden, ffn = config.hidden_size, config.ffn_hidden_size
    query = config.num_attention_heads * config.head_dim
    key_value = config.num_kv_heads * config.head_dim
    fc1_rows = 2 * ffn if config.activation == "swiglu" else ffn
    norm = 2 * hidden if config.normalization == "LayerNorm" else hidden
    layer = hidden * (query + 2 * key_value) + query * hidden + fc1_rows * hidden + hidden * ffn
    layer += 2 * norm
    layer += 2 * config.head_dim if config.qk_norm else 0
    layer += query + 2 * key_value if config.qkv_bias else 0
    layer += hidden if config.attention_output_bias else 0
    layer += fc1_rows + hidden if config.mlp_bias else 0
    return itemsize * (config.num_layers * layer + norm + config.vocab_size * hidden)


def kv_bytes(config: ModelConfig, itemsize: int, tokens: float) -> float:
    """Bytes of keys and values that attention over ``tokens`` tokens reads, all layers."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * itemsize * tokens


def floor_ms(
    config: ModelConfig,
    itemsize: int,
    bandwidth: float,
    *,
    batch_size: int,
    prompt_tokens: int,
    new_tokens: int,
) -> float:
    """Milliseconds in which memory could deliver a mean step's weights, keys and values once, at
    ``bandwidth`` bytes per second."""
    mean_context = prompt_tokens + new_tokens / 2
    read = weight_bytes(config, itemsize) + kv_bytes(config, itemsize, batch_size * mean_context)
    return 1e3 * read / bandwidth
