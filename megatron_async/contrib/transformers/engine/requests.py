"""Generation configs and results of transformers, and requests of the engine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from transformers import GenerationConfig
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

from megatron_async.request.request import DynamicInferenceRequest, FinishReason
from megatron_async.sampling_params import SamplingParams

DEFAULT_NEW_TOKENS = 20

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "num_beams": (None, 1),
    "penalty_alpha": (None, 0.0),
    "typical_p": (None, 1.0),
    "epsilon_cutoff": (None, 0.0),
    "eta_cutoff": (None, 0.0),
    "no_repeat_ngram_size": (None, 0),
    "encoder_repetition_penalty": (None, 1.0),
    "min_length": (None, 0),
    "guidance_scale": (None, 1.0),
    "sequence_bias": (None,),
    "suppress_tokens": (None,),
    "begin_suppress_tokens": (None,),
    "forced_bos_token_id": (None,),
    "forced_eos_token_id": (None,),
    "exponential_decay_length_penalty": (None,),
    "watermarking_config": (None,),
    "stop_strings": (None,),
    "max_time": (None,),
    "prompt_lookup_num_tokens": (None,),
    "dola_layers": (None,),
    "constraints": (None,),
    "force_words_ids": (None,),
    "bad_words_ids": (None,),
}
"""What the engine does not take from a generation config, and the values that ask for nothing."""


def check_supported(config: GenerationConfig) -> None:
    """Raise ValueError for a field that the engine would have to leave out."""
    for name, neutral in NEUTRAL.items():
        value = getattr(config, name, None)
        if value not in neutral:
            raise ValueError(
                f"generation_config.{name}={value!r} is not supported by the engine: leave it out, "
                "or use model.generate"
            )


def end_ids(eos: int | Sequence[int] | None) -> list[int]:
    """End tokens as a list; None and -1 mean none."""
    found = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
    return [token for token in found if token >= 0]


def new_tokens(config: GenerationConfig, prompt_length: int) -> int:
    """How many tokens a request may generate."""
    if config.max_new_tokens is not None:
        return int(config.max_new_tokens)
    if config.max_length is not None and config.max_length > prompt_length:
        return int(config.max_length) - prompt_length
    return DEFAULT_NEW_TOKENS


def sampling_params(
    config: GenerationConfig,
    prompt_length: int,
    *,
    max_new_tokens: int | None = None,
    eos_token_id: int | Sequence[int] | None = None,
    seed: int | None = None,
    log_probs: bool = False,
) -> SamplingParams:
    """What the engine makes of a generation config.

    Args:
        eos_token_id: in place of the config's.

    Raises:
        ValueError: the config asks for something that the engine cannot do.
    """
    check_supported(config)
    chosen: dict[str, Any] = {"temperature": 0.0}
    if config.do_sample:
        temperature = getattr(config, "temperature", None)
        chosen = {
            "temperature": 1.0 if temperature is None else temperature,
            "top_k": getattr(config, "top_k", None) or 0,
            "top_p": getattr(config, "top_p", None) or 0.0,
            "min_p": getattr(config, "min_p", None) or 0.0,
        }
    penalty = getattr(config, "repetition_penalty", None)
    return SamplingParams(
        **chosen,
        repetition_penalty=1.0 if penalty is None else penalty,
        min_tokens=getattr(config, "min_new_tokens", None) or 0,
        num_tokens_to_generate=(
            new_tokens(config, prompt_length) if max_new_tokens is None else max_new_tokens
        ),
        termination_id=-1,
        stop_token_ids=end_ids(config.eos_token_id if eos_token_id is None else eos_token_id),
        seed=seed,
        detokenize=False,
        return_log_probs=log_probs,
        skip_prompt_log_probs=True,
    )


def output_of(
    name: str, request: DynamicInferenceRequest, created: float, tokens: list[int] | None = None
) -> GenerationOutput:
    """A request's state as transformers hands it out.

    ``tokens``: those so far, of a request that goes on; None for one that is over.
    """
    failed = request.finish_reason is FinishReason.ERROR
    error = "; ".join(str(event.payload) for event in request.events) if failed else None
    over = RequestStatus.FAILED if failed else RequestStatus.FINISHED
    return GenerationOutput(
        request_id=name,
        prompt_ids=list(request.prompt_tokens),
        generated_tokens=list(request.generated_tokens) if tokens is None else tokens,
        logprobs=list(request.generated_log_probs or ()) if tokens is None else [],
        error=error or ("the engine could not go on" if failed else None),
        status=over if tokens is None else RequestStatus.DECODING,
        created_time=created,
        **lifespan(request, created),
    )


def lifespan(request: DynamicInferenceRequest, created: float) -> dict[str, Any]:
    """``lifespan`` where the version of transformers has it; seconds of ``time.perf_counter``."""
    if "lifespan" not in GenerationOutput.__dataclass_fields__:
        return {}
    return {"lifespan": (created + (request.queue_time or 0.0), time.perf_counter())}
