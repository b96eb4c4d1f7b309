"""Scales of a KV cache of e4m3, chosen when an engine starts, and for new weights as soon as the
cache is empty: the same in each run, whatever comes.

Those that a checkpoint has are taken, as the next powers of two. Else fixed tokens go through the
model once, as a prompt whose keys and values are kept in its own dtype, and each head's largest
says the scale. What is larger later, by more than the room that is left, is cut off.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from megatron_async.kernels.attention.e4m3_cache import nearest_above, scales_of
from megatron_async.runner.memory.forward_batch import ForwardBatch
from megatron_async.runner.memory.whole_prompts import batch_of_prompts, forward_prompts

TOKENS = 256
SPREAD = 2654435761
"""Knuth's multiplicative hash: ids from all of the vocabulary."""


@torch.no_grad()
def choose_scales(network: Any, batch: ForwardBatch, *, stored: bool = True) -> None:
    """Fill ``batch.scales``, while nothing is kept; of a model's ranks all call it at once, since
    the tokens go through all stages. Layers that draft keep scales of 1.

    Args:
        stored: those that the model's checkpoint has are of the weights that it has now; else they
            are forgotten.
    """
    scales = batch.scales
    if not stored:
        vars(network.model)["stored_cache_scales"] = None
    if scales is None or not scales.numel():
        return
    spec = replace(network.kv_cache_spec.decoder, kept=None)
    given = getattr(network.model, "stored_cache_scales", None)
    if given is not None and spec.latent_rank is None and len(given) == spec.num_layers:
        scales[: len(given)] = nearest_above(given).to(scales)
        return
    count = min(TOKENS, network.max_sequence_length)
    ids = torch.arange(1, count + 1, device=network.device) * SPREAD // 64 % network.vocab_size
    own = batch_of_prompts(network, spec, [count], batch_invariant=batch.batch_invariant)
    try:
        forward_prompts(network, own, ids, [count])
        largest = own.kv_cache[:, :, 1:].abs().amax((2, 3, 5))
        scales[: len(largest)] = scales_of(largest)
    finally:
        own.release()
