"""Token-for-token equality with Hugging Face `generate` on random checkpoints saved to disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers

from megatron_async.checkpoint import load_pretrained
from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.models.gpt_network import GPTNetwork
from megatron_async.models.served import ServedModel
from megatron_async.sampling_params import SamplingParams
from tests.support.engines import config_at
from tests.support.huggingface_models import (
    CONFIGS,
    LONGROPE,
    SIZES,
    VOCAB_SIZE,
    random_model,
)

DEPTHS = (0, 1, 2)
PROMPT_LENGTHS = (41, 61)
NEW_TOKENS = 12


class Compared(NamedTuple):
    """transformers' model, ours from the same directory, prompts, and `generate` of each."""

    theirs: Any
    ours: Any
    prompts: list[list[int]]
    expected: list[list[int]]


@pytest.fixture(scope="module", params=CONFIGS)
def compared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Compared:
    model = random_model(request.param)
    path: Path = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(path)
    generator = torch.Generator().manual_seed(9)
    prompts = [
        torch.randint(1, VOCAB_SIZE, (n,), generator=generator).tolist() for n in PROMPT_LENGTHS
    ]
    expected = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False
        )
        expected.append(out[0, len(prompt) :].tolist())
    assert len(set().union(*expected)) > 4, "degenerate text proves little"
    return Compared(model, load_pretrained(path).model, prompts, expected)


@pytest.mark.sweep
def test_logits_equal_those_of_transformers(compared: Compared) -> None:
    ids = torch.tensor([compared.prompts[-1] + compared.expected[-1]])[:, :69]
    with torch.no_grad():
        theirs = compared.theirs(ids).logits
        ours = compared.ours(
            ids, torch.arange(ids.shape[1])[None], None, runtime_gather_output=True
        )
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-5)


@pytest.mark.sweep
def test_tokens_equal_generate_at_every_depth(compared: Compared) -> None:
    params = {"num_tokens_to_generate": NEW_TOKENS, "termination_id": -1}
    greedy = SamplingParams(temperature=0, **params)
    sampled: dict[int, list[int]] = {}
    for depth in DEPTHS:
        config = config_at(
            depth, max_requests=3, block_size_tokens=16, block_count=40, prefill_chunk_tokens=32,
            enable_prefix_caching=False, debug=True,
        )  # fmt: skip
        wrapper = GPTNetwork(compared.ours)
        with DynamicInferenceEngine(ServedModel(network=wrapper), config) as engine:
            requests = engine.generate(
                [*compared.prompts, compared.prompts[0]],
                [greedy, greedy, SamplingParams(temperature=1.0, seed=1, **params)],
            )
            counters = engine.counters
        tokens = [request.generated_tokens for request in requests]
        assert tokens[:2] == compared.expected
        sampled[depth] = tokens[2]
        assert counters.prefill_chunks > len(compared.prompts)
        assert (counters.steps_overlapped > 0) == (depth > 0)
    assert sampled[0] == sampled[1] == sampled[2]
    assert sampled[0] != compared.expected[0]


@pytest.mark.parametrize("depth", DEPTHS)
def test_longrope_requests_are_computed_again_where_their_rotations_change(
    depth: int, tmp_path: Path
) -> None:
    """Short and long requests with a common prefix, which they may not share."""
    model = random_model("phi3-longrope")
    limit = model.config.rope_parameters["original_max_position_embeddings"]
    model.save_pretrained(tmp_path)
    start = torch.randint(1, VOCAB_SIZE, (60,), generator=torch.Generator().manual_seed(3)).tolist()
    prompts = [start[:40], start, start[:limit], start[: limit + 1], start[:33]]
    config = config_at(
        depth, max_requests=2, block_size_tokens=4, block_count=60, prefill_chunk_tokens=16,
        debug=True,
    )  # fmt: skip
    params = SamplingParams(temperature=0, num_tokens_to_generate=NEW_TOKENS, termination_id=-1)
    with DynamicInferenceEngine.from_pretrained(tmp_path, config) as engine:
        requests = engine.generate(prompts, params)
        counters = engine.counters
    for request, prompt in zip(requests, prompts, strict=True):
        ids = torch.tensor([prompt])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False
        )
        assert request.generated_tokens == out[0, len(prompt) :].tolist()
    assert counters.evictions == 2
    assert counters.tokens_cached > 0


