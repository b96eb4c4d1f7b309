"""``bench --kv-cache-dtype``: the engines that are measured keep their cache so."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_async.benchmark.measuring import engines
from megatron_async.benchmark.model import BenchmarkModel
from megatron_async.cli.main import main
from megatron_async.models.build import build_random_model
from megatron_async.models.description.memory_traffic import floor_ms
from megatron_async.models.description.shapes import SHAPES
from megatron_async.models.gpt_network import GPTNetwork

SMALL = ("--shape", "tiny-llama", "--device", "cpu", "--rounds", "1")
LOADS = {
    "decode": ("--prompt-tokens", "8", "--new-tokens", "24"),
    "ragged": ("--requests", "2", "--prompt-range", "2,4", "--output-range", "4,8"),
}


@pytest.mark.parametrize("asked", [None, "fp8"])
@pytest.mark.parametrize("workload", LOADS)
def test_cache_dtype_reaches_every_engine(
    workload: str,
    asked: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    found: list[tuple[Any, ...]] = []
    allocate = engines.allocate

    def note(spec: Any, *args: Any) -> Any:
        batch = allocate(spec, *args)
        found.append((spec.config.kv_cache_dtype, batch.cache.kv.dtype))
        return batch

    monkeypatch.setattr(engines, "allocate", note)
    path = tmp_path / "report.json"
    options = [*SMALL, *LOADS[workload], "--workload", workload, "--depths", "0,1"]
    options += [] if asked is None else ["--kv-cache-dtype", asked]
    assert main(["bench", *options, "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    assert report["kv_cache_dtype"] == asked
    assert f"--kv-cache-dtype {asked}" in report["command"] or asked is None
    stored = torch.float32 if asked is None else torch.float8_e4m3fn
    assert len(found) >= 2
    assert set(found) == {(asked, stored)}
    heading = capsys.readouterr().out.splitlines()[0]
    assert ("KV cache in fp8" in heading) == (asked is not None)


def test_floor_reads_as_many_bytes_of_the_cache_as_it_keeps() -> None:
    config = SHAPES["tiny-llama"]
    load: dict[str, Any] = {"batch_size": 3, "prompt_tokens": 10, "new_tokens": 20}
    whole, kept = (floor_ms(config, 4, 1e3, kv_itemsize=n, **load) for n in (None, 1))
    row = 2 * config.num_kv_heads * config.head_dim * config.num_layers
    assert whole - kept == pytest.approx(3 * row * 3 * 20)
    drafted = dict(load, drafts=2, draft_model=config)
    whole, kept = (floor_ms(config, 4, 1e3, kv_itemsize=n, **drafted) for n in (None, 1))
    assert whole - kept == pytest.approx(3 * 3 * row * 3 * 20), "a draft model's cache is kept too"


def test_layers_in_e4m3_have_a_byte_an_element() -> None:
    config, cpu = SHAPES["tiny-llama"], torch.device("cpu")
    found = []
    for quantize in (False, True):
        model = build_random_model(config, device=cpu, dtype=torch.bfloat16, quantize=quantize)
        network = GPTNetwork(model)
        made = BenchmarkModel("tiny-llama", config, network, cpu, torch.bfloat16, 0.0)
        found.append(made.layer_itemsize)
    assert found == [2, 1]


def test_packed_experts_have_a_half_and_a_share_of_a_scale() -> None:
    config, cpu = replace(SHAPES["tiny-qwen-moe"], moe_ffn_hidden_size=32), torch.device("cpu")
    found = []
    for kept in ({}, {"pack": True}, {"pack": True, "quantize": True}):
        model = build_random_model(config, device=cpu, dtype=torch.bfloat16, **kept)
        made = BenchmarkModel("moe", config, GPTNetwork(model), cpu, torch.bfloat16, 0.0)
        found.append((made.layer_itemsize, made.expert_itemsize))
    assert found == [(2, None), (2, 17 / 32), (1, 17 / 32)]
