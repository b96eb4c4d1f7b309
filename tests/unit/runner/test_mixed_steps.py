"""Steps with prefill chunks as graphs: one for each token bucket, all counts in the packet.

On the CPU a device that keeps shapes as a capturing one does, and warms up on empty packets, runs
them; on a GPU they are captured.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from megatron_async.build.model import load_model
from megatron_async.device.cpu import CpuDevice
from megatron_async.device.protocol import Graph
from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.runner.cuda_graphs import MIXED, StepGraphs, token_buckets
from megatron_async.runner.prompt_log_probs import PromptTargets
from megatron_async.sampling_params import SamplingParams
from megatron_async.step.packet import PacketLayout, StepShape, write_control, write_packet
from megatron_async.step.plan import (
    Admission,
    BlockAssignment,
    Plan,
    PrefillChunk,
    RowMap,
    SlotUpdate,
)
from tests.support.engines import DEPTHS, config_at, hash_engine, random_ask, sampling_params
from tests.support.oracle import decode_alone

pytestmark = pytest.mark.sweep

WARM_UP_RUNS = 2


class FixedShapesDevice(CpuDevice):
    """A CPU that no device value may steer, and that counts what it captures and replays."""

    captures = True

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.captured: Counter[str] = Counter()
        self.enqueued: Counter[str] = Counter()
        self.rings: list[Any] = []

    def capture(self, work: Callable[[], None], name: str, *, has_run: bool = False) -> Graph:
        for _ in range(0 if has_run else WARM_UP_RUNS):
            super().enqueue(work, name)
            self.synchronize()
            for ring in self.rings:
                ring._consumed = ring._published = 0
        self.captured[name] += 1
        return super().capture(work, name, has_run=has_run)

    def enqueue(self, work: Callable[[], None], name: str) -> None:
        self.enqueued[name] += 1
        super().enqueue(work, name)

    def packet_ring(self, entries: int, width: int) -> Any:
        self.rings.append(super().packet_ring(entries, width))
        return self.rings[-1]

    def result_ring(self, entries: int, width: int, *, of_steps: bool = True) -> Any:
        self.rings.append(super().result_ring(entries, width, of_steps=of_steps))
        return self.rings[-1]


@pytest.mark.parametrize("max_tokens", (1, 64, 65, 300, 1088, 8448, 100_003))
def test_token_buckets_hold_all_counts_with_little_padding(max_tokens: int) -> None:
    buckets = token_buckets(max_tokens, captures=True)
    assert buckets == sorted(set(buckets))
    assert max_tokens <= buckets[-1] < max_tokens + 8
    for small, large in zip([0, *buckets], buckets, strict=False):
        assert large % 8 == 0
        assert large - small <= max(64, large // 5)
    assert len(buckets) < 45


def test_packets_of_a_shape_are_written_to_the_end() -> None:
    """Nothing of an entry's last packet is left in what a graph of the shape reads."""
    layout = PacketLayout(max_rows=4, max_tokens=24, max_assignments=9, slot_count=9)
    rows = RowMap((3, 5, 6), (0, 0, 0), (1, 2, 3))
    chunks = (PrefillChunk(1, 5, 8, (11, 12, 13), False), PrefillChunk(2, 6, 0, (7,), True))
    admission = Admission(6, (0, 40, 0, (2,), 0.5, 3, 0.25, -9))
    plan = Plan(0, rows, 1, (BlockAssignment(6, 0, 17),), chunks, (admission,))
    packets = []
    for garbage in (-77, 0):
        packet = np.full(layout.width, garbage, dtype=np.int32)
        write_packet(packet, layout, plan, 4, 16, null_slot=9)
        packets.append(packet[: layout.tokens + 16 * 3])
    assert np.array_equal(*packets)
    table = packets[0][layout.chunks : layout.assignments].reshape(-1, 4)
    assert table.tolist() == [[5, 1, 3, 8], [6, 4, 1, 0], [9, 16, 0, 0], [9, 16, 0, 0]]


def test_control_packets_are_written_to_the_end() -> None:
    layout = PacketLayout(max_rows=2, max_tokens=8, max_assignments=4, slot_count=5)
    updates = (SlotUpdate(3, True, None), SlotUpdate(1, False, (0.5, 3, 0.25, -9)))
    packets = []
    for garbage in (-77, 0):
        packet = np.full(layout.control_size, garbage, dtype=np.int32)
        write_control(packet, layout, updates, null_slot=5)
        packets.append(packet)
    assert np.array_equal(*packets)
    heads = packets[0].reshape(5, -1)[:, :3]
    assert heads.tolist() == [[3, 1, 0], [1, 0, 1], [5, 0, 0], [5, 0, 0], [5, 0, 0]]


