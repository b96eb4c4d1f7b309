"""Drafts of a model of its own: the embedded model drafts for itself, or for another one."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from megatron_async.checkpoint.load import load_pretrained
from megatron_async.checkpoint.native import save_native
from megatron_async.checkpoint.path import model_directory
from megatron_async.config.engine_config import EngineConfig
from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.engine.recording import read_run
from megatron_async.engine.replay import replay
from megatron_async.errors import ConfigError
from megatron_async.models.build import build_random_model
from megatron_async.models.description.config import ModelConfig, RopeScaling
from megatron_async.sampling_params import SamplingParams
from tests.support.engines import config_at

pytestmark = pytest.mark.sweep

PROMPTS = ["def fibonacci(n):", "class Stack:\n    def push(self", "import os\n\n", "x"]
NEW_TOKENS = 30


def config_of(depth: int, drafts: int, **values: object) -> EngineConfig:
    return config_at(
        depth,
        device="cpu",
        max_requests=4,
        num_speculative_tokens=drafts,
        draft_model="tiny" if drafts else None,
        debug=True,
        **values,
    )


def tokens_of(engine: DynamicInferenceEngine, prompts: list[str] = PROMPTS) -> list[list[int]]:
    params = [
        SamplingParams(num_tokens_to_generate=NEW_TOKENS, temperature=t, seed=i, termination_id=-1)
        for i, t in enumerate((0.0, 0.8))
    ]
    requests = engine.generate([p for p in prompts for _ in params], params * len(prompts))
    return [request.generated_tokens for request in requests]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    with DynamicInferenceEngine.from_pretrained("tiny", config_of(0, 0)) as engine:
        return tokens_of(engine)


@pytest.mark.parametrize(("depth", "drafts", "block_size"), ((0, 1, 64), (1, 3, 16), (2, 2, 1)))
def test_a_model_that_drafts_for_itself_is_always_right(
    expected: list[list[int]], depth: int, drafts: int, block_size: int
) -> None:
    config = config_of(depth, drafts, block_size_tokens=block_size, prefill_chunk_tokens=8)
    with DynamicInferenceEngine.from_pretrained("tiny", config) as engine:
        assert tokens_of(engine) == expected
        counters = engine.counters
    # Where a prompt ends with its block, the next token has no block yet when the first drafts are
    # made: with blocks of one token those after the first are guesses. Ends cut windows too.
    rows = counters.tokens_drafted // drafts
    whole = len(expected) * -(-(NEW_TOKENS - 1) // (drafts + 1))
    spare = len(expected) if drafts > 1 and block_size == 1 else 0
    assert whole <= rows <= whole + spare


def test_another_model_changes_no_token(expected: list[list[int]], tmp_path: Path) -> None:
    pretrained = load_pretrained("tiny")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in pretrained.model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter += 0.02 * noise * parameter.std()
    files = [model_directory("tiny") / name for name in ("tokenizer.json", "tokenizer_config.json")]
    save_native(tmp_path, pretrained.model, pretrained.config, tokenizer_files=files)
    config = config_at(
        1, device="cpu", max_requests=4, num_speculative_tokens=2, draft_model=str(tmp_path)
    )
    with DynamicInferenceEngine.from_pretrained("tiny", config) as engine:
        assert tokens_of(engine) == expected
        accepted = engine.counters.accepted_by_position
    assert accepted[0] > accepted[1] > 0


def test_a_run_is_repeated_by_tokens_where_another_drafts(tmp_path: Path) -> None:
    """The model's own layers are not always right, so that plans differ."""
    path = tmp_path / "run.jsonl"
    params = SamplingParams(num_tokens_to_generate=NEW_TOKENS, temperature=1.0, termination_id=-1)
    config = config_of(1, 2, record=str(path))
    with DynamicInferenceEngine.from_pretrained("tiny", config) as engine:
        engine.generate(PROMPTS[:2], params)
        by_layers = dataclasses.replace(config, record=None, draft_model=None)
        with engine.with_config(by_layers) as other:
            result = replay(read_run(path), other)
            assert 0 < other.counters.tokens_accepted < other.counters.tokens_drafted
    assert (result.exact, result.differences) == (False, ())


