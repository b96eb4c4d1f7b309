"""``megatron-async info``: versions, devices, and which optional parts are used."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron_async.config.engine_config import KV_CACHE_DTYPES, QUANTIZATIONS
from megatron_async.version import __version__

if TYPE_CHECKING:
    from megatron_async.models.description.recurrent_state_spec import RecurrentStateSpec

REQUIRED = ("torch", "megatron-core", "numpy", "safetensors", "tokenizers")


class Part(NamedTuple):
    """The module that an optional distribution brings, and what happens with and without it."""

    module: str
    installed: str
    missing: str


OPTIONAL = {
    "triton": Part("triton", "the kernels of a GPU", "needed on a GPU; a CPU uses plain PyTorch"),
    "cuda-bindings": Part(
        "cuda.bindings",
        "compiles the fused decode forward of a Hopper GPU and later",
        "decoding on a GPU runs the model's own forward, which is slower",
    ),
    "transformer-engine": Part(
        "transformer_engine",
        "computes the norms on a GPU",
        "this package's PyTorch norms, or Apex for LayerNorm",
    ),
    "apex": Part(
        "apex",
        "computes LayerNorm on a GPU without Transformer Engine",
        "this package's PyTorch LayerNorm",
    ),
    "transformers": Part(
        "transformers", "compared with in the tests", "Hugging Face directories are read without it"
    ),
}


def add_command(commands: Any) -> None:
    """Add ``info`` to the command line."""
    said = "Show versions, devices, and which optional parts are installed or replaced."
    parser = commands.add_parser("info", help="versions, devices, optional parts", description=said)
    parser.set_defaults(run=run)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    said = "also this model's features, which blocks of its decode steps are fused here, and why "
    said += "others are not"
    parser.add_argument("--model", metavar="tiny|PATH", help=said)
    kept = {"--quantization": QUANTIZATIONS, "--kv-cache-dtype": KV_CACHE_DTYPES}
    for flag, choices in kept.items():
        said = "as an engine with it would have the model"
        parser.add_argument(flag, choices=choices, help=said)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    report = collect()
    if args.model is not None:
        report |= _of_model(args.model, args.quantization, args.kv_cache_dtype)
    if args.json:
        print(json.dumps(report))
        return 0
    from megatron_async.cli.output.table import format_table

    versions = report["versions"]
    print(format_table(("version", ""), list(versions.items())))
    found = report["megatron_core"]
    print(f"\nmegatron-core {found['version']}: models are of {found['model_class']}")
    print(f"  {found['note'] or 'tried with it: ' + ', '.join(found['tried'])}")
    print("\ndevices", *report["devices"], sep="\n  ")
    print("\noptional parts")
    for name, part in report["optional"].items():
        version = ": not installed;" if part["version"] is None else f" {part['version']}:"
        print(f"  {name}{version} {part['use']}")
    if args.model is not None:
        from megatron_async.models.fused.report import lines

        coverage = report["decode_coverage"]
        said = lines(coverage["off"], coverage) or ["all blocks are fused"]
        print(f"\n{args.model}", *report["features"] or ["as Llama"], sep="\n  ")
        print(f"\ndecode steps of {args.model}", *said, sep="\n  ")
        print(f"\nweights of {args.model}", _weights_line(report["weights"]), sep="\n  ")
        print(f"\nKV cache of {args.model}", *map(_cache_line, report["kv_cache"]), sep="\n  ")
        print(f"\nengine of {args.model} with the defaults", _engine_line(report["engine"]),
              sep="\n  ")  # fmt: skip
        if report["recurrent_state"] is not None:
            print(f"\nrecurrent state of {args.model}", _state_line(report["recurrent_state"]),
                  sep="\n  ")  # fmt: skip
    return 0


def collect() -> dict[str, Any]:
    """What the command shows, as plain JSON types."""
    import torch

    from megatron_async import megatron_compat as compat

    versions: dict[str, str | None] = {"megatron-async": __version__}
    versions |= {"python": platform.python_version(), **{n: _version(n) for n in REQUIRED}}
    versions["megatron-core"] = compat.installed().version
    versions["torch"] = str(torch.__version__)  # with the build, which metadata may lack
    optional = {}
    for name, part in OPTIONAL.items():
        package = part.module.partition(".")[0]  # a module is looked for in its package alone
        found = all(map(importlib.util.find_spec, dict.fromkeys((package, part.module))))
        version = (_version(name) or "of unknown version") if found else None
        optional[name] = {"version": version, "use": part.installed if found else part.missing}
    return {
        "versions": versions,
        "megatron_core": compat.found(),
        "devices": _devices(),
        "optional": optional,
    }


def _of_model(model: str, quantization: str | None, kv_cache_dtype: str | None) -> dict[str, Any]:
    """Its features, which blocks are fused, and what the KV cache takes: without drafts, and where
    the layers of multi-token prediction draft; and what an engine of the defaults would be."""
    from megatron_async.build.model import load_model
    from megatron_async.build.spec import EngineSpec
    from megatron_async.codec import to_plain
    from megatron_async.config.engine_config import EngineConfig
    from megatron_async.device.memory import free_bytes
    from megatron_async.models.description.features import features

    asked = EngineConfig(quantization=quantization, kv_cache_dtype=kv_cache_dtype)
    served = load_model(model, asked)
    network: Any = served.network
    device = network.device
    made = EngineSpec.of(served, asked, device.type, free=free_bytes(device))
    engine = to_plain(made)
    spec, config = network.kv_cache_spec, network.model.model_config
    assert config is not None
    return {
        "features": features(config),
        "decode_coverage": {"off": network.fused_decode_off, **network.decode_coverage().to_dict()},
        "weights": _weights(network.model),
        "kv_cache": [
            {
                "layers": each.num_layers,
                "mtp_layers": each.num_mtp_layers,
                "token_bytes": each.token_bytes,
                "dtype": str(each.stored).removeprefix("torch."),
            }
            for each in dict.fromkeys((spec.decoder, spec))
        ],
        "engine": {name: engine[name] for name in ("sizes", "limits", "drafting", "layout")},
        "recurrent_state": _recurrent_state(network.recurrent_state_spec),
    }


def _weights(model: Any) -> dict[str, int]:
    """Bytes of parameters, each once, and of their scales, by how they are kept."""
    from megatron_async.models.quantized.linear import SCALE
    from megatron_async.models.quantized.values import is_packed

    found: dict[str, int] = {}
    for parameter in model.parameters():
        name = "mxfp4" if is_packed(parameter) else str(parameter.dtype).removeprefix("torch.")
        found[name] = found.get(name, 0) + parameter.nbytes
    scales = [each.nbytes for name, each in model.named_buffers() if name.endswith(f".{SCALE}")]
    return {**found, "scales": sum(scales)} if scales else found


def _weights_line(weights: dict[str, int]) -> str:
    parts = ", ".join(f"{count:,} {name}" for name, count in weights.items())
    return f"{sum(weights.values()):,} bytes: {parts}"


def _recurrent_state(spec: RecurrentStateSpec | None) -> dict[str, Any] | None:
    if spec is None:
        return None
    tensors = {
        each.name: {"shape": list(each.shape), "dtype": str(each.dtype).removeprefix("torch.")}
        for each in spec.tensors
    }
    return {"layers": spec.num_layers, "request_bytes": spec.state_bytes, "tensors": tensors}


def _engine_line(engine: dict[str, Any]) -> str:
    sizes, limits = engine["sizes"], engine["limits"]
    return (
        f"{sizes['max_requests']} requests of up to {sizes['max_sequence_length']:,} tokens, "
        f"{sizes['block_count']:,} blocks of {sizes['block_size_tokens']} tokens, steps of up to "
        f"{limits['max_tokens']:,} tokens"
    )


def _state_line(state: dict[str, Any]) -> str:
    tensors = ", ".join(
        f"{name} {'x'.join(map(str, each['shape']))} {each['dtype']}"
        for name, each in state["tensors"].items()
    )
    return f"{state['request_bytes']:,} bytes a request: {state['layers']} layers of {tensors}"


def _cache_line(cache: dict[str, Any]) -> str:
    line = f"{cache['token_bytes']:,} bytes a token: {cache['layers']} layers, {cache['dtype']}"
    mtp = cache["mtp_layers"]
    return line + (f", where {mtp} of them draft by multi-token prediction" if mtp else "")


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _devices() -> list[str]:
    import torch

    from megatron_async.kernels.gemm.tile_config import load_tuned, user_file

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    devices = [f"cpu: {cores} cores, {torch.get_num_threads()} threads per operator"]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        memory = properties.total_memory / 2**30
        count = len(load_tuned(properties.name))
        tuned = f"; tile configs found by 'tune': {count}, in {user_file()}" if count else ""
        devices.append(f"cuda:{index}: {properties.name}, {memory:.0f} GiB{tuned}")
    if len(devices) == 1:
        built = torch.version.cuda
        reason = "no NVIDIA GPU was found" if built else "this PyTorch is built without CUDA"
        devices.append(f"cuda: not available, {reason}")
    return devices
