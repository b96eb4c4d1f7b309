"""``megatron-async tune``: find the fastest tile configs of a model's GEMMs on this GPU."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_async.cli.options.values import integer, several
from megatron_async.cli.output.table import format_table
from megatron_async.errors import ConfigError
from megatron_async.kernels.gemm.tile_config import (
    ADD,
    ANY_SHAPE_ROWS,
    FEW_ROWS,
    MAX_ROWS,
    STORE,
    TUNED,
    Entry,
    GemmProblem,
    padded,
    save_tuned,
)
from megatron_async.models.description.shapes import SHAPES

if TYPE_CHECKING:
    from megatron_async.models.fused.tuning import Search

_DESCRIPTION = """\
Measure tile configs of the fused decode step's GEMMs on this GPU, for a model whose shape was not
measured yet. A step of a few layers with random weights is timed with some 40 configs of each GEMM,
those that fill the GPU's SMs. What is faster is kept in tile_configs.json next to the compiled
kernels ($MEGATRON_ASYNC_CACHE, or ~/.cache/megatron_async), and engines that start afterwards use
it until the file is deleted. It takes some 15 s for each batch size. Kernels that split sums
otherwise round otherwise: tokens may differ from those before.
"""
_BATCH_SIZES = (1, 2, 4, 8, 16, 32)
_PRODUCTS = ("fc1", "fc2", "qkv", "projection", "in_proj", "out_proj", "head", "eh_proj")
"""The GEMMs: also those of Mamba-2 layers, and last the projection of MTP layers."""


def add_command(commands: Any) -> None:
    """Add ``tune`` to the command line."""
    said = "find the fastest kernels for a model on this GPU"
    parser = commands.add_parser("tune", help=said, description=_DESCRIPTION)
    parser.set_defaults(run=run)
    group = parser.add_argument_group("model")
    choice = group.add_mutually_exclusive_group(required=True)
    choice.add_argument("--model", metavar="tiny|PATH", help="a model; its weights are not read")
    choice.add_argument("--shape", choices=tuple(SHAPES), help="the shape of a known model")
    group.add_argument("--device", metavar="NAME", help="default: the first GPU")
    said = "fp8: GEMMs whose weights are e4m3, with a scale for each row (default: bfloat16)"
    group.add_argument("--quantization", choices=("fp8",), help=said)
    said = "with it, GEMMs of 9 rows and more whose inputs are e4m3 too"
    group.add_argument("--quantize-activations", action="store_true", help=said)
    said = "ranks, of one of which the shapes are measured, on one GPU (default: 1)"
    name = "--tensor-model-parallel-size"
    group.add_argument(name, type=integer(1), default=1, metavar="N", help=said)

    def option(to: Any, name: str, kind: Any, default: Any, metavar: str, text: str) -> None:
        shown = ",".join(map(str, default)) if isinstance(default, list) else default
        note = "" if default in (None, math.inf) else f" (default: {shown})"
        to.add_argument(name, type=kind, default=default, metavar=metavar, help=text + note)

    main = parser.add_argument_group("measurement")
    sizes = (
        f"of decode steps, at most {ANY_SHAPE_ROWS}, with fp8 {FEW_ROWS}; each is for those above "
        "half of it too"
    )
    option(main, "--batch-sizes", several(integer(1, MAX_ROWS)), list(_BATCH_SIZES), "B,...", sizes)
    option(main, "--context", integer(1, 32768), 384, "N", "tokens in the cache of each row")
    counts = "configs of each GEMM that are tried, and half as many of the other kernel"
    option(main, "--count", integer(1), 24, "N", counts)
    more = parser.add_argument_group("search for the built-in table")
    dry = f"print the best as lines of the table and keep nothing; batches up to {MAX_ROWS}"
    more.add_argument("--dry-run", action="store_true", help=dry)
    long = "a dry run of minutes for each batch size: constants of the kernels, configs at random, "
    long += "then the neighbours of the best"
    more.add_argument("--exhaustive", action="store_true", help=long)
    option(more, "--rounds", integer(1), 2, "N", "over all GEMMs with --exhaustive")
    option(more, "--gemms", several(str), list(_PRODUCTS), "NAME,...", "that are varied, in turn")
    option(more, "--seconds", float, math.inf, "S", "of searching for each batch size, about")
    option(more, "--layers", integer(1), 4, "N", "of the step that is timed")
    option(more, "--replays", integer(1), 8, "N", "steps of a measurement")
    option(more, "--log", Path, None, "FILE", "every time measured, as JSON")


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    import torch

    from megatron_async.checkpoint import describe_pretrained
    from megatron_async.device import resolve_device
    from megatron_async.kernels import compile as cuda
    from megatron_async.models.fused.timed_step import first_layers
    from megatron_async.models.parallel_sizes import tensor_share
    from megatron_async.ranks.start import launched_rank

    if launched_rank() is not None:
        raise ConfigError(
            "tune measures on one GPU, and RANK and WORLD_SIZE are set, as by a launcher: start it "
            "by itself, with the --tensor-model-parallel-size of the ranks"
        )
    keeps = not (args.dry_run or args.exhaustive)
    most = FEW_ROWS if args.quantization else ANY_SHAPE_ROWS
    if args.quantize_activations and not args.quantization:
        raise ConfigError("--quantize-activations is for --quantization fp8; add it")
    if max(args.batch_sizes) > most and (keeps or args.quantization):
        more = "for e4m3 weights" if args.quantization else "more only with --dry-run"
        raise ConfigError(f"--batch-sizes must be between 1 and {most}; {more}")
    if not set(args.gemms) <= set(_PRODUCTS):
        raise ConfigError(f"--gemms must be some of {','.join(_PRODUCTS)}")
    device = resolve_device(args.device)
    if device.type != "cuda":
        raise ConfigError("tune measures kernels of a GPU, and device is the CPU; run it on a GPU")
    reason = cuda.unavailable(device.index)
    if reason is not None:
        raise ConfigError(f"there are no kernels to tune on {device}: {reason}")
    config, dtype = SHAPES.get(args.shape), torch.bfloat16
    if config is None:
        description = describe_pretrained(args.model)
        config, dtype = description.config, description.dtype
    if args.context >= config.max_sequence_length:
        raise ConfigError(
            f"--context {args.context} leaves no room in the model's {config.max_sequence_length} "
            "tokens; lower it"
        )
    ranks = args.tensor_model_parallel_size
    config = tensor_share(config, ranks)
    gpu = cuda.device_name(device.index)
    # Before the work, in case it cannot be written.
    path = save_tuned(gpu, []) if keeps else None
    rows, lines, log = [], [], {}
    for size in sorted({padded(size) for size in args.batch_sizes}):
        search, before, after = _tune(config, size, args, device)
        better = search.changed
        if after >= before:
            better, after = [], before
        if path is not None:
            found = [
                Entry(problem, search.best[name], TUNED)
                for name in better
                for problem in _problems(search, name, size, ranks)
            ]
            save_tuned(gpu, found)
        for name, product in search.products.items():
            problems = [product.case(size)._replace(norm=None, epilogue=None)]
            if ranks > 1:
                problems = _problems(search, name, size, ranks)
            lines += [Entry(each, search.best[name], "measured").to_json() for each in problems]
        log[size] = [(name, list(map(int, tried)), us) for name, tried, us in search.log]
        times = f"{before:.1f}", f"{after:.1f}", f"{1 - after / before:.1%}"
        rows.append([size, *times, len(better)])
    layers = first_layers(config, min(args.layers, config.num_layers)).num_layers
    weights = "weights in e4m3" if args.quantization else "bfloat16"
    weights += ", and inputs from 9 rows on" if args.quantize_activations else ""
    print(f"{gpu}, {layers} layers and the output layer, {weights}")
    print(format_table(["batch", "before-us", "after-us", "less", "GEMMs changed"], rows))
    if path is None:
        print(*lines, sep=",\n")
    elif any(row[-1] for row in rows):
        print(f"kept in {path}; engines that start from now on use it, until it is deleted")
    else:
        print("nothing is faster than what is used already")
    if args.log is not None:
        args.log.write_text(json.dumps(log))
    if dtype != torch.bfloat16:
        name = str(dtype).removeprefix("torch.")
        only = f"{args.model} is a {name} model: these kernels are for --dtype bfloat16 alone"
        print(only, file=sys.stderr)
    return 0


def _problems(search: Search, name: str, rows: int, ranks: int) -> list[GemmProblem]:
    """What a config is kept for. Where one rank adds to the stream, several sum and add, or leave
    partial sums."""
    problem = search.products[name].case(rows)
    if ranks == 1 or problem.epilogue != ADD:
        return [problem]
    return [problem, problem._replace(epilogue=STORE)]


def _tune(
    config: Any, size: int, args: argparse.Namespace, device: Any
) -> tuple[Search, float, float]:
    """The search for a batch size, and the microseconds of a step before and after it.

    Raises:
        ConfigError: the step cannot be measured.
    """
    import torch
    from tqdm import tqdm

    from megatron_async.models.fused import tuning
    from megatron_async.models.fused.timed_step import Rig

    def report(line: str) -> None:
        tqdm.write(f"batch {size}: {line}", file=sys.stderr)

    sizes = {"layers": args.layers, "context": args.context, "replays": args.replays}
    quantize, rig = args.quantization is not None, None
    try:
        rig = Rig(
            config, size, **sizes, device=device, quantize=quantize,
            quantize_activations=args.quantize_activations,
        )  # fmt: skip
        end = time.monotonic() + args.seconds
        search = tuning.Search(rig, end, report if args.exhaustive or args.dry_run else None)
        if args.exhaustive:
            tuning.search_all(search, args.gemms, args.rounds, args.count)
        else:
            tuning.search_short_lists(search, args.gemms, args.count)
        before, after = rig.compare(search.first_configs, search.best)
    except ValueError as error:
        raise ConfigError(f"the fused decode step is not for this model: {error}") from None
    except ArithmeticError as error:
        raise ConfigError(
            f"a batch of {size} cannot be measured, its logits are wrong: {error}; please report it"
        ) from None
    except torch.OutOfMemoryError:
        raise ConfigError(
            f"{device} has too little free memory for a batch of {size}; end what else runs on it, "
            "or lower --batch-sizes or --context"
        ) from None
    finally:
        if rig is not None:
            rig.close()
    if search.dropped:
        failed, tried = len(search.dropped), len(search.dropped) + len(search.log)
        first = f"configs failed and are not used, first {search.dropped[0]}"
        print(f"batch {size}: {failed} of {tried} {first}", file=sys.stderr)
    return search, before, after
