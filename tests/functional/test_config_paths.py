"""Fields of a config hold on every path of the engine: chunks, prefix hits, evictions, drafts, and
our own format."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_async.checkpoint import load_pretrained
from megatron_async.checkpoint.native import save_native
from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.sampling_params import SamplingParams
from tests.support.config_fields.bases import BASES, KINDS, Values
from tests.support.config_fields.compare import TOLERANCE, saved_model
from tests.support.engines import config_at

SCALED: Values = {
    "rope_type": "yarn", "rope_theta": 50.0, "factor": 3.0, "original_max_position_embeddings": 16,
    "truncate": None,
}  # fmt: skip
OWN: Values = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
}
MADE: dict[str, Values] = {
    "gemma3_text": {"layer_types": KINDS, "rope_parameters": OWN},
    "ministral3": {"sliding_window": 9},
    "qwen2": {"rope_parameters": SCALED, "layer_types": KINDS},
    "gpt_oss": {"rope_parameters": None},
    "bamba": {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}},
}
PROMPTS = 4
NEW = 12
PATHS: tuple[dict[str, Any], ...] = (
    {"prefill_chunk_tokens": 1, "block_count": 60},
    {"prefill_chunk_tokens": 3, "block_count": 20},  # too few for all: some are evicted
    {"prefill_chunk_tokens": 17, "block_count": 60, "num_speculative_tokens": 3,
     "speculative_method": "ngram"},
    {"prefill_chunk_tokens": 64, "block_count": 60},
)  # fmt: skip


def prompts() -> list[list[int]]:
    """Their common beginning ends within a window, at its end and behind it."""
    rng = random.Random(49)
    start = [rng.randrange(1, 90) for _ in range(26)]
    ends = [[rng.randrange(1, 90) for _ in range(rng.randrange(1, 8))] for _ in range(PROMPTS)]
    return [start[:shared] + end for shared, end in zip((6, 12, 13, 26), ends, strict=True)]


def difference(theirs: Any, request: Any, prompt: list[int]) -> float:
    """The largest of the log-probabilities of generated tokens from transformers'."""
    ids = torch.tensor([prompt + request.generated_tokens])
    with torch.no_grad():
        expected = theirs(ids).logits[0].log_softmax(-1)
    at = torch.arange(len(prompt) - 1, ids.shape[1] - 1)
    found = torch.tensor(request.generated_log_probs)
    return float((expected[at, ids[0, at + 1]] - found).abs().max())


@pytest.mark.sweep
@pytest.mark.parametrize(
    "path", PATHS, ids=lambda path: f"chunks of {path['prefill_chunk_tokens']}"
)
@pytest.mark.parametrize("model_type", MADE)
def test_log_probs_are_transformers_on_every_path(
    model_type: str, path: dict[str, Any], tmp_path: Path
) -> None:
    values = {"model_type": model_type, **BASES[model_type], **MADE[model_type]}
    theirs = saved_model(tmp_path / "theirs", values)
    loaded = load_pretrained(tmp_path / "theirs")
    save_native(tmp_path / "ours", loaded.model, loaded.config)
    params = SamplingParams(
        num_tokens_to_generate=NEW, temperature=1.0, seed=3, termination_id=-1,
        return_log_probs=True, skip_prompt_log_probs=True,
    )  # fmt: skip
    options = config_at(1, device="cpu", max_requests=3, block_size_tokens=4, debug=True, **path)
    with DynamicInferenceEngine.from_pretrained(tmp_path / "ours", options) as engine:
        asked = [*prompts(), *prompts()]
        requests = engine.generate(asked, params)
    for request, prompt in zip(requests, asked, strict=True):
        assert len(request.generated_tokens) == NEW
        assert difference(theirs, request, prompt) < TOLERANCE
