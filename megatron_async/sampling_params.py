"""How a request is sampled and when it ends, with megatron-core's names."""

from __future__ import annotations

import copy
import dataclasses
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_async.config import as_integer
from megatron_async.errors import RequestError

MAX_STOP_TOKEN_IDS = 8
"""Stop-token ids a request may have: the width of the stop set kept on the device."""
MAX_TOKEN_ID = 2**31 - 1
"""Token ids are int32 on the device."""


@dataclass(kw_only=True)
class SamplingParams:
    """How one request is sampled and when it ends. Names are megatron-core's.

    Attributes:
        temperature: divides the logits; 0 means greedy.
        top_k: keep the k most likely tokens; 0 is off, 1 is greedy.
        top_p: keep the smallest set of tokens with this probability mass; 0 and 1 are off.
        num_tokens_to_generate: most tokens to generate. When this and ``num_tokens_total`` are
            None, the model's maximum sequence length is the limit.
        num_tokens_total: most tokens of prompt and generation together.
        termination_id: token that ends the request; None takes the model's own end tokens, -1
            means none.
        stop_token_ids: further tokens that end the request; None means none.
        add_BOS: put the tokenizer's begin token before a text prompt.
        seed: of this request's randomness; None derives one from the engine's seed and the
            request id. The same seed gives the same tokens whatever else is being decoded.
        min_p: keep tokens at least this share as likely as the most likely one; 0 is off.
        repetition_penalty, presence_penalty, frequency_penalty: vLLM's: the first of tokens in
            prompt or output, the others of tokens in the output.
        logit_bias: added to the logits of these token ids; None for none.
        allowed_token_ids: the only tokens that may be generated; None for all.
        bad_words: texts, or lists of token ids, that may not be generated; None for none.
        min_tokens: tokens to generate before an end token or a stop word may end the request.
        ignore_eos: the model's own end tokens do not end the request.
        stop_words: texts that end the request; the text is cut before the first of them.
        include_stop_str_in_output: cut it behind the stop word instead.
        return_log_probs: log-probabilities of the generated tokens, and of the prompt's unless
            ``skip_prompt_log_probs``.
        top_n_logprobs: besides, those of the most likely tokens, at most 20.
        log_probs_mode: ``"raw"``, the model's, or ``"processed"``, of what was sampled from.
        n: sequences to generate; they share one prefill and have seeds of their own.
        best_of: sequences to generate of which the ``n`` likeliest are kept; None means ``n``.
        structured_outputs: what the text must conform to: a ``StructuredOutputs``; None for
            anything.
        logits_processors: functions of (token ids so far, logits [vocabulary]) that return logits;
            each of their steps is a barrier.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 0.0
    return_log_probs: bool = False
    skip_prompt_log_probs: bool = False
    return_segments: bool = False
    num_tokens_to_generate: int | None = 30
    num_tokens_total: int | None = None
    termination_id: int | None = None
    top_n_logprobs: int = 0
    add_BOS: bool = False
    stop_words: list[str] | None = None
    stop_token_ids: tuple[int, ...] | None = ()
    seed: int | None = None
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str | Sequence[int]] | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    log_probs_mode: str = "raw"
    n: int = 1
    best_of: int | None = None
    structured_outputs: Any = None
    logits_processors: Sequence[Callable[..., Any]] | None = None

    def __post_init__(self) -> None:
        default = type(self).__dataclass_fields__["num_tokens_to_generate"].default
        if self.num_tokens_total is not None and self.num_tokens_to_generate == default:
            self.num_tokens_to_generate = None

    def checked(self) -> SamplingParams:
        """A copy whose integers are Python's own; raises as :meth:`validate`."""
        own = copy.copy(self)
        for item in dataclasses.fields(own):
            value = as_integer(getattr(own, item.name))
            if value is not None:
                setattr(own, item.name, value)
        own.validate()
        own.temperature, own.top_p = float(own.temperature), float(own.top_p)
        own.stop_token_ids = tuple(map(int, own.stop_token_ids or ()))
        return own

    @property
    def greedy(self) -> bool:
        """True when no randomness is involved."""
        return self.temperature == 0 or self.top_k == 1

    def validate(self) -> None:
        """Check every value by itself and against the others.

        Raises:
            RequestError: names the value and what to change.
        """

        def integer(name: str, low: int, *, optional: bool = False) -> None:
            value = getattr(self, name)
            if optional and value is None:
                return
            number = as_integer(value)
            if number is None or number < low:
                raise RequestError(f"{name}={value!r} must be an integer of at least {low}")

        def number(name: str, low: float, high: float) -> None:
            value: Any = getattr(self, name)
            is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
            if not is_number:
                raise RequestError(f"{name}={value!r} must be a number")
            if not low <= value <= high:  # nor is NaN between them
                raise RequestError(f"{name}={value!r} must lie between {low:g} and {high:g}")

        number("temperature", 0.0, 1e6)
        number("top_p", 0.0, 1.0)
        integer("top_k", 0)
        integer("num_tokens_to_generate", 1, optional=True)
        integer("num_tokens_total", 1, optional=True)
        integer("termination_id", -1, optional=True)
        integer("top_n_logprobs", 0)
        if 0 < self.temperature < 1e-5:
            raise RequestError(
                f"temperature={self.temperature!r} is too small to divide by; "
                "use 0 for greedy decoding"
            )
        if self.num_tokens_to_generate is not None and self.num_tokens_total is not None:
            raise RequestError(
                f"num_tokens_to_generate={self.num_tokens_to_generate} and "
                f"num_tokens_total={self.num_tokens_total} contradict each other; set one of them"
            )
        if self.seed is not None:
            if as_integer(self.seed) is None:
                raise RequestError(f"seed={self.seed!r} must be an integer")
            if not -(2**63) <= self.seed < 2**63:
                raise RequestError(f"seed={self.seed} must fit into 64 bits")
        if not isinstance(self.stop_token_ids, (list, tuple, set, frozenset, type(None))):
            raise RequestError(
                f"stop_token_ids={self.stop_token_ids!r} must be a list of token ids, or ()"
            )
        for token in self.stop_token_ids or ():
            number_of = as_integer(token)
            if number_of is None or not 0 <= number_of <= MAX_TOKEN_ID:
                raise RequestError(
                    f"stop_token_ids has {token!r}; every id must be an integer from 0 to "
                    f"{MAX_TOKEN_ID}"
                )
        if self.termination_id is not None and self.termination_id > MAX_TOKEN_ID:
            raise RequestError(
                f"termination_id={self.termination_id} must be at most {MAX_TOKEN_ID}"
            )
        for name in ("return_log_probs", "return_segments", "top_n_logprobs", "stop_words"):
            if getattr(self, name):
                raise RequestError(
                    f"{name}={getattr(self, name)!r} is not supported by this version; leave it out"
                )

    def add_attributes(self, attribute_value_pair: dict[str, Any]) -> None:
        """Set several attributes at once; an unknown name is an error."""
        names = {f.name for f in dataclasses.fields(self)}
        for name, value in attribute_value_pair.items():
            if name not in names:
                raise RequestError(f"unknown sampling parameter {name}={value!r}")
            setattr(self, name, value)
        if "num_tokens_to_generate" not in attribute_value_pair:
            self.__post_init__()

    def serialize(self) -> dict[str, Any]:
        """All fields as a plain dictionary."""
        return dataclasses.asdict(self)

    @classmethod
    def deserialize(cls, data: dict[str, Any]) -> SamplingParams:
        """The inverse of :meth:`serialize`."""
        params = cls()
        params.add_attributes(data)
        return params
