"""A Megatron user's script changes its imports and runs: stock model, megatron-core's names."""

from __future__ import annotations

import contextlib
import functools
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from tests.support import megatron_script
from tests.support.stock_model import Tokenizer, stock_model


@functools.cache
def reference(prompt: str, new_tokens: int, device: str = "cpu") -> tuple[list[int], list[float]]:
    """Greedy tokens from whole forwards of an untouched stock model, without a cache, and the
    log-probabilities of all tokens but the first of the prompt."""
    model = stock_model(device)
    tokens = Tokenizer().tokenize(prompt)
    generated: list[int] = []
    # megatron-core's own attention forks the state of CUDA's generator, for dropout.
    no_generator = SimpleNamespace(fork=contextlib.nullcontext)
    with (
        torch.no_grad(),
        mock.patch("megatron.core.tensor_parallel.get_cuda_rng_tracker", lambda: no_generator),
    ):
        while len(generated) < new_tokens:
            ids = torch.tensor([tokens], device=device)
            mask = torch.ones(1, 1, len(tokens), len(tokens), dtype=torch.bool).triu(1)
            logits = model(ids, torch.arange(len(tokens), device=device)[None], mask.to(device))
            generated.append(int(logits[0, -1].argmax()))
            tokens.append(generated[-1])
            if generated[-1] == Tokenizer.eod:
                break
        log_probs = logits[0].log_softmax(-1)
    found = log_probs[torch.arange(len(tokens) - 1), tokens[1:]]
    return generated, found.tolist()


PROMPTS = ["Hello", "x", "The quick brown fox jumps over", "a + b", "megatron"]
SIZES = ["--inference-dynamic-batching-buffer-size-gb", "0.001"]
SIZES += ["--inference-dynamic-batching-block-size", "16", "--num-tokens-to-generate", "24"]


def check(requests: list[megatron_script.Asked], new_tokens: int = 24, device: str = "cpu") -> None:
    """Each request has the tokens of the stock model."""
    assert [request.prompt_text for request in requests] == PROMPTS
    for request in requests:
        tokens, log_probs = reference(request.prompt_text, new_tokens, device)
        assert request.output_tokens == tokens
        text = tokens[:-1] if tokens[-1] == Tokenizer.eod else tokens
        assert request.output_text == Tokenizer().detokenize(text)
        if request.log_probs is not None:
            assert request.log_probs == pytest.approx(log_probs, abs=1e-4)


ON_GPU = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    ],
)


@pytest.mark.parametrize("device", ("cpu", ON_GPU))
@pytest.mark.parametrize("depth", (0, 1, 2))
def test_script_gives_the_tokens_of_the_stock_model(
    depth: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device == "cpu":
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("MEGATRON_ASYNC_DEPTH", str(depth))
    argv = ["--prompts", *PROMPTS, *SIZES, "--inference-dynamic-batching-max-requests", "3"]
    argv += ["--incoming-requests-per-step", "2", "--suspend-resume-interval", "9"]
    argv += ["--return-log-probs", "--inference-repeat-n", "2"]
    result = megatron_script.main(argv, lambda: stock_model(device), Tokenizer())
    engine = result["engine"]
    assert engine.depth == depth and engine.context.device.type == device
    check(result["requests"], device=device)
    assert result["attempts"] > result["step_count"] - 3
    assert len(result["times"]["decode"]) > len(result["times"]["prefill"]) > 0
    assert engine.counters.barriers > 1  # it was suspended
    engine.close()


def test_script_runs_with_the_other_values_of_its_arguments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Graphs, an unchunked prefill that max_tokens has no room for, a paused buffer that evicts,
    the number of requests derived from memory, and metrics."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("MEGATRON_ASYNC_DEPTH", "1")
    metrics: list[dict[str, float]] = []
    writer = SimpleNamespace(log=lambda values, commit: metrics.append(values))
    gib = 6 * 2 * 2 * 2 * 16 * 16 * 4 / 2**30  # of six blocks, one of them the null block
    argv = ["--prompts", *PROMPTS, "--num-tokens-to-generate", "40", "--cuda-graph-impl", "local"]
    argv += ["--inference-dynamic-batching-buffer-size-gb", str(gib)]
    argv += ["--inference-dynamic-batching-block-size", "16", "--disable-chunked-prefill"]
    argv += ["--inference-dynamic-batching-max-tokens", "40", "--decode-only-cuda-graphs"]
    argv += ["--inference-dynamic-batching-paused-buffer-size-gb", "0"]
    argv += ["--inference-dynamic-batching-track-paused-request-events"]
    argv += ["--inference-logging-step-interval", "10"]
    result = megatron_script.main(argv, stock_model, Tokenizer(), writer)
    engine = result["engine"]
    check(result["requests"], 40)
    assert engine.context.max_requests == 5
    assert result["setup"] == "graphs 1 | uvm 0 | 5 chunks [r 5, t 40]"
    assert engine.config.capture_mixed_steps is False
    events = {event.type.name for request in result["requests"] for event in request.events}
    assert {"ADD", "PAUSE", "EVICT", "FINISH"} <= events
    assert engine.evicted_request_count > 0
    assert [values["inference/inference_step"] for values in metrics[:2]] == [10, 20]
    assert any(values["inference/allocated_utilization"] > 50 for values in metrics)
    engine.close()
