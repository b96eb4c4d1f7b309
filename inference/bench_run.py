"""What ``bench`` measures, in order: timed rounds, profiles, the baseline."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import sys
import time
from typing import Any

import torch
from tqdm import tqdm

from megatron_async.assembly import resolve_device
from megatron_async.checkpoint import load_pretrained
from megatron_async.errors import ConfigError
from megatron_async.models.config import ModelConfig
from megatron_async.models.wrapper import GPTInferenceWrapper

from .bench_baseline import NoBaselineError, TransformersBaseline
from .bench_engine import (
    Load,
    Round,
    Subject,
    close_engines,
    make_engine,
    profile_steps,
    run_round,
    warm_up,
)
from .bench_report import SCHEMA_VERSION, compare_with_serial, environment, figures
from .shapes import SHAPES, build_shape


def collect(args: argparse.Namespace, load: Load, command: str) -> dict[str, Any]:
    """Measure everything and return the report, plain JSON types."""
    subject = load_subject(args, load)
    profiled = args.profile and subject.device.type == "cuda"
    count = len(args.batch_sizes) * len(args.depths) * (args.rounds + profiled)
    with tqdm(total=count, unit="round", file=sys.stderr, disable=None, leave=False) as bar:
        results = _measure(subject, args, load, bar)
        if profiled:
            # Apart from the timed rounds, all of which come first: a profiler stays felt.
            _profile(subject, args, load, results, bar)
    compare_with_serial(results)
    report = {
        "schema_version": SCHEMA_VERSION,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": command,
        **environment(subject.device),
        "shape": subject.name,
        "model": subject.config.to_dict(),
        "dtype": str(subject.dtype).removeprefix("torch."),
        "load": dataclasses.asdict(load),
        "build_seconds": subject.build_seconds,
        "results": results,
        "baseline": None,
    }
    if args.baseline is not None:
        config, device, dtype = subject.config, subject.device, subject.dtype
        del subject  # its memory is the baseline's now
        report["baseline"] = _baseline(args, load, config, device, dtype)
    return report


def load_subject(args: argparse.Namespace, load: Load) -> Subject:
    """The model that the options name, on its device.

    Raises:
        ConfigError: the load exceeds the model's longest sequence, or the device is not there.
        CheckpointError: the model cannot be loaded.
    """
    device = resolve_device(args.device)
    dtype = None if args.dtype is None else getattr(torch, args.dtype)
    if args.shape is not None:
        name, config = args.shape, SHAPES[args.shape]
        _check_length(load, config.max_sequence_length)
    started = time.perf_counter()
    if args.shape is not None:
        if dtype is None:
            dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        model = build_shape(config, device=device, dtype=dtype, seed=load.seed)
    else:
        pretrained = load_pretrained(args.model or "tiny", device=device, dtype=dtype)
        name, config, model = pretrained.name, pretrained.config, pretrained.model
        _check_length(load, config.max_sequence_length)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    wrapper = GPTInferenceWrapper(model)
    return Subject(
        name=name,
        config=config,
        wrapper=wrapper,
        device=device,
        dtype=wrapper.kv_cache_spec.dtype,
        build_seconds=time.perf_counter() - started,
    )


def _check_length(load: Load, longest: int) -> None:
    if load.prompt_tokens + load.new_tokens > longest:
        raise ConfigError(
            f"--prompt-tokens {load.prompt_tokens} and --new-tokens {load.new_tokens} exceed the "
            f"model's longest sequence of {longest} tokens; lower one of them"
        )


def _measure(
    subject: Subject, args: argparse.Namespace, load: Load, bar: Any
) -> list[dict[str, Any]]:
    results = []
    for batch_size in args.batch_sizes:
        # With one round there is nothing to alternate, and each engine has the memory alone.
        groups = [[d] for d in args.depths] if args.rounds == 1 else [args.depths]
        for depths in groups:
            made = [make_engine(subject, batch_size, depth, load) for depth in depths]
            engines = [engine for engine, _ in made]
            seconds = [second for _, second in made]
            del made
            rounds: list[list[Round]] = [[] for _ in depths]
            for engine in engines:
                warm_up(engine, batch_size, load)
            for _ in range(args.rounds):
                for n, engine in enumerate(engines):
                    bar.set_description(f"batch {batch_size}, depth {depths[n]}")
                    rounds[n].append(run_round(engine, batch_size, load))
                    bar.update()
            del engine
            close_engines(engines)
            results += [
                figures(
                    subject,
                    load,
                    batch_size,
                    depth,
                    rounds[n],
                    startup_seconds=seconds[n],
                    timeline=None,
                )
                for n, depth in enumerate(depths)
            ]
    return results


def _profile(
    subject: Subject,
    args: argparse.Namespace,
    load: Load,
    results: list[dict[str, Any]],
    bar: Any,
) -> None:
    for row in results:
        bar.set_description(f"profile of batch {row['batch']}, depth {row['depth']}")
        engines = [make_engine(subject, row["batch"], row["depth"], load)[0]]
        warm_up(engines[0], row["batch"], load)
        row["timeline"] = profile_steps(engines[0], row["batch"], load)
        close_engines(engines)
        bar.update()


def _baseline(
    args: argparse.Namespace,
    load: Load,
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
) -> dict[str, Any]:
    close_engines([])
    found: dict[str, Any] = {"name": args.baseline, "results": [], "skipped": None}
    try:
        baseline = TransformersBaseline(config, device, dtype)
        for batch_size in args.batch_sizes:
            found["results"].append(baseline.measure(batch_size, load))
        baseline.close()
    except NoBaselineError as reason:
        found["skipped"] = str(reason)
    return found
