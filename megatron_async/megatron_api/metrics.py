"""What is measured for megatron-core's names: counters for its ``metrics_writer``, which is the
wandb module or anything with its log(), prefilled tokens, and the capture of graphs."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from megatron_async.request.request import StepReport
from megatron_async.runner.model_runner import Progress
from megatron_async.step.plan import Plan

if TYPE_CHECKING:
    from megatron_async.megatron_api.context import DynamicInferenceContext

logger = logging.getLogger(__name__)


class DecodeOnly(NamedTuple):
    """Whether a step had no prefill: the last one that was launched, and that was committed."""

    launched: bool
    consumed: bool


class MetricsLog:
    """Gives ``writer.log`` a dictionary every ``interval`` committed steps, with megatron-core's
    names. Utilizations are in percent, ``inference/step_time_s`` in seconds since the step before.

    What the writer raises is logged once, and it is not called again: no request fails by it.
    """

    def __init__(self, writer: Any, context: DynamicInferenceContext, interval: int) -> None:
        self._writer = writer
        self._context = context
        self._interval = interval
        self._steps = 0
        self._last = time.perf_counter()
        self._broken = False
        define = getattr(writer, "define_metric", None)
        if define is not None:
            define("inference/*", step_metric="inference/inference_step")

    def on_commit(self, report: StepReport) -> None:
        """A step was committed."""
        self._steps += 1
        before, self._last = self._last, time.perf_counter()
        if self._steps % self._interval or self._broken:
            return
        stats = self._context.get_kvcache_utilization_stats()
        waiting = int(stats.pop("waiting_request_count"))
        metrics: dict[str, int | float] = {
            "inference/inference_step": self._steps,
            "inference/step_time_s": self._last - before,
            "inference/waiting_queue_len": waiting,
            "inference/total_requests_dict_size": waiting + self._context.total_request_count,
        }
        for name, value in stats.items():
            metrics[f"inference/{name}"] = value * 100 if "utilization" in name else value
        try:
            self._writer.log(metrics, commit=True)
        except Exception:
            self._broken = True
            logger.exception("metrics_writer raised, and is not called again")


class PrefilledTokens:
    """Counts the tokens of prefill chunks; ``step_tokens`` are all of the last step."""

    def __init__(self) -> None:
        self.tokens = self.step_tokens = 0

    def on_launch(self, plan: Plan) -> None:
        """A step was launched."""
        self.tokens += plan.num_tokens - plan.decode_rows
        self.step_tokens = plan.num_tokens


class CaptureStats:
    """Measures the capture of graphs: what ``progress`` wraps, if there is any.

    Attributes:
        stats: seconds and bytes; None until graphs were captured on a GPU.
    """

    def __init__(self, progress: Progress | None) -> None:
        self._progress = progress
        self.stats: dict[str, float] | None = None

    def __call__(self, captured: Iterable[int], count: int) -> Iterator[int]:
        started, before = time.perf_counter(), _memory()
        yield from captured if self._progress is None else self._progress(captured, count)
        after = _memory()
        if after is not None and before is not None:
            self.stats = {
                "time": time.perf_counter() - started,
                "allocated_bytes": after[0] - before[0],
                "reserved_bytes": after[1] - before[1],
            }


def _memory() -> tuple[int, int] | None:
    """Bytes allocated and reserved on the current GPU."""
    if not torch.cuda.is_available():
        return None
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
