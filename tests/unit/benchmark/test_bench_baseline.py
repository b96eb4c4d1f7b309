"""What ``bench`` compares with, on a CPU."""

from __future__ import annotations

import importlib.util
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_async.benchmark.measuring import baselines
from megatron_async.benchmark.measuring.loads import Load
from megatron_async.checkpoint.huggingface.transformers_config import transformers_config
from megatron_async.cli.main import main
from megatron_async.models.description.memory_traffic import weight_bytes
from megatron_async.models.description.shapes import SHAPES

Capture = pytest.CaptureFixture[str]
SMALL = ("--shape", "tiny-llama", "--prompt-tokens", "8", "--new-tokens", "24", "--device", "cpu")
CPU, TINY = torch.device("cpu"), SHAPES["tiny-llama"]

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="the baselines are transformers'"
)


def requests(count: int, new_tokens: int) -> baselines.Requests:
    load = Load(prompt_tokens=4, new_tokens=new_tokens)
    return [(one.prompt, new_tokens) for one in load.requests(TINY.vocab_size, count)]


@needs_transformers
def test_generate_decodes_the_same_load() -> None:
    baseline = baselines.TransformersBaseline(TINY, CPU, torch.float32)
    (row,), _ = baseline.measure(requests(2, 16), 2)
    assert row["batch"] == 2 and row["steps"] == 16 - baselines.SKIPPED_STEPS - 1
    assert row["step_ms_mean"] > 0
    rows, (reason,) = baseline.measure([([1, 2], 16), ([1, 2, 3], 16)], 2)
    assert not rows and "one length" in reason


@needs_transformers
def test_continuous_batching_decodes_the_same_load() -> None:
    baseline = baselines.ContinuousBatchingBaseline(TINY, CPU, torch.float32)
    (row,), (reason,) = baseline.measure(requests(2, 24), 2)
    assert "continuous batching, synchronous" in row["engine"]
    assert 0 < row["steps"] <= 24 and row["output_tokens"] == 48
    assert "asynchronous" in reason
    (row,), _ = baseline.measure([([1, 2], 3), ([1, 2, 3], 9), ([5], 4)], 2)
    assert row["output_tokens"] == 16 and "step_ms_mean" not in row
    assert not [t for t in threading.enumerate() if "_run_generation_loop" in t.name]


@needs_transformers
def test_another_interface_of_transformers_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    baseline = baselines.ContinuousBatchingBaseline(TINY, CPU, torch.float32)

    def changed(**_: Any) -> None:
        raise TypeError("got an unexpected keyword argument")

    monkeypatch.setattr(baseline._model, "continuous_batching_context_manager", changed)
    rows, reasons = baseline.measure(requests(1, 16), 1)
    assert not rows and len(reasons) == 2 and all("unexpected keyword" in one for one in reasons)


@needs_transformers
@pytest.mark.parametrize(
    "shape",
    [
        *("llama8b", "qwen0.6b", "gpt2", "qwen2.5-7b", "mistral7b", "phi3-mini", "gemma2-9b"),
        *("qwen3-30b-a3b", "nemotron-h-8b"),
    ],
)
def test_baseline_has_as_many_parameters(shape: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = SHAPES[shape]
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers_config(config))
    embedding = config.vocab_size * config.hidden_size
    learned = config.position_embedding == "learned_absolute"
    expected = weight_bytes(config, 1) + (0 if config.tie_word_embeddings else embedding)
    expected += config.max_sequence_length * config.hidden_size if learned else 0
    assert sum(parameter.numel() for parameter in model.parameters()) == expected


@needs_transformers
def test_both_baselines_are_reported(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "report.json"
    options = ("--rounds", "1", "--depths", "0", "--baseline", "transformers,transformers-cb")
    assert main(["bench", *SMALL, *options, "--json", str(path)]) == 0
    generate, batching = json.loads(path.read_text())["baselines"]
    assert [generate["name"], batching["name"]] == ["transformers", "transformers-cb"]
    assert generate["results"][0]["step_ms_mean"] > 0 and not generate["skipped"]
    assert batching["results"][0]["step_ms_mean"] > 0
    out = capsys.readouterr().out
    assert "generate, static cache, batch 1:" in out
    assert "baseline transformers-cb skipped: batch 1: asynchronous: " in out


def test_missing_transformers_skips_the_baselines(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(baselines.importlib.util, "find_spec", lambda name: None)
    options = ("--rounds", "1", "--depths", "0", "--baseline", "transformers,transformers-cb")
    assert main(["bench", *SMALL, *options]) == 0
    out = capsys.readouterr().out
    assert "baseline transformers skipped: transformers is not installed" in out
    assert "baseline transformers-cb skipped: transformers is not installed" in out


def test_steps_are_those_in_which_all_requests_decode() -> None:
    early = [float(n) for n in range(30)]
    late = [float(n) for n in range(5, 40)]
    steady = baselines.steady_ends([early, late])
    assert steady == [float(n) for n in range(5 + baselines.SKIPPED_STEPS, 30)]
