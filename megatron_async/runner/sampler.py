"""Which of the samplers takes a device's logits; they give the same tokens."""

from __future__ import annotations

import functools
import importlib.util
import logging

from torch import Tensor

from megatron_async.sampling.cpu import sample_tokens_cpu
from megatron_async.sampling.sample import candidates, check_parameters, sample_tokens_reference

logger = logging.getLogger(__name__)


def sample_tokens(
    logits: Tensor,
    inverse_temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    seed: Tensor,
    position: Tensor,
    *,
    vocab_size: int | None = None,
) -> Tensor:
    """Sample one token for every row of ``logits``.

    On CUDA this neither synchronises nor depends on values for its shapes, so a CUDA graph can
    capture it. On the CPU the work depends on what the rows ask for.

    Args:
        logits: ``[R, V]`` float32, bfloat16 or float16.
        inverse_temperature: float32 ``[R]``; 0 is greedy.
        top_k: int32 ``[R]``; 0 is off.
        top_p: float32 ``[R]``; 0 and 1 are off.
        seed: int64 ``[R]``, the request's seed.
        position: int64 ``[R]``, the index of the sampled token in its sequence.
        vocab_size: only ids below it are candidates; ``V`` if not given.

    Returns:
        int64 ``[R]``; -1 for a row whose candidates hold NaN.

    Raises:
        ValueError: a shape, a dtype or the vocabulary size is not supported.
    """
    logits = candidates(logits, vocab_size)
    parameters = (inverse_temperature, top_k, top_p, seed, position)
    check_parameters(logits, *parameters)
    if logits.is_cuda and has_triton():
        from megatron_async.kernels.sampling.sample_triton import sample_tokens_gpu

        return sample_tokens_gpu(logits, *parameters)
    if logits.is_cuda:
        return sample_tokens_reference(logits, *parameters)
    return sample_tokens_cpu(logits, *parameters)


@functools.cache
def has_triton() -> bool:
    """Whether kernels of Triton's can run; what runs in their place is logged once."""
    found = importlib.util.find_spec("triton") is not None
    if not found:
        logger.warning("tokens are sampled by PyTorch's operations, since Triton is not installed")
    return found
