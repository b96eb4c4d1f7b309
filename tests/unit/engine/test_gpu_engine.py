"""The engine on a GPU: captured decode graphs, pinned rings, parity, no hidden waiting."""

from __future__ import annotations

import dataclasses
import gc
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_async.device.cuda import CudaDevice, CudaPacketRing
from megatron_async.device.protocol import Graph
from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.sampling_params import SamplingParams
from tests.functional.test_batch_invariant_engine import decode_under_pressure
from tests.support.engines import DEPTHS, config_at, hash_engine, random_ask, sampling_params
from tests.support.hybrid_hash_model import HybridHashModel, hybrid_history
from tests.support.oracle import Ask, decode_alone, decode_with_salts
from tests.support.patience import PATIENCE_SECONDS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PROMPTS = ["def fibonacci(n):", "class Stack:\n    def push(self", "import os\n\n", "x"]


@pytest.mark.parametrize("debug", (False, True))
@pytest.mark.parametrize("depth", DEPTHS)
def test_hash_model_in_captured_graphs_equals_the_oracle(depth: int, debug: bool) -> None:
    rng = random.Random(11)
    asks = [random_ask(rng) for _ in range(60)]
    with hash_engine(
        depth,
        device_name="cuda",
        max_requests=12,
        block_size_tokens=4,
        block_count=150,
        prefill_chunk_tokens=8,
        debug=debug,
    ) as engine:
        requests = engine.generate(
            [list(a.prompt) for a in asks], [sampling_params(a) for a in asks]
        )
    for ask, request in zip(asks, requests, strict=True):
        assert request.generated_tokens == decode_alone(ask)[0]
    counters = engine.counters
    assert (counters.tokens_discarded > 0) == (depth > 0)
    assert counters.steps_with_waiting > 0
    assert counters.prefill_chunks > len(asks)


@pytest.mark.parametrize("debug", (False, True))
@pytest.mark.parametrize("depth", DEPTHS)
def test_recurrent_state_in_captured_graphs_equals_the_oracle(depth: int, debug: bool) -> None:
    """Prompts of three beginnings, so that states are restored, with evictions and pauses."""
    rng = random.Random(12)
    heads = [tuple(rng.randrange(61) for _ in range(20)) for _ in range(3)]
    asks = [random_ask(rng, max_prompt=8) for _ in range(40)]
    asks = [
        dataclasses.replace(ask, prompt=(*heads[n % 3][: rng.choice((9, 20))], *ask.prompt))
        for n, ask in enumerate(asks)
    ]
    with hash_engine(
        depth,
        model=HybridHashModel("cuda"),
        device_name="cuda",
        max_requests=6,
        block_size_tokens=4,
        block_count=60,
        prefill_chunk_tokens=8,
        state_snapshot_count=12,
        debug=debug,
    ) as engine:
        futures = [
            engine.add_request(n, list(ask.prompt), sampling_params(ask))
            for n, ask in enumerate(asks)
        ]
        paused: set[int] = set()
        while engine.has_unfinished_requests():
            victim = rng.choice(engine.step_modern()["active_request_ids"] or [0])
            if rng.random() < 0.2 and engine.pause_request(victim):
                paused.add(victim)
            if rng.random() < 0.1:
                engine.evict_request(victim)
            if rng.random() < 0.5 and paused:
                engine.resume_request(paused.pop())
        counters = engine.counters
    for ask, future in zip(asks, futures, strict=True):
        expected = decode_with_salts(ask, [(0, 0)], (), hybrid_history)
        request = future.result(timeout=0)
        assert (request.generated_tokens, request.finish_reason) == expected
    assert counters.states_restored and counters.state_snapshots_taken
    assert counters.evictions and counters.pauses
    assert (counters.tokens_discarded > 0) == (depth > 0)


class LateFills(CudaDevice):
    """The stream that fills new memory is busy, as on a GPU that others use."""

    def packet_ring(self, entries: int, width: int) -> CudaPacketRing:
        torch.cuda._sleep(50_000_000)
        return super().packet_ring(entries, width)

    def capture(self, work: Callable[[], None], name: str, *, has_run: bool = False) -> Graph:
        assert torch.cuda.current_stream().query(), f"{name} may read memory before it is filled"
        return super().capture(work, name, has_run=has_run)


