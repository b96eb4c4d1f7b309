"""The steps that ``trace`` records: a steady batch that one request leaves and another joins."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable

from megatron_async.benchmark.drafts import Drafts
from megatron_async.benchmark.measuring.engines import decode_config, start_engine
from megatron_async.benchmark.measuring.loads import Load
from megatron_async.benchmark.model import load_benchmark_model
from megatron_async.device import resolve_device
from megatron_async.errors import ConfigError
from megatron_async.perfetto.events import Recording
from megatron_async.perfetto.recorder import StepRecorder

LEAD_IN = 6
"""Steady steps between the start of the timelines and the first that is shown."""

MOST_PREFILL_TOKENS = 1024
"""Prompt tokens of one forward, where a single prompt is not longer: it is filled before it is
recorded, and fewer shapes are captured."""


class Subject:
    """An engine over the model that the options name, and the requests that it decodes.

    Attributes:
        title: what the trace is called.

    Raises:
        ConfigError: the work exceeds the model's longest sequence, or the device is not there.
        CheckpointError: the model cannot be loaded.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        if args.kernels and resolve_device(args.device).type != "cuda":
            raise ConfigError("--kernels needs a GPU, and the device is the CPU; leave it out")
        # They keep a request running to the last step, whenever it was admitted.
        most_steps = args.batch_size + LEAD_IN + args.steps + 2 * args.depth + 4
        method = args.speculative_method or "mtp"
        drafts = Drafts(args.num_speculative_tokens or 0, method, args.draft_model)
        new_tokens = most_steps * drafts.window
        load = Load(prompt_tokens=args.prompt_tokens, new_tokens=new_tokens)
        what = f"--prompt-tokens {args.prompt_tokens}, --steps {args.steps}, --batch-size "
        what += f"{args.batch_size} and --depth {args.depth}"
        model = load_benchmark_model(args, longest=load.longest, what=what)
        # The one that joins may come before the blocks of the one that left are back.
        config = decode_config(
            model,
            args.batch_size,
            args.depth,
            load,
            drafts,
            most_prefill=MOST_PREFILL_TOKENS,
            spare_rows=1,
        )
        dtype_name = str(model.dtype).removeprefix("torch.")
        self.title = f"{model.name}, {dtype_name}, batch {args.batch_size}, depth {args.depth}"
        self.title += drafts.said
        self._group = model.group
        if self._group is not None:
            self.title += f", {self._group.layout}"
        try:
            self.engine = start_engine(model, config, load).engine
        except BaseException:
            self._end_ranks()
            raise
        self._args = args
        self._requests = load.requests(model.network.vocab_size, args.batch_size + 1)

    def close(self) -> None:
        """Close the engine, and end the ranks of the model."""
        try:
            self.engine.close()
        finally:
            self._end_ranks()

    def _end_ranks(self) -> None:
        if self._group is not None:
            self._group.close()

    def run_once(self) -> None:
        """Decode the whole load unrecorded, so that no kernel is compiled while it is recorded."""
        self._fill()
        self._steps(range(self._args.steps))
        self.engine.reset()

    def record(self, steps: Iterable[int]) -> Recording:
        """Decode the load and record its steps; ``steps`` counts them. What is in flight after the
        last one is committed, so that every ticket is shown to its end."""
        engine = self.engine
        self._fill()
        recorder = StepRecorder(engine, kernels=self._args.kernels)
        for _ in range(LEAD_IN):
            engine.step_modern()
        start_ns = time.perf_counter_ns()
        self._steps(steps)
        engine.suspend()
        recording = recorder.take(self.title, start_ns)
        engine.reset()
        return recording

    def _fill(self) -> None:
        """Start from nothing, and step until every row decodes."""
        self.engine.reset()
        for request_id in range(self._args.batch_size):
            self._add(request_id)
        decoding: set[int] = set()
        while len(decoding) < self._args.batch_size:
            decoding |= {output.request_id for output in self.engine.step_modern()["tokens"]}

    def _steps(self, steps: Iterable[int]) -> None:
        """Request 0 leaves after a third of the steps; one more joins after two thirds, or at once
        where nobody else would decode meanwhile."""
        leaves = self._args.steps // 3
        joins = leaves if self._args.batch_size == 1 else 2 * self._args.steps // 3
        for step in steps:
            if step == leaves:
                self.engine.abort_request(0)
            if step == joins:
                self._add(self._args.batch_size)
            self.engine.step_modern()

    def _add(self, request_id: int) -> None:
        request = self._requests[request_id]
        self.engine.add_request(request_id, request.prompt, request.params)
