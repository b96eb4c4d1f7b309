"""Graphs of a step: for each row bucket and window S alone, H2D -> F, all three in one, and these
behind C, those with an S in them in a plain and in an extended variant; for each token bucket and
window H2D -> F of a step with prefill chunks. Where guided rows draft, also H2D -> F of windows
with what comes between S and it, by itself and behind the extended S."""

from __future__ import annotations

import bisect
import logging
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import TYPE_CHECKING

import torch

from megatron_async.device.protocol import Device, Graph
from megatron_async.models.network import Network
from megatron_async.runner.memory.forward_batch import ForwardBatch
from megatron_async.runner.prompt_log_probs import PromptTargets
from megatron_async.runner.step_program import StepProgram
from megatron_async.step.packet import CPU_ROW_MULTIPLE, StepShape, padded_tokens
from megatron_async.step.plan import SampleShape

if TYPE_CHECKING:
    from megatron_async.kernels.compile_ahead import CompileAhead

logger = logging.getLogger(__name__)

LEAST_TOKENS = 64
"""The smallest token bucket and the least distance of two: with fewer tokens a forward takes as
long, since it waits for the weights."""

MAX_CAPTURED_TOKENS = 4096
"""With more tokens the host launches a step's kernels faster than they run."""

MIXED = "H2D F mixed"
"""How steps with prefill chunks are called in timelines."""


def row_buckets(
    max_requests: int, *, captures: bool, count: int | None, window: int = 1
) -> list[int]:
    """Padded row counts in ascending order; the last one holds ``max_requests`` rows.

    With ``captures``: 1, 2, 4, then multiples of 8 up to 64, then of 32; thinned out to at most
    ``count``. Without: multiples of 8; of rows that bring a ``window`` of several tokens also 1, 2
    and 4, since it is their tokens that are padded (:func:`padded_tokens`).
    """
    if not captures:
        few = [] if window == 1 else [1, 2, 4]
        return few + list(
            range(CPU_ROW_MULTIPLE, padded_tokens(max_requests) + 1, CPU_ROW_MULTIPLE)
        )
    buckets = [b for b in (1, 2, 4, *range(8, 65, 8)) if b < max_requests]
    buckets += [b for b in range(96, max_requests, 32)]
    buckets.append(max_requests)
    if count is not None and count < len(buckets):
        # Keep the largest, and the rest evenly spread.
        step = len(buckets) / count
        buckets = [buckets[len(buckets) - 1 - int(i * step)] for i in range(count)][::-1]
    return buckets


