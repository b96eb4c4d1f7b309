"""What weights and activations in e4m3 change in the embedded models, scheme by scheme: the tables
of docs/quantization.md.

python scripts/measure_quantization.py
"""

from __future__ import annotations

import argparse
import inspect
import json
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_async import DynamicInferenceEngine, EngineConfig, SamplingParams
from megatron_async.checkpoint import load_pretrained
from megatron_async.models.quantized.activations import quantize_activations
from megatron_async.models.quantized.linear import keep, quantizable
from megatron_async.models.quantized.values import E4M3, LARGEST, multiply_out, quantize

BLOCK = 128


class Scheme(NamedTuple):
    """How weights are quantized: values to what they stand for, in float64. None: not at all.

    ``columns``: linear layers but experts' multiply e4m3 by e4m3, and each token has a scale for
    that number of columns, with 0 for all; None leaves activations as they are.
    """

    name: str
    apply: Callable[[Tensor], Tensor] | None
    columns: int | None = None


def by_tensor(weight: Tensor) -> Tensor:
    """One scale for all, of each expert."""
    flat = weight.flatten(-2)
    return multiply_out(*quantize(flat, 1), torch.float64).view(weight.shape)


def by_row(weight: Tensor) -> Tensor:
    """A scale for each row: ``quantization="fp8"``."""
    return multiply_out(*quantize(weight, 1), torch.float64)


def by_block(weight: Tensor) -> Tensor:
    """A scale for each block of 128 x 128, as DeepSeek and Qwen publish them."""
    values = weight.double().clone()
    for rows in values.split(BLOCK, -2):
        for block in rows.split(BLOCK, -1):
            block.copy_(by_tensor(block))
    return values


SCHEMES = (
    Scheme("bfloat16", None),
    Scheme("e4m3, a scale for all", by_tensor),
    Scheme("e4m3, by block", by_block),
    Scheme("e4m3, by row", by_row),
    Scheme("e4m3, by row; activations by token", by_row, columns=0),
    Scheme("e4m3, by block; activations by token and 128 columns", by_block, columns=BLOCK),
)


def text_of(count: int) -> str:
    """Python code that is on every machine: modules of the standard library."""
    modules = (argparse, json, inspect)
    return "".join(inspect.getsource(module) for module in modules)[:count]


def logits_of(model: Any, sequences: Tensor) -> Tensor:
    """Float64 ``[N, T, V]`` for int64 ``[N, T]``."""
    positions = torch.arange(sequences.shape[1]).expand_as(sequences)
    with torch.inference_mode():
        rows = zip(sequences.split(8), positions.split(8), strict=True)
        return torch.cat([model(ids, at, None).double() for ids, at in rows])


def model_of(name: str, dtype: torch.dtype, scheme: Scheme) -> Any:
    """The model with the values that ``scheme`` has, in ``dtype``."""
    # The layers that a model keeps as e4m3 are told by one that does.
    made = load_pretrained(name, dtype=dtype, quantization="fp8").model
    names = quantizable(made)
    exact = load_pretrained(name, dtype=torch.float32).model
    if scheme.columns is not None:
        for layer, module in names.items():
            fill(module, exact.get_parameter(f"{layer}.weight"), scheme.columns)
        quantize_activations(made)
        return made
    model = load_pretrained(name, dtype=dtype).model
    if scheme.apply is not None:
        with torch.no_grad():
            for layer in names:
                weight = exact.get_parameter(f"{layer}.weight")
                model.get_parameter(f"{layer}.weight").copy_(scheme.apply(weight))
    return model