@pytest.mark.parametrize(("depth", "prefix_caching"), [(0, True), (1, False), (2, True)])
def test_blocks_behind_the_window_of_all_layers_come_free(
    depth: int, prefix_caching: bool, tmp_path: Path
) -> None:
    """Three requests of 12 blocks each run side by side in 24, without an eviction."""
    model = random_model("mistral-window")
    model.save_pretrained(tmp_path)
    prompts = [[n + 1, n + 5, n + 2] for n in range(3)]
    params = SamplingParams(temperature=0, num_tokens_to_generate=44, termination_id=-1)
    found = []
    for window, blocks in ((20, 24), (20, 40), (None, 24)):
        config = config_at(
            depth, max_requests=3, block_size_tokens=4, block_count=blocks,
            enable_prefix_caching=prefix_caching, debug=True,
        )  # fmt: skip
        wrapper = GPTNetwork(load_pretrained(tmp_path).model)
        assert wrapper.attention_window == 20
        if window is None:
            wrapper.attention_window = None  # its scheduler knows of no window
        with DynamicInferenceEngine(ServedModel(network=wrapper), config) as engine:
            found.append([r.generated_tokens for r in engine.generate(prompts, params)])
            assert (engine.counters.evictions > 0) == (window is None)
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("Llama", {"rope_parameters": {**LONGROPE, "original_max_position_embeddings": 16}}),
        ("Mistral", {"sliding_window": 1}),
    ],
)
def test_tokens_are_those_of_generate_without_a_cache_where_its_cache_changes_them(
    kind: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    """docs/models.md says why. If a later transformers mends it, the page can be shortened."""
    torch.manual_seed(5)
    config = getattr(transformers, f"{kind}Config")(**SIZES, **changes)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(tmp_path)
    prompt = torch.tensor([list(range(3, 15))])
    expected = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        use_cache=False,
    )[0, 12:].tolist()
    params = SamplingParams(temperature=0, num_tokens_to_generate=NEW_TOKENS, termination_id=-1)
    config = config_at(1, max_requests=2, block_size_tokens=4, block_count=60, debug=True)
    with DynamicInferenceEngine.from_pretrained(tmp_path, config) as engine:
        (request,) = engine.generate(prompt.tolist(), params)
    assert request.generated_tokens == expected


def test_longrope_request_that_is_paused_at_the_border_is_computed_again(tmp_path: Path) -> None:
    model = random_model("phi3-longrope")
    model.save_pretrained(tmp_path)
    prompt = list(range(1, 45))
    params = SamplingParams(
        temperature=0,
        num_tokens_to_generate=NEW_TOKENS,
        termination_id=-1,
        return_log_probs=True,
        skip_prompt_log_probs=True,
    )
    config = config_at(1, max_requests=2, block_size_tokens=4, block_count=60, debug=True)
    found = []
    with DynamicInferenceEngine.from_pretrained(tmp_path, config) as engine:
        for pause_at in range(8):
            future = engine.add_request(pause_at, prompt, params)
            for _ in range(pause_at):
                engine.step_modern()
            engine.pause_request(pause_at)
            for _ in range(3):
                engine.step_modern()
            engine.resume_request(pause_at)
            while engine.has_unfinished_requests():
                engine.step_modern()
            found.append(future.result())
    tokens, log_probs = found[0].generated_tokens, torch.tensor(found[0].generated_log_probs)
    for request in found:
        assert request.generated_tokens == tokens
        torch.testing.assert_close(torch.tensor(request.generated_log_probs), log_probs)