def token_buckets(max_tokens: int, *, captures: bool) -> list[int]:
    """Padded token counts of steps with prefill chunks, ascending; the last one holds
    ``max_tokens`` tokens.

    With ``captures``: multiples of 64 up to 512, of 128 up to 1024, of 256 up to 2048 and so on,
    so that of more than 512 tokens less than a fifth is padding. Without: multiples of 8.
    """
    top = padded_tokens(max_tokens)
    if not captures:
        return list(range(CPU_ROW_MULTIPLE, top + 1, CPU_ROW_MULTIPLE))
    buckets = []
    tokens = LEAST_TOKENS
    while tokens < top:
        buckets.append(tokens)
        # A quarter of the power of two that it has reached.
        tokens += max(LEAST_TOKENS, (1 << tokens.bit_length()) // 8)
    return [*buckets, top]


class StepGraphs:
    """The captured shapes of one :class:`StepProgram`.

    Args:
        buckets: padded row counts, see :func:`row_buckets`.
        token_buckets: padded token counts of steps with prefill chunks.
        windows: those that steps may have, ascending from 1.
        extended: the variants of S.
        capture_mixed: capture those steps too, up to MAX_CAPTURED_TOKENS tokens. The others
            launch the same kernels one by one.
        between: work between S and H2D of guided windows; None where there are none.
    """

    def __init__(
        self,
        device: Device,
        program: StepProgram,
        buckets: list[int],
        token_buckets: list[int],
        windows: tuple[int, ...],
        *,
        extended: tuple[bool, ...],
        capture_mixed: bool,
        between: Callable[[], None] | None = None,
    ) -> None:
        self.buckets = buckets
        self.token_buckets = token_buckets
        self._captured_tokens = []
        if capture_mixed and device.captures:
            self._captured_tokens = [t for t in token_buckets if t <= MAX_CAPTURED_TOKENS]
        self._device = device
        self._program = program
        self._extended = extended
        self._windows = windows
        self._sample: dict[SampleShape, Graph] = {}
        self._forward: dict[tuple[int, int], Graph] = {}
        self._step: dict[SampleShape, Graph] = {}
        self._controlled_step: dict[SampleShape, Graph] = {}
        self._between = between
        self._guided_forward: dict[tuple[int, int], Graph] = {}
        self._guided_step: dict[SampleShape, Graph] = {}
        self._control: Graph | None = None
        self._mixed: dict[tuple[int, int], Graph] = {}

    def bucket(self, rows: int) -> int:
        """The smallest bucket that holds ``rows`` rows."""
        return self.buckets[bisect.bisect_left(self.buckets, rows)]

    def mixed_shape(self, rows: int, tokens: int, window: int) -> StepShape:
        """The shape of a step with prefill chunks. Where shapes are captured its rows follow from
        its tokens, so that there is one graph for each token bucket."""
        tokens = self.token_buckets[bisect.bisect_left(self.token_buckets, tokens)]
        # Elsewhere it is the rows of logits that are padded.
        captures = self._device.captures
        rows = min(tokens, self.buckets[-1]) if captures else padded_tokens(rows)
        return StepShape(self.bucket(rows), tokens, window)

    @property
    def capture_count(self) -> int:
        """How often :meth:`capture` yields."""
        return (len(self.buckets) + len(self._captured_tokens)) * len(self._windows)

    @property
    def graph_count(self) -> int:
        """Graphs that :meth:`capture` makes: for each row bucket and window H2D -> F and three of
        each variant of S, and a further S for windows below the largest; two of guided windows;
        for each token bucket and window one of steps with prefill chunks; and C."""
        windows = len(self._windows)
        of_bucket = windows + (4 * windows - 1) * len(self._extended)
        if self._between is not None:
            of_bucket += 2 * (windows - 1)
        return of_bucket * len(self.buckets) + len(self._captured_tokens) * windows + 1

    def compile(self, model: Network, batch: ForwardBatch) -> None:
        """Have the kernels of all steps compiled, side by side where that can be known ahead.
        Nothing may be in flight.

        Args:
            model: what the program runs.
        """
        rows = sorted({count * window for count in self.buckets for window in self._windows})
        if self._device.torch_device.type != "cuda":
            model.prepare(rows, batch)
            return
        from megatron_async.kernels.compile_ahead import CompileAhead, can_rehearse

        rehearses = self._program.can_be_rehearsed and can_rehearse()
        filled = torch.cuda.current_stream(self._device.torch_device).record_event()
        with CompileAhead(self._device.torch_device) as ahead:
            ahead.compile(model.kernels_of(rows, batch))
            if rehearses:
                self._rehearse(ahead, model, self._launch_around_the_model, filled)
            model.prepare(rows, batch)
            if rehearses:
                self._rehearse(ahead, model, self._launch_decode_forwards, filled)

    def _rehearse(
        self,
        ahead: CompileAhead,
        model: Network,
        launch: Callable[[], None],
        filled: torch.cuda.Event,
    ) -> None:
        """What fails here fails again when it is captured, and is said there."""
        try:
            few = self._program.running(model.shortened())
            with self._device.inline(), ahead.rehearsal(), few:
                # New memory is filled on another stream, where weights may be drawn for seconds.
                torch.cuda.current_stream().wait_event(filled)
                launch()
        except Exception as error:
            logger.info("some kernels are not compiled ahead: %s", error)

    def _launch_decode_forwards(self) -> None:
        for rows, window in product(self.buckets, self._windows):
            self._program.forward_decode(rows, window)

    def _launch_around_the_model(self) -> None:
        """Launch what decode steps do around the model, and some steps with prefill chunks."""
        program = self._program
        for rows, window in product(self.buckets, self._windows):
            for extended in self._extended:
                program.rehearse_sampling(rows, window, extended=extended)
            program.load_decode(rows, window)
        program.load_control()
        if not program.rehearses_mixed:
            return
        # Tiles follow the tokens, in steps of powers of two.
        for tokens in self._captured_tokens:
            if tokens == tokens & -tokens or tokens == self._captured_tokens[-1]:
                for window in self._windows:
                    self._mixed_work(self.mixed_shape(0, tokens, window))

    def capture(self) -> Iterator[int]:
        """Capture bucket after bucket, the largest first (it sizes the shared memory pool);
        yields each when it is done. Nothing may be in flight."""
        windows = self._windows[::-1]
        for tokens, window in product(reversed(self._captured_tokens), windows):
            work = partial(self._mixed_work, self.mixed_shape(0, tokens, window))
            self._mixed[tokens, window] = self._device.capture(work, MIXED)
            yield tokens
        self._control = self._device.capture(self._program.load_control, "C")
        for rows, window in product(reversed(self.buckets), windows):
            self._capture_rows(rows, window)
            yield rows

    def _capture_rows(self, rows: int, window: int) -> None:
        """The graphs of decode steps of a window, and of what follows a step of it."""
        capture = self._device.capture
        self._forward[rows, window] = capture(partial(self._forward_work, rows, window), "H2D F")
        for extended in self._extended:
            of = SampleShape(rows, window, window - 1, extended)
            s = ("T" if self._program.takes_samples else "S") + ("+" if extended else "")
            # The next window is the same one, or the largest.
            for drafts in {window - 1, self._windows[-1] - 1}:
                alone = of._replace(drafts=drafts)
                self._sample[alone] = capture(partial(self._sample_work, alone), s)
            # C, S and H2D -> F have run in these shapes.
            self._step[of] = capture(partial(self._step_work, of), f"{s} H2D F", has_run=True)
            controlled = partial(self._controlled_work, of)
            self._controlled_step[of] = capture(controlled, f"C {s} H2D F", has_run=True)
        if self._between is not None and window > 1:
            self._capture_guided(self._between, SampleShape(rows, window, window - 1, True))

    def _capture_guided(self, between: Callable[[], None], of: SampleShape) -> None:
        """The graphs of decode steps of a window that guided rows have."""
        forward = partial(self._forward_work, of.rows, of.window, between)
        self._guided_forward[of.rows, of.window] = self._device.capture(forward, "H2D F")
        s = "T+" if self._program.takes_samples else "S+"
        step = partial(self._step_work, of, between)
        self._guided_step[of] = self._device.capture(step, f"{s} H2D F", has_run=True)

    def control(self) -> Graph:
        """C alone, in front of steps that replay more than one graph."""
        assert self._control is not None
        return self._control

    def sample(self, shape: SampleShape) -> Graph:
        """S of the pending logits."""
        return self._sample[shape]

    def forward(self, rows: int, window: int) -> Graph:
        """H2D -> F of a decode step."""
        return self._forward[rows, window]

    def step(self, sampled: SampleShape, *, controlled: bool) -> Graph:
        """S -> H2D -> F: the full decode iteration, when rows and window are those of the step
        before, which is sampled; with control C -> S -> H2D -> F."""
        return (self._controlled_step if controlled else self._step)[sampled]

    def guided_forward(self, rows: int, window: int) -> Graph:
        """:meth:`forward` with what comes between S and it; a window of several tokens."""
        return self._guided_forward[rows, window]

    def guided_step(self, sampled: SampleShape) -> Graph | None:
        """:meth:`step` with the same; None where S is another one than that of such windows."""
        return self._guided_step.get(sampled)

    def launch_mixed(self, shape: StepShape, targets: PromptTargets | None) -> None:
        """H2D -> F of a step with prefill chunks, from its graph if it has one. There is none for
        steps with log-probabilities of prompts."""
        graph = self._mixed.get((shape.tokens, shape.window)) if targets is None else None
        if graph is not None:
            graph.replay()
        else:
            self._device.enqueue(partial(self._mixed_work, shape, targets), MIXED)

    def release(self) -> None:
        """Drop all graphs: on the CPU what they replay refers back to this object."""
        for graphs in (
            self._sample, self._forward, self._step, self._controlled_step, self._mixed,
            self._guided_forward, self._guided_step,
        ):  # fmt: skip
            graphs.clear()
        self._control = self._between = None

    def _mixed_work(self, shape: StepShape, targets: PromptTargets | None = None) -> None:
        self._program.load_mixed(shape)
        self._program.forward_mixed(shape, targets)

    def _forward_work(
        self, rows: int, window: int, between: Callable[[], None] | None = None
    ) -> None:
        if between is not None:
            between()
        self._program.load_decode(rows, window)
        self._program.forward_decode(rows, window)

    def _sample_work(self, sampled: SampleShape) -> None:
        self._program.sample(sampled)
        self._program.finish_sends()

    def _step_work(self, sampled: SampleShape, between: Callable[[], None] | None = None) -> None:
        self._program.sample(sampled)
        self._forward_work(sampled.rows, sampled.window, between)
        self._program.finish_sends()

    def _controlled_work(self, sampled: SampleShape) -> None:
        self._program.load_control()
        self._step_work(sampled)
