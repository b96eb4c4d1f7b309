"""``megatron-async tune``: find how a model's products are best cut up on this GPU."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from megatron_async.errors import ConfigError

from .options import integer, several
from .shapes import SHAPES
from .table import format_table

_DESCRIPTION = """\
Measure how the products of the fused decode step are best cut up on this GPU, for a model whose
shape was not measured yet, or on another GPU. A step of a few layers with random weights is timed
with some 40 cuts of each product; what is faster is kept beside the compiled kernels, and engines
that start afterwards use it. It takes some 15 s for each batch size. Kernels that cut sums
otherwise round otherwise: in bfloat16 tokens may differ from those before.
"""
_BATCH_SIZES = (1, 2, 4, 8, 16, 32)
_MOST_ROWS = 32
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
        type=several(integer(1, _MOST_ROWS)),
        default=list(_BATCH_SIZES),
        metavar="B,...",
        help="of decode steps, at most 32; each is good for those down to half of it "
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
    from megatron_async.assembly import resolve_device
    from megatron_async.checkpoint import load_config
    from megatron_async.kernels.cuda import compile as cuda
    from megatron_async.kernels.cuda import tuned
    from megatron_async.kernels.cuda.tilings import padded

    device = resolve_device(args.device)
    if device.type != "cuda":
        raise ConfigError("tune measures kernels of a GPU, and device is the CPU; run it on a GPU")
    config = SHAPES[args.shape] if args.shape is not None else load_config(args.model)
    if args.context >= config.max_sequence_length:
        raise ConfigError(
            f"--context {args.context} leaves no room in the model's {config.max_sequence_length} "
            "tokens; lower it"
        )
    found, rows = {}, []
    for size in sorted({padded(size) for size in args.batch_sizes}):
        better, before, after = _tune(config, size, args, device)
        found.update(better)
        gain = f"{1 - after / before:.1%}"
        rows.append([size, f"{before:.1f}", f"{after:.1f}", gain, len(better)])
    layers = min(_LAYERS, config.num_layers)
    gpu = cuda.device_name(device.index)
    print(f"{gpu}, {layers} layers and the output layer, bfloat16")
    header = ["batch", "before-us", "after-us", "less", "products cut anew"]
    print(format_table(header, rows))
    if found:
        path = tuned.save(gpu, found)
        print(f"kept in {path}")
    else:
        print("nothing is faster than what is used already")
    return 0


def _tune(
    config: Any, size: int, args: argparse.Namespace, device: Any
) -> tuple[dict[Any, Any], float, float]:
    """Tilings that are better than those in use for a batch, and the microseconds of both steps."""
    from tqdm import tqdm

    from .tune_search import Rig, Search, short_list

    try:
        rig = Rig(config, size, layers=_LAYERS, context=args.context, device=device)
        search = Search(rig)
    except ValueError as error:
        raise ConfigError(f"the fused decode step is not for this model: {error}") from None
    first = dict(search.best)
    # Heads are wide: there is little to choose, and each try takes long.
    counts = {name: max(1, args.count // 3) if name == "head" else args.count for name in first}
    order = ("fc1", "fc2", "qkv", "projection", "head")
    for name in tqdm(order, f"batch {size}", file=sys.stderr, disable=None, leave=False):
        search.vary(name, short_list(search.products[name], search.most, counts[name]))
    before, after = rig.compare(first, search.best)
    if after >= before:
        return {}, before, before
    better = {
        search.products[name].case(search.most): tiling
        for name, tiling in search.best.items()
        if tiling != first[name]
    }
    return better, before, after
