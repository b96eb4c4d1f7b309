"""The values that sampling parameters may have, for all that check or describe them: the engine,
the command line and the server's APIs."""

from __future__ import annotations

from typing import NamedTuple

from megatron_async.step.extras import MAX_TOP_LOG_PROBS


class Range(NamedTuple):
    """The numbers from ``low`` to ``high``, both included."""

    low: float
    high: float


class Integers(NamedTuple):
    """Integers from ``low`` to ``high``, both included; None for no bound but the type's."""

    low: int
    high: int | None = None


MAX_TOKEN_ID = 2**31 - 1
"""Token ids are int32 on the device."""
MAX_SEQUENCES = 16384
"""Sequences that one request may ask for, as in vLLM."""

NUMBERS = {
    "temperature": Range(0.0, 1e6),
    "top_p": Range(0.0, 1.0),
    "min_p": Range(0.0, 1.0),
    "repetition_penalty": Range(1e-6, 1e6),
    "presence_penalty": Range(-2.0, 2.0),
    "frequency_penalty": Range(-2.0, 2.0),
}
"""The ranges are vLLM's, except that its repetition penalty has no upper bound; here it is float32,
as the logits are that it is applied to."""

INTEGERS = {
    "top_k": Integers(0),
    "num_tokens_to_generate": Integers(1),
    "num_tokens_total": Integers(1),
    "termination_id": Integers(-1, MAX_TOKEN_ID),
    "top_n_logprobs": Integers(0, MAX_TOP_LOG_PROBS),
    "seed": Integers(-(2**63), 2**63 - 1),
    "min_tokens": Integers(0),
    "n": Integers(1, MAX_SEQUENCES),
    "best_of": Integers(1, MAX_SEQUENCES),
    "num_speculative_tokens": Integers(0),
    "priority": Integers(-(10**6), 10**6),
}
