"""The same load decoded by transformers: ``generate``, and its continuous batching."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import itertools
import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from logging.handlers import BufferingHandler
from typing import Any, ClassVar

import torch

from megatron_async.benchmark.measuring.engines import MOST_PREFILL_TOKENS, free_memory
from megatron_async.benchmark.measuring.loads import Request
from megatron_async.benchmark.measuring.runs import step_figures
from megatron_async.benchmark.progress import Progress
from megatron_async.checkpoint.huggingface.transformers_config import transformers_config
from megatron_async.errors import MegatronAsyncError
from megatron_async.models.description.config import ModelConfig

SKIPPED_STEPS = 8
PAGE_TOKENS = 256
WARM_UP_TOKENS = 12
LIMIT_SECONDS = 300.0
"""A run that takes longer is given up: its thread may hang."""

Requests = list[tuple[list[int], int]]
"""Prompts, and how many tokens to generate."""


class NoBaselineError(MegatronAsyncError):
    """Why there is nothing to compare with."""


def measure_baselines(
    args: argparse.Namespace,
    names: Sequence[str],
    batches: list[list[Request]],
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    found: list[dict[str, Any]],
    progress: Progress,
) -> None:
    """Append to ``found`` what each baseline makes of each batch, and why it does not."""
    progress.bar.total += len(names)
    for name in names:
        progress.bar.set_description(f"baseline {name}")
        results: list[dict[str, Any]] = []
        skipped: list[str] = []
        found.append({"name": name, "results": results, "skipped": skipped})
        baseline: Baseline | None = None
        try:
            baseline = BASELINES[name](config, device, dtype)
            for batch in batches:
                if not batch:
                    skipped.append("there are no lengths to decode: no run of ours succeeded")
                    continue
                requests = [(one.prompt, one.params.num_tokens_to_generate or 0) for one in batch]
                rows, reasons = baseline.measure(requests, args.max_requests or len(requests))
                results += rows
                skipped += [f"batch {len(requests)}: {reason}" for reason in reasons]
        except Exception as error:
            skipped.append(reason_of(error))
        baseline = None
        free_memory()
        progress.keep()
        progress.done(f"baseline {name}: {len(results)} measured, {len(skipped)} not")


def reason_of(error: Exception) -> str:
    """Why there is no measurement: the type of an error of others, and what it says first."""
    first = (str(error).splitlines() or [""])[0]
    return first if isinstance(error, MegatronAsyncError) else f"{type(error).__name__}: {first}"


class Baseline(ABC):
    """A model of transformers with random weights that decodes the load of ``bench``, greedily.

    Raises:
        NoBaselineError: transformers is missing.
        ConfigError: it has no such architecture that we know of.
        Exception: others that transformers raises.
    """

    ways: ClassVar[tuple[str, ...]]
    """In which a load is decoded on a GPU."""

    def __init__(self, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> None:
        if importlib.util.find_spec("transformers") is None:
            raise NoBaselineError("transformers is not installed")
        import transformers

        with torch.device(device):
            factory: Any = transformers.AutoModelForCausalLM
            self._model = factory.from_config(transformers_config(config), dtype=dtype)
        self._model.to(device).eval()
        self._device = device
        self._name = f"transformers {transformers.__version__}"

    def measure(self, requests: Requests, most_rows: int) -> tuple[list[dict[str, Any]], list[str]]:
        """The figures of one load, at most ``most_rows`` requests of it at once, under the names of
        ours: a row for each way that works, and why others do not."""
        rows, reasons = [], []
        for way in self.ways:
            if way == "compiled" and self._device.type == "cpu":
                continue
            try:
                rows.append(self._measure(requests, most_rows, way))
            except Exception as error:
                reasons.append(f"{way}: {reason_of(error)}")
            free_memory()
        return [{"batch": len(requests), **row} for row in rows], reasons

    @abstractmethod
    def _measure(self, requests: Requests, most_rows: int, way: str) -> dict[str, Any]:
        """A row, or an exception."""


class TransformersBaseline(Baseline):
    """``generate`` with a static cache. On a GPU also with its forward compiled, as transformers
    does by default; on a CPU that takes longer than the measurement."""

    ways = ("eager", "compiled")

    def _measure(self, requests: Requests, most_rows: int, way: str) -> dict[str, Any]:
        if not alike(requests):
            raise NoBaselineError("it decodes requests of one length only")
        compiled = way == "compiled"
        started = time.perf_counter()
        self._generate(requests, compiled)
        warm_seconds = time.perf_counter() - started
        ends = self._generate(requests, compiled)
        return {
            "engine": f"{self._name} generate, static cache" + ", compiled" * compiled,
            **_figures(ends[SKIPPED_STEPS:], len(requests)),
            "first_run_seconds": warm_seconds,
        }

    @torch.inference_mode()
    def _generate(self, requests: Requests, compiled: bool) -> list[float]:
        ends: list[float] = []
        new_tokens = requests[0][1]
        going_on = torch.zeros(len(requests), dtype=torch.bool, device=self._device)

        def clock(input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            # generate itself waits for the device once a step, so these times follow the steps.
            ends.append(time.perf_counter())
            return going_on

        ids = torch.tensor([prompt for prompt, _ in requests], device=self._device)
        self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            eos_token_id=None,
            pad_token_id=0,
            cache_implementation="static",
            disable_compile=not compiled,
            stopping_criteria=[clock],
        )
        return ends


class ContinuousBatchingBaseline(Baseline):
    """The ``ContinuousBatchingManager`` without end tokens; synchronous, and asynchronous
    (``use_async_batching``) where it can. Attention is flash attention where its package is
    installed, paged SDPA otherwise."""

    ways = ("synchronous", "asynchronous")

    def __init__(self, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(config, device, dtype)
        from transformers import ContinuousBatchingConfig

        self._known = {field.name for field in dataclasses.fields(ContinuousBatchingConfig)}
        flash = device.type == "cuda" and importlib.util.find_spec("flash_attn") is not None
        # Newer versions page plain SDPA by themselves and say so by an option; before, a manager
        # that is given plain SDPA looks for flash attention on the hub first.
        plain = "sdpa" if "auto_switch_to_flash" in self._known else "paged|sdpa"
        self._attention = "flash_attention_2" if flash else plain
        self._model.set_attn_implementation(self._attention)

    def _measure(self, requests: Requests, most_rows: int, way: str) -> dict[str, Any]:
        if way == "asynchronous" and "use_async_batching" not in self._known:
            raise NoBaselineError("this version of transformers does not have it")
        few = [(prompt, min(new, WARM_UP_TOKENS)) for prompt, new in requests]
        with _errors_logged() as errors, self._manager(requests, most_rows, way) as manager:
            _decode(manager, few, errors)
            seconds, stamps = _decode(manager, requests, errors)
        made = sum(new for _, new in requests)
        row = {
            "engine": f"{self._name} continuous batching, {way}, {self._attention}",
            "seconds": seconds,
            "output_tokens": made,
            "tokens_per_second": made / seconds,
        }
        return row | (_figures(steady_ends(stamps), len(requests)) if alike(requests) else {})

    def _manager(self, requests: Requests, rows: int, way: str) -> Any:
        from transformers import ContinuousBatchingConfig, GenerationConfig

        on_cpu = self._device.type == "cpu"
        longest = max(len(prompt) + new for prompt, new in requests)
        most = max(len(prompt) for prompt, _ in requests)
        wanted = {
            "num_blocks": rows * (math.ceil(longest / PAGE_TOKENS) + 1) + 4 if on_cpu else None,
            "max_batch_tokens": rows + max(most, min(rows * most, MOST_PREFILL_TOKENS)),
            "max_requests_per_batch": rows,
            "allow_block_sharing": False,
            "use_async_batching": way == "asynchronous",
            "auto_switch_to_flash": False,
            "max_memory_percent": None if on_cpu else 0.6,
        }
        greedy = {"do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
        known: dict[str, Any] = {k: v for k, v in wanted.items() if k in self._known}
        return self._model.continuous_batching_context_manager(
            generation_config=GenerationConfig(**greedy, max_new_tokens=longest),
            continuous_batching_config=ContinuousBatchingConfig(**known),
            timeout=30,
        )


BASELINES: dict[str, type[Baseline]] = {
    "transformers": TransformersBaseline,
    "transformers-cb": ContinuousBatchingBaseline,
}


def _decode(
    manager: Any, requests: Requests, errors: list[logging.LogRecord]
) -> tuple[float, list[list[float]]]:
    """Seconds of wall clock, and for each request when its tokens came."""
    started = time.perf_counter()
    names = [
        manager.add_request(prompt, max_new_tokens=new, eos_token_id=-1, record_timestamps=True)
        for prompt, new in requests
    ]
    found: dict[str, Any] = {}
    while len(found) < len(names):
        result = manager.get_result(timeout=1)
        if result is None:
            late = time.perf_counter() - started > LIMIT_SECONDS
            if late or not manager.is_running():
                why = f"silent for {LIMIT_SECONDS:.0f} s" if late else "its thread ended"
                why = errors[0].getMessage().partition("\n")[0] if errors else why
                raise NoBaselineError(f"{len(found)} of {len(names)} requests ended: {why}")
        elif result.error is not None:
            raise NoBaselineError(f"a request failed: {result.error}")
        elif result.is_finished():
            found[result.request_id] = result
    seconds = time.perf_counter() - started
    for name, (_, new) in zip(names, requests, strict=True):
        made = len(found[name].generated_tokens)
        if made != new:
            raise NoBaselineError(f"a request has {made} tokens, not {new}")
    return seconds, [list(found[name].timestamps) for name in names]


@contextlib.contextmanager
def _errors_logged() -> Iterator[list[logging.LogRecord]]:
    """Collects what transformers logs as errors: its thread does not raise them."""
    handler = BufferingHandler(capacity=1000)
    handler.setLevel(logging.ERROR)
    loggers = [logging.getLogger(name) for name in ("transformers", "ContinuousBatchingLogger")]
    for one in loggers:
        one.addHandler(handler)
    try:
        yield handler.buffer
    finally:
        for one in loggers:
            one.removeHandler(handler)


def alike(requests: Requests) -> bool:
    """Whether all are of the same lengths."""
    return len({(len(prompt), new) for prompt, new in requests}) == 1


def steady_ends(stamps: list[list[float]]) -> list[float]:
    """When steps ended in which all requests decoded: the tokens of the one that started last,
    until the first ends, some steps at the beginning left out."""
    last = max(stamps, key=lambda times: times[0])
    until = min(times[-1] for times in stamps)
    return [time for time in last if time <= until][SKIPPED_STEPS:]


def _figures(ends: Sequence[float], batch_size: int) -> dict[str, Any]:
    """Figures of steps that ended at these times, in seconds."""
    steps = [1e3 * (after - before) for before, after in itertools.pairwise(ends)]
    if not steps:
        raise NoBaselineError("too few steps; raise --new-tokens")
    return step_figures(steps, batch_size)
