"""The file of ``--output-path``: results as NVIDIA's dynamic-inference example writes them."""

from __future__ import annotations

import json
from typing import Any

from megatron_async.engine.requests.log_probs import names_of, tops_by_text
from megatron_async.request.request import DynamicInferenceRequest


def results_to_json(
    requests: list[DynamicInferenceRequest], step_count: int, tokenizer: Any = None
) -> str:
    """One object for each request, by its id. ``top_n`` lists have the texts of tokens, where there
    is a ``tokenizer``."""
    results = {str(r.request_id): _result(r, step_count, tokenizer) for r in requests}
    return json.dumps(results, indent=1)


def _by_text(tops: list[Any] | None, tokenizer: Any) -> list[Any] | None:
    if tops is None or tokenizer is None:
        return tops
    return [tops_by_text(top, names_of(tokenizer)) for top in tops]


def _result(request: DynamicInferenceRequest, step_count: int, tokenizer: Any) -> dict[str, Any]:
    result: dict[str, Any] = {
        "input_prompt": request.prompt,
        "generated_text": request.generated_text,
        "generated_tokens": request.generated_tokens,
        "latency": request.latency,
        "ttft": request.ttft,
        "step_count": step_count,
        "top_n_logprobs": _by_text(request.generated_top_n_logprobs, tokenizer),
        "prompt_top_n_logprobs": _by_text(request.prompt_top_n_logprobs, tokenizer),
    }
    if request.sampling_params.return_log_probs:
        of_prompt, generated = request.prompt_log_probs, request.generated_log_probs
        result |= {
            "prompt_logprobs": of_prompt,
            "generated_logprobs": generated,
            "logprobs": (of_prompt or []) + (generated or []),
        }
    return result
