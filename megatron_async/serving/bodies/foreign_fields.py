"""Fields of other servers' APIs that change what comes back, and that this one does not have.

To ignore them would be to answer something else than what was asked.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from megatron_async.serving.http.errors import ApiError

_LEAVE = "leave it out"
_SAMPLING = f"{_LEAVE}, and send temperature, top_k, top_p or min_p"

FOREIGN_FIELDS: Mapping[str, str] = {
    # OpenAI's older ones
    "functions": "send tools",
    "function_call": "send tool_choice",
    "audio": _LEAVE,
    "web_search_options": _LEAVE,
    # vLLM's
    "truncate_prompt_tokens": "shorten the prompt",
    "use_beam_search": "send n and best_of to /v1/completions",
    "length_penalty": "send repetition_penalty or min_tokens",
    "early_stopping": _LEAVE,
    "logits_processors": "send logit_bias, allowed_token_ids or bad_words",
    "chat_template": "start the server with --chat-template",
    "documents": "put them into a message",
    "mm_processor_kwargs": _LEAVE,
    "prompt_embeds": "send prompt",
    "logprob_token_ids": "send logprobs or top_logprobs",
    "thinking_token_budget": "send max_tokens",
    "watermarking": _LEAVE,
    "repetition_detection": "send repetition_penalty",
    "return_token_offsets": "send return_token_ids",
    "return_prompt_text": "send return_token_ids",
    "kv_transfer_params": "send token ids as prompt to /v1/completions",
    "ec_transfer_params": _LEAVE,
    "vllm_xargs": _LEAVE,
    "routed_experts_prompt_start": _LEAVE,
    "mm_payload": _LEAVE,
    "return_mm_kwargs": _LEAVE,
    "enable_response_messages": _LEAVE,
    "previous_input_messages": "send input",
    "echo": "send add_generation_prompt=false and continue_final_message=true, or /v1/completions",
    "best_of": "send n, or best_of to /v1/completions",
    "suffix": "put it into a message",
    # SGLang's
    "regex": "send structured_outputs with regex",
    "ebnf": "send structured_outputs with grammar",
    "json_schema": "send response_format or structured_outputs with json",
    "stop_regex": "send stop",
    "no_stop_trim": "send include_stop_str_in_output",
    "lora_path": _LEAVE,
    "input_ids": "send prompt, which takes token ids",
    "input_embeds": "send prompt",
    "return_hidden_states": _LEAVE,
    "custom_logit_processor": "send logit_bias, allowed_token_ids or bad_words",
    "custom_params": _LEAVE,
    "session_params": "send the whole prompt",
    "watermark": _LEAVE,
    "return_sampling_mask": _LEAVE,
    "return_prompt_token_ids": "send return_token_ids",
    "return_meta_info": "read usage and stop_reason",
    "return_spec_tokens_details": "read GET /metrics",
    # llama.cpp's and TGI's
    "grammar": "send structured_outputs with grammar",
    "n_predict": "send max_tokens",
    "max_new_tokens": "send max_tokens",
    "repeat_penalty": "send repetition_penalty",
    "typical_p": _SAMPLING,
    "tfs_z": _SAMPLING,
    "mirostat": _SAMPLING,
    "dynatemp_range": _SAMPLING,
    "xtc_probability": _SAMPLING,
    "dry_multiplier": "send repetition_penalty",
}
"""What to send in place of each."""

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "function_call": ("none", "auto"),  # it changes nothing without functions
    **dict.fromkeys(("length_penalty", "repeat_penalty", "typical_p", "tfs_z", "best_of"), (1,)),
    **dict.fromkeys(("mirostat", "dynatemp_range", "xtc_probability", "dry_multiplier"), (0,)),
}
"""Values, besides null, false and what is empty, that change nothing."""


def refuse_foreign_fields(body: Any, known: Collection[str]) -> None:
    """Raise ApiError, which names the field, for one whose value changes what comes back.

    Args:
        body: what was sent.
        known: fields that this endpoint has.
    """
    if not isinstance(body, Mapping):
        return
    for name in body.keys() & FOREIGN_FIELDS.keys():
        value = body[name]
        if name in known or value is None or value is False or value in ("", [], {}):
            continue
        if value is not True and value in _NEUTRAL.get(name, ()):
            continue
        said = f"{name} is not supported here; {FOREIGN_FIELDS[name]}"
        raise ApiError(400, said, param=name, code="unsupported_parameter")
