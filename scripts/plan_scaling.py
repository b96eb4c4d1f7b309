"""What a decode step should cost on more GPUs than were measured, as a table of docs/scaling.md.

    python scripts/plan_scaling.py

A plan on paper. A step on P ranks takes P-th of what the part that they share takes on one GPU, all
of the rest, and what each layer adds: a part that does not shrink, which two GPUs have shown, and
what ranks send each other.
"""

from __future__ import annotations

from typing import NamedTuple

from megatron_async.models.description.config import ModelConfig
from megatron_async.models.description.memory_traffic import (
    expected_experts,
    floor_ms,
    weight_bytes,
)
from megatron_async.models.description.shapes import SHAPES

# Measured on one and on two H100 80GB: the table "Two GPUs" of docs/scaling.md.
BANDWIDTH = 3.03e12
"""Bytes per second of a large copy."""
ONE_GPU_MS = {
    ("llama8b", 1): 5.15, ("llama8b", 32): 5.81, ("llama8b", 64): 6.95, ("llama8b", 128): 9.09,
    ("qwen3-30b-a3b", 32): 19.39,
}  # fmt: skip
TP2_MS = {("llama8b", 1): 2.92, ("llama8b", 32): 3.56, ("llama8b", 128): 5.75}
EP2_MS = {("qwen3-30b-a3b", 32): 11.99}
PROMPT_TOKENS, NEW_TOKENS = 128, 512

# From data sheets.
NVLINK = 450e9
"""Bytes per second that a GPU sends, and as many that it gets, at the same time."""
INFINIBAND = 50e9
"""The same between hosts, where each GPU has an adapter of 400 Gb/s."""

# Assumed, and not measured.
SECOND_STEP_US = 1.8
"""What a sum in two steps waits longer than one in one."""
MESSAGE_US = 10.0
"""From a GPU of one host to one of another, a send and its receive in a graph."""
SUM_US = 30.0
"""The same of a sum over hosts, by NCCL."""

ITEMSIZE, WORD_BYTES = 2, 4
"""Bytes of an element of the stream, and of one that travels with the number of its launch."""
NAMES = {"llama8b": "Llama-8B", "qwen3-30b-a3b": "Qwen3-30B-A3B"}


class Row(NamedTuple):
    """A line of the table; times in milliseconds. ``measured``: where there is one."""

    shape: str
    rows: int
    layout: str
    share: float
    sums: float
    floor: float
    measured: float | None = None

    @property
    def step(self) -> float:
        """What a step should take."""
        return self.share + self.sums

    def line(self) -> str:
        """As Markdown."""
        one = ONE_GPU_MS[self.shape, self.rows]
        step = f"{self.step:.2f}"
        if self.measured is not None:
            step += f" ({self.measured:.2f} measured)"
        cells = [f"{NAMES[self.shape]}, {self.rows}", self.layout, f"{one:.2f}"]
        cells += [f"{self.share:.2f}", f"{self.sums:.2f}", step]
        cells += [f"{one / self.step:.1f}", f"{self.floor / self.step:.0%}".replace("%", " %")]
        return f"| {' | '.join(cells)} |"


HEAD = (
    "| shape, rows | layout | one GPU, ms/step | its share | layers add | step, ms | times | "
    "of the floor |\n|---|---|---|---|---|---|---|---|"
)


def sent_us(ranks: int, elements: int) -> float:
    """Microseconds in which a rank sends its part of a sum, in one step or in two."""
    of_one = 1e6 * WORD_BYTES * elements / NVLINK
    return min((ranks - 1) * of_one, 2 * (ranks - 1) / ranks * of_one + SECOND_STEP_US)


def sum_us(shape: str, ranks: int, rows: int) -> float:
    """Microseconds that a tensor-parallel sum adds, with all that does not shrink between two of
    them: a constant, and a part for each row (the stream and its norms are computed by all). Both
    follow from one row and from 128 on two GPUs."""
    config = SHAPES[shape]

    def unshared(rows: int) -> float:
        added = TP2_MS[shape, rows] - ONE_GPU_MS[shape, rows] / 2
        of_sum = 1e3 * added / (2 * config.num_layers)
        return of_sum - sent_us(2, rows * config.hidden_size)

    of_row = (unshared(128) - unshared(1)) / 127
    constant = unshared(1) - of_row
    return constant + rows * of_row + sent_us(ranks, rows * config.hidden_size)


def tensor(shape: str, ranks: int, rows: int) -> Row:
    """Tensor parallelism on one host."""
    added = 1e-3 * 2 * SHAPES[shape].num_layers * sum_us(shape, ranks, rows)
    measured = TP2_MS.get((shape, rows)) if ranks == 2 else None
    share = ONE_GPU_MS[shape, rows] / ranks
    return Row(shape, rows, f"TP{ranks}", share, added, _floor(shape, rows, tensor=ranks), measured)


def experts(shape: str, ranks: int, rows: int) -> Row:
    """Experts spread over ranks that have copies of all else. What a layer adds on two GPUs, most
    of which are experts that are not chosen alike, stays; over hosts a sum of NCCL comes to it."""
    config = SHAPES[shape]
    elements = rows * config.hidden_size

    def share(ranks: int) -> float:
        spread = _experts_share(config, shape, rows)
        return ONE_GPU_MS[shape, rows] * (1 - spread + spread / ranks)

    unshared = 1e3 * (EP2_MS[shape, rows] - share(2)) / config.num_layers - sent_us(2, elements)
    added = unshared + sent_us(min(ranks, 8), elements)
    layout, measured = f"EP{ranks}", EP2_MS[shape, rows] if ranks == 2 else None
    if ranks > 8:
        added += SUM_US + 1e6 * 2 * ITEMSIZE * elements / INFINIBAND
        layout += f" on {ranks // 8} hosts"
    floor = _floor(shape, rows, expert=ranks)
    return Row(shape, rows, layout, share(ranks), 1e-3 * config.num_layers * added, floor, measured)


def stages(shape: str, rows: int) -> Row:
    """Two hosts of 8 GPUs, each a pipeline stage, with two micro-batches: a turn of both."""
    half = rows // 2
    within = tensor(shape, 8, half)
    message = 1e6 * ITEMSIZE * half * SHAPES[shape].hidden_size / INFINIBAND + MESSAGE_US
    added = within.sums + 2e-3 * message
    floor = _floor(shape, rows, tensor=8, pipeline=2, micro_batches=2)
    return Row(shape, rows, "TP8 x PP2 on 2 hosts", within.share, added, floor)


def _floor(shape: str, rows: int, **layout: int) -> float:
    load = {"batch_size": rows, "prompt_tokens": PROMPT_TOKENS, "new_tokens": NEW_TOKENS}
    return floor_ms(SHAPES[shape], ITEMSIZE, BANDWIDTH, **load, **layout)


def _experts_share(config: ModelConfig, shape: str, rows: int) -> float:
    """The share of what a step reads that is experts."""
    chosen = expected_experts(config, rows)
    read = weight_bytes(config, ITEMSIZE, chosen) - weight_bytes(config, ITEMSIZE, 0.0)
    return 1e3 * read / BANDWIDTH / _floor(shape, rows)


def table() -> str:
    """The table, as Markdown."""
    found = [tensor("llama8b", ranks, rows) for rows in (1, 32, 128) for ranks in (2, 4, 8)]
    found += [experts("qwen3-30b-a3b", ranks, 32) for ranks in (2, 4, 8, 16)]
    found.append(stages("llama8b", 128))
    return "\n".join([HEAD, *(row.line() for row in found)])


if __name__ == "__main__":
    print(table())
