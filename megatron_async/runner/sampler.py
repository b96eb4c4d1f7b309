"""Which of the samplers takes a device's logits; they give the same tokens."""

from __future__ import annotations

import functools
import importlib.util
import logging

from torch import Tensor

from megatron_async.sampling.cpu import sample_tokens_cpu
from megatron_async.sampling.sample import (
    SampleInputs,
    candidates,
    check_inputs,
    sample_tokens_reference,
)

logger = logging.getLogger(__name__)


def sample_tokens(
    logits: Tensor,
    inputs: SampleInputs,
    *,
    vocab_size: int | None = None,
) -> Tensor:
    """Sample one token for every row of ``logits``.

    On CUDA this neither synchronises nor depends on values for its shapes, so a CUDA graph can
    capture it. On the CPU the work depends on what the rows ask for.

    Args:
        logits: ``[R, V]`` float32, bfloat16 or float16.
        inputs: of each row.
        vocab_size: only ids below it are candidates; ``V`` if not given.

    Returns:
        int64 ``[R]``; -1 for a row whose candidates hold NaN.

    Raises:
        ValueError: a shape, a dtype or the vocabulary size is not supported.
    """
    logits = candidates(logits, vocab_size)
    check_inputs(logits, inputs)
    if logits.is_cuda and has_triton():
        from megatron_async.kernels.sampling.sample_triton import sample_tokens_gpu

        return sample_tokens_gpu(logits, inputs)
    if logits.is_cuda:
        return sample_tokens_reference(logits, inputs)
    return sample_tokens_cpu(logits, inputs)


@functools.cache
def has_triton() -> bool:
    """Whether kernels of Triton's can run; what runs in their place is logged once."""
    found = importlib.util.find_spec("triton") is not None
    if not found:
        logger.warning("tokens are sampled by PyTorch's operations, since Triton is not installed")
    return found