@pytest.mark.parametrize("capture", (True, False))
@pytest.mark.parametrize("depth", DEPTHS)
def test_fixed_shapes_give_the_oracles_tokens(depth: int, capture: bool) -> None:
    rng = random.Random(depth)
    asks = [random_ask(rng, max_prompt=90) for _ in range(60)]
    device = FixedShapesDevice()
    with hash_engine(
        depth,
        device=device,
        max_requests=10,
        block_size_tokens=4,
        block_count=150,
        prefill_chunk_tokens=32,
        capture_mixed_steps=capture,
    ) as engine:
        requests = engine.generate(
            [list(a.prompt) for a in asks], [sampling_params(a) for a in asks]
        )
        context = engine.batch
        null = context.null_slot
        engine.device.synchronize()
        assert bool(context.finished[null]) and not context.kv_length[null]
        assert not context.block_table[null].any()
    for ask, request in zip(asks, requests, strict=True):
        assert request.generated_tokens == decode_alone(ask)[0]
    assert device.captured[MIXED] == (3 if capture else 0)
    assert engine.counters.steps_with_prefill > 0
    assert engine.counters.prefill_chunks > len(asks)
    if not capture:
        assert device.enqueued[MIXED] >= engine.counters.steps_with_prefill


def test_progress_counts_every_capture() -> None:
    counts = []

    def progress(steps: Any, count: int) -> Any:
        steps = list(steps)
        counts.append((len(steps), count))
        return steps

    config = config_at(0, max_requests=6, prefill_chunk_tokens=40)
    with DynamicInferenceEngine(
        load_model("tiny", config),
        config,
        device=FixedShapesDevice(),
        progress=progress,
    ):
        pass
    ((seen, announced),) = counts
    assert seen == announced > 4


PROMPTS = [
    "def fibonacci(n):",
    "import os\n\n",
    "x",
    "class Stack:\n    def push(self, item):\n        self.items.append(item)\n\n    def pop(self",
]


graph_counts: dict[int, int] = {}
"""Of the engines of :func:`decode_tiny`, which are closed when it returns."""


def decode_tiny(
    depth: int,
    device: str,
    *,
    count: int = 12,
    fixed_shapes: bool = False,
    dtype: str = "float32",
    **values: Any,
) -> tuple[list[list[int]], DynamicInferenceEngine]:
    """Tokens of ``count`` requests that come one by one while the others decode."""
    values = {"max_requests": 5, "block_size_tokens": 16, "prefill_chunk_tokens": 24, **values}
    config = config_at(depth, device=device, dtype=dtype, **values)
    engine = DynamicInferenceEngine(
        load_model("tiny", config),
        config,
        device=FixedShapesDevice() if fixed_shapes else None,
    )
    tokens: dict[int, list[int]] = {}
    graph_counts[id(engine)] = engine.runner.graph_count
    with engine:
        for step in range(500):
            if step % 4 == 0 and step // 4 < count:
                index = step // 4
                params = SamplingParams(
                    num_tokens_to_generate=17 + 3 * index,
                    temperature=(0.0, 0.8)[index % 2],
                    seed=index,
                    termination_id=-1,
                )
                engine.add_request(index, PROMPTS[index % 4], params)
            for output in engine.step_modern()["tokens"]:
                tokens.setdefault(output.request_id, []).append(output.token_id)
            if step > 4 * count and not engine.has_unfinished_requests():
                break
    assert [len(tokens[index]) for index in range(count)] == [17 + 3 * i for i in range(count)]
    assert engine.counters.steps_with_prefill >= count
    return [tokens[index] for index in range(count)], engine


@pytest.mark.slow
@pytest.mark.parametrize("batch_invariant", (False, True))
def test_fixed_shapes_change_no_token_of_a_model(batch_invariant: bool) -> None:
    values = {"count": 8, "batch_invariant": batch_invariant}
    expected, _ = decode_tiny(0, "cpu", **values)
    tokens, _ = decode_tiny(2, "cpu", fixed_shapes=True, **values)
    assert tokens == expected


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestOnGpu:
    @pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
    @pytest.mark.parametrize("batch_invariant", (False, True))
    def test_staggered_admissions_give_the_same_tokens_captured_or_not_at_every_depth(
        self, batch_invariant: bool, dtype: str
    ) -> None:
        values = {"dtype": dtype, "batch_invariant": batch_invariant}
        expected, engine = decode_tiny(0, "cuda", capture_mixed_steps=False, **values)
        graphs = graph_counts[id(engine)]
        for depth in DEPTHS:
            tokens, engine = decode_tiny(depth, "cuda", **values)
            assert graph_counts[id(engine)] > graphs
            assert tokens == expected

    def test_captured_steps_give_the_cpus_tokens_in_fp32(self) -> None:
        torch.backends.cuda.matmul.allow_tf32 = False
        assert decode_tiny(1, "cuda")[0] == decode_tiny(0, "cpu")[0]

    def test_captured_steps_with_prefill_do_not_synchronise(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        launched = []
        launch = StepGraphs.launch_mixed

        def watched(self: StepGraphs, shape: StepShape, targets: PromptTargets | None) -> None:
            torch.cuda.set_sync_debug_mode("error")
            try:
                launch(self, shape, targets)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            launched.append(shape)

        monkeypatch.setattr(StepGraphs, "launch_mixed", watched)
        for capture in (True, False):
            launched.clear()
            decode_tiny(2, "cuda", capture_mixed_steps=capture)
            assert len(launched) >= 12
