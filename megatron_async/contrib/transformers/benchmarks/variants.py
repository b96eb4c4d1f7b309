"""The ways to generate that are measured, their models, and how long they take."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

RANDOM: dict[str, dict[str, Any]] = {
    "random:tiny-gpt2": {"n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 64},
    "random:tiny-llama-1b": {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 64,
    },
    "random:tiny-llama-8b": {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 64,
    },
    "random:gpt2": {"n_embd": 768, "n_layer": 12, "n_head": 12},
    "random:gpt2-medium": {"n_embd": 1024, "n_layer": 24, "n_head": 16},
    "random:gpt2-large": {"n_embd": 1280, "n_layer": 36, "n_head": 20},
    "random:llama-1b": {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
        "max_position_embeddings": 8192, "tie_word_embeddings": True,
    },
    "random:llama-8b": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
        "max_position_embeddings": 16384, "rope_theta": 500000.0,
    },
}  # fmt: skip


class Variant(NamedTuple):
    """``custom`` is made when it is needed; ``compiled`` leaves transformers' compilation on."""

    static: bool
    compiled: bool
    custom: Callable[[], Any]


def variants() -> dict[str, Variant]:
    from megatron_async.contrib.transformers import (
        AsyncGenerate,
        alternating_streams,
        async_generate,
        generate_captured,
    )

    def alternating() -> Any:
        return AsyncGenerate(streams=alternating_streams)

    def stock() -> None:
        return None

    return {
        "baseline": Variant(False, False, stock),
        "interleaved": Variant(False, False, lambda: async_generate),
        "static": Variant(True, False, stock),
        "static-interleaved": Variant(True, False, lambda: async_generate),
        "alternating": Variant(False, False, alternating),
        "static-alternating": Variant(True, False, alternating),
        "compiled": Variant(True, True, stock),
        "all": Variant(True, True, lambda: async_generate),
        "all-alternating": Variant(True, True, alternating),
        "captured": Variant(True, True, lambda: generate_captured),
        "captured-uncompiled": Variant(True, False, lambda: generate_captured),
    }


def load(name: str, dtype: torch.dtype, device: str) -> Any:
    import transformers as t

    if name in RANDOM:
        torch.manual_seed(0)
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)  # in fp32 the largest would not fit
        try:
            with torch.device(device):
                if "gpt2" in name:
                    model: Any = t.GPT2LMHeadModel(t.GPT2Config(**RANDOM[name]))
                else:
                    model = t.LlamaForCausalLM(t.LlamaConfig(**RANDOM[name]))
        finally:
            torch.set_default_dtype(before)
        return model.to(dtype).eval()
    return t.AutoModelForCausalLM.from_pretrained(name, dtype=dtype).to(device).eval()


def generation(
    model: Any, variant: Variant, batch: int, options: argparse.Namespace
) -> Callable[[], Any]:
    """A call of ``generate`` whose rows end by length: the last id is the end id, made impossible
    by no processor, so its check runs for every token."""
    generator = torch.Generator().manual_seed(0)
    vocabulary = model.config.vocab_size
    ids = torch.randint(1, vocabulary - 1, (batch, options.prompt), generator=generator)
    given = {
        "input_ids": ids.to(model.device),
        "attention_mask": torch.ones_like(ids).to(model.device),
        "max_new_tokens": options.tokens,
        "do_sample": options.sample,
        "eos_token_id": vocabulary - 1,
        "pad_token_id": 0,
        "disable_compile": not variant.compiled,
        "custom_generate": variant.custom(),
    }
    if variant.static:
        given["cache_implementation"] = "static"

    def run() -> Any:
        torch.manual_seed(0)
        return model.generate(**given)

    return run


def trace(run: Callable[[], Any], path: Path) -> None:
    """A profile in Chrome's format, which shows the two streams."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    path.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(path))


def measure(
    model: Any,
    name: str,
    batch: int,
    options: argparse.Namespace,
    references: dict[tuple[int, bool], Any] | None = None,
) -> dict[str, Any]:
    """One line of the table: the median of the runs, in milliseconds per token. ``references`` are
    the tokens of stock for other variants of the model, by batch and whether caches are static."""
    variant = variants()[name]
    run = generation(model, variant, batch, options)
    key, references = (batch, variant.static), {} if references is None else references
    if key not in references:
        stock = Variant(variant.static, False, lambda: None)
        references[key] = generation(model, stock, batch, options)()
    reference = references[key]
    tokens = run()
    result = {"model": options.model, "variant": name, "batch": batch, "dtype": options.dtype}
    same = tokens.shape == reference.shape and torch.equal(tokens, reference)
    if not same and not variant.compiled:
        return {**result, "error": "tokens differ from those of stock on the same cache"}
    run()
    seconds = [seconds_of(run, model.device) for _ in range(options.runs)]
    new = tokens.shape[1] - options.prompt
    if options.trace is not None:
        trace(run, options.trace / f"{name}-{batch}.json")
    return {
        **result,
        "tokens": new,
        "ms_per_token": statistics.median(seconds) / new * 1e3,
        "ms_per_token_each": [s / new * 1e3 for s in seconds],
        "tokens_equal_stock": same,
    }


def seconds_of(run: Callable[[], Any], device: torch.device) -> float:
    """Seconds of ``run``, with all that it has launched."""
    started = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started
