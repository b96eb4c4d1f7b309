"""The steps that ``trace`` records: a steady batch that one request leaves and another joins."""

from __future__ import annotations

import argparse
import platform
import random
import time
from collections.abc import Iterable
from typing import Any

import torch

from megatron_async.device.kernel_profiler import DeviceKernel, KernelProfiler
from megatron_async.engine.build import build_context, resolve_device
from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.errors import ConfigError
from megatron_async.runner.controller import TextGenerationController
from megatron_async.sampling_params import SamplingParams

from ..benchmark.engines import decode_config
from ..benchmark.loads import Load
from ..benchmark.model import load_benchmark_model
from ..cli.progress import show_capture
from .events import Recording
from .timeline import HostTimeline

LEAD_IN = 6
"""Steady steps between the start of the timelines and the first that is shown."""

MOST_PREFILL_TOKENS = 1024
"""Prompt tokens of one forward, where a single prompt is not longer: it is filled before it is
recorded, and fewer shapes are captured."""


def new_tokens(args: argparse.Namespace) -> int:
    """Tokens that keep a request running to the last step, whenever it was admitted."""
    return int(args.batch_size + LEAD_IN + args.steps + 2 * args.depth + 4)


def open_engine(args: argparse.Namespace) -> tuple[DynamicInferenceEngine, str]:
    """The engine for the work that the options describe, and what the trace is called.

    Raises:
        ConfigError: the work exceeds the model's longest sequence, or the device is not there.
        CheckpointError: the model cannot be loaded.
    """
    if args.kernels and resolve_device(args.device).type != "cuda":
        raise ConfigError("--kernels needs a GPU, and the device is the CPU; leave it out")
    length = args.prompt_tokens + new_tokens(args)
    what = (
        f"--prompt-tokens {args.prompt_tokens}, --steps {args.steps}, --batch-size "
        f"{args.batch_size} and --depth {args.depth}"
    )
    model = load_benchmark_model(args, longest=length, what=what)
    load = Load(prompt_tokens=args.prompt_tokens, new_tokens=new_tokens(args))
    # The one that joins may come before the blocks of the one that left are back.
    config = decode_config(
        model, args.batch_size, args.depth, load, most_prefill=MOST_PREFILL_TOKENS, spare_rows=1
    )
    engine = DynamicInferenceEngine(
        TextGenerationController(model.wrapper),
        build_context(model.wrapper, config, model.device),
        config=config,
        model_name=model.name,
        progress=show_capture,
    )
    dtype_name = str(model.dtype).removeprefix("torch.")
    return engine, f"{model.name}, {dtype_name}, batch {args.batch_size}, depth {args.depth}"


def run_once(engine: DynamicInferenceEngine, args: argparse.Namespace) -> None:
    """Decode the whole load unrecorded, so that no kernel is compiled while it is recorded."""
    _fill(engine, args)
    _steps(engine, args, range(args.steps))
    engine.reset()


def record(
    engine: DynamicInferenceEngine, args: argparse.Namespace, steps: Iterable[int], title: str
) -> Recording:
    """Decode the load and record its steps; ``steps`` counts them. What is in flight after the
    last one is committed, so that every ticket is shown to its end."""
    _fill(engine, args)
    profiler = KernelProfiler() if args.kernels else None
    host = HostTimeline(engine)
    engine.device.start_timeline()
    for _ in range(LEAD_IN):
        engine.step_modern()
    start_ns = time.perf_counter_ns()
    _steps(engine, args, steps)
    engine.suspend()
    device = engine.device.take_timeline()
    host.detach()
    kernels: list[DeviceKernel] = [] if profiler is None else profiler.take()
    engine.reset()
    return Recording(title, _device_name(engine), start_ns, host, device, kernels)


def _fill(engine: DynamicInferenceEngine, args: argparse.Namespace) -> None:
    """Start from nothing, and step until every row decodes."""
    engine.reset()
    for request_id in range(args.batch_size):
        _add(engine, args, request_id)
    decoding: set[int] = set()
    while len(decoding) < args.batch_size:
        decoding |= {output.request_id for output in engine.step_modern()["tokens"]}


def _steps(engine: DynamicInferenceEngine, args: argparse.Namespace, steps: Iterable[int]) -> None:
    """Request 0 leaves after a third of the steps; one more joins after two thirds, or at once
    where nobody else would decode meanwhile."""
    leaves = args.steps // 3
    joins = leaves if args.batch_size == 1 else 2 * args.steps // 3
    for step in steps:
        if step == leaves:
            engine.abort_request(0)
        if step == joins:
            _add(engine, args, args.batch_size)
        engine.step_modern()


def _add(engine: DynamicInferenceEngine, args: argparse.Namespace, request_id: int) -> None:
    source = random.Random(request_id)
    vocab_size = engine.controller.inference_wrapped_model.vocab_size
    prompt = [source.randrange(vocab_size) for _ in range(args.prompt_tokens)]
    params = SamplingParams(
        temperature=0, num_tokens_to_generate=new_tokens(args), termination_id=-1
    )
    engine.add_request(request_id, prompt, params)


def _device_name(engine: Any) -> str:
    device = engine.device.torch_device
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"a thread of the CPU ({platform.machine()})"
