"""The baseline that is closest to this engine: continuous batching of transformers."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import logging
import math
import time
from typing import Any

import torch

from megatron_async.models.config import ModelConfig

from .bench_baseline import (
    SKIPPED_STEPS,
    NoBaselineError,
    Requests,
    build_model,
    first_line,
    step_figures,
)
from .bench_engine import MOST_PREFILL_TOKENS, free_memory

PAGE_TOKENS = 256
WARM_UP_TOKENS = 12
LIMIT_SECONDS = 300.0
"""A run that takes longer is given up: its thread may hang."""


class ContinuousBatchingBaseline:
    """A model of transformers with random weights under its ``ContinuousBatchingManager``, greedy,
    no end tokens; synchronous, and asynchronous (``use_async_batching``) where it can.

    Attention is flash attention where its package is installed, paged SDPA otherwise.

    Raises:
        NoBaselineError: this transformers has no such thing, or cannot build the model.
    """

    def __init__(self, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> None:
        if importlib.util.find_spec("transformers") is None:
            raise NoBaselineError("transformers is not installed")
        try:
            from transformers import ContinuousBatchingConfig, GenerationConfig
        except ImportError as error:
            raise NoBaselineError(f"no continuous batching: {first_line(error)}") from None
        self._config_type: Any = ContinuousBatchingConfig
        self._generation_type: Any = GenerationConfig
        self._known = {field.name for field in dataclasses.fields(ContinuousBatchingConfig)}
        flash = device.type == "cuda" and importlib.util.find_spec("flash_attn") is not None
        # Newer versions page plain SDPA by themselves and say so by an option; before, a manager
        # that is given plain SDPA looks for flash attention on the hub first.
        plain = "sdpa" if "auto_switch_to_flash" in self._known else "paged|sdpa"
        self._attention = "flash_attention_2" if flash else plain
        self._device = device
        self._model, self.version = build_model(config, device, dtype, self._attention)
        self.reasons: list[str] = []

    def measure(self, requests: Requests, most_rows: int) -> list[dict[str, Any]]:
        """The figures of one batch or ragged load, at most ``most_rows`` of them at once: a row
        for each way that works.

        Raises:
            NoBaselineError: neither does; the reasons of both.
        """
        rows: list[dict[str, Any]] = []
        reasons = []
        for asynchronous in (False, True):
            way = "asynchronous" if asynchronous else "synchronous"
            try:
                rows.append(self._measure(requests, most_rows, way, asynchronous))
            except NoBaselineError as reason:
                reasons.append(f"{way}: {reason}")
            free_memory()
        if not rows:
            raise NoBaselineError("; ".join(reasons))
        self.reasons += [f"batch {len(requests)}: {reason}" for reason in reasons]
        return rows

    def close(self) -> None:
        """Free the model."""
        del self._model
        free_memory()

    def _measure(
        self, requests: Requests, most_rows: int, way: str, asynchronous: bool
    ) -> dict[str, Any]:
        if asynchronous and "use_async_batching" not in self._known:
            raise NoBaselineError("this version of transformers does not have it")
        try:
            with (
                _errors_logged() as errors,
                self._manager(requests, most_rows, asynchronous) as manager,
            ):
                few = [(prompt, min(new, WARM_UP_TOKENS)) for prompt, new in requests]
                self._decode(manager, few, errors)
                seconds, stamps = self._decode(manager, requests, errors)
        except NoBaselineError:
            raise
        except Exception as error:
            raise NoBaselineError(first_line(error)) from None
        made = sum(new for _, new in requests)
        row = {
            "batch": len(requests),
            "engine": f"transformers {self.version} continuous batching, {way}, {self._attention}",
            "seconds": seconds,
            "output_tokens": made,
            "tokens_per_second": made / seconds,
        }
        if len({(len(prompt), new) for prompt, new in requests}) == 1:
            row |= step_figures(_steady_ends(stamps), len(requests))
        return row

    def _manager(self, requests: Requests, rows: int, asynchronous: bool) -> Any:
        longest = max(len(prompt) + new for prompt, new in requests)
        most = max(len(prompt) for prompt, _ in requests)
        blocks = rows * (math.ceil(longest / PAGE_TOKENS) + 1) + 4
        wanted = {
            "num_blocks": blocks if self._device.type == "cpu" else None,
            "max_batch_tokens": rows + max(most, min(rows * most, MOST_PREFILL_TOKENS)),
            "max_requests_per_batch": rows,
            "allow_block_sharing": False,
            "use_async_batching": asynchronous,
            "auto_switch_to_flash": False,
            "max_memory_percent": None if self._device.type == "cpu" else 0.6,
        }
        config = self._config_type(**{k: v for k, v in wanted.items() if k in self._known})
        generation = self._generation_type(
            do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=longest
        )
        return self._model.continuous_batching_context_manager(
            generation_config=generation, continuous_batching_config=config, timeout=30
        )

    @staticmethod
    def _decode(
        manager: Any, requests: Requests, errors: list[str]
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
                    silent = f"silent for {LIMIT_SECONDS:.0f} s" if late else "its thread ended"
                    why = errors[0] if errors else silent
                    raise NoBaselineError(f"{len(found)} of {len(names)} requests ended: {why}")
                continue
            if result.error is not None:
                raise NoBaselineError(f"a request failed: {result.error}")
            if result.is_finished():
                found[result.request_id] = result
        seconds = time.perf_counter() - started
        for name, (_, new) in zip(names, requests, strict=True):
            if len(found[name].generated_tokens) != new:
                made = len(found[name].generated_tokens)
                raise NoBaselineError(f"a request has {made} tokens, not {new}")
        return seconds, [list(found[name].timestamps) for name in names]


def _steady_ends(stamps: list[list[float]]) -> list[float]:
    """When steps ended in which all requests decoded: the tokens of the one that started last,
    until the first ends, some steps at the beginning left out."""
    last = max(stamps, key=lambda times: times[0])
    until = min(times[-1] for times in stamps)
    return [time for time in last if time <= until][SKIPPED_STEPS:]


@contextlib.contextmanager
def _errors_logged() -> Any:
    """Collects what transformers logs as errors: its thread does not raise them."""
    errors: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            errors.append((record.getMessage().splitlines() or [""])[0])

    handler = Collect(logging.ERROR)
    logger = logging.getLogger("transformers")
    loggers = [logger, logging.getLogger("ContinuousBatchingLogger")]
    for one in loggers:
        one.addHandler(handler)
    try:
        yield errors
    finally:
        for one in loggers:
            one.removeHandler(handler)
