"""``megatron-async tune``: find how a model's products are best cut up on this GPU."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from megatron_async.errors import ConfigError
from megatron_async.kernels.gemm.tilings import ANY_SHAPE_ROWS

from .benchmark.shapes import SHAPES
from .cli.options import integer, several
from .cli.table import format_table

_DESCRIPTION = """\
Measure how the products of the fused decode step are best cut up on this GPU, for a model whose
shape was not measured yet. A step of a few layers with random weights is timed with some 40 cuts of
each product, those that fill the 132 multiprocessors of an H100 SXM or H200. What is faster is kept
in tilings.json beside the compiled kernels ($MEGATRON_ASYNC_CACHE, or ~/.cache/megatron_async), and
engines that start afterwards use it until the file is deleted. It takes some 15 s for each batch
size. Kernels that cut sums otherwise round otherwise: tokens may differ from those before.
"""
_BATCH_SIZES = (1, 2, 4, 8, 16, 32)
_LAYERS = 4


def add_command(commands: Any) -> None:
    """Add ``tune`` to the command line."""
    parser = commands.add_parser(
        "tune",
        help="find the fastest kernels for a model on this GPU",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    group = parser.add_argument_group("model")
    choice = group.add_mutually_exclusive_group(required=True)
    choice.add_argument("--model", metavar="tiny|PATH", help="a model; its weights are not read")
    choice.add_argument("--shape", choices=tuple(SHAPES), help="the shape of a known model")
    group.add_argument("--device", metavar="NAME", help="default: the first GPU")
    add = parser.add_argument_group("measurement").add_argument
    add(
        "--batch-sizes",
        type=several(integer(1, ANY_SHAPE_ROWS)),
        default=list(_BATCH_SIZES),
        metavar="B,...",
        help=f"of decode steps, at most {ANY_SHAPE_ROWS}; each is for those above half of it too "
        f"(default: {','.join(map(str, _BATCH_SIZES))})",
    )
    add(
        "--context",
        type=integer(1, 32768),
        default=384,
        metavar="N",
        help="tokens in the cache of each row (default: 384)",
    )
    add(
        "--count",
        type=integer(1),
        default=24,
        metavar="N",
        help="cuts of each product that are tried, and half as many of another kind (default: 24)",
    )


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    import torch

    from megatron_async.checkpoint import describe_pretrained
    from megatron_async.engine.build import resolve_device
    from megatron_async.kernels import compile as cuda
    from megatron_async.kernels.gemm import tuned
    from megatron_async.kernels.gemm.tilings import padded

    device = resolve_device(args.device)
    if device.type != "cuda":
        raise ConfigError("tune measures kernels of a GPU, and device is the CPU; run it on a GPU")
    reason = cuda.unavailable(device.index)
    if reason is not None:
        raise ConfigError(f"there are no kernels to tune on {device}: {reason}")
    if args.shape is not None:
        config, dtype = SHAPES[args.shape], torch.bfloat16
    else:
        description = describe_pretrained(args.model)
        config, dtype = description.config, description.dtype
    if args.context >= config.max_sequence_length:
        raise ConfigError(
            f"--context {args.context} leaves no room in the model's {config.max_sequence_length} "
            "tokens; lower it"
        )
    gpu = cuda.device_name(device.index)
    path = tuned.save(gpu, {})  # before the work, in case it cannot be written
    rows = []
    for size in sorted({padded(size) for size in args.batch_sizes}):
        better, before, after = _tune(config, size, args, device)
        tuned.save(gpu, better)
        rows.append(
            [size, f"{before:.1f}", f"{after:.1f}", f"{1 - after / before:.1%}", len(better)]
        )
    layers = min(_LAYERS, config.num_layers)
    print(f"{gpu}, {layers} layers and the output layer, bfloat16")
    print(format_table(["batch", "before-us", "after-us", "less", "products cut anew"], rows))
    if any(row[-1] for row in rows):
        print(f"kept in {path}; engines that start from now on use it, until it is deleted")
    else:
        print("nothing is faster than what is used already")
    if dtype != torch.bfloat16:
        name = str(dtype).removeprefix("torch.")
        print(
            f"{args.model} is a {name} model: these kernels are for --dtype bfloat16 alone",
            file=sys.stderr,
        )
    return 0


def _tune(
    config: Any, size: int, args: argparse.Namespace, device: Any
) -> tuple[dict[Any, Any], float, float]:
    """Tilings that are better than those in use for a batch, and the microseconds of both steps.

    Raises:
        ConfigError: the step cannot be measured.
    """
    import torch
    from tqdm import tqdm

    from .tune_search import Rig, Search, short_list

    try:
        rig = Rig(config, size, layers=_LAYERS, context=args.context, device=device)
        search = Search(rig)
        first = dict(search.best)
        # Heads are wide: there is little to choose, and each try takes long.
        counts = {name: max(1, args.count // 3) if name == "head" else args.count for name in first}
        order = ("fc1", "fc2", "qkv", "projection", "head")
        for name in tqdm(order, f"batch {size}", file=sys.stderr, disable=None, leave=False):
            search.vary(name, short_list(search.products[name], search.most, counts[name]))
        before, after = rig.compare(first, search.best)
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
    if search.dropped:
        print(
            f"batch {size}: {len(search.dropped)} of {len(search.dropped) + len(search.log)} "
            f"tilings failed and are not used, first {search.dropped[0]}",
            file=sys.stderr,
        )
    if after >= before:
        return {}, before, before
    better = {
        search.products[name].case(search.most): tiling
        for name, tiling in search.best.items()
        if tiling != first[name]
    }
    return better, before, after
