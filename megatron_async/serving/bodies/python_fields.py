"""Fields of :class:`SamplingParams` that an endpoint has under another name, or not at all.

Users of the Python API send them. To ignore them would be to answer something else than
what was asked, so they are refused as other servers' fields are.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from typing import Any

from megatron_async.sampling_params import SamplingParams
from megatron_async.serving.http.errors import ApiError

HARMLESS = frozenset({"detokenize", "streaming_interval"})
"""What they ask for, less work and fewer pieces, changes no token and no number."""
DEFAULTS: Mapping[str, Any] = {
    name: parameter.default
    for name, parameter in inspect.signature(SamplingParams).parameters.items()
    if name not in HARMLESS
} | {"num_tokens_to_generate": None, "skip_prompt_log_probs": True}
"""All others, and values that ask for nothing: paths have lengths of their own, and give
log-probabilities of prompts if a field of theirs says so."""
_LEAVE = "leave it out"

OPENAI: Mapping[str, str] = {
    "return_log_probs": "send logprobs",
    "top_n_logprobs": "send logprobs, or top_logprobs",
    "log_probs_mode": "send logprobs_mode",
    "skip_prompt_log_probs": "send prompt_logprobs",
    "return_prompt_top_n_logprobs": "send prompt_logprobs",
    "return_prompt_tokens": "send return_token_ids",
    "num_tokens_to_generate": "send max_tokens",
    "num_tokens_total": "send max_tokens",
    "termination_id": "send stop_token_ids, or ignore_eos",
    "stop_words": "send stop",
    "detokenize_stop_sequence": "send include_stop_str_in_output",
    "add_BOS": "send add_special_tokens",
    "streaming": "send stream",
    "forced_token_ids": "send them to /v1/completions, as the end of the prompt's token ids, with "
    "prompt_logprobs",
}  # fmt: skip
"""What to send in place of each over OpenAI's paths."""
SGLANG: Mapping[str, str] = {
    "num_tokens_to_generate": "send max_new_tokens",
    "num_tokens_total": "send max_new_tokens",
    "min_tokens": "send min_new_tokens",
    "stop_words": "send stop",
    "seed": "send sampling_seed",
    "include_stop_str_in_output": "send no_stop_trim",
    "detokenize_stop_sequence": "send no_stop_trim",
    "termination_id": "send stop_token_ids, or ignore_eos",
    "structured_outputs": "send json_schema, regex or ebnf",
    "return_log_probs": "send return_logprob beside sampling_params",
    "skip_prompt_log_probs": "send logprob_start_len beside sampling_params",
    "top_n_logprobs": "send top_logprobs_num beside sampling_params",
    "log_probs_mode": "send logprobs_mode beside sampling_params",
    "cache_salt": "send it beside sampling_params",
    "return_routed_experts": "send it beside sampling_params",
    "forced_token_ids": "send them at the end of input_ids, with logprob_start_len",
}
"""And in ``sampling_params`` of SGLang's."""
OF_SGLANG: Mapping[str, Any] = {**DEFAULTS, "log_probs_mode": "processed"}
"""What asks for nothing there."""
MEGATRON: Mapping[str, str] = {
    "num_tokens_to_generate": "send tokens_to_generate",
    "num_tokens_total": "send tokens_to_generate",
    "return_log_probs": "send logprobs",
    "seed": "send random_seed",
    "stop_words": "send stop_on_eol or stop_on_double_eol, or ask /v1/completions",
}
"""And over Megatron's own path."""
OF_MEGATRON: Mapping[str, Any] = {**DEFAULTS, "skip_prompt_log_probs": False}
"""What asks for nothing there: log-probabilities are those of prompts too."""


def refuse_python_fields(
    body: Any,
    known: Collection[str],
    instead: Mapping[str, str],
    *,
    defaults: Mapping[str, Any] = DEFAULTS,
    place: str = "",
) -> None:
    """Raise ApiError, which names the field, for one whose value asks for what is not done.

    Args:
        body: what was sent.
        known: fields that this endpoint has.
        instead: what to send in place of some fields; others are to be left out.
        defaults: all fields, and the values that ask for nothing.
        place: of the body, in front of its fields.
    """
    if not isinstance(body, Mapping):
        return
    for name in body.keys() & defaults.keys():
        value, default = body[name], defaults[name]
        if name in known or value is None or value in ("", [], {}) or value == default:
            continue
        if value is False and not default:
            continue
        said = f"{place}{name} is not supported here; {instead.get(name, _LEAVE)}"
        raise ApiError(400, said, param=f"{place}{name}", code="unsupported_parameter")