def fill(layer: Any, weight: Tensor, block: int) -> None:
    """Give a layer the e4m3 of ``weight``, with a scale for each row, or for each ``block`` x
    ``block`` unless that is 0."""
    k = weight.shape[-1]
    shared = math.gcd(k, block)
    keep(layer, k // shared)
    with torch.no_grad():
        largest = weight.abs().amax(-1, keepdim=True).expand(weight.shape).clone()
        if block:
            largest = weight.abs()
            for rows in largest.split(block, -2):
                for each in rows.split(block, -1):
                    each.copy_(each.amax((-2, -1), keepdim=True).expand_as(each))
        scale = largest / LARGEST
        layer.weight_scale.copy_(scale[..., ::shared])
        layer.weight.view(torch.uint8).copy_((weight / scale).to(E4M3).view(torch.uint8))


def greedy(name: str, count: int, length: int) -> Tensor:
    """Int64 ``[count, length]``: what the model in bfloat16 writes, with the first line of a prompt
    in front."""
    config = EngineConfig(device="cpu", dtype="bfloat16", depth=2)
    params = SamplingParams(temperature=0.0, num_tokens_to_generate=length, termination_id=-1)
    lines = [line for line in text_of(200_000).splitlines() if line.strip().startswith("def ")]
    with DynamicInferenceEngine.from_pretrained(name, config) as engine:
        done = engine.generate([line.strip() for line in lines[:count]], params)
    return torch.tensor([(list(r.prompt_tokens) + r.generated_tokens)[-length:] for r in done])


def measure(
    name: str, tokens: int, length: int, schemes: Sequence[Scheme] = SCHEMES
) -> list[dict[str, Any]]:
    """All schemes beside the model in float32."""
    tokenizer = load_pretrained(name).tokenizer
    assert tokenizer is not None
    ids = tokenizer.tokenize(text_of(2 * tokens))[:tokens]
    texts = torch.tensor(ids[: tokens // length * length]).view(-1, length)
    written = greedy(name, tokens // length, length)
    plain = Scheme("float32", None)
    exact, followed = (logits_of(model_of(name, torch.float32, plain), s) for s in (texts, written))
    rows = []
    for scheme in schemes:
        model = model_of(name, torch.bfloat16, scheme)
        same = model_of(name, torch.float64, scheme)
        found = logits_of(model, texts)
        log_probs, meant = found.log_softmax(-1), exact.log_softmax(-1)
        divergence = (meant.exp() * (meant - log_probs)).sum(-1)
        chosen = logits_of(model, written)[:, :-1].argmax(-1)
        own = logits_of(same, texts)
        rows.append(
            {
                "model": name,
                "weights": scheme.name,
                "perplexity": perplexity(log_probs, texts),
                "of_float32": perplexity(meant, texts),
                "kl": float(divergence.mean()),
                "kl_99": float(divergence.flatten().quantile(0.99)),
                "agreement": float((chosen == followed[:, :-1].argmax(-1)).double().mean()),
                "beside_float64": float((found - own).norm() / own.norm()),
            }
        )
    return rows


def perplexity(log_probs: Tensor, texts: Tensor) -> float:
    """The perplexity of all tokens but the first of each sequence."""
    of_next = log_probs[:, :-1].gather(-1, texts[:, 1:, None])
    return float((-of_next.mean()).exp())


def main() -> None:
    """Measure, and print a table, or JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["tiny", "tiny-moe", "tiny-hybrid"])
    parser.add_argument("--tokens", type=int, default=10_240)
    parser.add_argument("--length", type=int, default=128)
    said = "schemes whose names have this word, such as activations (default: all)"
    parser.add_argument("--only", default="", metavar="WORD", help=said)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    schemes = [scheme for scheme in SCHEMES if args.only in scheme.name]
    sizes = args.tokens, args.length
    rows = [row for name in args.models for row in measure(name, *sizes, schemes)]
    if args.json:
        print(json.dumps(rows, indent=1))
        return
    print("| model | weights | perplexity | KL, mean | KL, p99 | same choice | beside float64 |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row['model']} | {row['weights']} | {row['perplexity']:.4f} "
            f"(float32: {row['of_float32']:.4f}) | {row['kl']:.1e} | {row['kl_99']:.1e} | "
            f"{row['agreement']:.2%} | {row['beside_float64']:.1e} |"
        )


if __name__ == "__main__":
    main()
