"""Token-for-token equality with Hugging Face `generate` on random checkpoints saved to disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.sampling_params import SamplingParams
from tests.support.engines import DEPTHS, config_at

SIZES: dict[str, Any] = dict(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=128,
    max_position_embeddings=512,
    eos_token_id=None,
    bos_token_id=None,
    pad_token_id=0,
    initializer_range=0.3,
)
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "llama-3-rope": lambda: transformers.LlamaConfig(
        **SIZES,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "qwen2": lambda: transformers.Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, head_dim=32),
}
PROMPT_LENGTHS = (1, 3, 16, 17, 40, 70, 129)
NEW_TOKENS = 60


@pytest.fixture(scope="module", params=CONFIGS)
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[list[int]], list[list[int]]]:
    """A saved model, prompts, and what `generate` makes of each prompt."""
    torch.manual_seed(5)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[request.param]()).eval()
    path = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(path)
    generator = torch.Generator().manual_seed(9)
    prompts = [torch.randint(1, 128, (n,), generator=generator).tolist() for n in PROMPT_LENGTHS]
    expected = []
    for prompt in prompts:
        out = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
        )
        expected.append(out[0, len(prompt) :].tolist())
    assert len({tuple(tokens) for tokens in expected}) == len(prompts)
    assert all(len(set(tokens)) > 5 for tokens in expected), "degenerate text proves little"
    return path, prompts, expected


@pytest.mark.parametrize("depth", DEPTHS)
def test_greedy_tokens_equal_generate(
    depth: int, checkpoint: tuple[Path, list[list[int]], list[list[int]]]
) -> None:
    path, prompts, expected = checkpoint
    config = config_at(
        depth, max_requests=4, block_size_tokens=16, prefill_chunk_tokens=32, debug=True
    )
    with DynamicInferenceEngine.from_pretrained(path, config) as engine:
        requests = engine.generate(
            prompts,
            SamplingParams(temperature=0, num_tokens_to_generate=NEW_TOKENS, termination_id=-1),
        )
    assert [request.generated_tokens for request in requests] == expected
    counters = engine.counters
    assert counters.steps_with_waiting > 0
    assert counters.prefill_chunks > len(prompts)
    assert counters.blocks_granted >= sum((n + NEW_TOKENS) // 16 for n in PROMPT_LENGTHS)
    assert (counters.steps_overlapped > 0) == (depth > 0)
