"""The model that ``bench`` measures."""

from __future__ import annotations

import argparse
import time

import torch

from megatron_async.assembly import resolve_device
from megatron_async.checkpoint import load_pretrained
from megatron_async.errors import ConfigError
from megatron_async.models.wrapper import GPTInferenceWrapper

from .bench_engine import Subject
from .bench_load import Load, RaggedLoad
from .shapes import SHAPES, build_shape


def load_subject(args: argparse.Namespace, load: Load | RaggedLoad) -> Subject:
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


def _check_length(load: Load | RaggedLoad, longest: int) -> None:
    if load.longest > longest:
        raise ConfigError(
            f"{load.what} exceed the model's longest sequence of {longest} tokens; lower one of "
            "them"
        )
