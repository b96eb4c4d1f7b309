"""The model that ``bench`` and ``trace`` look at: a checkpoint, or random weights in a shape."""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_async.build.model import check_same_vocabulary, config_of, network_over
from megatron_async.build.ranks import config_of_ranks, start_ranks
from megatron_async.checkpoint import load_pretrained
from megatron_async.cli.options.options import PARALLEL_SIZES
from megatron_async.config.engine_config import EngineConfig
from megatron_async.device import resolve_device
from megatron_async.errors import ConfigError
from megatron_async.models.build import build_random_model
from megatron_async.models.description.config import ModelConfig
from megatron_async.models.description.memory_traffic import MXFP4_BYTES
from megatron_async.models.description.shapes import SHAPES, kept_of_shape
from megatron_async.models.gpt_network import GPTNetwork
from megatron_async.models.served import ServedModel
from megatron_async.ranks.group import RankGroup
from megatron_async.ranks.messages import BuildModel, LoadModel
from megatron_async.ranks.start import device_of_rank


@dataclass(frozen=True, slots=True)
class BenchmarkModel:
    """The model all engines share, and what it is."""

    name: str
    config: ModelConfig
    network: GPTNetwork
    device: torch.device
    dtype: torch.dtype
    build_seconds: float
    draft_config: ModelConfig | None = None
    """The configuration of the model that drafts."""
    tokenizer: Any = None
    """None of a shape."""
    micro_batches: int | None = None
    """Micro-batches of its engines; None as they choose."""
    draft: GPTNetwork | None = None
    group: RankGroup | None = None
    late_planning: bool = False
    """Its engines plan steps as late as they can."""
    gemm_autotune_seconds: float = 0.0
    """The seconds that the start of each engine may take for it."""

    def served(self, tokenizer: Any = None) -> ServedModel:
        """The model as an engine takes it."""
        return ServedModel(
            network=self.network,
            tokenizer=tokenizer,
            name=self.name,
            draft=self.draft,
            group=self.group,
        )

    @property
    def kv_cache_dtype(self) -> str | None:
        """How its engines keep keys and values, as ``EngineConfig`` says it."""
        return None if self.network.kv_cache_spec.kept is None else "fp8"

    @property
    def layer_itemsize(self) -> int:
        """Bytes of most elements of its layers, but of packed experts."""
        from megatron_async.models.quantized import linear

        layers = linear.quantized(self.network.model).values()
        is_e4m3 = any(layer.weight.dtype == linear.E4M3 for layer in layers)
        return 1 if is_e4m3 else self.dtype.itemsize

    @property
    def expert_itemsize(self) -> float | None:
        """Bytes of an element of its experts' weights; None is as of its layers'."""
        from megatron_async.models.quantized import mxfp4

        return MXFP4_BYTES if mxfp4.packed_layers(self.network.model) else None

    @property
    def layout_sizes(self) -> dict[str, int]:
        """Ranks and micro-batches, as floors take them; empty for one rank."""
        if self.group is None:
            return {}
        layout = self.group.layout
        sizes = {"tensor": layout.tensor, "expert": layout.expert, "pipeline": layout.pipeline}
        return {**sizes, "micro_batches": self.micro_batches or 1}

    def tokens_of(self, file: str, least: int) -> list[int]:
        """Token ids of a file's text.

        Raises:
            ConfigError: the file cannot be read, has fewer than ``least``, or nobody knows them.
        """
        if self.tokenizer is None:
            raise ConfigError(
                "--prompt-file is text and the model has no tokenizer; leave it out, or give a "
                "--model that has one"
            )
        try:
            tokens = list(self.tokenizer.tokenize(Path(file).read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            raise ConfigError(f"--prompt-file {file}: cannot be read: {error}") from None
        if len(tokens) < least:
            raise ConfigError(
                f"--prompt-file {file} has {len(tokens)} tokens and a prompt {least}; lower "
                "--prompt-tokens or use a longer file"
            )
        return tokens


def longest_of(args: argparse.Namespace) -> int:
    """Most tokens of a request to the model of ``args``; no weights are read.

    Raises:
        CheckpointError: its description cannot be read.
    """
    return _config(args).max_sequence_length


def _config(args: argparse.Namespace) -> ModelConfig:
    return config_of(args.model or "tiny") if args.shape is None else SHAPES[args.shape]


def load_benchmark_model(
    args: argparse.Namespace, *, longest: int, what: str, seed: int = 0
) -> BenchmarkModel:
    """The model that ``add_benchmark_model_options`` lets people name, on its device.

    Args:
        longest: tokens of the longest request.
        what: the options that make it so long.

    Raises:
        ConfigError: that is more than the model takes, the device is not there, or the model that
            drafts has another vocabulary.
        CheckpointError: the model cannot be loaded.
    """
    resolve_device(args.device)
    started = time.perf_counter()
    names = (*PARALLEL_SIZES, "rank_timeout_seconds")
    ranks: dict[str, Any] = {k: v for k in names if (v := getattr(args, k, None)) is not None}
    engine_config = EngineConfig(
        device=args.device,
        dtype=args.dtype,
        quantization=args.quantization,
        quantize_activations=args.quantize_activations,
        kv_cache_dtype=args.kv_cache_dtype,
        **ranks,
    )

    def describe() -> Iterable[ModelConfig]:
        yield _config(args)

    group = start_ranks(engine_config, describe)
    try:
        return _load(args, engine_config, group, started, longest=longest, what=what, seed=seed)
    except BaseException:
        if group is not None:
            group.close()
        raise


def _load(
    args: argparse.Namespace,
    engine_config: EngineConfig,
    group: RankGroup | None,
    started: float,
    *,
    longest: int,
    what: str,
    seed: int,
) -> BenchmarkModel:
    """Load the model on this rank, and have the others load it."""
    device = resolve_device(args.device)
    dtype = None if args.dtype is None else getattr(torch, args.dtype)
    if group is not None:
        device = device_of_rank(device.type)
    if args.shape is not None:
        name, config, model = args.shape, SHAPES[args.shape], None
        config = dataclasses.replace(config, mtp_num_layers=args.mtp_layers or 0)
        pretrained = None
    else:
        if group is not None:
            group.tell(LoadModel(args.model or "tiny", config_of_ranks(engine_config)))
        pretrained = load_pretrained(
            args.model or "tiny",
            device=device,
            dtype=dtype,
            quantization=args.quantization,
            quantize_activations=args.quantize_activations,
        )
        name, config, model = pretrained.name, pretrained.config, pretrained.model
    if longest > config.max_sequence_length:
        limit = f"the model's longest has {config.max_sequence_length} tokens; lower one of them"
        raise ConfigError(f"{what} make sequences of {longest} tokens, and {limit}")
    if model is None:
        if dtype is None:
            dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        quantize = {
            **kept_of_shape(name, args.quantization),
            "quantize_activations": args.quantize_activations,
        }
        if group is not None:
            group.tell(BuildModel(config, dtype, seed, **quantize))
        model = build_random_model(config, device=device, dtype=dtype, seed=seed, **quantize)
    network, draft = network_over(model, engine_config), None
    if group is not None:
        group.await_answers()
        group.model_path = None if args.shape is not None else args.model or "tiny"
    dtype, draft_config = network.kv_cache_spec.dtype, None
    if args.draft_model is not None:
        if group is not None:
            raise ConfigError("--draft-model is not measured with several ranks; leave one out")
        drafting = load_pretrained(args.draft_model, device=device, dtype=dtype)
        draft_config = drafting.config
        check_same_vocabulary(config, pretrained and pretrained.tokenizer, drafting)
        draft = GPTNetwork(drafting.model)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds = time.perf_counter() - started
    tokenizer = pretrained and pretrained.tokenizer
    return BenchmarkModel(
        name, config, network, device, dtype, seconds, draft_config, tokenizer,
        getattr(args, "pipeline_micro_batches", None), draft, group,
        bool(getattr(args, "late_planning", False)),
        getattr(args, "gemm_autotune_seconds", None) or 0.0,
    )  # fmt: skip
