"""Models with Transformer Engine's and Apex's modules, and our own that use them.

They run in a process of their own, since megatron-core looks for the packages when it is imported.
Where they are not installed, the stand-ins of ``tests/support/stand_ins`` are in their
place: they have the interfaces and compute with PyTorch."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

from tests.support.programs import run_program

ROOT = Path(__file__).parents[3]
STAND_INS = ROOT / "tests" / "support" / "stand_ins"

BUILD = """
import contextlib, sys
from types import SimpleNamespace
from unittest import mock
import torch
from megatron_async import EngineConfig, megatron_compat
from megatron_async.megatron_api import (
    DynamicInferenceContext, DynamicInferenceEngine, GPTInferenceWrapper, SamplingParams,
    TextGenerationController,
)
from megatron_async.models.fused import coverage
from megatron_async.models.layers.norm import norm_class
from megatron.core.models.gpt import GPTModel, gpt_layer_specs
from megatron.core.transformer import TransformerConfig

megatron_compat.ensure_parallel_state()
torch.manual_seed(0)
init = lambda weight: torch.nn.init.normal_(weight, std=0.3)

def build(spec, **changes):
    config = TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, num_query_groups=2,
        use_cpu_initialization=True, init_method=init, output_layer_init_method=init,
        bias_activation_fusion=False, bias_dropout_fusion=False, masked_softmax_fusion=False,
        gradient_accumulation_fusion=False, **changes,
    )
    return GPTModel(
        config=config, transformer_layer_spec=spec, vocab_size=64, max_sequence_length=64,
        parallel_output=False, position_embedding_type="rope",
    ).eval()

def stock_tokens(model, tokens, count):
    no_generator = SimpleNamespace(fork=contextlib.nullcontext)
    tracker = "megatron.core.tensor_parallel.get_cuda_rng_tracker"
    with torch.no_grad(), mock.patch(tracker, lambda: no_generator):
        for _ in range(count):
            mask = torch.ones(1, 1, len(tokens), len(tokens), dtype=torch.bool).triu(1)
            logits = model(torch.tensor([tokens]), torch.arange(len(tokens))[None], mask)
            tokens = [*tokens, int(logits[0, -1].argmax())]
    return tokens[-count:]

def check(model):
    prompts = [[1, 2, 3], [5], [7, 8, 9, 10, 11]]
    stock = [stock_tokens(model, prompt, 8) for prompt in prompts]
    names = {type(module).__name__ for module in model.modules()}
    context = DynamicInferenceContext(
        params_dtype=torch.float32, num_layers=2, kv_channels=8, num_attention_heads=2,
        max_sequence_length=32, buffer_size_gb=0.001, block_size_tokens=4, max_requests=2,
    )
    controller = TextGenerationController(GPTInferenceWrapper(model, None, context))
    config = EngineConfig(inference_async_scheduling=True)
    params = SamplingParams(top_k=1, num_tokens_to_generate=8)
    with DynamicInferenceEngine(controller, context, config=config) as engine:
        assert [r.generated_tokens for r in engine.generate(prompts, params)] == stock
    return names
"""

TRANSFORMER_ENGINE = """
for kind in ("RMSNorm", "LayerNorm"):
    spec = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec()
    model = build(spec, normalization=kind, add_bias_linear=kind == "LayerNorm")
    names = check(model)
    assert {"TELayerNormColumnParallelLinear", "TERowParallelLinear", kind} <= names, names
    # The norm is inside the projection, so no block is fused, and each says why.
    layer = model.decoder.layers[0]
    why = {coverage.attention_why_not(layer, model), coverage.mlp_why_not(layer, model.config)}
    assert why == {"its norm is inside TELayerNormColumnParallelLinear"}, why
norm = norm_class("RMSNorm", torch.device("cuda"))
assert norm.__name__ == "TENorm", norm
made = norm(model.config, 32)
assert type(made).__module__.startswith("transformer_engine"), made
assert norm_class("RMSNorm", torch.device("cpu")).__module__.startswith("megatron_async")
"""

APEX = """
spec = gpt_layer_specs.get_gpt_layer_local_spec(normalization="LayerNorm")
names = check(build(spec, normalization="LayerNorm", persist_layer_norm=False))
assert "FusedLayerNorm" in names, names
sys.modules["transformer_engine"] = None  # from here on it cannot be imported
norm = norm_class("LayerNorm", torch.device("cuda"))
assert norm.__name__ == "FusedLayerNorm", norm
assert norm_class("RMSNorm", torch.device("cuda")).__module__.startswith("megatron_async")
"""


@pytest.mark.slow
def test_models_of_these_packages_give_the_tokens_of_the_stock_model(tmp_path: Path) -> None:
    path = [str(ROOT)]
    for package in ("transformer_engine", "apex"):
        if importlib.util.find_spec(package) is None:
            (tmp_path / package).symlink_to(STAND_INS / package)
            path.append(str(tmp_path))
    done = run_program(
        [sys.executable, "-c", BUILD + TRANSFORMER_ENGINE + APEX],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path), "CUDA_VISIBLE_DEVICES": ""},
        cwd=tmp_path,
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_stand_ins_say_what_they_are() -> None:
    for path in STAND_INS.rglob("*.py"):
        assert '"""STAND-IN' in path.read_text()
