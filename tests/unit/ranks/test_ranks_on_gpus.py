"""One model on two GPUs: collectives of NCCL inside the captured graphs."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.child_environment import child_environment
from tests.support.patience import PATIENCE_SECONDS
from tests.support.two_gpus import both_gpus, found_by

__all__ = ["both_gpus"]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
    pytest.mark.usefixtures("both_gpus"),
]
ROOT = Path(__file__).parents[3]
ABORTED = 2

PROGRAM = """
import json, sys
from megatron_async.config.engine_config import EngineConfig
from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.sampling_params import SamplingParams

model, dtype, sizes = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
prompts = ["def read(path):", "class A:", "for i in range(", "import os", "x = [1,", "try:"]
kinds = [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.8, "top_k": 20},
         {"temperature": 0.9, "top_p": 0.8}, {"temperature": 1.0, "repetition_penalty": 1.2},
         {"temperature": 0.0, "return_log_probs": True}]
params = [SamplingParams(seed=n, num_tokens_to_generate=60, termination_id=-1, **kind)
          for n, kind in enumerate(kinds)]

def config(depth):
    return EngineConfig(device="cuda", dtype=dtype, inference_async_scheduling=depth > 0,
                        depth=depth or None, max_requests=4, max_sequence_length=256, **sizes)

found = {}
with DynamicInferenceEngine.from_pretrained(model, config(0)) as engine:
    for depth in (0, 1, 2, 4):
        with engine.with_config(config(depth)) as other:
            found[depth] = [request.generated_tokens for request in other.generate(prompts, params)]
print(json.dumps(found))
"""

WEIGHTS = """
import json, sys
from safetensors.torch import load_file
from megatron_async.checkpoint.path import model_directory
from megatron_async.config.engine_config import EngineConfig
from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.sampling_params import SamplingParams

model, device, sizes = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
params = SamplingParams(temperature=0.0, num_tokens_to_generate=40, termination_id=-1)
old = load_file(model_directory(model) / "model.safetensors")
new = {name: 1.5 * value if "linear_proj" in name else value for name, value in old.items()}
config = EngineConfig(device=device, dtype="float32", inference_async_scheduling=True, depth=2,
                      max_requests=4, max_sequence_length=256, enable_sleep_mode=True, **sizes)

found = []
with DynamicInferenceEngine.from_pretrained(model, config) as engine:
    def generate():
        requests = engine.generate(["def read(path):", "class A:", "x = [1,"], params)
        found.append([request.generated_tokens for request in requests])
    generate()
    where = engine.cache.device
    for weights in (new, {name: value.to(where) for name, value in old.items()}):
        engine.update_weights(weights)
        generate()
    engine.sleep(1)
    engine.wake_up()
    generate()
    engine.sleep(2)
    engine.wake_up(["weights"])
    engine.update_weights(new)
    engine.wake_up()
    generate()
print(json.dumps(found))
"""

FAULT = """
import json, os, sys, time
from megatron_async.config.engine_config import EngineConfig
from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.errors import RankDiedError
from megatron_async.sampling_params import SamplingParams

number, end, sizes = int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
config = EngineConfig(device="cuda", dtype="bfloat16", inference_async_scheduling=True, depth=2,
                      max_requests=4, rank_timeout_seconds=2, **sizes)
params = SamplingParams(num_tokens_to_generate=1900, termination_id=-1)
engine = DynamicInferenceEngine.from_pretrained("tiny", config)
futures = [engine.add_request(n, "x", params) for n in range(4)]
for _ in range(20):
    engine.step_modern()
pids = list(engine.model.group.pids.values())
os.kill(pids[0], number)
started = time.monotonic()
try:
    while engine.has_unfinished_requests():
        engine.step_modern()
except RankDiedError as error:
    seconds = time.monotonic() - started
    print(json.dumps([str(error), seconds, pids]), flush=True)
if end == "raises":
    raise SystemExit(7)