def test_graphs_are_captured_after_memory_is_filled() -> None:
    # A counter that was not yet zero gave an illegal memory access, once in some thousand engines.
    with hash_engine(1, device_name="cuda", device=LateFills(torch.device("cuda", 0))) as engine:
        (request,) = engine.generate([[3]], [sampling_params(Ask(prompt=(3,), max_new=9))])
    assert request.generated_tokens == decode_alone(Ask(prompt=(3,), max_new=9))[0]


@pytest.mark.parametrize("model", ("tiny-moe", "tiny-hybrid"))
def test_steady_steps_of_experts_and_mixers_make_no_hidden_synchronisation(model: str) -> None:
    config = config_at(2, device="cuda", max_requests=8)
    params = SamplingParams(temperature=1.0, num_tokens_to_generate=150, termination_id=-1)
    with DynamicInferenceEngine.from_pretrained(model, config) as engine:
        for request_id in range(8):
            engine.add_request(request_id, [3 + request_id], params)
        for _ in range(10):
            engine.step_modern()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(100):
                engine.step_modern()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        engine.reset()


@pytest.mark.parametrize("depth", (1, 2))
def test_steady_steps_make_no_hidden_synchronisation(depth: int) -> None:
    ask = Ask(prompt=(3,), max_new=220, temperature=1.0, top_k=5, top_p=0.9)
    with hash_engine(
        depth, device_name="cuda", max_requests=8, block_count=200, debug=False
    ) as engine:
        for request_id in range(8):
            engine.add_request(request_id, [3 + request_id], sampling_params(ask))
        for _ in range(10):
            engine.step_modern()
        allocated = torch.cuda.memory_stats()["allocation.all.allocated"]
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(200):
                engine.step_modern()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == allocated
        engine.reset()


def decode_tiny(depth: int, device: str, dtype: str, model: str = "tiny") -> list[list[int]]:
    params = [
        SamplingParams(num_tokens_to_generate=80, temperature=t, top_k=k, top_p=p, seed=s)
        for t, k, p, s in ((0.0, 0, 0.0, 0), (0.8, 0, 0.0, 1), (1.0, 40, 0.0, 2), (1.0, 0, 0.9, 3))
    ]
    prompts = [prompt for prompt in PROMPTS for _ in params]
    config = config_at(depth, device=device, dtype=dtype, max_requests=5, block_size_tokens=16)
    with DynamicInferenceEngine.from_pretrained(model, config) as engine:
        requests = engine.generate(prompts, params * len(PROMPTS))
    if depth:
        assert engine.counters.steps_overlapped >= engine.counters.steps_committed - 1
    return [request.generated_tokens for request in requests]


@pytest.mark.parametrize("model", ("tiny", "tiny-moe", "tiny-hybrid"))
def test_embedded_model_gives_the_cpus_tokens_in_fp32(model: str) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    found = decode_tiny(1, "cuda", "float32", model)
    assert found == decode_tiny(0, "cpu", "float32", model)


@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
@pytest.mark.parametrize(
    ("depth", "model"),
    [(1, "tiny"), (2, "tiny"), (4, "tiny"), (2, "tiny-moe"), (2, "tiny-hybrid")],
)
def test_embedded_model_is_equal_at_every_depth(depth: int, model: str, dtype: str) -> None:
    assert decode_tiny(depth, "cuda", dtype, model) == decode_tiny(0, "cuda", dtype, model)


@pytest.mark.parametrize(
    ("dtype", "model"), [("float32", "tiny"), ("bfloat16", "tiny"), ("bfloat16", "tiny-moe")]
)
def test_batch_invariant_mode_keeps_tokens_through_evictions_and_prefix_hits(
    dtype: str, model: str
) -> None:
    where: dict[str, Any] = {"device": "cuda", "dtype": dtype, "model": model}
    expected, _ = decode_under_pressure(0, roomy=True, **where)
    for depth in DEPTHS:
        tokens, counters = decode_under_pressure(depth, roomy=False, **where)
        assert tokens == expected
        assert counters.evictions > 0
        assert counters.stalls > 0
        assert counters.tokens_cached > 0
        assert (counters.tokens_discarded > 0) == (depth > 0)


