"""The engine behind transformers' ``generate_batch`` and ``ContinuousBatchingManager``."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from transformers import GenerationConfig

from megatron_async.contrib.transformers import (
    AsyncContinuousBatchingManager,
    async_generate_batch,
)
from megatron_async.contrib.transformers.engine.build import config_for
from megatron_async.contrib.transformers.engine.weights import convert_model
from megatron_async.errors import CheckpointError
from megatron_async.models.gpt_network import GPTNetwork
from tests.support.engines import config_at
from tests.support.huggingface_models import VOCAB_SIZE, random_model

NEW_TOKENS = 10
PROMPTS = [
    torch.randint(1, VOCAB_SIZE, (n,), generator=torch.Generator().manual_seed(n)).tolist()
    for n in (3, 11, 7)
]


def engine_config(depth: int = 2) -> Any:
    return config_at(depth, max_requests=4, block_size_tokens=16, block_count=40, debug=True)


def greedy(**fields: Any) -> GenerationConfig:
    return GenerationConfig(
        **{"do_sample": False, "max_new_tokens": NEW_TOKENS, "eos_token_id": None, **fields}
    )


def generated(model: Any, prompt: list[int], config: GenerationConfig) -> list[int]:
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens


def test_the_cache_on_a_gpu_holds_the_batch_or_what_memory_there_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wrapper = GPTNetwork(convert_model(random_model("llama"), "copy").model)
    block = wrapper.kv_cache_spec.token_bytes * 64
    for free, blocks in ((1 << 34, 2 + 3 + 2), (int(6.5 * block / 0.9), 6), (0, 4)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _, free=free: (free, 1 << 34))
        config = config_for(wrapper, [100, 190], torch.device("cuda"))
        assert (config.max_requests, config.max_sequence_length) == (2, 190)
        assert (config.depth, config.block_count) == (2, blocks)
    assert config_for(wrapper, [100], torch.device("cpu")).block_count is None


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3", "mistral-window", "mixtral"])
def test_batches_are_those_of_generate(name: str) -> None:
    model = random_model(name)
    expected = [generated(model, prompt, greedy()) for prompt in PROMPTS]
    found = async_generate_batch(model, PROMPTS, greedy(), engine_config=engine_config())
    assert list(found) == ["req_0", "req_1", "req_2"]
    assert [out.generated_tokens for out in found.values()] == expected
    assert [out.prompt_ids for out in found.values()] == PROMPTS
    assert {out.status.name for out in found.values()} == {"FINISHED"}
    eos = expected[0][2], expected[1][4]
    ended = [generated(model, prompt, greedy(eos_token_id=list(eos))) for prompt in PROMPTS]
    found = async_generate_batch(
        model, PROMPTS, greedy(eos_token_id=list(eos)), engine_config=engine_config(1)
    )
    assert [out.generated_tokens for out in found.values()] == ended
    assert ended != expected


def test_weights_are_copied_or_taken(caplog: pytest.LogCaptureFixture) -> None:
    model = random_model("llama")
    expected = [generated(model, prompt, greedy()) for prompt in PROMPTS]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    converted = convert_model(model, "copy")
    assert converted.freed_bytes == 0
    assert converted.new_bytes == sum(p.nbytes for p in converted.model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    used, total = copy.deepcopy(model), sum(p.nbytes for p in model.parameters())
    with caplog.at_level(logging.INFO):
        found = async_generate_batch(
            used, PROMPTS, greedy(), engine_config=engine_config(), weights="take"
        )
    assert [out.generated_tokens for out in found.values()] == expected
    layer = used.model.layers[0]
    assert layer.self_attn.q_proj.weight.numel() == 0
    assert layer.self_attn.o_proj.weight.numel() > 0
    assert any("shared with the transformers model" in r.message for r in caplog.records)
    taken = convert_model(copy.deepcopy(model), "take")
    assert taken.freed_bytes == taken.new_bytes < total


def test_what_is_not_supported_is_named() -> None:
    from transformers import OPTConfig, OPTForCausalLM

    small = OPTConfig(
        vocab_size=16, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, ffn_dim=8,
        max_position_embeddings=16, word_embed_proj_dim=8,
    )  # fmt: skip
    with pytest.raises(CheckpointError, match=r"architectures|model_type"):
        async_generate_batch(OPTForCausalLM(small), PROMPTS, greedy())
    model = random_model("llama")
    with pytest.raises(ValueError, match=r"num_beams=3 is not supported"):
        async_generate_batch(model, PROMPTS, greedy(num_beams=3))
    with pytest.raises(ValueError, match="weights is 'borrow'"):
        async_generate_batch(model, PROMPTS, greedy(), weights="borrow")
    assert async_generate_batch(model, []) == {}


def test_sequences_of_a_prompt_and_log_probabilities() -> None:
    model = random_model("llama")
    config = greedy(do_sample=True, temperature=0.9, top_k=20, num_return_sequences=2)
    found = async_generate_batch(
        model, PROMPTS[:2], config, engine_config=engine_config(), log_probs=True
    )
    assert list(found) == ["req_0__child#0", "req_0", "req_1__child#0", "req_1"]
    assert found["req_0"].generated_tokens != found["req_0__child#0"].generated_tokens
    assert all(len(out.logprobs) == NEW_TOKENS for out in found.values())


def test_the_manager_serves_streams_and_cancels() -> None:
    model = random_model("llama")
    expected = [generated(model, prompt, greedy()) for prompt in PROMPTS]
    with AsyncContinuousBatchingManager(model, greedy(), engine_config()) as manager:
        names = manager.add_requests(PROMPTS)
        streamed = manager.add_request(PROMPTS[0], request_id="mine", streaming=True)
        with pytest.raises(ValueError, match="in use"):
            manager.add_request(PROMPTS[0], request_id="mine")
        cancelled = manager.add_request(PROMPTS[1], max_new_tokens=200)
        manager.cancel_request(cancelled)
        manager.cancel_request("unknown")
        finished, parts = {}, []
        for result in manager:
            assert result.request_id != cancelled
            if result.request_id == streamed:
                parts.append(result.generated_tokens)
            if result.status.name == "FINISHED":
                finished[result.request_id] = result.generated_tokens
            if len(finished) == 4:
                manager.stop()
        assert [finished[name] for name in names] == expected
        assert len(parts) > 1 and parts[-1] == expected[0]
        assert all(part == expected[0][: len(part)] for part in parts)
        assert not manager.is_running() and manager.get_result(timeout=0) is None


def test_results_of_one_request() -> None:
    model = random_model("llama")
    with AsyncContinuousBatchingManager(model, greedy(), engine_config()) as manager:
        name = manager.add_request(PROMPTS[2], max_new_tokens=4)
        results = list(manager.request_id_iter(name))
        assert [len(r.generated_tokens) for r in results] == [4]