if end == "closes":
    engine.close()
"""
"""Steps over captured collectives while a rank gets a signal; how the process goes on then."""


def tokens_of(model: str, dtype: str, **sizes: int) -> dict[str, list[list[int]]]:
    found: dict[str, list[list[int]]] = found_by(PROGRAM, model, dtype, sizes)
    return found


@functools.cache
def tokens_of_one_gpu(model: str) -> dict[str, list[list[int]]]:
    return tokens_of(model, "float32")


@pytest.mark.parametrize(
    ("model", "sizes"),
    [
        ("tiny", {"tensor_model_parallel_size": 2}),
        ("tiny", {"pipeline_model_parallel_size": 2}),
        ("tiny-moe", {"expert_model_parallel_size": 2}),
        ("tiny-moe", {"tensor_model_parallel_size": 2}),
        ("tiny-moe", {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2}),
    ],
)
def test_tokens_are_those_of_one_gpu(model: str, sizes: dict[str, int]) -> None:
    """In float32, and in bfloat16 the same at every depth."""
    alone, several = tokens_of_one_gpu(model), tokens_of(model, "float32", **sizes)
    assert len(set(map(str, several["0"]))) > 4, "these requests say something"
    assert all(several[depth] == alone["0"] for depth in ("0", "1", "2", "4"))
    coarse = tokens_of(model, "bfloat16", **sizes)
    assert all(coarse[depth] == coarse["0"] for depth in ("1", "2", "4"))


@pytest.mark.parametrize("name", ("dense:2,1,1", "dense:1,2,1", "experts:1,1,2", "experts:2,1,1"))
def test_no_event_and_no_draft_changes_a_token(name: str, tmp_path: Path) -> None:
    """Batch-invariant, in bfloat16: rows that are sampled, penalised, guided, with
    log-probabilities; pauses, evictions, aborts, and a cache that is always full."""
    subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.support.ranked", str(tmp_path), name],
        # Ranks are forked, and after CUDA's own count of GPUs they could not use them.
        env=child_environment(RANKED_DEVICE="cuda", PYTORCH_NVML_BASED_CUDA_CHECK="1"),
        cwd=ROOT,
        check=True,
        timeout=PATIENCE_SECONDS,
    )
    found = json.loads((tmp_path / f"{name}.json").read_text())
    serial, *others = (found["depths"][depth] for depth in ("0", "1", "2", "4"))
    expected = kept(serial["tokens"])
    assert len({tuple(tokens) for tokens in expected}) > len(expected) - 2
    assert all(kept(each["tokens"]) == expected for each in others)
    assert all(each["log_probs"] == serial["log_probs"] for each in others)
    assert all(each["text"] == serial["text"] for each in others)
    (full,) = found["full"].values()
    assert kept(full) == expected
    kinds = [kind for kind in ("ngram", "grammar", "mtp") if kind in found]
    assert all(kept(found[kind]["tokens"]) == expected[:5] for kind in kinds) and len(kinds) > 1
    assert all(found[kind]["accepted"] > 0 for kind in kinds)


def kept(tokens: list[list[int]]) -> list[list[int]]:
    """Those of all requests but the aborted one."""
    return [each for n, each in enumerate(tokens) if n != ABORTED]


@pytest.mark.parametrize(
    ("model", "sizes"),
    [
        ("tiny", {"tensor_model_parallel_size": 2}),
        ("tiny-moe", {"expert_model_parallel_size": 2}),
    ],
)
def test_new_weights_and_sleep_keep_graphs(model: str, sizes: dict[str, int]) -> None:
    """Tensors of the host and of rank 0's GPU, and both levels of sleep, under captured graphs."""
    alone, several = (found_by(WEIGHTS, model, "cuda", each) for each in ({}, sizes))
    old, new, old_again, kept, new_again = several
    assert several == alone and old == old_again == kept != new == new_again


