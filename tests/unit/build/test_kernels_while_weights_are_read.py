"""Kernels of decode steps are known from a model's modules, before its weights are read."""

from __future__ import annotations

import dataclasses
import threading
from concurrent.futures import Future
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_async.build import kernels
from megatron_async.build.kernels import (
    NEEDS_SIZES,
    compile_meanwhile,
    compiling_meanwhile,
    foreseen,
)
from megatron_async.checkpoint import load_pretrained
from megatron_async.config.engine_config import EngineConfig
from megatron_async.errors import CheckpointError
from megatron_async.kernels import compile_ahead as ahead
from megatron_async.models.build import build_model
from megatron_async.models.fused import where
from megatron_async.models.fused.decoder import FusedDecoder
from tests.support import emulator
from tests.support.decode_rig import DecodeRig, bfloat16_model, small
from tests.support.patience import PATIENCE_SECONDS

CPU = torch.device("cpu")
CONFIG = EngineConfig(max_requests=20, num_speculative_tokens=2)


def _distinct(work: Any) -> set[tuple[str, tuple[tuple[str, int], ...]]]:
    return {(source, tuple(sorted(macros.items()))) for source, macros in work}


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2"])
def test_what_is_foreseen_is_what_the_engine_needs(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulator.install(monkeypatch)
    monkeypatch.setattr(where, "device_why_not", lambda model: None)
    config = small(name)
    modules = build_model(config, device=CPU, dtype=torch.bfloat16, initialize=False)
    found = _distinct(foreseen(modules, CONFIG))
    model = bfloat16_model(config, CPU).requires_grad_(False)
    context = DecodeRig(config, CPU, rows=2).context(block_size=64, window=3)
    rows = sorted({count * window for count in (1, 2, 4, 8, 16, 20) for window in (1, 3)})
    needed = _distinct(FusedDecoder(model).kernels_of(rows, context))
    assert {source for source, _ in needed - found} == {NEEDS_SIZES}
    assert found < needed and len(found) >= 5


def test_it_is_asked_for_before_weights_are_read(tmp_path: Path) -> None:
    seen: list[Any] = []
    loaded = load_pretrained("tiny", built=lambda model: seen.append(model.training))
    assert seen == [True] and not loaded.model.training
    of_shape: list[Any] = []
    made = load_pretrained("random:tiny-llama", built=of_shape.append)
    assert of_shape == [made.model]


def test_an_error_ahead_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def raising(model: Any, config: EngineConfig) -> Any:
        asked.append(model)
        raise ValueError("no layer has a block that the kernels take")

    monkeypatch.setattr(kernels, "foreseen", raising)
    compile_meanwhile(torch.nn.Linear(2, 2), EngineConfig())
    assert len(asked) == 1
    compile_meanwhile(torch.nn.Linear(2, 2), EngineConfig(batch_invariant=True))
    compile_meanwhile(torch.nn.Linear(2, 2), EngineConfig(tensor_model_parallel_size=2))
    assert len(asked) == 1


def test_an_error_while_weights_are_read_leaves_out_what_has_not_begun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, may_end, compiled = threading.Event(), threading.Event(), []
    threads = set(threading.enumerate())

    def machine_code(source: str, macros: Any, architecture: str) -> bytes:
        compiled.append(source)
        begun.set()
        assert may_end.wait(PATIENCE_SECONDS)
        return b""

    monkeypatch.setattr(ahead, "_begun", set())
    monkeypatch.setattr(ahead, "_thread_count", lambda: 1)
    done: Future[None] = Future()
    done.set_result(None)
    monkeypatch.setattr(ahead, "compilers_ahead", lambda device: nullcontext(lambda work: done))
    monkeypatch.setattr(ahead.cuda, "architecture", lambda index: "sm_90a")
    monkeypatch.setattr(ahead.cuda, "machine_code", machine_code)
    monkeypatch.setattr(kernels, "foreseen", lambda *_: iter([("embed", {}), ("norm", {})]))
    gpu = torch.device("cuda", 0)
    with pytest.raises(CheckpointError), compiling_meanwhile(CONFIG, gpu) as built:
        built(torch.nn.Linear(2, 2))
        assert begun.wait(PATIENCE_SECONDS)
        raise CheckpointError("a file is cut off")
    may_end.set()
    for thread in set(threading.enumerate()) - threads:
        thread.join(PATIENCE_SECONDS)
    assert compiled == ["embed"]


@pytest.mark.parametrize("config", [CONFIG, EngineConfig(batch_invariant=True)])
def test_what_looks_at_weights_is_compiled_before_they_are_read(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton", reason="the kernel needs triton")
    from megatron_async.kernels import finite

    compiled: list[Any] = []
    done: Future[None] = Future()
    done.set_result(None)

    def behind(work: Any) -> Future[None]:
        work()
        return done

    monkeypatch.setattr(ahead, "compilers_ahead", lambda device: nullcontext(behind))
    monkeypatch.setattr(kernels, "compile_meanwhile", lambda *_: lambda: None)
    monkeypatch.setattr(
        finite, "compile_and_load", lambda kernel, device, args, options: compiled.append(args)
    )
    gpu = torch.device("cuda", 0)
    for each in (config, dataclasses.replace(config, allow_non_finite_weights=True)):
        with compiling_meanwhile(each, gpu) as built:
            load_pretrained("tiny", dtype=torch.bfloat16, built=built)
    assert [(weight.dtype, count % 16) for weight, _, count, _ in compiled] == [(torch.bfloat16, 0)]


def test_a_kernel_is_begun_once_and_its_threads_end(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Any] = []
    monkeypatch.setattr(ahead, "_begun", set())
    monkeypatch.setattr(ahead.cuda, "architecture", lambda index: "sm_90a")
    monkeypatch.setattr(ahead.cuda, "machine_code", lambda *work: compiled.append(work))
    made: list[Any] = []
    pool = ahead.ThreadPoolExecutor

    def noted(*args: Any, **options: Any) -> Any:
        made.append(pool(*args, **options))
        return made[-1]

    monkeypatch.setattr(ahead, "ThreadPoolExecutor", noted)
    work = [("embed", {"H": 64}), ("embed", {"H": 128}), ("embed", {"H": 64})]
    for _ in range(2):
        ahead.compile_in_background(work, torch.device("cuda", 0))
    for each in made:
        each.shutdown(wait=True)
    assert sorted(compiled, key=str) == sorted(
        [("embed", {"H": size}, "sm_90a") for size in (64, 128)], key=str
    )
