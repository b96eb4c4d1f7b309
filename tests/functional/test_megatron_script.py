"""A Megatron user's script changes its imports and runs: stock model, megatron-core's names."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from megatron_async import (
    DynamicInferenceContext,
    DynamicInferenceEngine,
    EngineConfig,
    GPTInferenceWrapper,
    SamplingParams,
    TextGenerationController,
)
from megatron_async import megatron_compat as compat
from megatron_async.errors import ConfigError
from megatron_async.models.build import build_model
from megatron_async.models.config import ModelConfig

from megatron.core.models.gpt import GPTModel  # isort: skip
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # isort: skip
from megatron.core.transformer import TransformerConfig  # isort: skip

VOCAB = 96


class Tokenizer:
    """As much of a tokenizer as megatron-core's own tests use."""

    eod = VOCAB - 1
    bos = VOCAB - 2
    vocab_size = VOCAB

    def tokenize(self, text: str) -> list[int]:
        return [ord(c) - 32 for c in text]

    def detokenize(self, tokens: list[int]) -> str:
        return "".join(chr(32 + t) for t in tokens)


def stock_model() -> GPTModel:
    compat.ensure_parallel_state()
    torch.manual_seed(0)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        num_query_groups=2,
        use_cpu_initialization=True,
        init_method=lambda weight: torch.nn.init.normal_(weight, std=0.3),
        output_layer_init_method=lambda weight: torch.nn.init.normal_(weight, std=0.3),
        add_bias_linear=True,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
    )
    return GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(normalization="LayerNorm"),
        vocab_size=VOCAB,
        max_sequence_length=128,
        parallel_output=False,
        position_embedding_type="rope",
    ).eval()


def build(depth: int) -> DynamicInferenceEngine:
    model = stock_model()
    context = DynamicInferenceContext(
        params_dtype=torch.float32,
        num_layers=model.config.num_layers,
        kv_channels=model.config.kv_channels,
        num_attention_heads=model.config.num_query_groups,
        max_sequence_length=128,
        buffer_size_gb=0.001,
        max_requests=3,
        block_size_tokens=16,
        device="cpu",
    )
    controller = TextGenerationController(GPTInferenceWrapper(model, context), Tokenizer())
    config = EngineConfig(inference_async_scheduling=depth > 0, depth=depth or None)
    return DynamicInferenceEngine(controller, context, random_seed=123, config=config)


def reference(prompt: str, new_tokens: int) -> list[int]:
    """Greedy tokens from whole forwards of an untouched stock model, without a cache."""
    model = stock_model()
    tokens = Tokenizer().tokenize(prompt)
    generated: list[int] = []
    # megatron-core's own attention forks the state of CUDA's generator, for dropout.
    no_generator = SimpleNamespace(fork=contextlib.nullcontext)
    with (
        torch.no_grad(),
        mock.patch("megatron.core.tensor_parallel.get_cuda_rng_tracker", lambda: no_generator),
    ):
        while len(generated) < new_tokens:
            ids = torch.tensor([tokens])
            mask = torch.ones(1, 1, len(tokens), len(tokens), dtype=torch.bool).triu(1)
            logits = model(ids, torch.arange(len(tokens))[None], mask)
            generated.append(int(logits[0, -1].argmax()))
            tokens.append(generated[-1])
            if generated[-1] == Tokenizer.eod:
                break
    return generated


PROMPTS = ["Hello", "x", "The quick brown fox jumps over", "a + b", "megatron"]


@pytest.mark.parametrize("depth", (0, 1, 2))
def test_script_with_a_stock_model_runs(depth: int) -> None:
    engine = build(depth)
    params = SamplingParams(temperature=1.0, top_k=1, num_tokens_to_generate=24)
    for request_id, prompt in enumerate(PROMPTS):
        engine.add_request(request_id, prompt, params)
    records = []
    while engine.has_unfinished_requests():
        result = engine.step_modern()
        records.extend(result["finished_request_records"])
    requests = sorted((record.merge() for record in records), key=lambda r: r.request_id)
    assert [request.prompt for request in requests] == PROMPTS
    for request in requests:
        assert request.generated_tokens == reference(request.prompt, 24)
        tokens = request.generated_tokens
        text = tokens[:-1] if request.finish_reason == "stop" else tokens
        assert request.generated_text == Tokenizer().detokenize(text)
    engine.close()


def test_arguments_that_cannot_be_honoured_are_refused() -> None:
    config = ModelConfig(
        num_layers=1,
        hidden_size=16,
        num_attention_heads=2,
        num_kv_heads=1,
        head_dim=8,
        ffn_hidden_size=16,
        vocab_size=VOCAB,
        max_sequence_length=64,
    )
    model = build_model(config, device="cpu", dtype=torch.float32)
    sizes = dict(
        params_dtype=torch.float32,
        num_layers=1,
        kv_channels=8,
        num_attention_heads=1,
        max_sequence_length=64,
        block_count=8,
        max_requests=2,
        device="cpu",
    )
    context = DynamicInferenceContext(**sizes, max_tokens=50)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="max_tokens=50"):
        DynamicInferenceEngine(TextGenerationController(model), context)
    with pytest.raises(ConfigError, match="enable_cuda_graph=False"):
        DynamicInferenceEngine(TextGenerationController(model), context, enable_cuda_graph=False)
    with pytest.raises(ConfigError, match="max_tokens=50"):
        DynamicInferenceEngine(
            TextGenerationController(model), context, enable_chunked_prefill=False
        )