@pytest.mark.parametrize(
    ("sizes", "number", "end"),
    [
        ({"tensor_model_parallel_size": 2}, signal.SIGKILL, "closes"),
        ({"tensor_model_parallel_size": 2}, signal.SIGSTOP, "leaves"),
        ({"pipeline_model_parallel_size": 2}, signal.SIGKILL, "raises"),
        ({"pipeline_model_parallel_size": 2}, signal.SIGSTOP, "closes"),
    ],
)
def test_no_gpu_waits_for_a_dead_rank(
    sizes: dict[str, int], number: signal.Signals, end: str
) -> None:
    """Kernels over each other's memory, and NCCL's in graphs, wait for a rank that will not come.
    The process has the error, and ends, whatever it does then; so both GPUs are free."""
    started = time.monotonic()
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FAULT, str(int(number)), end, json.dumps(sizes)],
        env=child_environment(),
        cwd=ROOT,
        timeout=PATIENCE_SECONDS,
        capture_output=True,
        text=True,
    )
    assert ended.stdout, ended.stderr
    error, seconds, pids = json.loads(ended.stdout.splitlines()[-1])
    how = "was killed by SIGKILL" if number == signal.SIGKILL else "has not answered for"
    assert error.startswith(f"rank 1 of the model {how}")
    # With status 1 where the interpreter's end would have waited for the GPU.
    assert ended.returncode in (7 if end == "raises" else 0, 1), ended.stderr
    assert "destroy_process_group" not in ended.stderr and "Traceback" not in ended.stderr
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)
    for gpu in range(2):
        assert torch.ones(8, device=f"cuda:{gpu}").sum().item() == 8
    # Seen with -s: no verdict depends on it.
    print(f"error after {seconds:.1f} s, all over after {time.monotonic() - started:.1f} s, "
          f"status {ended.returncode}")  # fmt: skip


@pytest.mark.parametrize("option", ("tensor", "pipeline"))
def test_trace_shows_each_rank_with_its_kernels_on_one_clock(option: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    words = "--model tiny --device cuda --prompt-tokens 16 --steps 24 --batch-size 4 --kernels"
    sizes = (f"--{option}-model-parallel-size", "2", "-o", str(path))
    said = subprocess.run(
        [sys.executable, "-m", "megatron_async", "trace", *words.split(), *sizes],
        env=child_environment(),
        cwd=ROOT,
        check=True,
        timeout=PATIENCE_SECONDS,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout
    assert ("bubble: stage 0 " in said) == (option == "pipeline")
    slices = [each for each in json.loads(path.read_text())["traceEvents"] if each["ph"] == "X"]
    slack = 200.0  # the clock of the profiler, and of each GPU, in microseconds

    def begin(event: dict[str, Any]) -> float:
        return float(event["ts"]) - slack

    def end(event: dict[str, Any]) -> float:
        return float(event["ts"] + event["dur"]) + slack

    of_stage = []
    for process in (1, 2):
        own = [each for each in slices if each["pid"] == process]
        work = [each for each in own if each["tid"] == 2]
        kernels = [each for each in own if each["cat"] == "kernel"]
        inside = sum(any(begin(w) <= k["ts"] and k["ts"] <= end(w) for w in work) for k in kernels)
        assert len(kernels) > 10 * 24 and inside > 0.9 * len(kernels)
        of_stage.append(
            {word: each for each in work for word in each["name"].split() if word[1:].isdigit()}
        )
    first, last = of_stage
    for ticket in {word[1:] for word in first} & {word[1:] for word in last}:
        if f"F{ticket}" in first and f"F{ticket}" in last:
            assert begin(first[f"F{ticket}"]) < end(last[f"F{ticket}"])
        if f"T{ticket}" in first and f"S{ticket}" in last:
            assert begin(last[f"S{ticket}"]) < end(first[f"T{ticket}"])
    assert any(word.startswith("T") for word in first) == (option == "pipeline")
