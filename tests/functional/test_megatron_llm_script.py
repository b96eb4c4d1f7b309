"""A script for core_v0.19 changes its imports and runs, whatever release is installed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_async.megatron_api import MegatronLLM
from tests.functional.test_megatron_script import PROMPTS, reference
from tests.support import megatron_llm_script
from tests.support.stock_hybrid import VOCAB, stock_hybrid
from tests.support.stock_model import Tokenizer, no_gpu, stock_model  # noqa: F401

NEW = 12


def run(*argv: str, prompts: list[str] = PROMPTS) -> list[Any]:
    given = ["--prompts", *prompts, "--num-tokens-to-generate", str(NEW), *argv]
    return megatron_llm_script.main(given, stock_model, Tokenizer())


@pytest.mark.parametrize("api", ["engine", "llm", "coordinator", "async"])
@pytest.mark.parametrize("mode", ["legacy", "async"])
def test_each_way_to_call_gives_the_tokens_of_the_stock_model(api: str, mode: str) -> None:
    requests = run("--api", api, "--inference-dynamic-batching-async-sched-mode", mode)
    for prompt, request in zip(PROMPTS, requests, strict=True):
        assert request.generated_tokens == reference(prompt, NEW)[0]
        assert request.prompt_tokens.tolist() == Tokenizer().tokenize(prompt)


def test_log_probabilities_are_as_the_mode_says() -> None:
    """Of what is left by top-k 2 a token is likelier than of all."""
    option = "--inference-dynamic-batching-logprobs-mode"
    modes = [
        run("--return-log-probs", "--top_k", "2", option, mode, "--inference-repeat-n", "2")
        for mode in ("raw_logprobs", "processed_logprobs")
    ]
    differ = 0
    for raw, processed in zip(*modes, strict=True):
        assert raw.generated_tokens == processed.generated_tokens
        pairs = list(zip(raw.generated_log_probs, processed.generated_log_probs, strict=True))
        assert all(one <= other + 1e-5 for one, other in pairs)
        differ += sum(other > one + 0.1 for one, other in pairs)
    assert differ > 10
    (request,) = run("--return-log-probs", prompts=["Hello"])
    expected = reference("Hello", NEW)[1][-len(request.generated_log_probs) :]
    assert request.generated_log_probs == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("backend", ["torch", "flashinfer"])
def test_the_sampling_backend_changes_nothing(backend: str) -> None:
    option = "--inference-dynamic-batching-sampling-backend"
    (request,) = run(option, backend, prompts=["Hello"])
    assert request.generated_tokens == reference("Hello", NEW)[0]


def test_stop_words_stay_in_the_text() -> None:
    text = Tokenizer().detokenize(reference("Hello", NEW)[0])
    word = text[3:5]
    (request,) = run("--stop-words", word, prompts=["Hello"])
    assert request.generated_text == text[: text.index(word) + 2]


def test_an_engine_without_a_config_decodes_asynchronously() -> None:
    """As Megatron's main branch; what its config says comes first."""
    with MegatronLLM(model=stock_model(), tokenizer=Tokenizer(), use_coordinator=False) as llm:
        assert llm.engine.depth == 1
        llm.generate(["Hello", "x"], None)
        assert llm.context.async_sched_step_count > 0


@torch.no_grad()
def test_hybrid_models_of_megatron_are_served() -> None:
    config = megatron_llm_script.InferenceConfig(
        buffer_size_gb=0.001, block_size_tokens=16, max_sequence_length=96, max_requests=2
    )
    prompt = [3 * n % VOCAB for n in range(9)]
    model = stock_hybrid("M-*M")
    with MegatronLLM(model=model, tokenizer=Tokenizer(), inference_config=config) as llm:
        assert llm.context.num_attention_layers == 1
        (request,) = llm.generate([prompt], None)
    logits = model(torch.tensor([prompt]), torch.arange(9)[None], None)
    assert len(request.generated_tokens) == request.generated_length > 0
    assert logits.shape[-1] == VOCAB
