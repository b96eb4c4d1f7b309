"""The file of ``--output-path``: results as NVIDIA's dynamic-inference example writes them."""

from __future__ import annotations

import json
from typing import Any

from megatron_async.request import DynamicInferenceRequest


def results_to_json(requests: list[DynamicInferenceRequest], step_count: int) -> str:
    """One object for each request, by its id."""
    return json.dumps({str(r.request_id): _result(r, step_count) for r in requests}, indent=1)


def _result(request: DynamicInferenceRequest, step_count: int) -> dict[str, Any]:
    result: dict[str, Any] = {
        "input_prompt": request.prompt,
        "generated_text": request.generated_text,
        "generated_tokens": request.generated_tokens,
        "latency": request.latency,
        "ttft": request.ttft,
        "step_count": step_count,
        "top_n_logprobs": request.generated_top_n_logprobs,
        "prompt_top_n_logprobs": request.prompt_top_n_logprobs,
    }
    if request.sampling_params.return_log_probs:
        of_prompt, generated = request.prompt_log_probs, request.generated_log_probs
        result |= {
            "prompt_logprobs": of_prompt,
            "generated_logprobs": generated,
            "logprobs": (of_prompt or []) + (generated or []),
        }
    return result