def test_what_does_not_suit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="num_speculative_tokens=0"):
        EngineConfig(draft_model="tiny")
    with pytest.raises(ConfigError, match="contradict"):
        EngineConfig(draft_model="tiny", num_speculative_tokens=1, speculative_method="ngram")
    small = dataclasses.replace(load_pretrained("tiny").config, vocab_size=300, mtp_num_layers=0)
    model = build_random_model(small, device="cpu", dtype=torch.float32)
    save_native(tmp_path, model, small)
    config = config_at(1, device="cpu", num_speculative_tokens=1, draft_model=str(tmp_path))
    with pytest.raises(ConfigError, match="300 token ids"):
        DynamicInferenceEngine.from_pretrained("tiny", config)


@pytest.mark.parametrize("depth", (0, 1, 2))
@pytest.mark.parametrize(("prompt", "new"), ((7, 4), (2, 38), (25, 15), (39, 1), (36, 4)))
def test_learned_positions_end_where_the_model_does(
    depth: int, prompt: int, new: int, tmp_path: Path
) -> None:
    """Drafts behind the end of a request have positions that its table lacks."""
    config = ModelConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, num_kv_heads=4, head_dim=8,
        ffn_hidden_size=48, vocab_size=96, max_sequence_length=40, normalization="LayerNorm",
        position_embedding="learned_absolute", activation="gelu_tanh",
    )  # fmt: skip
    model = build_random_model(config, device=torch.device("cpu"), dtype=torch.float32, seed=4)
    save_native(tmp_path, model, config)
    params = SamplingParams(num_tokens_to_generate=new, temperature=0, termination_id=-1)
    prompts = [[(7 * n + m) % 96 for n in range(prompt)] for m in range(3)]
    found = []
    for drafts in (0, 4):
        values = {
            "num_speculative_tokens": drafts,
            "draft_model": str(tmp_path) if drafts else None,
        }
        options = config_at(depth, device="cpu", max_requests=2, debug=True, **values)
        with DynamicInferenceEngine.from_pretrained(tmp_path, options) as engine:
            found.append([r.generated_tokens for r in engine.generate(prompts, params)])
    assert found[0] == found[1] and len(found[0][0]) == new


LEARNED = ModelConfig(
    num_layers=2, hidden_size=32, num_attention_heads=4, num_kv_heads=4, head_dim=8,
    ffn_hidden_size=48, vocab_size=96, max_sequence_length=64, normalization="LayerNorm",
    position_embedding="learned_absolute", activation="gelu_tanh",
)  # fmt: skip
SCALED = RopeScaling(
    kind="longrope", factor=2.0, original_max_position_embeddings=16,
    short_factor=(1.0,) * 4, long_factor=(2.0,) * 4,
)  # fmt: skip
SHORTER = {
    "a shorter table": {"max_sequence_length": 20},
    "no more than a few": {"max_sequence_length": 3},
    "other rotations": {"position_embedding": "rope", "rope_scaling": SCALED},
    "a window": {"position_embedding": "rope", "sliding_window": 5, "max_sequence_length": 24},
}


@pytest.mark.parametrize("depth", (0, 2))
@pytest.mark.parametrize("name", SHORTER)
def test_a_request_goes_on_where_its_drafter_cannot(name: str, depth: int, tmp_path: Path) -> None:
    """Prompts end before, at and behind the drafter's last position; some are computed again."""
    shorter = dataclasses.replace(LEARNED, **SHORTER[name])
    for folder, config in (("model", LEARNED), ("draft", shorter)):
        model = build_random_model(config, device=torch.device("cpu"), dtype=torch.float32, seed=4)
        save_native(tmp_path / folder, model, config)
    prompts = [[(7 * n + m) % 96 for n in range(m)] for m in (1, 14, 19, 20, 21, 33)]
    params = SamplingParams(num_tokens_to_generate=25, temperature=0, termination_id=-1)
    found, drafted = [], 0
    for drafts in (0, 3):
        options = config_at(
            depth, device="cpu", max_requests=3, debug=True, block_size_tokens=4, block_count=30,
            prefill_chunk_tokens=8, num_speculative_tokens=drafts,
            draft_model=str(tmp_path / "draft") if drafts else None,
        )  # fmt: skip
        with DynamicInferenceEngine.from_pretrained(tmp_path / "model", options) as engine:
            found.append([r.generated_tokens for r in engine.generate(prompts, params)])
            drafted = engine.counters.tokens_drafted
    assert found[0] == found[1] and all(len(tokens) == 25 for tokens in found[0])
    limit = min(shorter.max_sequence_length, 16 if shorter.rope_scaling else 64)
    within = sum(max(0, limit - len(prompt)) for prompt in prompts)
    assert bool(drafted) == bool(within) and drafted <= 3 * (within + 2 * len(prompts))
