"""Counters for megatron-core's ``metrics_writer``: the wandb module, or anything with its log()."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

from megatron_async.request import StepReport

if TYPE_CHECKING:
    from megatron_async.megatron_api.context import DynamicInferenceContext

logger = logging.getLogger(__name__)


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
