"""Log-probabilities as the engine computes them, with gradients."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor

from megatron_async.errors import ConfigError, RequestError
from megatron_async.sampling import filters
from megatron_async.sampling.log_probs import (
    ELEMENTS_AT_ONCE,
    processed_log_prob,
    token_log_prob,
)
from megatron_async.sampling_params import SamplingParams
from megatron_async.step.slot_fields import request_values

HAS_TRITON = importlib.util.find_spec("triton") is not None


def exact_log_probs(
    logits: Tensor,
    tokens: Tensor,
    *,
    temperature: float | None = None,
    top_k: int = 0,
    top_p: float = 0.0,
    vocab_size: int | None = None,
) -> Tensor:
    """Log-probabilities of tokens: of equal logits the bits are those of a rollout.

    Args:
        logits: ``[..., V]`` of any float dtype, over the whole vocabulary.
        tokens: int64 ``[...]``; for negative ones, such as -100 of padding, there is 0 and no
            gradient.
        temperature, top_k, top_p: None gives those of the model (``raw_logprobs``); a temperature
            those of what was sampled from (``processed_logprobs``), as in ``SamplingParams``: 0, or
            a ``top_k`` of 1, for greedy choices. Penalties and biases are not known here.
        vocab_size: columns from it on are padding.

    Returns:
        float32 ``[...]``. The gradient is that of a softmax.

    Raises:
        ConfigError: the shapes do not fit, or a value is out of range. Of tokens on a GPU nobody
            looks at the values.
    """
    if logits.shape[:-1] != tokens.shape:
        raise ConfigError(
            f"logits of shape {tuple(logits.shape)} and tokens of shape {tuple(tokens.shape)}: "
            "give one token for each position"
        )
    if tokens.is_floating_point():
        raise ConfigError(f"tokens have dtype {tokens.dtype}: give integers")
    if temperature is None and (top_k, top_p) != (0, 0.0):
        raise ConfigError("top_k and top_p are of processed log-probabilities: give a temperature")
    flat = logits.flatten(0, -2)[:, :vocab_size]
    if not tokens.is_cuda and tokens.numel() and (most := int(tokens.max())) >= flat.shape[1]:
        raise ConfigError(
            f"tokens hold {most} and the vocabulary is 0 .. {flat.shape[1] - 1}: give -100 where "
            "there is no token, as in padding"
        )
    options = None if temperature is None else _options(temperature, top_k, top_p)
    found: Tensor = _LogProbs.apply(flat, tokens.flatten(), options)  # type: ignore[no-untyped-call]
    return found.view(tokens.shape)


Options = tuple[float, int, float]


def _options(temperature: float, top_k: int, top_p: float) -> Options:
    """Inverse temperature, top-k and top-p as an engine's tables have them."""
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
    try:
        values: Any = request_values(params.checked(), seed=0)
    except RequestError as error:
        raise ConfigError(str(error)) from None
    found: Options = values[:3]
    return found


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, tokens: Tensor, options: Options | None) -> Tensor:
        ctx.save_for_backward(logits, tokens)
        ctx.options = options
        if options is None:
            found = _of_model(logits, tokens)
        else:
            factor, top_k, top_p = _columns(logits, options)
            found = processed_log_prob(logits.float(), factor, top_k, top_p, tokens)
        return found.masked_fill_(tokens < 0, 0.0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        logits, tokens = ctx.saved_tensors
        (grad,) = grads
        found = torch.empty_like(logits)
        size = max(1, ELEMENTS_AT_ONCE // logits.shape[1])
        for some in (slice(at, at + size) for at in range(0, len(logits), size)):
            found[some] = _gradient(logits[some].float(), tokens[some], grad[some], ctx.options)
        return found, None, None


def _of_model(logits: Tensor, tokens: Tensor) -> Tensor:
    """:func:`token_log_prob`, on a GPU in one kernel."""
    if logits.is_cuda and HAS_TRITON:
        from megatron_async.kernels.sampling import token_log_prob as kernel

        if kernel.takes(logits):
            return kernel.token_log_prob(logits, tokens)
    return token_log_prob(logits, tokens)


def _columns(logits: Tensor, options: Options) -> tuple[Tensor, Tensor, Tensor]:
    """Inverse temperatures, top-k and top-p of each row, as the sampler has them."""
    inverse, top_k, top_p = options
    rows, device = len(logits), logits.device
    return (
        torch.full((rows,), inverse, dtype=torch.float32, device=device),
        torch.full((rows,), top_k, dtype=torch.int32, device=device),
        torch.full((rows,), top_p, dtype=torch.float32, device=device),
    )


def _gradient(x: Tensor, tokens: Tensor, grad: Tensor, options: Options | None) -> Tensor:
    factor = 1.0
    if options is not None and options[0]:
        inverse, top_k, top_p = _columns(x, options)
        threshold = filters.filter_threshold(x, inverse, top_k, top_p)
        x = x.masked_fill(x < threshold[:, None], -torch.inf)
        factor = options[0]
    found = -(x * factor).softmax(-1)
    found.scatter_add_(1, tokens.clamp(min=0)[:, None], torch.ones_like(found[:, :1]))
    return found * (factor * grad).masked_fill(tokens < 0, 0.0)[:, None]