def test_state_dict_goes_into_captured_graphs() -> None:
    config = config_at(1, device="cuda", dtype="float32", max_requests=2)
    params = SamplingParams(temperature=0, num_tokens_to_generate=40, termination_id=-1)
    with DynamicInferenceEngine.from_pretrained("tiny", config) as engine:
        (before,) = engine.generate([PROMPTS[0]], params)
        model = engine.model.network.model
        state = {name: value.clone() for name, value in model.named_parameters()}
        scaled = {name: value * 1.3 for name, value in state.items()}
        engine.update_weights(scaled)
        (changed,) = engine.generate([PROMPTS[0]], params)
        engine.update_weights(state)
        (after,) = engine.generate([PROMPTS[0]], params)
    assert changed.generated_tokens != before.generated_tokens
    assert after.generated_tokens == before.generated_tokens


def test_memory_of_a_closed_engine_comes_back_without_a_collection() -> None:
    """Graphs, cache and rings. PyTorch keeps a workspace of cuBLAS, 32 MiB on Hopper, for each
    stream that it has seen."""
    config = config_at(1, device="cuda", dtype="bfloat16", max_requests=4, buffer_size_gb=1.0)
    with DynamicInferenceEngine.from_pretrained("tiny", config) as first:
        first.generate(["def f(n):"], SamplingParams(num_tokens_to_generate=4))
        gc.collect()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        gc.disable()
        try:
            after = []
            for _ in range(3):
                with first.with_config(config) as engine:
                    engine.generate(["def f(n):"], SamplingParams(num_tokens_to_generate=4))
                    assert torch.cuda.memory_allocated() > before + 2**30 - 2**26
                after.append(torch.cuda.memory_allocated() - before)
        finally:
            gc.enable()
    left = [now - earlier for now, earlier in zip(after, [0, *after], strict=False)]
    assert max(left) < 2**25 + 2**21


def test_without_graphs_the_same_tokens_come_from_kernels_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", None)
    rng = random.Random(5)
    asks = [random_ask(rng, max_new=12) for _ in range(6)]
    device = CudaDevice(torch.device("cuda"), graphs=False)
    with hash_engine(
        2, device=device, device_name="cuda", max_requests=4, block_count=100
    ) as engine:
        requests = engine.generate([list(a.prompt) for a in asks], [*map(sampling_params, asks)])
    for ask, request in zip(asks, requests, strict=True):
        assert request.generated_tokens == decode_alone(ask)[0]


def test_a_start_compiles_triton_kernels_in_other_threads(tmp_path: Path) -> None:
    """In a process of its own: kernels that were compiled before are not compiled again."""
    code = (
        "import threading\n"
        "from triton import knobs\n"
        "from megatron_async import DynamicInferenceEngine, EngineConfig\n"
        "found = []\n"
        "def note(*, src, cache_hit, **_):\n"
        "    if not cache_hit:\n"
        "        found.append((src.name, threading.current_thread() is threading.main_thread()))\n"
        "knobs.compilation.listener = note\n"
        "config = EngineConfig(max_requests=16, device='cuda')\n"
        "with DynamicInferenceEngine.from_pretrained('tiny', config) as engine:\n"
        "    assert threading.active_count() == 1, threading.enumerate()\n"
        "    engine.generate(['def f(x):'])\n"
        "assert len(found) >= 5 and not any(is_main for _, is_main in found), found\n"
    )
    caches = {"TRITON_CACHE_DIR": "triton", "MEGATRON_ASYNC_CACHE": "kernels"}
    environment = {**os.environ, **{name: str(tmp_path / each) for name, each in caches.items()}}
    subprocess.run(
        [sys.executable, "-c", code], check=True, env=environment, timeout=PATIENCE_SECONDS
    )
