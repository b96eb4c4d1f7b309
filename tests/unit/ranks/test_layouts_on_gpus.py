"""Layers of real sizes on two GPUs: steps of up to 128 rows, and weights and cache in e4m3."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.two_gpus import both_gpus, found_by

__all__ = ["both_gpus"]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
    pytest.mark.usefixtures("both_gpus"),
]
DEPTHS = (0, 1, 2, 4)
FP8 = {"quantization": "fp8"}
ALL_FP8 = {"quantization": "fp8", "quantize_activations": True, "kv_cache_dtype": "fp8"}
LIMITS = {0: 0.05, 1: 0.1, 3: 0.2}
"""Of the mean difference of log-probabilities to those of one GPU, by what is in e4m3: of a row
that ranks share each has a scale of its own."""
TP, EP, PP = ({f"{kind}_model_parallel_size": 2} for kind in ("tensor", "expert", "pipeline"))

PROGRAM = """
import json, sys
from megatron_async.config.engine_config import EngineConfig
from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.sampling_params import SamplingParams

path, values, counts, depths = sys.argv[1], *map(json.loads, sys.argv[2:])
kinds = [{"temperature": 0.0, "return_log_probs": True}, {"temperature": 1.0},
         {"temperature": 0.8, "top_k": 20}]

def config(depth, rows):
    return EngineConfig(device="cuda", dtype="bfloat16", depth=depth, max_requests=rows,
                        max_sequence_length=128, **values)

found = {}
with DynamicInferenceEngine.from_pretrained(path, config(0, counts[0])) as engine:
    for rows in counts:
        of_depths = found[rows] = {}
        for depth in depths:
            with engine.with_config(config(depth, rows)) as other:
                done = other.generate(
                    [[7 + row, 11, (13 * row + 1) % 1000] for row in range(rows)],
                    [SamplingParams(seed=row, num_tokens_to_generate=16, termination_id=-1,
                                    **kinds[row % 3]) for row in range(rows)])
            of_depths[depth] = [[each.generated_tokens, each.generated_log_probs] for each in done]
    found["fallbacks"] = [str(each) for each in engine.model.network.decode_coverage().fallbacks]
print(json.dumps(found))
"""
"""All requests begin and end together, so that steps have the same rows at each depth."""


@functools.cache
def checkpoint(kind: str, folder: Path) -> Path:
    """Two layers of Llama-8B, or of a model of 16 experts, in bfloat16."""
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig

    torch.manual_seed(0)
    sizes: dict[str, Any] = dict(
        num_hidden_layers=2, num_key_value_heads=8, head_dim=128, vocab_size=2048,
        max_position_embeddings=256, tie_word_embeddings=False, bos_token_id=None,
        eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    if kind == "dense":
        config = LlamaConfig(
            hidden_size=4096, intermediate_size=14336, num_attention_heads=32, **sizes
        )
    else:
        config = Qwen3MoeConfig(
            hidden_size=2048, num_attention_heads=16, num_experts=16, num_experts_per_tok=4,
            moe_intermediate_size=768, **sizes,
        )  # fmt: skip
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder / kind)
    return folder / kind


Found = dict[str, Any]


@functools.cache
def found_by_one(path: Path, values: str, rows: tuple[int, ...]) -> Found:
    found: Found = found_by(PROGRAM, path, json.loads(values), rows, [0])
    return found


@pytest.mark.parametrize(
    ("kind", "values", "layout", "rows"),
    [
        ("dense", {}, TP, (40, 72, 128)),
        ("dense", FP8, TP, (4, 40)),
        ("dense", ALL_FP8, TP, (4, 128)),
        ("dense", FP8, PP, (4, 40)),
        ("experts", {}, TP, (1, 8, 40)),
        ("experts", FP8, TP, (1, 8, 40)),
        ("experts", FP8, EP, (1, 8, 40)),
        ("experts", ALL_FP8, TP | EP, (4, 40)),
    ],
)
def test_tokens_are_the_same_at_every_depth_and_near_those_of_one_gpu(
    kind: str, values: dict[str, Any], layout: dict[str, int], rows: tuple[int, ...],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:  # fmt: skip
    path = checkpoint(kind, tmp_path_factory.getbasetemp())
    alone = found_by_one(path, json.dumps(values), rows)
    several: Found = found_by(PROGRAM, path, values | layout, rows, DEPTHS)
    for count in rows:
        serial = several[str(count)]["0"]
        assert len({tuple(tokens) for tokens, _ in serial}) > 0.9 * count
        assert all(several[str(count)][str(depth)] == serial for depth in DEPTHS), count
        differences = differences_of(serial, alone[str(count)]["0"])
        assert sum(differences) / len(differences) < LIMITS[len(values)], count
    assert values or several["fallbacks"] == alone["fallbacks"] == []


def differences_of(several: list[Any], alone: list[Any]) -> list[float]:
    """Of log-probabilities, as far as a row's tokens are the same."""
    found = []
    for (tokens, log_probs), (expected, expected_log_probs) in list(
        zip(several, alone, strict=True)
    )[::3]:
        for token, value, other, wanted in zip(
            tokens, log_probs, expected, expected_log_probs, strict=True
        ):
            if token != other:
                break
            found.append(abs(value - wanted))
    return found
